"""Part `sft`: tokens/s and peak memory of an SFT step, by gradient checkpointing, micro-batch and attention kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from transformers.utils.import_utils import is_flash_attn_2_available

from benchmarks.gpu.measuring import completed, peak_beyond, seconds_of
from benchmarks.gpu.models import (
    FixedBatchTrainer,
    ModelPair,
    RandomExecutor,
    disable_checkpointing,
    lengths_of,
    make_compiler,
    make_executor,
    model_pair,
    set_attention,
    sft_config,
)
from benchmarks.gpu.parts import OUTCOME, Row, Setup
from benchmarks.measurement import resident_bytes
from compiler.hf import MemoryCompiler
from plan.budget import GIB
from plan.replay import episode_rows, replay_sft

SDPA, FLASH = "sdpa", "flash_attention_2"
ROWS = (1, 2, 4)


def variants(setup: Setup) -> Iterator[tuple[Row, ModelPair]]:
    """Yield the first columns of each row with its models, most useful first."""
    first = model_pair(setup)
    for kind, rows in [(SDPA, rows) for rows in ROWS] + [("eager", 1), (FLASH, 1)]:
        for checkpointing in (True, False):
            pair = replace(first, rows=rows, checkpointing=checkpointing)
            yield {"models": pair.name, "attention": kind, "rows": rows, "checkpointing": checkpointing}, pair


def measure(setup: Setup) -> Iterator[Row]:
    """Yield a row per variant."""
    config = sft_config(model_pair(setup))
    executor = make_executor(config, setup.device)
    compiler = make_compiler(config, executor.backbone.hidden_size, setup.device)
    for row, pair in variants(setup):
        if row["attention"] == FLASH and not is_flash_attn_2_available():
            yield {**row, OUTCOME: "skipped: flash-attn or a GPU is missing"}
            continue
        yield completed(
            setup,
            row,
            lambda r=row, p=pair: _measure_step(setup, p, kind=r["attention"], compiler=compiler, executor=executor),
        )
        compiler.zero_grad(set_to_none=True)


def plan(setup: Setup) -> Iterator[Row]:
    """Yield the planned peak memory (sdpa only) and TFLOPs of a step without recomputation."""
    lengths, gpu = lengths_of(setup), setup.device == "cuda"
    for row, pair in variants(setup):
        once = replay_sft(sft_config(replace(pair, checkpointing=False)), lengths, pair.rows, gpu)
        predicted = replay_sft(sft_config(pair), lengths, pair.rows, gpu) if row["attention"] == SDPA else None
        tflop = pair.rows * sum(once.flops.values()) / 1e12
        yield {**row, "tflop": tflop, "plan_gib": predicted and predicted.total / GIB}


def _measure_step(setup: Setup, pair: ModelPair, kind: str, compiler: MemoryCompiler, executor: RandomExecutor) -> Row:
    """Measure steps after a first one, which allocates AdamW's moments."""
    config, lengths = sft_config(pair), lengths_of(setup)
    set_attention(kind, compiler.backbone, executor.backbone)
    disable_checkpointing(compiler.backbone, executor.backbone)
    trainer = FixedBatchTrainer(config, compiler, executor, episode_rows(config, lengths, pair.rows))
    compiler.train()
    tokens = trainer.take_step()["tokens"]
    beyond = peak_beyond(setup, trainer.take_step)
    held = resident_bytes([compiler, executor.model], trainer.backend.optimizer) + beyond
    seconds = seconds_of(setup, trainer.take_step)
    return {"seconds": seconds, "tokens_per_s": tokens / seconds, "peak_gib": held / GIB}
