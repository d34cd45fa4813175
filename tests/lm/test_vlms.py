"""Vision-language models of other families than Qwen's, as compiler and as executor.

The reference is the model's own way: what its processor makes of the whole chat goes to its own forward pass, one row
at a time, while a hook on its embedding layer puts soft tokens in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from PIL import Image, ImageDraw

from compiler.records import CompileRequest
from configs.models import Speed
from configs.training import SftConfig
from data_gen.rows import SftRow
from executor.hf import FrozenExecutor
from executor.prompt import ExecutorRequest, MemoryBlock, executor_chat
from lm.backbone import Backbone, load_backbone
from lm.prompt import Picture, Prompt, PromptEncoder, PromptPart, chat_messages, chat_of, merge_text_parts
from lm.reply_cleaning import clean_reply
from lm.vision import check_vision_model, concatenate_pictures, vision_modules
from memory.trajectory import png_bytes
from tests import tiny_models, tiny_vlms
from training.sft_data import encode_row
from training.sft_losses import embedded_memories, sft_losses
from zoo.models import save

COMMANDS = ("go to shelf 1", "go to cabinet 2", "open cabinet 2", "look", "go to shelf 2")
TOWERS = {
    "llava": {"vision_tower", "multi_modal_projector"},
    "internvl": {"vision_tower", "multi_modal_projector"},
    "idefics3": {"vision_model", "connector"},
    "gemma3": {"vision_tower", "multi_modal_projector"},
}
every = pytest.mark.parametrize("family", tiny_vlms.FAMILIES)


def view(i: int) -> Image.Image:
    """A picture of i, of three shapes in turn."""
    picture = Image.new("RGB", ((64, 64), (96, 40), (64, 32))[i % 3], (40 * i % 255, 90, 200))
    ImageDraw.Draw(picture).rectangle((8 * i % 48, 8, 8 * i % 48 + 15, 30), fill=(250, 60 * i % 255, 10))
    return picture


def compile_request(i: int, seen: int, view_of: int | None = None) -> CompileRequest:
    """A request with so many pictures in its memory and, where there is one, a view."""
    asked = tiny_models.request(2, image=False)
    first = replace(asked.memory[0], images=tuple(png_bytes(view(k)) for k in range(seen)))
    image = None if view_of is None else view(view_of)
    return replace(asked, memory=(first, *asked.memory[1:]), image=image, observation=f"You see a shelf {i}.")


REQUESTS = [compile_request(1, 0, 0), compile_request(2, 2, 1), compile_request(3, 2), compile_request(4, 0)]


def request(i: int, image: bool = True, soft: bool = True) -> ExecutorRequest:
    tokens = torch.randn(4, 64, generator=torch.Generator().manual_seed(i)) if soft else None
    delivered = MemoryBlock(state="now: find mug", guidance=f"go to shelf {i}", soft=tokens)
    seen = view(i) if image else None
    return ExecutorRequest("put a mug in cabinet", delivered, ("look",) * i, "You see nothing.", COMMANDS, image=seen)


ASKED = [request(0), request(1, image=False), request(2, soft=False), request(4)]


def read(encoder: PromptEncoder, parts: Sequence[PromptPart], instructions: str) -> dict[str, torch.Tensor]:
    """What the model's own processor makes of a chat."""
    placeholder = encoder.tokenizer.convert_ids_to_tokens(encoder.memory_id)
    texts = [replace(part, text=part.text + placeholder * part.soft, soft=0) for part in parts]
    chat = chat_messages(chat_of(merge_text_parts(texts), instructions), typed=True)
    text = encoder.processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    images = [part.image for part in parts if part.image is not None] or None
    return dict(encoder.processor(text=[text], images=images, return_tensors="pt", add_special_tokens=False))


