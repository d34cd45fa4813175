"""Seeds of what episodes draw, where each request has a seed of its own."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence


def episode_seeds(seed: int, tasks: Sequence[Sequence[tuple[str, str]]]) -> list[list[int]]:
    """Return a seed for each episode: 56 bits, to which the number of a request in its episode is added.

    It depends on the task, and on how often it comes earlier in `tasks`: neither timing nor other tasks change it.

    Args:
        tasks: environment and task id of each episode of each sequence.
    """
    before, seeds = Counter[tuple[str, str]](), list[list[int]]()
    for sequence in tasks:
        seeds.append([])
        for key in sequence:
            named = f"{seed} {before[key]} {key[1]}"
            seeds[-1].append(int.from_bytes(hashlib.sha256(named.encode()).digest()[:7]))
            before[key] += 1
    return seeds
