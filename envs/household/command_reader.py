"""Command readers of ALFWorld's language: places and treatments of kinds of objects."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from envs.command_reader import AgentState, CommandReader, Fact, Reading, Step, StepEffect
from envs.household.observation_parser import ARRIVED, parse_carried, parse_effect, parse_places, parse_room
from envs.household.vocabulary import OPENABLE

_GO = "go to "
# Commands with an effect.
TAKE = re.compile(r"take (?P<thing>[a-z]+) \d+ from (?P<place>[a-z]+ \d+)")
PUT = re.compile(r"(?P<verb>move|put) (?P<thing>[a-z]+) \d+ (?P<link>to|in/on|in|on) (?P<place>(?P<kind>[a-z]+) \d+)")
TREAT = re.compile(r"(?P<verb>heat|cool|clean|slice) (?P<thing>[a-z]+) \d+ with(?: (?P<place>[a-z]+ \d+))?")
USE = re.compile(r"use (?P<thing>[a-z]+) \d+")
# The kind of thing that a goal in ALFWorld's words names.
SOUGHT = re.compile(
    r"(?:put|find|look at|examine|clean|heat|cool) (?:(?:a|an|some|two|the) )?(?:(?:clean|hot|cool) )?([a-z]+)"
)
_SEEN_AT = re.compile(r"(?:On the|The) (?P<place>[a-z]+ \d+)(?:, you see| is open)")
_GONE = re.compile(r"go to (?P<place>[a-z]+ \d+)")


def first_taken(actions: Sequence[str]) -> tuple[str, str] | None:
    """Return (kind of object, place) of the first thing taken, e.g. ("mug", "cabinet 2")."""
    found = next((m for a in actions if (m := TAKE.fullmatch(a))), None)
    return (found["thing"], found["place"]) if found else None


def location(scene: str, thing: str, place: str) -> str:
    return f"in {scene} the {thing} was in {place}" if scene else f"the {thing} was in {place}"


def subgoals(plan: Sequence[str]) -> list[str]:
    """List the remaining subgoals in the Brief State's words: find mug, heat mug, put mug in cabinet."""
    goals: list[str] = []
    for command in plan:
        if m := TAKE.fullmatch(command):
            goals.append(f"find {m['thing']}")
        elif m := PUT.fullmatch(command):
            goals.append(f"put {m['thing']} in {m['kind']}")
        elif m := TREAT.match(command):
            goals.append(f"{m['verb']} {m['thing']}")
        elif m := USE.fullmatch(command):
            goals.append(f"use {m['thing']}")
    return goals


@lru_cache(maxsize=1 << 12)
def _look(text: str) -> Reading:
    """Read a text; the same ones come again and again."""
    arrived = ARRIVED.search(text)
    at = arrived["place"] if arrived else None
    return Reading(at, parse_carried(text), views=tuple(parse_places(text)), places=parse_room(text))


