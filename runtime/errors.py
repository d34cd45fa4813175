"""Stop reasons of episodes, and exceptions for failures of the machinery as opposed to the agent."""

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
    WORKER_FAILURE = "worker_failure"  # its worker was lost repeatedly (`cluster: ray`)


class EpisodeFailure(RuntimeError):
    """Base of failures that end one episode. Raise a subclass, which names the component."""

    stop_reason: ClassVar[StopReason]


class EnvironmentFailure(EpisodeFailure):
    """The environment failed (crash, time-out, corrupt game)."""

    stop_reason = StopReason.ENVIRONMENT_FAILURE


class ExecutorFailure(EpisodeFailure):
    """The executor's backend failed at this step."""

    stop_reason = StopReason.EXECUTOR_FAILURE


class CompilerFailure(EpisodeFailure):
    """The compiler's backend failed at this step."""

    stop_reason = StopReason.COMPILER_FAILURE


class MemoryFailure(EpisodeFailure):
    """The memory system failed to recall or observe at this step."""

    stop_reason = StopReason.MEMORY_FAILURE


FAILURE_REASONS = (
    *(kind.stop_reason for kind in (EnvironmentFailure, ExecutorFailure, CompilerFailure, MemoryFailure)),
    StopReason.WORKER_FAILURE,
)


def is_failure(stop_reason: str) -> bool:
    """Return whether the machinery failed: evaluation counts the episode as failed, training and memory omit it."""
    return stop_reason in FAILURE_REASONS


def first_failure(ends: Iterable[tuple[str, str]]) -> str:
    """Return "reason: error" of the first failure among (stop reason, error) pairs; "" without one."""
    return next((f"{reason}: {error}" for reason, error in ends if is_failure(reason)), "")
