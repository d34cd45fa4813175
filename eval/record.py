"""The episodes of one evaluation on disk, each as soon as it is over: what a killed run has played is not lost.

`episodes.jsonl` only grows while a run plays. Where a kill tore its last line, the next session drops that line and
plays the episode again.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent.records import Episode
from eval.episodes import read_episodes

EPISODES = "episodes.jsonl"


class RecordError(ValueError):
    """The record does not hold what this evaluation should have played. The message is ready to print."""


class EpisodeRecord:
    """Args:
    folder: the run folder.
    cell: what distinguishes this evaluation from the others of its matrix; every line says it.
    """

    def __init__(self, folder: Path, cell: Mapping[str, str] | None = None) -> None:
        self.path, self.cell = folder / EPISODES, dict(cell or {})

    def append(self, episode: Episode) -> None:
        """The episode is on disk when this returns."""
        line = json.dumps({"cell": self.cell, **episode.to_json(images=True)}) + "\n"
        with self.path.open("ab") as file:
            file.write(line.encode("ascii"))
            file.flush()
            os.fsync(file.fileno())

    def played(self) -> dict[str, list[str]]:
        """Ids of the tasks that were played, by delivery, in the order in which they ended."""
        done: dict[str, list[str]] = {}
        for _, row in self._rows():
            done.setdefault(row["delivery"], []).append(row["task_id"])
        return done

    def keep(self, wanted: Callable[[Mapping[str, Any]], bool] = lambda row: True) -> None:
        """Drop a torn last line and the rows that are not wanted; nothing is written where there are none."""
        if not self.path.exists():
            return
        kept = sum(len(line) for line, row in self._rows() if wanted(row))
        if kept == self.path.stat().st_size:
            return
        part = self.path.with_name(self.path.name + ".part")
        with part.open("wb") as file:
            file.writelines(line for line, row in self._rows() if wanted(row))
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.path)

    def episodes(self, deliveries: Sequence[str], tasks: Sequence[str]) -> dict[str, list[Episode]]:
        """All episodes by delivery, in the order of `tasks`, without pictures.

        Raises:
            RecordError: one is missing, there twice, or of another task: there is no result then.
        """
        found: dict[tuple[str, str], list[Episode]] = {}
        for episode in read_episodes(self.path, images=False) if self.path.exists() else ():
            found.setdefault((episode.delivery, episode.task_id), []).append(episode)
        expected = Counter((name, task) for name in deliveries for task in tasks)
        wrong = [key for key in (*expected, *(found.keys() - expected)) if len(found.get(key, ())) != expected[key]]
        if wrong:
            name, task = wrong[0]
            raise RecordError(
                f"{self.path} does not hold every episode once: {len(wrong)} differ, the first is {task} under {name}, "
                f"{len(found.get((name, task), ()))} times. Go on with --on-exists resume, or start anew (overwrite)"
            )
        return {name: [found[name, task][0] for task in tasks] for name in deliveries}

    def _rows(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        """Whole lines with what they hold.

        Raises:
            RecordError: a line that ends as it should and is no episode: the file was damaged, not cut short.
        """
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    return
                try:
                    row = json.loads(line)
                    _ = row["delivery"], row["task_id"]
                except (ValueError, KeyError, TypeError) as error:
                    raise RecordError(f"{self.path}, line {number} is no episode: start anew (overwrite)") from error
                yield line, row
