"""How large the soft tokens are before training, and how far one update of GRPO moves them.

    python -m benchmarks.latent_scale zoo/household/compiler zoo/alfworld/compiler

For each model: the root mean square of its hidden states at the memory tokens, and of mu (in units of the executor's
embeddings) as the projector starts, without `compiler.soft.normalise` and with it.

Then one update at the paper's shapes (Qwen2.5-VL-7B to Qwen2.5-14B: 3,584 to 5,120, N = 16; 240 steps of 16 episodes,
100 text tokens each), for several settings of AdamW over the projector: how many sigmas mu moves. Hidden states,
noise and advantages are drawn (seed 0); 64 of the 5,120 dimensions are computed, for they do not touch each other.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from configs.training import GrpoOptimizer
from soft_mem.projector import Projector, ProjectorConfig

STEPS, TOKENS, N = 240, 100, 16
D_COMPILER, D_EXECUTOR, SHOWN = 3584, 5120, 64


def at_the_start(model: str, normalise: bool) -> tuple[float, float]:
    """Give the root mean squares of hidden states and of mu, for a request."""
    from compiler.hf import MemoryCompiler
    from compiler.records import CompileRequest
    from configs.models import Lora
    from lm.backbone import load_backbone, model_path
    from memory.entry import MemoryEntry, Provenance

    torch.manual_seed(0)
    backbone = load_backbone(model_path(model), torch.float32, "cpu")
    projector = Projector(ProjectorConfig(backbone.hidden_size, 256, N, normalise=normalise))
    compiler = MemoryCompiler(backbone, projector, lora=Lora()).eval()
    entry = MemoryEntry("a", "in home 1: put a mug in shelf\ngo to shelf 1", Provenance("t", "s", "g", "train", True))
    request = CompileRequest("put a mug in shelf", (entry,), None, "You see a mug 1.")
    with torch.no_grad():
        scored = compiler.score([compiler.encode(request)], [compiler.emission_ids("> it was | go to shelf 1")])
    return _rms(scored.h_soft), _rms(scored.gaussian.mu)


def moved(settings: GrpoOptimizer, steps: int = STEPS) -> float:
    """Take one update of Eq. 8 on soft tokens that were just sampled; give by how many sigmas mu moved."""
    torch.manual_seed(0)
    projector = Projector(ProjectorConfig(D_COMPILER, SHOWN, N))
    hidden, advantages = torch.randn(steps, N, D_COMPILER), torch.randn(steps, 1)
    gaussian = projector(hidden)
    z = gaussian.at(torch.randn_like(gaussian.mu)).detach()
    logprobs = gaussian.log_prob(z) * SHOWN / D_EXECUTOR  # its mean is over all dimensions
    weight = 1 / (steps * (TOKENS + N))  # of a token, where all count alike
    rate, eps = settings.projector_lr or settings.lr, settings.projector_eps or settings.eps
    optimizer = torch.optim.AdamW(projector.parameters(), lr=rate, betas=settings.betas, eps=eps)
    (-weight * advantages * (logprobs - logprobs.detach()).exp()).sum().backward()
    optimizer.step()
    with torch.no_grad():
        return _rms((projector(hidden).mu - gaussian.mu) / gaussian.log_sigma.exp())


def _rms(values: torch.Tensor) -> float:
    return float(values.float().square().mean().sqrt())


def main(models: Sequence[str]) -> None:
    print("| model | hidden | mu | mu, normalised |\n|---|---:|---:|---:|")
    for model in models:
        (hidden, mu), (_, normalised) = (at_the_start(model, normalise) for normalise in (False, True))
        print(f"| {model} | {hidden:.2f} | {mu:.2f} | {normalised:.2f} |", flush=True)
    print("\n| projector's rate | eps | sigmas that mu moves in an update |\n|---:|---:|---:|")
    for rate in (1e-6, 1e-5, 1e-4):
        for eps in (1e-5, 1e-8):
            far = moved(GrpoOptimizer(projector_lr=rate, projector_eps=eps))
            print(f"| {rate:g} | {eps:g} | {far:.5f} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    main(parser.parse_args().models)
