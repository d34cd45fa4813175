"""A seeded fuzzer over everything that reads what others wrote: answers, texts, files, settings, requests.

Input `number` of a target follows from (seed, target, number) alone. A fault is an exception that the function does
not document, more than `LIMIT_S` seconds for one input, or a changed meaning (`Fault`): a round trip that differs, a
text that became structure, a value out of its domain that was accepted.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

LIMIT_S = 2.0
TRIES, LONGEST = 300, 400  # attempts at a smaller input; characters of it that are printed
ROOT = str(Path(__file__).resolve().parents[2])


class Fault(AssertionError):
    """The meaning of an input changed silently."""


class Hang(BaseException):
    """One input took too long; no `except Exception` may swallow this."""


@dataclass(frozen=True, slots=True)
class Target:
    """`make` draws an input, `check` reads it; `raises` are the errors that what it reads documents. `share`: how many
    inputs it gets beside others; less where an input costs milliseconds."""

    name: str
    make: Callable[[Random], Any]
    check: Callable[[Any], object]
    raises: tuple[type[Exception], ...] = ()
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Found:
    """A fault: what is wrong, and where, which tells it from others."""

    what: str
    where: str


def expect(holds: object, what: str) -> None:
    """Raise Fault unless it holds."""
    if not holds:
        raise Fault(what)


def attempt(target: Target, given: Any) -> Found | None:
    """Check one input; return its fault."""
    try:
        with _limited():
            target.check(given)
    except target.raises:
        return None
    except Fault as error:
        return Found(str(error), str(error).partition(":")[0])
    except (Exception, Hang) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(ROOT)]
        frames = [f for f in frames if "/.venv/" not in f.filename]
        at = next((f for f in reversed(frames) if "/fuzz/" not in f.filename), frames[-1])
        where = f"{Path(at.filename).relative_to(ROOT)}:{at.lineno}"
        return Found(f"{type(error).__name__}: {error} ({where})", f"{type(error).__name__} {where}")
    return None


@contextmanager
def _limited() -> Iterator[None]:
    """Interrupt the block after LIMIT_S seconds of processor time, or five times as long by the clock."""
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    signal.setitimer(signal.ITIMER_REAL, 5 * LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def interrupting() -> Iterator[None]:
    """Have the timers of `_limited` raise Hang inside the block; restore what used them before."""

    def hang(number: int, frame: object) -> None:
        raise Hang(f"more than {LIMIT_S:g} s")

    before = {number: signal.signal(number, hang) for number in (signal.SIGPROF, signal.SIGALRM)}
    timer = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def drawn(target: Target, seed: int, number: int) -> Any:
    """Make input `number` of a target."""
    return target.make(Random(f"{seed}:{target.name}:{number}"))


def shrunk(target: Target, given: Any, found: Found) -> Any:
    """Drop parts of an input as long as it shows the same fault."""
    left = 0 if found.what.startswith("Hang") else TRIES
    smaller = _smaller(given)
    while left and (candidate := next(smaller, None)) is not None:
        left -= 1
        again = attempt(target, candidate[0])
        if again is not None and again.where == found.where:
            given = candidate[0]
            smaller = _smaller(given)
    return given


def _smaller(given: Any) -> Iterator[tuple[Any]]:
    """Yield inputs with less in them, the smallest first: slices of texts and lists, dicts without a key, and the same
    further down."""
    if isinstance(given, str | bytes | list | tuple):
        sliced: Any = given
        size = len(given)
        while size:
            for at in range(0, len(given), size):
                yield (sliced[:at] + sliced[at + size :],)
            size //= 2
    if isinstance(given, dict):
        yield from (({k: v for k, v in given.items() if k != key},) for key in given)
        yield from (({**given, key: inner},) for key, held in given.items() for (inner,) in _smaller(held))
    if isinstance(given, list | tuple):
        parts = (([*given[:i], inner, *given[i + 1 :]],) for i, held in enumerate(given) for (inner,) in _smaller(held))
        yield from ((type(given)(part),) for (part,) in parts)
