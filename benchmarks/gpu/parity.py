"""The same tiny models on the CPU and on this device say the same, in fp32 (without TF32) and in bf16.

What is compared: every loss of SFT and its gradients, log-probabilities of candidates behind soft tokens, soft tokens,
and greedy emissions, token for token in fp32. A difference is the largest one over the largest value on the CPU; of
gradients, the norm of the difference over the norm. In bf16 tokens may differ where two are nearly as likely: their
share is told, and does not decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from PIL import Image
from torch import Tensor

from benchmarks.gpu.models import SHORT, TINY, make_compiler, make_executor, sft_config
from benchmarks.gpu.parts import Row, Setup
from benchmarks.plan_check import Case
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
WORDS = 1000  # WORDS: ids that prompts are drawn from
LARGER = 3.0  # weights than fresh ones, with which all tokens are about as likely and a wrong product hardly shows
DTYPES = ("float32", "bfloat16")
LATENTS = ("gauss_nll", "soft_mse", "lm_head")
TOLERANCES = {"float32": {"values": 1e-4, "gradients": 1e-3}, "bfloat16": {"values": 3e-2, "gradients": 1e-1}}


@dataclass(frozen=True, slots=True)
class Side:
    """Both models on one device."""

    config: SftConfig
    compiler: MemoryCompiler
    executor: FrozenExecutor


def measure(setup: Setup) -> Iterator[Row]:
    """Yield a row for everything that is compared."""
    without_tf32()
    for dtype in DTYPES:
        yield from compare(dtype, make_side(dtype, "cpu"), make_side(dtype, setup.device))


def without_tf32() -> None:
    """Have products in fp32 computed in fp32."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def make_side(dtype: str, device: str) -> Side:
    """Make both models on the CPU from the same seeds, of larger weights than fresh ones, and an adapter that changes
    what the compiler says; then move them to the device."""
    config = sft_config(Case("parity", *TINY, dtype, ROWS))
    executor = make_executor(config, "cpu")
    compiler = make_compiler(config, executor.backbone.hidden_size, "cpu", Decoding(max_new_tokens=EMISSION))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in (*executor.model.parameters(), *compiler.backbone.model.parameters()):
            parameter.mul_(LARGER if parameter.dim() > 1 else 1.0)
        for name, parameter in trained_parameters(compiler).items():
            if "lora_" in name:
                parameter.normal_(std=0.1, generator=generator)
            elif name.endswith("linear.weight"):  # sigma, too, depends on what is read
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    compiler.backbone.image_id = compiler.backbone.model.config.image_token_id
    executor.model.to(device)
    compiler.to(device).eval()
    compiler.generator = torch.Generator(device=device)
    return Side(config, compiler, executor)


def compare(dtype: str, cpu: Side, here: Side) -> Iterator[Row]:
    """Yield a row for everything that is compared: what, the largest absolute and the relative difference, what is
    tolerated, whether it passed."""
    allowed = TOLERANCES[dtype]
    n = cpu.compiler.n_tokens
    for latent in LATENTS:
        ours, theirs = (_losses(side, _examples(n), latent) for side in (cpu, here))
        for name in ours[0] if latent == LATENTS[0] else ("latent",):
            shown = f"loss {name}" + (f" ({latent})" if name == "latent" else "")
            yield _row(dtype, shown, ours[0][name], theirs[0][name], allowed["values"])
        yield _row(dtype, f"gradients ({latent})", ours[1], theirs[1], allowed["gradients"], by_norm=True)
    for what, examples in (("192 wide", _examples(n, WIDE)), ("with a picture", _examples(n, picture=True))):
        ours, theirs = (_losses(side, examples, LATENTS[0]) for side in (cpu, here))
        yield _row(dtype, f"loss text ({what})", ours[0]["text"], theirs[0]["text"], allowed["values"])
        yield _row(dtype, f"gradients ({what})", ours[1], theirs[1], allowed["gradients"], by_norm=True)
    a, b = (_scores(side) for side in (cpu, here))
    yield _row(dtype, "log-probabilities of candidates", a, b, allowed["values"])
    ours, theirs = (_compiled(side) for side in (cpu, here))
    share = share_alike(ours[0], theirs[0])
    exact = dtype == "float32"
    yield {
        "dtype": dtype,
        "what": "tokens of greedy emissions, share that is the same",
        "absolute": None,
        "relative": share,
        "tolerated": 1.0 if exact else None,
        "passed": share == 1.0 if exact else None,
    }
    if share == 1.0:  # behind other tokens, soft tokens are others
        yield _row(dtype, "soft tokens (mu)", ours[1], theirs[1], allowed["values"])


