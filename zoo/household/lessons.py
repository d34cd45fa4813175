"""Lessons of the compiler base: questions about memory and picture in the compiler's own prompt, and gathering.

Questions are those that an instruction-tuned model answers anyway ("where is the mug", "what is marked"; "emission":
the base writes the language when asked, and SFT teaches it to write unasked). Gathering stands in for what a large
base's attention brings along.
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
    marked: str | None  # the place that the view marks, or "nothing"; None once that is useless
    shown: str | None  # the object's place, if only a picture (view or M) shows it; as above
    pictured: Mapping[str, str] = field(default_factory=dict)  # the place that M's pictures mark, by scene

    @property
    def shows_place(self) -> bool:
        return self.shown not in (None, NOTHING)

    @property
    def speaks(self) -> bool:
        return self.emission.startswith(GUIDE)


def dialogue(example: CompilerExample, rng: random.Random, emissions: bool) -> list[tuple[str, str]]:
    """Draw up to fifteen questions with their answers: several per prompt make the signal dense.

    "place" asks where M's text puts the goal's object, in one word, or "nothing". It comes first, so that the answer
    cannot be copied from a sentence. Then, in random order: "where" asks for the same as a sentence, of the goal's
    object or of any entry's; "place in" is "place" for what entries are about; "marked" asks what the view or M's
    picture of a scene marks; "emission" asks for the teacher's emission, alone in half of the dialogues: its first
    token says whether M knows the place, and a base that meets that token once in a hundred does not learn it
    (measured). Answers that are places begin with a space, as in M: a tokenizer of whole words gives them another token
    without it.
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
    """Draw a lesson of questions behind the compile prompt."""
    return request_lesson(backbone, example.request, dialogue(example, rng, emissions))


def gathering_lesson(backbone: Backbone, example: CompilerExample, rng: random.Random) -> Lesson:
    """Append 4 to 8 memory tokens to an emission, each of which predicts the place that a picture shows, or " nothing".

    The emission itself is not learned here. The stage gives SFT a direction to read: without it, LoRA on q and v alone
    did not find the mark in a few hundred steps (measured: action loss 0.87 a token before and after).
    """
    prompt = backbone.encode(compiler_parts(example.request))
    prompt = prompt.extended([*backbone.ids(example.emission), backbone.end_id])
    n = rng.randint(4, 8)
    target = list(backbone.ids(f" {example.shown or NOTHING}"))
    labels = [IGNORE] * (len(prompt.ids) + 1) + target * n  # a memory token predicts at its own position:
    return Lesson(prompt.extended([backbone.memory_id] * (n + 1)), tuple(labels))  # add one


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
    """Draw examples, three in four of them before the object is found; with emissions, the teacher speaks in at least a
    third of those. In episodes these are one in three and one in twenty, and a base trained at that rate learned
    neither to read marks nor to speak (measured)."""
    searching = [s for s in examples if s.marked is not None]
    drawn = rng.sample([s for s in searching if s.speaks], n // 4) if emissions else []
    drawn += rng.sample(searching, 3 * n // 4 - len(drawn))
    return [*drawn, *rng.sample(examples, n - len(drawn))]


def _fact(entry: MemoryEntry) -> tuple[str, str, str] | None:
    """Return (scene, thing, place) of an entry."""
    fact = first_taken(entry.provenance.actions)
    return (entry.provenance.scene, *fact) if fact else None
