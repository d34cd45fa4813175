"""What a result depends on, as hashes: prompts, checkpoints, what was retrieved, the environment's version.

A prompt's hash is over a fixed request rendered as every step's is, so that it changes when the wording or the layout
of the prompt changes, and with nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent.episode import EpisodeSpec
from agent.records import SOFT_MARK
from compiler import checkpoint
from compiler.brief_state import Belief, BriefState
from compiler.client import RemoteCompiler
from compiler.gate import Need
from compiler.prompt import compiler_parts
from compiler.records import Compiler, CompileRequest
from configs.evaluation import EvalConfig
from envs.manifest import Manifest
from executor.prompt import ExecutorRequest, MemoryBlock, executor_text
from memory.entry import MemoryEntry, Provenance

_ENTRY = MemoryEntry("e", "in home 1: put a mug in cabinet\ntake mug 1 from desk 1", Provenance("t", "", "", "", True))
_STATE = BriefState("put a mug in cabinet", ("found it",), "take mug", ("put mug",), (Belief("mug", "desk 1"),))
_COMPILE = CompileRequest(_STATE.goal, (_ENTRY,), _STATE, "You see a mug 1.", None, ("look",))
_BARE = CompileRequest(_STATE.goal, (_ENTRY,), None, "You see a mug 1.", None, ("look",))
_ACT = ExecutorRequest(
    _STATE.goal, MemoryBlock("memory", "state", "guidance", "reason", ("s", "s")), ("look",), "You see a mug 1."
)


def identity(config: EvalConfig, specs: Sequence[EpisodeSpec], models: Mapping[str, Any]) -> dict[str, Any]:
    """State what must be the same in every session of a run: tasks, which entries serve them, weights, prompts (which
    `identity_of_models` states)."""
    return {
        "tasks_sha256": Manifest.of(config.env.name, (spec.task for spec in specs)).sha256,
        "memory_sha256": sha256([[spec.task.id, [_told(entry) for entry in spec.memory]] for spec in specs]),
        **models,
    }


def identity_of_models(
    config: EvalConfig, executor: Any, compiler: Compiler | None, need: Need | None = None
) -> dict[str, Any]:
    """State weights and prompts; and what guesses which steps need compiling, where a delivery asks it."""
    compiler_hash = None
    if isinstance(compiler, RemoteCompiler):
        compiler_hash = compiler.hash()
    elif compiler is not None:
        compiler_hash = checkpoint.sha256(checkpoint.find(Path(str(config.compiler.checkpoint))))
    return {
        "executor_hash": executor.hash(),
        "compiler_hash": compiler_hash,
        **({} if need is None else {"need_sha256": need.sha256}),
        "prompts": prompt_hashes(executor, compiler),
    }


def prompt_hashes(executor: Any, compiler: Any) -> dict[str, str | None]:
    """Hash the instructions in use, and the layout of both prompts; None where there is no compiler."""
    compile_layout = ["".join(part.text for part in compiler_parts(request)) for request in (_COMPILE, _BARE)]
    return {
        "executor_instructions": sha256(getattr(executor, "instructions", "")),
        "executor_layout": sha256(executor_text(_ACT, SOFT_MARK)),
        "compiler_instructions": None if compiler is None else sha256(getattr(compiler, "instructions", "")),
        "compiler_layout": None if compiler is None else sha256(compile_layout),
    }


def _told(entry: MemoryEntry) -> list[str]:
    """List what an entry tells: id, text and its pictures' hashes."""
    return [entry.id, entry.text, *(hashlib.sha256(png).hexdigest() for png in entry.images)]


def sha256(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=True, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
