"""The executor in vLLM is the one in Hugging Face: answers, likelihoods and choices, with and without soft tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from executor.frozen import FrozenExecutor
from executor.grounding import Grounding
from executor.prompt import Delivered, ExecutorRequest
from executor.served import VllmExecutor
from tests import vllm_engines

pytestmark = vllm_engines.marks

COMMANDS = ("go to shelf 1", "go to cabinet 2", "open cabinet 2", "take mug 1 from shelf 1", "look", "go to shelf 2")


def pair(**kwargs: Any) -> tuple[VllmExecutor, FrozenExecutor]:
    """Ours and the reference."""
    theirs = FrozenExecutor.load(vllm_engines.folder(False), torch.float32, "cpu", **kwargs)
    folder = vllm_engines.folder(False)
    return VllmExecutor(vllm_engines.engine(False, "executor"), theirs.tokenizer, folder, **kwargs), theirs


def request(i: int = 0, soft: bool = True, scale: float = 1.0) -> ExecutorRequest:
    tokens = scale * torch.randn(4, 64, generator=torch.Generator().manual_seed(i)) if soft else None
    delivered = Delivered(
        memory="in home 1: put a mug in shelf\n" * 4, state="now: find mug", guidance=f"go to shelf {i}", soft=tokens
    )
    return ExecutorRequest(
        "put a mug in cabinet", delivered, ("look",) * i, "You see nothing.", COMMANDS[: 3 + i % 4]
    )  # fmt: skip


def requests() -> list[ExecutorRequest]:
    return [request(i, soft=i != 1) for i in range(4)]


def recorded(executor: VllmExecutor) -> list[Any]:
    """vLLM's outputs of every request from now on."""
    seen, run = [], executor._run

    def spy(prompts, params):
        outputs = run(prompts, params)
        seen.extend(outputs)
        return outputs

    executor._run = spy  # type: ignore[method-assign]
    return seen


def test_likelihoods_and_choices_equal_hugging_face() -> None:
    ours, theirs = pair()
    prompts = [theirs.encode(r) for r in requests()]
    names = [r.admissible for r in requests()]
    for a, b in zip(ours.likelihoods(prompts, names), theirs.likelihoods(prompts, names), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-5)
    assert ours.act(requests()) == theirs.act(requests())


def test_commands_in_the_prefix_cache_are_scored_again() -> None:
    """A prompt that ends just before a block does: the next block's first tokens decide which commands are cached."""
    ours, theirs = pair()
    asked = request(0)
    while len(theirs.encode(asked).ids) % vllm_engines.BLOCK != vllm_engines.BLOCK - 2:
        asked = replace(asked, observation=asked.observation + " look")
    prompt = theirs.encode(asked)
    (reference,) = theirs.likelihoods([prompt], [COMMANDS])
    ours.likelihoods([prompt], [COMMANDS])
    seen = recorded(ours)
    (again,) = ours.likelihoods([prompt], [COMMANDS])
    torch.testing.assert_close(again, reference, atol=1e-4, rtol=1e-5)
    assert len(seen) > len(COMMANDS) and all(output.num_cached_tokens == 0 for output in seen[len(COMMANDS) :])


def test_soft_tokens_decide_the_likelihoods_and_the_cache_tells_them_apart() -> None:
    ours, theirs = pair()
    a, b = request(0), request(0, scale=-1.0)
    (first,), (second,) = (ours.likelihoods([ours.encode(r)], [COMMANDS]) for r in (a, b))
    assert (first - second).abs().max() > 1e-2
    for r, scores in ((a, first), (b, second)):
        torch.testing.assert_close(scores, theirs.likelihoods([theirs.encode(r)], [COMMANDS])[0], atol=1e-4, rtol=1e-5)
    (without,) = ours.likelihoods([ours.encode(request(0, soft=False))], [COMMANDS])
    assert (first - without).abs().max() > 1e-2


