"""Command readers: what an environment's commands and observations say about places, for teachers.

A `CommandReader` belongs to an environment (`EnvSpec.reader`). The one here knows no command language: from other
episodes it takes only the order of commands, which serves any environment.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fact:
    """A need and the place where an episode met it: need "find mug", place "cabinet 2"."""

    need: str
    place: str


class CommandReader:
    """Reader of commands (of plans and past episodes) and observations. Stateless."""

    alike = False  # scenes are alike: a place in one suggests where to look in another (`likes`)
    follows_recipes = True  # guidance may give a plan's next command where past episodes did the same

    def related(self, goal: str, other: str) -> bool:
        """Return whether an episode of another goal is informative about this goal."""
        return True

    def facts(self, actions: Sequence[str]) -> list[Fact]:
        """List where needs were met, in order."""
        return []

    def need(self, plan: Sequence[str]) -> Fact | None:
        """Return the plan's next need and its place; None where its next subgoal needs no place."""
        return None

    def broader(self, need: str) -> str:
        """Return the kind of a need, to use where no episode met it exactly; "" for none."""
        return ""

    def subgoals(self, plan: Sequence[str], goal: str, shown: frozenset[str]) -> list[str]:
        """List the remaining subgoals in words of the goal or of `shown` (commands of past episodes)."""
        return last_of_each(command for command in plan if command in shown)

    def steps(self, actions: Sequence[str]) -> list[str]:
        """Return the steps of a recipe: the commands that do more than look or walk."""
        return list(actions)

    def shape(self, command: str) -> str:
        """Return a command's form, which similar commands of other episodes share."""
        return re.sub(r"\d+", "#", command)

    def here(self, observation: str, history: Sequence[str]) -> frozenset[str]:
        """Return the places where the agent is known to be."""
        return frozenset()

    def lacking(self, need: str, observation: str) -> str:
        """Return the visible place that holds nothing for the need; "" where the view does not show it."""
        return ""

    def filled(self, action: str) -> tuple[str, str]:
        """Return (place, thing) of an action that puts something somewhere; ("", "") for others."""
        return "", ""

    def searched(self, history: Sequence[str]) -> frozenset[str]:
        """Return the places that were searched in vain."""
        return frozenset()

    def likes(self, place: str, text: str) -> list[str]:
        """List the places in `text` of the same kind as a place of another scene; [] where scenes differ."""
        return []

    def thing(self, need: str) -> str:
        """Return the Brief State's word for what a place lacks."""
        return need

    def way(self, place: str) -> str:
        """Return the guidance that leads to a place."""
        return f"go to {place}"

    def sentence(self, scene: str, need: str, place: str) -> str:
        """Write a fact as a sentence."""
        where = f"{need}: at {place}"
        return f"in {scene} {where}" if scene else where

    def rationale(self, scene: str, actions: Sequence[str]) -> str:
        """Write why an episode succeeded, for later look-ups; "" where its commands suffice."""
        return ""


def last_of_each(names: Iterable[str]) -> list[str]:
    """Keep the last of equal names, in order, so that the rest of a plan is a suffix of its list."""
    return list(dict.fromkeys(reversed(list(names))))[::-1]
