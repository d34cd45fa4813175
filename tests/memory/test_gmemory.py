"""G-Memory: the worked example, hops, rounds of insights and their scores, a model's answers and unusable ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lm.answer_cache import EndpointStop
from memory.gmemory.agent import (
    FAILURE,
    INSIGHTS,
    KEY_STEPS,
    MERGE,
    RELEVANCE,
    connected_parts,
    read_operations,
    read_relevance,
)
from memory.gmemory.hierarchy import INSIGHT, task_text
from memory.gmemory.insights import Insight, Insights, advice, insight_id, warning
from memory.gmemory.settings import GMemorySettings
from memory.gmemory.system import GMemory
from memory.items import Origin
from memory.journal import FILE
from memory.protocol import Query
from memory.registry import MemoryTools
from memory.similarity import lexical, terms_of
from tests.memory.worked_examples import E1, E2, HEAT, READER, T3, like, task

Reply = Callable[[str, str], str | None]
ADVICE = "take the thing before heating it, because {} of kind " + HEAT + " succeeded so"


def gmemory(path: Path, reply: Reply | None = None, **settings: Any) -> GMemory:
    def ask(messages: Sequence[dict[str, Any]], role: str, most: int) -> str | None:
        assert reply is not None
        return reply(role, messages[1]["content"])

    return GMemory(path, GMemorySettings(**settings), tools=MemoryTools(ask=ask if reply else None, reader=READER))


def recalled(memory: GMemory, of: Any = T3, k: int = 4) -> list[str]:
    """Return the nodes of the recalled trajectories, and the texts of the insights."""
    entries = memory.recall([Query(of, k)])[0].entries
    return [e.text if e.id.startswith(INSIGHT) else e.id.removeprefix("gmemory/") for e in entries]


def test_the_worked_example_by_rule(tmp_path: Path) -> None:
    memory = gmemory(tmp_path)
    memory.commit([[E1], [E2]])
    texts = [terms_of(task_text(each)) for each in (E1.task, E2.task, T3)]
    similar = [round(lexical(texts[i], texts[j]), 4) for i, j in ((0, 1), (0, 2), (1, 2))]
    assert similar == [0.7628, 0.9091, 0.8581]
    assert memory.state.edges == {"q1": {"q2": None}, "q2": {"q1": None}}
    assert recalled(memory) == ["q1.1", "q2.1"] and recalled(memory, k=1) == ["q1.1"] and recalled(memory, k=0) == []
    assert recalled(memory, E1.task) == ["q2.1"] and recalled(memory, E2.task) == ["q1.1"]
    entry = memory["gmemory/q1.1"]
    assert entry.provenance.actions == E1.actions and entry.provenance.task_id == "t1"
    assert entry.text.endswith("key steps: take the mug; heat the mug with the microwave; put the mug in the cabinet")


def test_from_the_fifth_success_on_an_insight_comes_first(tmp_path: Path) -> None:
    memory = gmemory(tmp_path)
    memory.commit([[like(E1, f"h{n}")] for n in range(4)])
    assert len(memory.state.insights) == 0
    memory.commit([[like(E1, "h4")]])
    assert recalled(memory) == [ADVICE.format("5 tasks"), "q5.1", "q4.1", "q3.1"]
    assert recalled(memory, task("h4", E1.task.goal))[0] == ADVICE.format("4 tasks")  # as if its own had not been there
    [first, *_] = memory.recall([Query(T3)])[0].entries
    assert first.provenance.actions == () and memory[first.id].text == first.text
    assert memory[INSIGHT + insight_id(ADVICE.format("2 tasks"))].text == ADVICE.format("2 tasks")
    with pytest.raises(KeyError):
        memory[INSIGHT + insight_id(ADVICE.format("6 tasks"))]


def test_an_insight_that_only_the_tasks_own_episodes_support_is_hidden(tmp_path: Path) -> None:
    memory = gmemory(tmp_path)
    memory.commit([[replace(like(E1, "h"), attempt=n)] for n in range(4)] + [[like(E2, "t2")]])
    of_heat = lambda name: [text for text in recalled(memory, task(name, E1.task.goal)) if "heating" in text]
    assert of_heat("other") == [ADVICE.format("4 tasks")] and of_heat("h") == []


def test_a_failure_gives_no_advice_and_warns_only_beside_a_success_of_its_kind(tmp_path: Path) -> None:
    memory = gmemory(tmp_path)
    memory.commit(
        [[like(E1, f"h{n}", success=n == 0)] for n in range(2)] + [[like(E2, f"c{n}", False)] for n in range(3)]
    )
    texts = {insight.shown(len(insight.support)) for insight in memory.state.insights}
    assert texts == {ADVICE.format("1 task"), f"avoid this: the steps ran out, because 1 task of kind {HEAT} failed so"}
    assert not any(name in ("q2.1", "q3.1", "q4.1", "q5.1") for name in recalled(memory, k=9))  # successes only


@pytest.mark.parametrize(("edge", "linked"), [(0.7627, True), (0.7628, False)])
def test_tasks_are_linked_at_the_threshold_and_not_under_it(tmp_path: Path, edge: float, linked: bool) -> None:
    memory = gmemory(tmp_path, edge=edge)
    memory.commit([[E1], [E2]])
    assert bool(memory.state.edges["q1"]) == linked
    exact = gmemory(tmp_path / "exact", edge=lexical(*(terms_of(task_text(each.task)) for each in (E1, E2))))
    exact.commit([[E1], [E2]])
    assert exact.state.edges["q1"]


def test_one_hop_is_followed_and_a_second_only_if_asked_for(tmp_path: Path) -> None:
    """q1 - q2 - q3 are a chain of tasks that share half of their words with the next."""
    goals = ("red mug one two", "one two blue cup", "blue cup six pen")
    traces = [replace(like(E1, name), task=task(name, goal, "")) for name, goal in zip("abc", goals, strict=True)]
    for hops, expected in ((0, ["q1"]), (1, ["q1", "q2"]), (2, ["q1", "q2", "q3"])):
        memory = gmemory(tmp_path / str(hops), edge=0.5, hops=hops)
        memory.commit([[each] for each in traces])
        assert memory.state.neighbourhood(["q1"], "") == expected
    assert memory.state.neighbourhood(["q1"], "b") == ["q1"]  # no way through a task's own episodes


def supporters(*names: str) -> dict[str, Origin]:
    return {name: Origin(n, task(name, "g"), True) for n, name in enumerate(names)}


def test_scores_of_operations_by_hand() -> None:
    insights = Insights()
    score = lambda text: insights.by_text[text].score
    insights.apply({"op": "ADD", "text": "a"}, supporters("q1"))
    assert score("a") == 2
    insights.apply({"op": "AGREE", "text": "a"}, supporters("q2"))
    insights.apply({"op": "EDIT", "text": "a", "new": "b"}, supporters("q3"))
    assert score("b") == 4 and list(insights.by_text["b"].support) == ["q1", "q2", "q3"] and "a" not in insights.by_text
    for n in range(3):
        insights.apply({"op": "REMOVE", "text": "b"}, {})
        assert score("b") == 3 - n
    insights.apply({"op": "REMOVE", "text": "b"}, {})
    assert len(insights) == 0 and insights.shown[insight_id("a")][0] == "a"
    for op in ("AGREE", "REMOVE", "EDIT"):
        insights.apply({"op": op, "text": "unknown", "new": "c"}, supporters("q1"))
    assert len(insights) == 0
    for n in range(10):
        insights.apply({"op": "ADD", "text": f"i{n}"}, supporters("q1"))
        insights.apply({"op": "AGREE", "text": f"i{n}"}, {})
        insights.apply({"op": "AGREE", "text": f"i{n}"}, {})
    insights.apply({"op": "REMOVE", "text": "i0"}, {})
    assert score("i0") == 1  # of ten insights, 3 at a time
    insights.apply({"op": "EDIT", "text": "i1", "new": "i2"}, {})  # becomes an exact duplicate
    assert len(insights) == 9 and score("i2") == 5


def test_shown_insights_gain_by_a_success_and_lose_by_a_failure(tmp_path: Path) -> None:
    memory = gmemory(tmp_path)
    memory.commit([[like(E1, f"h{n}")] for n in range(5)])
    scores = [insight.score for insight in memory.state.insights]
    assert scores == [6]  # ADD and four times AGREE
    shown = (memory.recall([Query(T3)])[0].entries[0].id, INSIGHT + "unknown", "gmemory/q1.1")
    for n in range(4):
        memory.commit([[replace(like(E2, f"x{n}", success=n == 0), shown=shown)]])
        scores += [insight.score for insight in memory.state.insights]
    assert scores == [6, 7, 5, 3, 1]
    memory.commit([[replace(like(E2, "x4", success=False), shown=shown)]])
    assert all(insight.text != ADVICE.format("{tasks}") for insight in memory.state.insights)
    assert memory[shown[0]].text == ADVICE.format("5 tasks")  # deleted, and readable


def test_a_rounds_insights_do_not_depend_on_batches(tmp_path: Path) -> None:
    told = [[like(E1 if n % 3 else E2, f"x{n}", success=n % 4 > 0)] for n in range(13)]
    one, many = gmemory(tmp_path / "one"), gmemory(tmp_path / "many")
    one.commit(told)
    for episode in told:
        many.commit([episode])
        recalled(many)
    contents = lambda memory: [(e.id, e.text) for e in memory]
    assert contents(one) == contents(many) and len(one.state.insights) > 1
    assert recalled(one.at(5)) == recalled(many.at(5)) != recalled(one)


def test_advice_and_warnings_in_words() -> None:
    assert advice(["take", "clean", "put", "take"], "k").startswith(
        "take the thing before cleaning it, because {tasks}"
    )
    assert advice(["open", "take"], "") == "open something before taking it, because {tasks} succeeded so"
    assert advice(["take", "take"], "k") == advice([], "k") == ""
    insight = Insight(warning("{tasks} x.", "k{tasks}"), 2, {}, by_rule=True)
    assert insight.shown(3) == "avoid this: (tasks) x, because 3 tasks of kind k(tasks) failed so"


def told(role: str, text: str) -> str:
    match role:
        case "key_steps":
            return "Sure:\n1. take the mug\n2. heat it"
        case "failure_reason":
            return "It ran\nout of steps."
        case "insights":
            return "ADD: heat first, because it works.\nAGREE 1: yes\nEDIT 7: none\nnonsense"
    return "1. one rule"


def test_a_models_answers_are_stored_and_read_without_it(tmp_path: Path) -> None:
    calls = list[str]()
    memory = gmemory(tmp_path, lambda role, text: calls.append(role) or told(role, text))
    memory.commit([[like(E1, f"h{n}", success=n < 4)] for n in range(5)])
    assert calls == [*[KEY_STEPS] * 4, FAILURE, *[INSIGHTS] * 10]  # per anchor a pair and the successes
    again = gmemory(tmp_path)
    assert [(e.id, e.text) for e in again] == [(e.id, e.text) for e in memory] and not again.failures
    assert [insight.text for insight in again.state.insights] == ["heat first, because it works."]
    assert again["gmemory/q1.1"].text.endswith("\nkey steps: take the mug; heat it")
    assert again["gmemory/q5.1"].text.endswith("\nwhy it failed: It ran out of steps.")
    assert recalled(again)[0] == "heat first, because it works."
    [insight] = again.state.insights
    hidden = {n for n in range(5) if "heat first" not in recalled(again, task(f"h{n}", E1.task.goal))[0]}
    assert {f"h{n}" for n in hidden} == insight.worded and len(hidden) == 2  # in view when the model wrote it
    apart = again.recall([Query(task("t9", E1.task.goal, scene="elsewhere"), isolation="scene")])[0].entries
    assert apart[0].text.startswith("take the thing before heating it") and "heat it" in apart[2].text


@pytest.mark.parametrize("reply", ["", "nothing of use", None, "ADD:\nEDIT 1: x\nAGREE 0: y\nREMOVE 99: z"])
def test_unusable_answers_leave_rounds_to_the_rules_and_are_counted(tmp_path: Path, reply: str | None) -> None:
    memory = gmemory(tmp_path, lambda role, text: reply)
    memory.commit([[like(E1, f"h{n}")] for n in range(5)])
    assert recalled(memory)[0] == ADVICE.format("5 tasks") and memory["gmemory/q1.1"].text.count("take the mug;") == 1
    assert memory.failures == {KEY_STEPS: 5, INSIGHTS: 5}


def test_operations_of_an_answer() -> None:
    known = [Insight("a", 2, {}), Insight("b", 2, {})]
    lines = ["- ADD: new", "edit 2: better", "AGREE 1", "REMOVE 2: no", "ADD: fifth"]
    assert read_operations("\n".join(lines), known) == [
        {"op": "ADD", "text": "new"},
        {"op": "EDIT", "text": "b", "new": "better"},
        {"op": "AGREE", "text": "a"},
        {"op": "REMOVE", "text": "b"},
    ]
    assert read_operations("AGREE 3: x\nREMOVE -1: x\nADD 1:\nEDIT: x\nADD" + "9" * 9, known) is None
    assert [read_relevance(each) for each in ("8/10", "x 10.", "0", "999", "none", "")] == [
        8,
        10,
        None,
        None,
        None,
        None,
    ]


def test_ten_insights_of_a_part_of_the_graph_are_merged_and_fewer_than_nine_are_not(tmp_path: Path) -> None:
    asked = list[str]()

    def many(role: str, text: str) -> str:
        asked.append(role)
        unheard = 4 * asked.count(INSIGHTS)
        return "\n".join(f"ADD: insight {unheard + n}" for n in range(4)) if role == INSIGHTS else told(role, text)

    memory = gmemory(tmp_path, many)
    memory.commit([[like(E1, f"h{n}")] for n in range(20)])
    assert asked.count(INSIGHTS) == 4 * 5 and asked.count(MERGE) == 8  # 80 insights in tens
    assert [insight.text for insight in memory.state.insights] == ["one rule"]
    assert connected_parts({"a": {"b": None}, "b": {"a": None}, "c": {}}) == {"a": "a", "b": "a", "c": "c"}
    few = gmemory(tmp_path / "few", told)
    few.commit([[like(E1, f"h{n}")] for n in range(20)])
    assert len(few.state.insights) == 1


def test_operations_survive_a_writer_that_comes_between(tmp_path: Path) -> None:
    """The round was asked for as the fifth row and became the sixth; the tenth row holds none, so the rules do."""
    memory = gmemory(tmp_path, told)
    memory.commit([[like(E1, f"h{n}")] for n in range(5)])
    lines = (tmp_path / FILE).read_text().splitlines()
    stranger = gmemory(tmp_path / "other")
    stranger.commit([[E2]])
    other = (tmp_path / "other" / FILE).read_text().splitlines()
    (tmp_path / FILE).write_text("\n".join([*lines[:4], *other, *lines[4:], ""]))
    again = gmemory(tmp_path)
    texts = [insight.text for insight in again.state.insights]
    assert "heat first, because it works." in texts and len(texts) > 1  # row five ran the rule
    again.commit([[like(E1, f"x{n}")] for n in range(4)])
    assert ADVICE.format("9 tasks") in [insight.shown(len(insight.support)) for insight in again.state.insights]


def test_a_stopped_endpoint_leaves_the_journal_untouched(tmp_path: Path) -> None:
    def stop(role: str, text: str) -> str:
        if role == INSIGHTS:
            raise EndpointStop("budget spent")
        return told(role, text)

    memory = gmemory(tmp_path, stop)
    memory.commit([[like(E1, f"h{n}")] for n in range(4)])
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(EndpointStop):
        memory.commit([[like(E1, "h4")]])
    assert (tmp_path / FILE).read_bytes() == before and len(memory) == 4


def test_a_model_may_rank_trajectories_at_recall(tmp_path: Path) -> None:
    gmemory(tmp_path).commit([[E1], [E2]])
    score = lambda role, text: "10" if role == RELEVANCE and "sinkbasin" in text else "2"
    asking = gmemory(tmp_path, score, relevance="llm")
    assert recalled(asking) == recalled(asking.at(2)) == ["q2.1", "q1.1"]
    broken = gmemory(tmp_path, lambda role, text: "no number", relevance="llm")
    assert recalled(broken) == ["q1.1", "q2.1"] and broken.recall_failures == {RELEVANCE: 2}
    assert recalled(gmemory(tmp_path, score)) == ["q1.1", "q2.1"]  # by rule unless the settings ask
    assert json.loads((tmp_path / FILE).read_text().splitlines()[0])["answers"] == {}
