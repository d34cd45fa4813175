"""Questions about generated dialogues, with exact evidence: a question names some parts of an event and asks for
another one. Each part recurs in other events."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations, pairwise

from data_gen.questions.dialogues import Dialogue, Event, Mention, write_dialogue
from data_gen.questions.phrases import QUESTION_TEMPLATES, VERBS
from data_gen.questions.records import Question, QuestionSet
from data_gen.questions.templates import sample_by_category
from memory.protocol import Trace

PARTS = ("thing", "place", "companion", "occasion")  # of an event, each mentioned in a turn


def dialogue_questions(
    name: str, traces: tuple[Trace, Trace], sessions: int, per_category: int, seed: int = 0
) -> QuestionSet:
    """Generate a dialogue about two histories, one of each speaker, and sample at most `per_category` questions of
    each category about it."""
    draw = random.Random(f"{seed} {name}")
    dialogue = write_dialogue(name, traces, sessions, draw)
    questions = [*_single_event_questions(dialogue), *_multi_event_questions(dialogue)]
    return QuestionSet(name, (dialogue.history(),), sample_by_category(questions, per_category, draw, name))


def _single_event_questions(dialogue: Dialogue) -> Iterator[Question]:
    """Ask for one part or the day of an event by other parts that identify it; also ask the same about the other
    speaker, which has no answer."""
    counts = Counter(key for mention in dialogue.mentions for key in _keys(mention.event))
    for mention in dialogue.mentions:
        event = mention.event
        other = next(name for name in dialogue.speakers if name != event.by)
        for target in QUESTION_TEMPLATES:
            if target != "day" and not getattr(event, target):
                continue
            needed = {"thing"} - {target}
            extra = [part for part in PARTS if part not in needed and part != target and getattr(event, part)]
            named = needed | set(dialogue.draw.sample(extra, dialogue.draw.randint(0, len(extra))))
            if len(named) == 0 or counts[_key(event, named)] > 1:
                continue
            turn, anchor = mention.turns[target], mention.turns["thing"]
            question = Question(
                "",
                _question_text(dialogue, event, target, named, by=event.by),
                answer=mention.day.partition(" on ")[2] if target == "day" else getattr(event, target),
                category="temporal" if target == "day" else "single-hop",
                evidence=(turn,),
                anchors=(anchor,),
                links=((anchor, turn),) if anchor != turn else (),
            )
            yield question
            if target != "day":
                text = _question_text(dialogue, event, target, named, by=other)
                yield replace(question, text=text, category="adversarial", absent=True)


def _keys(event: Event) -> Iterator[tuple[object, ...]]:
    """Yield every description by which a question may identify an event, by any speaker."""
    for n in range(1, len(PARTS) + 1):
        for named in combinations(PARTS, n):
            if all(getattr(event, part) for part in named):
                yield _key(event, set(named))


def _key(event: Event, named: set[str]) -> tuple[object, ...]:
    return (event.verb, *((part, getattr(event, part)) for part in PARTS if part in named))


def _question_text(dialogue: Dialogue, event: Event, target: str, named: set[str], *, by: str) -> str:
    phrases = event.phrases().items()
    parts: Mapping[str, str] = {part: f" {text}" if part in named else "" for part, text in phrases}
    verb = dialogue.draw.choice(VERBS[event.verb][1])
    text = QUESTION_TEMPLATES[target].format(by=by, verb=verb, thing=event.thing, **parts)
    return text.replace(" my ", " their ")


def _multi_event_questions(dialogue: Dialogue) -> Iterator[Question]:
    """Ask for everything that one speaker did with a verb, object, place, companion or occasion in common."""
    groups: dict[tuple[str, str, str], list[Mention]] = {}
    for mention in dialogue.mentions:
        for part in ("verb", *PARTS):
            if value := getattr(mention.event, part):
                groups.setdefault((mention.event.by, part, value), []).append(mention)
    for (by, part, value), members in groups.items():
        turns = tuple(dict.fromkeys(each.turns[part if part in PARTS else "thing"] for each in members))
        if not 2 <= len(turns) <= 6:
            continue
        verb = dialogue.draw.choice(VERBS[value][1]) if part == "verb" else ""
        text = {
            "verb": f"What things did {by} {verb}?",
            "thing": f"What has {by} done with the {value}?",
            "place": f"What did {by} do in the {value}?",
            "companion": f"What has {by} done with {value}?",
            "occasion": f"What has {by} done for {value}?",
        }[part].replace(" my ", " their ")
        answer = ", ".join(dict.fromkeys(each.event.thing for each in members))
        yield Question("", text, answer, "multi-hop", evidence=turns, anchors=turns, links=tuple(pairwise(turns)))
