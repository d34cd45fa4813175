"""The compiler: decoding with a cache agrees with one full forward pass, for VLM and text LM, padding and all."""

import pytest
import torch
from transformers import GenerationConfig

from compiler.model import Decoding
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
            pixel_values=batch.pixels,
            image_grid_thw=batch.grid,
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
