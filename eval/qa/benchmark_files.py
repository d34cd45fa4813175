"""Reads question-answering benchmarks: LoCoMo, EMemBench, AMA-Bench."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_gen.questions.records import Question, QuestionSet
from envs.base import Task
from eval.qa.locomo import PICTURES, picture_of, read_locomo
from memory.protocol import Record, Trace
from runtime.parsing import check_types, parse_json

QA, CONTEXT = "qa.jsonl", "qa_context.json"  # EMemBench's two files of an episode
UNANSWERABLE = "not answerable"  # EMemBench's gold answer of a question without an answer


def read_question_sets(path: Path) -> list[QuestionSet]:
    """Read a LoCoMo file (JSON), an AMA-Bench file (JSON Lines), or an EMemBench folder (one episode or a tree).

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has another format.
    """
    try:
        if path.is_dir():
            return _emembench(path)
        text = path.read_text(encoding="utf-8")
        whole = text.lstrip().startswith("[")
        rows = parse_json(text) if whole else [parse_json(line) for line in text.split("\n") if line.strip()]
        if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
            if all("conversation" in row for row in rows):
                return [_resolve_pictures(read_locomo(row), path.parent) for row in rows]
            if all("trajectory" in row for row in rows):
                return [_resolve_pictures(read_ama_bench(row), path.parent) for row in rows]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path} is no file of questions in a known format: {type(error).__name__}: {error}"
        ) from error
    raise ValueError(
        f"{path} is no file of questions in a known format: LoCoMo's JSON has conversation and qa, AMA-Bench's JSON "
        f"Lines have trajectory and qa_pairs, an EMemBench folder has {QA} and {CONTEXT}"
    )


def read_ama_bench(row: Mapping[str, Any]) -> QuestionSet:
    """Convert one episode of AMA-Bench, which annotates no evidence."""
    name = str(row["episode_id"])
    records = tuple(
        Record(
            int(turn.get("turn_idx", t)),
            "",
            str(turn.get("action", "")),
            str(turn.get("observation", "")),
            picture=picture_of(turn),
        )
        for t, turn in enumerate(row["trajectory"])
    )
    questions = tuple(
        Question(f"{name}/{i}", str(pair["question"]), str(pair["answer"]), str(pair.get("type") or "unknown"))
        for i, pair in enumerate(row["qa_pairs"])
    )
    task = Task(name, goal=str(row.get("task", "")), scene="", split="", kind="log")
    return QuestionSet(name, (Trace(task, records, True),), questions)


def _emembench(folder: Path) -> list[QuestionSet]:
    found = sorted(file.parent for file in folder.rglob(QA) if (file.parent / CONTEXT).is_file())
    if not found:
        raise ValueError(f"{folder} holds no episode of EMemBench: a folder with {QA} and {CONTEXT}")
    return [read_emembench(each.relative_to(folder).as_posix(), each) for each in found]


def read_emembench(name: str, folder: Path) -> QuestionSet:
    """Convert one episode of EMemBench: each step is a record with the step's fields as feedback."""
    context = parse_json((folder / CONTEXT).read_text(encoding="utf-8"))
    steps: Sequence[Mapping[str, Any]] = context["steps"] if isinstance(context, dict) else context
    records = tuple(
        Record(int(step.get("t", t)), "", str(step.get("action", "")), _feedback(step), picture=picture_of(step))
        for t, step in enumerate(steps)
    )
    rows = (parse_json(line) for line in (folder / QA).read_text(encoding="utf-8").split("\n") if line.strip())
    questions = tuple(
        Question(
            f"{name}/{i}",
            str(row.get("paraphrase") or row["question"]),
            str(row["gt"]),
            str(row.get("type") or "unknown"),
            absent=str(row["gt"]).strip().lower() == UNANSWERABLE,
        )
        for i, row in enumerate(rows)
    )
    task = Task(name, goal="", scene="", split="", kind="log")
    return _resolve_pictures(QuestionSet(name, (Trace(task, records, True),), questions), folder)


def _resolve_pictures(questions: QuestionSet, folder: Path) -> QuestionSet:
    """Make the paths of pictures absolute; URLs stay and are never fetched. Raises: ValueError for a path outside of
    the folder."""

    def resolve(record: Record) -> Record:
        if not check_types(record).picture or "://" in record.picture:
            return record
        whole = (folder / record.picture).resolve()
        if not whole.is_relative_to(folder.resolve()):
            raise ValueError(f"{questions.id} has a picture outside of {folder}: {record.picture}")
        return replace(record, picture=str(whole))

    histories = tuple(replace(trace, records=tuple(map(resolve, trace.records))) for trace in questions.histories)
    return replace(questions, histories=histories)


def _feedback(step: Mapping[str, Any]) -> str:
    """Join all fields of a step except its number, action, reason and pictures."""
    plain = lambda value: ", ".join(map(str, value)) if isinstance(value, list) else " ".join(str(value).split())
    return "; ".join(
        f"{key}: {plain(v)}" for key, v in step.items() if key not in (*PICTURES, "t", "action", "reason") and v
    )
