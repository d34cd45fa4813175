"""Part `update`: seconds, tokens/s and peak memory of a GRPO update.

`score` is the paper's gradient of the soft tokens, which needs no executor; `pathwise` passes through the executor.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.gpu.measuring import completed, peak_beyond, seconds_of
from benchmarks.gpu.models import (
    disable_checkpointing,
    lengths_of,
    make_compiler,
    make_executor,
    model_pair,
    sft_config,
)
from benchmarks.gpu.parts import Row, Setup
from benchmarks.measurement import resident_bytes
from compiler.hf import MemoryCompiler
from configs.load import load_config
from configs.training import GrpoConfig
from executor.hf import FrozenExecutor
from plan.budget import GIB
from plan.replay import NoExecutor, hidden_size, replay_update, samples_of
from training.grpo import GrpoTrainer

ALONE = ("compiler.engine=hf", "compiler.checkpoint=null")
PATHWISE = ("loss.latent_gradient=pathwise", "executor.engine=hf", "executor.mode=choice", "executor.temperature=1.0")
ROWS = (1, 2)  # samples of a micro-batch
MICRO_BATCHES = 2  # of an update


def variants(setup: Setup) -> Iterator[tuple[Row, GrpoConfig]]:
    """Yield the first columns of each row with its settings."""
    first = model_pair(setup)
    for gradient, more in (("score", ()), ("pathwise", PATHWISE)):
        for rows in ROWS:
            for checkpointing in (True, False):
                pair = replace(first, rows=rows, checkpointing=checkpointing)
                row = {"models": pair.name, "gradient": gradient, "rows": rows, "checkpointing": checkpointing}
                yield row, load_config(GrpoConfig, "grpo/paper", pair.settings(*ALONE, *more))


def measure(setup: Setup) -> Iterator[Row]:
    """Yield a row per gradient, number of samples and gradient checkpointing."""
    settings = sft_config(model_pair(setup))
    executor: FrozenExecutor | None = None
    compiler = make_compiler(settings, hidden_size(settings.executor), setup.device)
    for row, config in variants(setup):
        if row["gradient"] == "pathwise" and executor is None:
            executor = make_executor(settings, setup.device)
        yield completed(
            setup,
            row,
            lambda c=config, r=row["rows"], e=executor: _measure_update(
                setup, c, rows=r, compiler=compiler, executor=e
            ),
        )
        compiler.zero_grad(set_to_none=True)
        gc.collect()


def plan(setup: Setup) -> Iterator[Row]:
    """Yield the planned peak memory and TFLOPs of an update without recomputation."""
    lengths, gpu = lengths_of(setup), setup.device == "cuda"
    for row, config in variants(setup):
        once = config.model_copy(update={"gradient_checkpointing": False})
        flops = MICRO_BATCHES * row["rows"] * sum(replay_update(once, lengths, row["rows"], gpu).flops.values())
        total = replay_update(config, lengths, row["rows"], gpu).total
        yield {**row, "tflop": flops / 1e12, "plan_gib": total / GIB}


def _measure_update(
    setup: Setup, config: GrpoConfig, rows: int, compiler: MemoryCompiler, executor: FrozenExecutor | None
) -> Row:
    """Measure updates after a first one, which allocates AdamW's moments."""
    lengths = lengths_of(setup)
    disable_checkpointing(*(part.backbone for part in (compiler, executor) if part is not None))
    acting: Any = executor or NoExecutor()
    unused: Any = SimpleNamespace(served=None, environment="")  # rollouts and tasks
    if executor is not None:
        executor.temperature = config.executor.temperature
    with tempfile.TemporaryDirectory() as folder:
        trainer = GrpoTrainer(config, compiler, executor=acting, engine=unused, specs=[unused], out=Path(folder))
    samples = MICRO_BATCHES * samples_of(config, lengths, rows, compiler.projector.config.d_executor)
    learn = lambda: trainer.learn(samples)
    learn()
    models = [compiler, *([executor.model] if executor is not None else [])]
    beyond = peak_beyond(setup, learn)
    held = resident_bytes(models, trainer.backend.optimizer) + beyond
    seconds = seconds_of(setup, learn)
    tokens = sum(len(s.prompt.ids) + len(s.emission) + compiler.n_tokens for s in samples)
    return {"samples": len(samples), "seconds": seconds, "tokens_per_s": tokens / seconds, "peak_gib": held / GIB}
