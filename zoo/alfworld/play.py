"""Real ALFWorld games as material for the tiny models: a scripted executor, and what it and others meet in episodes.

Every task has the memory that an evaluation gives it: K entries of the bank that the expert fills from the train games,
never one of its own game.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from agent.deliveries import Delivery
from agent.episode import EpisodeSpec, Limits, run_episodes
from agent.expert import ExpertTeacher, Search
from agent.records import Episode
from compiler.language import Emission
from compiler.records import Compilation, Compiler, CompileRequest
from configs.evaluation import EvalConfig, EvalMemoryConfig
from data_gen.experience import filled_bank
from data_gen.tasks import chosen_tasks, specs_for
from envs.alfworld.environment import AlfworldSettings
from envs.base import Environment
from envs.household.telling import room
from envs.household.trajectories import PUT, TAKE, TREAT, AlfworldReader
from envs.registry import Environments
from executor.prompt import ExecutorRequest, executor_text
from executor.records import Action, Executor, Grounding, Reads
from memory.entry import MemoryEntry
from zoo.models import MEMORY_TOKEN

READER = AlfworldReader()
TEACHER = ExpertTeacher(reader=READER)
K, STEPS, SIDE_BY_SIDE = 4, 50, 64
READS = Reads(first_view=True, goal_last=True)
"""What the executor reads: guidance with its reason, no Brief State, as in the paper; the first view, which alone tells
which places there are; and the goal at the end, where a small model has it at hand."""
GO, _TAKEN_FROM = "go to ", re.compile(r"take .+ from (.+)")

Make = Callable[[], Environment]


def material(work: Path, split: str = "train", limit: int | None = None) -> tuple[Make, list[EpisodeSpec]]:
    """Make what environments come from, and the first `limit` games of a split, each with its memory; the bank lies
    beside `work`.

    Raises:
        FileNotFoundError: ALFWORLD_DATA names no games.
    """
    config = EvalConfig(env=AlfworldSettings(), memory=EvalMemoryConfig(k=K), split=split, limit=limit)
    envs = Environments(config.env)  # in this process: nothing is to be closed
    tasks, experience = chosen_tasks(config, envs, split)
    return envs.lease, specs_for(tasks, filled_bank(config, envs, experience, work), K)


# -- the executor's teacher -------------------------------------------------------------------------------------------


class Why(StrEnum):
    """What a command follows from."""

    TOLD = "told"  # guidance or memory says it
    SEARCH = "search"  # nothing says where the thing is
    PLAN = "plan"  # it is known where it is, or in hand


@dataclass
class Script:
    """Does what a competent executor does with what it is given.

    It knows every command and recipe, but not where things are: it goes where guidance or pasted memory says, and where
    nothing says anything, or the place is a disappointment, it goes on to the place that the first view names after the
    one that it went to last, which finds everything in one round and asks for no list of places that one has been to.
    It never knows more than its prompt: of its actions, those that are shown. What pasted memory says, it reads as the
    teacher does, without a Brief State; of several places that it tells any will do.
    """

    entries: Mapping[str, MemoryEntry]  # by text: what may be pasted

    @classmethod
    def of(cls, specs: Sequence[EpisodeSpec]) -> Script:
        return cls({entry.text: entry for spec in specs for entry in spec.memory})

    def choices(self, request: ExecutorRequest) -> tuple[tuple[str, ...], Why]:
        """List the commands that serve equally well, none where there is no way to the goal; and say what they follow
        from."""
        plan, commands = (request.expert() if request.expert else None) or [], request.admissible or ()
        need = READER.need(plan)
        request = replace(request, history=request.history[-request.shown :] if request.shown else ())
        last = next((a for a in reversed(request.history) if a.startswith(GO)), "").removeprefix(GO)
        at_hand = _alike(plan, request.goal, last, commands)
        if at_hand or need is None or not need.need.startswith("find "):
            return at_hand or tuple(plan[:1]), Why.PLAN
        been = _been(request.history)
        told = (f"{GO}{place}" for place in self._told(request) if place not in been)
        if ways := tuple(way for way in told if way in commands):
            return ways, Why.TOLD
        if last and (inside := f"open {last}") in commands:
            return (inside,), Why.SEARCH
        way = f"{GO}{_after(last, room(request.first or request.observation))}"
        return ((way,) if way in commands else tuple(plan[:1])), Why.SEARCH

    def _told(self, request: ExecutorRequest) -> tuple[str, ...]:
        """List the place that guidance names for what is looked for, or all that pasted memory does."""
        if request.delivered.memory:
            memory = tuple(self.entries[text] for text in request.delivered.memory.split("\n\n"))
            places = ", ".join(c for c in request.admissible or () if c.startswith(GO))
            seen = f"{request.observation}\n{places}" if request.history else request.observation
            asked = CompileRequest(request.goal, memory, None, seen, None, request.history, request.expert)
            return search.places if (search := TEACHER.search(asked)) else ()
        guidance = request.delivered.guidance
        return (guidance.removeprefix(GO),) if guidance.startswith(GO) else ()


def _alike(plan: Sequence[str], goal: str, last: str, commands: Sequence[str]) -> tuple[str, ...]:
    """List what serves the plan's next deed as well as its own commands, which name one thing and one place of those
    that would do: the deed itself with any that are at hand, or a way to any place of the kind that it needs. Nothing,
    where the thing has yet to be found. The second of two things has to go where the first one lies."""
    deed = next((c for c in plan if not c.startswith((GO, "open ", "close "))), "")
    second = "two " in goal and sum(PUT.fullmatch(c) is not None for c in plan) == 1
    if take := TAKE.fullmatch(deed):
        goals = {m["place"] for c in plan if (m := PUT.fullmatch(c))} if second else set[str]()
        taking = ((c, TAKE.fullmatch(c)) for c in commands)
        return tuple(c for c, m in taking if m and m["thing"] == take["thing"] and m["place"] not in goals)
    done = PUT.fullmatch(deed) or TREAT.fullmatch(deed)
    if done is None or not done["place"]:
        return tuple(plan[:1]) if plan[:1] == [deed] else ()
    kind = done["place"] if second else rf"{done['place'].rpartition(' ')[0]} \d+"
    doing = re.compile(rf"{re.escape(deed[: done.start('place')])}{kind}")
    if at_hand := tuple(c for c in commands if doing.fullmatch(c)):
        return at_hand
    if re.fullmatch(kind, last) and f"open {last}" in commands:
        return (f"open {last}",)
    return tuple(c for c in commands if re.fullmatch(rf"{GO}{kind}", c)) or tuple(plan[:1])


def _after(place: str, places: Sequence[str]) -> str:
    """Return what comes after a place, the first after the last; the first where it is none of them."""
    at = places.index(place) + 1 if place in places else 0
    return places[at % len(places)] if places else ""


def _been(history: Sequence[str]) -> set[str]:
    """List the places that were gone to, but for those that something was last taken from: they may hold more."""
    been = set[str]()
    for command in history:
        if command.startswith(GO):
            been.add(command.removeprefix(GO))
        elif found := _TAKEN_FROM.fullmatch(command):
            been.discard(found[1])
    return been


@dataclass(frozen=True, slots=True)
class Example:
    """What an executor met, and what the script would do there."""

    prompt: str  # the user turn
    wanted: tuple[str, ...]  # commands that serve equally well
    why: Why
    done: str  # what was done


@dataclass
class Pupil:
    """An executor that acts while the script says at every state, its own ones, what it would do (DAgger, Ross et al.
    2011). Without an `actor` the script itself acts, one time in `strays` as if it had been told nothing."""

    script: Script
    actor: Executor | None = None
    strays: float = 0.0
    seed: int = 0
    accepts_soft: bool = False
    sees_images: bool = False
    reads: Reads = READS
    examples: list[Example] = field(default_factory=list)

    def act(self, requests: Sequence[ExecutorRequest]) -> list[Action]:
        wanted = [self.script.choices(request) for request in requests]
        if self.actor is not None:
            made = self.actor.act(requests)
        else:
            made = [self._drawn(request, *choices) for request, choices in zip(requests, wanted, strict=True)]
        for request, (commands, why), action in zip(requests, wanted, made, strict=True):
            if commands:
                text = executor_text(request, MEMORY_TOKEN)
                self.examples.append(Example(text, commands, why, action.action))
        return made

    def _drawn(self, request: ExecutorRequest, commands: tuple[str, ...], why: Why) -> Action:
        """Draw one of the commands; chance depends on seed, goal and history alone."""
        chance = random.Random(f"{self.seed} {request.goal} {request.history}")
        if why is Why.TOLD and chance.random() < self.strays:
            commands = tuple(c for c in request.admissible or () if c.startswith(GO))
        text = chance.choice(commands or ("look",))
        return Action(text, Grounding.CHOICE, text, (), 0, 0)


def deliveries(seed: int) -> tuple[Delivery, ...]:
    """List the ways in which text reaches an executor; misguided: the teacher cites a wrong entry."""
    return (
        Delivery("none", "none"),
        Delivery("static", "static"),
        Delivery("guided", "compiled", TEACHER, soft=False),
        Delivery("misguided", "compiled", ExpertTeacher("random", seed, READER), soft=False),
    )


def examples_of(
    make_env: Make, specs: Sequence[EpisodeSpec], pupil: Pupil, seed: int, steps: int = STEPS
) -> list[Example]:
    """Play `specs`, an equal share of them under each delivery, and return what the script says of it all."""
    ways = deliveries(seed)
    for i, delivery in enumerate(ways):
        played(make_env, specs[i :: len(ways)], delivery, pupil, steps)
    return pupil.examples


def played(
    make_env: Make, specs: Sequence[EpisodeSpec], delivery: Delivery, executor: Executor, steps: int = STEPS
) -> list[Episode]:
    """Play all specs. Raises: RuntimeError, where an episode broke, for nothing is to be learned or measured then."""
    episodes = run_episodes(make_env, specs, delivery, executor, Limits(steps), SIDE_BY_SIDE)
    if broken := next((episode for episode in episodes if episode.error), None):
        raise RuntimeError(f"{broken.task_id}, {delivery.name}: {broken.error}")
    return episodes


# -- the compiler's teacher -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Situation:
    """What a compiler meets, what the teacher says there, and from what it follows."""

    request: CompileRequest  # without the expert
    emission: Emission
    search: Search | None


@dataclass
class Tap:
    """The teacher, with a note of every state that it was asked about."""

    situations: list[Situation] = field(default_factory=list)

    def compile(self, requests: Sequence[CompileRequest]) -> list[Compilation]:
        made = TEACHER.compile(requests)
        for request, said in zip(requests, made, strict=True):
            found = TEACHER.search(request)
            self.situations.append(Situation(replace(request, expert=None), said.emission, found))
        return made


def situations_of(
    make_env: Make, specs: Sequence[EpisodeSpec], seed: int, strays: float = 0.15, steps: int = STEPS
) -> list[Situation]:
    """Play `specs` with the teacher as compiler and a script that follows it, but for `strays`: all states, as often as
    they come, in the order of their steps."""
    tap = Tap()
    compiler: Compiler = tap
    pupil = Pupil(Script.of(specs), strays=strays, seed=seed)
    played(make_env, specs, Delivery("expert_compiler", "compiled", compiler, soft=False), pupil, steps)
    return tap.situations
