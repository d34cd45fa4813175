"""Deliveries: how task memory M reaches the executor. Every evaluation compares them on the same bank and tasks.

none      no memory
static    all of M pasted into the executor's prompt at episode start (the paper's AMMI)
compiled  a compiler reads M and the state at every step and delivers what applies now (SCMC); soft tokens on or off,
          Brief State on or off
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from compiler.brief_state import BriefState, render_brief_state
from compiler.records import Compilation, Compiler, CompileRequest
from executor.prompt import Delivered, memory_text
from memory.entry import MemoryEntry


@dataclass(frozen=True, slots=True)
class Delivery:
    name: str
    kind: Literal["none", "static", "compiled"]
    compiler: Compiler | None = None
    soft: bool = True
    brief_state: bool = True

    def __post_init__(self) -> None:
        if (self.kind == "compiled") != (self.compiler is not None):
            raise ValueError(f"delivery {self.name}: a compiler is needed for `compiled`, and only there")

    def deliver(self, memory: Sequence[MemoryEntry], state: BriefState, compiled: Compilation | None) -> Delivered:
        """What the executor's prompt shows at this step, given b_t and what was compiled from (M, b_t, o_t)."""
        if self.kind == "static":
            return Delivered(memory=memory_text([entry.text for entry in memory]))
        if compiled is None:
            return Delivered()
        lines = render_brief_state(state).split("\n")[1:] if self.brief_state else []  # the goal stands above it
        return Delivered(
            state="\n".join(lines),
            guidance=compiled.emission.guidance,
            reason=compiled.emission.reason,
            soft=compiled.soft if self.soft else None,
        )


class ShuffledSoft:
    """Control: every episode gets the soft tokens of another one of its batch; text stays its own.

    If soft tokens carry something about the episode, this must do worse than the compiler that it wraps.
    """

    def __init__(self, compiler: Compiler) -> None:
        self.compiler = compiler
        self._spare: torch.Tensor | None = None  # for a batch of one: the soft tokens of the step before

    def compile(self, requests: Sequence[CompileRequest]) -> list[Compilation]:
        made = self.compiler.compile(requests)
        soft = [c.soft for c in made]
        donors = [*soft[1:], soft[0]] if len(made) > 1 else [self._spare if self._spare is not None else soft[0]]
        self._spare = soft[0]
        return [replace(c, soft=other) for c, other in zip(made, donors, strict=True)]