@torch.no_grad()
def own_logprobs(model: Backbone, prompt: Prompt, inputs: dict[str, torch.Tensor], answer: Sequence[int]):
    """(len(answer), V), by the model's own forward pass over what its processor returned, and the answer behind it."""
    assert tuple(inputs["input_ids"][0].tolist()) == prompt.ids
    more = {"input_ids": torch.tensor([answer]), "attention_mask": torch.ones(1, len(answer), dtype=torch.long)}
    more["token_type_ids"] = torch.zeros(1, len(answer), dtype=torch.long)
    takes = {name: value for name, value in inputs.items() if name != "token_type_ids" or model._token_type_arguments}
    whole = {name: torch.cat([value, more[name]], 1) if name in more else value for name, value in takes.items()}
    with tiny_models.soft_by_hook(model.model, model.memory_id, prompt):
        logits = model.model(**whole).logits
    return logits[0, len(prompt.ids) - 1 : -1].log_softmax(-1)


def executor(family: str, **settings: Any) -> FrozenExecutor:
    return FrozenExecutor(tiny_vlms.backbone(family), instructions="Act.", **settings)


def inputs_of(model: FrozenExecutor, asked: ExecutorRequest) -> dict[str, torch.Tensor]:
    *_, user = executor_chat(asked, model.instructions)
    return read(model.encoder, user.parts, model.instructions)


# -- what a model reads -----------------------------------------------------------------------------------------------


@every
def test_pictures_one_by_one_are_what_the_processor_makes_of_them_together(family: str) -> None:
    encoder = tiny_vlms.backbone(family)
    parts = [
        PromptPart("see: "),
        PromptPart(image=view(0)),
        PromptPart(" and "),
        PromptPart(image=view(1)),
        PromptPart(image=view(0)),
    ]
    prompt, inputs = encoder.encode(parts, "Act."), read(encoder, parts, "Act.")
    assert prompt.ids == tuple(inputs["input_ids"][0].tolist())
    assert prompt.ids.count(encoder.image_id) == sum(picture.tokens for picture in prompt.pictures)
    seen = encoder.body.get_image_features
    mine = seen(**concatenate_pictures(prompt.pictures, torch.device("cpu"))).pooler_output
    theirs = seen(**{name: value for name, value in inputs.items() if "pixel" in name}).pooler_output
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)
    shown = encoder.picture_embeddings([encoder.pictures([view(0), view(1)]), encoder.pictures([view(2)])])
    one, two, three = (len(encoder.pictures([view(i)]).ids) for i in range(3))
    assert [len(states) for states in shown] == [one + two, three]


@every
def test_a_picture_is_processed_once_and_later_prompts_have_the_ids_that_the_processor_would_write(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = PromptEncoder(tiny_vlms.backbone(family).processor)
    own, read_by_it = encoder._processor_outputs, list[int]()  # pictures of each call
    monkeypatch.setattr(encoder, "_processor_outputs", lambda t, i: read_by_it.append(len(i)) or own(t, i))
    # Text is part of what these two processors write for a picture, so that they read every chat themselves.
    again = [2] if family in ("idefics3", "gemma3") else []
    for text, first, calls in (("see: ", 0, [1, 1, 2]), (" <b>, or\n", 3, [1, *again]), ("3 <|im_end|>", 0, again)):
        parts = [PromptPart(text), PromptPart(image=view(first)), PromptPart("\n\n"), PromptPart(image=view(1))]
        read_by_it.clear()
        prompt = encoder.encode(parts, "Act.")
        assert read_by_it == calls
        # A new encoder's first prompt is what the processor writes.
        assert prompt.ids == PromptEncoder(encoder.processor).encode(parts, "Act.").ids


@every
def test_candidates_score_as_in_the_models_own_forward_pass(family: str) -> None:
    """Rows of unequal length, with and without picture and soft tokens, read together."""
    model = executor(family)
    prompts = [model.encode(asked) for asked in ASKED]
    with torch.no_grad():
        fast = model.candidate_logprobs(prompts, [COMMANDS] * len(prompts))
    for prompt, asked, scores in zip(prompts, ASKED, fast, strict=True):
        inputs = inputs_of(model, asked)
        for command, score in zip(COMMANDS, scores, strict=True):
            ids = model.action_ids(command)
            own = own_logprobs(model.backbone, prompt, inputs, ids).gather(1, torch.tensor(ids)[:, None]).sum()
            torch.testing.assert_close(score, own, atol=1e-3, rtol=1e-4)


def test_an_executor_that_transformers_cannot_generate_with_from_soft_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="Gemma3ForConditionalGeneration cannot generate from soft tokens"):
        executor("gemma3", mode="generate")


