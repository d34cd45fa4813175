"""Deliveries: how task memory M reaches the executor. Every evaluation compares them on the same bank and tasks.

none      no memory
static    all of M pasted into the executor's prompt at episode start (the paper's AMMI)
live      what is recalled at every step pasted at that step; the same as static where memory recalls the same all along
compiled  a compiler reads M and the state at every step and delivers what applies now (SCMC); soft tokens on or off,
          Brief State on or off; or only at steps where the executor, told nothing, is not sure what to do, or only
          where a guess from the step alone says that there is something to say

`DELIVERIES` is the one list: evaluations, tables, plots, reports, matrices and analyses ask it. A new delivery is a new
entry.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from agent.disclosure import RuleDisclosure
from agent.expert import ExpertTeacher
from agent.records import Episode, StepInput
from compiler.brief_state import parse_brief_state
from compiler.language import Emission
from compiler.records import Compilation, Compiler, CompileRequest, Guess
from envs.trajectories import TrajectoryReader
from executor.prompt import memory_text
from memory.entry import MemoryEntry
from memory.trajectory import stated_goal

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["none", "static", "live", "compiled"]


@dataclass(frozen=True, slots=True)
class Delivery:
    """A delivery as the loop plays it."""

    name: str
    kind: Kind
    compiler: Compiler | None = None
    soft: bool = True
    brief_state: bool = True
    where_unsure: bool = False  # nothing is compiled where the executor is sure of its action without
    need: Guess | None = None  # nothing is compiled where a step is not likely to need it, but for the first
    sparing: float = 0.0  # share of the episodes in which no step but the first and the guided ones changes b_t

    def __post_init__(self) -> None:
        if (self.kind == "compiled") != (self.compiler is not None):
            raise ValueError(f"delivery {self.name}: a compiler is needed for `compiled`, and only there")


@dataclass(frozen=True, slots=True)
class DeliverySpec:
    """A delivery as settings, records and results name it."""

    name: str
    label: str  # in tables and plots
    kind: Kind = "compiled"
    # Makes what compiles, from the trained compiler (None where none is loaded), the run's seed, and how its
    # environment's commands read.
    compiler: Callable[[Compiler | None, int, TrajectoryReader], Compiler | None] = lambda *_: None
    soft: bool = True
    brief_state: bool = True
    where_unsure: bool = False  # compiles where the executor is not sure without; it has to say how sure it is
    where_needed: bool = False  # compiles where `compiler.need` guesses that there is something to say
    needs_checkpoint: bool = False  # the trained compiler has to be there
    needs_expert: bool = False  # the environment's expert compiles
    memory: Literal["all", "top", "empty"] = "all"  # M is what was retrieved, the best entry of it, or nothing
    control: bool = False  # it shows what the others owe to what they are told; tables have it below a rule
    interdependent: bool = False  # episodes depend on those beside them: a killed run plays them again as a whole
    compared_with: tuple[str, ...] = ()  # deliveries that results always compare it with
    played: bool = True  # False for a name that only results have

    @property
    def recalls(self) -> bool:
        """Tell whether anything of what memory recalls reaches a prompt."""
        return self.kind != "none" and self.memory != "empty"

    @property
    def shows_own_soft(self) -> bool:
        """Tell whether the executor reads soft tokens that the trained compiler made of this very step."""
        return self.needs_checkpoint and self.soft and not self.interdependent

    def make(
        self, trained: Compiler | None, seed: int, reader: TrajectoryReader | None = None, need: Guess | None = None
    ) -> Delivery:
        """Make the delivery that the loop plays; `reader` (of the environment) is what teachers need, `need` what
        stands beside the compiler's checkpoint. Raises: ValueError, where it needs what is not there."""
        if self.needs_checkpoint and trained is None:
            raise ValueError(f"delivery {self.name} needs a trained compiler: set compiler.checkpoint")
        if self.where_needed and need is None:
            raise ValueError(f"delivery {self.name} needs what `memcompiler train need` leaves beside a checkpoint")
        compiler = self.compiler(trained, seed, reader or TrajectoryReader())
        need = need if self.where_needed else None
        return Delivery(self.name, self.kind, compiler, self.soft, self.brief_state, self.where_unsure, need)


class ShuffledSoft:
    """Control: every episode gets the soft tokens of another one of its batch; text stays its own.

    If soft tokens carry something about the episode, this must do worse than the compiler that it wraps.
    """

    def __init__(self, compiler: Compiler) -> None:
        self.compiler = compiler
        self._spare: Tensor | None = None  # for a batch of one: the soft tokens of the step before

    def compile(self, requests: Sequence[CompileRequest]) -> list[Compilation]:
        made = self.compiler.compile([replace(request, soft_on="always") for request in requests])  # others read them
        soft = [c.soft for c in made]
        donors = [*soft[1:], soft[0]] if len(made) > 1 else [self._spare if self._spare is not None else soft[0]]
        self._spare = soft[0]
        return [replace(c, soft=other) for c, other in zip(made, donors, strict=True)]


