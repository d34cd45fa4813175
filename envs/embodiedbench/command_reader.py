"""Command readers of EB-ALFRED and EB-Habitat.

An observation is a picture with a sentence of feedback. What happened follows from the command and from whether the
sentence says that it was executed. A command may differ from a skill's text in case and articles, as in `hosted.py`.
"""

import re
from collections.abc import Iterable
from dataclasses import replace

from envs.command_reader import AgentState, CommandReader, PlaceView, Reading, Step, StepEffect, kind

# Kinds of portable things, in the words of the benchmarks' skills.
ALFRED_THINGS = tuple(
    """AlarmClock Apple BaseballBat BasketBall Book Bowl Box Bread ButterKnife CD Candle CellPhone Cloth CreditCard Cup
    DishSponge Egg Fork Glassbottle HandTowel Kettle KeyChain Knife Ladle Laptop Lettuce Mug Newspaper Pan Pen Pencil
    PepperShaker Pillow Plate Plunger Pot Potato RemoteControl SaltShaker SoapBar SoapBottle Spatula Spoon SprayBottle
    Statue TeddyBear TennisRacket TissueBox ToiletPaper Tomato Vase Watch WateringCan WineBottle""".split()
)
HABITAT_THINGS = (
    *"apple ball banana block book bowl box can clamp cleanser cup drill hammer knife lego lemon lid mug".split(),
    *"orange padlock peach pear plate plum scissors screwdriver spatula sponge spoon strawberry wrench".split(),
    "rubriks cube",
    "toy airplane",
)
DROPPED = "dropped the object instead"  # of EB-ALFRED, in a refusal to put something down
_FIND = re.compile(r"find (?:an? |the )?(?P<place>.+)", re.IGNORECASE)
_NAVIGATE = re.compile(r"navigate to (?:the )?(?P<place>.+)", re.IGNORECASE)
_PUSH_POINT = " push point"  # the spot in front of EB-Habitat's refrigerator
_INSIDE = re.compile(r"(?P<thing>\w+) is not visible because it is in (?P<place>\w+)\.")
_HOLDING = re.compile(r"you are holding (?P<thing>[a-z ]+)\.")


class SkillReader(CommandReader):
    """Reader of skills that act on the thing or place that they name."""

    reads_views = True
    pictures = True
    things: tuple[str, ...] = ()  # kinds of portable things

    def read(self, state: AgentState, step: Step) -> Reading:
        """Read the effect of an executed skill."""
        if step.refused:
            return self.read_refusal(state, step.feedback)
        command = step.action.strip().rstrip(".")
        if at := self.destination(command):
            return Reading(at=at)
        match self.intent(command):
            case StepEffect("take", named):
                thing = state.at if kind(state.at) == named else named  # of several, the one that was found
                return Reading(held=(thing,), effect=StepEffect("take", thing, self.origin(state, thing)))
            case StepEffect("put", named):
                thing, place = next(iter(state.held), ""), self.target(state, command, named)
                place = "" if place == thing else place
                return Reading(held=(), effect=StepEffect("put", thing, place) if thing else None)
            case StepEffect("slice", thing):
                return Reading(effect=StepEffect("slice", thing, next(iter(state.held), "")))
            case StepEffect() as done:
                return Reading(effect=done)
        return Reading()

    def intent(self, command: str) -> StepEffect | None:
        """Return what a skill means to do; steps, turns and tilts of the robot do nothing with a thing."""
        return None if command.lower().startswith(("move", "rotate", "tilt")) else super().intent(command)

    def read_refusal(self, state: AgentState, answer: str) -> Reading:
        """Read what a refusal tells."""
        return Reading()

    def destination(self, command: str) -> str:
        """Return the place that a command leads to; "" for other commands."""
        raise NotImplementedError

    def origin(self, state: AgentState, thing: str) -> str:
        """Return the place from which a thing was taken; "" if unknown."""
        return state.where.get(thing, "")

    def target(self, state: AgentState, command: str, named: str) -> str:
        """Return the place where a command puts something down; "" for the floor, or if unknown."""
        return state.at

    def goal_things(self, goal: str, known: Iterable[str] = ()) -> frozenset[str]:
        """Return the kinds of portable things that a goal names, in the singular or plural."""
        text = " ".join(re.findall(r"[a-z]+", goal.lower()))
        found = {name for name in self.things if re.search(rf"\b{self.in_words(name)}(?:e?s)?\b", text)}
        longer = lambda name: any(name != other and self.in_words(name) in self.in_words(other) for other in found)
        return frozenset(name for name in found if not longer(name))


class AlfredReader(SkillReader):
    """Reader of EB-ALFRED, where "find" brings the agent before a thing, and things are put down at what it found."""

    things = ALFRED_THINGS

    def destination(self, command: str) -> str:
        found = _FIND.fullmatch(command)
        return found["place"] if found else ""

    def target(self, state: AgentState, command: str, named: str) -> str:
        """Return what was found last; "" for a drop."""
        return "" if command.lower().startswith("drop") else state.at

    def read_refusal(self, state: AgentState, answer: str) -> Reading:
        """Read that the robot dropped what it held, or in which closed place the thing is."""
        inside = _INSIDE.search(answer)
        views = (PlaceView(inside["place"], (inside["thing"],), complete=False),) if inside else ()
        if DROPPED not in answer or not state.held:
            return Reading(views=views)
        return Reading(held=(), effect=StepEffect("put", state.held[0]), views=views)

    def in_words(self, kind: str) -> str:
        """Write "ButterKnife" as "butter knife"."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind).lower()

    def fetch(self, thing: str, place: str) -> tuple[str, ...]:
        return f"find a {place}", f"find a {thing}", f"pick up the {kind(thing)}"


class HabitatReader(SkillReader):
    """Reader of EB-Habitat, where the agent takes what is beside it and names the place where it puts it.

    Places that are side by side are reached together: a thing may lie beside the place from which it was taken.
    """

    things = HABITAT_THINGS

    def read(self, state: AgentState, step: Step) -> Reading:
        """Read also what the answer says is held."""
        reading, told = super().read(state, step), _HOLDING.search(step.feedback)
        if step.refused or told is None:
            return reading
        return replace(reading, held=() if told["thing"] == "nothing" else (told["thing"],))

    def destination(self, command: str) -> str:
        found = _NAVIGATE.fullmatch(command)
        return found["place"].removesuffix(_PUSH_POINT) if found else ""

    def origin(self, state: AgentState, thing: str) -> str:
        return state.where.get(thing, state.at)

    def target(self, state: AgentState, command: str, named: str) -> str:
        """Return the place in "place at the sofa"."""
        return re.sub(r"^at (?:the )?", "", named).removesuffix(_PUSH_POINT)

    def fetch(self, thing: str, place: str) -> tuple[str, ...]:
        return f"navigate to the {place}", f"pick up the {kind(thing)}"
