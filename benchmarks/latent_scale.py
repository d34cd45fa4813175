"""How large the soft tokens are before training, and how far one update of GRPO moves them.

    python -m benchmarks.latent_scale [--rows ROWS [--prompts 48]] zoo/household/compiler SmolLM2-135M-Instruct

For each model: the root mean square of its hidden states at the memory tokens, and of mu (in units of the executor's
embeddings) as the projector starts, without `compiler.soft.normalise` and with it.

Then one update at the paper's shapes (Qwen2.5-VL-7B to Qwen2.5-14B: 3,584 to 5,120, N = 16; 240 steps of 16 episodes,
100 text tokens each), for several settings of AdamW over the projector: how many sigmas mu moves. Hidden states,
noise and advantages are drawn (seed 0); 64 of the 5,120 dimensions are computed, for they do not touch each other.

With ROWS, a folder of `memcompiler collect`, the same for each model with its own hidden states (normalised) behind
that many of their prompts, which are alike, and an executor of its own width; and what fresh soft tokens do to the
model itself as frozen executor: the loss of the action (nats a token, mu itself), with and without `normalise`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from configs.training import GrpoOptimizer
from soft_mem.projector import Projector, ProjectorConfig

if TYPE_CHECKING:
    from compiler.hf import MemoryCompiler
    from data_gen.rows import SftRow

STEPS, TOKENS, N = 240, 100, 16
D_COMPILER, D_EXECUTOR, SHOWN = 3584, 5120, 64


def at_the_start(compiler: MemoryCompiler) -> tuple[float, float]:
    """Give the root mean squares of hidden states and of mu, for a request."""
    from compiler.records import CompileRequest
    from memory.entry import MemoryEntry, Provenance

    entry = MemoryEntry("a", "in home 1: put a mug in shelf\ngo to shelf 1", Provenance("t", "s", "g", "train", True))
    request = CompileRequest("put a mug in shelf", (entry,), None, "You see a mug 1.")
    with torch.no_grad():
        scored = compiler.score([compiler.encode(request)], [compiler.emission_ids("> it was | go to shelf 1")])
    return _rms(scored.h_soft), _rms(scored.gaussian.mu)


def made(model: str, normalise: bool = False) -> MemoryCompiler:
    """Make a compiler with a fresh adapter and projector."""
    from compiler.hf import MemoryCompiler
    from configs.models import Lora, model_path
    from lm.backbone import load_backbone

    torch.manual_seed(0)
    backbone = load_backbone(model_path(model), torch.float32, "cpu")
    projector = Projector(ProjectorConfig(backbone.hidden_size, 256, N, normalise=normalise))
    return MemoryCompiler(backbone, projector, lora=Lora()).eval()


@torch.no_grad()
def states_of(compiler: MemoryCompiler, rows: Path, prompts: int) -> Tensor:
    """Read so many rows and return the hidden states of the memory tokens behind them, (prompts, N, d)."""
    from agent.records import compile_request

    states = []
    for row in _chosen(rows, prompts):
        prompt = compiler.encode(compile_request(row.step_input(N)))
        states.append(compiler.score([prompt], [compiler.emission_ids(row.emission)]).h_soft)
    return torch.cat(states).float()


def moved(
    settings: GrpoOptimizer, hidden: Tensor | None = None, d_executor: int = D_EXECUTOR, steps: int = STEPS
) -> float:  # fmt: skip
    """Take one update of Eq. 8 on soft tokens that were just sampled; give by how many sigmas mu moved. `hidden`: of
    the steps, (steps, N, d); drawn for so many `steps` where none are given."""
    torch.manual_seed(0)
    shown, width = min(SHOWN, d_executor), D_COMPILER if hidden is None else hidden.shape[-1]
    projector = Projector(ProjectorConfig(width, shown, N, normalise=hidden is not None))
    hidden = torch.randn(steps, N, width) if hidden is None else hidden
    steps = len(hidden)
    advantages = torch.randn(steps, 1)
    gaussian = projector(hidden)
    z = gaussian.at(torch.randn_like(gaussian.mu)).detach()
    logprobs = gaussian.log_prob(z) * shown / d_executor  # its mean is over all dimensions
    weight = 1 / (steps * (TOKENS + N))  # of a token, where all count alike
    rate, eps = settings.projector_lr or settings.lr, settings.projector_eps or settings.eps
    optimizer = torch.optim.AdamW(projector.parameters(), lr=rate, betas=settings.betas, eps=eps)
    (-weight * advantages * (logprobs - logprobs.detach()).exp()).sum().backward()
    optimizer.step()
    with torch.no_grad():
        return _rms((projector(hidden).mu - gaussian.mu) / gaussian.log_sigma.exp())


@torch.no_grad()
def disturbed(model: str, rows: Path, prompts: int) -> dict[str, Tensor]:
    """Compute the loss of the action of so many rows, nats a token, for a model that is compiler and executor: without
    soft tokens, with fresh ones as they are, and with `normalise`."""
    from compiler.build import load_compiler
    from configs.load import load_config
    from configs.training import SftConfig
    from envs.spec import Told
    from executor.build import load_frozen
    from training.sft import encode_row, sft_losses

    chosen, losses = _chosen(rows, prompts), dict[str, list[float]]()
    named = [f"{role}.{key}" for role in ("compiler", "executor") for key in (f"model={model}", "dtype=float32")]
    named += ["compiler.soft.emb_std=auto", "executor.reads_state=true", "executor.soft_on=always"]
    for name, normalise in (("as they are", False), ("normalised", True)):
        config = load_config(SftConfig, "sft/paper", [*named, f"compiler.soft.normalise={normalise}"])
        executor = load_frozen(config.executor, Told(""))
        compiler = load_compiler(config.compiler, executor).eval()
        none = torch.zeros(1, 0, executor.backbone.hidden_size, device=executor.backbone.device)
        for row in chosen:
            soft, bare = (encode_row(row, compiler, executor, with_soft) for with_soft in (True, False))
            loss = sft_losses(compiler, executor, [soft], config, temperature=0.0)["action"]
            losses.setdefault(name, []).append(float(loss) / len(soft.action))
            if not normalise:
                alone, _ = executor.action_nll([bare.executor_prompt], none, [bare.action])
                losses.setdefault("none", []).append(float(alone) / len(bare.action))
    return {name: torch.tensor(values) for name, values in losses.items()}


def _chosen(rows: Path, number: int) -> list[SftRow]:
    """Read so many rows, evenly over the folder."""
    from data_gen.rows import load_rows

    played = load_rows(rows)
    return [played[i * len(played) // number] for i in range(number)]


def _rms(values: Tensor) -> float:
    return float(values.float().square().mean().sqrt())


def main(models: Sequence[str], rows: Path | None, prompts: int) -> None:
    print("| model | hidden | mu | mu, normalised |\n|---|---:|---:|---:|")
    states = dict[str, Tensor]()
    for model in models:
        compiler = made(model)
        (hidden, mu), (_, normalised) = at_the_start(compiler), at_the_start(made(model, True))
        print(f"| {model} | {hidden:.2f} | {mu:.2f} | {normalised:.2f} |", flush=True)
        if rows is not None:
            states[model] = states_of(compiler, rows, prompts)
    print("\n| hidden states | projector's rate | eps | sigmas that mu moves in an update |\n|---|---:|---:|---:|")
    for name, hidden in {"drawn": None, **states}.items():
        width = D_EXECUTOR if hidden is None else hidden.shape[-1]
        for rate in (1e-6, 1e-5, 1e-4, 1e-3):
            for eps in (1e-5, 1e-8):
                far = moved(GrpoOptimizer(projector_lr=rate, projector_eps=eps), hidden, width)
                print(f"| {name} | {rate:g} | {eps:g} | {far:.5f} |", flush=True)
    if rows is None:
        return
    print("\n| loss of the action | no soft tokens | as they are | normalised | difference |")
    print("|---|---:|---:|---:|---:|")
    for model in models:
        losses = disturbed(model, rows, prompts)
        apart = losses["normalised"] - losses["as they are"]
        means = " | ".join(f"{losses[name].mean():.3f}" for name in ("none", "as they are", "normalised"))
        print(f"| {model} | {means} | {apart.mean():+.3f} (s.e. {apart.std() / prompts**0.5:.3f}) |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("models", nargs="*")
    given = parser.parse_args()
    main(given.models, given.rows, given.prompts)
