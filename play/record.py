"""What a visitor did, as teacher data: a record of lines, and the SFT rows of the steps that the visitor decided.

OUT/play.json         the environment and its settings
OUT/episodes.jsonl    a line of a game, written again after every step that the visitor decided
OUT/rows              SFT rows of these steps, as `memcompiler collect` writes them
OUT/manifest.json, OUT/leakage.json    their tasks, and whether they overlap with held-out ones
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from agent.records import Episode, episode_from_json
from configs.collect import CollectConfig
from configs.run_folder import output_folder
from data_gen.collect import valid_rows
from data_gen.leakage import LEAKAGE, MANIFEST, audit_training, held_out_tasks
from data_gen.rows import SftRow, save_rows
from envs.base import Task, task_from_json
from envs.manifest import Manifest
from envs.registry import Environments, executor_instructions_for
from runtime.store import JsonLines, RecordError, atomic_folder, read_json, to_json, write_atomically

MARK, EPISODES, ROWS = "play.json", "episodes.jsonl", "rows"


class PlayRecord:
    """The record of a folder."""

    def __init__(self, out: Path, envs: Environments) -> None:
        self.out, self._envs = out, envs
        self._lines = JsonLines(out / EPISODES, ("id", "own", "task", "episode"))
        self._held_out: tuple[list[Task], dict[str, str]] | None = None
        self._latest = {row["id"]: row for row in self._lines}

    def add(self, id: str, task: Task, episode: Episode, own: Mapping[int, tuple[str, ...]]) -> int:
        """Record a line of a game with its taken steps, replace OUT/rows, and return the number of rows.

        Args:
            id: of the line; a later record of the same line replaces the earlier one.
            own: the visitor's seats by step.
        """
        row = {
            "id": id,
            "own": {str(t): list(seats) for t, seats in own.items()},
            "task": asdict(task),
            "episode": episode.to_json(images=True),
        }
        self._lines.append(row)
        self._latest[id] = row
        return self.write_rows()

    def rows(self) -> list[SftRow]:
        """Return the rows of the steps that the visitor decided: those with an emission, whose command is one."""
        listed, rows = executor_instructions_for(self._envs.settings).lists_commands, list[SftRow]()
        for row in self._latest.values():
            episode = episode_from_json(row["episode"])
            found = valid_rows(episode, episode.made, own_label=True, commands=listed)
            rows += [replace(one, environment=self._envs.settings.name) for one in found if str(one.t) in row["own"]]
        return rows

    def write_rows(self) -> int:
        """Replace OUT/rows by the rows of the record, with the verdict on their tasks; return their number."""
        rows = self.rows()
        if not rows:
            return 0
        part = self.out / f"{ROWS}.new"
        shutil.rmtree(part, ignore_errors=True)  # of a killed process
        with atomic_folder(part) as folder:
            save_rows(rows, folder)
        shutil.rmtree(self.out / ROWS, ignore_errors=True)
        part.rename(self.out / ROWS)
        self._write_verdict()
        return len(rows)

    def _write_verdict(self) -> None:
        config = CollectConfig(env=self._envs.settings)
        tasks = [task_from_json(row["task"]) for row in self._latest.values()]
        manifest = Manifest.of(config.env.name, tasks)
        if self._held_out is None:
            self._held_out = held_out_tasks(config, self._envs)
        audit = audit_training(config, manifest, *self._held_out)
        manifest.write(self.out / MANIFEST)
        write_atomically(self.out / LEAKAGE, to_json(audit.to_json(), indent=2) + "\n")


@contextmanager
def open_record(out: Path, envs: Environments, inputs: Mapping[str, Path]) -> Iterator[PlayRecord]:
    """Open the record of a folder, which is created and locked.

    Raises:
        RunFolderError, FolderInUse: the folder is not ours.
        RecordError: it holds the record of another environment, or a damaged one.
    """
    settings: dict[str, Any] = {"environment": envs.settings.model_dump(mode="json", exclude=set(envs.settings.HOW))}
    names = (MARK, EPISODES, ROWS, MANIFEST, LEAKAGE)
    with output_folder(out, "play", names, "environment", inputs.items()):
        if not (out / MARK).exists():
            write_atomically(out / MARK, to_json(settings, indent=2) + "\n")
        elif read_json(out / MARK) != settings:
            raise RecordError(f"{out} holds what was played in {out / MARK}, other settings: choose another --out")
        yield PlayRecord(out, envs)
