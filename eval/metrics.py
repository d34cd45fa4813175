"""From episodes to numbers: what happened under each delivery, with intervals, and how two deliveries differ.

`summarise` describes one delivery, `results` puts all of them into the dict that is written as `results.json`.
An episode that broke (environment, executor or compiler failure) counts as an episode without success and stays
visible in `stop_reasons`: leaving it out would reward the delivery that breaks more often.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist, fmean
from typing import Any, TypeVar

import numpy as np

from agent.deliveries import DELIVERIES
from agent.records import Episode, StepRecord
from eval.errors import analyse
from runtime.errors import StopReason, is_failure

EMISSION_KINDS = ("EXPERIENCE", "BRIEF", "HYBRID", "NOACTION")
GROUNDINGS = ("choice", "exact", "fuzzy", "failed")
ROLES = ("compiler", "executor")
CLOCKS = (*ROLES, "environment")
HIGHER_IS_BETTER = {"success": True, "progress": True, "steps": False, "parse_error_rate": False,
                    "grounding_failure_rate": False, "op_error_rate": False}  # fmt: skip
REQUIRED_META = ("environment", "split", "seed")

LEVEL = 0.95
RESAMPLES = 10_000
_BLOCK_CELLS = 2**22  # the bootstrap draws in blocks of this many numbers (32 MiB), however many values there are


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with the ends of its confidence interval, over `n` independent things."""

    mean: float
    low: float
    high: float
    n: int
    stderr: float


@dataclass(frozen=True, slots=True)
class PairedDifference(Interval):
    """Mean of a - b over `n` tasks that both played; `wins` and `losses` count the tasks where a or b did better."""

    wins: int
    losses: int


K = TypeVar("K")
V = TypeVar("V")


def grouped(values: Iterable[V], key: Callable[[V], K]) -> dict[K, list[V]]:
    """Sort values into lists by key, both in the order in which they come."""
    found: dict[K, list[V]] = defaultdict(list)
    for value in values:
        found[key(value)].append(value)
    return dict(found)


# intervals ------------------------------------------------------------------------------------------------------------


def wilson(successes: int, n: int, level: float = LEVEL) -> Interval:
    """Take the Wilson score interval of a proportion. Unlike mean +- z s.e. it stays in [0, 1] and is honest at 0 and n
    of n.

    Raises:
        ValueError: n = 0, successes outside 0..n, or a level of 1 or more.
    """
    if n <= 0:
        raise ValueError("an interval over zero episodes says nothing: check the split and `limit`")
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes in {n} episodes")
    z = NormalDist().inv_cdf(0.5 + level / 2)
    p, shrink = successes / n, 1 + z * z / n
    centre = (p + z * z / (2 * n)) / shrink
    half = z / shrink * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    # At 0 and n of n one end is p itself; rounding must not push it past p.
    low, high = max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half))
    return Interval(p, low, high, n, (p * (1 - p) / n) ** 0.5)


