"""A-Mem: the worked example, links and evolution, a model's answers, and what is left of an unusable one."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lm.answer_cache import EndpointStop
from memory.amem.agent import ANALYSIS, EVOLUTION, read_evolution
from memory.amem.settings import AMemSettings
from memory.amem.system import AMem
from memory.journal import FILE
from memory.protocol import Query, Record
from memory.registry import MemoryTools
from memory.similarity import lexical, terms_of
from tests.memory.worked_examples import CLEAN, E1, E2, HEAT, READER, T3, episode, like, task

Reply = Callable[[str, str], str | None]


def amem(path: Path, reply: Reply | None = None, embed: Any = None, **settings: Any) -> AMem:
    def ask(messages: Sequence[dict[str, Any]], role: str, most: int) -> str | None:
        assert reply is not None
        return reply(role, messages[1]["content"])

    tools = MemoryTools(embed=embed, ask=ask if reply else None, reader=READER)
    return AMem(path, AMemSettings(**settings), tools=tools)


def ids(memory: AMem, name: str = "t3", k: int = 4) -> list[str]:
    query = Query({"t1": E1.task, "t2": E2.task}.get(name, T3), k)
    return [entry.id.removeprefix("amem/") for entry in memory.recall([query])[0].entries]


def test_the_worked_example_by_rule(tmp_path: Path) -> None:
    memory = amem(tmp_path)
    memory.commit([[E1], [E2]])
    one, two = memory["amem/n1.1"], memory["amem/n2.1"]
    assert one.text.splitlines()[-1] == (
        f"keywords: mug, countertop, microwave, cabinet; tags: {HEAT}, FloorPlan1, success; "
        "context: put a hot mug in cabinet: reached"
    )
    assert "keywords: mug, shelf, sinkbasin, coffeemachine; " in two.text
    new, context = "\n".join(two.text.splitlines()[:2]), "put a clean mug in coffeemachine: reached"
    similar = lambda text, to: round(lexical(terms_of(text), terms_of(to)), 4)
    assert similar(f"{new}\n{context}", one.text) == 0.5959  # 13 / sqrt(17 * 28)
    query = "in FloorPlan1: put a hot mug in coffeemachine"
    assert similar(query, two.text) == 0.4536 and similar(query, one.text) == 0.4286
    assert f"tags: {HEAT}, FloorPlan1, success, {CLEAN}; " in memory["amem/n1.2"].text
    assert memory.state.links == {"n1": {"n2": None}, "n2": {"n1": None}}
    assert (ids(memory), ids(memory, "t2"), ids(memory, "t1")) == (["n2.1", "n1.2"], ["n1.1"], ["n2.1"])
    told = memory["amem/n1.2"].provenance  # an evolved note is still its own episode's
    assert (told.task_id, told.goal, told.actions) == ("t1", E1.task.goal, E1.actions)


def test_evolution_adds_tags_and_never_alters_the_episode(tmp_path: Path) -> None:
    memory = amem(tmp_path)
    memory.commit([[E1], *([like(E2, f"x{n}")] for n in range(3)), [like(E1, "y", success=False)]])
    for version in memory.state.items:
        old = memory[f"amem/{version.item}.1"]
        assert version.text.splitlines()[:-1] == old.text.splitlines()[:-1]
    assert memory["amem/n5.1"].text.endswith("put a hot mug in cabinet: not reached, the steps ran out")
    links = memory.state.links
    assert all(one in links[other] for one, others in links.items() for other in others)


def test_notes_of_another_object_or_of_another_scene_and_kind_are_not_linked(tmp_path: Path) -> None:
    memory = amem(tmp_path)
    elsewhere = like(E2, "t2", scene="FloorPlan9")
    memory.commit([[E1], [elsewhere]])
    assert memory.state.links == {"n1": {}, "n2": {}} and len(ids(memory)) == 2
    none = amem(tmp_path / "none", neighbours=0)
    none.commit([[E1], [E2]])
    assert none.state.links == {"n1": {}, "n2": {}}


def test_half_of_a_recall_are_hits_and_links_come_before_further_hits(tmp_path: Path) -> None:
    """n1 is linked with the best hit, n3, and fits the query worse than n2, which handled nothing."""
    memory = amem(tmp_path)
    idle = episode(task("idle", "put a hot cup in coffeemachine"), "go to shelf 1", success=False)
    best = replace(like(E2, "best"), task=replace(T3, id="best"))
    memory.commit([[E1], [idle], [best]])
    scores = {v.item: s for s, v in memory.state.items.search("in FloorPlan1: put a hot mug in coffeemachine", 9)}
    assert sorted(scores, key=lambda name: -scores[name]) == ["n3", "n2", "n1"]
    found = lambda k: [each.split(".")[0] for each in ids(memory, k=k)]
    assert found(2) == ["n3", "n1"] and found(3) == ["n3", "n2", "n1"] and found(9) == ["n3", "n2", "n1"]
    assert found(1) == ["n3"] and found(0) == []


def test_the_released_counter_hides_the_links_of_later_notes(tmp_path: Path) -> None:
    """Of four entries two are hits. The first one's links, oldest first, use up the count of two."""
    committed = [[like(E1, f"h{n}")] for n in range(3)] + [[E2]]
    for variant in ("paper", "released"):
        amem(tmp_path / variant, variant=variant).commit(committed)
    released, paper = (amem(tmp_path / variant, variant=variant) for variant in ("released", "paper"))
    [first, *rest] = [each.split(".")[0] for each in ids(released)]
    linked = [name for name in released.state.links[first]]
    assert rest[:2] == linked[:2] and len(rest) == 3
    assert [each.split(".")[0] for each in ids(paper)][1] != rest[0]


