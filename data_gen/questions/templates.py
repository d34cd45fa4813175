"""Template questions about the steps of a history, with exact evidence (S3Mem, App. C, where a language model writes
them): counts, occurrences, what came before and after, places, and state changes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from data_gen.questions.records import Question, QuestionSet
from memory.protocol import Trace
from memory.s3mem.rule_writer import record_ids, write_units
from memory.s3mem.units import EventUnit, StateChange

ORDINALS = ("first", "second", "third", "fourth", "fifth")
MAX_BETWEEN = 4  # steps between two named ones


@dataclass(frozen=True, slots=True)
class HistorySteps:
    """A history, its record ids and its units, as templates read them."""

    trace: Trace
    ids: tuple[str, ...]
    units: tuple[EventUnit, ...]

    @classmethod
    def of(cls, trace: Trace) -> HistorySteps:
        return cls(trace, tuple(record_ids(trace)), tuple(write_units(trace)))

    def occurrences(self, refused: bool = False) -> dict[str, list[int]]:
        """Map each command to the indices of the steps that executed it, on request with refused ones."""
        found: dict[str, list[int]] = {}
        for i, record in enumerate(self.trace.records):
            if refused or not record.refused:
                found.setdefault(record.action, []).append(i)
        return found

    def changes(self) -> list[tuple[int, StateChange]]:
        return [(i, change) for i, unit in enumerate(self.units) for change in unit.changes]

    def question(
        self,
        category: str,
        text: str,
        *,
        answer: str,
        evidence: Sequence[int],
        anchors: Sequence[int] = (),
        chain: bool = False,
    ) -> Question:
        """Create a question from step indices. With `chain`, each piece of evidence links to the next."""
        ids = tuple(self.ids[i] for i in evidence)
        anchor_ids = tuple(self.ids[i] for i in anchors or evidence)
        links = tuple(pairwise(ids)) if chain else ()
        return Question("", text, answer, category, evidence=ids, anchors=anchor_ids, links=links)


def _count_questions(steps: HistorySteps, draw: random.Random) -> Iterator[Question]:
    """Ask how often, and when for the n-th time, a command was executed."""
    for action, at in steps.occurrences().items():
        low, high = draw.randint(0, at[0]), draw.randint(at[len(at) // 2], len(steps.ids) - 1)
        inside = [i for i in at if low <= i <= high]
        text = f"From steps {low} to {high}, how many times did you execute {action}?"
        yield steps.question("count", text, answer=str(len(inside)), evidence=inside, chain=True)
        n = draw.randrange(min(len(at), len(ORDINALS)))
        text = f"At which step did you execute {action} for the {ORDINALS[n]} time?"
        yield steps.question("nth" if n else "first", text, answer=str(at[n]), evidence=[at[n]])
        if len(at) > 1:
            text = f"At which step was the last time that you did {action}?"
            yield steps.question("last", text, answer=str(at[-1]), evidence=[at[-1]])


def _order_questions(steps: HistorySteps, draw: random.Random) -> Iterator[Question]:
    """Ask what was done just before, just after and between steps."""
    records = steps.trace.records
    for action, at in steps.occurrences().items():
        n = draw.randrange(min(len(at), len(ORDINALS)))
        i = at[n]
        when = f"you executed {action} for the {ORDINALS[n]} time" if len(at) > 1 else f"you executed {action}"
        for category, j in (("after", i + 1), ("before", i - 1)):
            if 0 <= j < len(records):
                text = f"What did you do just {category} {when}?"
                answer = records[j].action
                yield steps.question(category, text, answer=answer, evidence=[i, j], anchors=[i], chain=True)
    once = [(action, at[0]) for action, at in steps.occurrences(refused=True).items() if len(at) == 1]
    for (one, i), (other, j) in pairwise(once):
        if 1 < j - i <= MAX_BETWEEN + 1:
            answer = "; ".join(record.action for record in records[i + 1 : j])
            text = f"Which actions did you take between {one} and {other}?"
            evidence = range(i, j + 1)
            yield steps.question("between", text, answer=answer, evidence=evidence, anchors=[i, j], chain=True)


def _place_questions(steps: HistorySteps, draw: random.Random) -> Iterator[Question]:
    """Ask where an object was last, and first, seen."""
    seen: dict[str, list[int]] = {}
    for i, unit in enumerate(steps.units):
        for thing in unit.objects:
            if thing != unit.place and unit.place:
                seen.setdefault(thing, []).append(i)
    for thing, at in seen.items():
        text, place = f"Where was the {thing} last seen?", steps.units[at[-1]].place
        yield steps.question("where", text, answer=place, evidence=[at[-1]])
        if len(at) > 1:
            text, place = f"Where was the {thing} first seen?", steps.units[at[0]].place
            yield steps.question("where-first", text, answer=place, evidence=[at[0]])


def _state_questions(steps: HistorySteps, draw: random.Random) -> Iterator[Question]:
    """Ask for the state of an object before or after a change, and for what caused the change."""
    changes = steps.changes()
    by_thing: dict[str, list[int]] = {}
    for n, (i, change) in enumerate(changes):
        thing, _, what = change.key.rpartition(".")
        by_thing.setdefault(thing, []).append(i)
        later = next((j for j, other in changes[n + 1 :] if other.key == change.key), len(steps.ids))
        text = f"What was the {what} of the {thing} after step {draw.randrange(i, later)}?"
        yield steps.question("state", text, answer=change.after, evidence=[i])
        if change.before:
            text = f"What was the {what} of the {thing} before step {i}?"
            yield steps.question("state-before", text, answer=change.before, evidence=[i])
        if what != "location":
            text = f"Which action caused the {thing} to become {change.after}?"
            yield steps.question("cause", text, answer=steps.trace.records[i].action, evidence=[i])
    for thing, at in by_thing.items():
        if 1 < len(at) <= MAX_BETWEEN + 1:
            text = f"How many times did you change the {thing}, and how?"
            answer = "; ".join(steps.trace.records[i].action for i in at)
            yield steps.question("history", text, answer=answer, evidence=at, chain=True)


def _step_questions(steps: HistorySteps, draw: random.Random) -> Iterator[Question]:
    """Ask what was done, or observed, at a step."""
    for i, record in enumerate(steps.trace.records):
        yield steps.question("step", f"What did you do at step {record.t}?", answer=record.action, evidence=[i])
        if steps.units[i].objects:
            text = f"What was the result of {record.action} at step {record.t}?"
            yield steps.question("result", text, answer=record.feedback, evidence=[i])


TEMPLATES: tuple[Callable[[HistorySteps, random.Random], Iterator[Question]], ...] = (
    _count_questions,
    _order_questions,
    _place_questions,
    _state_questions,
    _step_questions,
)


def template_questions(trace: Trace, per_category: int, seed: int = 0) -> QuestionSet:
    """Generate template questions about one history; sample at most `per_category` of each category."""
    steps, draw = HistorySteps.of(trace), random.Random(f"{seed} {trace.task.id}")
    questions = [question for template in TEMPLATES for question in template(steps, draw)]
    return QuestionSet(trace.task.id, (trace,), sample_by_category(questions, per_category, draw, trace.task.id))


def sample_by_category(
    questions: Sequence[Question], most: int, draw: random.Random, prefix: str
) -> tuple[Question, ...]:
    """Sample at most `most` questions of each category; number them `prefix/0`, `prefix/1`, ..."""
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    sampled = [q for group in by_category.values() for q in draw.sample(group, min(most, len(group)))]
    return tuple(replace(question, id=f"{prefix}/{i}") for i, question in enumerate(sampled))
