"""Wait for what happens elsewhere, in another thread or process, and never for ever."""

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
    """Return what `true()` gives once it is true.

    Args:
        process: which must not end meanwhile.
        words: what a failure says besides.

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
    """Count the whole lines of a file that may not be there yet."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def in_background(call: Callable[[], Any]) -> Callable[[], Any]:
    """Start a call; what is returned waits for its result."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(20)
        return results[0]

    return result
