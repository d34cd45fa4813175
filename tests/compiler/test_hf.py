"""The compiler: decoding with a cache agrees with one full forward pass, for VLM and text LM, padding and all."""

import io
from dataclasses import replace

import pytest
import torch
from PIL import Image
from pydantic import ValidationError
from transformers import GenerationConfig

from compiler.records import Decoding
from configs.models import CompilerConfig, Speed
from tests import tiny_models


@pytest.mark.parametrize("vlm", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_generation_equals_rescoring(vlm, temperature):
    compiler = tiny_models.memory_compiler(vlm, decoding=Decoding(temperature=temperature, max_new_tokens=7))
    requests = [tiny_models.request(i, image=i != 1) for i in range(4)]
    made = compiler.compile(requests)
    compiler.eval()
    scored = compiler.score([compiler.encode(r) for r in requests], [c.emission_ids for c in made])
    logprobs = (compiler.allowed(scored.logits) / (temperature or 1.0)).log_softmax(-1)
    for i, c in enumerate(made):
        n = len(c.text_logprobs)  # a forced end-of-turn token has no log-probability of its own
        again = logprobs[i, :n].gather(1, torch.tensor(c.emission_ids[:n])[:, None]).squeeze(1)
        torch.testing.assert_close(again, c.text_logprobs, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(scored.gaussian.mu[i], c.mu, atol=2e-5, rtol=1e-4)
        latent = scored.gaussian.log_prob(c.z[None].expand_as(scored.gaussian.mu), temperature or 1.0)[i]
        torch.testing.assert_close(latent, c.latent_logprobs, atol=2e-4, rtol=1e-3)


def test_greedy_equals_hugging_face_generate():
    compiler = tiny_models.memory_compiler(True, decoding=Decoding(max_new_tokens=9))
    requests = [tiny_models.request(i) for i in range(3)]
    ours = compiler.compile(requests)
    backbone = compiler.backbone
    for request, made in zip(requests, ours, strict=True):
        batch = backbone.pad([compiler.encode(request)], "left")
        theirs = backbone.model.generate(
            input_ids=batch.tokens,
            attention_mask=batch.mask,
            **batch.vision,
            mm_token_type_ids=(batch.tokens == backbone.image_id).int(),
            generation_config=GenerationConfig(
                max_new_tokens=9,
                do_sample=False,
                suppress_tokens=backbone.suppressed,
                eos_token_id=backbone.end_id,
                pad_token_id=0,
            ),
        )[0, batch.tokens.shape[1] :].tolist()
        assert list(made.emission_ids[: len(theirs)]) == theirs


def test_batching_does_not_change_results():
    compiler = tiny_models.memory_compiler(True)
    requests = [tiny_models.request(i) for i in range(5)]
    together = compiler.compile(requests)
    alone = [compiler.compile([r])[0] for r in requests]
    for a, b in zip(together, alone, strict=True):
        assert a.emission_ids == b.emission_ids
        torch.testing.assert_close(a.soft, b.soft, atol=1e-5, rtol=1e-4)


def read_together(compiler, requests, monkeypatch):
    """Compile in one batch, which changes no result; what was read once for several, and what was left of each."""
    compiler.speed = Speed(prefix_mib=0)
    alone = [compiler.compile([r])[0] for r in requests]
    read = []
    hidden = compiler.backbone.hidden
    monkeypatch.setattr(compiler.backbone, "hidden", lambda batch, *rest: read.append(batch) or hidden(batch, *rest))
    for together, single in zip(compiler.compile(requests), alone, strict=True):
        assert together.emission_ids == single.emission_ids
        torch.testing.assert_close(together.soft, single.soft, atol=1e-5, rtol=1e-4)
    return read[:2]


@pytest.mark.parametrize("vlm", [True, False])
def test_prompts_of_one_memory_share_their_beginning(vlm, monkeypatch):
    compiler = tiny_models.memory_compiler(vlm)
    a, b = tiny_models.request(0, image=vlm), tiny_models.request(1, image=vlm)
    requests = [a, b, replace(a, observation="You see nothing."), tiny_models.request(2, image=vlm), a, b]
    beginnings, rest = read_together(compiler, requests, monkeypatch)
    groups = [[compiler.encode(requests[i]) for i in rows] for rows in ((0, 2, 4), (1, 5))]
    common = [compiler.backbone.common_prefix(rows) for rows in groups]
    assert all(pictures == vlm for _, pictures in common)  # the view
    common = [n for n, _ in common]
    for rows, n in zip(groups, common, strict=True):
        begin = rows[0].ids[:n]
        assert all(row.ids[:n] == begin for row in rows)
        assert len(compiler.backbone.tokenizer.decode(begin).split("home 1: put")) > 1  # memory is in it
    assert beginnings.tokens.shape == (2, max(common)) and beginnings.mask.sum().item() == sum(common)
    lengths = torch.tensor([len(compiler.encode(r).ids) for r in requests])
    assert torch.equal(rest.mask.sum(1), lengths)  # every token of every row is attended to, once
    read_here = rest.mask[:, -rest.tokens.shape[1] :].sum().item()
    assert read_here == sum(lengths) - 3 * common[0] - 2 * common[1]


def test_pictures_of_one_memory_are_read_once(monkeypatch):
    """Also where another group shares no picture, and where the same text stands beside another picture."""
    compiler = tiny_models.memory_compiler(True)

    def remembers(i: int, *colors: str):
        request = tiny_models.request(i)
        seen = [replace(e, images=(png(color),)) for e, color in zip(request.memory, colors, strict=False)]
        return replace(request, memory=(*seen, *request.memory[len(colors) :]))

    def png(color: str) -> bytes:
        Image.new("RGB", (64, 64), color).save(file := io.BytesIO(), "PNG")
        return file.getvalue()

    a, other = remembers(2, "red", "blue", "green"), remembers(2, "red", "blue", "white")
    requests = [a, replace(a, observation="You see nothing."), other, tiny_models.request(1), tiny_models.request(1)]
    beginnings, rest = read_together(compiler, requests, monkeypatch)
    assert len(beginnings.vision["image_grid_thw"]) == 2 + 1  # red, blue, and the view of the last two
    assert len(rest.vision["image_grid_thw"]) == 2 + 2 + 2  # the third picture and the view
    assert compiler.backbone.common_prefix([compiler.encode(r) for r in requests[:3]])[1] == 2


def test_reserved_tokens_are_never_sampled():
    compiler = tiny_models.memory_compiler(True, decoding=Decoding(temperature=5.0, max_new_tokens=40))
    made = compiler.compile([tiny_models.request(i) for i in range(4)])
    banned = set(compiler.backbone.suppressed)
    assert not any(banned & set(c.emission_ids) for c in made)


def test_the_picture_reaches_the_soft_tokens():
    compiler = tiny_models.memory_compiler(True)
    a, b = tiny_models.request(0), tiny_models.request(0)
    object.__setattr__(b, "image", tiny_models.request(1).image)
    made = compiler.compile([a, b])
    assert made[0].prompt_ids == made[1].prompt_ids
    assert not torch.allclose(made[0].mu, made[1].mu)


def test_only_lora_and_projector_train():
    compiler = tiny_models.memory_compiler(True)
    names = [n for n, p in compiler.named_parameters() if p.requires_grad]
    assert names and all("lora_" in n or n.startswith("projector.") for n in names)
    assert not any("visual" in n for n in names)


def test_who_may_speculate_in_vllm():
    assert CompilerConfig(engine="vllm", speed={"ngram": 3}).speed.ngram == 3
    for other in ({"engine": "hf"}, {"engine": "vllm", "temperature": 1.0}):
        with pytest.raises(ValidationError, match="greedy emissions"):
            CompilerConfig(speed={"ngram": 3}, **other)


def test_decoding_stops_when_nobody_waits_for_what_is_still_written() -> None:
    decoding = Decoding(max_new_tokens=40)
    compiler = tiny_models.memory_compiler(False, decoding=decoding, speed=Speed(drafts=0)).eval()  # a token, a pass
    asked = [tiny_models.request(i, image=False) for i in range(3)]
    whole, steps = compiler.compile(asked), []

    def until_third(i: int) -> bool:
        steps.append(i)
        return i == 1 and len(steps) < 6

    assert max(len(c.emission_ids) for c in whole) > 5  # there is something to cut short
    made = compiler.compile(asked, wanted=until_third)
    assert all(len(c.emission_ids) <= 5 for c in made)
    only = compiler.compile(asked, wanted=lambda i: i == 2)[2]  # those beside it are no longer waited for
    assert only.emission_ids == whole[2].emission_ids
    torch.testing.assert_close(only.mu, whole[2].mu)


def test_rows_with_seeds_of_their_own_draw_as_alone() -> None:
    compiler = tiny_models.memory_compiler(False, decoding=Decoding(temperature=1.2, max_new_tokens=12)).eval()
    asked = [tiny_models.request(i, image=False) for i in range(4)]
    together = compiler.compile(asked, seeds=[5, 6, 7, 8])
    for request, seed, ours in zip(asked, [5, 6, 7, 8], together, strict=True):
        compiler.generator.manual_seed(seed)
        [alone] = compiler.compile([request])
        assert ours.emission_ids == alone.emission_ids
        torch.testing.assert_close(ours.z, alone.z, atol=1e-5, rtol=1e-5)
