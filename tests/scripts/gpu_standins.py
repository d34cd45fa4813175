"""Fake parts of the GPU check: they measure nothing and record that they ran."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.kit import Kit
from benchmarks.gpu.parts import Part, Row, Setup

TRACE = "GPU_STANDINS"  # names the file with a line for every part that ran
SETUP = Setup("cpu", "tiny")


def _ran(name: str) -> None:
    with Path(os.environ[TRACE]).open("a") as file:
        file.write(f"{name}\n")


def fine(setup: Setup) -> Iterator[Row]:
    _ran("fine")
    yield {"what": "a | b", "seconds": 1.23456789, "passed": True}
    yield {"what": "c", "tokens": 7}


def broken(setup: Setup) -> Iterator[Row]:
    _ran("broken")
    yield {"what": "before"}
    raise ArithmeticError("it does not add up")


def unlike(setup: Setup) -> Iterator[Row]:
    _ran("unlike")
    yield {"what": "x", "passed": True}
    yield {"what": "y", "passed": False}


def killed(setup: Setup) -> Iterator[Row]:
    _ran("killed")
    yield {"what": "last"}
    os.kill(os.getpid(), signal.SIGKILL)


def endless(setup: Setup) -> Iterator[Row]:
    _ran("endless")
    yield {"what": "first"}
    time.sleep(600)


def slow(setup: Setup) -> Iterator[Row]:
    _ran("slow")
    time.sleep(1)
    yield {"part": "sft", "rows": 2, "tflop": 6.0, "plan_gib": 3.0}


def part(name: str, share: float = 1.0, background: bool = False) -> Part:
    packages = ("nosuchpackage",) if name == "absent" else ()
    return Part(name, f"tests.scripts.gpu_standins:{name}", share, packages, background=background)


if __name__ == "__main__":  # OUT NAME...
    Kit(Path(sys.argv[1]), SETUP, [part(name) for name in sys.argv[2:]]).run()
