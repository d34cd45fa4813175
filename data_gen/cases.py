"""Questions about histories, as training, the runner and every measurement of evidence read them, whatever they come
from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memory.journal import trace_from_json, trace_json
from memory.protocol import Trace
from memory.s3mem.writing import record_ids
from runtime.store import to_json, write_atomically
from runtime.told import parse_json, typed


@dataclass(frozen=True, slots=True)
class Question:
    """`evidence`: ids of the records that answer it, in the order in which they are read; () where nobody says.
    `options`: between which is chosen, if any; `absent`: the right answer is that the histories do not say. `anchors`
    and `links`, of template questions alone: the records that ground it, and which is read because of which."""

    id: str
    text: str
    answer: str
    category: str = ""
    evidence: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    absent: bool = False
    anchors: tuple[str, ...] = ()
    links: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """Histories that are kept in one memory, and the questions about them. `facts`: what somebody has noted of the
    records, one history more that points to them by their ids; for those who read notes in their place."""

    id: str
    histories: tuple[Trace, ...]
    questions: tuple[Question, ...]
    facts: tuple[Trace, ...] = ()


def save_cases(cases: Iterable[Case], path: Path) -> None:
    """Write cases with their histories, a JSON line each, for `load_cases`."""
    lines = [
        to_json(
            {
                "id": case.id,
                "histories": [trace_json(trace) for trace in case.histories],
                "questions": [asdict(question) for question in case.questions],
            },
            ascii=True,
        )
        for case in cases
    ]
    write_atomically(path, "".join(f"{line}\n" for line in lines))


def load_cases(path: Path) -> list[Case]:
    """Read the cases of a file. Raises: ValueError, where it is of another form, or a question points to a record that
    is not there."""
    found = []
    for n, line in enumerate(path.read_bytes().split(b"\n"), 1):  # a text may hold other line breaks
        if not line.strip():
            continue
        try:
            found.append(_case(parse_json(line)))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path}, line {n} is no case of questions: {type(error).__name__}: {error}") from error
    return found


def _case(row: dict[str, Any]) -> Case:
    histories = tuple(map(trace_from_json, row["histories"]))
    known = {id for trace in histories for id in record_ids(trace)}
    questions = []
    for told in row["questions"]:
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in told.items()}
        question = typed(Question(**{**given, "links": tuple(map(tuple, told["links"]))}))
        if unknown := {*question.evidence, *question.anchors, *(id for link in question.links for id in link)} - known:
            raise ValueError(f"question {question.id} points to {min(unknown)}, which is no record of its histories")
        questions.append(question)
    return typed(Case(row["id"], histories, tuple(questions)))