def test_free_answers_equal_hugging_face() -> None:
    ours, theirs = pair(mode="generate", max_new_tokens=12)
    asked = [*requests(), replace(request(2), admissible=None)]
    made = ours.act(asked)
    assert made == theirs.act(asked)
    assert made[-1].how is Grounding.FREE and all(a.tokens_out <= 12 for a in made)


def test_log_probabilities_of_answers_equal_hugging_face() -> None:
    """Sampled, so that more than the likeliest token is compared; the reference reads `inputs_embeds`."""
    from vllm import SamplingParams

    ours, theirs = pair()
    prompts = [ours.encode(r) for r in requests()]
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=6, ignore_eos=True, logprobs=0, detokenize=False)
    for prompt, output in zip(prompts, ours._run([ours._request(p) for p in prompts], [params] * 4), strict=True):
        ids = list(output.outputs[0].token_ids)
        said = torch.tensor([at[id].logprob for at, id in zip(output.outputs[0].logprobs, ids, strict=True)])
        tokens = torch.tensor([[*prompt.ids, *ids]])
        with torch.no_grad():
            logits = theirs.model(inputs_embeds=theirs._embed(tokens, [prompt])).logits[0, len(prompt.ids) - 1 : -1]
        again = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).squeeze(1)
        torch.testing.assert_close(said, again, atol=1e-4, rtol=0)


def test_guided_answers_are_commands_though_not_always_the_likeliest() -> None:
    ours, theirs = pair(max_new_tokens=40)
    ours.mode = "guided"
    asked = [request(i, soft=i != 1) for i in range(8)]
    made, likeliest = ours.act(asked), theirs.act(asked)
    assert all(a.action in r.admissible and a.how is Grounding.EXACT for a, r in zip(made, asked, strict=True))
    assert [a.action for a in made] != [a.action for a in likeliest]  # why `choice` scores whole commands


def test_what_precedes_the_soft_tokens_stays_in_the_prefix_cache() -> None:
    ours, _ = pair(mode="generate", max_new_tokens=1)
    ours.act([request(0)])
    seen = recorded(ours)
    new_soft = replace(request(0).delivered, soft=torch.randn(4, 64, generator=torch.Generator().manual_seed(99)))
    ours.act([replace(request(0), delivered=new_soft)])
    before = ours.encode(request(0)).ids.index(ours.placeholder)
    assert seen[0].num_cached_tokens == before // vllm_engines.BLOCK * vllm_engines.BLOCK > 0


def test_weights_of_the_folder() -> None:
    ours, theirs = pair()
    assert torch.equal(ours.embedding_table, theirs.embedding_table)
    assert ours.hash() == pair()[0].hash() and len(ours.hash()) == 64
    assert ours.accepts_soft


def test_what_cannot_be_read_is_refused_by_name() -> None:
    ours, theirs = pair()
    assert ours.act([]) == []
    with pytest.raises(ValueError, match="raise max_model_len"):
        ours.act([replace(request(0), observation="cabinet 1 " * 1200)])
    narrow = replace(request(0).delivered, soft=torch.zeros(4, 32))
    with pytest.raises(ValueError, match="32 dimensions, not 64"):
        ours.act([replace(request(0), delivered=narrow)])
    with pytest.raises(ValueError, match="text models"):
        VllmExecutor(vllm_engines.engine(True), theirs.tokenizer, vllm_engines.folder(True))
    assert len(ours.act(requests())) == 4  # nothing of all this is left in the engine


def test_an_engine_that_failed_amid_a_batch_is_refused() -> None:
    ours, _ = pair()
    left = ours.llm.enqueue([ours._request(ours.encode(request(0)))], use_tqdm=False)
    with pytest.raises(RuntimeError, match="start it anew"):
        ours.act([request(1)])
    ours.llm.llm_engine.abort_request(left, internal=True)
    assert ours.act([request(1)])