def bootstrap_mean(values: Sequence[float], seed: int = 0) -> Interval:
    """Take the mean with its percentile bootstrap interval, whatever the order of the values.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("a bootstrap over zero values says nothing")
    means = _resampled_means(values, seed)
    low, high = np.quantile(means, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return Interval(fmean(values), float(low), float(high), len(values), float(means.std()))


def paired_bootstrap_difference(a: Sequence[Episode], b: Sequence[Episode], seed: int = 0) -> PairedDifference:
    """Take a - b in success, task by task, with a bootstrap over the tasks that both played.

    Pairing takes out how hard each task is, so the interval is narrower than the two deliveries' own suggest.
    Episodes of one task (several seeds) are averaged first: they are not independent of each other.

    Raises:
        ValueError: no task was played under both.
    """
    of_a, of_b = _success_by_task(a), _success_by_task(b)
    tasks = sorted(of_a.keys() & of_b.keys())
    if not tasks:
        raise ValueError("no task was played under both deliveries: nothing to pair")
    differences = [of_a[task] - of_b[task] for task in tasks]
    wins, losses = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    return PairedDifference(**asdict(bootstrap_mean(differences, seed)), wins=wins, losses=losses)


def _resampled_means(values: Sequence[float], seed: int) -> np.ndarray:
    """Return [RESAMPLES] means of resamples with replacement: success, progress and their differences take few distinct
    values, so how often each one occurs is drawn, instead of n indices."""
    distinct, counts = np.unique(np.asarray(values, dtype=np.float64), return_counts=True)
    rng, block = np.random.default_rng(seed), max(1, _BLOCK_CELLS // len(distinct))
    sizes = [min(block, RESAMPLES - start) for start in range(0, RESAMPLES, block)]
    draws = [rng.multinomial(len(values), counts / counts.sum(), size=size) @ distinct for size in sizes]
    return np.concatenate(draws) / len(values)


def _success_by_task(episodes: Sequence[Episode]) -> dict[str, float]:
    by_task = grouped(episodes, lambda episode: episode.task_id)
    return {task: fmean(float(succeeded(episode)) for episode in of_task) for task, of_task in by_task.items()}


# one delivery ---------------------------------------------------------------------------------------------------------


def succeeded(episode: Episode) -> bool:
    """Tell success as every table counts it: an episode that broke has none, whatever was recorded before it broke."""
    return episode.success and not is_failure(episode.stop_reason)


def summarise(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Describe what a delivery did, ready for JSON; docs/results-format.md says each key.

    Tokens are what a role read and wrote (prompt + generated). Rates and times per step are over all steps of all
    episodes; shares are over the steps that have the thing at all (an emission, a grounded action).
    `emission_mix` is {} and `parse_error_rate` None where no compiler spoke.

    Raises:
        ValueError: there are no episodes.
    """
    if not episodes:
        raise ValueError("zero episodes: nothing to summarise (check the split, the filters and `limit`)")
    steps = [step for episode in episodes for step in episode.steps]
    emissions = [step for step in steps if step.emission_kind]
    listed = [step.grounding for step in steps if step.grounding not in ("", "free")]
    stops = Counter(episode.stop_reason for episode in episodes)
    return {
        **_success_and_progress(episodes),
        "executor_tokens_per_step": _tokens_per_step(steps, "executor"),
        "compiler_tokens_per_step": _tokens_per_step(steps, "compiler"),
        "emission_mix": _shares((step.emission_kind for step in emissions), EMISSION_KINDS),
        "parse_error_rate": _mean([float(s.parse_error is not None) for s in emissions]) if emissions else None,
        # by operation: "create: key exists: mug" is a create
        "op_errors": dict(sorted(Counter(e.partition(":")[0] for s in emissions for e in s.op_errors).items())),
        "op_error_rate": _mean([float(bool(s.op_errors)) for s in emissions]) if emissions else None,
        "grounding": _shares((step.grounding for step in steps if step.grounding), GROUNDINGS),
        # of the actions where the environment lists its commands
        "grounding_failure_rate": listed.count("failed") / len(listed) if listed else None,
        "seconds_per_step": {clock: _mean([s.seconds.get(clock, 0.0) for s in steps]) for clock in CLOCKS},
        "usage": {clock: usage(steps, clock) for clock in CLOCKS},
        "steps": fmean(len(episode.steps) for episode in episodes),
        "planner_steps": fmean(sum(bool(step.grounding) for step in episode.steps) for episode in episodes),
        "environment_steps": fmean(sum("environment" in s.seconds for s in episode.steps) for episode in episodes),
        "errors": analyse(episodes),
        "stop_reasons": {str(reason): stops[reason] for reason in StopReason if stops[reason]},
        "by_family": {
            family: _success_and_progress(members) for family, members in _groups(episodes, lambda e: e.family).items()
        },
        "by_kind": {
            kind: {"success": _success(members)} for kind, members in _groups(episodes, lambda e: e.kind).items()
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


def _success(episodes: Sequence[Episode]) -> dict[str, Any]:
    return asdict(wilson(sum(map(succeeded, episodes)), len(episodes)))


def _success_and_progress(episodes: Sequence[Episode]) -> dict[str, Any]:
    progress = bootstrap_mean([episode.progress for episode in episodes])
    return {"success": _success(episodes), "progress": asdict(progress)}


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
    per_delivery: Mapping[str, Sequence[Episode]], meta: Mapping[str, Any], pairs: Iterable[tuple[str, str]] = ()
) -> dict[str, Any]:
    """Make the content of `results.json`: a summary per delivery, the run's meta data, and the paired differences.

    Args:
        per_delivery: episodes by delivery name; in a matrix, `group/delivery`.
        meta: at least "environment", "split" and "seed"; anything else that is JSON goes in beside them.
        pairs: what is compared beyond what the deliveries' `compared_with` says.

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
    return {
        "results": {name: summarise(per_delivery[name]) for name in ordered(per_delivery)},
        **meta,
        "paired_difference": {
            f"{a} - {b}": difference(per_delivery[a], per_delivery[b])
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


def difference(a: Sequence[Episode], b: Sequence[Episode]) -> dict[str, Any]:
    """Pair all tasks, and those within each family: where soft tokens matter is a question about a family."""
    of_a, of_b = _groups(a, lambda e: e.family), _groups(b, lambda e: e.family)
    shared = [family for family in of_a if family in of_b and _share_tasks(of_a[family], of_b[family])]
    within = {family: asdict(paired_bootstrap_difference(of_a[family], of_b[family])) for family in shared}
    return {**asdict(paired_bootstrap_difference(a, b)), "by_family": within}


def _share_tasks(a: Sequence[Episode], b: Sequence[Episode]) -> bool:
    return bool({episode.task_id for episode in a} & {episode.task_id for episode in b})
