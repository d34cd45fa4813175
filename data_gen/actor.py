"""Who acts while an endpoint teacher compiles."""

from __future__ import annotations

from pathlib import Path

from agent.expert import ExpertExecutor
from configs.collect import CollectConfig
from envs.registry import find
from executor.api import ApiExecutor
from executor.build import load_executor
from executor.records import Executor
from lm.endpoint import Endpoint


def load_actor(config: CollectConfig, teacher: Endpoint, cache: Path) -> tuple[Executor, dict[str, Endpoint]]:
    """The actor, and all endpoints by role."""
    endpoints, instructions = {"teacher": teacher}, find(config.env.name).instructions
    if config.actor == "expert":
        return ExpertExecutor(config.noise, config.seed), endpoints
    if config.actor == "teacher":
        shown = instructions if config.executor.instructions == "full" else ""
        return ApiExecutor(teacher, shown, config.executor.max_new_tokens, "actor"), endpoints
    actor = load_executor(config.executor, instructions, cache)
    if isinstance(actor, ApiExecutor):
        endpoints["executor"] = actor.endpoint
    return actor, endpoints
