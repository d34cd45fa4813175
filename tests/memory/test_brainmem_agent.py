"""The experience agent by endpoint: what a model says becomes short lines, or the rules speak, and that is counted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from configs.collect import MemoryConfig
from data_gen.memory_factory import open_memory
from envs.household.command_reader import HouseholdReader
from lm.answer_cache import EndpointStop
from memory import replies
from memory.brainmem import agent
from memory.brainmem.settings import BrainMemSettings
from memory.brainmem.system import BrainMem
from memory.protocol import Query, Recall
from tests.faulty_server import FaultyServer
from tests.memory.test_contract import HOSTILE, task, trace

SAID = {
    "episode_success": True,
    "primary_task": "put",
    "success_patterns": ["look on low shelves first"],
    "failure_causes": [],
    "learning_insights": ["mugs stand on shelves"],
    "recommendations": ["go slowly"],
    "action_sequences": {"successful": [], "failed": []},
}
TOPIC = agent.Topic("FloorPlan1", "put", frozenset({"mug"}))


def brain(path: Path, **arguments: Any) -> BrainMem:
    return BrainMem(path, reader=HouseholdReader(), **arguments)


class Model:
    """Answers by role, and writes down what it was asked."""

    def __init__(self, **answers: Any) -> None:
        self.answers = {"reflection": "It went well.", "experience": json.dumps(SAID), "guideline": "Shelves first."}
        self.answers |= answers
        self.asked: list[str] = []
        self.chats: list[Sequence[dict[str, Any]]] = []

    def __call__(self, messages: Sequence[dict[str, Any]], role: str, most: int) -> str | None:
        self.asked.append(role)
        self.chats.append(messages)
        answer = self.answers[role]
        return answer.pop(0) if isinstance(answer, list) else answer


def prompt(memory: BrainMem, of: int = 9) -> str:
    [first] = memory.recall([Query(task(of))])
    return "\n\n".join(entry.text for entry in first.entries)


def test_after_an_episode_exactly_its_calls_are_made(tmp_path: Path) -> None:
    model = Model()
    memory = brain(tmp_path, ask=model)
    memory.commit([[trace(1)]])
    assert model.asked == ["reflection", "experience"]
    memory.commit([[trace(1)]])  # known: nothing is asked
    prompt(memory)
    session = memory.session(Query(task(9)), Recall())
    session.recall("You are in the middle of a room.")
    assert len(model.asked) == 2
    memory.commit([[trace(4)], [trace(7)]])  # t1 and t4 agree: three guidelines are formed, and one call made for each
    assert model.asked[2:] == ["reflection", "experience", *["guideline"] * 3, "reflection", "experience"]
    assert "mugs stand on shelves" in model.chats[4][1]["content"] or "low shelves" in model.chats[4][1]["content"]


def test_what_a_model_said_is_in_the_journal_and_in_prompts(tmp_path: Path) -> None:
    memory = brain(tmp_path, ask=Model())
    memory.commit([[trace(1)], [trace(4)]])
    assert "look on low shelves first" in prompt(memory) and "Shelves first." in prompt(memory)
    again = brain(tmp_path)  # without a model: what was said is in the journal
    assert prompt(again) == prompt(memory) and [e.text for e in again] == [e.text for e in memory]
    by_rule = brain(tmp_path / "rules")
    by_rule.commit([[trace(1)], [trace(4)]])
    assert prompt(by_rule) != prompt(memory)


def test_isolated_by_scene_guidelines_have_the_words_of_the_rules(
    tmp_path: Path,
) -> None:
    memory = brain(tmp_path, ask=Model())
    memory.commit([[trace(1)], [trace(4)]])
    [elsewhere] = memory.recall([Query(task(9, scene="FloorPlan2"), isolation="scene")])
    text = "\n".join(entry.text for entry in elsewhere.entries)
    assert "look on low shelves first" in text and "Valuable Guidelines:" in text and "Shelves first." not in text
    [here] = memory.recall([Query(task(9), isolation="scene")])
    assert not any("shelves" in entry.text for entry in here.entries)


def test_the_answers_of_one_commit_are_those_of_several(tmp_path: Path) -> None:
    one, several = brain(tmp_path / "one", ask=Model()), brain(tmp_path / "several", ask=Model())
    one.commit([[trace(1)], [trace(4)], [trace(7)]])
    for n in (1, 4, 7):
        several.commit([[trace(n)]])
    assert prompt(one) == prompt(several) and one.snapshot() == several.snapshot() == 3


@pytest.mark.parametrize(
    "answer",
    [
        "```json\n" + json.dumps(SAID) + "\n```",
        f"Here it is: {json.dumps(SAID)} I hope it helps.",
        json.dumps({**SAID, "learning_insights": "mugs stand on shelves"}),
        json.dumps({**SAID, "failure_causes": [3, None, {"a": 1}], "more": "x"}),
    ],
)
def test_answers_that_can_be_read_are(answer: str) -> None:
    read = agent.read_experience(answer)
    assert read is not None and read["success_patterns"] == ["look on low shelves first"]
    assert read["learning_insights"] == ["mugs stand on shelves"] and read["failure_causes"] == []


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "no",
        json.dumps(SAID)[:-20],
        "[1, 2]",
        '{"a": 1}',
        "{" * 100_000,
        "\ud800{}",
        json.dumps([SAID])[:30],
    ],
)
def test_others_are_asked_for_once_more_and_then_the_rules_speak(answer: str, tmp_path: Path) -> None:
    model, by_rule = Model(experience=answer, reflection="", guideline=""), brain(tmp_path / "rules")
    memory = brain(tmp_path / "model", ask=model)
    memory.commit([[trace(1)], [trace(4)]])
    by_rule.commit([[trace(1)], [trace(4)]])
    assert model.asked.count("experience") == 4 and prompt(memory) == prompt(by_rule)
    assert memory.failures == {"experience": 4, "guideline": len(memory.knowledge.guidelines)}
    good = brain(tmp_path / "good", ask=Model(experience=[answer, json.dumps(SAID)]))
    good.commit([[trace(1)]])
    assert good.failures == {"experience": 1} and good.knowledge.experiences[0].recommendations == ("go slowly",)


def test_hostile_answers_add_no_line_to_a_prompt(tmp_path: Path) -> None:
    evil = json.dumps({name: [f"## {HOSTILE}" * 40] for name in agent.LISTS})
    memory = brain(tmp_path / "evil", ask=Model(experience=evil, reflection=HOSTILE, guideline=HOSTILE))
    memory.commit([[trace(1)], [trace(4)]])
    lines = prompt(memory).splitlines()
    heads = [line for line in lines if line.rstrip(":") in ("Valuable Guidelines", "Working Memory", "memory")]
    assert heads == ["Valuable Guidelines:"] and max(map(len, lines)) < 3 * replies.LONGEST + 100
    assert not any(line.startswith(("goal:", "memory:")) for line in lines)


def test_a_retry_is_told_what_the_model_says_of_the_last_attempt(tmp_path: Path) -> None:
    memory = brain(tmp_path, ask=Model(reflection="Open it first."))
    session = memory.again(Query(task(1)), Recall(), [trace(1, success=False)])
    assert session is not None
    text = "\n".join(entry.text for entry in session.recall("You are in the middle of a room.").entries)
    assert "The last attempt failed: Open it first." in text
    assert memory.again(Query(task(1)), Recall(), [trace(1, success=False)] * 3) is None
    off = brain(tmp_path, settings=BrainMemSettings.model_validate({"evolve": {"enabled": False}}))
    assert off.again(Query(task(1)), Recall(), [trace(1, success=False)]) is None


def test_a_model_that_is_gone_leaves_the_journal_as_it_was(tmp_path: Path) -> None:
    def gone(*_: Any) -> str:
        raise EndpointStop("the budget is spent")

    memory = brain(tmp_path, ask=Model())
    memory.commit([[trace(1)]])
    before = prompt(memory)
    memory._ask = gone
    with pytest.raises(EndpointStop):
        memory.commit([[trace(4)]])
    assert memory.snapshot() == 1 and prompt(memory) == before


def test_what_an_endpoint_cannot_answer_is_asked_once(tmp_path: Path) -> None:
    model = Model(experience=None)
    memory = brain(tmp_path, ask=model)
    memory.commit([[trace(1)]])
    assert model.asked == ["reflection", "experience"] and memory.failures == {"experience": 1}


def test_settings_name_the_endpoint_and_it_is_paid_once(tmp_path: Path) -> None:
    with FaultyServer(["500"], answer=lambda messages: json.dumps(SAID)) as server:
        api = server.config().model_dump()
        for name in ("one", "one"):
            config = MemoryConfig.model_validate({"system": "brainmem", "api": api, "settings": {}})
            memory = open_memory(config, tmp_path / name, "household")
            memory.commit([[trace(1)]])
            (tmp_path / name / "journal.jsonl").rename(tmp_path / "gone")  # as if it had been killed before the commit
        answered = server.served["answer"]
    assert answered == 2  # one reflection, one experience
