"""Figure 3: the logits are the model's own, memory is where it stands in the prompt, curves say what they average."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agent.records import SOFT_MARK, Episode, StepRecord
from eval.paper.attention import (
    Attention,
    attention_at,
    curves,
    executor_prompt,
    last_token_logits,
    memory_positions,
)
from executor.hf import FrozenExecutor
from executor.prompt import ExecutorRequest, MemoryBlock, executor_text
from executor.records import FULL_VIEW
from lm.backbone import Backbone
from lm.prefixes import PrefixCache
from lm.prompt import Prompt
from soft_mem.projector import inject
from tests import tiny_models
from zoo.models import make_compiler, make_processor

GROUPED: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
MODELS = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def text_executor(kind: str, **settings: Any) -> FrozenExecutor:
    torch.manual_seed(0)
    config, model = {**MODELS, "mistral": (MistralConfig, MistralForCausalLM)}[kind]
    tokenizer = tiny_models.tokenizer()
    made = model(config(vocab_size=len(tokenizer), **GROUPED, **settings))
    return FrozenExecutor(Backbone(made, tokenizer), reads=FULL_VIEW)


def own_weights(executor: FrozenExecutor, prompt: Prompt) -> torch.Tensor:
    """(layers, heads, T): the last token's attention as transformers reports it under eager attention."""
    model = executor.model
    before = model.config.get_text_config()._attn_implementation
    model.set_attn_implementation("eager")
    batch = executor.backbone.pad([prompt], "right")
    embeddings = model.get_input_embeddings()(batch.tokens)
    if prompt.soft is not None:
        embeddings = inject(embeddings, batch.tokens, executor.placeholder, prompt.soft[None])
    seen = {**batch.vision, "position_ids": batch.positions} if executor.backbone.is_vlm else {}
    with torch.no_grad():
        out = model(inputs_embeds=embeddings, attention_mask=batch.mask, output_attentions=True, **seen)
    model.set_attn_implementation(before)
    return torch.stack([layer[0, :, -1] for layer in out.attentions])


def request(image: Image.Image | None = None, soft: bool = True) -> ExecutorRequest:
    torch.manual_seed(1)
    delivered = MemoryBlock("", "now: find mug", "go to shelf 1", "it was there", torch.randn(4, 64) if soft else None)
    return ExecutorRequest("put a mug in cabinet", delivered, ("look",), "You see nothing.", ("look",), image)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("soft", [True, False])
def test_softmax_of_our_logits_is_the_model_s_attention(kind: str, soft: bool) -> None:
    executor = text_executor(kind)
    prompt = executor.encode(request(soft=soft))
    logits = last_token_logits(executor, prompt)
    assert logits.shape == (3, 4, len(prompt.ids))
    torch.testing.assert_close(logits.softmax(-1), own_weights(executor, prompt), atol=1e-4, rtol=1e-4)
    assert logits.softmax(-1).std() > 1e-3  # weights that are not all alike, or the comparison would show nothing


def test_the_same_for_an_executor_that_sees() -> None:
    torch.manual_seed(0)
    tokenizer = tiny_models.tokenizer()
    executor = FrozenExecutor(Backbone(make_compiler(tokenizer, hidden=64, layers=2), make_processor(tokenizer)))
    prompt = executor.encode(request(Image.new("RGB", (64, 64), (200, 40, 40))))
    assert prompt.pictures
    ours = last_token_logits(executor, prompt).softmax(-1)
    torch.testing.assert_close(ours, own_weights(executor, prompt), atol=1e-4, rtol=1e-4)


def test_a_prompt_that_continues_another_is_read_behind_it() -> None:
    whole, behind = text_executor("llama"), text_executor("llama")
    behind.prefixes = PrefixCache(10)
    first = behind.encode(request())
    longer = replace(first, ids=(*first.ids, *first.ids[:5], *first.ids[:3]))
    last_token_logits(behind, first)
    assert behind.prefixes.find(behind.backbone, longer).tokens == len(first.ids)
    torch.testing.assert_close(
        last_token_logits(behind, longer), last_token_logits(whole, longer), atol=1e-4, rtol=1e-4
    )


def test_looking_leaves_the_model_as_it_was() -> None:
    executor = text_executor("qwen2")
    before = executor.model.config._attn_implementation
    candidates = [("look", "go to shelf 1")]
    prompt = executor.encode(request())
    scores = executor.candidate_logprobs([prompt], candidates)[0]
    last_token_logits(executor, prompt)
    assert executor.model.config._attn_implementation == before
    assert torch.equal(executor.candidate_logprobs([prompt], candidates)[0], scores)


def test_attention_that_is_not_full_is_refused_and_the_model_restored() -> None:
    executor = text_executor("mistral", sliding_window=4)
    with pytest.raises(ValueError, match="full attention"):
        last_token_logits(executor, executor.encode(request()))
    assert executor.model.config._attn_implementation != "memcompiler_recording_logits"