class HouseholdReader(CommandReader):
    """Reader for generated homes, where memory gives places of objects in the same home only; appliances are always in
    view."""

    levels = ("place", "subgoal", "command")
    follows_recipes = False
    lists_places = True
    reads_views = True

    def look(self, text: str) -> Reading:
        """Read the place that the agent reached, the contents of places, the listed places and what is carried."""
        return _look(text)

    def read(self, state: AgentState, step: Step) -> Reading:
        """Read also the step's effect, and the place that a command leads to."""
        if step.refused:
            return Reading()
        seen, done, at = _look(step.feedback), parse_effect(step.feedback), None
        if not step.feedback.startswith("Nothing") and (gone := _GONE.fullmatch(step.action)):
            at = gone["place"]
        held = {"take": (done.thing,), "put": ()}.get(done.verb, seen.held) if done else seen.held
        return Reading(seen.at or at, held, done, seen.views, seen.places)

    def phrase(self, effect: StepEffect) -> str:
        """Write an effect in words; lamps are used."""
        return super().phrase(replace(effect, verb="use") if effect.verb in ("on", "off") else effect)

    def goal_things(self, goal: str, known: Iterable[str] = ()) -> frozenset[str]:
        """Return the kind of thing that a goal in ALFWorld's words seeks; for another goal, those of `known` in it."""
        named = SOUGHT.search(goal.lower())
        return frozenset({named[1]}) if named else super().goal_things(goal, known)

    def fetch(self, thing: str, place: str) -> tuple[str, ...]:
        """Return the command that takes a thing, the first one of a kind."""
        return (f"take {thing if thing[-1:].isdigit() else f'{thing} 1'} from {place}",)

    def facts(self, actions: Sequence[str]) -> list[Fact]:
        """List taken things with their places."""
        return [Fact(f"find {m['thing']}", m["place"]) for a in actions if (m := TAKE.fullmatch(a))]

    def need(self, plan: Sequence[str]) -> Fact | None:
        """Return the next thing to find and its place."""
        first = subgoals(plan)[:1]
        return next((fact for fact in self.facts(plan) if [fact.need] == first), None)

    def subgoals(self, plan: Sequence[str], goal: str, shown: frozenset[str]) -> list[str]:
        """List the remaining subgoals, which need no other words than the goal's."""
        return subgoals(plan)

    def here(self, observation: str, history: Sequence[str]) -> frozenset[str]:
        """Return the places that the view shows as reached or open."""
        return frozenset(m["place"] for form in (_SEEN_AT, ARRIVED) for m in form.finditer(observation))

    def place_without(self, need: str, observation: str) -> str:
        """Return the visible place if it does not hold the thing."""
        seen = _SEEN_AT.search(observation)
        return "" if seen is None or re.search(rf"\b{self.thing(need)} \d", observation) else seen["place"]

    def put_place(self, action: str) -> tuple[str, str]:
        """Return the place and the thing of a put."""
        put = PUT.fullmatch(action)
        return (put["place"], put["thing"]) if put else ("", "")

    def searched(self, history: Sequence[str]) -> frozenset[str]:
        """Return the places that the agent visited and opened."""
        opened = (c.removeprefix("open ") for c in history if c.startswith("open "))
        return frozenset(place for place in opened if f"{_GO}{place}" in history)

    def thing(self, need: str) -> str:
        return need.removeprefix("find ")

    def sentence(self, scene: str, need: str, place: str) -> str:
        """Write a thing's place."""
        return location(scene, self.thing(need), place)

    def rationale(self, scene: str, actions: Sequence[str]) -> str:
        """Write the first thing's place."""
        fact = first_taken(actions)
        return location(scene, *fact) if fact else ""


class AlfworldReader(HouseholdReader):
    """Reader for real games, where places of objects in other scenes suggest where to look; lamps and appliances are
    needs, too."""

    scenes_alike = True

    def facts(self, actions: Sequence[str]) -> list[Fact]:
        """List the places of taken things, used lamps and treatments."""
        found, at = list[Fact](), ""
        for command in actions:
            if command.startswith(_GO):
                at = command.removeprefix(_GO)
            elif m := TAKE.fullmatch(command):
                found.append(Fact(f"find {m['thing']}", m["place"]))
            elif (m := USE.fullmatch(command)) and at:
                found.append(Fact(f"find {m['thing']}", at))
            elif (m := TREAT.fullmatch(command)) and m["place"]:
                found.append(Fact(m["verb"], m["place"]))
        return found

    def need(self, plan: Sequence[str]) -> Fact | None:
        """Return the thing, lamp or appliance that the next subgoal needs, and its place."""
        first = next((i for i, command in enumerate(plan) if subgoals([command])), len(plan))
        return next(iter(self.facts(plan[: first + 1])), None)

    def place_without(self, need: str, observation: str) -> str:
        """Return the visible place if it does not hold the thing; "" for an appliance."""
        return super().place_without(need, observation) if need.startswith("find ") else ""

    def searched(self, history: Sequence[str]) -> frozenset[str]:
        """Return the searched places, except those from which something was taken since: they may hold more."""
        done = set[str]()
        for command in history:
            if m := TAKE.fullmatch(command):
                done.discard(m["place"])
            elif command.startswith("open "):
                done.add(command.removeprefix("open "))
            elif command.startswith(_GO) and command.removeprefix(_GO).split()[0] not in OPENABLE:
                done.add(command.removeprefix(_GO))
        return frozenset(done)

    def similar_places(self, place: str, text: str) -> list[str]:
        """List the places of the same kind in `text`: countertop 1, countertop 2."""
        kind = re.escape(place.split()[0])
        return list(dict.fromkeys(re.findall(rf"\b{kind} \d+\b", text)))

    def sentence(self, scene: str, need: str, place: str) -> str:
        """Write a thing's place, or the appliance of a treatment."""
        if need.startswith("find "):
            return super().sentence(scene, need, place)
        return f"in {scene} {place} was used to {need}"

    def rationale(self, scene: str, actions: Sequence[str]) -> str:
        """Write each thing's place."""
        found = dict.fromkeys(fact for fact in self.facts(actions) if fact.need.startswith("find "))
        return "; ".join(self.sentence(scene, fact.need, fact.place) for fact in found)
