"""What a finished run has left: its results and its episodes, those of a matrix under the names of its tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from agent.records import Episode, read_episodes

EpisodeSource = Callable[[bool], Iterable[Episode]]  # called with whether pictures are wanted: numbers need none


def read_results(run: Path) -> dict[str, Any]:
    """Read a run's results.json.

    Raises:
        ValueError: there is none, or it is not whole; says what to do.
    """
    path = run / "results.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist: evaluate first (memcompiler eval -c CONFIG --out {run})")
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}): evaluate again") from error
    if not isinstance(results, dict) or not results.get("results"):
        missing = ", ".join(results.get("missing", ())) if isinstance(results, dict) else ""
        raise ValueError(
            f"{path} holds no results{f', {missing} are missing' if missing else ''}: go on with --on-exists resume"
        )
    return results


def episode_files(run: Path, results: Mapping[str, Any]) -> list[Path]:
    """Where the run's episodes are, or should be: one file, or one for each cell of a matrix."""
    folders = [run / cell["path"] for cell in results["cells"].values()] if "cells" in results else [run]
    return [folder / "episodes.jsonl" for folder in folders]


def episodes_of(run: Path, results: Mapping[str, Any]) -> EpisodeSource:
    """The run's episodes, read anew at each call; of a matrix, those of all cells (see `read_matrix`)."""
    if "cells" in results:
        return partial(read_matrix, run, results)
    return partial(read_episodes, run / "episodes.jsonl")


def read_matrix(run_dir: Path, results: Mapping[str, Any], images: bool = True) -> Iterator[Episode]:
    """Read the episodes of all cells that the results of a matrix list, under the names that its tables have.

    A task of another set of scenes is another task, though it may have the same id.
    """
    for cell in results["cells"].values():
        for episode in read_episodes(run_dir / cell["path"] / "episodes.jsonl", images):
            episode.delivery = f"{cell['group']}/{episode.delivery}" if cell["group"] else episode.delivery
            episode.task_id = f"{cell['scene_seed']}/{episode.task_id}"
            yield episode
