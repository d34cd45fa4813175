"""What a visitor did, as teacher data: a record of lines, and the SFT rows of the steps that the visitor decided.

OUT/play.json         the environment and its settings
OUT/steps.jsonl       the newest steps, appended when they are taken; `PlayRecord.publish` moves them to the files below
OUT/episodes.jsonl    the lines of games in which the visitor decided a step
OUT/rows              SFT rows of the decided steps, as `memcompiler collect` writes them
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
from runtime.store import JsonLines, RecordError, atomic_file, atomic_folder, read_json, to_json, write_atomically

MARK, STEPS, EPISODES, ROWS = "play.json", "steps.jsonl", "episodes.jsonl", "rows"


class PlayRecord:
    """The record of a folder. Steps that a killed process left are published when it is opened."""

    def __init__(self, out: Path, envs: Environments) -> None:
        self.out, self._envs = out, envs
        self._held_out: tuple[list[Task], dict[str, str]] | None = None
        self._steps = JsonLines(out / STEPS, ("id", "own", "task", "episode", "at"))
        published = JsonLines(out / EPISODES, ("id", "own", "task", "episode"))
        self._lines = {row["id"]: row for row in published}
        for row in self._steps:
            self._extend(row)
        self._counts = {id: len(self._rows_of(line)) for id, line in self._lines.items()}
        self.publish()

    @property
    def number_of_rows(self) -> int:
        """The number of rows of all lines."""
        return sum(self._counts.values())

    def add(self, id: str, task: Task, episode: Episode, own: Mapping[int, tuple[str, ...]]) -> None:
        """Record the steps of a line that are not recorded yet, durably.

        Args:
            id: of the line.
            episode: its steps that were taken. Steps that were recorded before are the same.
            own: the visitor's seats by step.
        """
        known = self._lines.get(id)
        at = len(known["episode"]["steps"]) if known is not None else 0
        row = {
            "id": id,
            "own": {str(t): list(seats) for t, seats in own.items()},
            "task": asdict(task),
            "episode": replace(episode, steps=episode.steps[at:]).to_json(images=True),
            "at": at,
        }
        self._steps.append(row)
        self._extend(row)
        self._counts[id] = len(self._own_rows(episode, own))

    def _extend(self, row: dict[str, Any]) -> None:
        """Add a row of OUT/steps.jsonl to its line. The same row may come twice."""
        known, steps = self._lines.get(row["id"]), row["episode"]["steps"]
        before = known["episode"]["steps"][: row["at"]] if known is not None else []
        if len(before) < row["at"]:
            raise RecordError(f"{self._steps.path}: steps before step {row['at']} of line {row['id']} are missing")
        line = {name: value for name, value in row.items() if name != "at"}
        self._lines[row["id"]] = {**line, "episode": {**row["episode"], "steps": [*before, *steps]}}

    def rows(self) -> list[SftRow]:
        """Return the rows of the steps that the visitor decided: those with an emission, whose command is one."""
        return [row for line in self._lines.values() for row in self._rows_of(line)]

    def _rows_of(self, line: Mapping[str, Any]) -> list[SftRow]:
        return self._own_rows(episode_from_json(line["episode"]), {int(t): seats for t, seats in line["own"].items()})

    def _own_rows(self, episode: Episode, own: Mapping[int, Any]) -> list[SftRow]:
        listed = executor_instructions_for(self._envs.settings).lists_commands
        found = valid_rows(episode, episode.made, own_label=True, commands=listed)
        return [replace(row, environment=self._envs.settings.name) for row in found if row.t in own]

    def publish(self) -> None:
        """Write OUT/episodes.jsonl, and OUT/rows with the verdict on their tasks, if there are new steps.

        Whenever a kill comes, the steps are in OUT/steps.jsonl or in OUT/episodes.jsonl.
        """
        if not self._steps.path.exists():
            return
        if rows := self.rows():
            self._write_rows(rows)
            self._write_verdict()
        with atomic_file(self.out / EPISODES) as file:
            for line in self._lines.values():
                file.write((to_json(line, ascii=True) + "\n").encode("ascii"))
        self._steps.path.unlink()

    def _write_rows(self, rows: list[SftRow]) -> None:
        part = self.out / f"{ROWS}.new"
        shutil.rmtree(part, ignore_errors=True)  # of a killed process
        with atomic_folder(part) as folder:
            save_rows(rows, folder)
        shutil.rmtree(self.out / ROWS, ignore_errors=True)
        part.rename(self.out / ROWS)

    def _write_verdict(self) -> None:
        config = CollectConfig(env=self._envs.settings)
        tasks = [task_from_json(row["task"]) for row in self._lines.values()]
        manifest = Manifest.of(config.env.name, tasks)
        if self._held_out is None:
            self._held_out = held_out_tasks(config, self._envs)
        audit = audit_training(config, manifest, *self._held_out)
        manifest.write(self.out / MANIFEST)
        write_atomically(self.out / LEAKAGE, to_json(audit.to_json(), indent=2) + "\n")


@contextmanager
def open_record(out: Path, envs: Environments, inputs: Mapping[str, Path]) -> Iterator[PlayRecord]:
    """Open the record of a folder, which is created and locked. It is published at the end of the block.

    Raises:
        RunFolderError, FolderInUse: the folder is not ours.
        RecordError: it holds the record of another environment, or a damaged one.
    """
    settings: dict[str, Any] = {"environment": envs.settings.model_dump(mode="json", exclude=set(envs.settings.HOW))}
    names = (MARK, STEPS, EPISODES, ROWS, MANIFEST, LEAKAGE)
    with output_folder(out, "play", names, "environment", inputs.items()):
        if not (out / MARK).exists():
            write_atomically(out / MARK, to_json(settings, indent=2) + "\n")
        elif read_json(out / MARK) != settings:
            raise RecordError(f"{out} holds what was played in {out / MARK}, other settings: choose another --out")
        record = PlayRecord(out, envs)
        try:
            yield record
        finally:
            record.publish()
