"""Part 3: a step of SFT at the paper's shapes: tokens/s, MFU, and peak memory beside what the plan predicts.

With and without gradient checkpointing, by rows of a micro-batch, and by kernels of attention. FLOPs are the plan's,
for a step that computes nothing twice; its memory is for sdpa.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from transformers.utils.import_utils import is_flash_attn_2_available

from benchmarks.gpu.measuring import OUTCOME, peak_beyond, rates, seconds_of, tried
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


def measure(setup: Setup) -> Iterator[Row]:
    """Yield a row for each way of taking a step; all rows with sdpa first."""
    first = chosen(setup)
    config = sft_config(first)
    executor = make_executor(config, setup.device)
    compiler = make_compiler(config, executor.backbone.hidden_size, setup.device)
    ways = [(SDPA, rows) for rows in ROWS] + [("eager", 1), (FLASH, 1)]
    for kind, rows in ways:
        for recompute in (True, False):
            case = replace(first, rows=rows, recompute=recompute)
            row = {"models": case.name, "attention": kind, "rows": rows, "checkpointing": recompute}
            if kind == FLASH and not is_flash_attn_2_available():
                yield {**row, OUTCOME: "skipped: flash-attn is not installed, or there is no GPU"}
                continue
            yield tried(setup, row, lambda case=case, kind=kind: _step(setup, case, kind, compiler, executor))
            compiler.zero_grad(set_to_none=True)


def _step(setup: Setup, case: Case, kind: str, compiler: MemoryCompiler, executor: RandomExecutor) -> Row:
    """Take steps after one that makes AdamW's moments."""
    config, lengths, gpu = sft_config(case), lengths_of(setup), setup.device == "cuda"
    attend_by(kind, compiler.backbone, executor.backbone)
    keep_layers(compiler.backbone, executor.backbone)
    trainer = Steps(config, compiler, executor, rows_of(config, lengths, case.rows))
    compiler.train()
    tokens = trainer.take_step()["tokens"]
    beyond = peak_beyond(setup, trainer.take_step)
    held = staying([compiler, executor.model], trainer.backend.optimizer) + beyond
    seconds = seconds_of(setup, trainer.take_step)
    once = sft_config(replace(case, recompute=False))
    flops = case.rows * sum(replay_sft(once, lengths, case.rows, gpu).flops.values())
    predicted = replay_sft(config, lengths, case.rows, gpu).total if kind == SDPA else None
    return {
        "seconds": seconds, "tokens_per_s": tokens / seconds, **rates(flops, seconds), "peak_gib": held / GIB,
        "plan_gib": predicted and predicted / GIB, "plan_over_peak": predicted and predicted / held,
    }  # fmt: skip
