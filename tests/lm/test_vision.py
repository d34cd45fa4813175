"""Vision-language executors, Hugging Face backend: picture, soft tokens and positions are where the model expects them.

The reference is the model's own way: it gets ids and pixels and finds positions itself, while a hook on its embedding
layer puts the soft tokens in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image, ImageDraw

from agent.deliveries import Delivery
from agent.episode import EpisodeLimits, EpisodeSpec, run_episodes
from agent.records import executor_request
from compiler.hf import MemoryCompiler
from configs.models import ExecutorConfig
from configs.training import SftConfig
from data_gen.rows import SftRow
from envs.base import Observation, Task, Transition
from executor.hf import FrozenExecutor
from executor.prompt import ExecutorRequest, MemoryBlock
from lm.prompt import Prompt
from lm.reply_cleaning import clean_reply
from memory.trajectory import png_bytes
from tests import tiny_models, vllm_engines
from training.sft_data import encode_row
from training.sft_losses import embedded_memories, sft_losses

COMMANDS = ("go to shelf 1", "go to cabinet 2", "open cabinet 2", "take mug 1 from shelf 1", "look", "go to shelf 2")


def view(i: int) -> Image.Image:
    """Squares in colours of i, so that no two views are alike."""
    picture = Image.new("RGB", (64, 64), (40 * i % 255, 90, 200))
    ImageDraw.Draw(picture).rectangle((8 * i % 48, 8, 8 * i % 48 + 15, 40), fill=(250, 60 * i % 255, 10))
    return picture


def request(i: int = 0, soft: bool = True, image: bool = True) -> ExecutorRequest:
    tokens = torch.randn(4, 64, generator=torch.Generator().manual_seed(i)) if soft else None
    delivered = MemoryBlock(state="now: find mug", guidance=f"go to shelf {i}", soft=tokens)
    return ExecutorRequest(
        "put a mug in cabinet",
        delivered,
        ("look",) * i,
        "You see nothing.",
        COMMANDS[: 3 + i],
        image=view(i) if image else None,
    )


REQUESTS = [request(0), request(1, image=False), request(2, soft=False), request(3, soft=False, image=False)]


def executor(**kwargs: Any) -> FrozenExecutor:
    backbone = tiny_models.vlm_backbone()
    return FrozenExecutor(backbone, **kwargs)


@torch.no_grad()
def reference_logprobs(model: FrozenExecutor, prompt: Prompt, answer: Sequence[int]) -> torch.Tensor:
    """(len(answer), V), by the model's own forward pass from ids and pixels."""
    tokens = torch.tensor([[*prompt.ids, *answer]])
    kinds = (tokens == model.model.config.image_token_id).int()
    seen = {name: tensor for picture in prompt.pictures for name, tensor in picture.tensors.items()}
    model.model.model.rope_deltas = None  # it keeps those of an earlier call
    with tiny_models.soft_by_hook(model.model, model.placeholder, prompt):
        logits = model.model(input_ids=tokens, mm_token_type_ids=kinds, **seen).logits
    return logits[0, len(prompt.ids) - 1 : -1].log_softmax(-1)


def test_the_view_stands_between_soft_tokens_and_observation() -> None:
    model = executor()
    prompt = model.encode(request(1))
    text = model.tokenizer.decode(prompt.ids)
    pads = "<|vision_start|>" + "<|image_pad|>" * 16 + "<|vision_end|>"
    assert f"soft: {'<|mem|>' * 4}\ndid: look\nview: {pads}\nsee: You see nothing." in text
    assert [picture.tensors["image_grid_thw"].tolist() for picture in prompt.pictures] == [[[1, 8, 8]]]


