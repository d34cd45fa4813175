"""Hashes of what a result depends on: tasks, retrieved entries, weights and prompts.

A prompt's hash is that of a fixed request, rendered like those of every step: it changes with the wording or the layout
of the prompt and with nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.deliveries import find
from agent.episode import EpisodeSpec
from agent.records import SOFT_MARK
from compiler import checkpoint
from compiler.brief_state import Belief, BriefState
from compiler.client import RemoteCompiler
from compiler.gate import CompileGate
from compiler.prompt import compiler_parts
from compiler.records import Compiler, CompileRequest, Entries, History
from configs.evaluation import EvalConfig
from envs.manifest import Manifest
from executor.prompt import Context, ExecutorRequest, MemoryBlock, Turn, executor_chat, executor_text
from memory.entry import MemoryEntry, Provenance

ABLATIONS = ("soft", "brief_state", "text")  # parts of the compiler that a training may leave out
_ENTRY = MemoryEntry(
    "e", "in home 1: put a mug in cabinet\ntake mug 1 from desk 1", Provenance("t", "", goal="", split="", success=True)
)
_STATE = BriefState(
    "put a mug in cabinet", ("found it",), current="take mug", pending=("put mug",), beliefs=(Belief("mug", "desk 1"),)
)
_COMPILE = CompileRequest(
    _STATE.goal, (_ENTRY,), state=_STATE, observation="You see a mug 1.", image=None, history=("look",)
)
_BARE = CompileRequest(
    _STATE.goal, (_ENTRY,), state=None, observation="You see a mug 1.", image=None, history=("look",)
)
_ACT = ExecutorRequest(
    _STATE.goal,
    MemoryBlock("memory", "state", guidance="guidance", reason="reason", soft=("s", "s")),
    ("look",),
    "You see a mug 1.",
)


def identity(config: EvalConfig, specs: Sequence[EpisodeSpec], models: Mapping[str, Any]) -> dict[str, Any]:
    """Hash tasks and retrieved entries; with the facts of `identity_of_models`, what must not change during a run."""
    return {
        "tasks_sha256": Manifest.of(config.env.name, (spec.task for spec in specs)).sha256,
        "memory_sha256": sha256([[spec.task.id, [_content(entry) for entry in spec.memory]] for spec in specs]),
        **models,
    }


def identity_of_models(
    config: EvalConfig, executor: Any, compiler: Compiler | None, gate: CompileGate | None = None
) -> dict[str, Any]:
    """Hash weights and prompts, and the compile gate if a delivery uses one."""
    compiler_hash = None
    if isinstance(compiler, RemoteCompiler):
        compiler_hash = compiler.hash()
    elif compiler is not None:
        compiler_hash = checkpoint.sha256(checkpoint.find(Path(str(config.compiler.checkpoint))))
    return {
        "executor_hash": executor.hash(),
        "compiler_hash": compiler_hash,
        **({} if gate is None else {"gate_sha256": gate.sha256}),
        "prompts": prompt_hashes(executor, compiler),
    }


def training_of(config: EvalConfig) -> dict[str, Any] | None:
    """Return the checkpoint of the compiler, the benchmarks and memory systems of its training, and whether that was
    with soft tokens, Brief State and text; None without a trained compiler in this process."""
    if config.compiler.engine == "http" or not any(find(name).needs_checkpoint for name in config.deliveries):
        return None
    state = checkpoint.read_state(found := checkpoint.find(Path(str(config.compiler.checkpoint))))
    on = {
        "environment": " and ".join(checkpoint.environments(found)) or None,
        "memory": " and ".join(_memory_systems(state)) or None,
        "stage": state.get("stage"),
    }
    return {"checkpoint": config.compiler.checkpoint, **on, **{k: state.get(k, True) for k in ABLATIONS}}


def _memory_systems(state: Mapping[str, Any]) -> list[str]:
    """Return the memory systems that a compiler was trained with, from its checkpoint's state."""
    if not state.get("text", True):
        return []
    banks = [state, *state.get("banks", {}).values()]
    of_banks = (bank["memory_system"] for bank in banks if "memory_system" in bank)
    return list(dict.fromkeys([*state.get("memory_systems", ()), *of_banks]))


def prompt_hashes(executor: Any, compiler: Any) -> dict[str, str | None]:
    """Hash instructions and layout of both prompts; None without a compiler."""
    history: History = getattr(compiler, "history", 0)
    entries: Entries = getattr(compiler, "entries", "whole")
    compiled = [compiler_parts(request, history=history, entries=entries) for request in (_COMPILE, _BARE)]
    compile_layout = ["".join(part.text for part in parts) for parts in compiled]
    return {
        "executor_instructions": sha256(getattr(executor, "instructions", "")),
        "executor_layout": sha256(_executor_layout(executor.reads.context)),
        "compiler_instructions": None if compiler is None else sha256(getattr(compiler, "instructions", "")),
        "compiler_layout": None if compiler is None else sha256(compile_layout),
    }


def _executor_layout(context: Context) -> str:
    """Write an example of the executor's prompt as text."""
    if context == "rebuilt":
        return executor_text(_ACT, SOFT_MARK)
    chat = executor_chat(replace(_ACT, context=context, past=(Turn("You see a desk 1.", "look"),)), "instructions")
    return "\n".join(turn.role + ": " + "".join(p.text + SOFT_MARK * p.soft for p in turn.parts) for turn in chat)


def _content(entry: MemoryEntry) -> list[str]:
    """Return an entry's id, text and the hashes of its pictures."""
    return [entry.id, entry.text, *(hashlib.sha256(png).hexdigest() for png in entry.images)]


def sha256(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=True, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
