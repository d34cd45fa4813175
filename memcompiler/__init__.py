"""Compile memory for embodied agents: the public API. `import memcompiler as mc`.

A name is imported when it is first used, so that `import memcompiler` takes milliseconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agent.deliveries import DeliverySpec
    from agent.deliveries import register as register_delivery
    from envs.base import Environment, Observation, Task, Transition
    from envs.registry import register as register_environment
    from envs.spec import EnvSettings, EnvSpec, Splits, WorkerSpec
    from memcompiler.agent import Agent, AgentStep
    from memcompiler.api import (
        collect,
        evaluate,
        load,
        load_gate,
        open_environment,
        open_memory,
        train_grpo,
        train_sft,
    )
    from memory.entry import MemoryEntry, Provenance
    from memory.journal import JournalMemory
    from memory.protocol import MemorySystem, Query, Recall, Trace
    from memory.registry import MemorySpec, MemoryTools
    from memory.registry import register as register_memory
    from runtime.settings import Settings

__all__ = [
    "Agent",
    "AgentStep",
    "DeliverySpec",
    "EnvSettings",
    "EnvSpec",
    "Environment",
    "JournalMemory",
    "MemoryEntry",
    "MemorySpec",
    "MemorySystem",
    "MemoryTools",
    "Observation",
    "Provenance",
    "Query",
    "Recall",
    "Settings",
    "Splits",
    "Task",
    "Trace",
    "Transition",
    "WorkerSpec",
    "collect",
    "evaluate",
    "load",
    "load_gate",
    "open_environment",
    "open_memory",
    "register_delivery",
    "register_environment",
    "register_memory",
    "train_grpo",
    "train_sft",
]

_MODULES = {
    "memcompiler.agent": ("Agent", "AgentStep"),
    "memcompiler.api": (
        "collect",
        "evaluate",
        "load",
        "load_gate",
        "open_environment",
        "open_memory",
        "train_grpo",
        "train_sft",
    ),
    "agent.deliveries": ("DeliverySpec",),
    "envs.base": ("Environment", "Observation", "Task", "Transition"),
    "envs.spec": ("EnvSettings", "EnvSpec", "Splits", "WorkerSpec"),
    "memory.entry": ("MemoryEntry", "Provenance"),
    "memory.journal": ("JournalMemory",),
    "memory.protocol": ("MemorySystem", "Query", "Recall", "Trace"),
    "memory.registry": ("MemorySpec", "MemoryTools"),
    "runtime.settings": ("Settings",),
}
_PLACES = {name: (module, name) for module, names in _MODULES.items() for name in names} | {
    "register_delivery": ("agent.deliveries", "register"),
    "register_environment": ("envs.registry", "register"),
    "register_memory": ("memory.registry", "register"),
}


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _PLACES[name]
    value = globals()[name] = getattr(import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
