"""The executor in vLLM is the one in Hugging Face: answers, likelihoods and choices, with and without soft tokens."""

from __future__ import annotations

import base64
import functools
import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image, ImageDraw

from executor.hf import FrozenExecutor
from executor.prompt import ExecutorRequest, MemoryBlock, executor_parts
from executor.records import ExecutorView, Grounding
from executor.vllm import SOFT_PARTS, VllmExecutor, engine_settings
from lm.backbone import load_backbone, load_encoder
from tests import chats, command_sets, vllm_engines

pytestmark = vllm_engines.marks

COMMANDS = ("go to shelf 1", "go to cabinet 2", "open cabinet 2", "take mug 1 from shelf 1", "look", "go to shelf 2")

TURNS = ExecutorView(context="turns")


def pair(vlm: bool = False, **kwargs: Any) -> tuple[VllmExecutor, FrozenExecutor]:
    """Ours and the reference."""
    folder = vllm_engines.folder(vlm)
    theirs = FrozenExecutor(load_backbone(folder, torch.float32, "cpu"), **kwargs)
    return VllmExecutor(vllm_engines.engine(vlm, "executor"), load_encoder(folder), folder, **kwargs), theirs


def request(i: int = 0, soft: bool = True, scale: float = 1.0) -> ExecutorRequest:
    tokens = scale * torch.randn(4, 64, generator=torch.Generator().manual_seed(i)) if soft else None
    delivered = MemoryBlock(
        memory="in home 1: put a mug in shelf\n" * 4, state="now: find mug", guidance=f"go to shelf {i}", soft=tokens
    )
    return ExecutorRequest("put a mug in cabinet", delivered, ("look",) * i, "You see nothing.", COMMANDS[: 3 + i % 4])


def requests() -> list[ExecutorRequest]:
    return [request(i, soft=i != 1) for i in range(4)]


def view(i: int) -> Image.Image:
    picture = Image.new("RGB", (64, 64), (40 * i % 255, 90, 200))
    ImageDraw.Draw(picture).rectangle((8 * i % 48, 8, 8 * i % 48 + 15, 40), fill=(250, 60 * i % 255, 10))
    return picture


def seeing(i: int = 0, soft: bool = True, scale: float = 1.0) -> ExecutorRequest:
    return replace(request(i, soft, scale), image=view(i))


def mixed() -> list[ExecutorRequest]:
    """With picture and soft tokens, with one of them, with none; one batch."""
    return [seeing(0), seeing(1, soft=False), request(2), request(3, soft=False), seeing(4), seeing(5)]


def recorded(executor: VllmExecutor) -> list[Any]:
    """vLLM's outputs of every request from now on."""
    seen, run = [], executor._run

    def spy(asked, params):
        outputs = run(asked, params)
        seen.extend(outputs)
        return outputs

    executor._run = spy  # type: ignore[method-assign]
    return seen


def test_likelihoods_and_choices_equal_hugging_face() -> None:
    ours, theirs = pair()
    prompts = [theirs.encode(r) for r in requests()]
    names = [r.admissible for r in requests()]
    for a, b in zip(ours.candidate_logprobs(prompts, names), theirs.candidate_logprobs(prompts, names), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-5)
    assert ours.act(requests()) == theirs.act(requests())


def test_commands_in_the_prefix_cache_are_scored_again() -> None:
    """A prompt that ends just before a block does: the next block's first tokens decide which commands are cached."""
    ours, theirs = pair()
    asked = request(0)
    while len(theirs.encode(asked).ids) % vllm_engines.BLOCK != vllm_engines.BLOCK - 2:
        asked = replace(asked, observation=asked.observation + " look")
    prompt = theirs.encode(asked)
    (reference,) = theirs.candidate_logprobs([prompt], [COMMANDS])
    ours.candidate_logprobs([prompt], [COMMANDS])
    seen = recorded(ours)
    (again,) = ours.candidate_logprobs([prompt], [COMMANDS])
    torch.testing.assert_close(again, reference, atol=1e-4, rtol=1e-5)
    assert len(seen) > len(COMMANDS) and all(output.num_cached_tokens == 0 for output in seen[len(COMMANDS) :])


def test_soft_tokens_decide_the_likelihoods_and_the_cache_tells_them_apart() -> None:
    ours, theirs = pair()
    a, b = request(0), request(0, scale=-1.0)
    (first,), (second,) = (ours.candidate_logprobs([ours.encode(r)], [COMMANDS]) for r in (a, b))
    assert (first - second).abs().max() > 1e-2
    for r, scores in ((a, first), (b, second)):
        torch.testing.assert_close(
            scores, theirs.candidate_logprobs([theirs.encode(r)], [COMMANDS])[0], atol=1e-4, rtol=1e-5
        )
    (without,) = ours.candidate_logprobs([ours.encode(request(0, soft=False))], [COMMANDS])
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
            logits = theirs.model(inputs_embeds=theirs.embed(tokens, [prompt])).logits[0, len(prompt.ids) - 1 : -1]
        again = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).squeeze(1)
        torch.testing.assert_close(said, again, atol=1e-4, rtol=0)