@pytest.mark.parametrize("family", ["llava", "internvl", "idefics3"])
def test_an_executor_generates_what_the_models_own_forward_pass_chooses(family: str) -> None:
    model = executor(family, mode="generate", max_new_tokens=4)
    for asked, made in zip(ASKED, model.act(ASKED), strict=True):
        prompt, inputs, answer = model.encode(asked), inputs_of(model, asked), []
        while len(answer) < 4:
            token = int(own_logprobs(model.backbone, prompt, inputs, [*answer, 0])[-1].argmax())
            if token == model.end_id:
                break
            answer.append(token)
        assert (made.text, made.tokens_out) == (clean_reply(model.tokenizer.decode(answer)), len(answer))


def test_tokens_of_a_picture_that_see_one_another_are_read_as_such() -> None:
    """Gemma 3, also where all layers attend to everything: no tree mask, no beginning that is read once."""
    model = tiny_vlms.backbone("gemma3", layer_types=["full_attention"] * 2)
    assert not model.attends_fully and tiny_vlms.backbone("llava").attends_fully
    prompt = model.encode([PromptPart("see: "), PromptPart(image=view(0))])
    batch = model.pad([prompt, model.encode([PromptPart("see: a mug")])], "left")
    assert batch.vision["token_type_ids"].sum(1).tolist() == [4, 0]
    with torch.no_grad():
        told = model.hidden(batch)[0]
        apart = model.hidden(replace(batch, vision={"pixel_values": batch.vision["pixel_values"]}))[0]
    assert not torch.allclose(told, apart, atol=1e-3)


# -- the compiler -----------------------------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("speed", [Speed(), Speed(drafts=0, prefix_mib=0)], ids=["fast", "plain"])
def test_requests_compile_together_as_alone_and_as_the_model_generates(family: str, speed: Speed) -> None:
    """Requests with 0 to 3 pictures, three of which begin alike; soft tokens are those of one full forward pass."""
    compiler = tiny_vlms.memory_compiler(family)
    compiler.speed = speed
    made = [compiler.compile(REQUESTS), compiler.compile(REQUESTS)]  # the second time beginnings are kept
    for asked, first, again in zip(REQUESTS, *made, strict=True):
        prompt = compiler.encode(asked)
        batch = compiler.backbone.pad([prompt], "left")
        theirs = compiler.backbone.model.generate(
            input_ids=batch.tokens,
            attention_mask=batch.mask,
            **batch.vision,
            max_new_tokens=8,
            do_sample=False,
            suppress_tokens=compiler.backbone.suppressed,
            eos_token_id=compiler.backbone.end_id,
            pad_token_id=0,
        )[0, batch.tokens.shape[1] :].tolist()
        (alone,) = compiler.compile([asked])
        with torch.no_grad():
            scored = compiler.eval().score([prompt], [alone.emission_ids])
        assert first.emission_ids == again.emission_ids == alone.emission_ids
        assert list(alone.emission_ids[: len(theirs)]) == theirs
        for compiled in (first, again, alone):
            torch.testing.assert_close(compiled.mu, scored.gaussian.mu[0], atol=1e-3, rtol=1e-3)


@every
def test_the_picture_reaches_the_soft_tokens(family: str) -> None:
    compiler = tiny_vlms.memory_compiler(family)
    made = compiler.compile([compile_request(1, 0, 0), compile_request(1, 0, 3)])
    mu = [compiled.mu for compiled in made if compiled.mu is not None]
    assert made[0].prompt_ids == made[1].prompt_ids and not torch.allclose(mu[0], mu[1], atol=1e-4)


@every
def test_the_adapter_is_on_the_language_model_alone(family: str) -> None:
    compiler = tiny_vlms.memory_compiler(family)
    model, parts = compiler.backbone.model, vision_modules(compiler.backbone.model)
    assert set(parts) == TOWERS[family]
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    language = {name for name, module in model.named_modules() if module is model.get_decoder()}.pop()
    assert trained and all(name.startswith(language) and "lora_" in name for name in trained)
    assert any("q_proj" in name for part in parts.values() for name, _ in part.named_modules())  # there was a choice


