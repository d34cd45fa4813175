"""Models whose layers do not attend to everything (linear attention, sliding windows): the tree mask of candidates and
the shared beginning of prompts do not hold there, and other paths give what one row at a time gives."""

from dataclasses import replace

import pytest
import torch
import transformers

from compiler.hf import MemoryCompiler
from compiler.records import Decoding
from configs.models import Lora
from executor.hf import FrozenExecutor
from executor.prompt import ExecutorRequest, MemoryBlock
from lm.backbone import Backbone
from soft_mem.projector import Projector, ProjectorConfig
from tests import command_sets, tiny_models

COMMANDS = ("go to shelf 1", "go to cabinet 2", "open cabinet 2", "take mug 1 from shelf 1", "look", "go to shelf 2")
_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
}
_LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
ARCHITECTURES = {
    "Qwen3_5ForCausalLM": ("Qwen3_5TextConfig", _LINEAR),
    "Qwen3NextForCausalLM": ("Qwen3NextConfig", _LINEAR | _EXPERTS),
    "MistralForCausalLM": ("MistralConfig", {"sliding_window": 16}),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", {"sliding_window": 16}),
}
every = pytest.mark.parametrize("name", ARCHITECTURES)


def backbone(name: str) -> Backbone:
    torch.manual_seed(0)
    config, settings = ARCHITECTURES[name]
    tokenizer = tiny_models.tokenizer()
    made = getattr(transformers, config)(vocab_size=len(tokenizer), initializer_range=0.2, **_SHAPE, **settings)
    return Backbone(getattr(transformers, name)(made).eval(), tokenizer)


def request(i: int) -> ExecutorRequest:
    soft = torch.randn(4, 64, generator=torch.Generator().manual_seed(i)) if i else None
    delivered = MemoryBlock(state="now: find mug", guidance=f"go to shelf {i}", soft=soft)
    return ExecutorRequest("put a mug in cabinet", delivered, ("look",) * i, "You see a shelf 1.", COMMANDS[: 3 + i])


def one_at_a_time(model: FrozenExecutor, prompt, command: str) -> torch.Tensor:
    """By the model's own forward pass of one row, without padding, masks or positions of ours."""
    ids = model.action_ids(command)
    tokens = torch.tensor([[*prompt.ids, *ids]])
    logits = model.model(inputs_embeds=model.embed(tokens, [prompt])).logits[0, len(prompt.ids) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).sum()


@every
def test_candidates_score_as_one_at_a_time(name):
    model = FrozenExecutor(backbone(name), batch_size=4)
    assert not model.backbone.attends_fully and tiny_models.lm_backbone().attends_fully
    prompts = [model.encode(request(i)) for i in range(3)]
    with torch.no_grad():
        fast = model.candidate_logprobs(prompts, [request(i).admissible or () for i in range(3)])
        for i, (prompt, scores) in enumerate(zip(prompts, fast, strict=True)):
            slow = torch.stack([one_at_a_time(model, prompt, command) for command in COMMANDS[: 3 + i]])
            torch.testing.assert_close(scores, slow, atol=1e-3, rtol=1e-4)


@every
def test_answers_held_to_the_commands_are_those_of_one_row_at_a_time(name):
    model = FrozenExecutor(backbone(name), "constrained", prefix_mib=64)
    asked = command_sets.asked([request(i % 3) for i in range(12)])
    made = model.act(asked)
    for one, action in zip(asked, made, strict=True):
        assert model.action_ids(action.action) == command_sets.masked(model, model.encode(one), one.admissible or ())
        assert action.tokens_cached is None  # the cache of such a model cannot be cut


@every
def test_their_gradient_reaches_the_soft_tokens(name):
    model = FrozenExecutor(backbone(name))
    prompt = model.encode(request(1))
    assert prompt.soft is not None
    soft = [prompt.soft.clone().requires_grad_() for _ in range(2)]
    model.candidate_logprobs([replace(prompt, soft=soft[0])], [COMMANDS])[0][3].backward()
    one_at_a_time(model, replace(prompt, soft=soft[1]), COMMANDS[3]).backward()
    torch.testing.assert_close(soft[0].grad, soft[1].grad, atol=1e-3, rtol=1e-3)
    assert soft[0].grad.abs().max() > 1e-4


@every
@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_a_compiler_gives_each_request_what_it_gives_it_alone(name, temperature):
    """Requests that share their memory, of unequal length, whose emissions end at different tokens."""
    base = backbone(name)
    compiler = MemoryCompiler(
        base, Projector(ProjectorConfig(64, 64, 4)), Decoding(temperature, max_new_tokens=7), lora=Lora(rank=4)
    ).eval()
    requests = [tiny_models.request(i, image=False) for i in (0, 3, 1, 4)]
    made = compiler.compile(requests)
    assert made[0].request and requests[0].memory == requests[1].memory
    for one, c in zip(requests, made, strict=True):
        with torch.no_grad():
            scored = compiler.score([compiler.encode(one)], [c.emission_ids])
        n = len(c.text_logprobs)
        again = compiler.logprobs(scored.logits)[0, :n].gather(1, torch.tensor(c.emission_ids[:n])[:, None])
        torch.testing.assert_close(again.squeeze(1), c.text_logprobs, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(scored.gaussian.mu[0], c.mu, atol=1e-3, rtol=1e-3)