def test_answers_held_to_the_commands_equal_hugging_face() -> None:
    ours, theirs = pair(mode="constrained", max_new_tokens=12)
    asked = [
        *command_sets.asked([request(i % 4, soft=i % 3 != 1) for i in range(40)]),
        replace(request(2), admissible=None),
    ]
    made = ours.act(asked)
    assert made == theirs.act(asked)
    assert {a.how for a in made[:-1]} == {Grounding.CHOICE} and made[-1].how is Grounding.FREE
    assert ours.holds
    ours.holds = False  # as on GPU: one request at each branch
    assert ours.act(asked) == made
    theirs.mode = "choice"
    assert [a.action for a in made[:-1]] != [a.action for a in theirs.act(asked[:-1])]


@pytest.mark.parametrize("holds", [True, False], ids=["in the engine", "by branch"])
def test_drawn_commands_have_the_probability_that_hugging_face_draws_them_with(holds: bool) -> None:
    ours, theirs = pair(mode="constrained", temperature=2.0)
    ours.holds = holds
    views = [f"You see shelf {i} and mug {i}. " * 16 for i in range(48)]  # more tokens than vLLM reads at once
    asked = command_sets.asked([replace(request(i % 4), observation=view) for i, view in enumerate(views)])
    made = ours.act(asked, seeds=range(48))
    listed = [one.admissible or () for one in asked]
    prompts, chosen = [theirs.encode(one) for one in asked], [action.chosen or 0 for action in made]
    expected = theirs.chosen_logprobs(prompts, listed, chosen)
    torch.testing.assert_close(torch.tensor([a.logprob for a in made]), expected, atol=1e-4, rtol=0)
    assert made == ours.act(asked, seeds=range(48))
    assert len({ours.act(asked[:1])[0].action for _ in range(12)}) > 1


@pytest.mark.parametrize("mode", ["constrained", "generate"])
@pytest.mark.parametrize("reads", [TURNS, replace(TURNS, past_soft=True)], ids=["newest", "kept"])
def test_a_growing_chat_is_hugging_face_s_and_reads_only_what_is_new(mode: str, reads: ExecutorView) -> None:
    ours, theirs = pair(mode=mode, reads=reads, instructions=chats.RULES, max_new_tokens=6)
    requests, before = chats.growing(ours, 7), dict[bool, ExecutorRequest]()
    for request in requests:
        [action] = ours.act([request])
        assert [action] == theirs.act([request])
        last = before.get(request.n_soft > 0)  # vLLM keys blocks by embeddings: with and without are two caches
        held = 0 if last is None else len(ours.encode(last).ids) - chats.replaced(ours.encoder, last)
        assert action.tokens_cached >= held // vllm_engines.BLOCK * vllm_engines.BLOCK
        before[request.n_soft > 0] = request


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
    ours, _ = pair()
    assert ours.act([]) == []
    with pytest.raises(ValueError, match="raise max_model_len"):
        ours.act([replace(request(0), observation="cabinet 1 " * 1200)])
    narrow = replace(request(0).delivered, soft=torch.zeros(4, 32))
    with pytest.raises(ValueError, match="32 dimensions, not 64"):
        ours.act([replace(request(0), delivered=narrow)])
    with pytest.raises(ValueError, match="takes text only"):
        VllmExecutor(vllm_engines.engine(False, "executor"), load_encoder(vllm_engines.folder(True)), ours.weights)
    assert len(ours.act(requests())) == 4  # nothing of all this is left in the engine


def test_an_engine_that_failed_amid_a_batch_is_refused() -> None:
    ours, _ = pair()
    left = ours.llm.enqueue([ours._request(ours.encode(request(0))).request], use_tqdm=False)
    with pytest.raises(RuntimeError, match="restart it"):
        ours.act([request(1)])
    ours.llm.llm_engine.abort_request(left, internal=True)
    assert ours.act([request(1)])


# -- vision-language models -------------------------------------------------------------------------------------------


def test_with_pictures_likelihoods_and_choices_equal_hugging_face() -> None:
    ours, theirs = pair(vlm=True)
    prompts, names = [theirs.encode(r) for r in mixed()], [r.admissible or () for r in mixed()]
    assert [bool(p.images) for p in prompts] == [True, True, False, False, True, True]
    for a, b in zip(ours.candidate_logprobs(prompts, names), theirs.candidate_logprobs(prompts, names), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)
    assert ours.act(mixed()) == theirs.act(mixed())
    assert ours.act(mixed()) == theirs.act(mixed())  # now that the prefix cache holds them


@pytest.mark.parametrize("scale", [1.0, 0.03])
def test_with_pictures_generated_answers_equal_hugging_face(scale: float) -> None:
    ours, theirs = pair(vlm=True, mode="generate", max_new_tokens=12)
    asked = [*mixed(), *(seeing(i, scale=scale) for i in range(6, 9))]
    made = ours.act(asked)
    assert made == theirs.act(asked)
    assert len({a.text for a in made}) > 1


