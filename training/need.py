"""Fits what guesses which steps need compiling (`compiler.need`) to the rows that a compiler was trained on.

    memcompiler train need RUN           # RUN/need.safetensors and need.json, for the delivery `compiled_needed`

SFT does so at its end; the command is for runs of an older version, and for another `recall`. The threshold is the
highest at which `recall` of the steps that the teacher guides are still compiled, on tasks that it was not fitted to.
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
from compiler.language import parse
from compiler.need import Need, features
from compiler.records import CompileRequest
from configs.load import ConfigError, load_config
from configs.run_folder import CONFIG
from configs.training import SftConfig
from data_gen.rows import SftRow, StoredRows, held_out, row_folders, shuffled, without_brief_state
from memory.linear import fit_head
from runtime.lock import FolderLock
from runtime.progress import progress

CS = (0.01, 0.1, 1.0)
MOST = 25_000  # rows that are read: a few thousand weights want no more
HELD_OUT = 0.2  # share of the tasks on which C and threshold are chosen
console = Console(width=120)


def train_need(run: Path, recall: float = 0.98, seed: int = 0) -> Need:
    """Fit it to the rows of an SFT run, and leave it in the run's folder, beside its checkpoints.

    Raises:
        CheckpointError: the folder is not of an SFT run.
        FileNotFoundError: its rows are not there.
        ConfigError: all or none of them are guided.
    """
    if not (run / CONFIG).is_file():
        raise CheckpointError(f"{run} is no folder of an SFT run: it has no {CONFIG}")
    with FolderLock(run, "memcompiler train need"):
        return _train_need(run, recall, seed)


def _train_need(run: Path, recall: float, seed: int) -> Need:
    config = load_config(SftConfig, str(run / CONFIG), [])
    edit = None if config.brief_state else without_brief_state
    parts = [StoredRows(folder, edit, pictures=False) for folder in row_folders(config.rows)]
    told, guided, tasks = _read(parts, seed)
    fitted, held = held_out(tasks, HELD_OUT, seed)
    rows = len(tasks) // 2
    if any(len(set(guided[part])) < 2 for part in (fitted, held)):
        raise ConfigError(f"of {rows} rows {guided.sum() // 2} are guided: too few, or too many, to tell them apart")
    need, facts = fit(told[fitted], guided[fitted], told[held], guided[held], recall)
    need = replace(need, manifest={**facts, "rows": rows, "seed": seed})
    need.save(run)
    console.print(
        f"  need: {guided.mean():.0%} of {rows} steps are guided; compiling {facts['share']:.0%} of those of held-out "
        f"tasks finds {facts['recall']:.0%} of theirs (C = {facts['c']:g}, p >= {need.threshold:.2f})"
    )
    return need


def leave_need(run: Path, seed: int) -> None:
    """Fit it at the end of SFT, where the rows tell anything; where they do not, say why."""
    try:
        train_need(run, seed=seed)
    except ValueError as error:  # of too few tasks, or guided always or never
        console.print(f"  need: nothing says which steps need compiling ({error})")


def _read(parts: Sequence[StoredRows], seed: int) -> tuple[Any, NDArray[np.int64], list[str]]:
    """Hash each step twice, as it was and as it is where nothing is compiled without need (2n, WIDTH); say which are
    guided (2n,), and of which tasks. Of more than MOST rows, those of a share of the tasks."""
    guided, tasks, length = list[bool](), list[str](), sum(map(len, parts))
    names = shuffled(chain.from_iterable(part.tasks for part in parts), seed)
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
    """Add to each row the Brief State that it would have had if none but the first and the guided steps before it had
    been compiled (who spares a compilation spares its operations, too), and whether it is guided itself."""
    state, before, guided = "", None, False
    for row in rows:
        if before is None or not before.t or guided or row.task_id != before.task_id or row.t <= before.t:
            state = row.state
        before, guided = row, bool(parse(row.emission).emission.guidance)
        yield row, state, guided


def fit(
    x: Any, guided: NDArray[np.int64], held_x: Any, held_guided: NDArray[np.int64], recall: float
) -> tuple[Need, dict[str, float]]:
    """Fit (n, WIDTH) features to labels (n,); C is the one that needs the fewest compilations for this recall of the
    held-out ones."""
    found = []
    for c in CS:
        head = fit_head(x, guided, c)
        p = head(held_x)
        threshold = _threshold(p[held_guided == 1], recall)
        compiled = p >= threshold
        found.append((compiled.mean(), c, head, threshold, compiled[held_guided == 1].mean()))
    share, c, head, threshold, kept = min(found, key=lambda each: each[:2])
    return Need(head, threshold), {"c": c, "share": float(share), "recall": float(kept)}


def _threshold(guided: NDArray[np.float64], recall: float) -> float:
    """Return the highest threshold that at least this share reaches."""
    ranked = np.sort(guided)[::-1]
    return float(ranked[max(0, int(np.ceil(recall * len(ranked))) - 1)])
