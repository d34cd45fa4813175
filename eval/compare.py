"""HTML page that compares runs with the first of them: results, paired differences on shared tasks, differing settings,
warnings, and replays side by side.

Two runs share a task if its id, the seed of its scenes and its goal are equal.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from agent.records import Episode, StepRecord
from configs.load import read_yaml
from configs.run_folder import CONFIG, flatten
from eval.matrix import varying
from eval.metrics import budgets_of, difference, grouped, groups_of, joined, ordered, split_name
from eval.replays import REPLAYS, Replays, compared
from eval.report import short, write_page
from eval.runs import EpisodeSource, load_run
from eval.table import informative_budgets

# Keys of results.json that must be equal for a fair comparison, and their names in warnings.
COMPARABLE: Mapping[str, str] = {
    "environment": "environment",
    "environment_version": "version of the environment",
    "split": "split",
    "scene_seed": "seed of the scenes",
    "tasks_sha256": "list of tasks",
    "max_steps": "step limit",
    "memory_protocol": "memory protocol",
}
# Listed where they differ.
PROVENANCE = ("memory_sha256", "executor_hash", "compiler_hash", "prompts", "git", "versions")
_BARE = StepRecord(0, "", image=None, admissible=None, brief_before="")


@dataclass(frozen=True, slots=True)
class Run:
    """A complete run. `settings` and `facts` have dotted keys; `source` reads its episodes, with the seed in task
    ids."""

    name: str
    results: Mapping[str, Any]
    settings: Mapping[str, Any]
    facts: Mapping[str, Any]
    source: EpisodeSource

    def column(self, delivery: str) -> str:
        return joined(self.name, delivery)

    def names_of(self, delivery: str) -> list[str]:
        """Return a delivery's names in the results: in a matrix, one for each group."""
        return [name for name in ordered(self.results["results"]) if split_name(name)[1] == delivery]

    def budgets(self, name: str) -> list[int]:
        return budgets_of([self.results["results"][name]])


@dataclass(frozen=True, slots=True)
class Pair:
    """Columns of a delivery and of its counterpart in the first run; `all`: their `metrics.difference`."""

    a: str
    b: str
    all: Mapping[str, Any]


def write_comparison(folders: Sequence[Path], out_path: Path | None = None, replays: Replays = REPLAYS) -> Path:
    """Write the page that compares runs with the first of them; return its path (default: FIRST/compare.html).

    Raises:
        FileNotFoundError: a run's episodes or settings are missing.
        ValueError: fewer than two runs, a run given twice, incomplete results, or damaged files.
    """
    runs = read_runs(folders)
    played = {run.name: [bare(episode) for episode in run.source(False)] for run in runs}
    common = shared(played)
    page = {**_page(runs, differences(runs, common)), "warnings": warnings(runs, played, common)}
    heads = [replace(e, delivery=joined(name, e.delivery)) for name, of_run in common.items() for e in of_run]
    source = partial(_in_columns, runs, common)
    return write_page(
        "compare.html.j2",
        page,
        episodes=heads,
        source=source,
        out_path=out_path or folders[0] / "compare.html",
        replays=replays,
    )


# runs -----------------------------------------------------------------------------------------------------------------


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read each run. Raises: FileNotFoundError, ValueError as `write_comparison`."""
    paths = [folder.resolve() for folder in folders]
    if len(set(paths)) < max(2, len(paths)):
        raise ValueError("a comparison needs two runs or more, each named once")
    return [_read_run(path, name) for path, name in zip(paths, unique_names(paths), strict=True)]


def unique_names(paths: Sequence[Path]) -> list[str]:
    """Return each folder's name, with as many parents as make it unique."""

    def ending(path: Path, depth: int) -> str:
        return "/".join(path.parts[1:][-depth:])

    def name(path: Path) -> str:
        others = [other for other in paths if other != path]
        depths = (n for n in itertools.count(1) if all(ending(path, n) != ending(other, n) for other in others))
        return ending(path, next(depths))

    return [name(path) for path in paths]


def _read_run(path: Path, name: str) -> Run:
    results, source = load_run(path)
    settings = read_yaml(path / CONFIG) if (path / CONFIG).exists() else results.get("config")
    if settings is None:
        raise FileNotFoundError(f"{path / CONFIG} is missing: evaluate again")
    parts = list(results["cells"].values()) if "cells" in results else [results]
    facts = [dotted({key: part[key] for key in (*COMPARABLE, *PROVENANCE) if key in part}) for part in parts]
    joint = {key: varying(fact.get(key) for fact in facts) for keys in facts for key in keys}
    if "cells" not in results:
        source = partial(_across_scenes, source, results.get("scene_seed", 0))
    return Run(name, results, settings=dotted(settings), facts=joint, source=source)


def _across_scenes(source: EpisodeSource, scene_seed: int, pictures: bool) -> Iterator[Episode]:
    """Prefix task ids with the seed of the scenes, as in a matrix, because ids repeat in other scenes."""
    for episode in source(pictures):
        episode.task_id = f"{scene_seed}/{episode.task_id}"
        yield episode


