"""Episodes of all cells of a matrix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agent.records import Episode, read_episodes


def read_matrix(run_dir: Path, results: Mapping[str, Any], images: bool = True) -> Iterator[Episode]:
    """Episodes of all cells that the results of a matrix list, under the names that its tables have.

    A task of another set of scenes is another task, though it may have the same id.
    """
    for cell in results["cells"].values():
        for episode in read_episodes(run_dir / cell["path"] / "episodes.jsonl", images):
            episode.delivery = f"{cell['group']}/{episode.delivery}" if cell["group"] else episode.delivery
            episode.task_id = f"{cell['scene_seed']}/{episode.task_id}"
            yield episode
