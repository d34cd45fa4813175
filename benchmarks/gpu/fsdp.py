"""SFT on several GPUs, both models in slices (FSDP2), beside whole ones where these fit.

Every process runs this under torchrun and takes one row of a step. The loss of the first step has to be the one that
whole models have, from the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.gpu.measuring import OUTCOME, peak_beyond, seconds_of, tried
from benchmarks.gpu.models import Steps, chosen, lengths_of, make_compiler, make_executor, sft_config
from benchmarks.gpu.parts import Row, Setup
from benchmarks.plan_check import Case, staying
from compiler.hf import MemoryCompiler
from executor.hf import FrozenExecutor
from plan.budget import GIB, PARTS, Gpu
from plan.replay import rows_of
from plan.stages import plan_sft
from training import distributed

TOLERATED = {"float32": 1e-4, "bfloat16": 2e-2}  # relative difference of the losses


def measure(setup: Setup) -> Iterator[Row]:
    """Yield a row for each backend; `fsdp` last, for models stay in slices."""
    with distributed.group():
        yield from compare(setup)


def compare(setup: Setup) -> Iterator[Row]:
    """Take steps with whole models, then with slices; inside of a process group."""
    case = replace(chosen(setup), rows=setup.processes)
    config = sft_config(case)
    executor = make_executor(config, setup.device)
    compiler = make_compiler(config, executor.backbone.hidden_size, setup.device)
    losses: dict[str, float] = {}
    for backend in ("replicated", "fsdp"):
        row = {"models": case.name, "processes": setup.processes, "backend": backend}
        made = tried(setup, row, lambda b=backend: _steps(setup, case, b, compiler, executor))
        everybody = distributed.gather(made[OUTCOME])
        if any(outcome != "ok" for outcome in everybody):  # somebody's memory is not everybody's
            yield {**row, OUTCOME: next(outcome for outcome in everybody if outcome != "ok")}
            continue
        losses[backend] = made["first_loss"]
        if len(losses) == 2:
            gap = abs(losses["fsdp"] - losses["replicated"]) / abs(losses["replicated"])
            made |= {"gap_of_loss": gap, "passed": gap <= TOLERATED[case.dtype]}
        yield made


def _steps(setup: Setup, case: Case, backend: str, compiler: MemoryCompiler, executor: FrozenExecutor) -> Row:
    """Take steps from the weights as they are, and leave them so."""
    config, lengths = sft_config(case, f"backend={backend}", "micro_batch_size=1"), lengths_of(setup)
    trainer = Steps(config, compiler, executor, rows_of(config, lengths, case.rows))
    compiler.train()
    start = trainer.backend.weights()
    first = trainer.take_step()
    stays = staying([compiler, executor.model], trainer.backend.optimizer, trainer.backend._held)
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
