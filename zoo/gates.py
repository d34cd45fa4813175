"""Gates of the shipped models: success rates with intervals and thresholds, and a compiler base for questions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from compiler.hf import MemoryCompiler
from compiler.records import CompileRequest, Decoding
from eval.intervals import Interval, wilson
from lm.backbone import Backbone
from lm.prompt import Prompt
from soft_mem.projector import Projector, ProjectorConfig
from zoo.lessons import question_prompt


class QuestionAnswerer(MemoryCompiler):
    """A compiler base that answers a question after its prompt."""

    def __init__(self, backbone: Backbone, question: Callable[[CompileRequest], str], max_new_tokens: int) -> None:
        projector = Projector(ProjectorConfig(backbone.hidden_size, 8, 1))  # required, and unused here
        super().__init__(backbone, projector, Decoding(max_new_tokens=max_new_tokens))
        self._question = question

    def encode(self, request: CompileRequest) -> Prompt:
        return self.backbone.encode(question_prompt(request, self._question(request), self.backbone.is_vlm))


@dataclass(frozen=True)
class GateResult:
    """The number of right cases of `n`; a gate without a threshold is only reported."""

    name: str
    right: int
    n: int
    threshold: float | None = None
    chance: float | None = None  # the rate of guessing

    @classmethod
    def of(
        cls, name: str, cases: Iterable[bool], threshold: float | None = None, chance: float | None = None
    ) -> GateResult:
        results = list(cases)
        return cls(name, sum(results), len(results), threshold, chance)

    @property
    def value(self) -> float:
        return self.right / self.n if self.n else 0.0

    @property
    def interval(self) -> Interval:
        """Return the 95 % Wilson interval."""
        return wilson(self.right, self.n)

    @property
    def passed(self) -> bool:
        """Return whether the rate reaches the threshold; False without cases."""
        return self.threshold is None or (self.n > 0 and self.value >= self.threshold)

    def __str__(self) -> str:
        verdict = (
            ""
            if self.threshold is None
            else f", required {self.threshold:.0%}: {'passed' if self.passed else 'FAILED'}"
        )
        if not self.n:
            return f"{self.name}: no cases{verdict}"
        interval = self.interval
        guessed = "" if self.chance is None else f" (chance {self.chance:.1%})"
        return f"{self.name}: {self.value:.1%} [{interval.low:.1%}, {interval.high:.1%}] of {self.n}{guessed}{verdict}"
