"""Fits the compile gate (`compiler.gate`) to the rows that a compiler was trained on.

    memcompiler train gate RUN           # RUN/gate.safetensors and gate.json, for the delivery `compiled_gated`

SFT fits it at its end. The command serves runs of older versions, and other values of `recall`, the share of guided
steps that are compiled on held-out tasks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from agent.records import compile_request
from compiler.checkpoint import CheckpointError
from compiler.gate import CompileGate, features, fit
from compiler.language import parse
from compiler.records import CompileRequest
from configs.load import ConfigError, load_config
from configs.run_folder import CONFIG
from configs.training import SftConfig
from data_gen.rows import SftRow, SftRowDataset, row_folders, seeded_order, split_row_indices, without_brief_state
from runtime.lock import FolderLock
from runtime.progress import progress

MOST = 25_000  # rows that are read: enough for a few thousand weights
HELD_OUT = 0.2  # share of the tasks that C and threshold are chosen on
console = Console(width=120)


def train_gate(run: Path, recall: float = 0.98, seed: int = 0) -> CompileGate:
    """Fit the gate to the rows of an SFT run, and save it in the run's folder.

    Args:
        run: folder of the SFT run.
        recall: share of the guided steps of held-out tasks that the gate has to compile.

    Raises:
        CheckpointError: `run` is not the folder of an SFT run.
        FileNotFoundError: the run's rows are missing.
        ConfigError: all or none of the rows are guided.
    """
    if not (run / CONFIG).is_file():
        raise CheckpointError(f"{run} is no folder of an SFT run: it has no {CONFIG}")
    with FolderLock(run, "memcompiler train gate"):
        return _fit_to_rows(run, recall, seed)


def _fit_to_rows(run: Path, recall: float, seed: int) -> CompileGate:
    config = load_config(SftConfig, str(run / CONFIG), [])  # without text, `brief_state` is off
    edit = None if config.brief_state else without_brief_state
    parts = [SftRowDataset(folder, edit, pictures=False) for folder in row_folders(config.rows)]
    x, guided, tasks = _read(parts, seed)
    fitted, held = split_row_indices(tasks, HELD_OUT, seed)  # row numbers
    rows = len(tasks) // 2
    if any(len(set(guided[part])) < 2 for part in (fitted, held)):
        raise ConfigError(f"of {rows} rows {guided.sum() // 2} are guided: a gate needs both kinds in both parts")
    gate, facts = fit(
        x[fitted],
        guided[fitted],
        held_x=x[held],
        held_guided=guided[held],
        recall=recall,
    )
    gate = replace(gate, manifest={**facts, "rows": rows, "seed": seed})
    gate.save(run)
    console.print(
        f"  gate: {guided.mean():.0%} of {rows} steps are guided; compiling {facts['share']:.0%} of those of held-out "
        f"tasks finds {facts['recall']:.0%} of theirs (C = {facts['c']:g}, p >= {gate.threshold:.2f})"
    )
    return gate


def fit_gate_after_sft(run: Path, seed: int) -> None:
    """Fit the gate at the end of SFT, or print why the rows do not allow it."""
    try:
        train_gate(run, seed=seed)
    except ValueError as error:  # too few tasks, or all or no steps guided
        console.print(f"  gate: none was fitted ({error})")


def _read(parts: Sequence[SftRowDataset], seed: int) -> tuple[Any, NDArray[np.int64], list[str]]:
    """Return features (2n, WIDTH), whether each step is guided (2n,), and the task of each.

    Each step counts twice: with its recorded Brief State, and with the older one that it has under a gate. Beyond MOST
    rows, only a share of the tasks is read.
    """
    guided, tasks, length = list[bool](), list[str](), sum(map(len, parts))
    names = seeded_order(chain.from_iterable(part.tasks for part in parts), seed)
    chosen = set(names[: math.ceil(len(names) * min(1.0, MOST / max(length, 1)))])

    def requests() -> Iterator[CompileRequest]:
        with progress("rows", length) as advance:
            for row, old, guides in _old_states(chain.from_iterable(parts)):
                for state in (row.state, old) if row.task_id in chosen else ():
                    guided.append(guides)
                    tasks.append(row.task_id)
                    yield compile_request(replace(row, state=state).step_input())
                advance(None)

    return features(requests()), np.array(guided, dtype=np.int64), tasks


def _old_states(rows: Iterable[SftRow]) -> Iterator[tuple[SftRow, str, bool]]:
    """Yield each row with its Brief State under a perfect gate, and whether the row is guided.

    Under such a gate, only the operations of the first and the guided steps are applied.
    """
    state, before, guided = "", None, False
    for row in rows:
        if before is None or not before.t or guided or row.task_id != before.task_id or row.t <= before.t:
            state = row.state
        before, guided = row, bool(parse(row.emission).emission.guidance)
        yield row, state, guided
