"""Why an episode ended, and which of its ends are failures of our own machinery rather than of the agent."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import ClassVar


class StopReason(StrEnum):
    SUCCESS = "success"
    DONE = "done"  # the environment ended the episode without success
    STEP_LIMIT = "step_limit"
    ENVIRONMENT_FAILURE = "environment_failure"
    EXECUTOR_FAILURE = "executor_failure"
    COMPILER_FAILURE = "compiler_failure"
    MEMORY_FAILURE = "memory_failure"
    WORKER_FAILURE = "worker_failure"  # who played it was lost, again and again (`cluster: ray`)


class EpisodeFailure(RuntimeError):
    """Ends one episode, and no other. Raise one of its subclasses, which say who failed."""

    stop_reason: ClassVar[StopReason]


class EnvironmentFailure(EpisodeFailure):
    """The environment itself broke (crash, time-out, corrupt game). It fails the episode, never the run."""

    stop_reason = StopReason.ENVIRONMENT_FAILURE


class ExecutorFailure(EpisodeFailure):
    """The executor's backend failed for this step."""

    stop_reason = StopReason.EXECUTOR_FAILURE


class CompilerFailure(EpisodeFailure):
    """The compiler's backend failed for this step."""

    stop_reason = StopReason.COMPILER_FAILURE


class MemoryFailure(EpisodeFailure):
    """The memory system failed when it was asked or told of this step."""

    stop_reason = StopReason.MEMORY_FAILURE


FAILURES = (
    *(kind.stop_reason for kind in (EnvironmentFailure, ExecutorFailure, CompilerFailure, MemoryFailure)),
    StopReason.WORKER_FAILURE,
)


def is_failure(stop_reason: str) -> bool:
    """Tell whether an episode broke: it counts as failed in evaluation and has no part in training or memory."""
    return stop_reason in FAILURES


def first_failure(ends: Iterable[tuple[str, str]]) -> str:
    """Name the first failure among stop reasons with their errors; "" where none of them is one."""
    return next((f"{reason}: {error}" for reason, error in ends if is_failure(reason)), "")
