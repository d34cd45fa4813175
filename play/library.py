"""The recorded episodes of a run folder, by number, without holding them in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.records import Episode, episode_from_json
from eval.metrics import display_name
from eval.player import outcome
from runtime.checksums import parse_row

EPISODES = "episodes.jsonl"
MOST = 20_000  # episodes of a run that are listed


@dataclass(frozen=True, slots=True)
class Recorded:
    """Where an episode is stored, and what the list of episodes says of it."""

    file: Path
    offset: int
    task_id: str
    head: dict[str, Any]


def episode_files(run: Path) -> list[Path]:
    """Return the files of a run's episodes: its own, those of a matrix's cells, or those of the stages inside it."""
    if (run / EPISODES).is_file():
        return [run / EPISODES]
    return sorted([*run.glob(f"cells/*/{EPISODES}"), *run.glob(f"*/{EPISODES}")])


class Library:
    """Episodes of files; `open` reads one of them.

    Raises:
        ValueError: a line is no episode; the message names file and line.
    """

    def __init__(self, files: Sequence[Path] = ()) -> None:
        self.files = list(files)
        self.episodes: list[Recorded] = []
        for file in self.files:
            self.episodes += _listed(file, MOST - len(self.episodes), file.parent.name if len(self.files) > 1 else "")

    def open(self, number: int) -> Episode:
        """Read an episode with its pictures. Raises: LookupError, for an unknown number."""
        if not 0 <= number < len(self.episodes):
            raise LookupError(f"there is no episode {number}")
        found = self.episodes[number]
        with found.file.open("rb") as file:
            file.seek(found.offset)
            return episode_from_json(_row(parse_row(file.readline())))


def _listed(path: Path, most: int, where: str) -> Iterator[Recorded]:
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if most <= 0:
                return
            if line.strip() and line.endswith(b"\n"):
                try:
                    episode = episode_from_json(_row(parse_row(line)), images=False)
                except ValueError as error:
                    raise ValueError(f"{path}, line {number}: {error}") from error
                yield Recorded(path, offset, episode.task_id, _head(episode, where))
                most -= 1
            offset += len(line)


def _row(row: Any) -> Any:
    """Return the episode of a line; `memcompiler play` records it beside what the visitor did."""
    return row["episode"] if isinstance(row, dict) and "episode" in row and "own" in row else row


def _head(episode: Episode, where: str) -> dict[str, Any]:
    return {
        "goal": episode.goal,
        "scene": episode.scene,
        "kind": episode.kind,
        "delivery": episode.delivery,
        "label": display_name(episode.delivery),
        "outcome": outcome(episode),
        "steps": len(episode.steps),
        "where": where,
    }
