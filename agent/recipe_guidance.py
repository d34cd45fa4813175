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

from agent.leads import of_scene
from agent.records import is_refusal
from compiler.brief_state import MAX_CHARACTERS, Create, Op, Update
from compiler.language import Emission
from compiler.records import CompileRequest
from envs.command_reader import CommandReader
from memory.entry import MemoryEntry, Provenance

Pair = tuple[str, str]
STEP = "last step"  # belief: the last step of the recipe that was done


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
    ops, last = _last_step(reader, request)
    successes = past_successes(request.goal, request.memory)
    episodes = [[reader.adapted(a, past.goal, request.goal) for a in past.actions] for past in successes]
    if entry == "random":
        steps = [step for _, step in step_pairs(reader, episodes)]
        drawn = random.Random(f"{seed} {request.goal} {len(request.history)}").choice(steps or [""])
        return Emission(drawn, because((last, drawn)), ops) if drawn else Emission(ops=ops)
    pairs = pairs_after(reader, step_pairs(reader, episodes), last)
    votes = Counter(following for _, following in pairs)
    known = words_of(" ".join((request.goal, request.observation, last, *request.history[-1:])))
    likely = [step for step, n in votes.most_common() if n > 1 or words_of(step) <= known]
    if not likely:
        return Emission(ops=ops)
    pair = next(p for p in pairs if p[1] == likely[0])
    guidance = (_way_to(reader, request, episodes, pair) if entry == "right" else "") or pair[1]
    repeated = guidance in request.history[-1:] and (is_refusal(request.observation) or guidance != pair[1])
    return Emission(ops=ops) if repeated else Emission(guidance, because(pair), ops)


def _last_step(reader: CommandReader, request: CompileRequest) -> tuple[tuple[Op, ...], str]:
    """Return the operations that note the last step done, and that step; "" before the first."""
    state, command = request.state, request.history[-1:]
    if state is None:
        return (), next(reversed(reader.steps(request.history)), "")
    known = state.belief(STEP) or ""
    if not reader.steps(command) or is_refusal(request.observation) or known == command[0]:
        return (), known
    step = command[0][:MAX_CHARACTERS]
    return (Update(STEP, step) if known else Create(STEP, step),), command[0]


def _way_to(reader: CommandReader, request: CompileRequest, episodes: Sequence[Sequence[str]], pair: Pair) -> str:
    """Return the command that goes where an episode did the pair's second step; "" if the agent is there, or if no
    episode says where that was."""
    here = reader.here(request.observation, request.history)
    for commands in episodes:
        steps = [i for i, command in enumerate(commands) if reader.steps([command])]
        for before, i in pairwise([-1, *steps]):
            if pair != (commands[before] if before >= 0 else "", commands[i]):
                continue
            facts = reader.facts(commands[: i + 1])
            place = facts[-1].place if len(facts) > len(reader.facts(commands[:i])) else ""
            return "" if not place or not here or place in here else reader.way(place, next(iter(here)))
    return ""