def share_alike(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Give the share of tokens that are the same in the same place."""
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


def _losses(side: Side, examples: Sequence[Example], latent: str) -> tuple[dict[str, Tensor], Tensor]:
    """Compute each loss (B,), nothing being drawn, and the gradient of their weighted sum by all that is trained."""
    config = side.config.model_copy(update={"latent": latent})
    losses = sft_losses(side.compiler, side.executor, examples, config, temperature=0.0)
    total = sum((getattr(config.weights, name) * value.sum().cpu() for name, value in losses.items()), torch.zeros(()))
    trained = list(trained_parameters(side.compiler).values())
    gradients = torch.autograd.grad(total, trained, allow_unused=True)
    flat = [(torch.zeros_like(p) if g is None else g).flatten().cpu() for p, g in zip(trained, gradients, strict=True)]
    return {name: value.detach().cpu() for name, value in losses.items()}, torch.cat(flat)


@torch.no_grad()
def _scores(side: Side) -> Tensor:
    """Score commands behind prompts with soft tokens: (rows x commands,)."""
    n, width = side.compiler.n_tokens, side.executor.backbone.hidden_size
    soft = torch.randn(ROWS, n, width, generator=torch.Generator().manual_seed(3)) * 0.03
    prompts = [replace(prompt, soft=row) for prompt, row in zip(_prompts(40, 4, n), soft, strict=True)]
    return torch.cat(side.executor.candidate_logprobs(prompts, [commands(SHORT)] * ROWS)).float().cpu()


def _compiled(side: Side) -> tuple[list[tuple[int, ...]], Tensor]:
    """Compile prompts of unequal length: emissions, and the means of their soft tokens (B, N, d)."""
    prompts = _prompts(60, 5)
    side.compiler.encode = lambda request: prompts[int(request.memory[0].id)]
    made = side.compiler.compile(requests_of(ROWS))
    return [c.emission_ids for c in made], torch.stack([c.mu for c in made if c.mu is not None])


def _examples(n: int, width: int = 50 + EMITTED, picture: bool = False) -> list[Example]:
    """Draw a micro-batch of rows of unequal length whose prompts and emissions are at most `width` tokens together
    with the N memory tokens, and which begin with a picture where one is asked for."""
    emissions, actions, memories = (_prompts(size, seed) for size, seed in ((EMITTED, 6), (5, 7), (30, 8)))
    prompts = _prompts(width - EMITTED - (n if width == WIDE else 0), 9)
    if picture:
        seen = [_picture(seed) for seed in range(ROWS)]
        prompts = [Prompt((*s.ids, *p.ids), pictures=s.pictures) for s, p in zip(seen, prompts, strict=True)]
    rows = zip(prompts, emissions, _prompts(40, 10, n), actions, memories, strict=True)
    return [Example(p, e.ids, acting, a.ids, m.ids, True) for p, e, acting, a, m in rows]


def _picture(seed: int) -> Prompt:
    """Draw a picture of 64 x 64 pixels, as the shipped compiler reads it: 8 x 8 patches of 2 x 3 x 8 x 8 values, and a
    token for four patches. (Its processor would need torchvision.)"""
    values = torch.randn(64, 384, generator=torch.Generator().manual_seed(seed))
    read = {"pixel_values": values, "image_grid_thw": torch.tensor([[1, 8, 8]])}
    picture = Picture(Image.new("RGB", (64, 64)), 16, read)
    return Prompt((model_config(TINY[0]).image_token_id,) * picture.tokens, pictures=(picture,))


def _prompts(tokens: int, seed: int, soft: int = 0) -> list[Prompt]:
    """Draw a batch of prompts, each one a token shorter than the one before, that begin with places for soft tokens."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(WORD, WORDS, (ROWS, tokens), generator=draw).tolist()
    return [Prompt((*((MEMORY,) * soft), *row[: tokens - i])) for i, row in enumerate(ids)]
