"""Wait for events in other threads or processes, with a time limit."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def until(
    true: Callable[[], Any],
    seconds: float = 20,
    pause: float = 0.01,
    process: subprocess.Popen | None = None,
    words: Callable[[], object] = lambda: "",
) -> Any:
    """Wait until `true()` is true, and return its value.

    Args:
        process: a process that must keep running.
        words: returns details for the error message.

    Raises:
        AssertionError: the time is up, or the process ended.
    """
    deadline = time.monotonic() + seconds
    while not (value := true()):
        assert process is None or process.poll() is None, f"ended with {process.poll()}: {words()}"
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {words()}"
        time.sleep(pause)
    return value


def lines(path: Path) -> int:
    """Count the complete lines of a file; 0 for a missing one."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def in_background(call: Callable[[], Any]) -> Callable[[], Any]:
    """Start a call in a thread; return a function that waits for its result."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(20)
        return results[0]

    return result
