"""Command readers: parse an environment's commands and observations for teachers and memory systems.

The base class knows no command language and works for any environment; `EnvSpec.reader` names an environment's own.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol, TypeVar

# What a teacher's guidance says: the place where something is, what to do now, or the next command.
TeacherLevel = Literal["place", "subgoal", "command"]


@dataclass(frozen=True, slots=True)
class Fact:
    """A need and the place where an episode met it, such as "find mug" and "cabinet 2"."""

    need: str
    place: str


# what the texts of an episode say -------------------------------------------------------------------------------------


class Step(Protocol):
    """The texts of one step: what was shown before it, the command, and the answer (`memory.protocol.Record`)."""

    @property
    def observation(self) -> str: ...
    @property
    def action(self) -> str: ...
    @property
    def feedback(self) -> str: ...
    @property
    def refused(self) -> bool: ...


AnyStep = TypeVar("AnyStep", bound=Step)


@dataclass(frozen=True, slots=True)
class PlaceView:
    """A place in a text, and the things that the text says are there."""

    at: str
    seen: tuple[str, ...]
    complete: bool = True  # False: other things may be there


@dataclass(frozen=True, slots=True)
class StepEffect:
    """What a step did with a thing."""

    verb: str  # take, put, heat, cool, clean, slice, use, on, off, open, close
    thing: str
    place: str = ""  # where it was taken or put, or what treated it; "" if unknown


@dataclass(frozen=True, slots=True)
class Reading:
    """What a text says."""

    at: str | None = None  # where the agent is; None: as before
    held: tuple[str, ...] | None = None  # everything that the agent holds; None: as before
    effect: StepEffect | None = None
    views: tuple[PlaceView, ...] = ()
    places: tuple[str, ...] = ()  # places that are listed without their contents

    @property
    def entities(self) -> set[str]:
        """Return the things in view and the listed places."""
        return {thing for view in self.views for thing in view.seen} | set(self.places)


@dataclass(frozen=True, slots=True)
class AgentState:
    """Where the agent is, what it holds, and where it knows things to be, as far as an episode's texts say."""

    at: str = ""
    held: tuple[str, ...] = ()
    where: Mapping[str, str] = field(default_factory=dict)  # thing -> place

    def after(self, reading: Reading) -> "AgentState":
        """Return the state after what a text says."""
        at = self.at if reading.at is None else reading.at
        held = self.held if reading.held is None else reading.held
        return AgentState(at, held, self._where_after(reading.effect, reading.views))

    def _where_after(self, done: StepEffect | None, views: Sequence[PlaceView]) -> Mapping[str, str]:
        """Return where things are known to be after an effect and what was seen then."""
        where = dict(self.where)
        if done is not None and done.verb in ("take", "put"):
            where.pop(done.thing, None)
            if done.verb == "put" and done.place:
                where[done.thing] = done.place
        for view in views:
            if view.complete:
                where = {thing: at for thing, at in where.items() if at != view.at}
            where |= dict.fromkeys(view.seen, view.at)
        return where

    @property
    def holding(self) -> str:
        """Return what is held, in words."""
        return f"holding {', '.join(self.held) or 'nothing'}"


def kind(entity: str) -> str:
    """Return a name without its number: "mug" for "mug 1", "Mug" for "Mug_2"."""
    return re.sub(r"[ _]\d+$", "", entity)


_VERBS = {
    "take": "take",
    "pick up": "take",
    "put": "put",
    "put down": "put",
    "move": "put",
    "place": "put",
    "drop": "put",
    "turn on": "on",
    "activate": "on",
    "turn off": "off",
    "deactivate": "off",
} | {verb: verb for verb in ("heat", "cool", "clean", "slice", "use", "open", "close")}
_COMMAND = re.compile(rf"({'|'.join(sorted(_VERBS, key=len, reverse=True))}) (?:(?:the|a|an) )?(.+)", re.IGNORECASE)


