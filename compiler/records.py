"""Records that every compiler backend (HF, vLLM, HTTP, teachers) reads and returns, and its protocol."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from compiler.brief_state import BriefState
from compiler.language import Emission, ParseError
from memory.entry import MemoryEntry

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from configs.models import Batching
    from lm.prompt import Prompt


# The past commands that the compiler reads beside the Brief State: none, the last one, or all.
History = Literal[0, 1, "all"]
# What the compiler reads of a raw trajectory in memory: all of it, or its goal, commands and rationale.
Entries = Literal["whole", "commands"]
# The emissions beside which soft tokens are read: those with guidance (EXPERIENCE, HYBRID), all, or none.
SoftOn = Literal["guidance", "always", "never"]


def soft_is_read(on: SoftOn, emission: Emission) -> bool:
    """Return whether soft tokens beside this emission reach the executor."""
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
    environment: str = ""  # whose instructions are shown, by name; "": the compiler was loaded for one


@dataclass(frozen=True, slots=True)
class Decoding:
    """Sampling parameters of emissions and soft tokens. Temperature 0: greedy text, and the mean of the soft tokens."""

    temperature: float = 0.0
    max_new_tokens: int = 512
    batch_size: int = 64
    latent_temperature: float | None = None  # of soft tokens; default: `temperature`

    @property
    def soft_temperature(self) -> float:
        return self.temperature if self.latent_temperature is None else self.latent_temperature

    @property
    def draws(self) -> bool:
        """Return whether text or soft tokens are sampled at random."""
        return self.temperature > 0 or self.soft_temperature > 0


@dataclass(slots=True)
class Compilation:
    """One compiled step. Tensors are fp32 on the CPU. They are None if the backend has no soft tokens, or if the
    executor does not read them (`CompileRequest.soft_on`).

    Shapes: z, noise, mu, log_sigma (N, d_executor) in normalised units, z = mu + T sigma noise; soft (N, d_executor) at
    the executor's scale; text_logprobs (T,) over `emission_ids` and latent_logprobs (N,), both at the sampling
    temperature.
    """

    text: str
    emission: Emission
    parse_error: ParseError | None = None
    prompt_ids: tuple[int, ...] = ()
    prompt: Prompt | None = None  # stored only where something was sampled: records hold no pixels
    emission_ids: tuple[int, ...] = ()  # ends with the end-of-turn token, sampled or (if truncated) forced
    text_logprobs: Tensor | None = None
    z: Tensor | None = None
    noise: Tensor | None = None  # None where z is the mean
    mu: Tensor | None = None
    log_sigma: Tensor | None = None
    soft: Tensor | None = None
    latent_logprobs: Tensor | None = None
    request: CompileRequest | None = None  # for training on rollouts
    tokens_in: int = 0
    tokens_out: int = 0
    tokens_cached: int | None = None  # of tokens_in, from a prefix cache; None if the backend does not report it
    weight_version: int = 0  # of the weights that sampled this
    applies_ops: bool = True  # whether the loop applies the operations to b_t


# Whether request i is still wanted. A compiler checks before every pass of its model; the result of a cancelled request
# is truncated and must not be used.
StillWanted = Callable[[int], bool]


def never_cancelled(i: int) -> bool:
    """Never cancel a request."""
    return True


def batches_continuously(batching: Batching, owners: Collection[object]) -> bool:
    """Return whether requests to these compilers and executors need not wait for each other: `auto` is continuous where
    all of them are thread-safe (`concurrent`), as engines over HTTP or in vLLM are."""
    thread_safe = bool(owners) and all(getattr(owner, "concurrent", False) for owner in owners)
    return batching == "continuous" or (batching == "auto" and thread_safe)


class Gate(Protocol):
    """A compile gate: returns the probability that the compiler guides; a step is compiled from `threshold` on."""

    @property
    def threshold(self) -> float: ...

    def __call__(self, request: CompileRequest) -> float: ...


class Compiler(Protocol):
    """Compiles a batch of states. Results are in the order of the requests.

    With an attribute `batched = False`, the loop calls it at once for one state. With an attribute `needs_expert`, the
    loop passes a list of `agent.records.EpisodeContext` beside the requests; if it is True, with the expert's plan.
    With `concurrent = True`, several threads may call it at a time, and gain by it. With `takes_seeds = True`, it takes
    a list of seeds beside the requests, by which it draws each of them as if it were alone.
    """

    def compile(self, requests: Sequence[CompileRequest]) -> list[Compilation]: ...
