"""From episodes to numbers: what happened under each delivery, with intervals, and how two deliveries differ.

`summarise` describes one delivery, `results` puts all of them into the dict that is written as `results.json`.
An episode that broke (environment, executor or compiler failure) counts as an episode without success and stays
visible in `stop_reasons`: leaving it out would reward the delivery that breaks more often.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from fractions import Fraction
from itertools import accumulate
from math import inf
from statistics import fmean, median
from typing import Any, TypeVar

import numpy as np

from agent.deliveries import DELIVERIES
from agent.records import Episode, StepRecord
from eval.errors import analyse
from eval.intervals import Interval, PairedDifference, bootstrap_mean, paired, wilson
from runtime.attempts import broken_facts
from runtime.errors import StopReason, is_failure

EMISSION_KINDS = ("EXPERIENCE", "BRIEF", "HYBRID", "NOACTION")
GROUNDINGS = ("choice", "exact", "fuzzy", "failed")
ROLES = ("compiler", "executor")
CLOCKS = (*ROLES, "environment")
HIGHER_IS_BETTER = {
    "success": True,
    "success_at": True,
    "progress": True,
    "steps": False,
    "steps_to_success": False,
    "cost_per_success": False,
    "parse_error_rate": False,
    "grounding_failure_rate": False,
    "op_error_rate": False,
}
REQUIRED_META = ("environment", "split", "seed")

K = TypeVar("K")
V = TypeVar("V")


def grouped(values: Iterable[V], key: Callable[[V], K]) -> dict[K, list[V]]:
    """Sort values into lists by key, both in the order in which they come."""
    found: dict[K, list[V]] = defaultdict(list)
    for value in values:
        found[key(value)].append(value)
    return dict(found)


# one delivery ---------------------------------------------------------------------------------------------------------


def succeeded(episode: Episode, within: float = inf) -> bool:
    """Tell success, in at most so many steps, as every table counts it: an episode that broke has none, whatever was
    recorded before it broke."""
    return episode.success and not is_failure(episode.stop_reason) and len(episode.steps) <= within


def summarise(episodes: Sequence[Episode], budgets: Sequence[int] = ()) -> dict[str, Any]:
    """Describe what a delivery did, ready for JSON; docs/results-format.md says each key.

    `budgets` are numbers of steps within which success is told as well, none above what the episodes were given. Tokens
    are what a role read and wrote (prompt + generated). Rates and times per step are over all steps of all episodes;
    shares are over the steps that have the thing at all (an emission, a grounded action). `emission_mix` is {} and
    `parse_error_rate` None where no compiler spoke.

    Raises:
        ValueError: there are no episodes.
    """
    if not episodes:
        raise ValueError("zero episodes: nothing to summarise (check the split, the filters and `limit`)")
    steps = [step for episode in episodes for step in episode.steps]
    emissions = [step for step in steps if step.emission_kind]
    listed = [step.grounding for step in steps if step.grounding not in ("", "free")]
    stops = Counter(episode.stop_reason for episode in episodes)
    used = {clock: usage(steps, clock) for clock in CLOCKS}
    return {
        **_reached(episodes, budgets),
        "steps_to_success": _steps_to_success(episodes),
        "cost_per_success": _cost_per_success(used, sum(map(succeeded, episodes))),
        "executor_tokens_per_step": _tokens_per_step(steps, "executor"),
        "compiler_tokens_per_step": _tokens_per_step(steps, "compiler"),
        "emission_tokens_per_step": _mean([len(s.emission_ids) for s in emissions]) if emissions else None,
        "emission_mix": _shares((step.emission_kind for step in emissions), EMISSION_KINDS),
        "parse_error_rate": _mean([float(s.parse_error is not None) for s in emissions]) if emissions else None,
        # by operation: "create: key exists: mug" is a create
        "op_errors": dict(sorted(Counter(e.partition(":")[0] for s in emissions for e in s.op_errors).items())),
        "op_error_rate": _mean([float(bool(s.op_errors)) for s in emissions]) if emissions else None,
        "grounding": _shares((step.grounding for step in steps if step.grounding), GROUNDINGS),
        # of the actions where the environment lists its commands
        "grounding_failure_rate": listed.count("failed") / len(listed) if listed else None,
        "seconds_per_step": {clock: _mean([s.seconds.get(clock, 0.0) for s in steps]) for clock in CLOCKS},
        "usage": used,
        "steps": fmean(len(episode.steps) for episode in episodes),
        "planner_steps": fmean(sum(bool(step.grounding) for step in episode.steps) for episode in episodes),
        "environment_steps": fmean(sum("environment" in s.seconds for s in episode.steps) for episode in episodes),
        "errors": analyse(episodes),
        "broken": broken_facts([(e.task_id, e.failure, e.broken) for e in episodes]),
        "stop_reasons": {str(reason): stops[reason] for reason in StopReason if stops[reason]},
        "by_family": {
            family: _reached(members, budgets) for family, members in _groups(episodes, lambda e: e.family).items()
        },
        "by_kind": {
            kind: _successes(members, budgets) for kind, members in _groups(episodes, lambda e: e.kind).items()
        },
    }


def usage(steps: Sequence[StepRecord], role: str) -> dict[str, Any]:
    """Add up what a role took: calls, seconds in all, latency of a call in seconds, and for models tokens in all.

    `tokens_cached` (of those read, what a prefix cache held) is None where the backend does not say. Where episodes are
    batched, a call's latency is its share of the batch's time; `concurrency: 1` gives what a lone agent waits.
    """
    seconds = [step.seconds[role] for step in steps if role in step.seconds]
    p50, p95 = (float(q) for q in np.quantile(seconds, (0.5, 0.95))) if seconds else (0.0, 0.0)
    taken = {"calls": len(seconds), "seconds": float(sum(seconds)), "latency": {"p50": p50, "p95": p95}}
    if role not in ROLES:
        return taken
    cached = [step.tokens[f"{role}_cached"] for step in steps if f"{role}_cached" in step.tokens]
    tokens = {f"tokens_{way}": sum(step.tokens.get(f"{role}_{way}", 0) for step in steps) for way in ("in", "out")}
    return {**tokens, "tokens_cached": sum(cached) if cached else None, **taken}


def success_curve(summary: Mapping[str, Any]) -> list[Interval]:
    """Give the success within 0, 1, 2, ... steps, to the largest budget or the longest success."""
    solved: Mapping[str, int] = (summary["steps_to_success"] or {}).get("counts", {})
    last = max(map(int, (*solved, *summary["success_at"])), default=0)
    tasks, episodes = summary["success"]["n"], sum(summary["stop_reasons"].values())
    within = accumulate(solved.get(str(t), 0) for t in range(last + 1))
    return [wilson(Fraction(k * tasks, episodes), tasks) for k in within]


def _successes(episodes: Sequence[Episode], budgets: Sequence[int]) -> dict[str, Any]:
    """Give the success with its interval over tasks: several episodes of one task (seeds) are not independent, and
    their mean varies at most as one of them does."""
    tasks = len({episode.task_id for episode in episodes})

    def rate(within: float) -> dict[str, Any]:
        solved = sum(succeeded(episode, within) for episode in episodes)
        return asdict(wilson(Fraction(solved * tasks, len(episodes)), tasks))

    return {"success": rate(inf), "success_at": {str(budget): rate(budget) for budget in budgets}}


def _reached(episodes: Sequence[Episode], budgets: Sequence[int]) -> dict[str, Any]:
    progress = bootstrap_mean([episode.progress for episode in episodes])
    return {**_successes(episodes, budgets), "progress": asdict(progress)}


def _steps_to_success(episodes: Sequence[Episode]) -> dict[str, Any] | None:
    """Say how many steps successes took; `counts`, how many took so many."""
    taken = sorted(len(episode.steps) for episode in episodes if succeeded(episode))
    if not taken:
        return None
    counts = {str(steps): n for steps, n in Counter(taken).items()}
    return {**asdict(bootstrap_mean(taken)), "median": float(median(taken)), "counts": counts}


def _cost_per_success(used: Mapping[str, Mapping[str, Any]], successes: int) -> dict[str, dict[str, float]] | None:
    """Divide what both roles took in all episodes, failed ones too, by the number of successes."""
    if not successes:
        return None
    return {
        role: {
            "tokens": (used[role]["tokens_in"] + used[role]["tokens_out"]) / successes,
            "seconds": used[role]["seconds"] / successes,
        }
        for role in ROLES
    }


def _tokens_per_step(steps: Sequence[StepRecord], role: str) -> float:
    return _mean([step.tokens.get(f"{role}_in", 0) + step.tokens.get(f"{role}_out", 0) for step in steps])


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0  # an episode may break before its first step


def _shares(names: Iterable[str], expected: Sequence[str]) -> dict[str, float]:
    """Take each name's share; every expected one is there, so that readers need no defaults. {} when there are none."""
    counts = Counter(names)
    unexpected = sorted(counts.keys() - set(expected))
    return {name: counts[name] / counts.total() for name in (*expected, *unexpected)} if counts else {}