def test_likelihoods_equal_the_models_own_forward_pass() -> None:
    """One tree pass over rows with and without picture and soft tokens, against one row and command at a time."""
    model = executor()
    prompts = [model.encode(r) for r in REQUESTS]
    for prompt, asked, fast in zip(
        prompts, REQUESTS, model.candidate_logprobs(prompts, [r.admissible or () for r in REQUESTS]), strict=True
    ):
        for command, score in zip(asked.admissible or (), fast, strict=True):
            ids = model.action_ids(command)
            own = reference_logprobs(model, prompt, ids).gather(1, torch.tensor(ids)[:, None]).sum()
            torch.testing.assert_close(score, own, atol=1e-4, rtol=0)
            soft = None if prompt.soft is None else prompt.soft[None]
            nll, _ = model.action_nll([prompt], soft, [ids])
            torch.testing.assert_close(-nll[0], own, atol=1e-4, rtol=0)


def test_generation_equals_the_models_own_forward_pass() -> None:
    model = executor(mode="generate", max_new_tokens=6)
    prompts = [model.encode(r) for r in REQUESTS]
    for prompt, made in zip(prompts, model.act(REQUESTS), strict=True):
        answer: list[int] = []
        while len(answer) < 6:
            token = int(reference_logprobs(model, prompt, [*answer, 0])[-1].argmax())
            if token == model.end_id:
                break
            answer.append(token)
        assert (made.text, made.tokens_out) == (clean_reply(model.tokenizer.decode(answer)), len(answer))


def test_picture_and_soft_tokens_both_count() -> None:
    model = executor()
    prompts = [model.encode(r) for r in (request(1), replace(request(1), image=view(5)), request(1, soft=False))]
    first, other_view, no_soft = model.candidate_logprobs(prompts, [COMMANDS] * 3)
    assert not torch.allclose(first, other_view, atol=1e-3) and not torch.allclose(first, no_soft, atol=1e-3)


def test_gradient_of_the_action_reaches_the_soft_tokens_only() -> None:
    model = executor()
    prompts = [model.encode(request(i)) for i in range(2)]
    soft = torch.stack([p.soft for p in prompts if p.soft is not None]).requires_grad_()
    nll, count = model.action_nll(prompts, soft, [model.action_ids("look"), model.action_ids("go to shelf 1")])
    nll.sum().backward()
    assert count.tolist() == [2, 4] and bool((soft.grad.abs().sum((1, 2)) > 0).all())  # type: ignore[union-attr]
    assert all(p.grad is None for p in model.model.parameters())


def test_sft_rows_with_pictures_train_through_a_seeing_executor() -> None:
    rows = [
        SftRow(
            task_id="t",
            split="train",
            family="f",
            t=i,
            goal="in home 1: put a mug in cabinet",
            memory_ids=("e1",),
            memory_texts=("in home 1: put a mug in shelf",),
            state="goal: in home 1: put a mug in cabinet",
            observation="You see a shelf 1.",
            image=png_bytes(view(i)) if i else None,
            history=(),
            emission="> it is there | go to shelf 1",
            action="go to shelf 1",
        )
        for i in range(3)
    ]
    compiler: MemoryCompiler = tiny_models.memory_compiler()
    model, examples = executor(), []
    for row in rows:
        prompt = replace(model.encode(executor_request(row.step_input(compiler.n_tokens), model)), soft=None)
        assert bool(prompt.pictures) == (row.image is not None)
        examples.append(replace(encode_row(row, compiler, model, soft=True), executor_prompt=prompt))
    losses = sft_losses(compiler, model, examples, SftConfig())
    losses["action"].sum().backward()
    assert compiler.projector.linear.weight.grad is not None and compiler.projector.linear.weight.grad.abs().sum() > 0
    assert all(p.grad is None for p in model.model.parameters())


def memory_row(pictures: int) -> SftRow:
    """A row with two entries, of which the first has the first picture and the second the rest."""
    images = [png_bytes(view(i)) for i in range(pictures)]
    return SftRow(
        task_id="t",
        split="train",
        family="f",
        t=0,
        goal="in home 1: put a mug in cabinet",
        memory_ids=("a", "b"),
        memory_texts=("in home 1: put a mug in shelf", "in home 2"),
        state="goal: in home 1: put a mug in cabinet",
        observation="You see a shelf 1.",
        image=None,
        history=(),
        emission="> it is there",
        action="go to shelf 1",
        memory_images=(tuple(images[:1]), tuple(images[1:])) if images else (),
    )


