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
from typing import ClassVar

from agent.deliveries import Delivery
from agent.episode import EpisodeSpec, Limits, run_episodes
from agent.expert import ExpertTeacher, Search
from agent.records import Episode, EpisodeContext
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
GO = "go to "

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


@dataclass(frozen=True, slots=True)
class Choice:
    """What the script would do, and from what that follows."""

    commands: tuple[str, ...]  # that serve equally well
    why: Why
    told: tuple[str, ...] = ()  # ways to all places that guidance or memory tells, where one is looking for something
    following: str = ""  # the way to the next place where one has not been, where one is looking for something
    been: tuple[str, ...] = ()  # ways to where one has been, which do not serve


@dataclass
class Script:
    """Does what a competent executor does with what it is given.

    It knows every command and recipe, but not where things are: it goes where guidance or pasted memory says, and where
    nothing says anything, or the place is a disappointment, it goes on to the next place of the first view, after the
    one that it went to last, where it has not been. Places to which it went before it last took something count
    as new: that it does not go twice to one place holds for all ways then.
    It never knows more than its prompt: of its actions, those that are shown. Of pasted memory it reads what is said of
    this very thing in this scene, and concludes nothing from other scenes; of several places that it tells any will do.
    """

    entries: Mapping[str, MemoryEntry]  # by text: what may be pasted

    @classmethod
    def of(cls, specs: Sequence[EpisodeSpec]) -> Script:
        return cls({entry.text: entry for spec in specs for entry in spec.memory})

    def choices(self, request: ExecutorRequest, plan: Sequence[str]) -> Choice:
        """List the commands that serve equally well, none where there is no way to the goal; and what they follow
        from."""
        need, commands = READER.need(plan), request.admissible or ()
        request = replace(request, history=request.history[-request.shown :] if request.shown else ())
        last = next((a for a in reversed(request.history) if a.startswith(GO)), "").removeprefix(GO)
        been = tuple(way for place in _been(request.history) if (way := f"{GO}{place}") in commands)
        at_hand = _alike(plan, request.goal, last, commands)
        if at_hand or need is None or not need.need.startswith("find "):
            serve = at_hand or tuple(plan[:1])
            return Choice(serve, Why.PLAN, been=tuple(way for way in been if way not in serve))
        if last and (inside := f"open {last}") in commands:
            return Choice((inside,), Why.SEARCH, been=been)
        told = tuple(way for place in self._told(request, plan) if (way := f"{GO}{place}") in commands)
        new = [command for command in commands if command.startswith(GO) and command not in been]
        ways = (f"{GO}{place}" for place in _from(last, room(request.first or request.observation)))
        following = next((way for way in ways if way in new), "")
        serve = tuple(way for way in told if way in new)
        why = Why.TOLD if serve else Why.SEARCH
        return Choice(serve or ((following,) if following else tuple(plan[:1])), why, told, following, been)

    def _told(self, request: ExecutorRequest, plan: Sequence[str]) -> tuple[str, ...]:
        """List the place that guidance names for what is looked for, or all that pasted memory does."""
        if request.delivered.memory:
            memory = tuple(self.entries[text] for text in request.delivered.memory.split("\n\n"))
            places = ", ".join(c for c in request.admissible or () if c.startswith(GO))
            seen = f"{request.observation}\n{places}" if request.history else request.observation
            asked = CompileRequest(request.goal, memory, None, seen, history=request.history)
            return search.named if (search := TEACHER.search(asked, plan)) else ()
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


def _from(place: str, places: Sequence[str]) -> Sequence[str]:
    """Return places in the order that begins behind one of them, or as they are."""
    at = places.index(place) + 1 if place in places else 0
    return [*places[at:], *places[:at]]


def _been(history: Sequence[str]) -> Sequence[str]:
    """List the places that were gone to since something was last taken."""
    taken = max((i for i, command in enumerate(history) if TAKE.fullmatch(command)), default=-1)
    return list(dict.fromkeys(c.removeprefix(GO) for c in history[taken + 1 :] if c.startswith(GO)))


@dataclass(frozen=True, slots=True)
class Example:
    """What an executor met, what was done, and what the script would do there."""

    prompt: str  # the user turn
    choice: Choice
    done: str
    episode: str = ""  # its goal and first view


@dataclass
class Pupil:
    """An executor that acts while the script says at every state, its own ones, what it would do (DAgger, Ross et al.
    2011). Without an `actor` the script itself acts, one time in `strays` as if it had been told nothing."""

    needs_expert: ClassVar[bool] = True
    script: Script
    actor: Executor | None = None
    strays: float = 0.0
    seed: int = 0
    accepts_soft: bool = False
    sees_images: bool = False
    reads: Reads = READS
    examples: list[Example] = field(default_factory=list)

    def act(self, requests: Sequence[ExecutorRequest], contexts: Sequence[EpisodeContext] = ()) -> list[Action]:
        wanted = [self.script.choices(r, context.plan or []) for r, context in zip(requests, contexts, strict=True)]
        if self.actor is not None:
            made = self.actor.act(requests)
        else:
            made = [self._drawn(request, choice) for request, choice in zip(requests, wanted, strict=True)]
        for request, choice, action in zip(requests, wanted, made, strict=True):
            if choice.commands:
                episode = f"{request.goal}\n{request.first or request.observation}"
                self.examples.append(Example(executor_text(request, MEMORY_TOKEN), choice, action.action, episode))
        return made

    def _drawn(self, request: ExecutorRequest, choice: Choice) -> Action:
        """Draw one of the commands; chance depends on seed, goal and history alone."""
        chance, commands = random.Random(f"{self.seed} {request.goal} {request.history}"), choice.commands
        if choice.why is Why.TOLD and chance.random() < self.strays:
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
    """Play `specs`, an equal share of them under each delivery, but all with all of M pasted, of which most is to be
    learned; and return what the script says of it all."""
    ways = deliveries(seed)
    for i, delivery in enumerate(ways):
        played(make_env, specs if delivery.name == "static" else specs[i :: len(ways)], delivery, pupil, steps)
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

    request: CompileRequest
    emission: Emission
    search: Search | None


@dataclass
class Tap:
    """The teacher, with a note of every state that it was asked about."""

    needs_expert: ClassVar[bool] = True
    situations: list[Situation] = field(default_factory=list)

    def compile(self, requests: Sequence[CompileRequest], contexts: Sequence[EpisodeContext] = ()) -> list[Compilation]:
        made = TEACHER.compile(requests, contexts)
        for request, context, said in zip(requests, contexts, made, strict=True):
            found = TEACHER.search(request, context.plan)
            self.situations.append(Situation(request, said.emission, found))
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