# -- training ---------------------------------------------------------------------------------------------------------


def row(i: int, seen: int, image: bool) -> SftRow:
    pictures = tuple(png_bytes(view(k)) for k in range(seen))
    return SftRow(
        task_id="t",
        split="train",
        family="f",
        t=i,
        goal="in home 1: put a mug in cabinet",
        memory_ids=("a", "b"),
        memory_texts=("in home 1: put a mug in shelf", "in home 2"),
        state="goal: in home 1: put a mug in cabinet",
        observation="You see a shelf 1.",
        image=png_bytes(view(i)) if image else None,
        history=(),
        emission="> it is there | go to shelf 1",
        action="go to shelf 1",
        memory_images=(pictures[:1], pictures[1:]) if seen else (),
    )


ROWS = [row(0, 2, True), row(1, 0, True), row(2, 0, False), row(3, 1, False)]


@every
def test_sft_trains_the_adapter_and_the_projector_and_nothing_else(family: str) -> None:
    """All losses of Eq. 9, over rows with 0 to 3 pictures, through an executor of the same family that sees."""
    compiler, model = tiny_vlms.memory_compiler(family), executor(family)
    for name, parameter in compiler.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)  # which is 0 in a fresh adapter: A would get no gradient
    frozen = {name: p.clone() for name, p in compiler.named_parameters() if not p.requires_grad}
    before, examples = model.hash(), [encode_row(each, compiler, model, soft=True) for each in ROWS]
    compiler.train()
    trained = {name: p for name, p in compiler.named_parameters() if p.requires_grad}
    optimizer, sums = torch.optim.AdamW(trained.values(), lr=3e-3), []
    for _ in range(3):
        torch.manual_seed(0)
        losses = sft_losses(compiler, model, examples, SftConfig())
        assert set(losses) == {"text", "action", "entropy", "orth", "latent"}
        for name, loss in losses.items():
            gradients = torch.autograd.grad(loss.sum(), list(trained.values()), retain_graph=True, allow_unused=True)
            reached = {n for n, g in zip(trained, gradients, strict=True) if g is not None and g.abs().sum() > 0}
            assert name == "entropy" or any("lora_A" in n for n in reached), name  # a fresh sigma is a constant
            assert any(n.startswith("projector") for n in reached) == (name not in ("text", "orth")), name
        total = torch.cat(list(losses.values())).sum()
        total.backward()
        sums.append(total.item())
        assert all(p.grad is None for p in model.model.parameters())
        assert all(p.grad is None for n, p in compiler.named_parameters() if n in frozen)
        optimizer.step()
        optimizer.zero_grad()
    assert sums[-1] < sums[0] and model.hash() == before
    assert all(torch.equal(p, frozen[n]) for n, p in compiler.named_parameters() if n in frozen)


@every
def test_rows_score_together_as_alone(family: str) -> None:
    compiler, model = tiny_vlms.memory_compiler(family).eval(), executor(family)
    examples = [encode_row(each, compiler, model, soft=True) for each in ROWS]
    with torch.no_grad():
        losses = lambda part: sft_losses(compiler, model, part, SftConfig(), temperature=0.0)
        together, alone = losses(examples), [losses([example]) for example in examples]
        for name, values in together.items():
            torch.testing.assert_close(values, torch.cat([each[name] for each in alone]), atol=1e-3, rtol=1e-3)
        memories = embedded_memories(model, examples)
    seen = [example.memory_pictures for example in examples]
    assert [prompt is not None for prompt in seen] == [True, False, False, True]
    for example, prompt, memory in zip(examples, seen, memories, strict=True):
        assert len(memory) == len(example.memory_ids if prompt is None else prompt.ids)


# -- loading, and what is refused -------------------------------------------------------------------------------------


@every
def test_it_loads_from_an_ordinary_folder(family: str, tmp_path: Any) -> None:
    made = tiny_vlms.backbone(family)
    save(tmp_path, made.model, made.processor)
    loaded = load_backbone(tmp_path, torch.float32, "cpu")
    parts = [PromptPart("see: "), PromptPart(image=view(1)), PromptPart("\n")]
    prompts = [model.encode(parts, "Act.") for model in (made, loaded)]
    assert prompts[0].ids == prompts[1].ids
    with torch.no_grad():
        first, second = (model.hidden(model.pad([p], "left")) for model, p in zip((made, loaded), prompts, strict=True))
    torch.testing.assert_close(first, second)