def test_with_pictures_log_probabilities_of_sampled_answers_equal_hugging_face() -> None:
    from vllm import SamplingParams

    ours, theirs = pair(vlm=True)
    prompts = [ours.encode(r) for r in mixed()]
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=6, ignore_eos=True, logprobs=0, detokenize=False)
    outputs = ours._run([ours._request(p) for p in prompts], [params] * len(prompts))
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = list(output.outputs[0].token_ids)
        said = sum(at[id].logprob for at, id in zip(output.outputs[0].logprobs, ids, strict=True))
        soft = None if prompt.soft is None else prompt.soft[None]
        nll, _ = theirs.action_nll([prompt], soft, [ids])
        assert said == pytest.approx(-nll.item(), abs=1e-4)


@functools.cache
def with_free_vocabulary() -> VllmExecutor:
    """Cached: an engine that is collected takes what all engines of this process share along with it."""
    from vllm import LLM

    path = vllm_engines.folder(True, free_rows=8)
    llm = LLM(model=str(path), **engine_settings(), **vllm_engines.SETTINGS)
    return VllmExecutor(llm, load_encoder(path), path)


def test_a_prompt_with_picture_reads_like_the_chat_message_of_its_parts() -> None:
    """vLLM's documented way for soft tokens beside a picture: text, `prompt_embeds` and image as parts of a message. It
    needs a row of the vocabulary that the tokenizer leaves free, for a token of its own; ids need none."""
    from vllm import SamplingParams

    pair(vlm=True)  # sets the environment of engines
    ours = with_free_vocabulary()
    prompt = ours.encode(seeing(4))
    assert prompt.soft is not None and prompt.images
    data = io.BytesIO()
    torch.save(prompt.soft, data)
    before, _, between, _, after = (part.text for part in executor_parts(seeing(4)))
    parts = [
        {"type": "text", "text": before},
        {"type": "prompt_embeds", "data": base64.b64encode(data.getvalue()).decode()},
        {"type": "text", "text": between},
        {"type": "image_pil", "image_pil": prompt.images[0]},
        {"type": "text", "text": after},
    ]
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=8, ignore_eos=True, logprobs=0, detokenize=False)
    how: Any = {"use_tqdm": False, "chat_template_content_format": "openai"}
    [chat] = ours.llm.chat([{"role": "user", "content": parts}], params, **how)
    [ids] = ours._run([ours._request(prompt)], [params])
    said = [
        [at[id].logprob for at, id in zip(o.logprobs, o.token_ids, strict=True)] for o in chat.outputs + ids.outputs
    ]
    assert chat.outputs[0].token_ids == ids.outputs[0].token_ids
    assert len(chat.prompt_token_ids) == len(prompt.ids) and said[0] == pytest.approx(said[1], abs=1e-4)


def test_with_pictures_answers_held_to_the_commands_equal_hugging_face() -> None:
    ours, theirs = pair(vlm=True, mode="constrained")
    asked = command_sets.asked(mixed() * 3)
    assert ours.act(asked) == theirs.act(asked)


def test_what_precedes_soft_tokens_and_picture_stays_in_the_prefix_cache() -> None:
    ours, theirs = pair(vlm=True, mode="generate", max_new_tokens=4)
    first = replace(seeing(0), goal="another goal")
    ours.act([first])
    seen = recorded(ours)
    new_soft = replace(first.delivered, soft=torch.randn(4, 64, generator=torch.Generator().manual_seed(98)))
    later = [replace(first, delivered=new_soft), replace(first, image=view(7)), first]
    assert ours.act(later) == theirs.act(later)
    ids = ours.encode(first).ids
    before, pads = ids.index(ours.placeholder), ids.index(ours.tokenizer.convert_tokens_to_ids("<|image_pad|>"))
    cached = [output.num_cached_tokens for output in seen]
    block = vllm_engines.BLOCK
    assert cached[0] == before // block * block > 0
    assert before // block * block <= cached[1] == pads // block * block


def test_blind_executors_leave_pictures_out() -> None:
    ours, theirs = pair(vlm=True, images=False)
    assert not ours.sees_images and ours.act(mixed()) == theirs.act(mixed())
    assert ours.act([seeing(0)]) == ours.act([request(0)])


def test_ids_that_vllm_reads_otherwise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = pair(vlm=True, mode="generate", max_new_tokens=2)
    prompt = ours.encode(seeing(0))
    ids = list(prompt.ids)
    del ids[ids.index(ours.tokenizer.convert_tokens_to_ids("<|image_pad|>"))]  # as a processor of other sizes would
    with pytest.raises(ValueError, match="as other tokens"):
        ours.generate([replace(prompt, ids=tuple(ids))], [None])
    monkeypatch.setattr("executor.vllm.SOFT_PARTS", "_no_such_key")  # as a version that knows no such key
    with pytest.raises(RuntimeError, match="does not take soft tokens beside pictures"):
        ours.generate([prompt], [None])
    monkeypatch.setattr("executor.vllm.SOFT_PARTS", SOFT_PARTS)
    assert len(ours.act([seeing(0)])) == 1
