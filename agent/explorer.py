"""The explorer: the environment's expert without its knowledge of where things are.

It fills banks with episodes like an agent's own, which search and meet dead ends (`memory.experience_actor=explorer`).
The expert's plan tells it one thing only: what is due next (a thing to take, a lamp to use, a treatment, a put). Where
that is, it knows from the goal, the views of this episode and the possible commands:

- A thing or lamp that no view has shown is searched for: the places of the first view, in an order that depends on seed
  and task, each once, opened where it is closed.
- Of things in view, now or earlier, it takes the one that it saw first, unless it has taken that one before.
- A thing is put into the place where this episode has put such a thing already, else into the first listed place of
  the goal's kind. A thing that the goal does not want goes back to where it was taken from.

A treatment follows the plan, because appliances are listed in the first view. Where none of this is possible, because
every place has been searched in vain, the plan decides.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from agent.records import EpisodeContext
from envs.command_reader import kind
from envs.household.command_reader import PUT, TAKE, TREAT, USE
from envs.household.observation_parser import parse_effect, parse_places, parse_room
from executor.prompt import ExecutorRequest
from executor.records import PAPER_VIEW, Action, ExecutorView, Grounding

_GO = "go to "


@dataclass(slots=True)
class _Seen:
    """What one episode has shown so far."""

    order: tuple[str, ...]  # the places of the first view, as they are searched
    listed: tuple[str, ...]  # the same, as they are listed
    steps: int = 0
    at: str = ""  # where the agent is
    held: str = ""  # the thing in hand
    searched: set[str] = field(default_factory=set)
    things: dict[str, str] = field(default_factory=dict)  # thing -> place where it was last in view, first seen first
    taken: dict[str, str] = field(default_factory=dict)  # thing -> place where it was taken from
    put: dict[str, str] = field(default_factory=dict)  # kind of thing -> place where it was put

    def observe(self, last: str, view: str) -> None:
        """Read the answer to the last command ("" before the first)."""
        if last.startswith(_GO) and not view.startswith("Nothing"):
            self.at = last.removeprefix(_GO)
        for place in parse_places(view):
            self.searched.add(place.at)
            gone = [t for t, at in self.things.items() if at == place.at and t not in (place.seen or ())]
            for thing in gone:
                del self.things[thing]
            self.things |= dict.fromkeys(place.seen or (), place.at)
        done = parse_effect(view)
        if done is not None and done.verb == "take":
            self.things.pop(done.thing, None)
            self.taken[done.thing], self.held = done.place, done.thing
        elif done is not None and done.verb == "put":
            self.things[done.thing] = self.put[kind(done.thing)] = done.place
            self.held = ""


@dataclass(slots=True)
class ExplorerExecutor:
    """Acts as the expert would if it did not know where things are. Its actions depend on seed, task and views alone.

    Args:
        seed: of the order in which places are searched.
    """

    needs_expert: ClassVar[bool] = True
    batched: ClassVar[bool] = False
    seed: int = 0
    accepts_soft: bool = False
    sees_images: bool = False
    reads: ExecutorView = PAPER_VIEW
    _seen: dict[str, _Seen] = field(default_factory=dict, repr=False)  # by task

    def act(self, requests: Sequence[ExecutorRequest], contexts: Sequence[EpisodeContext] = ()) -> list[Action]:
        """Choose one action per request, in order. Raises: ValueError, if the expert knows no way to the goal."""
        return [self._act(request, context) for request, context in zip(requests, contexts, strict=True)]

    def _act(self, request: ExecutorRequest, context: EpisodeContext) -> Action:
        if context.plan is None and not request.history:
            raise ValueError("the environment's expert knows no way to the goal")  # nothing to learn from this episode
        seen = self._observe(request, context.task_id)
        plan = list(context.plan or ["look"])
        action = _next(plan, request, seen)
        return Action(action, Grounding.CHOICE, action)

    def _observe(self, request: ExecutorRequest, task_id: str) -> _Seen:
        """Return what the episode has shown, with the current view."""
        if not request.history:
            places = parse_room(request.observation)
            order = sorted(places)
            random.Random(f"{self.seed} {task_id}").shuffle(order)
            self._seen[task_id] = _Seen(tuple(order), places)
        seen = self._seen[task_id]
        if seen.steps != len(request.history):
            raise ValueError(f"task {task_id} is played twice at a time: an explorer keeps the views of one episode")
        seen.steps += 1
        seen.observe(request.history[-1] if request.history else "", request.observation)
        return seen


def _next(plan: Sequence[str], request: ExecutorRequest, seen: _Seen) -> str:
    """Return the command that serves what is due next."""
    possible = request.admissible or ()
    for command in plan:
        take = TAKE.fullmatch(command)
        if due := take or USE.fullmatch(command):
            return _fetch(due["thing"], takes=take is not None, possible=possible, seen=seen) or plan[0]
        if put := PUT.fullmatch(command):
            return _bring(put["thing"], put["kind"], request, seen) or plan[0]
        if TREAT.match(command):
            break
    return plan[0]


def _fetch(wanted: str, takes: bool, possible: Sequence[str], seen: _Seen) -> str:
    """Take a thing of this kind, or use a lamp: where one was in view, else search; "" if every place was searched."""
    for thing, place in list(seen.things.items()):
        if kind(thing) != wanted or (takes and thing in seen.taken):
            continue
        command = f"take {thing} from {place}" if takes else f"use {thing}"
        if command in possible:
            return command
        if (way := _reach(place, possible, seen)) in possible:
            return way
    return _search(possible, seen)


def _bring(thing: str, target: str, request: ExecutorRequest, seen: _Seen) -> str:
    """Put the held thing down: where the goal wants it, else where it came from; "" if that is not possible."""
    possible, held = request.admissible or (), seen.held
    wanted = target in request.goal.split()
    fitting = [place for place in seen.listed if kind(place) == target] if wanted else [seen.taken.get(held, "")]
    place = seen.put.get(thing, "") if seen.put.get(thing, "") in fitting else next(iter(fitting), "")
    puts = [c for c in possible if (put := PUT.fullmatch(c)) and put["thing"] == thing and put["place"] == place]
    way = _reach(place, possible, seen)
    return puts[0] if puts else way if way in possible else ""


def _search(possible: Sequence[str], seen: _Seen) -> str:
    """Open the place here, or go to the next place that was not searched; "" if there is none."""
    here = seen.at
    if here and here not in seen.searched:
        if (opened := f"open {here}") in possible:
            return opened
        seen.searched.add(here)
    fresh = (f"{_GO}{place}" for place in seen.order if place not in seen.searched)
    return next((way for way in fresh if way in possible), "")


def _reach(place: str, possible: Sequence[str], seen: _Seen) -> str:
    """Return the command that leads to a place, or opens it where the agent is there."""
    return f"open {place}" if seen.at == place or f"{_GO}{place}" not in possible else f"{_GO}{place}"
