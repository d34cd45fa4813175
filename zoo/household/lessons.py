"""Lessons of the compiler base: questions about memory and pictures after the compiler's prompt, and gathering.

They replace abilities of large bases: an instruction-tuned model answers such questions untrained ("where is the mug",
"what is marked", "emission"), and its attention gathers content at memory tokens.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from agent.expert import entry_for_goal
from compiler.language import GUIDE
from compiler.prompt import compiler_parts
from compiler.records import CompileRequest
from envs.household.command_reader import first_taken, location
from lm.backbone import Backbone
from memory.entry import MemoryEntry
from zoo.curriculum import IGNORE, NOTHING, Batch
from zoo.lessons import Lesson, collate, request_lesson


@dataclass(frozen=True)
class CompilerExample:
    """A state of a teacher's episode, with the answers about it."""

    request: CompileRequest
    emission: str  # the teacher's
    marked: str | None  # the place that the view marks, or "nothing"; None once the agent holds the object
    shown: str | None  # the object's place, if only a picture (view or M) shows it; as above
    pictured: Mapping[str, str] = field(default_factory=dict)  # the place that M's pictures mark, by scene

    @property
    def shows_place(self) -> bool:
        return self.shown not in (None, NOTHING)

    @property
    def speaks(self) -> bool:
        return self.emission.startswith(GUIDE)


def dialogue(example: CompilerExample, rng: random.Random, emissions: bool) -> list[tuple[str, str]]:
    """Draw up to fifteen questions with their answers.

    "place" asks for the goal's place in M's text, in one word; it comes first, so that no sentence shows the answer.
    Others, in random order: "where" asks for a place as a sentence, "place in" for an entry's place, "marked" for the
    mark of a picture, "emission" for the teacher's emission. Half of the dialogues have only "emission", whose first
    token is otherwise too rare to learn. Places begin with a space, as in M, to be the same tokens.
    """
    if emissions and rng.random() < 0.5:
        return [("emission", example.emission)]
    request = example.request
    facts = [fact for fact in map(_fact, request.memory) if fact]
    chosen = rng.sample(facts, min(2, len(facts)))
    turns = [(f"where in {scene} is the {thing}", location(scene, thing, place)) for scene, thing, place in chosen]
    entry = entry_for_goal(request.goal, request.memory)
    goal = _fact(entry) if entry else None
    if goal:
        turns.append((f"where is the {goal[1]}", location(*goal)))
    places = {(scene, thing): place for scene, thing, place in facts}
    pairs = list(product(sorted({scene for scene, _ in places}), sorted({thing for _, thing in places})))
    places_asked = [
        (f"place in {scene} of the {thing}", places.get((scene, thing), NOTHING))
        for scene, thing in rng.sample(pairs, min(6, len(pairs)))
    ]
    if example.marked is not None:
        places_asked.append(("what is marked", example.marked))
    pictured = [(f"what is marked in {scene}", place) for scene, place in example.pictured.items()]
    places_asked += rng.sample(pictured, min(2, len(pictured)))
    turns += [(ask, f" {place}") for ask, place in places_asked]
    if emissions:
        turns.append(("emission", example.emission))
    rng.shuffle(turns)
    return [("place", f" {goal[2] if goal else NOTHING}"), *turns]


def question_lesson(backbone: Backbone, example: CompilerExample, rng: random.Random, emissions: bool) -> Lesson:
    """Draw a lesson of questions after the compile prompt."""
    return request_lesson(backbone, example.request, dialogue(example, rng, emissions))


def gathering_lesson(backbone: Backbone, example: CompilerExample, rng: random.Random) -> Lesson:
    """Append 4 to 8 memory tokens to an emission, each of which predicts the place that a picture shows, or " nothing".

    Without this stage, LoRA on q and v did not learn to find the mark in a few hundred steps of SFT.
    """
    prompt = backbone.encode(compiler_parts(example.request, history=0))
    prompt = prompt.extended([*backbone.ids(example.emission), backbone.end_id])
    n = rng.randint(4, 8)
    target = list(backbone.ids(f" {example.shown or NOTHING}"))
    labels = [IGNORE] * (len(prompt.ids) + 1) + target * n  # one token more: the label follows its token
    return Lesson(prompt.extended([backbone.memory_id] * (n + 1)), tuple(labels))


def question_batch(
    backbone: Backbone, examples: Sequence[CompilerExample], rng: random.Random, batch: int, emissions: bool = False
) -> Batch:
    """Draw lessons of questions about random examples."""
    drawn = _draw_examples(examples, rng, batch, emissions)
    return collate(backbone, [question_lesson(backbone, example, rng, emissions) for example in drawn])


def gathering_batch(backbone: Backbone, examples: Sequence[CompilerExample], rng: random.Random, batch: int) -> Batch:
    """Draw two thirds of gathering lessons (mostly of pictures that show a place) and one third of questions."""
    shown = [s for s in examples if s.shows_place]
    gathered = [*rng.sample(shown, batch // 2), *rng.sample(examples, batch // 6)]
    lessons = [gathering_lesson(backbone, example, rng) for example in gathered]
    questioned = _draw_examples(examples, rng, batch - len(lessons), emissions=True)
    return collate(backbone, [*lessons, *(question_lesson(backbone, s, rng, emissions=True) for s in questioned)])


def _draw_examples(
    examples: Sequence[CompilerExample], rng: random.Random, n: int, emissions: bool
) -> list[CompilerExample]:
    """Draw examples, three in four of them before the object is found; with emissions, the teacher gives guidance in at
    least a third of those. A base trained at the episodes' lower rates learned neither marks nor guidance."""
    searching = [s for s in examples if s.marked is not None]
    drawn = rng.sample([s for s in searching if s.speaks], n // 4) if emissions else []
    drawn += rng.sample(searching, 3 * n // 4 - len(drawn))
    return [*drawn, *rng.sample(examples, n - len(drawn))]


def _fact(entry: MemoryEntry) -> tuple[str, str, str] | None:
    """Return (scene, thing, place) of an entry."""
    fact = first_taken(entry.provenance.actions)
    return (entry.provenance.scene, *fact) if fact else None
