"""Lessons for the compiler base: questions about memory and picture in the compiler's own prompt, and gathering.

Questions are what an instruction-tuned model can answer anyway ("where is the mug", "what is marked", and "emission":
the base can write the language when asked; writing it unasked, from the state, is left to SFT). Gathering is what a
large base's attention brings along.
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
from envs.household.trajectories import location, taken
from lm.backbone import Backbone
from memory.entry import MemoryEntry
from zoo import lessons as shared
from zoo.curriculum import IGNORE, NOTHING, Batch
from zoo.lessons import Lesson, collate


@dataclass(frozen=True)
class Situation:
    """What a compiler meets in a teacher's episode."""

    request: CompileRequest
    emission: str  # the teacher's
    marked: str | None  # the place that the view marks, or "nothing"; None where that is of no use (any more)
    shown: str | None  # where the goal's object is, if only a picture (view's or M's) says it; as above
    pictured: Mapping[str, str] = field(default_factory=dict)  # by scene the place that M's pictures of it mark

    @property
    def shows_place(self) -> bool:
        return self.shown not in (None, NOTHING)

    @property
    def speaks(self) -> bool:
        return self.emission.startswith(GUIDE)


def conversation(situation: Situation, rng: random.Random, emissions: bool) -> list[tuple[str, str]]:
    """Up to fifteen questions with their answers: several per prompt make the signal dense.

    place: where M's text puts the goal's object, in one word, or "nothing" where no entry tells. It comes first, since
    behind the same in a sentence it would be copied. In random order follow where: a sentence that says where M's text
    puts the goal's object, or any entry's; place in: as place, of what entries are about; marked: what the view marks,
    or what M's picture of a scene does; emission: the teacher's, alone in every other conversation. Its first token
    says whether M knows the place: what only answers in sentences that begin alike, or learns that token as one of a
    hundred, does not come to know it there (measured). A place that is the answer begins with the space that it has in
    M: to a tokenizer of whole words it would be another token without.
    """
    if emissions and rng.random() < 0.5:
        return [("emission", situation.emission)]
    request = situation.request
    facts = [fact for fact in map(_fact, request.memory) if fact]
    told = rng.sample(facts, min(2, len(facts)))
    talk = [(f"where in {scene} is the {thing}", location(scene, thing, place)) for scene, thing, place in told]
    entry = entry_for_goal(request.goal, request.memory)
    goal = _fact(entry) if entry else None
    if goal:
        talk.append((f"where is the {goal[1]}", location(*goal)))
    places = {(scene, thing): place for scene, thing, place in facts}
    pairs = list(product(sorted({scene for scene, _ in places}), sorted({thing for _, thing in places})))
    asked = [
        (f"place in {scene} of the {thing}", places.get((scene, thing), NOTHING))
        for scene, thing in rng.sample(pairs, min(6, len(pairs)))
    ]
    if situation.marked is not None:
        asked.append(("what is marked", situation.marked))
    pictured = [(f"what is marked in {scene}", place) for scene, place in situation.pictured.items()]
    asked += rng.sample(pictured, min(2, len(pictured)))
    talk += [(ask, f" {place}") for ask, place in asked]
    if emissions:
        talk.append(("emission", situation.emission))
    rng.shuffle(talk)
    return [("place", f" {goal[2] if goal else NOTHING}"), *talk]


def questions(backbone: Backbone, situation: Situation, rng: random.Random, emissions: bool) -> Lesson:
    """Put fresh questions behind the compile prompt."""
    return shared.questions(backbone, situation.request, conversation(situation, rng, emissions))


def gathering(backbone: Backbone, situation: Situation, rng: random.Random) -> Lesson:
    """Put memory tokens behind an emission: they gather what the text does not say, the marked place.

    Each of 4 to 8 memory tokens has to predict the place that a picture shows, or " nothing". The emission itself is
    not learned here. SFT then has a direction to read; without this stage LoRA on q and v alone did not find the mark
    in a few hundred steps (measured: action loss 0.87 a token before and after).
    """
    prompt = backbone.encode(compiler_parts(situation.request))
    prompt = prompt.extended([*backbone.ids(situation.emission), backbone.end_id])
    n = rng.randint(4, 8)
    target = list(backbone.ids(f" {situation.shown or NOTHING}"))
    labels = [IGNORE] * (len(prompt.ids) + 1) + target * n  # a memory token predicts at its own position: one more ...
    return Lesson(prompt.extended([backbone.memory_id] * (n + 1)), tuple(labels))  # ... stands at the end


def question_batch(
    backbone: Backbone, situations: Sequence[Situation], rng: random.Random, batch: int, emissions: bool = False
) -> Batch:
    """Fresh questions about random situations."""
    drawn = _drawn(situations, rng, batch, emissions)
    return collate(backbone, [questions(backbone, situation, rng, emissions) for situation in drawn])


def gathering_batch(backbone: Backbone, situations: Sequence[Situation], rng: random.Random, batch: int) -> Batch:
    """Two thirds gathering (mostly of what pictures show), one third questions, so that nothing is forgotten."""
    shown = [s for s in situations if s.shows_place]
    gathered = [*rng.sample(shown, batch // 2), *rng.sample(situations, batch // 6)]
    lessons = [gathering(backbone, situation, rng) for situation in gathered]
    asked = _drawn(situations, rng, batch - len(lessons), emissions=True)
    return collate(backbone, [*lessons, *(questions(backbone, s, rng, emissions=True) for s in asked)])


def _drawn(situations: Sequence[Situation], rng: random.Random, n: int, emissions: bool) -> list[Situation]:
    """Draw situations: in three of four something is still looked for, and where emissions are asked for, the teacher
    speaks in a third of those at least. In life these are one of three and one of twenty: a base that met them so
    learned neither to read marks nor to speak (measured)."""
    searching = [s for s in situations if s.marked is not None]
    drawn = rng.sample([s for s in searching if s.speaks], n // 4) if emissions else []
    drawn += rng.sample(searching, 3 * n // 4 - len(drawn))
    return [*drawn, *rng.sample(situations, n - len(drawn))]


def _fact(entry: MemoryEntry) -> tuple[str, str, str] | None:
    """(scene, thing, place) that an entry holds."""
    fact = taken(entry.provenance.actions)
    return (entry.provenance.scene, *fact) if fact else None
