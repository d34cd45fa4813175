"""From the files of benchmarks, as users have them, to cases: LoCoMo, EMemBench, AMA-Bench."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_gen.cases import Case, Question
from envs.base import Task
from eval.qa.locomo import PICTURES, locomo_case, picture_of
from memory.protocol import Record, Trace
from runtime.told import parse_json, typed

QA, CONTEXT = "qa.jsonl", "qa_context.json"  # EMemBench's two files of an episode
UNANSWERABLE = "not answerable"  # what EMemBench's gold answers say where the right one is to abstain


def read_cases(path: Path) -> list[Case]:
    """Read a LoCoMo file (JSON), an AMA-Bench file (JSON Lines), or a folder of EMemBench's (one episode, or a tree of
    them). Raises: ValueError for anything else, FileNotFoundError."""
    try:
        if path.is_dir():
            return _emembench(path)
        text = path.read_text(encoding="utf-8")
        whole = text.lstrip().startswith("[")
        rows = parse_json(text) if whole else [parse_json(line) for line in text.split("\n") if line.strip()]
        if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
            if all("conversation" in row for row in rows):
                return [placed(locomo_case(row), path.parent) for row in rows]
            if all("trajectory" in row for row in rows):
                return [placed(ama_case(row), path.parent) for row in rows]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is no file of questions that is known: {type(error).__name__}: {error}") from error
    raise ValueError(
        f"{path} is no file of questions that is known: LoCoMo's JSON has conversation and qa, AMA-Bench's JSON Lines "
        f"trajectory and qa_pairs, a folder of EMemBench's {QA} and {CONTEXT}"
    )


def ama_case(row: Mapping[str, Any]) -> Case:
    """Make a case of an AMA-Bench episode. It names no evidence."""
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
    task = Task(name, str(row.get("task", "")), "", "", "log")
    return Case(name, (Trace(task, records, True),), questions)


def _emembench(folder: Path) -> list[Case]:
    found = sorted(file.parent for file in folder.rglob(QA) if (file.parent / CONTEXT).is_file())
    if not found:
        raise ValueError(f"{folder} holds no episode of EMemBench: {QA} and {CONTEXT} are looked for")
    return [emembench_case(each.relative_to(folder).as_posix(), each) for each in found]


def emembench_case(name: str, folder: Path) -> Case:
    """Make a case of an EMemBench episode: a record a step, what is told of it in its feedback."""
    told = parse_json((folder / CONTEXT).read_text(encoding="utf-8"))
    steps: Sequence[Mapping[str, Any]] = told["steps"] if isinstance(told, dict) else told
    records = tuple(
        Record(int(step.get("t", t)), "", str(step.get("action", "")), _observed(step), picture=picture_of(step))
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
    return placed(Case(name, (Trace(Task(name, "", "", "", "log"), records, True),), questions), folder)


def placed(case: Case, folder: Path) -> Case:
    """Let records point to their pictures by whole paths. Addresses on the net stay as they are: nothing is fetched.
    Raises: ValueError, for a path out of the folder, which is no part of the data."""

    def own(record: Record) -> Record:
        if not typed(record).picture or "://" in record.picture:
            return record
        whole = (folder / record.picture).resolve()
        if not whole.is_relative_to(folder.resolve()):
            raise ValueError(f"{case.id} has a picture outside of {folder}: {record.picture}")
        return replace(record, picture=str(whole))

    histories = tuple(replace(trace, records=tuple(map(own, trace.records))) for trace in case.histories)
    return replace(case, histories=histories)


def _observed(step: Mapping[str, Any]) -> str:
    """Write all that a step tells but its number, its action and the agent's reason for it."""
    plain = lambda value: ", ".join(map(str, value)) if isinstance(value, list) else " ".join(str(value).split())
    return "; ".join(
        f"{key}: {plain(v)}" for key, v in step.items() if key not in (*PICTURES, "t", "action", "reason") and v
    )
