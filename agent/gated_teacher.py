"""A teacher whose Brief State lags as under a compile gate (delivery `compiled_gated`)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from agent.records import EpisodeContext
from compiler.records import Compilation, Compiler, CompileRequest


@dataclass(frozen=True, slots=True)
class GatedTeacher:
    """A `Compiler` that withholds the operations of unguided steps after the first, in `share` of the episodes.

    The emission stays whole, as the label of the step's row. Only b_t lacks the operations.
    """

    teacher: Compiler
    share: float

    @property
    def batched(self) -> bool:
        return getattr(self.teacher, "batched", True)

    @property
    def needs_expert(self) -> bool:
        return getattr(self.teacher, "needs_expert", False)

    def compile(self, requests: Sequence[CompileRequest], contexts: Sequence[EpisodeContext] = ()) -> list[Any]:
        """Return one compilation per request, in order, or the exception that the teacher returned for it."""
        more = [contexts] if self.needs_expert else []
        compilations = self.teacher.compile(requests, *more)
        return [self._gate(*row) for row in zip(requests, contexts, compilations, strict=True)]

    def _gate(self, request: CompileRequest, context: EpisodeContext, compilation: Compilation | Exception) -> Any:
        if isinstance(compilation, Exception) or not request.history or compilation.emission.guidance:
            return compilation
        gated = random.Random(f"{context.seed} {context.task_id}").random() < self.share
        return replace(compilation, applies_ops=not gated)