# records --------------------------------------------------------------------------------------------------------------


def recorded(executor: FrozenExecutor, delivery: str, soft: torch.Tensor | None = None, **step: Any) -> Episode:
    """One step under a delivery, its prompt encoded as `run_episode` would."""
    episode = Episode("t", "put a mug in cabinet", "home 1", "test", "", "", delivery, 0, memory_text="go to shelf 1")
    at = StepRecord(0, "You see a mug 1.", None, ("look",), "goal: put\nnow: find mug", **step)
    episode.steps.append(at)
    delivered = {
        "none": MemoryBlock(),
        "static": MemoryBlock(memory=episode.memory_text),
        "compiled": MemoryBlock("", "now: find mug", at.guidance, at.reason, soft),
    }[delivery]
    asked = ExecutorRequest("in home 1: put a mug in cabinet", delivered, (), at.observation, at.admissible)
    at.executor_prompt_ids = executor.encode(asked).ids
    at.executor_prompt = executor_text(asked, SOFT_MARK)
    return episode


def words(executor: FrozenExecutor, episode: Episode, places: list[int]) -> str:
    return executor.tokenizer.decode([episode.steps[0].executor_prompt_ids[i] for i in places]).strip()


def test_pasted_memory_is_all_of_it_and_nothing_else() -> None:
    executor = text_executor("qwen2")
    episode = recorded(executor, "static")
    found = memory_positions(executor, episode, 0)
    assert set(found) == {"memory", "text"} and words(executor, episode, found["text"]) == "go to shelf 1"
    assert executor_prompt(executor, episode, 0, None).ids == episode.steps[0].executor_prompt_ids


def test_compiled_memory_is_guidance_reason_and_soft_tokens() -> None:
    executor = text_executor("qwen2")
    soft = torch.randn(4, 64)
    told = {"emission_kind": "EXPERIENCE", "guidance": "open cabinet 2", "reason": "the mug was there"}
    episode = recorded(executor, "compiled", soft, **told)
    found = memory_positions(executor, episode, 0)
    assert words(executor, episode, found["text"]) == "the mug was there | open cabinet 2"
    assert [episode.steps[0].executor_prompt_ids[i] for i in found["soft"]] == [executor.placeholder] * 4
    assert found["memory"] == sorted(found["text"] + found["soft"])
    quiet = recorded(executor, "compiled", soft, emission_kind="NOACTION")
    assert set(memory_positions(executor, quiet, 0)) == {"memory", "soft"}


def test_one_step_s_mean_is_over_the_memory_tokens_alone() -> None:
    executor = text_executor("qwen2")
    soft = torch.randn(4, 64)
    episode = recorded(executor, "compiled", soft, emission_kind="EXPERIENCE", guidance="open cabinet 2")
    got = attention_at(executor, episode, 0, soft)
    places = memory_positions(executor, episode, 0)
    logits = last_token_logits(executor, executor_prompt(executor, episode, 0, soft))
    assert got is not None and got.tokens == len(places["memory"])
    for channel in ("memory", "text", "soft"):
        assert got.logit[channel] == pytest.approx(logits[:, :, places[channel]].mean().item(), abs=1e-6)
    assert got.share["memory"] == pytest.approx(got.share["text"] + got.share["soft"], abs=1e-6)
    other = attention_at(executor, episode, 0, -soft)
    assert other is not None and other.logit["soft"] != pytest.approx(got.logit["soft"], abs=1e-3)


def test_no_memory_is_no_point_and_another_prompt_is_an_error() -> None:
    executor = text_executor("qwen2")
    nothing = recorded(executor, "none")
    assert attention_at(executor, nothing, 0, None) is None
    episode = recorded(executor, "static")
    episode.steps[0].observation = "You see a cup 1."
    with pytest.raises(ValueError, match="not the recorded one"):
        executor_prompt(executor, episode, 0, None)


def at(t: int, value: float) -> Attention:
    return Attention(t, {"memory": value}, {"memory": value / 10}, 5)


def test_curves_average_over_the_episodes_that_got_so_far() -> None:
    """1, 2, 3 and 5: means 3, 2, 3 at steps 0, 1, 2; the long episode's own trend is +1 a step."""
    made = curves([[at(0, 1.0), at(1, 2.0), at(2, 3.0)], [at(0, 5.0)]])
    points = made["logit"]["memory"]["by_step"]
    assert [(p["t"], p["mean"], p["n"]) for p in points] == [(0, 3.0, 2), (1, 2.0, 1), (2, 3.0, 1)]
    assert points[0]["low"] == 1.0 and points[0]["high"] == 5.0
    assert made["logit"]["memory"]["slope"]["mean"] == pytest.approx(1.0) and made["episodes"] == 2
    assert made["share"]["memory"]["slope"]["mean"] == pytest.approx(0.1) and made["steps_with_memory"] == 4
    with pytest.raises(ValueError, match="no step shows memory"):
        curves([[], []])
