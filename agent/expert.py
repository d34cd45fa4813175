"""The expert teacher: plays compiler (and executor) from the environment's own expert plan. Offline and deterministic.

It speaks about memory only when memory holds the fact: its guidance names the place that the right entry holds (same
scene, same kind of object), never the place that only the expert knows. It does not look at pictures: what only the
view shows is left to the soft tokens, which learn it from the action loss.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from agent.records import Episode
from compiler.brief_state import PLAN, BriefState, Create, Delete, Fold, Op, Update
from compiler.language import Emission, render
from compiler.records import Compilation, CompileRequest
from executor.prompt import ExecutorRequest
from executor.records import PAPER, Action, Grounding, Reads
from memory.entry import MemoryEntry

_TAKE = re.compile(r"take (?P<thing>[a-z]+) \d+ from (?P<place>[a-z]+ \d+)")
_PUT = re.compile(r"(?:move|put) (?P<thing>[a-z]+) \d+ (?:to|in/on|in|on) (?P<place>(?P<kind>[a-z]+) \d+)")
_TREAT = re.compile(r"(?P<verb>heat|cool|clean|slice) (?P<thing>[a-z]+) \d+ with")
_USE = re.compile(r"use (?P<thing>[a-z]+) \d+")
_SEEN_AT = re.compile(r"(?:On the|The) (?P<place>[a-z]+ \d+)(?:, you see| is open)")
_ARRIVED = re.compile(r"You arrive at (?P<place>[a-z]+ \d+)\.")


def taken(actions: Sequence[str]) -> tuple[str, str] | None:
    """Return (kind of object, place) of the first thing taken, e.g. ("mug", "cabinet 2")."""
    found = next((m for a in actions if (m := _TAKE.fullmatch(a))), None)
    return (found["thing"], found["place"]) if found else None


def rationale(scene: str, actions: Sequence[str]) -> str:
    """Say why an episode succeeded: where its object was. The sentence that a later episode looks up."""
    fact = taken(actions)
    return location(scene, *fact) if fact else ""


def location(scene: str, thing: str, place: str) -> str:
    return f"in {scene} the {thing} was in {place}" if scene else f"the {thing} was in {place}"


def subgoals(plan: Sequence[str]) -> list[str]:
    """List what is left to do, as the Brief State names it: find mug, heat mug, put mug in cabinet."""
    goals: list[str] = []
    for command in plan:
        if m := _TAKE.fullmatch(command):
            goals.append(f"find {m['thing']}")
        elif m := _PUT.fullmatch(command):
            goals.append(f"put {m['thing']} in {m['kind']}")
        elif m := _TREAT.match(command):
            goals.append(f"{m['verb']} {m['thing']}")
        elif m := _USE.fullmatch(command):
            goals.append(f"use {m['thing']}")
    return goals


def right_entry(goal: str, memory: Sequence[MemoryEntry], thing: str) -> MemoryEntry | None:
    """Find the entry that answers "where is `thing`?": same scene as the goal's, and it took a `thing`."""
    for entry in memory:
        fact = taken(entry.provenance.actions)
        if fact and fact[0] == thing and goal.startswith(f"in {entry.provenance.scene}: "):
            return entry
    return None


def entry_for_goal(goal: str, memory: Sequence[MemoryEntry]) -> MemoryEntry | None:
    """Find the right entry for a goal whose words name its object."""
    words = re.findall(r"[a-z]+", goal.lower())
    return next((e for word in words if (e := right_entry(goal, memory, word))), None)