def _trained(trained: Compiler | None, *_: object) -> Compiler | None:
    return trained


COMPILED, AFTER_GRPO = "compiled", "compiled_grpo"
DELIVERIES = {  # in the order of every table and plot
    spec.name: spec
    for spec in (
        DeliverySpec("none", "no memory", "none"),
        DeliverySpec("static", "static memory", "static"),
        DeliverySpec("static_top1", "static, top entry", "static", memory="top"),
        DeliverySpec("live", "live memory", "live"),
        DeliverySpec("disclosure", "rule-based disclosure", compiler=lambda *_: RuleDisclosure(), soft=False),
        DeliverySpec("compiled_text", "compiled, text only", compiler=_trained, soft=False, needs_checkpoint=True),
        DeliverySpec(
            COMPILED,
            "compiled, text + soft",
            compiler=_trained,
            needs_checkpoint=True,
            compared_with=("none", "static", "compiled_text"),
        ),
        DeliverySpec(  # the quickstart's second compiler, under the delivery `compiled`
            AFTER_GRPO,
            "compiled, text + soft, after GRPO",
            compiler=_trained,
            needs_checkpoint=True,
            compared_with=(COMPILED,),
            played=False,
        ),
        DeliverySpec(
            "compiled_unsure",
            "compiled, where unsure",
            compiler=_trained,
            where_unsure=True,
            needs_checkpoint=True,
            compared_with=("none", "static", COMPILED),
        ),
        DeliverySpec(
            "compiled_needed",
            "compiled, where needed",
            compiler=_trained,
            where_needed=True,
            needs_checkpoint=True,
            compared_with=("none", "static", COMPILED),
        ),
        DeliverySpec(
            "compiled_no_brief", "compiled, no brief", compiler=_trained, brief_state=False, needs_checkpoint=True
        ),
        DeliverySpec(  # what state tracking is worth by itself
            "compiled_no_memory",
            "compiled, memory empty",
            compiler=_trained,
            needs_checkpoint=True,
            memory="empty",
            control=True,
            compared_with=("none", COMPILED),
        ),
        DeliverySpec(
            "expert_compiler",
            "expert as compiler",
            soft=False,
            needs_expert=True,
            control=True,
            compiler=lambda _, seed, reader: ExpertTeacher("right", seed, reader),
        ),
        DeliverySpec(
            "expert_random_entry",
            "expert, random entry",
            soft=False,
            needs_expert=True,
            control=True,
            compiler=lambda _, seed, reader: ExpertTeacher("random", seed, reader),
        ),
        DeliverySpec(
            "compiled_shuffled_soft",
            "shuffled soft tokens",
            needs_checkpoint=True,
            control=True,
            interdependent=True,
            compiler=lambda trained, *_: trained and ShuffledSoft(trained),
        ),
    )
}


def register(spec: DeliverySpec) -> None:
    """Add a delivery to the list, after those that are there. Raises: ValueError, where another one has its name."""
    if DELIVERIES.setdefault(spec.name, spec) is not spec:
        raise ValueError(f"there is a delivery {spec.name!r} already: choose another name")


def pasted(kind: Kind, first: str, recalled: Sequence[MemoryEntry]) -> str:
    """Give the text of M that the executor reads as it is: what the episode began with, or what is recalled now."""
    match kind:
        case "static":
            return first
        case "live":
            return memory_text([entry.text for entry in recalled])
    return ""


def find(name: str) -> DeliverySpec:
    """Look a delivery up by its name. Raises: ValueError, which names those that there are."""
    if name in DELIVERIES:
        return DELIVERIES[name]
    close = difflib.get_close_matches(name, DELIVERIES, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    playable = ", ".join(spec.name for spec in DELIVERIES.values() if spec.played)
    raise ValueError(f"there is no delivery {name!r}{hint}; there are {playable}")


def recorded_step(
    episode: Episode, t: int, memory: Sequence[MemoryEntry] = (), soft: Tensor | None = None
) -> StepInput:
    """Return what both roles read at step t of a recorded episode, as its delivery showed it.

    Args:
        memory: what was recalled for the step (`Episode.memory_at`); compilers and the delivery `live` need it.
        soft: the soft tokens, which no record keeps, made again.
    """
    spec, step = find(episode.delivery), episode.steps[t]
    return StepInput(
        stated_goal(episode.goal, episode.scene),
        step.observation,
        step.image,
        step.admissible,
        tuple(earlier.action for earlier in episode.steps[:t]),
        tuple(memory),
        parse_brief_state(step.brief_before) if spec.brief_state else None,
        pasted(spec.kind, episode.memory_text, memory),
        Emission(step.guidance, step.reason) if step.emission_kind else None,
        soft,
        first=episode.steps[0].observation,
    )