def latent_target(model: FrozenExecutor, row: SftRow) -> torch.Tensor:
    """(N, d), read off the loss: the gradient of |z - target|^2 / (N d) at z = 0 is -2 target / (N d)."""
    compiler: MemoryCompiler = tiny_models.memory_compiler(projector={"emb_std": 0.5})
    z = torch.zeros(1, 4, 64, requires_grad=True)
    compiler.projector.draw = lambda *_: z  # type: ignore[method-assign]
    sft_losses(compiler, model, [encode_row(row, compiler, model, soft=True)], SftConfig(latent="soft_mse"))[
        "latent"
    ].sum().backward()
    assert z.grad is not None
    return -z.grad[0] * z.numel() / 2


def test_the_latent_target_is_what_the_executor_sees_of_m_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    model = executor()

    def patches(pixel_values: torch.Tensor, image_grid_thw: torch.Tensor) -> SimpleNamespace:
        """Make the j-th patch of i pictures, 16 of each, the vector (j, j, ...)."""
        numbers = torch.arange(16.0 * len(image_grid_thw))[:, None].expand(-1, 64)
        return SimpleNamespace(pooler_output=numbers.split(16))

    monkeypatch.setattr(model.backbone.body, "get_image_features", patches)
    # One picture: chunks of 4 patches, (0 + 1 + 2 + 3) / sqrt 4 = 3, then 11, 19, 27; all over emb_std 0.5.
    one = torch.tensor([6.0, 22.0, 38.0, 54.0])
    torch.testing.assert_close(latent_target(model, memory_row(1)), one[:, None].expand(4, 64))
    # Three: chunks of 12, (0 + ... + 11) / sqrt 12 = 66 / sqrt 12, each further chunk 144 / sqrt 12 more.
    three = torch.tensor([66.0, 210.0, 354.0, 498.0]) / 12**0.5 / 0.5
    torch.testing.assert_close(latent_target(model, memory_row(3)), three[:, None].expand(4, 64))


def test_the_latent_target_is_the_vision_towers_own_output_or_else_the_text() -> None:
    model = executor()
    tensors = [picture.tensors for picture in model.encoder.pictures([view(0), view(1)]).pictures]
    patches = [model.model.model.visual(t["pixel_values"], grid_thw=t["image_grid_thw"]) for t in tensors]
    seen = torch.cat([made.pooler_output for made in patches])
    expected = torch.stack([chunk.sum(0) / 8**0.5 / 0.5 for chunk in seen.split(8)])
    torch.testing.assert_close(latent_target(model, memory_row(2)), expected, atol=1e-4, rtol=1e-4)
    ids = model.encoder.ids(memory_row(0).memory_text)
    words = torch.tensor_split(model.embedding_table[list(ids)].detach(), 4)
    told = torch.stack([chunk.sum(0) / len(chunk) ** 0.5 / 0.5 for chunk in words])
    text_only = FrozenExecutor(tiny_models.lm_backbone())
    for of, row in ((model, memory_row(0)), (executor(images=False), memory_row(2))):
        torch.testing.assert_close(latent_target(of, row), told, atol=1e-4, rtol=1e-4)
    assert encode_row(memory_row(2), tiny_models.memory_compiler(), text_only, True).memory_pictures is None


def test_rows_with_and_without_pictures_in_m_are_aligned_each_with_its_own() -> None:
    model, compiler = executor(), tiny_models.memory_compiler()
    rows = [memory_row(1), memory_row(0), memory_row(3)]
    examples = [encode_row(row, compiler, model, soft=True) for row in rows]
    together = embedded_memories(model, examples)
    for example, memory in zip(examples, together, strict=True):
        torch.testing.assert_close(memory, embedded_memories(model, [example])[0], atol=1e-5, rtol=1e-4)
    assert [len(memory) for memory in together] == [16, len(examples[1].memory_ids), 48]


