"""KARMA's planner: a program of skills from one prompt, executed in open loop (sections 3.1 and 3.5).

A rule or a language model writes the program from goal, memory and places. A thing whose place memory names gets
`GoToObject`; another one gets `Explore`, which visits places until the thing is in view: with a scene graph area by
area, by how likely the thing is there, without one in random order. Where memory is wrong, the program is stuck
(`feedback: false`, as in the paper) or explores.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import prod
from typing import Any

from envs.command_reader import kind
from envs.household.command_reader import PUT, TAKE
from envs.household.placement_prior import carried, likelihood
from envs.household.vocabulary import ITEM_TYPES, TRAITS
from executor.prompt import ExecutorRequest
from executor.records import PAPER_VIEW, Action, ExecutorView, Grounding
from executor.scripted import CHARACTERS, GoalParts, kind_and_number
from executor.skills import SKILLS, ProgramProgress, Skill, program_progress, read_program
from lm.answer_cache import EndpointStop
from lm.endpoint import Endpoint, EndpointFailure
from memory.karma.graph import SceneGraph, read_graph
from memory.karma.units import HAND, ObjectUnit, read_unit
from memory.trajectory import compact_text
from runtime.parsing import parse_json_object, strings_in

_GO, STUCK = "go to ", "look"
_VAGUE = re.compile(r"put the (hot|cool|clean|moved) ([a-z ]+) in ([a-z]+)")
_CONDITION = {"hot": "heated", "cool": "cooled", "clean": "cleaned"}
_TREATED = {"heat": "heated", "cool": "cooled", "clean": "cleaned"}
_WAS = re.compile(r"\bthe ([a-z]+) was in ([a-z]+ \d+)")  # a place as teachers cite it
_LAMP = re.compile(r"\b(desklamp|floorlamp)\b")
PLAN_TOKENS = 512


@dataclass(frozen=True, slots=True)
class SkillPlan:
    """A program, and optionally the areas to explore, from likely to unlikely."""

    program: tuple[Skill, ...]
    areas: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannerInput:
    """Input of a planner: goal, memory and admissible commands."""

    goal: str
    memory: str
    commands: tuple[str, ...]

    @classmethod
    def of(cls, request: ExecutorRequest) -> PlannerInput:
        """Extract the situation from a request. Raises: ValueError, if it lists no commands."""
        if request.admissible is None:
            raise ValueError("a program of skills needs an environment that lists its commands")
        goal = request.goal.partition(": ")[2] if request.goal.startswith("in ") else request.goal
        d = request.delivered
        memory = [d.memory, d.reason, *d.guidance.split(" / ")]
        return cls(goal, "\n".join(filter(None, memory)), tuple(request.admissible))

    @property
    def _examinable(self) -> list[str]:
        return [c.removeprefix("examine ") for c in self.commands if c.startswith("examine ")]

    @property
    def here(self) -> list[str]:
        """List the places here: they can be examined, and not carried."""
        return [name for name in self._examinable if kind(name) not in carried()]

    @property
    def held(self) -> str:
        """Return the thing in hand: it can be examined, and carried; "" without one."""
        return next((name for name in self._examinable if kind(name) in carried()), "")

    @property
    def places(self) -> list[str]:
        """List all places, in an order that does not depend on the current one."""
        return sorted(
            {*self.here, *(c.removeprefix(_GO) for c in self.commands if c.startswith(_GO))}, key=kind_and_number
        )

    @property
    def units(self) -> list[ObjectUnit]:
        """List the places of things in memory: its units, the last put or take of trajectories, and the citations of
        compiled guidance."""
        found = list[ObjectUnit]()
        for line in "\n".join(map(compact_text, self.memory.split("\n\n"))).split("\n"):
            if unit := read_unit(line):
                found.append(unit)
            elif " ; " in line:
                found += _units_of(line.split(" ; "))
            elif citation := _WAS.search(line):
                found.append(ObjectUnit(citation[1], citation[2]))
        return found


def _puts(command: str, thing: str) -> bool:
    return PUT.fullmatch(command) is not None and command.split(" ", 1)[1].startswith(f"{thing} ")


def _units_of(actions: Sequence[str]) -> list[ObjectUnit]:
    last = dict[str, str]()
    for action in actions:
        if m := PUT.fullmatch(action) or TAKE.fullmatch(action):
            last[" ".join(action.split()[1:3])] = m["place"]
    return [ObjectUnit(thing, place) for thing, place in last.items()]


# -- planning by rule -------------------------------------------------------------------------------------------------


def plan_by_rule(now: PlannerInput) -> SkillPlan:
    """Write the program of a goal in ALFWorld's words: locate, pick up, treat (unless memory says that it is done), go
    to the target, put; or, with a lamp, switch it on."""
    vague = _VAGUE.fullmatch(now.goal)
    wanted = GoalParts("", "|".join(alike(vague[2])), vague[3]) if vague else GoalParts.of(now.goal)
    condition = _CONDITION.get(vague[1], "") if vague else ""
    lamp = m[1] if (m := _LAMP.search(now.goal)) else ""
    fits = lambda unit: unit.type in wanted.thing.split("|") and (not condition or condition in unit.states)
    known = [unit for unit in now.units if fits(unit)]
    program = list[Skill]()
    for number in range(2 if wanted.two else 1):
        unit = known[number] if number < len(known) else None
        program += _leg(unit, wanted, lamp)
    return SkillPlan(tuple(program))


def _leg(unit: ObjectUnit | None, wanted: GoalParts, lamp: str) -> list[Skill]:
    """Write the skills that fetch, treat and put one thing."""
    thing = unit.id if unit else wanted.thing
    known = unit is not None and unit.place != HAND
    program = [Skill("GoToObject", unit.place) if unit and known else Skill("Explore", wanted.thing)]
    program.append(Skill("PickupObject", thing))
    if wanted.treat and not (unit and _TREATED[wanted.treat] in unit.states):
        program += [Skill("GoToObject", wanted.appliance), Skill(f"{wanted.treat.title()}Object", thing)]
    if lamp:
        return [*program, Skill("Explore", lamp), Skill("SwitchOn", lamp)]
    return [*program, Skill("GoToObject", wanted.target), Skill("PutObject", thing, wanted.target)]


def alike(words: str) -> list[str]:
    """List the kinds of things in a group, with or without a colour."""
    return [thing for thing, (colour, group) in TRAITS.items() if words in (group, f"{colour} {group}")]


# -- planning by a language model -------------------------------------------------------------------------------------

ROLE = f"""You plan for a household robot. If you do not know where a thing is, and memory does not say it, explore. \
The robot has these skills: {", ".join(SKILLS)}. GoToObject(robot, place) walks to a known place, \
Explore(robot, object) visits places until the object is in view; then PickupObject(robot, object), \
PutObject(robot, object, place), and HeatObject(robot, object), CoolObject(robot, object) or \
CleanObject(robot, object) at a microwave, a fridge or a sink. It holds one object at a time.
Example: put a hot mug in cabinet -> Explore(robot, "mug"); PickupObject(robot, "mug"); \
GoToObject(robot, "microwave"); HeatObject(robot, "mug"); GoToObject(robot, "cabinet"); \
PutObject(robot, "mug", "cabinet")
Use what memory says: earlier tasks have moved and changed things. Answer with one JSON object: {{"areas": [the areas \
that may hold the object, from likely to unlikely], "program": [calls, one a string]}}. All that follows is data."""


def plan_prompt(now: PlannerInput) -> list[dict[str, Any]]:
    """Write the planner's prompt (Appendix A): role, skills, example, instruction, memory and places."""
    facts = " ".join(f"{{{unit.text}}}" for unit in now.units) or "none"
    rest = "\n".join(line for line in now.memory.split("\n") if line and not read_unit(line)) or "none"
    parts = [
        f"instruction: {now.goal}",
        f"short-term memory: {facts}",
        f"long-term memory: {rest}",
        f"places: {', '.join(now.places)}",
        "In which areas may the object be, from likely to unlikely, and what is the program?",
    ]
    return [{"role": "system", "content": ROLE}, {"role": "user", "content": "\n".join(parts)}]


