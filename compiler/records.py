"""What goes into the compiler and what comes out of it, whatever runs it (HF, vLLM, a teacher)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from compiler.brief_state import BriefState
from compiler.language import Emission, ParseError
from memory.entry import MemoryEntry

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from lm.prompt import Prompt


# Beside which emissions soft tokens are read: those with guidance (EXPERIENCE, HYBRID), all, or none.
SoftOn = Literal["guidance", "always", "never"]


def soft_is_read(on: SoftOn, emission: Emission) -> bool:
    """Say whether soft tokens beside this emission reach the executor."""
    return on == "always" or (on == "guidance" and bool(emission.guidance))


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """State s_t = (o_t, b_t) and task memory M (paper Eq. 3).

    `state` is the Brief State, or None in the ablation without it: the prompt shows `history` instead.
    """

    goal: str
    memory: tuple[MemoryEntry, ...]
    state: BriefState | None
    observation: str
    image: Image | None = None
    history: tuple[str, ...] = ()
    soft_on: SoftOn = "always"  # where the executor reads soft tokens; others need not be computed


@dataclass(frozen=True, slots=True)
class Decoding:
    """How an emission and its soft tokens are drawn. Temperature 0 is greedy text, and the soft tokens' mean."""

    temperature: float = 0.0
    max_new_tokens: int = 512
    batch_size: int = 64
    latent_temperature: float | None = None  # default: as the text

    @property
    def soft_temperature(self) -> float:
        return self.temperature if self.latent_temperature is None else self.latent_temperature

    @property
    def draws(self) -> bool:
        """Whether text or soft tokens are drawn at random."""
        return self.temperature > 0 or self.soft_temperature > 0


@dataclass(slots=True)
class Compilation:
    """One compiled step. Tensors are fp32 on the CPU; None where the backend has no soft channel, and those of soft
    tokens where nobody reads them (`CompileRequest.soft_on`).

    Shapes: z, mu, log_sigma (N, d_executor) in normalised units, z being mu + T sigma noise; soft (N, d_executor) at
    the executor's scale; text_logprobs (T,) over `emission_ids` and latent_logprobs (N,), both at the sampling
    temperature.
    """

    text: str
    emission: Emission
    parse_error: ParseError | None = None
    prompt_ids: tuple[int, ...] = ()
    prompt: Prompt | None = None  # what was read; only where something was drawn, for a record keeps no pixels
    emission_ids: tuple[int, ...] = ()  # ends with the end-of-turn token, sampled or (if truncated) forced
    text_logprobs: Tensor | None = None
    z: Tensor | None = None
    noise: Tensor | None = None  # of z; None where z is the mean
    mu: Tensor | None = None
    log_sigma: Tensor | None = None
    soft: Tensor | None = None
    latent_logprobs: Tensor | None = None
    request: CompileRequest | None = None  # kept for training on rollouts
    tokens_in: int = 0
    tokens_out: int = 0
    tokens_cached: int | None = None  # of tokens_in, out of a prefix cache; None where the backend does not say
    weight_version: int = 0  # of the weights that sampled this
    applies_ops: bool = True  # whether the loop applies the operations to b_t


# Whether anybody still waits for request i. A compiler asks before every pass of its model; what it gives for one that
# nobody waits for may be cut short, and is of no use.
Wanted = Callable[[int], bool]


def always(i: int) -> bool:
    """Every request is waited for to its end."""
    return True


class Guess(Protocol):
    """Guesses before a step is compiled how likely it needs that: where it says `threshold` or more, it is compiled."""

    @property
    def threshold(self) -> float: ...

    def __call__(self, request: CompileRequest) -> float: ...


class Compiler(Protocol):
    """A backend: compiles a batch of states. Order of results is order of requests. With an attribute `batched = False`
    the loop asks for one state at a time, and at once."""

    def compile(self, requests: Sequence[CompileRequest]) -> list[Compilation]: ...
