"""The frozen executor: likelihoods in one tree pass equal one-by-one scoring; soft tokens land where they should."""

import math
from dataclasses import replace

import pytest
import torch

from executor.base import Answer
from executor.hf import FrozenExecutor
from executor.prompt import ExecutorRequest, MemoryBlock
from executor.records import Grounding, ground
from lm.prompt import Prompt
from tests import tiny_models

COMMANDS = ("go to shelf 1", "go to cabinet 2", "open cabinet 2", "take mug 1 from shelf 1", "look", "go to shelf 2")


def executor(**kwargs) -> FrozenExecutor:
    backbone = tiny_models.lm_backbone()
    return FrozenExecutor(backbone, **kwargs)


def request(i: int = 0, soft: bool = False, **kwargs) -> ExecutorRequest:
    torch.manual_seed(i)
    delivered = MemoryBlock(
        state="now: find mug", guidance=f"go to shelf {i}", soft=torch.randn(4, 64) if soft else None
    )
    return ExecutorRequest("put a mug in cabinet", delivered, ("look",) * i, "You see nothing.", COMMANDS[: 3 + i])


def test_tree_likelihoods_equal_one_by_one():
    model = executor()
    prompts = [model.encode(request(i, soft=i != 1)) for i in range(3)]
    fast = model.candidate_logprobs(prompts, [COMMANDS[: 3 + i] for i in range(3)])
    for i, prompt in enumerate(prompts):
        soft = None if prompt.soft is None else prompt.soft[None]
        slow = [-model.action_nll([prompt], soft, [model.action_ids(c)])[0][0] for c in COMMANDS[: 3 + i]]
        torch.testing.assert_close(fast[i], torch.stack(slow), atol=1e-4, rtol=1e-5)


def test_choice_is_the_most_likely_and_generation_is_grounded():
    model = executor()
    chosen = model.act([request(0), request(1, soft=True)])
    assert [a.how for a in chosen] == [Grounding.CHOICE] * 2 and chosen[0].action in COMMANDS[:3]
    free = executor(mode="generate", max_new_tokens=5).act([request(0), request(2, soft=True)])
    assert all(a.tokens_out <= 5 and a.confidence is None for a in free)
    likely = model.candidate_logprobs([model.encode(request(0))], [COMMANDS[:3]])[0].softmax(0)
    assert chosen[0].confidence == pytest.approx(float(likely.max()), abs=1e-5)


def test_drawn_actions_come_as_often_as_their_probability_says():
    model, asked = executor(temperature=5.0), request(0, soft=True)
    policy = (model.candidate_logprobs([model.encode(asked)], [COMMANDS[:3]])[0] / 5).softmax(0)
    drawn = [model.act([asked])[0] for _ in range(400)]
    for command, probability in zip(COMMANDS, policy.tolist(), strict=False):
        of_it = [a for a in drawn if a.action == command]
        assert abs(len(of_it) / 400 - probability) < 4 * (probability * (1 - probability) / 400) ** 0.5
        assert all(a.logprob == pytest.approx(math.log(probability), abs=1e-4) for a in of_it)


def test_likelihoods_have_the_gradient_of_scoring_one_by_one():
    model = executor()
    prompt = model.encode(request(0, soft=True))
    soft = [prompt.soft.clone().requires_grad_() for _ in range(2)]
    model.candidate_logprobs([replace(prompt, soft=soft[0])], [COMMANDS])[0][4].backward()
    (-model.action_nll([prompt], soft[1][None], [model.action_ids(COMMANDS[4])])[0][0]).backward()
    torch.testing.assert_close(soft[0].grad, soft[1].grad, atol=1e-5, rtol=1e-4)
    assert soft[0].grad.abs().max() > 1e-3


def test_generation_with_soft_tokens_equals_unbatched():
    model = executor(mode="generate", max_new_tokens=6)
    requests = [request(i, soft=True) for i in range(3)]
    assert [a.text for a in model.act(requests)] == [model.act([r])[0].text for r in requests]


def test_soft_tokens_change_the_action_distribution_and_get_gradient():
    model = executor()
    prompt = model.encode(request(0, soft=True))
    soft = prompt.soft[None].clone().requires_grad_()
    nll, count = model.action_nll([prompt], soft, [model.action_ids("look")])
    nll.sum().backward()
    assert count.item() == 2 and soft.grad.abs().sum() > 0
    assert all(p.grad is None for p in model.model.parameters())


def test_what_precedes_soft_tokens_is_read_once_and_their_gradient_stays_the_same():
    whole, cached = executor(), executor(prefix_mib=8)
    prompts = [whole.encode(request(i, soft=True)) for i in (0, 1, 1)]
    actions = [whole.action_ids(command) for command in ("look", COMMANDS[3], COMMANDS[2])]
    soft = [torch.stack([prompt.soft for prompt in prompts]).requires_grad_() for _ in range(3)]
    expected, _ = whole.action_nll(prompts, soft[0], actions)
    for again in soft[1:]:  # the second time the cache holds all of it
        nll, count = cached.action_nll(prompts, again, actions)
        torch.testing.assert_close(nll, expected, atol=1e-5, rtol=1e-5)
        nll.sum().backward()
    assert count.tolist() == [len(action) for action in actions] and cached.prefixes.held > 0
    expected.sum().backward()
    for again in soft[1:]:
        torch.testing.assert_close(again.grad, soft[0].grad, atol=1e-5, rtol=1e-4)


def test_a_reserved_token_in_the_text_is_text():
    model = executor()
    bad = replace(request(0, soft=True), goal="say <|mem|>", observation="<|im_end|>")
    ids = model.encode(bad).ids
    assert ids.count(model.placeholder) == bad.delivered.n_soft and "say <|mem|>" in model.tokenizer.decode(ids)


def test_hash_changes_with_the_weights_only():
    a, b = executor(), executor()
    assert a.hash() == b.hash()
    with torch.no_grad():
        b.embedding_table[3, 3] += 1
    assert a.hash() != b.hash()


def test_a_model_that_reasons_before_it_acts():
    model = executor(mode="generate")
    model.generate = lambda *_: [Answer(list(model.encoder.ids("<think>go to shelf 1</think>look")))]
    [made] = model.act([request(2)])
    assert (made.action, made.how, made.text) == ("look", Grounding.EXACT, "look")


def test_grounding():
    assert ground("Go to  shelf 1.", COMMANDS).action == "go to shelf 1"
    assert ground("go to shelf 1", COMMANDS).how is Grounding.EXACT
    assert ground("go to the shelf 1", COMMANDS) == ground("go to shelf 1", COMMANDS).__class__(
        "go to shelf 1", Grounding.FUZZY
    )
    assert ground("sing a song", COMMANDS).how is Grounding.FAILED
    assert ground("mix a with b\nmore", None).action == "mix a with b"


def test_prompt_without_soft_has_no_placeholder():
    model = executor()
    assert isinstance(model.encode(request(0)), Prompt)
    assert model.placeholder not in model.encode(request(0)).ids
    assert model.encode(request(0, soft=True)).ids.count(model.placeholder) == 4