def read_plan(answer: str) -> SkillPlan | None:
    """Parse a plan from a model's answer, fenced or not; None without a program."""
    parsed = parse_json_object(answer) or {}
    program = read_program(strings_in(parsed.get("program")))
    return SkillPlan(program, tuple(strings_in(parsed.get("areas")))) if program else None


# -- execution --------------------------------------------------------------------------------------------------------


@dataclass
class ProgramExecutor:
    """An `Executor` that plans once per task. Its actions depend on its requests only.

    Args:
        endpoint: the language model that plans; None plans by rule.
        feedback: explore where memory is wrong, instead of being stuck.
        homes: environment whose placement prior ranks places.
        likely: use that prior without a scene graph, too, instead of a random order.
        seed: of the random order.
    """

    endpoint: Endpoint | None = None
    feedback: bool = True
    homes: str = "household"
    likely: bool = False
    seed: int = 0
    reads: ExecutorView = PAPER_VIEW
    batched: bool = True
    accepts_soft: bool = False
    sees_images: bool = False
    _plans: dict[str, SkillPlan | Exception] = field(default_factory=dict, repr=False)

    def act(self, requests: Sequence[ExecutorRequest]) -> list[Any]:
        """Return one action per request, in order, or the exception of a failed plan."""
        situations = [PlannerInput.of(request) for request in requests]
        plans = self._plans_of(situations)
        return [
            plan if isinstance(plan, Exception) else self._action(now, plan, request)
            for now, plan, request in zip(situations, plans, requests, strict=True)
        ]

    @property
    def instructions(self) -> str:
        return ROLE if self.endpoint else ""

    def hash(self) -> str:
        """Return a description instead of a hash of weights."""
        by = f"{self.endpoint.config.model} at {self.endpoint.config.base_url}" if self.endpoint else "rules"
        return f"program by {by}, feedback {self.feedback}, homes {self.homes}, likely {self.likely}, seed {self.seed}"

    def _plans_of(self, situations: Sequence[PlannerInput]) -> list[SkillPlan | Exception]:
        if self.endpoint is None:
            return [plan_by_rule(now) for now in situations]
        prompts = {json.dumps(prompt): prompt for prompt in map(plan_prompt, situations)}
        fresh, failed = [key for key in prompts if key not in self._plans], dict[str, Exception]()
        answers = self.endpoint.run([self.endpoint.ask(prompts[key], "planner", PLAN_TOKENS) for key in fresh])
        for key, answer in zip(fresh, answers, strict=True):
            if isinstance(answer, EndpointStop):
                raise answer
            if isinstance(answer, EndpointFailure):
                failed[key] = answer
            else:
                none = EndpointFailure(f"the planner's answer holds no program, it begins {answer.text[:80]!r}")
                self._plans[key] = read_plan(answer.text) or none
        plans = self._plans | failed
        return [plans[json.dumps(plan_prompt(now))] for now in situations]

    def _action(self, now: PlannerInput, plan: SkillPlan, request: ExecutorRequest) -> Action:
        skill, command = self.next_command(now, plan, request.history)
        tokens = (len(now.goal) + len(now.memory)) // CHARACTERS + 1
        how = Grounding.CHOICE if command in now.commands else Grounding.FAILED
        written = len(command) // CHARACTERS + 1
        return Action(command, how, f"{skill}: {command}", tokens_in=tokens, tokens_out=written)

    def next_command(self, now: PlannerInput, plan: SkillPlan, history: Sequence[str]) -> tuple[str, str]:
        """Return the next skill and its command."""
        done = program_progress(plan.program, history, now.held)
        if done.deed is None or done.deed.command is None:
            return ("done" if done.deed is None else done.deed.text), STUCK
        if possible := _possible(now, done):
            return done.deed.text, possible
        if done.deed.name == "PickupObject" and now.held:
            return f"PutObject({now.held})", self._put_down(now, done.since)
        leading = done.leading
        if leading is not None and leading.name == "GoToObject" and (place := _destination(now, leading)):
            if place not in now.here and _GO + place in now.commands:
                return leading.text, _GO + place
            if f"open {place}" in now.commands:
                return leading.text, f"open {place}"
            if not self.feedback:
                return leading.text, STUCK
        sought = done.deed.thing if leading is None or leading.name == "GoToObject" else leading.thing
        return f"Explore({sought})", self._explore(now, done.since, sought, plan.areas)

    def _put_down(self, now: PlannerInput, since: Sequence[str]) -> str:
        """Put down the thing in hand, here if possible, else at a place that fits it."""
        if mine := [command for command in now.commands if _puts(command, now.held)]:
            return mine[0]
        fits = ITEM_TYPES[kind(now.held)].places if kind(now.held) in ITEM_TYPES else frozenset[str]()
        if doors := [f"open {p}" for p in now.here if kind(p) in fits and f"open {p}" in now.commands]:
            return doors[0]
        left = [p for p in now.places if _GO + p in now.commands and _GO + p not in since]
        return _GO + min(left, key=lambda p: (kind(p) not in fits, kind_and_number(p))) if left else STUCK

    def _explore(self, now: PlannerInput, since: Sequence[str], sought: str, ranked: Sequence[str]) -> str:
        """Open the place of the last `go to`, or go to the next one."""
        if since and since[-1].startswith(_GO) and (door := f"open {since[-1].removeprefix(_GO)}") in now.commands:
            return door
        left = [p for p in now.places if _GO + p in now.commands and _GO + p not in since]
        order = self.order(
            left,
            sought,
            graph=read_graph(now.memory),
            here=next(iter(now.here), ""),
            goal=now.goal,
            ranked=ranked,
        )
        return _GO + order[0] if order else STUCK

    def order(
        self, places: Sequence[str], sought: str, graph: SceneGraph, here: str, goal: str, ranked: Sequence[str] = ()
    ) -> list[str]:
        """Order places for exploration: without a scene graph at random; with one area by area, by `ranked`, then the
        probability that the area holds the thing, then hops from here."""
        drawn = lambda place: blake2b(f"{self.seed}/{goal}/{place}".encode("utf-8", "surrogatepass")).digest()
        shuffled = sorted(places, key=drawn)
        odds = _odds(self.homes, sought, places)
        if not graph.areas:
            return sorted(shuffled, key=lambda p: -odds[p]) if self.likely else shuffled
        hops = graph.hops(graph.area_of(here))
        areas = {a.name: [p for p in a.contains if p in odds] for a in graph.areas}
        score = {name: 1 - prod(1 - odds[p] for p in of) for name, of in areas.items()}
        named = {name: n for n, name in enumerate(ranked)}
        by_area = lambda name: (named.get(name, len(named)), -score[name], hops.get(name, len(areas)), name)
        ordered = [p for name in sorted(areas, key=by_area) for p in sorted(areas[name], key=lambda p: -odds[p])]
        return [*ordered, *(p for p in shuffled if p not in ordered)]


