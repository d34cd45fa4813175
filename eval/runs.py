"""What a run leaves on disk: its episodes, each as soon as it is over, and its results."""

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
from runtime.attempts import ATTEMPTS, Attempts
from runtime.store import JsonLines, RecordError, to_json
from runtime.told import parse_json

EPISODES, RESULTS = "episodes.jsonl", "results.json"
Key = tuple[str, str]  # delivery, task
EpisodeSource = Callable[[bool], Iterable[Episode]]  # called with whether pictures are wanted: numbers need none


class EpisodeRecord(Attempts[Key]):
    """What one evaluation has played, in `lines`, by delivery and task. Every line says its `cell` of a matrix. An
    episode whose line a kill has torn is played again, and one that machinery broke up to `attempts` times."""

    def __init__(self, folder: Path, cell: Mapping[str, str] | None = None, attempts: int = ATTEMPTS) -> None:
        lines = JsonLines(folder / EPISODES, needs=("delivery", "task_id", "stop_reason"))
        super().__init__(lines, itemgetter("delivery", "task_id"), attempts)
        self.cell = dict(cell or {})

    def append(self, episode: Episode) -> None:
        """Append an episode. It is on disk when this returns."""
        self.add([((episode.delivery, episode.task_id), line_of(episode, self.cell))])

    def played(self) -> dict[str, list[str]]:
        """Return the ids of the tasks that were played, by delivery, in the order in which they ended; without those
        whose episodes broke and are to be played again."""
        return {name: [task for _, task in keys] for name, keys in grouped(self.load(), itemgetter(0)).items()}

    def episodes(self, deliveries: Sequence[str], tasks: Sequence[str]) -> dict[str, list[Episode]]:
        """Return all episodes by delivery, in the order of `tasks`, without pictures.

        Raises:
            RecordError: one is missing, there twice, or of another task: there is no result then.
        """
        path = self.lines.path
        self.load()
        there = read_episodes(path, images=False) if path.exists() else ()
        found = grouped(there, lambda episode: (episode.delivery, episode.task_id))
        expected = Counter((name, task) for name in deliveries for task in tasks)
        wrong = [key for key in (*expected, *(found.keys() - expected)) if len(found.get(key, ())) != expected[key]]
        if wrong:
            name, task = wrong[0]
            raise RecordError(
                f"{path} does not hold every episode once: {len(wrong)} differ, the first is {task} under {name}, "
                f"{len(found.get((name, task), ()))} times. Go on with --on-exists resume, or start anew (overwrite)"
            )
        return {name: [found[name, task][0] for task in tasks] for name in deliveries}


def line_of(episode: Episode, cell: Mapping[str, str]) -> str:
    """Write an episode of a cell as the record holds it."""
    return to_json({"cell": cell, **episode.to_json(images=True)}, ascii=True)


def read_results(run: Path) -> dict[str, Any]:
    """Read a run's results.json.

    Raises:
        ValueError: there is none, or it is not whole; says what to do.
    """
    path = run / RESULTS
    if not path.is_file():
        raise ValueError(f"{path} does not exist: evaluate first (memcompiler eval -c CONFIG --out {run})")
    try:
        results = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}): evaluate again") from error
    if not isinstance(results, dict) or not results.get("results"):
        missing = ", ".join(results.get("missing", ())) if isinstance(results, dict) else ""
        raise ValueError(
            f"{path} holds no results{f', {missing} are missing' if missing else ''}: go on with --on-exists resume"
        )
    return results


def load_run(run: Path) -> tuple[dict[str, Any], EpisodeSource]:
    """Read a whole run's results, and say where its episodes come from.

    Raises:
        FileNotFoundError: the episodes are not there.
        ValueError: as `read_results`.
    """
    results = read_results(run)
    try:
        to_markdown(results)
        files = episode_files(run, results)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(f"{run / RESULTS} is not as an evaluation writes it ({problem}): evaluate again") from error
    for path in files:
        if not path.exists():
            inside = sorted(file.parent.name for file in path.parent.glob(f"*/{RESULTS}"))
            hint = f"; there are runs inside: {', '.join(inside)}" if inside else ""
            raise FileNotFoundError(
                f"{path} is missing: name a run folder of `memcompiler eval`, which writes it{hint}"
            )
    return results, episodes_of(run, results)


def episode_files(run: Path, results: Mapping[str, Any]) -> list[Path]:
    """List where the run's episodes are, or should be: one file, or one for each cell of a matrix."""
    folders = [run / cell["path"] for cell in results["cells"].values()] if "cells" in results else [run]
    return [folder / EPISODES for folder in folders]


def episodes_of(run: Path, results: Mapping[str, Any]) -> EpisodeSource:
    """Return what reads the run's episodes, anew at each call; of a matrix those of all cells that the results list,
    under the names that its tables have. A task of other scenes is another task there, though its id may be the same.
    """
    if "cells" not in results:
        return partial(read_episodes, run / EPISODES)

    def of_cells(images: bool) -> Iterator[Episode]:
        for cell in results["cells"].values():
            for episode in read_episodes(run / cell["path"] / EPISODES, images):
                episode.delivery = joined(cell["group"], episode.delivery)
                episode.task_id = f"{cell['scene_seed']}/{episode.task_id}"
                yield episode

    return of_cells
