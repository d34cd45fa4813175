"""Files of an evaluation: episodes.jsonl, which grows with every episode, and results.json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from agent.records import Episode, read_episodes
from eval.metrics import grouped, joined
from eval.table import to_markdown
from runtime.attempts import ATTEMPTS, RetriedResults
from runtime.checksums import read_checked
from runtime.parsing import parse_json
from runtime.store import JsonLines, RecordError, to_json

EPISODES, RESULTS = "episodes.jsonl", "results.json"
Key = tuple[str, str]  # delivery, task
EpisodeSource = Callable[[bool], Iterable[Episode]]  # reads episodes anew; the argument: with pictures?


class EpisodeRecord(RetriedResults[Key]):
    """Record of an evaluation's episodes by delivery and task; every line names its `cell` of a matrix. An episode
    whose line is torn is played again, and one that failed for technical reasons up to `attempts` times."""

    def __init__(self, folder: Path, cell: Mapping[str, str] | None = None, attempts: int = ATTEMPTS) -> None:
        lines = JsonLines(folder / EPISODES, needs=("delivery", "task_id", "stop_reason"))
        super().__init__(lines, itemgetter("delivery", "task_id"), attempts)
        self.cell = dict(cell or {})

    def append(self, episode: Episode) -> None:
        """Append an episode, which is on disk when this returns."""
        self.add([((episode.delivery, episode.task_id), to_line(episode, self.cell))])

    def played(self) -> dict[str, list[str]]:
        """Return the ids of played tasks by delivery, in the order in which their episodes ended; without broken ones
        that will be played again."""
        return {name: [task for _, task in keys] for name, keys in grouped(self.load(), itemgetter(0)).items()}

    def episodes(self, deliveries: Sequence[str], tasks: Sequence[str]) -> dict[str, list[Episode]]:
        """Return all episodes by delivery, in the order of `tasks`, without pictures.

        Raises:
            RecordError: an episode is missing, recorded twice, or of another task.
        """
        path = self.lines.path
        self.load()
        recorded = read_episodes(path, images=False) if path.exists() else ()
        found = grouped(recorded, lambda episode: (episode.delivery, episode.task_id))
        expected = Counter((name, task) for name in deliveries for task in tasks)
        wrong = [key for key in (*expected, *(found.keys() - expected)) if len(found.get(key, ())) != expected[key]]
        if wrong:
            name, task = wrong[0]
            raise RecordError(
                f"{path} does not hold every episode once: {len(wrong)} differ, the first is {task} under {name}, "
                f"{len(found.get((name, task), ()))} times. Continue with --on-exists resume, or start anew (overwrite)"
            )
        return {name: [found[name, task][0] for task in tasks] for name in deliveries}


def to_line(episode: Episode, cell: Mapping[str, str]) -> str:
    """Serialise an episode of a cell as a line of episodes.jsonl."""
    return to_json({"cell": cell, **episode.to_json(images=True)}, ascii=True)


def read_results(run: Path) -> dict[str, Any]:
    """Read a run's results.json.

    Raises:
        ValueError: there is none, or it is incomplete.
    """
    path = run / RESULTS
    if not path.is_file():
        raise ValueError(f"{path} does not exist: evaluate first (memcompiler eval -c CONFIG --out {run})")
    data = read_checked(path)
    try:
        results = parse_json(data)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): evaluate again") from error
    if not isinstance(results, dict) or not results.get("results"):
        missing = ", ".join(results.get("missing", ())) if isinstance(results, dict) else ""
        raise ValueError(
            f"{path} holds no results{f', {missing} are missing' if missing else ''}: continue with --on-exists resume"
        )
    return results


def load_run(run: Path) -> tuple[dict[str, Any], EpisodeSource]:
    """Read a run's results; return them with the source of its episodes.

    Raises:
        FileNotFoundError: the episodes are missing.
        ValueError: as `read_results`.
    """
    results = read_results(run)
    try:
        to_markdown(results)
        files = episode_files(run, results)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"{run / RESULTS} is not in the format of this version ({problem}): evaluate again") from error
    for path in files:
        if not path.exists():
            inside = sorted(file.parent.name for file in path.parent.glob(f"*/{RESULTS}"))
            hint = f"; there are runs inside: {', '.join(inside)}" if inside else ""
            raise FileNotFoundError(f"{path} is missing: name a run folder of `memcompiler eval`{hint}")
    return results, episodes_of(run, results)


def episode_files(run: Path, results: Mapping[str, Any]) -> list[Path]:
    """Return the paths of the run's episodes: one file, or one for each cell of a matrix."""
    folders = [run / cell["path"] for cell in results["cells"].values()] if "cells" in results else [run]
    return [folder / EPISODES for folder in folders]


def episodes_of(run: Path, results: Mapping[str, Any]) -> EpisodeSource:
    """Return the source of the run's episodes. For a matrix: the episodes of all cells, with their deliveries named as
    in its tables, and task ids prefixed by the seed of the scenes, because ids repeat in other scenes."""
    if "cells" not in results:
        return partial(read_episodes, run / EPISODES)

    def of_cells(images: bool) -> Iterator[Episode]:
        for cell in results["cells"].values():
            for episode in read_episodes(run / cell["path"] / EPISODES, images):
                episode.delivery = joined(cell["group"], episode.delivery)
                episode.task_id = f"{cell['scene_seed']}/{episode.task_id}"
                yield episode

    return of_cells