def test_a_changed_note_is_found_by_its_new_tag_at_once(tmp_path: Path) -> None:
    memory = amem(tmp_path)
    memory.commit([[E1]])
    score = lambda: memory.state.items.search("clean", 9)[0][0]
    assert score() == 0
    memory.commit([[E2]])
    assert {version.item for s, version in memory.state.items.search("clean", 9) if s > 0} == {"n1", "n2"}


ANALYSED = {"keywords": ["mug", "microwave"], "context": "A mug was heated.", "tags": ["cooking", "kitchen", "heating"]}
EVOLVED = {
    "should_evolve": True,
    "actions": ["strengthen", "update_neighbor"],
    "suggested_connections": [0, -1, 99, True, "1"],
    "tags_to_update": ["cleaning"],
    "new_context_neighborhood": ["The first of two tasks with a mug."],
    "new_tags_neighborhood": [["mugs"]],
}


def answers(role: str, text: str) -> str:
    return json.dumps(ANALYSED if role == ANALYSIS else EVOLVED)


def test_a_models_attributes_links_and_evolution_are_stored_and_read_without_it(tmp_path: Path) -> None:
    calls = list[str]()
    memory = amem(tmp_path, lambda role, text: calls.append(role) or answers(role, text))
    memory.commit([[E1], [E2]])
    assert calls == [ANALYSIS, ANALYSIS, EVOLUTION]  # 2n - 1
    again = amem(tmp_path)
    assert [(e.id, e.text) for e in again] == [(e.id, e.text) for e in memory] and not again.failures
    shown = {version.item: str(again.state.attributes(version)) for version in again.state.items}
    assert shown == {
        "n1": "keywords: mug, microwave; tags: mugs; context: The first of two tasks with a mug.",
        "n2": "keywords: mug, microwave; tags: cleaning; context: A mug was heated.",
    }
    assert (ids(again), ids(again, "t2"), ids(again, "t1")) == (["n2.2", "n1.2"], ["n1.1"], ["n2.1"])
    other = Query(task("t9", "put a hot mug in coffeemachine", scene="FloorPlan9"), isolation="scene")
    apart = [entry.text.splitlines()[-1] for entry in again.recall([other])[0].entries]
    rule_links = [f"keywords: mug, microwave; tags: cooking, kitchen, heating; context: {ANALYSED['context']}"] * 2
    assert apart == rule_links  # what a model wrote with other notes in view is left out


@pytest.mark.parametrize(
    ("reply", "links", "failed"),
    [
        ("", True, {ANALYSIS: 2, EVOLUTION: 1}),
        ("[]", True, {ANALYSIS: 2, EVOLUTION: 1}),
        ('{"keywords": 3, "tags": [], "context": null, "should_evolve": "yes"}', True, {ANALYSIS: 2, EVOLUTION: 1}),
        ('{"tags": ["odd"], "should_evolve": false}', False, {}),
        ('{"tags": ["odd"], "should_evolve": true, "actions": "strengthen"}', False, {}),
        ('{"tags": ["odd"], "should_evolve": true, "actions": ["strengthen"], "suggested_connections": 0}', False, {}),
        (None, True, {ANALYSIS: 2, EVOLUTION: 1}),
    ],
)
def test_unusable_answers_leave_notes_to_the_rules_and_are_counted(
    tmp_path: Path, reply: str | None, links: bool, failed: dict[str, int]
) -> None:
    memory = amem(tmp_path, lambda role, text: reply)
    memory.commit([[E1], [E2]])
    assert bool(memory.state.links["n1"]) == links and memory.failures == failed
    assert "keywords: mug, countertop, microwave, cabinet; " in memory["amem/n1.1"].text  # no answer gave keywords


