"""Generated homes whose worker crashes, stops, hangs or answers garbage in a share of the episodes."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from envs.base import Observation, Task, Transition
from envs.household.environment import HouseholdEnvironment


class UnsteadyHomes(HouseholdEnvironment):
    """Homes that misbehave at the second step of an episode.

    Args:
        faults: share of the episodes that misbehave.
        record: file that gets a line "process fault" before each fault.
    """

    def __init__(self, faults: float, record: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._faults, self._record, self._random = faults, Path(record), random.Random(os.getpid())
        self._fault: str | None = None

    def reset(self, task: Task) -> Observation:
        self._fault = self._random.choice(list(FAULTS)) if self._random.random() < self._faults else None
        return super().reset(task)

    def step(self, action: str) -> Transition:
        fault, self._fault = self._fault, None
        if fault is not None:
            with self._record.open("a") as record:  # one write of a short line: processes do not mix theirs
                record.write(f"{os.getpid()} {fault}\n")
            FAULTS[fault]()
        return super().step(action)


def _garbage() -> None:
    for name in os.listdir("/proc/self/fd"):  # the pool's socket is one of them
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                os.write(int(name), b"Unity says hello, and here is a lot of text\n")
        except OSError:
            continue


FAULTS: Mapping[str, Callable[[], object]] = {
    "crash": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": lambda: time.sleep(3600.0),
    "garbage": _garbage,
}
