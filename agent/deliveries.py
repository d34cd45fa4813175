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

from compiler.records import Compilation, Compiler, CompileRequest


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
