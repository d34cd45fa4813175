"""The QA teacher: questions by endpoint whose evidence is records that there are, and what becomes of all else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from configs.collect import QuestionsConfig
from configs.load import ConfigError, load_config
from data_gen.questions.llm_questions import (
    ACCOUNT,
    MAX_EVIDENCE,
    QUESTIONS,
    REJECTED,
    RESPONSES,
    RETRY_ROLE,
    ROLE,
    STEPS,
    QuestionTeacher,
    write_questions,
)
from data_gen.questions.records import load_question_sets
from envs.base import Task
from lm.answer_cache import EndpointStop
from lm.endpoint import Endpoint
from memory.protocol import Record, Trace
from memory.s3mem.settings import S3MemSettings
from tests.commands.running import memcompiler
from tests.faulty_server import FaultyServer
from training.router import label_questions


def history(name: str, steps: int = 6) -> Trace:
    records = tuple(
        Record(t, "", f"open drawer {t}", f"You open the drawer {t}. In it, you see a pen {t}.", id=f"{name}#{t}")
        for t in range(steps)
    )
    return Trace(Task(name, "", f"home {name}", "train", "history"), records, True)


def good(ids: list[str], n: int = 0, **more: Any) -> dict[str, Any]:
    told = {"question": f"Which drawer was opened at step {n}?", "answer": f"drawer {n}", "kind": "step"}
    return {**told, "evidence": ids[n : n + 1], **more}


def shown(messages: list[dict[str, Any]]) -> list[str]:
    """List the record ids in a request."""
    return re.findall(r"^\[(.+?)\] ", messages[1]["content"], re.MULTILINE)


def test_questions_point_to_records_and_what_does_not_is_kept_apart(tmp_path: Path) -> None:
    def answer(messages: list[dict[str, Any]]) -> str:
        ids = shown(messages)
        told = [
            good(ids),
            good(ids, 1, evidence=ids[1:3], anchors=ids[1:2]),
            good(ids),
            good(ids, 2, evidence=["b#99"]),
            good(ids, 3, evidence=[]),
            good(ids, 4, evidence="b#4"),
            good(ids, 5, answer=None),
            {"question": 3},
            "text",
            good(ids, 5, anchors=["nothing"]),
            good(ids, 5, question=f"What is in {ids[0]}?", evidence=ids[:1]),
            None,
            good(ids, 3, answer=7, extra="ignored"),
        ]
        return f"Sure!\n```json\n{json.dumps({'questions': told})}\n```"

    with FaultyServer(answer=answer) as server:
        teacher = QuestionTeacher(Endpoint(server.config(), tmp_path / RESPONSES))
        counts = write_questions(teacher, [history("a"), history("b")], tmp_path)
    assert counts["questions"] == 6 and counts["histories"] == 2
    assert counts["rejected"] == {
        "repeated": 2,
        "unknown_record": 4,
        "no_evidence": 4,
        "no_answer": 2,
        "no_question": 6,
        "names_a_record": 2,
    }
    cases = load_question_sets(tmp_path / QUESTIONS)
    assert [case.histories for case in cases] == [(history("a"),), (history("b"),)]
    first, second, third = cases[1].questions
    assert first.evidence == first.anchors == ("b#0",) and first.links == () and first.category == "step"
    assert second.evidence == ("b#1", "b#2") and second.anchors == ("b#1",) and second.links == (("b#1", "b#2"),)
    assert third.answer == "7" and third.id == "b/asked-2"
    rejected = [json.loads(line) for line in (tmp_path / REJECTED).read_text().splitlines()]
    assert len(rejected) == 20 and any("b#99" in row["text"] for row in rejected)
    assert json.loads((tmp_path / ACCOUNT).read_text())["teacher"]["roles"][ROLE]["answers"] == 2


def test_a_long_history_is_shown_in_parts_and_evidence_is_of_the_part_shown() -> None:
    """Evidence of another part was not seen by who named it."""
    answer = lambda messages: json.dumps({"questions": [good(["a#0"], 0), good(shown(messages), 1)]})
    with FaultyServer(answer=answer) as server:
        [case], rejected = QuestionTeacher(Endpoint(server.config())).write([history("a", STEPS + 3)])
        sizes = sorted(len(shown(body["messages"])) for body in server.bodies)
    assert sizes == [3, STEPS] and [r.reason for r in rejected] == ["unknown_record", "repeated"]
    assert [q.evidence for q in case.questions] == [("a#0",), ("a#1",)]


def test_what_all_records_answer_is_no_question() -> None:
    answer = lambda messages: json.dumps({"questions": [good([], evidence=shown(messages))]})
    with FaultyServer(answer=answer) as server:
        cases, [rejected] = QuestionTeacher(Endpoint(server.config())).write([history("a", MAX_EVIDENCE + 1)])
    assert cases == [] and rejected.reason == "too_much_evidence"


def test_an_answer_that_is_no_json_is_asked_for_once_more() -> None:
    def answer(messages: list[dict[str, Any]]) -> str:
        return json.dumps({"questions": [good(shown(messages))]}) if len(messages) == 4 else "I would rather not {"

    with FaultyServer(answer=answer) as server:
        endpoint = Endpoint(server.config())
        [case], rejected = QuestionTeacher(endpoint).write([history("a")])
    assert len(case.questions) == 1 and rejected == []
    assert {role: of["answers"] for role, of in endpoint.account()["roles"].items()} == {ROLE: 1, RETRY_ROLE: 1}


@pytest.mark.parametrize("text", ["[]", "{}", '{"questions": 3}', "[" * 10_000, '{"questions": [' * 500, "no {braces"])
def test_garbage_is_counted_and_said(tmp_path: Path, text: str) -> None:
    with FaultyServer(answer=lambda messages: text) as server:
        teacher = QuestionTeacher(Endpoint(server.config()))
        with pytest.raises(ValueError, match=r"every question of .* was rejected"):
            write_questions(teacher, [history("a")], tmp_path)
    assert json.loads((tmp_path / ACCOUNT).read_text())["rejected"] == {"no_questions": 1}
    assert not (tmp_path / QUESTIONS).exists()


def test_a_server_that_hangs_or_refuses_costs_its_part_alone(tmp_path: Path) -> None:
    answer = lambda messages: json.dumps({"questions": [good(shown(messages))]})
    with FaultyServer(["hang", "400", "429"], answer=answer) as server:
        config = server.config(timeout_s=0.3, retries=0, concurrency=1)
        teacher = QuestionTeacher(Endpoint(config, tmp_path / RESPONSES))
        cases, rejected = teacher.write([history(name) for name in "abcd"])
        assert [case.id for case in cases] == ["d"] and {r.reason for r in rejected} == {"failed"}
        before = server.requests
        again = QuestionTeacher(Endpoint(config, tmp_path / RESPONSES))
        assert len(again.write([history(name) for name in "abcd"])[0]) == 4
        assert server.requests == before + 3  # what was answered is asked for once


def test_a_wrong_key_stops_and_is_told_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHERS_KEY", "s3cret-key")
    with FaultyServer(["401"] * 9) as server:
        teacher = QuestionTeacher(Endpoint(server.config(key_env="TEACHERS_KEY"), tmp_path / RESPONSES))
        with pytest.raises(EndpointStop, match="TEACHERS_KEY") as stop:
            write_questions(teacher, [history("a"), history("b")], tmp_path)
        assert server.keys == {"Bearer s3cret-key"} and "s3cret" not in str(stop.value)
    assert not any(b"s3cret" in file.read_bytes() for file in tmp_path.iterdir())


@pytest.mark.slow
def test_the_command_asks_about_what_our_expert_did(tmp_path: Path) -> None:
    """What it writes, the router's training reads."""
    with FaultyServer(answer=lambda messages: json.dumps({"questions": [good(shown(messages))]})) as server:
        where = [f"api.base_url={server.url}", "api.model=m", "api.key_env=null", "worlds=2"]
        done = memcompiler("data", "questions", *where, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["questions"] == 2
    cases = load_question_sets(tmp_path / QUESTIONS)
    assert {case.histories[0].task.kind for case in cases} == {"history"} and len(cases) == 2
    assert all(label_questions(case, S3MemSettings()) for case in cases)


def test_settings_name_a_model() -> None:
    with pytest.raises(ConfigError, match=r"questions need api\.model"):
        load_config(QuestionsConfig, None, [])
    assert load_config(QuestionsConfig, None, ["api.model=m", "per_part=3"]).per_part == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row | {"questions": [row["questions"][0] | {"evidence": ["a#77"]}]},
        lambda row: {"id": "a"},
        lambda row: row | {"questions": [{"text": "?"}]},
        lambda row: [row],
    ],
)
def test_a_file_that_points_nowhere_is_refused(tmp_path: Path, change: Any) -> None:
    with FaultyServer(answer=lambda messages: json.dumps({"questions": [good(shown(messages))]})) as server:
        write_questions(QuestionTeacher(Endpoint(server.config())), [history("a")], tmp_path)
    path = tmp_path / QUESTIONS
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ValueError, match=r"line 1 is no question set"):
        load_question_sets(path)
