"""What a gate is: a share of cases in which a model did what it should, with its interval, and what is asked of it; and
a compiler base that is asked questions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from compiler.hf import MemoryCompiler
from compiler.records import CompileRequest, Decoding
from eval.intervals import Interval, wilson
from lm.backbone import Backbone
from lm.prompt import Prompt
from soft_mem.projector import Projector, ProjectorConfig
from zoo.lessons import asked


class Asked(MemoryCompiler):
    """A base that is asked a question behind its prompt, instead of being asked to compile."""

    def __init__(self, backbone: Backbone, question: Callable[[CompileRequest], str], max_new_tokens: int) -> None:
        projector = Projector(ProjectorConfig(backbone.hidden_size, 8, 1))  # what it gathers is of no use here
        super().__init__(backbone, projector, Decoding(max_new_tokens=max_new_tokens))
        self._question = question

    def encode(self, request: CompileRequest) -> Prompt:
        return self.backbone.encode(asked(request, self._question(request), self.backbone.is_vlm))


@dataclass(frozen=True)
class Share:
    """How many of `n` cases are right. Without a threshold it is told, and nothing hangs on it."""

    name: str
    right: int
    n: int
    threshold: float | None = None
    chance: float | None = None  # the share that guessing would have

    @classmethod
    def of(cls, name: str, cases: Iterable[bool], threshold: float | None = None, chance: float | None = None) -> Share:
        made = list(cases)
        return cls(name, sum(made), len(made), threshold, chance)

    @property
    def value(self) -> float:
        return self.right / self.n if self.n else 0.0

    @property
    def interval(self) -> Interval:
        """95 % (Wilson)."""
        return wilson(self.right, self.n)

    @property
    def passed(self) -> bool:
        """Tell whether it is as large as asked; no cases at all are no pass."""
        return self.threshold is None or (self.n > 0 and self.value >= self.threshold)

    def __str__(self) -> str:
        asked = (
            "" if self.threshold is None else f", asked {self.threshold:.0%}: {'passed' if self.passed else 'FAILED'}"
        )
        if not self.n:
            return f"{self.name}: no cases{asked}"
        low, high = self.interval.low, self.interval.high
        guessed = "" if self.chance is None else f" (chance {self.chance:.1%})"
        return f"{self.name}: {self.value:.1%} [{low:.1%}, {high:.1%}] of {self.n}{guessed}{asked}"
