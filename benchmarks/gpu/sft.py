"""A step of SFT at the paper's shapes: tokens/s and peak memory; by gradient checkpointing, rows of a micro-batch, and
kernels of attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from transformers.utils.import_utils import is_flash_attn_2_available

from benchmarks.gpu.measuring import OUTCOME, peak_beyond, seconds_of, tried
from benchmarks.gpu.models import (
    RandomExecutor,
    Steps,
    attend_by,
    chosen,
    keep_layers,
    lengths_of,
    make_compiler,
    make_executor,
    sft_config,
)
from benchmarks.gpu.parts import Row, Setup
from benchmarks.plan_check import Case, staying
from compiler.hf import MemoryCompiler
from plan.budget import GIB
from plan.replay import replay_sft, rows_of

SDPA, FLASH = "sdpa", "flash_attention_2"
ROWS = (1, 2, 4)


def ways(setup: Setup) -> Iterator[tuple[Row, Case]]:
    """Yield each way of taking a step, as the first columns of its row, with its models; most useful first."""
    first = chosen(setup)
    for kind, rows in [(SDPA, rows) for rows in ROWS] + [("eager", 1), (FLASH, 1)]:
        for recompute in (True, False):
            case = replace(first, rows=rows, recompute=recompute)
            yield {"models": case.name, "attention": kind, "rows": rows, "checkpointing": recompute}, case


def measure(setup: Setup) -> Iterator[Row]:
    """Yield a row for each way of taking a step."""
    config = sft_config(chosen(setup))
    executor = make_executor(config, setup.device)
    compiler = make_compiler(config, executor.backbone.hidden_size, setup.device)
    for row, case in ways(setup):
        if row["attention"] == FLASH and not is_flash_attn_2_available():
            yield {**row, OUTCOME: "skipped: flash-attn is not installed, or there is no GPU"}
            continue
        yield tried(setup, row, lambda r=row, c=case: _step(setup, c, r["attention"], compiler, executor))
        compiler.zero_grad(set_to_none=True)


def plan(setup: Setup) -> Iterator[Row]:
    """Yield the plan of each way: peak memory (for sdpa), and TFLOPs of a step that computes nothing twice."""
    lengths, gpu = lengths_of(setup), setup.device == "cuda"
    for row, case in ways(setup):
        once = replay_sft(sft_config(replace(case, recompute=False)), lengths, case.rows, gpu)
        made = replay_sft(sft_config(case), lengths, case.rows, gpu) if row["attention"] == SDPA else None
        tflop = case.rows * sum(once.flops.values()) / 1e12
        yield {**row, "tflop": tflop, "plan_gib": made and made.total / GIB}


def _step(setup: Setup, case: Case, kind: str, compiler: MemoryCompiler, executor: RandomExecutor) -> Row:
    """Take steps after one that makes AdamW's moments."""
    config, lengths = sft_config(case), lengths_of(setup)
    attend_by(kind, compiler.backbone, executor.backbone)
    keep_layers(compiler.backbone, executor.backbone)
    trainer = Steps(config, compiler, executor, rows_of(config, lengths, case.rows))
    compiler.train()
    tokens = trainer.take_step()["tokens"]
    beyond = peak_beyond(setup, trainer.take_step)
    held = staying([compiler, executor.model], trainer.backend.optimizer) + beyond
    seconds = seconds_of(setup, trainer.take_step)
    return {"seconds": seconds, "tokens_per_s": tokens / seconds, "peak_gib": held / GIB}
