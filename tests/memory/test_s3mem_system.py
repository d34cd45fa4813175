"""S3Mem as a memory system: no gold reaches it, versions, goals of episodes, a language model as writer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_gen.questions.records import Question, QuestionSet
from envs.base import Task
from memory.linear import heads_sha256
from memory.protocol import Query, Record, Trace
from memory.s3mem.index import UnitIndex
from memory.s3mem.llm_writer import ANCHORS, WRITER
from memory.s3mem.router import RouterExample, fit_router, load_router, score_candidates, training_matrices
from memory.s3mem.rule_writer import write_units
from memory.s3mem.settings import S3MemSettings
from memory.s3mem.system import S3Mem

DAYS = ("9:00 am on 8 May, 2023", "1:00 pm on 9 June, 2023")
SAID = (
    ("Ann", "I bought a red bicycle last week.", 0),
    ("Bo", "Great, where?", 0),
    ("Ann", "At the old market.", 0),
    ("Bo", "My cat is called Tom.", 1),
    ("Ann", "I sold the bicycle to a friend.", 1),
    ("Bo", "Why?", 1),
)


def dialogue() -> Trace:
    records = [
        Record(t, "", text, "", id=f"D{day + 1}:{t}", actor=actor, when=DAYS[day])
        for t, (actor, text, day) in enumerate(SAID)
    ]
    return Trace(Task("d", "", "", "", "dialogue"), tuple(records), True)


def home(i: int, thing: str, place: str, success: bool = True) -> Trace:
    view = f"You arrive at {place}. On the {place}, you see a {thing} {i}."
    records = (
        Record(0, "You are in the middle of a room.", f"go to {place}", view),
        Record(1, view, f"take {thing} {i} from {place}", f"You pick up the {thing} {i} from the {place}."),
    )
    return Trace(Task(f"t{i}", f"put a {thing} in desk", "home 1", "train", "put"), records, success)


def asked(memory: S3Mem, text: str, tokens: int = 100) -> tuple[list[str], list[str]]:
    [recalled] = memory.recall([Query.question(text, tokens)])
    return [entry.text for entry in recalled.entries], [p for ids in recalled.record_ids for p in ids]


def test_a_question_is_answered_by_a_pack_of_entries_with_pointers(tmp_path: Path) -> None:
    memory = S3Mem(tmp_path, S3MemSettings(fill=True))
    memory.commit([[dialogue()]])
    texts, pointers = asked(memory, "Which red bicycle did Ann buy last week?", 30)
    assert "D1:0" in pointers and sum(1.3 * len(text.split()) for text in texts) <= 30
    assert texts == sorted(texts, key=lambda t: [said for _, said, _ in SAID].index(t.partition(": ")[2]))
    [recalled] = memory.recall([Query.question("Where did Ann buy the bicycle?", 30)])
    assert all(memory[entry.id] == entry for entry in recalled.entries)
    assert memory.recall([Query.question("bicycle?", 1)])[0].entries == ()  # not even one fits


def test_answers_evidence_and_categories_change_nothing(tmp_path: Path) -> None:
    """Units and packs are the same whatever the gold is, and whether there are questions at all."""
    texts = ("Who sold it?", "Why?")
    questions = tuple(Question(str(i), t, f"a{i}", f"c{i}", (f"D1:{i}",)) for i, t in enumerate(texts))
    case = QuestionSet("d", (dialogue(),), questions)
    shuffled = replace(
        case,
        questions=tuple(
            replace(q, answer=o.answer, evidence=o.evidence, category=o.category)
            for q, o in zip(questions, reversed(questions), strict=True)
        ),
    )
    told = []
    for name, each in (("a", case), ("b", shuffled), ("c", replace(case, questions=()))):
        memory = S3Mem(tmp_path / name)
        memory.commit([[trace] for trace in each.histories])
        told.append((memory.units, [asked(memory, q.text) for q in questions]))
    assert told[0] == told[1] == told[2]


def test_asking_leaves_the_router_as_it_is(tmp_path: Path) -> None:
    before = load_router().sha256
    memory = S3Mem(tmp_path)
    memory.commit([[dialogue()]])
    asked(memory, "How many times did Ann speak of the bicycle, before and after?")
    assert load_router().sha256 == before == load_router().manifest["sha256"]
    assert load_router().manifest["benchmarks"] == []


def test_each_object_of_a_goal_is_asked_for_where_it_was_seen_last(tmp_path: Path) -> None:
    memory = S3Mem(tmp_path)
    memory.commit([[home(1, "mug", "shelf 3")], [home(2, "pen", "drawer 1")]])
    elsewhere = home(3, "mug", "bed 9")
    memory.commit([[replace(elsewhere, task=replace(elsewhere.task, scene="home 2"))]])
    [recalled] = memory.recall([Query(Task("t9", "put a mug in desk", "home 1", "test", "put"), 4)])
    texts = [entry.text for entry in recalled.entries]
    assert any("shelf 3" in text and "mug 1" in text for text in texts)
    assert not any("bed 9" in text or "pen" in text for text in texts) and len(texts) <= 4
    [own] = memory.recall([Query(Task("t1", "put a mug in desk", "home 1", "train", "put"), 4)])
    assert not any("mug 1" in entry.text for entry in own.entries)


def test_of_few_units_each_object_gets_its_best_in_turn(tmp_path: Path) -> None:
    memory = S3Mem(tmp_path, S3MemSettings(fill=True))
    memory.commit([[home(1, "cd", "shelf 3")], [home(2, "desklamp", "drawer 1")]])
    task = Task("t9", "look at cd under the desklamp", "home 1", "test", "look")
    told = lambda k: [entry.text for entry in memory.recall([Query(task, k)])[0].entries]
    assert len(told(9)) > 2 and told(2) == [text for text in told(9) if text in told(2)]  # in the order of writing
    assert [("cd 1" in text, "desklamp 2" in text) for text in told(2)] == [(True, False), (False, True)]


@pytest.mark.parametrize("how", ["full", "chunk", "event", "objects"])
def test_units_read_in_four_ways(tmp_path: Path, how: Any) -> None:
    memory = S3Mem(tmp_path, S3MemSettings(representation=how))
    memory.commit([[home(1, "mug", "shelf 3")]])
    text = next(iter(memory)).text
    assert (
        text
        == {
            "full": "[in home 1, step 0, at shelf 3] go to shelf 3; objects: mug 1",
            "chunk": "(step 0) go to shelf 3 -> You arrive at shelf 3. On the shelf 3, you see a mug 1.",
            "event": "go to shelf 3",
            "objects": "shelf 3, mug 1",
        }[how]
    )


@pytest.mark.parametrize(
    "switch",
    [
        {"anchors": False},
        {"edges": False},
        {"packing": "topk"},
        {"router": "retrieval_rank"},
        {"dense": "hash"},
        {"channels": ["lexical"]},
        {"fill": True},
        {"n_single": 1},
        {"hops": 0},
    ],
)
def test_every_switch_leaves_a_pack_within_the_budget(tmp_path: Path, switch: dict[str, Any]) -> None:
    memory = S3Mem(tmp_path, S3MemSettings(**switch))
    memory.commit([[dialogue()]])
    texts, pointers = asked(memory, "Where did Ann buy the bicycle, and to whom did she sell it?", 60)
    assert pointers and sum(1.3 * len(text.split()) for text in texts) <= 60


def test_a_model_that_embeds_is_the_dense_channel_where_it_is_given(tmp_path: Path) -> None:
    meanings = {"cat": 0, "pet": 0, "bicycle": 1, "bike": 1}
    embed = lambda texts: np.array(
        [[sum(word in text.lower() for word, at in meanings.items() if at == i) for i in range(2)] for text in texts],
        dtype=float,
    )
    settings = S3MemSettings(dense="embed", channels=("dense",), router="retrieval_rank", fill=False, n_single=1)
    memory = S3Mem(tmp_path, settings, embed=embed)
    memory.commit([[dialogue()]])
    assert asked(memory, "Which pet?")[1] == ["D2:3"] and asked(memory.at(1), "Which pet?")[1] == ["D2:3"]
    assert asked(memory, "What bike?")[1] == ["D1:0"]
    with pytest.raises(ValueError, match=r"set memory\.embed"):
        asked(S3Mem(tmp_path, settings), "Which pet?")


def test_a_router_may_be_replaced_but_not_by_one_of_other_features(tmp_path: Path) -> None:
    index = UnitIndex(write_units(dialogue()), S3MemSettings())
    scores = index.score("Where did Ann buy the bicycle?")
    sold, bought = index.units[4].id, index.units[2].id
    example = RouterExample(scores, frozenset({bought}), frozenset({bought}), ((bought, sold),))
    fit_router(training_matrices([example] * 2)).save(tmp_path / "own.safetensors")
    path = str(tmp_path / "own.safetensors")
    memory = S3Mem(tmp_path / "memory", S3MemSettings(router_path=path))
    memory.commit([[dialogue()]])
    assert "D1:2" in asked(memory, "Where did Ann buy the bicycle?", 60)[1]
    other = {"features": "full", "sha256": heads_sha256(load_router(Path(path)).heads, "full")}
    manifest = json.loads((tmp_path / "own.json").read_text()) | other
    (tmp_path / "own.json").write_text(json.dumps(manifest))
    load_router.cache_clear()
    with pytest.raises(ValueError, match="trained on full features"):
        score_candidates(scores, S3MemSettings(router_path=path))


# the language model as writer ----------------------------------------------------------------------------------------


class Model:
    """Answers by role; notes what it was shown."""

    def __init__(self, *written: str) -> None:
        self.written, self.shown = list(written), list[str]()

    def __call__(self, messages: Sequence[dict[str, Any]], role: str, max_tokens: int) -> str | None:
        self.shown.append(messages[0]["content"])
        if role == ANCHORS:
            return '{"kind": "event", "ops": ["count"], "objects": ["bicycle"]}'
        assert role == WRITER
        return self.written.pop(0) if self.written else None


def units(*told: dict[str, Any]) -> str:
    return "Sure: " + json.dumps({"units": list(told)})


def test_a_language_model_writes_units_and_the_rules_those_that_it_leaves_out(tmp_path: Path) -> None:
    ids = ["D1:0", "D1:2", "D9:9"]
    bought = {"event": "Ann bought a bicycle at the market.", "objects": ["Bicycle"], "record_ids": ids}
    model = Model(units(bought, {"event": ""}, {"event": "x", "record_ids": ["D9:9"]}), "no JSON", "still none")
    memory = S3Mem(tmp_path, S3MemSettings(writer="llm"), ask=model)
    assert memory.commit([[dialogue()]]).added == 1
    assert len(model.shown) == 3  # a session each, and once more where the answer could not be read
    assert "[D1:0] (9:00 am on 8 May, 2023) Ann: I bought" in model.shown[0] and "D2:3" not in model.shown[0]
    first, *others = memory.units
    assert first.event == bought["event"] and first.pointers == ("D1:0", "D1:2") and first.objects == ("bicycle",)
    assert [unit.pointers for unit in others] == [("D1:1",), ("D2:3",), ("D2:4",), ("D2:5",)]
    assert memory.failures == {"no_units": 1, "no_event": 1, "no_record": 1, "unknown_record": 2}
    again = S3Mem(tmp_path, S3MemSettings(writer="llm"))  # whoever reads it needs no model
    assert [unit.id for unit in again.units] == [unit.id for unit in memory.units]
    assert memory.commit([[dialogue()]]).ignored == 1 and len(model.shown) == 3
    assert asked(memory, "How often?")[1] and "How often?" in model.shown[-1]
    assert memory.reads_with == ("api",) and again.reads_with == ()
