"""Metrics of episodes: `summarise` describes one delivery, `difference` compares two, `results` returns the content of
results.json.

An episode with a technical failure (environment, executor or compiler) counts as failed and is listed in
`stop_reasons`: leaving it out would reward the delivery that fails more often."""

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
from eval.error_analysis import analyse
from eval.intervals import Interval, PairedDifference, bootstrap_mean, paired, wilson
from runtime.attempts import failure_counts
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
    """Group values by key, in the order in which they occur."""
    found: dict[K, list[V]] = defaultdict(list)
    for value in values:
        found[key(value)].append(value)
    return dict(found)


# one delivery ---------------------------------------------------------------------------------------------------------


def succeeded(episode: Episode, within: float = inf) -> bool:
    """Return whether an episode succeeded in at most `within` steps. One with a technical failure never did."""
    return episode.success and not is_failure(episode.stop_reason) and len(episode.steps) <= within


def summarise(episodes: Sequence[Episode], budgets: Sequence[int] = ()) -> dict[str, Any]:
    """Summarise the episodes of a delivery, ready for JSON (docs/guides/results-format.md describes each key).

    Tokens are prompt + generated. Rates and times per step are over all steps of all episodes; shares are over the
    steps to which they apply (with an emission, with a grounded action). Without emissions `emission_mix` is {} and
    `parse_error_rate` None.

    Args:
        budgets: step counts within which success is also reported, at most the episodes' maximum.

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
        # by operation, e.g. "create: key exists: mug" counts as create
        "op_errors": dict(sorted(Counter(e.partition(":")[0] for s in emissions for e in s.op_errors).items())),
        "op_error_rate": _mean([float(bool(s.op_errors)) for s in emissions]) if emissions else None,
        "turns_dropped_rate": _mean([float(step.turns_dropped > 0) for step in steps]),
        "grounding": _shares((step.grounding for step in steps if step.grounding), GROUNDINGS),
        # over steps at which the environment lists its commands
        "grounding_failure_rate": listed.count("failed") / len(listed) if listed else None,
        "seconds_per_step": {clock: _mean([s.seconds.get(clock, 0.0) for s in steps]) for clock in CLOCKS},
        "usage": used,
        "steps": fmean(len(episode.steps) for episode in episodes),
        "planner_steps": fmean(sum(bool(step.grounding) for step in episode.steps) for episode in episodes),
        "environment_steps": fmean(sum("environment" in s.seconds for s in episode.steps) for episode in episodes),
        "errors": analyse(episodes),
        "broken": failure_counts([(e.task_id, e.failure, e.broken) for e in episodes]),
        "stop_reasons": {str(reason): stops[reason] for reason in StopReason if stops[reason]},
        "by_family": {
            family: _reached(members, budgets) for family, members in _groups(episodes, lambda e: e.family).items()
        },
        "by_kind": {
            kind: _successes(members, budgets) for kind, members in _groups(episodes, lambda e: e.kind).items()
        },
    }


def usage(steps: Sequence[StepRecord], role: str) -> dict[str, Any]:
    """Sum the calls, seconds and (for models) tokens of a role, with quantiles of a call's latency in seconds.

    `tokens_cached` (input tokens served by a prefix cache) is None if the backend does not report it. In a batch, a
    call's latency is its share of the batch's time; `concurrency: 1` measures a single agent's latency.
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
    """Return the success within 0, 1, 2, ... steps, up to the largest budget or the longest success."""
    solved: Mapping[str, int] = (summary["steps_to_success"] or {}).get("counts", {})
    last = max(map(int, (*solved, *summary["success_at"])), default=0)
    tasks, episodes = summary["success"]["n"], sum(summary["stop_reasons"].values())
    within = accumulate(solved.get(str(t), 0) for t in range(last + 1))
    return [wilson(Fraction(k * tasks, episodes), tasks) for k in within]


def _successes(episodes: Sequence[Episode], budgets: Sequence[int]) -> dict[str, Any]:
    """Return success with intervals over tasks: several episodes of a task (seeds) are not independent, and their mean
    varies at most as much as one of them."""
    tasks = len({episode.task_id for episode in episodes})

    def rate(within: float) -> dict[str, Any]:
        solved = sum(succeeded(episode, within) for episode in episodes)
        return asdict(wilson(Fraction(solved * tasks, len(episodes)), tasks))

    return {"success": rate(inf), "success_at": {str(budget): rate(budget) for budget in budgets}}


def _reached(episodes: Sequence[Episode], budgets: Sequence[int]) -> dict[str, Any]:
    progress = bootstrap_mean([episode.progress for episode in episodes])
    return {**_successes(episodes, budgets), "progress": asdict(progress)}


def _steps_to_success(episodes: Sequence[Episode]) -> dict[str, Any] | None:
    """Return the mean steps of successes, with interval and median; `counts`: steps -> successes."""
    taken = sorted(len(episode.steps) for episode in episodes if succeeded(episode))
    if not taken:
        return None
    counts = {str(steps): n for steps, n in Counter(taken).items()}
    return {**asdict(bootstrap_mean(taken)), "median": float(median(taken)), "counts": counts}


