"""Fuzz targets: each generates inputs and checks the code that reads them.

A fault is an undocumented exception, more than LIMIT_S seconds for one input, or a changed meaning (`Fault`): a round
trip that differs, text that became structure, or an accepted value outside its domain.
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

LIMIT_S, TRIES = 2.0, 300  # seconds per input; attempts to shrink it
ROOT = Path(__file__).resolve().parents[2]


class Fault(AssertionError):
    """An input was read with another meaning."""


class Hang(BaseException):
    """One input took too long; a BaseException, so that no `except Exception` swallows it."""


@dataclass(frozen=True, slots=True)
class Target:
    """A generator of inputs and a check.

    Attributes:
        make: draws an input.
        check: reads the input.
        raises: documented errors of the code under test.
        share: weight in the number of inputs; low for slow targets.
    """

    name: str
    make: Callable[[Random], Any]
    check: Callable[[Any], object]
    raises: tuple[type[Exception], ...] = ()
    share: float = 1.0

    def draw(self, seed: int, number: int) -> Any:
        """Draw an input, determined by seed, target and number."""
        return self.make(Random(f"{seed}:{self.name}:{number}"))

    def fault(self, given: Any) -> tuple[str, str] | None:
        """Check an input; return the fault's message and a key that identifies it, or None."""
        try:
            signal.setitimer(signal.ITIMER_PROF, LIMIT_S)  # processor time
            signal.setitimer(signal.ITIMER_REAL, 5 * LIMIT_S)  # wall time
            self.check(given)
        except self.raises:
            return None
        except Fault as error:
            return str(error), str(error).partition(":")[0]
        except (Exception, Hang) as error:
            frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
            ours = [at for at in frames if at[0].startswith(str(ROOT)) and "/.venv/" not in at[0]]
            where = "{}:{}".format(*next((at for at in reversed(ours) if "/fuzz/" not in at[0]), ours[-1]))
            where = where.removeprefix(f"{ROOT}/")
            return f"{type(error).__name__}: {error} ({where})", f"{type(error).__name__} {where}"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
        return None

    def shrink(self, given: Any, where: str) -> Any:
        """Remove parts of an input while it shows the same fault."""
        left = 0 if where.startswith("Hang") else TRIES
        smaller = _smaller(given)
        while left and (candidate := next(smaller, None)) is not None:
            left -= 1
            if (self.fault(candidate) or ("", ""))[1] == where:
                given, smaller = candidate, _smaller(candidate)
        return given


@contextmanager
def interrupting() -> Iterator[None]:
    """Make the timers of `Target.fault` raise Hang inside the block; restore handlers and timer afterwards."""

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


def expect(holds: object, message: str) -> None:
    """Raise Fault unless `holds`."""
    if not holds:
        raise Fault(message)


def _smaller(given: Any) -> Iterator[Any]:
    """Yield smaller inputs: without slices of texts and lists, without keys, recursively."""
    if isinstance(given, dict):
        yield from ({k: v for k, v in given.items() if k != key} for key in given)
        yield from ({**given, key: inner} for key, held in given.items() for inner in _smaller(held))
    elif isinstance(given, str | bytes | list | tuple):
        sizes = [len(given) >> n for n in range(len(given).bit_length())]
        yield from (given[:at] + given[at + size :] for size in sizes for at in range(0, len(given), size))  # pyright: ignore
        if isinstance(given, list | tuple):
            parts = ([*given[:i], inner, *given[i + 1 :]] for i, held in enumerate(given) for inner in _smaller(held))
            yield from map(type(given), parts)
