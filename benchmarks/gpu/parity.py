"""Part `parity`: the same tiny models on the CPU and on this device, in fp32 (without TF32) and in bf16.

Compared are every loss of SFT and its gradients, log-probabilities of candidates after soft tokens, soft tokens, and
greedy emissions. A difference is the largest one over the largest value on the CPU; of gradients, the norm of the
difference over the norm. Greedy tokens must be equal in fp32; in bf16 nearly equal likelihoods may change them, so that
their share is reported only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from PIL import Image
from torch import Tensor

from benchmarks.gpu.models import SHORT, TINY, ModelPair, make_compiler, make_executor, sft_config
from benchmarks.gpu.parts import Row, Setup
from compiler.checkpoint import trained_parameters
from compiler.hf import MemoryCompiler
from compiler.records import Decoding
from configs.training import SftConfig
from executor.hf import FrozenExecutor
from lm.architecture import model_config
from lm.prompt import Picture, Prompt
from plan.models import MEMORY, WORD
from plan.replay import commands, requests_of
from training.sft_data import Example
from training.sft_losses import sft_losses

ROWS, EMISSION, EMITTED, WIDE = 4, 24, 14, 192
VOCABULARY = 1000  # ids of random prompts
SCALE = 3.0  # of fresh weights, whose nearly uniform likelihoods would hide wrong products
DTYPES = ("float32", "bfloat16")
LATENTS = ("gauss_nll", "soft_mse", "lm_head")
TOLERANCES = {"float32": {"values": 1e-4, "gradients": 1e-3}, "bfloat16": {"values": 3e-2, "gradients": 1e-1}}


@dataclass(frozen=True, slots=True)
class Models:
    """Both models on one device."""

    config: SftConfig
    compiler: MemoryCompiler
    executor: FrozenExecutor


def measure(setup: Setup) -> Iterator[Row]:
    """Yield a row per comparison."""
    disable_tf32()
    for dtype in DTYPES:
        yield from compare(dtype, make_models(dtype, "cpu"), make_models(dtype, setup.device))


def disable_tf32() -> None:
    """Compute fp32 products in fp32."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def make_models(dtype: str, device: str) -> Models:
    """Create both models on the CPU from fixed seeds, with scaled weights and a random adapter, and move them."""
    config = sft_config(ModelPair("parity", *TINY, dtype, ROWS))
    executor = make_executor(config, "cpu")
    compiler = make_compiler(config, executor.backbone.hidden_size, "cpu", Decoding(max_new_tokens=EMISSION))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in (*executor.model.parameters(), *compiler.backbone.model.parameters()):
            parameter.mul_(SCALE if parameter.dim() > 1 else 1.0)
        for name, parameter in trained_parameters(compiler).items():
            if "lora_" in name:
                parameter.normal_(std=0.1, generator=generator)
            elif name.endswith("linear.weight"):  # makes sigma depend on the input, too
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    compiler.backbone.image_id = compiler.backbone.model.config.image_token_id
    executor.model.to(device)
    compiler.to(device).eval()
    compiler.generator = torch.Generator(device=device)
    return Models(config, compiler, executor)


def compare(dtype: str, cpu: Models, here: Models) -> Iterator[Row]:
    """Yield a row per comparison: absolute and relative difference, tolerance, and whether it passed."""
    allowed = TOLERANCES[dtype]
    n = cpu.compiler.n_tokens
    for latent in LATENTS:
        ours, theirs = (_losses(models, _examples(n), latent) for models in (cpu, here))
        for name in ours[0] if latent == LATENTS[0] else ("latent",):
            shown = f"loss {name}" + (f" ({latent})" if name == "latent" else "")
            yield _row(dtype, shown, ours=ours[0][name], theirs=theirs[0][name], allowed=allowed["values"])
        yield _row(
            dtype, f"gradients ({latent})", ours=ours[1], theirs=theirs[1], allowed=allowed["gradients"], by_norm=True
        )
    for what, examples in (("192 wide", _examples(n, WIDE)), ("with a picture", _examples(n, picture=True))):
        ours, theirs = (_losses(models, examples, LATENTS[0]) for models in (cpu, here))
        yield _row(
            dtype, f"loss text ({what})", ours=ours[0]["text"], theirs=theirs[0]["text"], allowed=allowed["values"]
        )
        yield _row(
            dtype, f"gradients ({what})", ours=ours[1], theirs=theirs[1], allowed=allowed["gradients"], by_norm=True
        )
    a, b = (_scores(models) for models in (cpu, here))
    yield _row(dtype, "log-probabilities of candidates", ours=a, theirs=b, allowed=allowed["values"])
    ours, theirs = (_compiled(models) for models in (cpu, here))
    share = equal_share(ours[0], theirs[0])
    exact = dtype == "float32"
    yield {
        "dtype": dtype,
        "what": "tokens of greedy emissions, share that is the same",
        "absolute": None,
        "relative": share,
        "tolerated": 1.0 if exact else None,
        "passed": share == 1.0 if exact else None,
    }
    if share == 1.0:  # other tokens give other soft tokens
        yield _row(dtype, "soft tokens (mu)", ours=ours[1], theirs=theirs[1], allowed=allowed["values"])


