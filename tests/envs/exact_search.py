"""Exact search for the shortest solution of a household game, and walks to states to search from."""

from __future__ import annotations

import random

from envs.household.engine import Command, Engine
from envs.household.expert import plan
from envs.household.world import (
    LOOK,
    NOWHERE,
    TREATMENTS,
    TWO,
    State,
)


def shortest(engine: Engine, state: State, most: int) -> int | None:
    """Return the length of the shortest solution by breadth-first search; None above `most` commands.

    It omits commands that cannot help: looking, closing, carrying other things than the goal's (except putting them
    down), treatments that the goal does not require, and walking twice in a row.
    """
    if engine.won(state):
        return 0
    level = [(state, False)]
    seen: set[object] = set()
    for depth in range(1, most + 1):
        deeper: list[tuple[State, bool]] = []
        for at, walked in level:
            for text, command in engine.commands(at).items():
                if not helps(engine, at, command, walked):
                    continue
                then = at.copy()
                engine.step(then, text, {text: command})
                if engine.won(then):
                    return depth
                key = (position(engine, then), command[0] == "go to")
                if key not in seen and depth + missing(engine, then) <= most:
                    seen.add(key)
                    deeper.append((then, command[0] == "go to"))
        level = deeper
    return None


def helps(engine: Engine, state: State, command: Command, walked: bool) -> bool:
    verb, item, target = command
    match verb:
        case "go to":
            return not walked
        case "take":
            return bool(engine.candidates() >> item & 1)
        case "open":
            fits = state.held != NOWHERE and engine.fits(state.held, target)
            return fits or bool(state.contents[target] & engine.candidates())
        case "use":
            return bool(engine.lamps() >> item & 1)
        case "heat" | "cool" | "clean":
            return TREATMENTS.get(engine.game.goal.kind) == verb
        case _:
            return verb == "put"


def position(engine: Engine, state: State) -> object:
    """Return the parts of a state that decide the search; not, for example, the record of a thing "next to it"."""
    return (state.location, state.held, state.opened, state.toggled, engine.treated(state), tuple(state.contents))


def missing(engine: Engine, state: State) -> int:
    """Return a lower bound of the remaining commands."""
    kind, wanted = engine.game.goal.kind, engine.candidates()
    held = state.held != NOWHERE and bool(wanted >> state.held & 1)
    laid_aside = state.held != NOWHERE and not held
    if kind == LOOK:
        return (0 if held else 1 + laid_aside) + (not engine.lamps() & state.toggled)
    there = [
        mask & wanted
        for mask, place in zip(state.contents, engine.game.receptacles, strict=True)
        if place.type == engine.game.goal.receptacle_type
    ]
    if kind == TWO:
        lacking = 2 - max((min(2, mask.bit_count()) for mask in there), default=0)
        return 2 * lacking - held + laid_aside
    treat = kind in TREATMENTS and not engine.treated(state) & wanted
    put = not any(there)
    return max(1, treat + put + (0 if held or not (treat or put) else 1 + laid_aside))


def exhaustive(engine: Engine, state: State, most: int) -> int | None:
    """Return the same without omitting commands, for the smallest games only."""
    level, seen = [state], {position(engine, state)}
    for depth in range(most + 1):
        if any(engine.won(at) for at in level):
            return depth
        deeper: list[State] = []
        for at in level:
            for text in engine.commands(at):
                then = at.copy()
                engine.step(then, text)
                if position(engine, then) not in seen:
                    seen.add(position(engine, then))
                    deeper.append(then)
        level = deeper
    return None


def wander(engine: Engine, state: State, rng: random.Random) -> None:
    """Walk to an unsolved state by steps towards the goal and other steps."""
    share = rng.choice((0.0, 0.3, 0.6))
    for _ in range(rng.choice((0, 5, 15, 40))):
        before = state.copy()
        towards = plan(engine, state) if rng.random() < share else None
        commands = list(engine.commands(state))
        moving = [command for command in commands if command.split()[0] not in ("go", "look", "help", "examine")]
        engine.step(state, towards[0] if towards else rng.choice(moving if rng.random() < 0.6 else commands))
        if engine.won(state):
            for name in State.__slots__:
                setattr(state, name, getattr(before, name))
            return


def excess(engine: Engine, state: State) -> int:
    """Return the plan's length over the shortest one; assert that the plan wins with its last command."""
    commands = plan(engine, state)
    assert commands is not None
    end = state.copy()
    for position_, command in enumerate(commands):
        assert command in engine.commands(end), command
        engine.step(end, command)
        assert engine.won(end) == (position_ == len(commands) - 1)
    best = shortest(engine, state, len(commands))
    assert best is not None  # the search finds at least this solution
    return len(commands) - best
