"""Guidance for recipes: the step that followed in past episodes of the task, for environments whose tasks repeat.

Past episodes are aligned by the last step done, word for word or else by its shape (`CommandReader.shape`). The
guidance is the step that most of them did next, in the words of the most similar episode and with this goal's things.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from agent.errand_guidance import Notes
from agent.leads import of_scene
from agent.records import is_refusal
from compiler.brief_state import MAX_CHARACTERS, BriefState
from compiler.language import Emission
from compiler.records import CompileRequest
from envs.command_reader import CommandReader
from memory.entry import MemoryEntry, Provenance

Pair = tuple[str, str]
STEP, PLACE = "last step", "place"  # beliefs: the last step of the recipe that was done, and where the agent is


def past_successes(goal: str, memory: Sequence[MemoryEntry]) -> list[Provenance]:
    """List the successful episodes of the scene."""
    return [entry.provenance for entry in memory if entry.provenance.success and of_scene(goal, entry)]


def step_pairs(reader: CommandReader, episodes: Sequence[Sequence[str]]) -> list[Pair]:
    """List every two consecutive steps of each episode; "" precedes the first."""
    return [pair for commands in episodes for pair in pairwise(["", *reader.steps(commands)])]


def pairs_after(reader: CommandReader, pairs: Sequence[Pair], last: str) -> list[Pair]:
    """List the pairs that begin with the last step, word for word or else with its shape."""
    shape = reader.shape
    return [p for p in pairs if p[0] == last] or [p for p in pairs if shape(p[0]) == shape(last)]


def because(pair: Pair) -> str:
    """Say what past episodes did here."""
    return f"after {pair[0]} came {pair[1]}" if pair[0] else f"it began with {pair[1]}"


def words_of(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", text.lower()))


def recipe_emission(
    reader: CommandReader, request: CompileRequest, entry: Literal["right", "random", "none"] = "right", seed: int = 0
) -> Emission:
    """Say which step most past episodes did next, or the way to the place where they did it; note the last step.

    Args:
        entry: "random": a control, which says any step of any entry. "none": another, which names no places.
        seed: of the random step.
    """
    successes = past_successes(request.goal, request.memory)
    episodes = [[reader.adapted(a, past.goal, request.goal) for a in past.actions] for past in successes]
    recipe = step_pairs(reader, episodes)
    notes = Notes(request.state or BriefState(request.goal))
    last, here = _last_step(reader, request, recipe), _place(reader, request)
    notes.put(STEP, last[:MAX_CHARACTERS])
    notes.put(PLACE, here[:MAX_CHARACTERS])
    ops = tuple(notes.ops) if request.state else ()
    if entry == "random":
        steps = [step for _, step in recipe]
        drawn = random.Random(f"{seed} {request.goal} {len(request.history)}").choice(steps or [""])
        return Emission(drawn, because((last, drawn)), ops) if drawn else Emission(ops=ops)
    pairs = pairs_after(reader, recipe, last)
    votes = Counter(following for _, following in pairs)
    known = words_of(" ".join((request.goal, request.observation, last, *request.history[-1:])))
    likely = [step for step, n in votes.most_common() if n > 1 or words_of(step) <= known]
    if not likely:
        return Emission(ops=ops)
    pair = next(p for p in pairs if p[1] == likely[0])
    place = _place_of(reader, episodes, pair) if entry == "right" and here else ""
    guidance, reason = pair[1], because(pair)
    if place and place != here:
        guidance, reason = reader.way(place, here), f"the next step was in {place}"
    repeated = guidance in request.history[-1:] and (is_refusal(request.observation) or guidance != pair[1])
    return Emission(ops=ops) if repeated else Emission(guidance, reason, ops)


def _last_step(reader: CommandReader, request: CompileRequest, recipe: Sequence[Pair]) -> str:
    """Return the last step of the recipe that was done; "" before the first.

    A command is a step of the recipe if it is in it word for word, or if it has the shape of one that is due.
    """
    state, known = request.state, {step for _, step in recipe}
    last = (state.belief(STEP) or "") if state else ""
    commands = request.history[-1:] if state else request.history
    for command in () if state and is_refusal(request.observation) else reader.steps(commands):
        due = (step for _, step in pairs_after(reader, recipe, last))
        if command in known or reader.shape(command) in map(reader.shape, due):
            last = command
    return last


def _place(reader: CommandReader, request: CompileRequest) -> str:
    """Return where the agent is; "" if it is not known."""
    state, done = request.state, request.history
    if state:
        done = () if is_refusal(request.observation) else done[-1:]
    return next(iter(reader.here(request.observation, done)), (state.belief(PLACE) or "") if state else "")


def _place_of(reader: CommandReader, episodes: Sequence[Sequence[str]], pair: Pair) -> str:
    """Return where an episode did the pair's second step; "" if none says so."""
    for commands in episodes:
        steps = [i for i, command in enumerate(commands) if reader.steps([command])]
        for before, i in pairwise([-1, *steps]):
            if pair == (commands[before] if before >= 0 else "", commands[i]):
                facts = reader.facts(commands[: i + 1])
                return facts[-1].place if len(facts) > len(reader.facts(commands[:i])) else ""
    return ""
