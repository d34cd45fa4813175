"""An update of GRPO at the paper's shapes: seconds, tokens/s and peak memory.

`score` is the paper's gradient of the soft tokens, in which the executor has no part and is not even loaded; `pathwise`
goes through it.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu.measuring import peak_beyond, seconds_of, tried
from benchmarks.gpu.models import chosen, keep_layers, lengths_of, make_compiler, make_executor, sft_config
from benchmarks.gpu.parts import Row, Setup
from benchmarks.plan_check import staying
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


def ways(setup: Setup) -> Iterator[tuple[Row, GrpoConfig]]:
    """Yield each way of updating, as the first columns of its row, with its settings."""
    first = chosen(setup)
    for gradient, more in (("score", ()), ("pathwise", PATHWISE)):
        for rows in ROWS:
            for recompute in (True, False):
                case = replace(first, rows=rows, recompute=recompute)
                row = {"models": case.name, "gradient": gradient, "rows": rows, "checkpointing": recompute}
                yield row, load_config(GrpoConfig, "grpo/paper", case.settings(*ALONE, *more))


def measure(setup: Setup) -> Iterator[Row]:
    """Yield a row for each gradient, number of samples, and with and without gradient checkpointing."""
    settings = sft_config(chosen(setup))
    executor: FrozenExecutor | None = None
    compiler = make_compiler(settings, hidden_size(settings.executor), setup.device)
    for row, config in ways(setup):
        if row["gradient"] == "pathwise" and executor is None:
            executor = make_executor(settings, setup.device)
        yield tried(setup, row, lambda c=config, r=row["rows"], e=executor: _update(setup, c, r, compiler, e))
        compiler.zero_grad(set_to_none=True)
        gc.collect()


def plan(setup: Setup) -> Iterator[Row]:
    """Yield what the plan says of each way: peak memory, and TFLOPs of an update that computes nothing twice."""
    lengths, gpu = lengths_of(setup), setup.device == "cuda"
    for row, config in ways(setup):
        once = config.model_copy(update={"gradient_checkpointing": False})
        flops = MICRO_BATCHES * row["rows"] * sum(replay_update(once, lengths, row["rows"], gpu).flops.values())
        total = replay_update(config, lengths, row["rows"], gpu).total
        yield {**row, "tflop": flops / 1e12, "plan_gib": total / GIB}


def _update(
    setup: Setup, config: GrpoConfig, rows: int, compiler: MemoryCompiler, executor: FrozenExecutor | None
) -> Row:
    """Make updates after one that makes AdamW's moments."""
    lengths = lengths_of(setup)
    keep_layers(*(part.backbone for part in (compiler, executor) if part is not None))
    acting: Any = executor or NoExecutor()
    nobody: Any = None  # plays nothing here
    if executor is not None:
        executor.temperature = config.executor.temperature
    with tempfile.TemporaryDirectory() as folder:
        trainer = GrpoTrainer(config, compiler, acting, nobody, [nobody], Path(folder))
    samples = MICRO_BATCHES * samples_of(config, lengths, rows, compiler.projector.config.d_executor)
    learn = lambda: trainer.learn(samples)
    learn()
    models = [compiler, *([executor.model] if executor is not None else [])]
    beyond = peak_beyond(setup, learn)
    held = staying(models, trainer.backend.optimizer) + beyond
    seconds = seconds_of(setup, learn)
    tokens = sum(len(s.prompt.ids) + len(s.emission) + compiler.n_tokens for s in samples)
    return {"samples": len(samples), "seconds": seconds, "tokens_per_s": tokens / seconds, "peak_gib": held / GIB}