class CommandReader:
    """Stateless parser of observations and of commands in plans and past episodes."""

    # What the texts of steps say -------------------------------------------------------------------------------------

    reads_views = False  # `look` and `read` are implemented, for memory systems that follow episodes
    one_hand = True  # the agent holds one thing at most, and puts or treats only what it holds, or slices with it
    pictures = False  # observations are pictures, whose texts describe no view

    def look(self, text: str) -> Reading:
        """Read a text that stands alone, such as an episode's first observation."""
        return Reading()

    def read(self, state: AgentState, step: Step) -> Reading:
        """Read a step's command and answer; `state` is the agent's before it. A refused step changes nothing."""
        return Reading() if step.refused else self.look(step.feedback)

    def follow(self, first: str, steps: Iterable[AnyStep]) -> Iterator[tuple[AnyStep, Reading, AgentState]]:
        """Yield each step of an episode with what it says and the agent's state after it.

        Args:
            first: the episode's first observation.
        """
        state = AgentState().after(self.look(first))
        for step in steps:
            reading = self.read(state, step)
            state = state.after(reading)
            yield step, reading, state

    def intent(self, command: str) -> StepEffect | None:
        """Return what a command means to do, executed or not: its verb and the words after it; None for others."""
        found = _COMMAND.fullmatch(command.strip())
        return StepEffect(_VERBS[found[1].lower()], found[2]) if found else None

    def phrase(self, effect: StepEffect) -> str:
        """Write an effect in words, by kinds of things."""
        thing, place = self.in_words(kind(effect.thing)), self.in_words(kind(effect.place))
        match effect.verb:
            case "put":
                return f"put the {thing} in the {place}" if place else f"put the {thing} down"
            case "on" | "off":
                return f"turn {effect.verb} the {thing}"
            case "heat" | "cool" | "clean" | "slice":
                return f"{effect.verb} the {thing}" + (f" with the {place}" if place else "")
        return f"{effect.verb} the {thing}"

    def in_words(self, kind: str) -> str:
        """Write a kind of thing as goals do."""
        return kind

    def goal_things(self, goal: str, known: Iterable[str] = ()) -> frozenset[str]:
        """Return the kinds of things that a goal names; `known` are kinds that an observation shows."""
        words = re.findall(r"[a-z]+", goal.lower())
        return frozenset(words) & frozenset(known)

    def fetch(self, thing: str, place: str) -> tuple[str, ...]:
        """Return the commands that get a thing, or one of a kind, from a place where an episode saw it."""
        return ()

    # What teachers need ----------------------------------------------------------------------------------------------

    levels: ClassVar[tuple[TeacherLevel, ...]] = ("place", "command")  # of guidance that it supports
    scenes_alike = (
        False  # scenes resemble each other: a place in one suggests where to look in another (`similar_places`)
    )
    lists_places = False  # the first view lists all places, by the names that commands go to (`agent.explorer`)
    follows_recipes = True  # guidance may give a plan's next command if past episodes did the same

    def related(self, goal: str, other: str) -> bool:
        """Return whether an episode of another goal is informative about this goal."""
        return True

    def facts(self, actions: Sequence[str]) -> list[Fact]:
        """List needs with the places that met them, in order."""
        return []

    def need(self, plan: Sequence[str]) -> Fact | None:
        """Return the plan's next need and its place; None if its next subgoal needs no place."""
        return None

    def need_kind(self, need: str) -> str:
        """Return the kind of a need, for needs that no episode met exactly; "" if there is none."""
        return ""

    def subgoals(self, plan: Sequence[str], goal: str, shown: frozenset[str]) -> list[str]:
        """List the remaining subgoals, in words of the goal or of `shown` (commands of past episodes)."""
        return last_of_each(command for command in plan if command in shown)

    def steps(self, actions: Sequence[str]) -> list[str]:
        """Return the steps of a recipe: commands other than looks and walks."""
        return list(actions)

    def adapted(self, command: str, goal: str, to: str) -> str:
        """Return a command of an episode with the things of its goal replaced by those of goal `to`."""
        return command

    def shape(self, command: str) -> str:
        """Return the form that a command shares with similar ones of other episodes."""
        return re.sub(r"\d+", "#", command)

    def here(self, observation: str, history: Sequence[str]) -> frozenset[str]:
        """Return the places at which the agent is known to be."""
        return frozenset()

    def place_without(self, need: str, observation: str) -> str:
        """Return the visible place that does not meet the need; "" if the view shows none."""
        return ""

    def put_place(self, action: str) -> tuple[str, str]:
        """Return (place, thing) of an action that puts something down; ("", "") for other actions."""
        return "", ""

    def searched(self, history: Sequence[str]) -> frozenset[str]:
        """Return the places that were searched without success."""
        return frozenset()

    def similar_places(self, place: str, text: str) -> list[str]:
        """List the places in `text` that resemble a place of another scene; [] if scenes differ."""
        return []

    def thing(self, need: str) -> str:
        """Return the needed thing, as the Brief State notes that a place lacks it."""
        return need

    def way(self, place: str, here: str = "") -> str:
        """Return the command that leads to a place; from `here`, if the way depends on where the agent is."""
        return f"go to {place}"

    def sentence(self, scene: str, need: str, place: str) -> str:
        """Write a fact as a sentence."""
        where = f"{need}: at {place}"
        return f"in {scene} {where}" if scene else where

    def rationale(self, scene: str, actions: Sequence[str]) -> str:
        """Write why an episode succeeded; "" if its commands show it."""
        return ""


def alike(one: CommandReader, other: CommandReader) -> bool:
    """Return whether two readers read the same views, as those of generated homes and of real games do."""
    return isinstance(one, type(other)) or isinstance(other, type(one))


def last_of_each(names: Iterable[str]) -> list[str]:
    """Return the last occurrence of each name, in order: the rest of a plan then has a suffix of its list."""
    return list(dict.fromkeys(reversed(list(names))))[::-1]
