"""Questions about recorded histories, and their file format. Router training, `memcompiler qa` and recall read them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memory.journal import trace_from_json, trace_json
from memory.protocol import Trace
from memory.s3mem.rule_writer import record_ids
from runtime.parsing import check_types, parse_json
from runtime.store import to_json, write_atomically


@dataclass(frozen=True, slots=True)
class Question:
    """A question with its gold answer and, where it is annotated, its evidence.

    Attributes:
        evidence: ids of the records that answer it, in reading order; () where the data annotates none.
        options: the choices of a multiple-choice question.
        absent: the histories do not contain the answer, so abstaining is right.
        anchors: ids of the records that the question itself refers to (router training only).
        links: pairs of record ids, the second read because of the first (router training only).
    """

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
class QuestionSet:
    """Histories that share one memory, and the questions about them.

    Attributes:
        facts: one more history of notes about the records, which cite them by id. `--facts` reads it instead.
    """

    id: str
    histories: tuple[Trace, ...]
    questions: tuple[Question, ...]
    facts: tuple[Trace, ...] = ()


def save_question_sets(sets: Iterable[QuestionSet], path: Path) -> None:
    """Write question sets with their histories as JSON lines, one set a line."""
    lines = [
        to_json(
            {
                "id": each.id,
                "histories": [trace_json(trace) for trace in each.histories],
                "questions": [asdict(question) for question in each.questions],
            },
            ascii=True,
        )
        for each in sets
    ]
    write_atomically(path, "".join(f"{line}\n" for line in lines))


def load_question_sets(path: Path) -> list[QuestionSet]:
    """Read the file that `save_question_sets` writes.

    Raises:
        ValueError: a line has another form, or a question cites a record that its histories do not contain.
    """
    found = []
    for n, line in enumerate(path.read_bytes().split(b"\n"), 1):  # a text may hold other line breaks
        if not line.strip():
            continue
        try:
            found.append(_from_json(parse_json(line)))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path}, line {n} is no question set: {type(error).__name__}: {error}") from error
    return found


def _from_json(row: dict[str, Any]) -> QuestionSet:
    histories = tuple(map(trace_from_json, row["histories"]))
    known = {id for trace in histories for id in record_ids(trace)}
    questions = []
    for fields in row["questions"]:
        tuples = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
        question = check_types(Question(**{**tuples, "links": tuple(map(tuple, fields["links"]))}))
        cited = {*question.evidence, *question.anchors, *(id for link in question.links for id in link)}
        if unknown := cited - known:
            raise ValueError(f"question {question.id} cites {min(unknown)}, which is no record of its histories")
        questions.append(question)
    return check_types(QuestionSet(row["id"], histories, tuple(questions)))
