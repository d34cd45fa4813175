"""Reads LoCoMo (Maharana et al., 2024): dialogues of many sessions, one record per turn."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from data_gen.questions.records import Question, QuestionSet
from envs.base import Task
from memory.protocol import Record, Trace

PICTURES = ("picture", "image", "img_url")  # keys of a turn or step that may hold its picture's path
CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop", 5: "adversarial"}


def read_locomo(sample: Mapping[str, Any]) -> QuestionSet:
    """Convert one sample. Evidence strings with several turn ids are split; ids of unknown turns are dropped."""
    name = str(sample["sample_id"])
    turns = [_turn(turn, when) for _, when, session in _sessions(sample["conversation"]) for turn in session]
    known = {record.id for record in turns}
    return QuestionSet(
        name,
        (_history(name, turns),),
        tuple(_questions(name, sample["qa"], known)),
        (_history(f"{name}/facts", list(_facts(sample, known))),),
    )


def _history(name: str, records: list[Record]) -> Trace:
    numbered = (replace(record, t=t) for t, record in enumerate(records))
    return Trace(Task(name, goal="", scene="", split="", kind="dialogue"), tuple(numbered), True)


def _sessions(conversation: Mapping[str, Any]) -> Iterator[tuple[int, str, list[Any]]]:
    """Yield number, date and turns of each session."""
    numbers = sorted(int(key.split("_")[1]) for key in conversation if re.fullmatch(r"session_\d+", key))
    for number in numbers:
        yield number, conversation.get(f"session_{number}_date_time", ""), conversation[f"session_{number}"]


def _turn(turn: Mapping[str, Any], when: str) -> Record:
    photo = f" [photo: {turn['blip_caption']}]" if turn.get("blip_caption") else ""
    return Record(
        0,
        "",
        f"{turn['text']}{photo}",
        "",
        id=turn["dia_id"],
        actor=turn["speaker"],
        when=when,
        picture=picture_of(turn),
    )


def picture_of(row: Mapping[str, Any]) -> str:
    """Return the path or URL of the first picture of a turn or step, "" for none."""
    value = next((row[key] for key in PICTURES if row.get(key)), "")
    first = value[0] if isinstance(value, list) else value
    return first if isinstance(first, str) else ""


def _facts(sample: Mapping[str, Any], known: set[str]) -> Iterator[Record]:
    """Yield the file's notes as records whose id lists the turns that they are about."""
    for number, when, _ in _sessions(sample["conversation"]):
        for actor, facts in sample.get("observation", {}).get(f"session_{number}_observation", {}).items():
            for fact, cited in facts:
                ids = _ids(cited, known)
                if ids:
                    yield Record(0, "", fact, "", id=" ".join(ids), actor=actor, when=when)


def _questions(name: str, questions: list[Mapping[str, Any]], known: set[str]) -> Iterator[Question]:
    for i, row in enumerate(questions):
        yield Question(
            f"{name}/{i}",
            row["question"],
            answer=str(row.get("answer", row.get("adversarial_answer", ""))),
            category=CATEGORIES[row["category"]],
            evidence=_ids(row.get("evidence", []), known),
            absent=row["category"] == 5,
        )


def _ids(cited: Any, known: set[str]) -> tuple[str, ...]:
    parts = [cited] if isinstance(cited, str) else cited
    ids = (id for part in parts for id in re.split(r"[;\s]+", str(part)))
    return tuple(dict.fromkeys(id for id in ids if id in known))