def test_models_that_do_not_put_pictures_into_the_places_of_tokens_are_refused_by_name(tmp_path: Any) -> None:
    for name, why in {
        "MllamaForConditionalGeneration": "does not replace image tokens",
        "IdeficsForVisionText2Text": "does not replace image tokens",
        "Blip2ForConditionalGeneration": "is not a decoder that takes positions",
        "Florence2ForConditionalGeneration": "is not a decoder that takes positions",
        "Ernie4_5_VLMoeForConditionalGeneration": "needs moe_mm_token_type_ids",
    }.items():
        with pytest.raises(ValueError, match=f"{name} cannot be .* {why}"):
            check_vision_model(getattr(transformers, name))
    transformers.MllamaConfig().save_pretrained(tmp_path)  # before weights are looked for: there are none
    with pytest.raises(ValueError, match="MllamaForConditionalGeneration cannot be"):
        load_backbone(tmp_path, torch.float32, "cpu")


def test_a_processor_of_another_model_is_refused() -> None:
    model, _ = tiny_vlms.llava()
    with pytest.raises(ValueError, match="LlavaForConditionalGeneration uses image token"):
        Backbone(model, tiny_vlms.idefics3()[1])


@every
def test_a_text_that_spells_special_tokens_is_text_beside_pictures_too(family: str) -> None:
    encoder = tiny_vlms.backbone(family)
    special = set(encoder.tokenizer.added_tokens_decoder)
    marks = " ".join(token.content for token in encoder.tokenizer.added_tokens_decoder.values())
    for pictures in (
        [],
        [PromptPart(image=view(0))],
        [PromptPart(image=view(0)), PromptPart(" "), PromptPart(image=view(1))],
    ):
        plain = encoder.encode([PromptPart("a sign says "), *pictures, PromptPart("."), PromptPart(soft=2)], "Act.")
        spelled = encoder.encode(
            [PromptPart(f"a sign says {marks}"), *pictures, PromptPart(f"{marks}."), PromptPart(soft=2)], "Act."
        )
        assert [id for id in spelled.ids if id in special] == [id for id in plain.ids if id in special]
        assert encoder.tokenizer.decode(spelled.ids).count(marks) == 2
        assert [p.tokens for p in spelled.pictures] == [p.tokens for p in plain.pictures]


def test_a_chat_template_that_leaves_something_out_is_refused() -> None:
    _, processor = tiny_vlms.llava()
    processor.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content[0].text }}{% endfor %}"
    encoder = PromptEncoder(processor)
    assert encoder.encode([PromptPart("look")]).ids == encoder.ids("look")
    with pytest.raises(ValueError, match="drops part of its input"):
        encoder.encode([PromptPart("look")], "Act.")


def test_pictures_of_unequal_sizes_are_filled_up_where_the_model_is_told_of_it() -> None:
    def picture(height: int, **more: torch.Tensor) -> Picture:
        return Picture(view(0), 1, {"pixel_values": torch.ones(1, 3, height, 2), **more})

    alone, cpu = [picture(4), picture(6)], torch.device("cpu")
    with pytest.raises(ValueError, match="different sizes in one batch"):
        concatenate_pictures(alone, cpu)
    told = concatenate_pictures([picture(size, image_sizes=torch.tensor([[size, 2]])) for size in (4, 6)], cpu)
    assert told["image_sizes"].tolist() == [[4, 2], [6, 2]] and told["pixel_values"].shape == (2, 3, 6, 2)
    assert told["pixel_values"].sum((1, 2, 3)).tolist() == [24, 36]


@pytest.mark.parametrize("family", ["gemma3", "llava"])
def test_the_table_of_embeddings_holds_what_the_model_makes_of_tokens(family):
    backbone = tiny_vlms.backbone(family)
    made = backbone.embeddings(torch.tensor([5, 7]))
    assert torch.equal(backbone.embedding_table[[5, 7]], made) and made.std() > 0
