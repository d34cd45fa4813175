"""The episodes of one evaluation on disk, each as soon as it is over: what a killed run has played is not lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent.records import Episode, read_episodes
from runtime.store import JsonLines, RecordError

EPISODES = "episodes.jsonl"


class EpisodeRecord:
    """What one evaluation has played, in `lines`. An episode whose line a kill has torn is played again.

    Args:
        folder: the run folder.
        cell: what distinguishes this evaluation from the others of its matrix; every line says it.
    """

    def __init__(self, folder: Path, cell: Mapping[str, str] | None = None) -> None:
        self.lines, self.cell = JsonLines(folder / EPISODES, needs=("delivery", "task_id")), dict(cell or {})

    def append(self, episode: Episode) -> None:
        """Append an episode. It is on disk when this returns."""
        self.lines.append({"cell": self.cell, **episode.to_json(images=True)})

    def played(self) -> dict[str, list[str]]:
        """Return the ids of the tasks that were played, by delivery, in the order in which they ended."""
        done: dict[str, list[str]] = {}
        for row in self.lines:
            done.setdefault(row["delivery"], []).append(row["task_id"])
        return done

    def episodes(self, deliveries: Sequence[str], tasks: Sequence[str]) -> dict[str, list[Episode]]:
        """Return all episodes by delivery, in the order of `tasks`, without pictures.

        Raises:
            RecordError: one is missing, there twice, or of another task: there is no result then.
        """
        path, found = self.lines.path, dict[tuple[str, str], list[Episode]]()
        for episode in read_episodes(path, images=False) if path.exists() else ():
            found.setdefault((episode.delivery, episode.task_id), []).append(episode)
        expected = Counter((name, task) for name in deliveries for task in tasks)
        wrong = [key for key in (*expected, *(found.keys() - expected)) if len(found.get(key, ())) != expected[key]]
        if wrong:
            name, task = wrong[0]
            raise RecordError(
                f"{path} does not hold every episode once: {len(wrong)} differ, the first is {task} under {name}, "
                f"{len(found.get((name, task), ()))} times. Go on with --on-exists resume, or start anew (overwrite)"
            )
        return {name: [found[name, task][0] for task in tasks] for name in deliveries}