def test_a_prompt_whose_picture_was_lost_is_refused() -> None:
    model = executor()
    lost = replace(model.encode(request(0)), pictures=())
    with pytest.raises(ValueError, match="image tokens do not match its pictures"):
        model.candidate_logprobs([lost], [COMMANDS])
    with pytest.raises(ValueError, match="image tokens do not match its pictures"):
        model.action_nll([lost], lost.soft[None], [model.action_ids("look")])  # type: ignore[index]


@pytest.mark.parametrize("image", [True, False])
def test_an_image_token_in_the_text_is_text(image: bool) -> None:
    model = executor()
    plain = model.encode(request(0, image=image))
    spelled = model.encode(replace(request(0, image=image), observation="a sign says <|image_pad|>"))
    assert spelled.ids.count(model.encoder.image_id or 0) == plain.ids.count(model.encoder.image_id or 0)
    assert "a sign says <|image_pad|>" in model.tokenizer.decode(spelled.ids)


def test_pictures_can_be_switched_off_and_text_models_never_see() -> None:
    blind, text = executor(images=False), tiny_models.lm_backbone()
    reader = FrozenExecutor(text)
    assert (executor().sees_images, blind.sees_images, reader.sees_images) == (True, False, False)
    for model in (blind, reader):
        assert model.encode(request(0)).ids == model.encode(request(0, image=False)).ids
        assert not model.encode(request(0)).pictures
    assert blind.act([request(0)]) == blind.act([request(0, image=False)])


def test_loading_goes_by_the_models_config() -> None:
    from envs.household.environment import HOUSEHOLD
    from executor.build import load_executor

    settings = {"dtype": "float32", "device": "cpu", "instructions": "none"}
    seeing = load_executor(
        ExecutorConfig(model=str(vllm_engines.folder(True)), **settings), HOUSEHOLD.executor_instructions
    )
    reading = load_executor(
        ExecutorConfig(model=str(vllm_engines.folder(False)), **settings), HOUSEHOLD.executor_instructions
    )
    blind = load_executor(
        ExecutorConfig(model=str(vllm_engines.folder(True)), images=False, **settings), HOUSEHOLD.executor_instructions
    )
    assert (seeing.sees_images, reading.sees_images, blind.sees_images) == (True, False, False)
    assert seeing.act(REQUESTS) == executor().act(REQUESTS)
    assert seeing.embedding_table.shape == reading.embedding_table.shape


class OneRoom:
    name = "one room"

    def tasks(self, split: str) -> list[Task]:
        return []

    def reset(self, task: Task) -> Observation:
        return Observation("a room", view(1), COMMANDS)

    def step(self, action: str) -> Transition:
        return Transition(Observation("a room", view(2), COMMANDS), 1.0, True, True)

    def expert(self) -> None:
        return None

    def close(self) -> None:
        pass


@pytest.mark.parametrize("images", [True, False])
def test_the_loop_shows_the_view_to_executors_that_see(images: bool) -> None:
    model, seen = executor(images=images), []
    encode = model.encode
    model.encode = lambda asked: (seen.append(asked), encode(asked))[1]  # type: ignore[method-assign]
    spec = EpisodeSpec(Task("1", "put a mug in cabinet", "home 1", "test", ""))
    [episode] = run_episodes(OneRoom, [spec], Delivery("none", "none"), model, EpisodeLimits(1))
    assert episode.success and [r.image is not None for r in seen] == [images]
    assert ("view: [picture]\nsee: a room" in episode.steps[0].executor_prompt) == images
    assert episode.steps[0].executor_prompt_ids.count(model.model.config.image_token_id) == 16 * images
