"""Part `fsdp`: SFT on several GPUs with both models sharded (FSDP2), beside replicated models where these fit.

Runs under torchrun with one row per process. The first step's loss must equal that of replicated models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.gpu.measuring import completed, peak_beyond, seconds_of
from benchmarks.gpu.models import (
    FixedBatchTrainer,
    ModelPair,
    lengths_of,
    make_compiler,
    make_executor,
    model_pair,
    sft_config,
)
from benchmarks.gpu.parts import OUTCOME, Row, Setup
from benchmarks.measurement import resident_bytes
from compiler.hf import MemoryCompiler
from executor.hf import FrozenExecutor
from plan.budget import GIB, PARTS, Gpu
from plan.replay import episode_rows
from plan.stages import plan_sft
from training import distributed

TOLERATED = {"float32": 1e-4, "bfloat16": 2e-2}  # relative difference of the losses


def measure(setup: Setup) -> Iterator[Row]:
    """Yield a row per backend."""
    with distributed.group():
        yield from compare(setup)


def compare(setup: Setup) -> Iterator[Row]:
    """Measure replicated models, then shard them in place and measure again; needs a process group."""
    pair = replace(model_pair(setup), rows=setup.processes)
    config = sft_config(pair)
    executor = make_executor(config, setup.device)
    compiler = make_compiler(config, executor.backbone.hidden_size, setup.device)
    losses: dict[str, float] = {}
    for backend in ("replicated", "fsdp"):
        row = {"models": pair.name, "processes": setup.processes, "backend": backend}
        measured = completed(
            setup, row, lambda b=backend: _measure_steps(setup, pair, backend=b, compiler=compiler, executor=executor)
        )
        if failures := [outcome for outcome in distributed.gather(measured[OUTCOME]) if outcome != "ok"]:
            yield {**row, OUTCOME: failures[0]}
            continue
        losses[backend] = measured["first_loss"]
        if len(losses) == 2:
            gap = abs(losses["fsdp"] - losses["replicated"]) / abs(losses["replicated"])
            measured |= {"gap_of_loss": gap, "passed": gap <= TOLERATED[pair.dtype]}
        yield measured


def _measure_steps(
    setup: Setup, pair: ModelPair, backend: str, compiler: MemoryCompiler, executor: FrozenExecutor
) -> Row:
    """Measure steps, then restore the weights."""
    config, lengths = sft_config(pair, f"backend={backend}", "micro_batch_size=1"), lengths_of(setup)
    trainer = FixedBatchTrainer(config, compiler, executor, episode_rows(config, lengths, pair.rows))
    compiler.train()
    start = trainer.backend.weights()
    first = trainer.take_step()
    stays = resident_bytes([compiler, executor.model], trainer.backend.optimizer, trainer.backend._held)
    held = max(distributed.gather(stays + peak_beyond(setup, trainer.take_step)))
    seconds = max(distributed.gather(seconds_of(setup, trainer.take_step)))
    trainer.backend.load_weights(start)
    budget = plan_sft(config, lengths, Gpu("any", 0.0), setup.processes).budgets[0]
    plan = sum(getattr(budget, part) for part in PARTS if part != "overhead")
    return {
        "first_loss": first["loss"],
        "seconds": seconds,
        "tokens_per_s": first["tokens"] / seconds,
        "stays_gib": stays / GIB,
        "peak_gib": held / GIB,
        "plan_gib": plan / GIB,
        "plan_over_peak": plan / held,
    }
