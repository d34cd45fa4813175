"""Deliveries: how task memory M reaches the executor. Every evaluation compares them on the same bank and tasks.

none      no memory
static    all of M pasted into the executor's prompt at episode start (the paper's AMMI)
live      the entries recalled at each step pasted at that step; equals static if memory recalls the same at every step
compiled  a compiler reads M and the state at every step and delivers what applies now (SCMC), with or without soft
          tokens and Brief State; or only where the executor alone has low confidence, or where the compile gate opens
memgen    of kind compiled: a compiler without text makes soft tokens from goal, past commands and view alone

`DELIVERIES` lists all of them: evaluations, tables, plots, reports, matrices and analyses read it. To add a delivery,
add an entry.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from agent.command_teacher import NAMES_PLACES, Teaching, load_teacher
from agent.disclosure import RuleDisclosure
from agent.records import Episode, StepInput
from compiler.brief_state import parse_brief_state
from compiler.language import Emission
from compiler.records import Compilation, Compiler, CompileRequest, Gate
from envs.command_reader import CommandReader
from executor.prompt import memory_text
from memory.entry import MemoryEntry
from memory.trajectory import goal_with_scene

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["none", "static", "live", "compiled"]


@dataclass(frozen=True, slots=True)
class Delivery:
    """A delivery as the loop runs it."""

    name: str
    kind: Kind
    compiler: Compiler | None = None
    soft: bool = True
    brief_state: bool = True
    low_confidence_only: bool = False  # compile only where the executor alone has low confidence
    gate: Gate | None = None  # compile only the first step and the steps that this gate selects

    def __post_init__(self) -> None:
        if (self.kind == "compiled") != (self.compiler is not None):
            raise ValueError(f"delivery {self.name}: kind `compiled` needs a compiler, and other kinds take none")


@dataclass(frozen=True, slots=True)
class DeliverySpec:
    """A delivery as settings, records and results name it."""

    name: str
    label: str  # in tables and plots
    kind: Kind = "compiled"
    # Creates the compiler from the trained one (None if none is loaded), the seed, the environment's command reader and
    # the settings of teachers without a model.
    compiler: Callable[[Compiler | None, int, CommandReader, Teaching], Compiler | None] = lambda *_: None
    soft: bool = True
    brief_state: bool = True
    low_confidence_only: bool = False  # as in `Delivery`; the executor has to report its confidence
    gated: bool = False  # compile only steps that the compile gate (`compiler.gate`) selects
    needs_checkpoint: bool = False  # a trained compiler is required
    text: bool = True  # the trained compiler writes text; False: it was trained to make soft tokens only
    needs_expert: bool = False  # the environment's expert compiles
    memory: Literal["all", "top", "empty"] = "all"  # M: all retrieved entries, the best one, or none
    control: bool = False  # a control condition; tables show it below a rule
    interdependent: bool = False  # episodes depend on those beside them: a resumed run plays all of them again
    compared_with: tuple[str, ...] = ()  # deliveries that results always compare it with
    playable: bool = True  # False for a name that occurs in results only

    def entries(self, k: int) -> int:
        """Return how many of `memory.k` entries the delivery retrieves for a task."""
        return min(1, k) if self.memory == "top" else k

    @property
    def recalls(self) -> bool:
        """Return whether recalled entries reach any prompt."""
        return self.kind != "none" and self.memory != "empty"

    @property
    def shows_own_soft(self) -> bool:
        """Return whether the executor reads soft tokens that the trained compiler computed for this very step."""
        return self.needs_checkpoint and self.soft and not self.interdependent

    def check_text(self, writes_text: bool, compiler: str = "this one") -> None:
        """Raise ValueError for a trained compiler that writes text where the delivery reads none, or the reverse."""
        if self.text and not writes_text:
            raise ValueError(
                f"delivery {self.name} needs a compiler that writes text, and {compiler} was trained without "
                "(text=false): use delivery memgen, or another checkpoint"
            )
        if writes_text and not self.text:
            raise ValueError(
                f"delivery {self.name} needs a compiler that was trained with text=false (-c sft/memgen), and "
                f"{compiler} writes text"
            )

    def create(
        self,
        trained: Compiler | None,
        seed: int,
        reader: CommandReader | None = None,
        gate: Gate | None = None,
        teaching: Teaching = NAMES_PLACES,
    ) -> Delivery:
        """Create the delivery that the loop runs.

        Args:
            trained: the trained compiler.
            reader: the environment's command reader, for teachers.
            gate: the compile gate beside the compiler's checkpoint.
            teaching: settings of teachers without a model.

        Raises:
            ValueError: the delivery needs a trained compiler or a compile gate, and got none; a compiler that was
                trained for other deliveries; or a teacher that the reader does not support.
        """
        if self.needs_checkpoint and trained is None:
            raise ValueError(f"delivery {self.name} needs a trained compiler: set compiler.checkpoint")
        if self.needs_checkpoint:
            self.check_text(getattr(trained, "writes_text", self.text))
        if self.gated and gate is None:
            raise ValueError(f"delivery {self.name} needs a compile gate: run `memcompiler train gate` on the SFT run")
        return Delivery(
            name=self.name,
            kind=self.kind,
            compiler=self.compiler(trained, seed, reader or CommandReader(), teaching),
            soft=self.soft,
            brief_state=self.brief_state,
            low_confidence_only=self.low_confidence_only,
            gate=gate if self.gated else None,
        )


class ShuffledSoft:
    """Control that gives every episode the soft tokens of another episode of its batch, beside its own text.

    If soft tokens carry information about the episode, this must do worse than the compiler that it wraps.
    """

    def __init__(self, compiler: Compiler) -> None:
        self.compiler = compiler
        self._spare: Tensor | None = None  # for a batch of one: the previous step's soft tokens

    def compile(self, requests: Sequence[CompileRequest]) -> list[Compilation]:
        compilations = self.compiler.compile([replace(request, soft_on="always") for request in requests])
        soft = [c.soft for c in compilations]
        alone = [self._spare if self._spare is not None else soft[0]]
        donors = [*soft[1:], soft[0]] if len(soft) > 1 else alone
        self._spare = soft[0]
        return [replace(c, soft=other) for c, other in zip(compilations, donors, strict=True)]


def _trained(trained: Compiler | None, *_: object) -> Compiler | None:
    return trained


def _teacher(name: str, label: str, entry: Literal["right", "random", "none"]) -> DeliverySpec:
    """Describe a control in which the teacher without a model compiles."""
    return DeliverySpec(
        name,
        label,
        soft=False,
        needs_expert=True,
        control=True,
        compiler=lambda _, seed, reader, teaching: load_teacher(reader, teaching, seed, entry),
    )


def _memgen(name: str, label: str, compared_with: tuple[str, ...], gated: bool = False) -> DeliverySpec:
    """Describe MemGen (arXiv 2509.24704): soft tokens from goal, past commands and view, without task memory and text,
    at every step or at those that the compile gate selects."""
    return DeliverySpec(
        name,
        label,
        compiler=_trained,
        brief_state=False,
        gated=gated,
        needs_checkpoint=True,
        text=False,
        memory="empty",
        compared_with=compared_with,
    )


COMPILED, AFTER_GRPO = "compiled", "compiled_grpo"
DELIVERIES = {  # in the order of tables and plots
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
            playable=False,
        ),
        DeliverySpec(
            "compiled_low_confidence",
            "compiled, low confidence",
            compiler=_trained,
            low_confidence_only=True,
            needs_checkpoint=True,
            compared_with=("none", "static", COMPILED),
        ),
        DeliverySpec(
            "compiled_gated",
            "compiled, gated",
            compiler=_trained,
            gated=True,
            needs_checkpoint=True,
            compared_with=("none", "static", COMPILED),
        ),
        DeliverySpec(
            "compiled_no_brief", "compiled, no brief", compiler=_trained, brief_state=False, needs_checkpoint=True
        ),
        DeliverySpec(  # measures state tracking without memory
            "compiled_no_memory",
            "compiled, memory empty",
            compiler=_trained,
            needs_checkpoint=True,
            memory="empty",
            control=True,
            compared_with=("none", COMPILED),
        ),
        _memgen("memgen", "MemGen", ("none", "static")),
        _memgen("memgen_gated", "MemGen with trigger", ("none", "memgen"), gated=True),
        _teacher("expert_compiler", "expert as compiler", "right"),
        _teacher("expert_random_entry", "expert, random entry", "random"),
        _teacher("expert_no_places", "expert, places unknown", "none"),  # with teacher_level place, it gives commands
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
    """Append a delivery to the list. Raises: ValueError, if another delivery has its name."""
    if DELIVERIES.setdefault(spec.name, spec) is not spec:
        raise ValueError(f"there is a delivery {spec.name!r} already: choose another name")


def pasted_memory(kind: Kind, first: str, recalled: Sequence[MemoryEntry]) -> str:
    """Return the text of M for the executor's prompt: recalled at the episode's start (static) or now (live)."""
    match kind:
        case "static":
            return first
        case "live":
            return memory_text([entry.text for entry in recalled])
    return ""


def find(name: str) -> DeliverySpec:
    """Return the delivery of this name. Raises: ValueError, which lists the known names."""
    if name in DELIVERIES:
        return DELIVERIES[name]
    close = difflib.get_close_matches(name, DELIVERIES, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    playable = ", ".join(spec.name for spec in DELIVERIES.values() if spec.playable)
    raise ValueError(f"there is no delivery {name!r}{hint}; there are {playable}")


def recorded_step(
    episode: Episode, t: int, memory: Sequence[MemoryEntry] = (), soft: Tensor | None = None
) -> StepInput:
    """Rebuild the input of step t of a recorded episode.

    Args:
        memory: entries recalled for the step (`Episode.memory_at`); compilers and the delivery `live` need them.
        soft: recomputed soft tokens, which records do not store.
    """
    spec, step = find(episode.delivery), episode.steps[t]
    return StepInput(
        goal=goal_with_scene(episode.goal, episode.scene),
        observation=step.observation,
        image=step.image,
        admissible=step.admissible,
        past=tuple(earlier.to_turn() for earlier in episode.steps[:t]),
        memory=tuple(memory),
        state=parse_brief_state(step.brief_before) if spec.brief_state else None,
        pasted_memory=pasted_memory(spec.kind, episode.memory_text, memory),
        emission=Emission(step.guidance, step.reason) if step.emission_kind else None,
        soft=soft,
        first=episode.steps[0].observation,
    )
