"""How a teacher reads an environment's commands and answers: what an episode shows about where things are done.

A `TrajectoryReader` belongs to an environment (`EnvSpec.reader`). The one here knows no command language: of other
episodes it carries over nothing but the order in which commands were given, which serves any environment.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fact:
    """Where an episode found or did something: need "find mug", place "cabinet 2"."""

    need: str
    place: str


class TrajectoryReader:
    """Reads commands (of plans and of past episodes) and the environment's answers. Stateless."""

    alike = False  # scenes are alike: a place in one says where to look in another (`likes`)
    follows_recipes = True  # the next command of a plan is worth saying where past episodes give it at the same point

    def related(self, goal: str, other: str) -> bool:
        """Tell whether an episode of another goal says anything about this one's."""
        return True

    def facts(self, actions: Sequence[str]) -> list[Fact]:
        """List where needs were met, in order."""
        return []

    def need(self, plan: Sequence[str]) -> Fact | None:
        """Return what the plan is on its way to, and where; None where its next subgoal is no matter of place."""
        return None

    def broader(self, need: str) -> str:
        """Return the kind of need, for which an episode without this very one may speak; "" for none."""
        return ""

    def subgoals(self, plan: Sequence[str], goal: str, shown: frozenset[str]) -> list[str]:
        """List what is left to do, as the Brief State names it, in words of the goal or of `shown` (commands of past
        episodes) alone."""
        return last_of_each(command for command in plan if command in shown)

    def steps(self, actions: Sequence[str]) -> list[str]:
        """Leave out what only looks or walks: a recipe's steps."""
        return list(actions)

    def shape(self, command: str) -> str:
        """Return what a command shares with its likes in other episodes."""
        return re.sub(r"\d+", "#", command)

    def here(self, observation: str, history: Sequence[str]) -> frozenset[str]:
        """Return the places at which the agent is known to be."""
        return frozenset()

    def lacking(self, need: str, observation: str) -> str:
        """Return the place that is seen to hold nothing that meets the need; "" where the view does not say so."""
        return ""

    def filled(self, action: str) -> tuple[str, str]:
        """Return the place that an action put something in, and the thing, as `thing` names it; ("", "") for none."""
        return "", ""

    def searched(self, history: Sequence[str]) -> frozenset[str]:
        """Return the places that have been looked into in vain."""
        return frozenset()

    def likes(self, place: str, text: str) -> list[str]:
        """List the places that `text` names of the kind of a place in another scene; [] where scenes are not alike."""
        return []

    def thing(self, need: str) -> str:
        """Return what the Brief State notes as missing from a place."""
        return need

    def way(self, place: str) -> str:
        """Return the guidance that leads to a place."""
        return f"go to {place}"

    def sentence(self, scene: str, need: str, place: str) -> str:
        """Say a fact in words."""
        where = f"{need}: at {place}"
        return f"in {scene} {where}" if scene else where

    def rationale(self, scene: str, actions: Sequence[str]) -> str:
        """Say why an episode succeeded: what a later one looks up. "" where its commands say all."""
        return ""


def last_of_each(names: Iterable[str]) -> list[str]:
    """Keep the last of equal ones, in order, so that the rest of a plan is the end of the plan's own list."""
    return list(dict.fromkeys(reversed(list(names))))[::-1]
