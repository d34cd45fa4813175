"""What comes out of an executor, whatever runs it (HF, vLLM, an endpoint, the environment's expert)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from executor.grounding import Grounding
from executor.prompt import ExecutorRequest

if TYPE_CHECKING:
    from lm.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Action:
    action: str
    how: Grounding
    text: str  # what the executor produced
    prompt_ids: tuple[int, ...]
    tokens_in: int
    tokens_out: int
    # Of tokens_in, out of a prefix cache; None where the backend does not say.
    tokens_cached: int | None = field(default=None, compare=False)
    # Of an action chosen among the admissible ones by likelihood: which one it is. Of one that was drawn, besides: what
    # it was drawn from, and how likely it was. (A greedy action keeps neither pixels nor soft tokens in the record.)
    chosen: int | None = field(default=None, compare=False)
    prompt: Prompt | None = field(default=None, compare=False, repr=False)
    logprob: float | None = field(default=None, compare=False)


class Executor(Protocol):
    """A backend. `accepts_soft` is False where only text can be delivered (closed models); `sees_images` says whether
    it is to be shown the current view."""

    accepts_soft: bool
    sees_images: bool

    def act(self, requests: Sequence[ExecutorRequest]) -> list[Action]: ...