def equal_share(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Return the share of positions with equal tokens."""
    same = sum(a == b for x, y in zip(ours, theirs, strict=True) for a, b in zip(x, y, strict=False))
    return same / sum(max(len(x), len(y)) for x, y in zip(ours, theirs, strict=True))


def _row(dtype: str, what: str, ours: Tensor, theirs: Tensor, allowed: float, by_norm: bool = False) -> Row:
    ours, theirs = ours.double(), theirs.double()
    gap = theirs - ours
    of, over = (gap.norm(), ours.norm()) if by_norm else (gap.abs().max(), ours.abs().max())
    relative = float(of / over.clamp(min=1e-12))
    return {
        "dtype": dtype,
        "what": what,
        "absolute": float(gap.abs().max()),
        "relative": relative,
        "tolerated": allowed,
        "passed": relative <= allowed,
    }


def _losses(models: Models, examples: Sequence[Example], latent: str) -> tuple[dict[str, Tensor], Tensor]:
    """Compute each loss (B,) without noise, and the gradient of their weighted sum by all trained parameters."""
    config = models.config.model_copy(update={"latent": latent})
    losses = sft_losses(models.compiler, models.executor, examples, config, temperature=0.0)
    total = sum((getattr(config.weights, name) * value.sum().cpu() for name, value in losses.items()), torch.zeros(()))
    trained = list(trained_parameters(models.compiler).values())
    gradients = torch.autograd.grad(total, trained, allow_unused=True)
    flat = [(torch.zeros_like(p) if g is None else g).flatten().cpu() for p, g in zip(trained, gradients, strict=True)]
    return {name: value.detach().cpu() for name, value in losses.items()}, torch.cat(flat)


@torch.no_grad()
def _scores(models: Models) -> Tensor:
    """Score commands after prompts with soft tokens: (rows x commands,)."""
    n, width = models.compiler.n_tokens, models.executor.backbone.hidden_size
    soft = torch.randn(ROWS, n, width, generator=torch.Generator().manual_seed(3)) * 0.03
    prompts = [replace(prompt, soft=row) for prompt, row in zip(_prompts(40, 4, n), soft, strict=True)]
    return torch.cat(models.executor.candidate_logprobs(prompts, [commands(SHORT)] * ROWS)).float().cpu()


def _compiled(models: Models) -> tuple[list[tuple[int, ...]], Tensor]:
    """Compile prompts of unequal length; return emissions and the means of their soft tokens (B, N, d)."""
    prompts = _prompts(60, 5)
    models.compiler.encode = lambda request: prompts[int(request.memory[0].id)]
    compiled = models.compiler.compile(requests_of(ROWS))
    return [c.emission_ids for c in compiled], torch.stack([c.mu for c in compiled if c.mu is not None])


def _examples(n: int, width: int = 50 + EMITTED, picture: bool = False) -> list[Example]:
    """Draw a micro-batch of unequal lengths, at most `width` tokens with emission and N memory tokens.

    With `picture`, every prompt starts with a picture.
    """
    emissions, actions, memories = (_prompts(size, seed) for size, seed in ((EMITTED, 6), (5, 7), (30, 8)))
    prompts = _prompts(width - EMITTED - (n if width == WIDE else 0), 9)
    if picture:
        seen = [_picture(seed) for seed in range(ROWS)]
        prompts = [Prompt((*s.ids, *p.ids), pictures=s.pictures) for s, p in zip(seen, prompts, strict=True)]
    rows = zip(prompts, emissions, _prompts(40, 10, n), actions, memories, strict=True)
    return [
        Example(p, e.ids, executor_prompt=acting, action=a.ids, memory_ids=m.ids, soft_read=True)
        for p, e, acting, a, m in rows
    ]


def _picture(seed: int) -> Prompt:
    """Draw a picture of 64 x 64 pixels, preprocessed: 8 x 8 patches of 2 x 3 x 8 x 8 values, four patches per token.

    The shipped compiler's processor would need torchvision.
    """
    values = torch.randn(64, 384, generator=torch.Generator().manual_seed(seed))
    read = {"pixel_values": values, "image_grid_thw": torch.tensor([[1, 8, 8]])}
    picture = Picture(Image.new("RGB", (64, 64)), 16, read)
    return Prompt((model_config(TINY[0]).image_token_id,) * picture.tokens, pictures=(picture,))


def _prompts(tokens: int, seed: int, soft: int = 0) -> list[Prompt]:
    """Draw a batch of prompts, each one token shorter than the last, that start with `soft` placeholders."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORD, VOCABULARY, (ROWS, tokens), generator=draw).tolist()
    return [Prompt((*((MEMORY,) * soft), *row[: tokens - i])) for i, row in enumerate(ids)]
