"""`memcompiler bench fuzz`: every target, its faults, and a table."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence

from benchmarks.fuzz import files, settings, texts
from benchmarks.fuzz.target import LONGEST, Found, Target, attempt, drawn, interrupting, shrunk

TARGETS = (*texts.TARGETS, *settings.TARGETS, *files.TARGETS)


def run_bench_fuzz(seed: int = 0, inputs: int = 20_000, names: Sequence[str] = (), only: str | None = None) -> int:
    """Check inputs of all targets, or of some, or the one that `only` names (TARGET:NUMBER). Returns how many faults.

    Raises:
        ValueError: there is no such target.
    """
    known = {target.name: target for target in TARGETS}
    named, _, number = (only or "").partition(":")
    wanted = [named] if only else list(names) or list(known)
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"no target {', '.join(unknown)}; there are {', '.join(known)}")
    targets = [known[name] for name in wanted]
    total = sum(target.share for target in targets)
    print(f"{'target':<24}{'inputs':>10}{'faults':>8}{'inputs/s':>10}  of processor time")
    faults = done = 0
    with interrupting(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries, about what was damaged
        for target in targets:
            numbers = [int(number)] if only else range(max(1, round(inputs * target.share / total)))
            faults, done = faults + checked(target, seed, numbers), done + len(numbers)
    print(f"faults: {faults} in {done} inputs")
    return faults


def checked(target: Target, seed: int, numbers: Sequence[int]) -> int:
    """Check inputs of one target and print its row, and each different fault once. Returns how many are faulty."""
    started, first, wrong = time.process_time(), dict[str, tuple[int, Found]](), 0
    for number in numbers:
        if (found := attempt(target, drawn(target, seed, number))) is not None:
            wrong += 1
            first.setdefault(found.where, (number, found))
    rate = len(numbers) / max(time.process_time() - started, 1e-3)
    print(f"{target.name:<24}{len(numbers):>10,}{wrong:>8,}{rate:>10,.0f}", flush=True)
    for number, found in first.values():
        given = repr(shrunk(target, drawn(target, seed, number), found))
        given = given if len(given) <= LONGEST else f"{given[:LONGEST]}... ({len(given)} characters)"
        print(f"  {found.what[:LONGEST]}\n    --seed {seed} --only {target.name}:{number}   input: {given}", flush=True)
    return wrong
