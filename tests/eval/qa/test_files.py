"""Benchmarks' files as cases: hand-made samples of each format, and LoCoMo's own where it is at hand."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from data_gen.questions.records import Question, QuestionSet, load_question_sets, save_question_sets
from envs.base import Task
from eval.qa.benchmark_files import read_question_sets
from memory.protocol import Record, Trace

LOCOMO = {
    "sample_id": "conv-1",
    "conversation": {
        "speaker_a": "Ann",
        "speaker_b": "Bo",
        "session_1_date_time": "9 am on 8 May, 2023",
        "session_1": [
            {"speaker": "Ann", "dia_id": "D1:1", "text": "Hi!"},
            {"speaker": "Bo", "dia_id": "D1:2", "text": "Look.", "blip_caption": "a cat"},
        ],
        "session_2_date_time": "1 pm on 9 May, 2023",
    },
    "observation": {"session_1_observation": {"Bo": [["Bo has a cat.", "D1:2"], ["Nothing.", "D7:1"]]}},
    "qa": [
        {"question": "What?", "answer": 2022, "evidence": ["D1:1; D1:2", "D"], "category": 1},
        {"question": "Who?", "adversarial_answer": "Ann", "evidence": ["D9:1"], "category": 5},
    ],
}
AMA = {
    "episode_id": 7,
    "task": "find a key",
    "domain": "game",
    "trajectory": [{"turn_idx": 0, "action": "open door", "observation": "It is dark."}, {"action": "look"}],
    "qa_pairs": [
        {"question": "What was opened?", "answer": "the door", "type": "recall"},
        {"question": "?", "answer": 1},
    ],
}


def test_locomo_s_turns_facts_and_questions(tmp_path: Path) -> None:
    path = tmp_path / "locomo.json"
    path.write_text(json.dumps([LOCOMO]))
    [case] = read_question_sets(path)
    [history], [facts] = case.histories, case.facts
    assert [(r.id, r.actor, r.action) for r in history.records] == [
        ("D1:1", "Ann", "Hi!"),
        ("D1:2", "Bo", "Look. [photo: a cat]"),
    ]
    assert [(r.id, r.action, r.when) for r in facts.records] == [("D1:2", "Bo has a cat.", "9 am on 8 May, 2023")]
    first, second = case.questions
    assert first.evidence == ("D1:1", "D1:2") and first.answer == "2022" and first.category == "multi-hop"
    assert second.evidence == () and second.absent and second.answer == "Ann"


def test_ama_bench_s_lines(tmp_path: Path) -> None:
    path = tmp_path / "open_end_qa_set.jsonl"
    path.write_text(json.dumps(AMA) + "\n\n")
    [case] = read_question_sets(path)
    assert [(r.t, r.action, r.feedback) for r in case.histories[0].records] == [
        (0, "open door", "It is dark."),
        (1, "look", ""),
    ]
    told = [(q.id, q.category, q.answer) for q in case.questions]
    assert told == [("7/0", "recall", "the door"), ("7/1", "unknown", "1")]


def test_emembench_s_folders(tmp_path: Path) -> None:
    for name in ("DIF_1", "DIF_2"):
        (tmp_path / "zork" / name).mkdir(parents=True)
        steps = [{"t": 1, "action": "north", "reason": "why", "obs": " A  room. ", "inventory": ["lamp", "key"]}]
        (tmp_path / "zork" / name / "qa_context.json").write_text(json.dumps({"steps": steps}))
        told = {"question": "Q", "paraphrase": "P?", "gt": "lamp", "type": "state"}
        rows = [told, {"question": "R?", "gt": "Not answerable"}]
        (tmp_path / "zork" / name / "qa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    cases = read_question_sets(tmp_path)
    assert [case.id for case in cases] == ["zork/DIF_1", "zork/DIF_2"]
    [record] = cases[0].histories[0].records
    assert (record.t, record.action, record.feedback) == (1, "north", "obs: A room.; inventory: lamp, key")
    told = [(q.text, q.absent, q.category) for q in cases[0].questions]
    assert told == [("P?", False, "state"), ("R?", True, "unknown")]


@pytest.mark.parametrize("text", ["{}", "[]", "[1]", "no JSON", '[{"conversation": 1}]', '{"trajectory": 3}'])
def test_what_is_no_such_file_is_said(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"no file of questions"):
        read_question_sets(path)
    with pytest.raises(ValueError, match="no episode of EMemBench"):
        (tmp_path / "empty").mkdir()
        read_question_sets(tmp_path / "empty")


def test_the_four_dialogues_are_whole(shared_data: Path) -> None:
    cases = read_question_sets(shared_data / "locomo" / "locomo_4.json")
    questions = [question for case in cases for question in case.questions]
    assert sum(len(case.histories[0].records) for case in cases) == 2080 and len(questions) == 757
    assert Counter(question.category for question in questions) == {
        "multi-hop": 111,
        "temporal": 130,
        "open-domain": 32,
        "single-hop": 311,
        "adversarial": 173,
    }
    assert sum(bool(question.evidence) for question in questions) == 755


@pytest.mark.parametrize("mark", ["\u2028", "\x85", "\x0b", "\ud800"])
def test_texts_with_other_line_breaks_survive_their_file(mark: str, tmp_path: Path) -> None:
    trace = Trace(Task("t", f"a{mark}b", "", "", "log"), (Record(0, "", f"say{mark}so", "", id="r"),), True)
    cases = [QuestionSet("c", (trace,), (Question("q", f"what{mark}?", f"x{mark}"),))]
    save_question_sets(cases, tmp_path / "cases.jsonl")
    assert load_question_sets(tmp_path / "cases.jsonl") == cases