def _groups(episodes: Sequence[Episode], label: Callable[[Episode], str]) -> dict[str, list[Episode]]:
    return dict(sorted(grouped(filter(label, episodes), label).items()))


# all deliveries of a run ----------------------------------------------------------------------------------------------


def results(
    per_delivery: Mapping[str, Sequence[Episode]],
    meta: Mapping[str, Any],
    pairs: Iterable[tuple[str, str]] = (),
    budgets: Mapping[str, Sequence[int]] = {},
) -> dict[str, Any]:
    """Make the content of `results.json`: a summary per delivery, the run's meta data, and the paired differences.

    Args:
        per_delivery: episodes by delivery name; in a matrix, `group/delivery`.
        meta: at least "environment", "split" and "seed"; anything else that is JSON goes in beside them.
        pairs: what is compared beyond what the deliveries' `compared_with` says.
        budgets: numbers of steps by delivery name; see `summarise`.

    Raises:
        ValueError: no delivery, one without episodes, or incomplete or clashing meta data.
    """
    if not per_delivery:
        raise ValueError("no delivery was evaluated")
    if empty := [name for name, episodes in per_delivery.items() if not episodes]:
        raise ValueError(f"zero episodes under {', '.join(empty)}: a run over nothing has no result")
    if missing := [key for key in REQUIRED_META if key not in meta]:
        raise ValueError(f"results need to say their {', '.join(missing)}")
    if clash := {"results", "paired_difference"} & meta.keys():
        raise ValueError(f"meta data cannot be called {', '.join(sorted(clash))}")
    asked = {name: budgets.get(name, ()) for name in per_delivery}
    return {
        "results": {name: summarise(per_delivery[name], asked[name]) for name in ordered(per_delivery)},
        **meta,
        "paired_difference": {
            f"{a} - {b}": difference(per_delivery[a], per_delivery[b], [t for t in asked[a] if t in asked[b]])
            for a, b in dict.fromkeys((*_usual_pairs(per_delivery), *pairs))
            if a in per_delivery and b in per_delivery and _share_tasks(per_delivery[a], per_delivery[b])
        },
    }