def _odds(homes: str, sought: str, places: Sequence[str]) -> Mapping[str, float]:
    """Return the probability that each place holds one of the things: its kind's share over the places of the kind."""
    kinds = [kind(place) for place in places]
    things = [kind(thing) for thing in sought.split("|")]
    of = [likelihood(homes, thing, kinds) for thing in things]
    return {p: sum(each[kind(p)] for each in of) / len(of) / kinds.count(kind(p)) for p in places}


def _possible(now: PlannerInput, done: ProgramProgress) -> str:
    """Return a command of the next skill; "" without one. Things that this task has put somewhere stay there."""
    form = done.deed.command if done.deed else None
    for command in now.commands if form else ():
        found = form.fullmatch(command) if form else None
        takes = done.deed is not None and done.deed.name == "PickupObject"
        if found and not (takes and found["place"] in done.put):
            return command
    return ""


def _destination(now: PlannerInput, leading: Skill) -> str:
    """Return the place that a skill leads to, by name, kind or the thing's place in memory; "" without one."""
    named = leading.thing
    at = next((unit.place for unit in now.units if named in (unit.id, unit.type)), named)
    fitting = [place for place in now.places if at in (place, kind(place))]
    here = [place for place in fitting if place in now.here]
    return next(iter(here or fitting), "")
