"""One episode of a native game, with the step limit, infos and expert of alfworld's wrappers."""

import importlib.util
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from envs.alfworld.games import WordingName, opening, read_game
from envs.household import expert
from envs.household.engine import Engine
from envs.household.world import NOWHERE, bits


def game_order(files: Sequence[str], seed: int | None) -> Iterator[str]:
    """Yield games forever, reshuffled every round as TextWorld does."""
    draw, order = np.random.RandomState(seed), list(files)
    while True:
        draw.shuffle(order)
        yield from order


class Episode:
    """One episode of a game.

    Args:
        path: the game's file.
        limit: maximum number of commands; 0: no limit.
        expert_type: one of EXPERTS, or None.
        shuffled: shuffle the numbers in things' names with Python's global `random`, as alfworld does.
        wording: words of commands and answers (`games.WORDINGS`).

    Raises:
        EnvironmentFailure: the file cannot be played.
    """

    def __init__(
        self,
        path: str,
        limit: int = 0,
        expert_type: str | None = None,
        shuffled: bool = False,
        wording: WordingName = "game",
    ) -> None:
        self.path, self._left = path, limit or -1
        self.engine = Engine(read_game(Path(path), wording, random.shuffle)) if shuffled else _engine(path, wording)
        self.state = self.engine.reset()
        self.text, self.won, self.done = opening(self.engine), False, False
        self._expert = None if expert_type is None else EXPERTS[expert_type](path)
        self._look("")

    def step(self, command: str) -> None:
        """Carry out a command, unless the episode is over."""
        if self.done:
            return
        self.text = self.engine.step(self.state, command, self._commands)
        self._left -= 1
        self.won = self.engine.won(self.state)
        self.done = self.won or not self._left
        self._look(command)

    def infos(self) -> dict[str, Any]:
        """Return alfworld's infos, and the share of the goal's conditions that hold."""
        infos = {
            "admissible_commands": list(self.admissible),
            "won": self.won,
            "goal_condition_success_rate": self.engine.progress(self.state),
            "extra.gamefile": self.path,
        }
        return infos if self._expert is None else {**infos, "extra.expert_plan": list(self._plan)}

    def _look(self, command: str) -> None:
        self._commands = self.engine.commands(self.state)
        self.admissible = sorted(self._commands)
        self._plan = [] if self._expert is None else self._expert.plan(self, command)


@lru_cache(maxsize=256)  # since reading a game takes longer than playing it
def _engine(path: str, wording: WordingName) -> Engine:
    return Engine(read_game(Path(path), wording))


# Experts ---------------------------------------------------------------------------------------------------


class Expert(Protocol):
    """An expert of one game, which observes the game from its start and advises commands."""

    def __init__(self, path: str) -> None: ...

    def plan(self, episode: Episode, command: str) -> list[str]:
        """Return commands for the state after `command` ("" at the start)."""
        ...


class Planner:
    """The native engine's planner, which advises a near-shortest plan; [] if there is none."""

    def __init__(self, path: str) -> None:
        pass

    def plan(self, episode: Episode, command: str) -> list[str]:
        return expert.plan(episode.engine, episode.state) or []


class Handcoded:
    """alfworld's handcoded expert (extra `alfworld`), which reads the native engine's state.

    It advises one command, or "look" if its advice is impossible or its rules raise, which ends the run in alfworld.
    """

    MAX_STEPS = 200  # as in alfworld's wrapper

    def __init__(self, path: str) -> None:
        from alfworld.agents.expert import HandCodedTWAgent

        self._agent: Any = HandCodedTWAgent(max_steps=self.MAX_STEPS)
        self._agent.reset(path)

    @staticmethod
    def check() -> None:
        """Raise ModuleNotFoundError if alfworld is not installed."""
        if importlib.util.find_spec("alfworld") is None:
            raise ModuleNotFoundError(
                "the handcoded expert needs the package alfworld: uv sync --extra alfworld, or set "
                "env.expert_type to planner, the native engine's expert"
            )

    def plan(self, episode: Episode, command: str) -> list[str]:
        if not command:
            self._agent.observe(episode.text)
            return ["look"]
        shown = {"feedback": episode.text, "admissible_commands": episode.admissible, "facts": _facts(episode)}
        try:
            advised = self._agent.act(shown, 0, episode.won, command)
        except Exception:  # errors in alfworld's rules
            return ["look"]
        return [advised if advised in episode.admissible else "look"]


EXPERTS: Mapping[str, type[Expert]] = {"handcoded": Handcoded, "planner": Planner}


class TextWorldFact(NamedTuple):
    """A fact in the form that the handcoded expert reads from TextWorld."""

    name: str
    names: tuple[str, ...]


def _facts(episode: Episode) -> list[TextWorldFact]:
    """List the facts that the handcoded expert reads: places of things, the held one, and hot, cool and clean ones."""
    game, state = episode.engine.game, episode.state
    placed = zip(game.receptacles, state.contents, strict=True)
    facts = [
        TextWorldFact("inreceptacle", (game.items[i].name, place.name)) for place, mask in placed for i in bits(mask)
    ]
    conditions = {"ishot": state.hot, "iscool": state.cool, "isclean": state.clean}
    facts += [TextWorldFact(name, (game.items[i].name,)) for name, mask in conditions.items() for i in bits(mask)]
    if state.held != NOWHERE:
        facts.append(TextWorldFact("holds", ("agent", game.items[state.held].name)))
    return facts
