"""Confidence intervals of shares, means, ratios and paired differences, and the exact test of a difference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from math import lcm
from statistics import NormalDist, fmean

import numpy as np

LEVEL = 0.95
RESAMPLES = 10_000
RATIO_RESAMPLES = 2_000
_BLOCK_CELLS = 2**22  # numbers per block of bootstrap draws (32 MiB)


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its confidence interval, over `n` independent samples."""

    mean: float
    low: float
    high: float
    n: int
    stderr: float


@dataclass(frozen=True, slots=True)
class PairedDifference(Interval):
    """Mean of a - b over the `n` shared tasks; `wins` and `losses` count tasks where a or b did better; `p` is
    `sign_flip_p` of the differences."""

    wins: int
    losses: int
    p: float


def wilson(successes: int | Fraction, n: int, level: float = LEVEL) -> Interval:
    """Compute the Wilson score interval of a proportion, which stays in [0, 1] and has a width at 0 and n of n too.

    A sample that succeeds in part (a task in two of three runs) adds a fraction to `successes`.

    Raises:
        ValueError: n = 0, successes outside 0..n, or a level of 1 or more.
    """
    if n <= 0:
        raise ValueError("an interval needs at least one episode: check the split and `limit`")
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes in {n} episodes")
    z = NormalDist().inv_cdf(0.5 + level / 2)
    p, shrink = float(successes / n), 1 + z * z / n
    centre = (p + z * z / (2 * n)) / shrink
    half = z / shrink * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    # at 0 and n of n one end is p itself; rounding must not move it past p
    low, high = max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half))
    return Interval(p, low, high=high, n=n, stderr=(p * (1 - p) / n) ** 0.5)


def bootstrap_mean(values: Sequence[float | Fraction], seed: int = 0) -> Interval:
    """Compute the mean and its percentile bootstrap interval, independent of the order of the values.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("a bootstrap needs at least one value")
    means = _resampled_means(values, seed)
    low, high = np.quantile(means, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return Interval(fmean(values), float(low), high=float(high), n=len(values), stderr=float(means.std()))


def bootstrap_ratio(pairs: Sequence[tuple[float, float]], seed: int = 0) -> Interval | None:
    """Compute sum(x) / sum(y) over pairs (x, y), with its percentile bootstrap interval; None if sum(y) is zero."""
    above, below = (np.array(side, dtype=float) for side in (zip(*pairs, strict=True) if pairs else ((), ())))
    if not below.sum():
        return None
    picks = np.random.default_rng(seed).integers(len(pairs), size=(RATIO_RESAMPLES, len(pairs)))
    sums = below[picks].sum(1)
    ratios = above[picks].sum(1)[sums > 0] / sums[sums > 0]
    low, high = np.quantile(ratios, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return Interval(
        float(above.sum() / below.sum()), float(low), high=float(high), n=len(pairs), stderr=float(ratios.std())
    )


def paired(a: Mapping[str, Fraction], b: Mapping[str, Fraction], seed: int = 0) -> PairedDifference:
    """Compare a and b task by task: mean of a - b over the shared tasks, bootstrap interval and exact p value.

    Pairing removes the difficulty of the tasks, so the interval is narrower than those of a and b suggest.

    Raises:
        ValueError: they have no task in common.
    """
    tasks = sorted(a.keys() & b.keys())
    if not tasks:
        raise ValueError("no task was played under both deliveries: nothing to pair")
    differences = [a[task] - b[task] for task in tasks]
    wins, losses = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    mean = asdict(bootstrap_mean(differences, seed))
    return PairedDifference(**mean, wins=wins, losses=losses, p=sign_flip_p(differences))


def sign_flip_p(differences: Sequence[Fraction]) -> float:
    """Compute the exact two-sided p value of paired differences (Fisher's randomisation test): the share of all sign
    assignments whose sum is at least as far from zero.

    For differences of -1, 0 and 1 (each task played once by both) this is McNemar's exact test.
    """
    scale = lcm(*(d.denominator for d in differences))
    whole = [int(d * scale) for d in differences if d]
    sums = Counter({0: 1})  # sum -> number of sign assignments
    for size in whole:
        flipped: Counter[int] = Counter()
        for total, ways in sums.items():
            flipped[total + size] += ways
            flipped[total - size] += ways
        sums = flipped
    return sum(ways for total, ways in sums.items() if abs(total) >= abs(sum(whole))) / 2 ** len(whole)


def _resampled_means(values: Sequence[float | Fraction], seed: int) -> np.ndarray:
    """Return [RESAMPLES] means of resamples with replacement. Success, progress and their differences take few distinct
    values, so this draws counts of distinct values instead of n indices."""
    distinct, counts = np.unique(np.asarray(values, dtype=np.float64), return_counts=True)
    rng, block = np.random.default_rng(seed), max(1, _BLOCK_CELLS // len(distinct))
    sizes = [min(block, RESAMPLES - start) for start in range(0, RESAMPLES, block)]
    draws = [rng.multinomial(len(values), counts / counts.sum(), size=size) @ distinct for size in sizes]
    return np.concatenate(draws) / len(values)
