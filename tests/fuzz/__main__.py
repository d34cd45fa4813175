"""Fuzz the readers of everything that others write: answers, texts, files, settings, requests.

    python -m tests.fuzz --inputs 1000000

Prints each distinct fault with the options that replay it, and exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence

from tests.fuzz import files, services, texts
from tests.fuzz.target import Target, interrupting

LONGEST = 400  # printed characters of an input or message
TARGETS = (*texts.TARGETS, *services.TARGETS, *files.TARGETS)


def run_fuzz(seed: int = 0, inputs: int = 20_000, names: Sequence[str] = (), only: str | None = None) -> int:
    """Run all targets, those of `names`, or the one input `only` (TARGET:NUMBER); return the number of faults.

    Raises:
        ValueError: a target is unknown, or `only` has no number.
    """
    known = {target.name: target for target in TARGETS}
    name, _, number = (only or "").partition(":")
    wanted = [name] if only else list(names) or list(known)
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"no target {', '.join(unknown)}; there are {', '.join(known)}")
    if only and not number.isdecimal():
        raise ValueError(f"--only {only}: expected TARGET:NUMBER")
    total = sum(known[name].share for name in wanted)
    print(f"{'target':<24}{'inputs':>10}{'faults':>8}{'inputs/s':>10}  of processor time")
    faults = done = 0
    with interrupting(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # libraries warn about damaged files
        for target in map(known.__getitem__, wanted):
            numbers = [int(number)] if only else range(max(1, round(inputs * target.share / total)))
            faults, done = faults + _run(target, seed, numbers), done + len(numbers)
    print(f"faults: {faults} in {done} inputs")
    return faults


def _run(target: Target, seed: int, numbers: Sequence[int]) -> int:
    """Check inputs of one target, print its row and its faults, and return the number of faulty inputs."""
    first, wrong = dict[str, tuple[int, str]](), 0
    target.draw(seed, 0)  # loads the samples
    started = time.process_time()
    for number in numbers:
        if (fault := target.fault(target.draw(seed, number))) is not None:
            wrong += 1
            first.setdefault(fault[1], (number, fault[0]))
    rate = len(numbers) / max(time.process_time() - started, 1e-3)
    print(f"{target.name:<24}{len(numbers):>10,}{wrong:>8,}{rate:>10,.0f}", flush=True)
    for where, (number, what) in first.items():
        given = repr(target.shrink(target.draw(seed, number), where))
        shown = given if len(given) <= LONGEST else f"{given[:LONGEST]}... ({len(given):,} characters)"
        print(f"  {what[:LONGEST]}\n    --seed {seed} --only {target.name}:{number}  input: {shown}", flush=True)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--inputs", type=int, default=20_000, help="number of inputs over all targets")
    parser.add_argument("--target", action="append", default=[], help="target to run (default: all); repeatable")
    parser.add_argument("--only", help="run one input only, as TARGET:NUMBER")
    options = parser.parse_args()
    sys.exit(bool(run_fuzz(options.seed, options.inputs, options.target, options.only)))


if __name__ == "__main__":
    main()
