"""`memcompiler train sft`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from compiler.build import load_compiler
from configs.load import ConfigError
from configs.run_folder import RunFolder
from configs.training import SftConfig
from executor.build import load_frozen
from runtime.progress import progress

if TYPE_CHECKING:
    from compiler.hf import MemoryCompiler

console = Console(width=120)


def run_train_sft(config: SftConfig, out: Path, on_exists: str = "resume") -> MemoryCompiler:
    """Train (or go on training) and leave checkpoints and metrics in OUT."""
    from training import distributed

    if config.executor.engine != "hf":
        raise ConfigError("SFT's gradient passes through the executor: it needs executor.engine=hf")
    with distributed.group():
        return _train_sft(config, out, on_exists)


def _train_sft(config: SftConfig, out: Path, on_exists: str) -> MemoryCompiler:
    from data_gen.rows import load_rows, row_folders
    from memcompiler.leakage import guard_rows, record_rows
    from training import distributed
    from training.sft import SftTrainer, run_sft

    parts = {folder: load_rows(folder) for folder in row_folders(config.rows)}
    problems = [
        problem
        for folder, part in parts.items()
        for problem in guard_rows(folder, (row.task_id for row in part), config.allow_leakage)
    ]
    run = None
    if distributed.rank() == 0:
        run = RunFolder.create(out, config, on_exists=on_exists, ignore=distributed.MAY_CHANGE_ON_RESUME)  # type: ignore[arg-type]
        record_rows(run, list(parts), problems)
    distributed.barrier()
    executor = load_frozen(config.executor)
    compiler = load_compiler(config.compiler, executor, config.seed)
    rows = [row for part in parts.values() for row in part]
    trainer = SftTrainer(config, compiler, executor, rows, out, _bank_facts(list(parts)))
    resumed = trainer.resume()
    if run is not None:  # also where it starts over, having been killed before its first checkpoint
        run.metrics.keep(lambda row: row["step"] <= trainer.step)
    if resumed:
        console.print(f"  resumed at step {trainer.step} of {trainer.total}")
    with progress("sft", trainer.total, trainer.step) as advance:

        def log(metrics: dict[str, float]) -> None:
            assert run is not None  # only rank 0 logs
            run.metrics.append(metrics)
            terms = " ".join(f"{k[5:]} {v:.2f}" for k, v in metrics.items() if k.startswith("loss_"))
            advance(f"loss {metrics['loss']:.2f}  {terms}")

        run_sft(trainer, log)
    return compiler


def _bank_facts(rows: Sequence[Path]) -> dict[str, Any]:
    """The bank version that the rows were made from; for several folders a list, in their order."""
    records = [folder.parent / "collect.json" for folder in rows]
    versions = [json.loads(path.read_text())["bank_version"] if path.exists() else None for path in records]
    if len(versions) > 1:
        return {"bank_versions": versions}
    return {"bank_version": versions[0]} if versions[0] is not None else {}