def ordered(deliveries: Iterable[str]) -> list[str]:
    """Put delivery names in the order of every table: deliveries, controls, then unknown names by alphabet."""
    known = list(DELIVERIES)

    def place(name: str) -> tuple[str, int, str]:
        group, delivery = split_name(name)
        return group, known.index(delivery) if delivery in known else len(known), delivery

    return sorted(deliveries, key=place)


def display_name(name: str) -> str:
    """Name a delivery, in a matrix with its group, as tables and plots do; an unknown one by its own name."""
    group, delivery = split_name(name)
    return joined(group, DELIVERIES[delivery].label if delivery in DELIVERIES else delivery)


def split_name(name: str) -> tuple[str, str]:
    """Split `memory=graph/static` into ("memory=graph", "static"): the group of a matrix, "" outside of one."""
    group, _, delivery = name.rpartition("/")
    return group, delivery


def joined(group: str, delivery: str) -> str:
    return f"{group}/{delivery}" if group else delivery


def is_control(name: str) -> bool:
    delivery = split_name(name)[1]
    return delivery in DELIVERIES and DELIVERIES[delivery].control


def compared_pairs(results: Mapping[str, Any]) -> list[tuple[str, str, Mapping[str, Any]]]:
    return [(*key.split(" - ", 1), pair) for key, pair in results.get("paired_difference", {}).items()]  # type: ignore[misc]


def groups_of(summaries: Mapping[str, Any], by: str) -> list[str]:
    """List the names that occur in any summary's `by_family` or `by_kind`, by alphabet ("text" before "visual")."""
    return sorted({name for summary in summaries.values() for name in summary[by]})


def _usual_pairs(names: Iterable[str]) -> list[tuple[str, str]]:
    groups = list(dict.fromkeys(split_name(name)[0] for name in names))
    within = [(spec.name, other) for spec in DELIVERIES.values() for other in spec.compared_with]
    return [(joined(group, a), joined(group, b)) for group in groups for a, b in within]


def budgets_of(summaries: Iterable[Mapping[str, Any]]) -> list[int]:
    """List the budgets that any summary tells success at; results of before there were any have none."""
    return sorted({int(budget) for summary in summaries for budget in summary.get("success_at", ())})


def difference(a: Sequence[Episode], b: Sequence[Episode], budgets: Sequence[int] = ()) -> dict[str, Any]:
    """Pair all tasks, at the end and `at` each budget, and those within each family: where soft tokens matter is a
    question about a family."""
    of_a, of_b = _groups(a, lambda e: e.family), _groups(b, lambda e: e.family)
    shared = [family for family in of_a if family in of_b and _share_tasks(of_a[family], of_b[family])]
    return {
        **asdict(paired_difference(a, b)),
        "at": {str(budget): asdict(paired_difference(a, b, budget)) for budget in budgets},
        "by_family": {family: asdict(paired_difference(of_a[family], of_b[family])) for family in shared},
    }


def paired_difference(
    a: Sequence[Episode], b: Sequence[Episode], within: float = inf, seed: int = 0
) -> PairedDifference:
    """Take a - b in success within so many steps, over the tasks that both played.

    Episodes of one task (several seeds) are averaged first: they are not independent of each other.

    Raises:
        ValueError: no task was played under both.
    """
    return paired(_success_by_task(a, within), _success_by_task(b, within), seed)


def _success_by_task(episodes: Sequence[Episode], within: float) -> dict[str, Fraction]:
    by_task = grouped(episodes, lambda episode: episode.task_id)
    return {task: Fraction(sum(succeeded(e, within) for e in mine), len(mine)) for task, mine in by_task.items()}


def _share_tasks(a: Sequence[Episode], b: Sequence[Episode]) -> bool:
    return bool({episode.task_id for episode in a} & {episode.task_id for episode in b})
