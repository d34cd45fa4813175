"""TextWorld's own play of a `game.tw-pddl`, as alfworld sets it up: what the native engine is measured against.

Needs the extra `alfworld`. TextWorld parses its grammar's sentences anew for every command that it lists, which makes
most of its 50 ms a step. `quickened` lets it parse every sentence once; what it says does not change (a test plays the
same walk both ways), and a comparison of hundreds of thousands of steps becomes affordable. Speed is always measured
on TextWorld as it is.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envs.base import EnvironmentFailure

NO_TEXTWORLD = "TextWorld is not installed: uv sync --extra alfworld"

# Predicate in TextWorld's state -> the name that `Seen.facts` gives it. What is left out never changes in a game or, as
# the agent's coordinates, shows in the other fields.
CHANGING = {
    "inreceptacle": "in", "holds": "holds", "opened": "open", "ishot": "hot", "iscool": "cool", "isclean": "clean",
    "issliced": "sliced", "istoggled": "on",
}  # fmt: skip

Fact = tuple[str, ...]  # ("in", "mug 1", "cabinet 3"), ("hot", "mug 1")


@dataclass(frozen=True, slots=True)
class Seen:
    """All that one engine shows after a command."""

    text: str
    admissible: tuple[str, ...]
    won: bool
    facts: frozenset[Fact]


class TextWorldGame:
    """One game in TextWorld, with alfworld's names for things (`AlfredDemangler` and `AlfredInfos`).

    Raises:
        EnvironmentFailure: when TextWorld is not installed or cannot load the game.
    """

    def __init__(self, path: Path) -> None:
        try:
            import textworld
            from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos
            from textworld.envs.pddl import PddlEnv
        except ImportError as error:
            raise EnvironmentFailure(f"{NO_TEXTWORLD} ({error})") from error
        self._env: Any = AlfredInfos(AlfredDemangler(PddlEnv(textworld.EnvInfos(admissible_commands=True, won=True))))
        try:
            with _arguments_kept():
                self._env.load(str(path))
        except Exception as error:  # TextWorld and its planner raise all sorts
            raise EnvironmentFailure(f"TextWorld cannot load {path}: {type(error).__name__}: {error}") from error

    def reset(self) -> Seen:
        """Start afresh. The text is TextWorld's, banner and task sentence included."""
        with _arguments_kept():
            return self._seen(self._env.reset())

    def step(self, command: str) -> Seen:
        return self._seen(self._env.step(command)[0])

    def plan(self) -> list[str] | None:
        """Commands that TextWorld's planner finds from here to the goal; None when it finds none."""
        inner: Any = self._env.unwrapped
        return inner._pddl_state.replan(inner._entity_infos) or None

    def close(self) -> None:
        self._env.close()

    def _seen(self, state: Mapping[str, Any]) -> Seen:
        infos = state["_entity_infos"]
        facts = frozenset(
            (CHANGING[fact.name], *(infos[argument.name].name for argument in fact.arguments[-2:]))
            if fact.name == "inreceptacle"
            else (CHANGING[fact.name], infos[fact.arguments[-1].name].name)
            for fact in state["_facts"]
            if fact.name in CHANGING
        )
        return Seen(state["feedback"], tuple(state["admissible_commands"]), bool(state["won"]), facts)


@contextmanager
def _arguments_kept() -> Iterator[None]:
    """TextWorld's planner writes its own command line into sys.argv, where child processes would find it."""
    kept = sys.argv[:]
    try:
        yield
    finally:
        sys.argv[:] = kept


@contextmanager
def quickened() -> Iterator[None]:
    """TextWorld with its parsers memoised and its contexts copied flat (nothing in it changes what they hold)."""
    try:
        from textworld.envs.pddl import textgen
        from textworld.logic import Rule
    except ImportError as error:
        raise EnvironmentFailure(f"{NO_TEXTWORLD} ({error})") from error
    kept: Any = (textgen._parse_and_convert, textgen.copy_context, Rule.parse_conjunctive_query)
    parse = functools.lru_cache(maxsize=None)(kept[0])
    textgen._parse_and_convert = lambda *words, **named: copy.deepcopy(parse(*words, **named))
    textgen.copy_context = lambda context: {
        **context, "variables": dict(context["variables"]), "mapping": dict(context["mapping"])
    }  # fmt: skip
    Rule.parse_conjunctive_query = functools.lru_cache(maxsize=None)(kept[2])
    try:
        yield
    finally:
        textgen._parse_and_convert, textgen.copy_context, Rule.parse_conjunctive_query = kept