def dotted(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten {"a": {"b": 1}} to {"a.b": 1}; lists become JSON text."""
    return {k: json.dumps(v) if isinstance(v, Mapping | list) else v for k, v in flatten(tree).items()}


def bare(episode: Episode) -> Episode:
    """Return an episode with empty steps: texts of a whole run may not fit into memory."""
    return replace(episode, steps=[_BARE] * len(episode.steps))


# comparison ----------------------------------------------------------------------------------------------------------


def shared(played: Mapping[str, Sequence[Episode]]) -> dict[str, list[Episode]]:
    """Return of each run the episodes of tasks that it shares with the first; of the first, with any other."""
    first, *others = played
    goals = {episode.task_id: episode.goal for episode in played[first]}
    common = {run: [e for e in played[run] if goals.get(e.task_id) == e.goal] for run in others}
    tasks = {episode.task_id for of_run in common.values() for episode in of_run}
    return {first: [e for e in played[first] if e.task_id in tasks], **common}


def columns_of(runs: Sequence[Run]) -> list[str]:
    """Return a column for every delivery of every run, sorted by delivery, then by run."""
    deliveries = dict.fromkeys(split_name(name)[1] for run in runs for name in run.results["results"])
    return [run.column(name) for delivery in ordered(deliveries) for run in runs for name in run.names_of(delivery)]


def differences(runs: Sequence[Run], common: Mapping[str, Sequence[Episode]]) -> list[Pair]:
    """Compare the deliveries of each run with the first run's on shared tasks, in the order of `columns_of`."""
    first, *others = runs
    baseline, pairs = grouped(common[first.name], lambda e: e.delivery), []
    for run in others:
        for name, episodes in grouped(common[run.name], lambda e: e.delivery).items():
            opposite = _opposite(name, first) or ""
            against = baseline.get(opposite, [])
            if {e.task_id for e in episodes} & {e.task_id for e in against}:
                both = [budget for budget in run.budgets(name) if budget in first.budgets(opposite)]
                pairs.append(Pair(run.column(name), first.column(opposite), difference(episodes, against, both)))
    order = columns_of(runs)
    return sorted(pairs, key=lambda pair: order.index(pair.a))


def _opposite(name: str, first: Run) -> str | None:
    """Return the counterpart of a delivery in the first run: the same name, or the only one of that delivery, so that a
    matrix can be compared with a single cell."""
    same = first.names_of(split_name(name)[1])
    return name if name in same else same[0] if len(same) == 1 else None


def differing(trees: Sequence[Mapping[str, Any]]) -> dict[str, list[str | None]]:
    """Return the keys whose values differ, sorted, each with its value in every tree; None where the key is missing."""
    return {
        key: [short(tree[key]) if key in tree else None for tree in trees]
        for key in sorted({key for tree in trees for key in tree})
        if len({json.dumps(tree[key], default=str) if key in tree else None for tree in trees}) > 1
    }


def warnings(
    runs: Sequence[Run], played: Mapping[str, Sequence[Episode]], common: Mapping[str, Sequence[Episode]]
) -> list[str]:
    """Return what limits the comparison of each run with the first, as sentences."""
    first, sentences = runs[0], []
    goals = {episode.task_id: episode.goal for episode in played[first.name]}
    for run in runs[1:]:
        different = differing([run.facts, first.facts])
        for key, words in COMPARABLE.items():
            values = [row for name, row in different.items() if name == key or name.startswith(f"{key}.")]
            if values:
                ours, theirs = (", ".join(row[i] or "not recorded" for row in values) for i in (0, 1))
                sentences.append(f"{run.name} has another {words} than {first.name}: {ours}, not {theirs}.")
        mine, both = ({e.task_id: e.goal for e in of[run.name]} for of in (played, common))
        if not both:
            sentences.append(f"{run.name} shares no task with {first.name}: nothing can be paired.")
        elif len(both) < max(len(mine), len(goals)):
            sentences.append(
                f"{run.name} shares {len(both)} tasks with {first.name}, of its {len(mine)} and the other's "
                f"{len(goals)}: differences are over those, the success rates are not."
            )
        if renamed := sum(task in goals and goals[task] != goal for task, goal in mine.items()):
            sentences.append(f"{renamed} tasks of {run.name} have an id of {first.name} and another goal: left out.")
        alone = sorted(set(run.results["results"]) ^ set(first.results["results"]))
        if unpaired := [name for name in alone if name in first.results["results"] or not _opposite(name, first)]:
            sentences.append(f"Only one of {run.name} and {first.name} has {', '.join(unpaired)}.")
    return sentences


# page -----------------------------------------------------------------------------------------------------------------


def _page(runs: Sequence[Run], pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return the page's variables except warnings and replays. `main`: the pairs of the most important delivery,
    `compiled` or the last that is no control."""
    summaries = {run.column(name): summary for run in runs for name, summary in run.results["results"].items()}
    columns, main = columns_of(runs), list[Pair]()
    if pairs:
        delivery = compared([split_name(pair.a)[1] for pair in pairs])[0]
        main = [pair for pair in pairs if split_name(pair.a)[1] == delivery]
    return {
        "runs": runs,
        "first": runs[0].name,
        "summaries": summaries,
        "deliveries": columns,
        "by_delivery": grouped(columns, lambda column: split_name(column)[1]),
        "families": groups_of(summaries, "by_family"),
        "kinds": groups_of(summaries, "by_kind"),
        "budgets": budgets_of(summaries.values()),
        "informative": informative_budgets(summaries),
        "pairs": pairs,
        "main": main,
        "compared": (main[0].a, main[0].b) if main else (columns[0], columns[0]),
        "settings": differing([run.settings for run in runs]),
        "facts": differing([run.facts for run in runs]),
        "data": {pair.a: {"against": pair.b, **pair.all} for pair in pairs},
    }


def _in_columns(runs: Sequence[Run], common: Mapping[str, Sequence[Episode]], pictures: bool) -> Iterator[Episode]:
    for run in runs:
        tasks = {episode.task_id for episode in common[run.name]}
        for episode in run.source(pictures):
            if episode.task_id in tasks:
                episode.delivery = run.column(episode.delivery)
                yield episode
