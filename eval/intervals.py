"""Intervals of shares, means and paired differences, and the exact test of a difference."""

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
    """Mean of a - b over the `n` tasks that both have; `wins` and `losses` count the tasks where a or b did better, `p`
    is `sign_flip_p` of the differences."""

    wins: int
    losses: int
    p: float


def wilson(successes: int | Fraction, n: int, level: float = LEVEL) -> Interval:
    """Take the Wilson score interval of a proportion. Unlike mean +- z s.e. it stays in [0, 1] and is honest at 0 and n
    of n. Things that succeed in part (a task in two of three runs) add a fraction.

    Raises:
        ValueError: n = 0, successes outside 0..n, or a level of 1 or more.
    """
    if n <= 0:
        raise ValueError("an interval over zero episodes says nothing: check the split and `limit`")
    if not 0 <= successes <= n:
        raise ValueError(f"{successes} successes in {n} episodes")
    z = NormalDist().inv_cdf(0.5 + level / 2)
    p, shrink = float(successes / n), 1 + z * z / n
    centre = (p + z * z / (2 * n)) / shrink
    half = z / shrink * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    # At 0 and n of n one end is p itself; rounding must not push it past p.
    low, high = max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half))
    return Interval(p, low, high, n, (p * (1 - p) / n) ** 0.5)


def bootstrap_mean(values: Sequence[float | Fraction], seed: int = 0) -> Interval:
    """Take the mean with its percentile bootstrap interval, whatever the order of the values.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("a bootstrap over zero values says nothing")
    means = _resampled_means(values, seed)
    low, high = np.quantile(means, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return Interval(fmean(values), float(low), float(high), len(values), float(means.std()))


def paired(a: Mapping[str, Fraction], b: Mapping[str, Fraction], seed: int = 0) -> PairedDifference:
    """Take a - b, task by task: mean, bootstrap interval over the tasks that both have, and exact p value.

    Pairing takes out how hard each task is, so the interval is narrower than the two's own suggest.

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
    """Test paired differences exactly, two-sided (Fisher's randomisation test): if neither side were better, each one's
    sign would be as likely the other; what share of all signs give a sum as far from zero?

    Where every difference is -1, 0 or 1 (each task played once by both), this is McNemar's exact test.
    """
    scale = lcm(*(d.denominator for d in differences))
    whole = [int(d * scale) for d in differences if d]
    sums = Counter({0: 1})  # every sum, with the number of ways to it
    for size in whole:
        flipped: Counter[int] = Counter()
        for total, ways in sums.items():
            flipped[total + size] += ways
            flipped[total - size] += ways
        sums = flipped
    return sum(ways for total, ways in sums.items() if abs(total) >= abs(sum(whole))) / 2 ** len(whole)


def _resampled_means(values: Sequence[float | Fraction], seed: int) -> np.ndarray:
    """Return [RESAMPLES] means of resamples with replacement: success, progress and their differences take few distinct
    values, so how often each one occurs is drawn, instead of n indices."""
    distinct, counts = np.unique(np.asarray(values, dtype=np.float64), return_counts=True)
    rng, block = np.random.default_rng(seed), max(1, _BLOCK_CELLS // len(distinct))
    sizes = [min(block, RESAMPLES - start) for start in range(0, RESAMPLES, block)]
    draws = [rng.multinomial(len(values), counts / counts.sum(), size=size) @ distinct for size in sizes]
    return np.concatenate(draws) / len(values)