def test_short_lists_of_neighbours_leave_the_others_as_they_are() -> None:
    read = read_evolution(EVOLVED, ["a", "b"])
    assert read == {
        "links": ["a"],
        "own_tags": ["cleaning"],
        "evolved": {"a": {"context": "The first of two tasks with a mug.", "tags": ["mugs"]}, "b": {}},
    }
    assert read_evolution({"should_evolve": False}, ["a"]) == {"links": [], "evolved": {}}
    assert read_evolution({"actions": []}, ["a"]) is None


def test_a_stopped_endpoint_leaves_the_journal_untouched_and_a_rerun_asks_the_same(tmp_path: Path) -> None:
    """The same bytes: the endpoint's cache answers what was asked before the stop."""
    asked = list[tuple[str, str]]()

    def stop(role: str, text: str) -> str:
        asked.append((role, text))
        if role == EVOLUTION:
            raise EndpointStop("budget spent")
        return answers(role, text)

    memory = amem(tmp_path, stop)
    memory.commit([[E1]])
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(EndpointStop):
        memory.commit([[E2]])
    assert (tmp_path / FILE).read_bytes() == before and len(memory) == 1
    again = list[tuple[str, str]]()
    amem(tmp_path, lambda role, text: again.append((role, text)) or answers(role, text)).commit([[E2]])
    assert again == asked[1:] and len(memory) == 2


def test_long_texts_of_a_model_are_cut_and_lists_capped(tmp_path: Path) -> None:
    wild = {"keywords": ["x" * 999] + [f"w{n}" for n in range(99)], "tags": [], "context": "y\n" * 999}
    memory = amem(tmp_path, lambda role, text: json.dumps(wild))
    memory.commit([[E1]])
    last = memory["amem/n1.1"].text.splitlines()[-1]
    assert len(memory["amem/n1.1"].text.splitlines()) == 3 and len(last) < 80 + 5 * 5 + 8 * 80 + 300 + 60


def test_with_embeddings_equal_meanings_are_near_and_each_text_is_embedded_once(tmp_path: Path) -> None:
    asked = list[str]()

    def embed(texts: list[str]) -> np.ndarray:
        asked.extend(texts)
        return np.array([[text.count("mug"), text.count("clean"), 1.0] for text in texts], dtype=float)

    memory = amem(tmp_path, embed=embed)
    memory.commit([[E1], [E2]])
    first = ids(memory)
    stored = len(asked)
    assert len(first) == 2 and ids(amem(tmp_path, embed=embed)) == first
    assert len(asked) == stored + len({"query"})  # the notes' vectors come from the disk


def test_searched_at_every_step_the_observation_counts(tmp_path: Path) -> None:
    memory = amem(tmp_path, query="step")
    memory.commit([[E1], [like(E2, "t2", scene="FloorPlan9")]])
    query = Query(T3, k=1)
    [first] = memory.recall([query])
    session = memory.session(query, first)
    assert [entry.id for entry in first.entries] != [e.id for e in session.recall("shelf sinkbasin clean").entries]
    session.observe(Record(0, "", "look", ""))
    assert session.recall("") == first


def test_a_failing_embedding_leaves_no_half_learned_state(tmp_path: Path) -> None:
    broken = [False]

    def embed(texts: list[str]) -> np.ndarray:
        if broken[0]:
            raise EndpointStop("budget spent")
        return np.array([[text.count("mug"), text.count("clean"), 1.0] for text in texts], dtype=float)

    memory = amem(tmp_path, embed=embed)
    memory.commit([[E1], [E2]])
    broken[0] = True
    for _ in range(2):
        with pytest.raises(EndpointStop):
            ids(memory)
    broken[0] = False
    assert len(ids(memory)) == len(memory) == 2


def test_a_question_is_answered_within_its_tokens(tmp_path: Path) -> None:
    memory = amem(tmp_path)
    memory.commit([[E1], [E2]])
    whole = memory.recall([Query.question("where was the mug?", 10_000)])[0].entries
    assert len(whole) == 2
    costs = Query.question("").costs.text
    one = memory.recall([Query.question("where was the mug?", int(costs(whole[0].text)) + 1)])[0].entries
    assert one == whole[:1]