@dataclass(slots=True)
class ExpertTeacher:
    """A `Compiler` that knows the expert's plan. `entry="random"` is the control that cites a wrong entry's place."""

    entry: Literal["right", "random"] = "right"
    seed: int = 0

    def compile(self, requests: Sequence[CompileRequest]) -> list[Compilation]:
        made = [self.emission(request) for request in requests]
        return [Compilation(render(e), e, request=r) for e, r in zip(made, requests, strict=True)]

    def rationales(self, episodes: Sequence[Episode]) -> list[str]:
        """Say why each episode succeeded, or how it stopped."""
        return [
            rationale(episode.scene, [step.action for step in episode.steps])
            if episode.success
            else str(episode.stop_reason)
            for episode in episodes
        ]

    def emission(self, request: CompileRequest) -> Emission:
        plan = (request.expert() if request.expert else None) or []
        fact = taken(plan)
        thing = fact[0] if fact and subgoals(plan)[:1] == [f"find {fact[0]}"] else None  # still to be found
        ops = _progress(request.state, plan, request.history) if request.state is not None else []
        if request.state is not None:
            ops += [*_filled(request.state, request.history), *(_ruled_out(request, thing) if thing else ())]
        guidance = self._guidance(request, thing) if thing is not None else None
        return Emission(*(guidance or ("", "")), tuple(ops))

    def _guidance(self, request: CompileRequest, thing: str) -> tuple[str, str] | None:
        """Give (guidance, reason) while the object is still to be found and the cited place is not ruled out."""
        entry = right_entry(request.goal, request.memory, thing)
        if self.entry == "random":
            others = [e for e in request.memory if e is not entry and taken(e.provenance.actions)]
            entry = random.Random(f"{self.seed} {request.goal}").choice(others) if others else None
        fact = taken(entry.provenance.actions) if entry else None
        if fact is None or entry is None:
            return None
        place = fact[1]
        here = {m["place"] for m in (*_SEEN_AT.finditer(request.observation), *_ARRIVED.finditer(request.observation))}
        visited = f"go to {place}" in request.history
        if place in here or (visited and f"open {place}" in request.history) or _lacks(request.state, place, thing):
            return None
        scene = request.goal.split(":")[0].removeprefix("in ") if request.goal.startswith("in ") else ""
        return f"go to {place}", location(scene, thing, place)


def _progress(state: BriefState, plan: Sequence[str], history: Sequence[str]) -> list[Op]:
    """Keep the state's subgoals in step with what is left of the plan."""
    left = subgoals(plan)
    known = [state.current, *state.pending] if state.current else []
    if not left:
        return []
    if not known:
        return [] if state.completed else [Create(PLAN, "; ".join(left))]
    done = len(known) - len(left)
    if done >= 0 and known[done:] == left:
        return [Fold(history[-1] if history else known[0])] * done
    return [Update(PLAN, "; ".join(left))]


def _ruled_out(request: CompileRequest, thing: str) -> list[Op]:
    """Note that the place in view does not hold the thing, so that it is not searched again."""
    seen = _SEEN_AT.search(request.observation)
    if seen is None or re.search(rf"\b{thing} \d", request.observation) or _lacks(request.state, seen["place"], thing):
        return []
    known = request.state.belief(seen["place"]) if request.state is not None else None
    if known is None:
        return [Create(seen["place"], f"no {thing}")]
    return [Update(seen["place"], f"{known}, no {thing}")]


def _filled(state: BriefState, history: Sequence[str]) -> list[Op]:
    """Drop what the last action made false: a place lacks no longer what was put there."""
    put = _PUT.fullmatch(history[-1]) if history else None
    return [Delete(put["place"])] if put and _lacks(state, put["place"], put["thing"]) else []


def _lacks(state: BriefState | None, place: str, thing: str) -> bool:
    """Tell whether the state says that the place does not hold the thing."""
    known = state.belief(place) if state is not None else None
    return known is not None and f"no {thing}" in known.split(", ")


@dataclass(slots=True)
class ExpertExecutor:
    """Acts on the expert's plan; with probability `noise` it does something else instead, so that rows also cover
    states off the shortest path. `Action.text` is always the expert's own choice: the label.

    Chance depends on seed, goal and history alone: an episode is the same whichever others are played beside it."""

    noise: float = 0.0
    seed: int = 0
    accepts_soft: bool = False
    sees_images: bool = False
    reads: Reads = PAPER

    def act(self, requests: Sequence[ExecutorRequest]) -> list[Action]:
        return [self._act(request) for request in requests]

    def _act(self, request: ExecutorRequest) -> Action:
        plan = request.expert() if request.expert else None
        label = plan[0] if plan else "look"
        detours = [c for c in request.admissible or () if c.startswith("go to ") and c != label]
        chance = random.Random(f"{self.seed} {request.goal} {request.history}")
        wander = detours and chance.random() < self.noise
        action = chance.choice(detours) if wander else label
        return Action(action, Grounding.CHOICE, label, (), 0, 0)
