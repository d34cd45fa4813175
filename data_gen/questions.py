"""Template questions about the steps of a history, whose evidence is exact by construction (S3Mem, App. C, where a
language model writes them): counts, occurrences, what came before and after, where things are, what changed them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from data_gen.cases import Case, Question
from memory.protocol import Trace
from memory.s3mem.units import Change, Unit
from memory.s3mem.writing import record_ids, written

ORDINALS = ("first", "second", "third", "fourth", "fifth")
STRETCH = 4  # steps between two others that are asked for, at most


@dataclass(frozen=True, slots=True)
class Steps:
    """A history as templates read it."""

    trace: Trace
    ids: tuple[str, ...]
    units: tuple[Unit, ...]

    @classmethod
    def of(cls, trace: Trace) -> Steps:
        return cls(trace, tuple(record_ids(trace)), tuple(written(trace)))

    def done(self, refused: bool = False) -> dict[str, list[int]]:
        """List by command when it was executed."""
        found: dict[str, list[int]] = {}
        for i, record in enumerate(self.trace.records):
            if refused or not record.refused:
                found.setdefault(record.action, []).append(i)
        return found

    def changes(self) -> list[tuple[int, Change]]:
        return [(i, change) for i, unit in enumerate(self.units) for change in unit.changes]

    def asked(
        self,
        category: str,
        text: str,
        answer: str,
        evidence: Sequence[int],
        anchors: Sequence[int] = (),
        chain: bool = False,
    ) -> Question:
        """Make a question; `chain`: each piece of evidence is read because of the one before it."""
        told, of = [self.ids[i] for i in evidence], [self.ids[i] for i in anchors or evidence]
        links = tuple(pairwise(told)) if chain else ()
        return Question("", text, answer, category, tuple(told), anchors=tuple(of), links=links)


def _times(steps: Steps, draw: random.Random) -> Iterator[Question]:
    """Ask how often, and when for the n-th time, something was done."""
    for action, at in steps.done().items():
        low, high = draw.randint(0, at[0]), draw.randint(at[len(at) // 2], len(steps.ids) - 1)
        inside = [i for i in at if low <= i <= high]
        text = f"From steps {low} to {high}, how many times did you execute {action}?"
        yield steps.asked("count", text, str(len(inside)), inside, chain=True)
        n = draw.randrange(min(len(at), len(ORDINALS)))
        text = f"At which step did you execute {action} for the {ORDINALS[n]} time?"
        yield steps.asked("nth" if n else "first", text, str(at[n]), [at[n]])
        if len(at) > 1:
            text = f"At which step was the last time that you did {action}?"
            yield steps.asked("last", text, str(at[-1]), [at[-1]])


def _beside(steps: Steps, draw: random.Random) -> Iterator[Question]:
    """Ask what was done just before, just after and between."""
    records = steps.trace.records
    for action, at in steps.done().items():
        n = draw.randrange(min(len(at), len(ORDINALS)))
        i = at[n]
        when = f"you executed {action} for the {ORDINALS[n]} time" if len(at) > 1 else f"you executed {action}"
        if i + 1 < len(records):
            text = f"What did you do just after {when}?"
            yield steps.asked("after", text, records[i + 1].action, [i, i + 1], [i], chain=True)
        if i > 0:
            text = f"What did you do just before {when}?"
            yield steps.asked("before", text, records[i - 1].action, [i, i - 1], [i], chain=True)
    once = [(action, at[0]) for action, at in steps.done(refused=True).items() if len(at) == 1]
    for (one, i), (other, j) in pairwise(once):
        if 1 < j - i <= STRETCH + 1:
            told = "; ".join(record.action for record in records[i + 1 : j])
            text = f"Which actions did you take between {one} and {other}?"
            yield steps.asked("between", text, told, range(i, j + 1), [i, j], chain=True)


def _places(steps: Steps, draw: random.Random) -> Iterator[Question]:
    """Ask where a thing was seen last, and what was found where."""
    seen: dict[str, list[int]] = {}
    for i, unit in enumerate(steps.units):
        for thing in unit.objects:
            if thing != unit.place and unit.place:
                seen.setdefault(thing, []).append(i)
    for thing, at in seen.items():
        where = steps.units[at[-1]].place
        yield steps.asked("where", f"Where was the {thing} last seen?", where, [at[-1]])
        if len(at) > 1:
            first = steps.units[at[0]].place
            yield steps.asked("where-first", f"Where was the {thing} first seen?", first, [at[0]])


def _states(steps: Steps, draw: random.Random) -> Iterator[Question]:
    """Ask for the state of a thing before or after a change, and for what caused it."""
    changes = steps.changes()
    for n, (i, change) in enumerate(changes):
        thing, _, what = change.key.rpartition(".")
        later = next((j for j, other in changes[n + 1 :] if other.key == change.key), len(steps.ids))
        step = draw.randrange(i, later)
        yield steps.asked("state", f"What was the {what} of the {thing} after step {step}?", change.after, [i])
        if change.before:
            text = f"What was the {what} of the {thing} before step {i}?"
            yield steps.asked("state-before", text, change.before, [i])
        if what != "location":
            text = f"Which action caused the {thing} to become {change.after}?"
            yield steps.asked("cause", text, steps.trace.records[i].action, [i])
    by_thing: dict[str, list[int]] = {}
    for i, change in changes:
        by_thing.setdefault(change.key.rpartition(".")[0], []).append(i)
    for thing, at in by_thing.items():
        if 1 < len(at) <= STRETCH + 1:
            told = "; ".join(steps.trace.records[i].action for i in at)
            yield steps.asked("history", f"How many times did you change the {thing}, and how?", told, at, chain=True)


def _single(steps: Steps, draw: random.Random) -> Iterator[Question]:
    """Ask what was done, or seen, at a step."""
    for i, record in enumerate(steps.trace.records):
        yield steps.asked("step", f"What did you do at step {record.t}?", record.action, [i])
        if steps.units[i].objects:
            text = f"What was the result of {record.action} at step {record.t}?"
            yield steps.asked("result", text, record.feedback, [i])


TEMPLATES: tuple[Callable[[Steps, random.Random], Iterator[Question]], ...] = (
    _times,
    _beside,
    _places,
    _states,
    _single,
)


def step_case(trace: Trace, per_template: int, seed: int = 0) -> Case:
    """Make a case of one history: at most so many questions of each category, drawn at random."""
    steps, draw = Steps.of(trace), random.Random(f"{seed} {trace.task.id}")
    by_category: dict[str, list[Question]] = {}
    for template in TEMPLATES:
        for question in template(steps, draw):
            by_category.setdefault(question.category, []).append(question)
    chosen = [q for of in by_category.values() for q in draw.sample(of, min(per_template, len(of)))]
    named = (replace(question, id=f"{trace.task.id}/{i}") for i, question in enumerate(chosen))
    return Case(trace.task.id, (trace,), tuple(named))