def _cost_per_success(used: Mapping[str, Mapping[str, Any]], successes: int) -> dict[str, dict[str, float]] | None:
    """Divide tokens and seconds of all episodes, including failed ones, by the number of successes."""
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
    return fmean(values) if values else 0.0  # an episode may fail before its first step


def _shares(names: Iterable[str], expected: Sequence[str]) -> dict[str, float]:
    """Return the share of each name, with 0 for expected names that do not occur; {} if there are no names."""
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
    """Return the content of results.json: a summary per delivery, metadata, and paired differences.

    Args:
        per_delivery: episodes by delivery; in a matrix by `group/delivery`.
        meta: "environment", "split", "seed" and other JSON values.
        pairs: comparisons in addition to `DeliverySpec.compared_with`.
        budgets: step counts by delivery; see `summarise`.

    Raises:
        ValueError: no delivery, one without episodes, or incomplete or clashing metadata.
    """
    if not per_delivery:
        raise ValueError("no delivery was evaluated")
    if empty := [name for name, episodes in per_delivery.items() if not episodes]:
        raise ValueError(f"zero episodes under {', '.join(empty)}: a run over nothing has no result")
    if missing := [key for key in REQUIRED_META if key not in meta]:
        raise ValueError(f"results need the metadata {', '.join(missing)}")
    if clash := {"results", "paired_difference"} & meta.keys():
        raise ValueError(f"metadata cannot have the keys {', '.join(sorted(clash))}")
    of_delivery = {name: budgets.get(name, ()) for name in per_delivery}
    return {
        "results": {name: summarise(per_delivery[name], of_delivery[name]) for name in ordered(per_delivery)},
        **meta,
        "paired_difference": {
            f"{a} - {b}": difference(
                per_delivery[a], per_delivery[b], [t for t in of_delivery[a] if t in of_delivery[b]]
            )
            for a, b in dict.fromkeys((*_usual_pairs(per_delivery), *pairs))
            if a in per_delivery and b in per_delivery and _share_tasks(per_delivery[a], per_delivery[b])
        },
    }


def ordered(deliveries: Iterable[str]) -> list[str]:
    """Sort delivery names as in every table: known deliveries in their order, then others by name."""
    known = list(DELIVERIES)

    def place(name: str) -> tuple[str, int, str]:
        group, delivery = split_name(name)
        return group, known.index(delivery) if delivery in known else len(known), delivery

    return sorted(deliveries, key=place)


def display_name(name: str) -> str:
    """Return a delivery's label, with its group in a matrix; its name if it is unknown."""
    group, delivery = split_name(name)
    return joined(group, DELIVERIES[delivery].label if delivery in DELIVERIES else delivery)


def split_name(name: str) -> tuple[str, str]:
    """Split `memory=graph/static` into ("memory=graph", "static"); the group is "" outside of a matrix."""
    group, _, delivery = name.rpartition("/")
    return group, delivery


def joined(group: str, delivery: str) -> str:
    return f"{group}/{delivery}" if group else delivery


def is_control(name: str) -> bool:
    delivery = split_name(name)[1]
    return delivery in DELIVERIES and DELIVERIES[delivery].control


def compared_pairs(results: Mapping[str, Any]) -> list[tuple[str, str, Mapping[str, Any]]]:
    """Return (a, b, difference) of every pair of compared deliveries."""
    return [(*key.split(" - ", 1), pair) for key, pair in results.get("paired_difference", {}).items()]  # type: ignore[misc]


def groups_of(summaries: Mapping[str, Any], by: str) -> list[str]:
    """Return the names in the summaries' `by_family` or `by_kind`, sorted."""
    return sorted({name for summary in summaries.values() for name in summary[by]})


def _usual_pairs(names: Iterable[str]) -> list[tuple[str, str]]:
    groups = list(dict.fromkeys(split_name(name)[0] for name in names))
    within = [(spec.name, other) for spec in DELIVERIES.values() for other in spec.compared_with]
    return [(joined(group, a), joined(group, b)) for group in groups for a, b in within]


def budgets_of(summaries: Iterable[Mapping[str, Any]]) -> list[int]:
    """Return all step budgets of the summaries, sorted."""
    return sorted({int(budget) for summary in summaries for budget in summary["success_at"]})


def difference(a: Sequence[Episode], b: Sequence[Episode], budgets: Sequence[int] = ()) -> dict[str, Any]:
    """Compute the paired difference a - b over all tasks, within each budget (`at`) and within each family."""
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
    """Compute the paired difference a - b in success within `within` steps, over the shared tasks.

    Episodes of one task (several seeds) are averaged first, because they are not independent.

    Raises:
        ValueError: they share no task.
    """
    return paired(success_by_task(a, within), success_by_task(b, within), seed)


def success_by_task(episodes: Sequence[Episode], within: float = inf) -> dict[str, Fraction]:
    """Return each task's share of successes within so many steps."""
    by_task = grouped(episodes, lambda episode: episode.task_id)
    return {task: Fraction(sum(succeeded(e, within) for e in mine), len(mine)) for task, mine in by_task.items()}


def _share_tasks(a: Sequence[Episode], b: Sequence[Episode]) -> bool:
    return bool({episode.task_id for episode in a} & {episode.task_id for episode in b})
