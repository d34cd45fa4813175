"""Command readers: parse an environment's commands and observations for teachers.

The base class knows no command language and works for any environment; `EnvSpec.reader` names an environment's own.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

# What a teacher's guidance says: the place where something is, what to do now, or the next command.
TeacherLevel = Literal["place", "subgoal", "command"]


@dataclass(frozen=True, slots=True)
class Fact:
    """A need and the place where an episode met it, such as "find mug" and "cabinet 2"."""

    need: str
    place: str


class CommandReader:
    """Stateless parser of observations and of commands in plans and past episodes."""

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

    def way(self, place: str) -> str:
        """Return guidance to a place."""
        return f"go to {place}"

    def sentence(self, scene: str, need: str, place: str) -> str:
        """Write a fact as a sentence."""
        where = f"{need}: at {place}"
        return f"in {scene} {where}" if scene else where

    def rationale(self, scene: str, actions: Sequence[str]) -> str:
        """Write why an episode succeeded; "" if its commands show it."""
        return ""


def last_of_each(names: Iterable[str]) -> list[str]:
    """Return the last occurrence of each name, in order: the rest of a plan then has a suffix of its list."""
    return list(dict.fromkeys(reversed(list(names))))[::-1]
