"""What memories of short items share: similarity, versions, facts that a text states, and unusable answers."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from envs.base import Task
from envs.command_reader import Fact
from memory.items import Items, Origin, facts_with_actions, stated_actions
from memory.replies import ask_json, ask_until_usable, line, lines_in
from memory.similarity import VECTORS, CachedEmbed, LexicalIndex, TextIndex, best_rows, lexical, terms_of
from tests.memory.worked_examples import E1, E2, READER

QUERY = "in FloorPlan1: put a hot mug in coffeemachine"


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("in FloorPlan1 the mug was in countertop 2", 3 / 7),  # in, floorplan1, mug of 7 and 7 terms
        ("in FloorPlan1 microwave 1 was used to heat", 2 / (7 * 8) ** 0.5),
        ("for pick_heat_then_place_in_recep: take the mug, then heat the mug with the microwave", 2 / (7 * 12) ** 0.5),
        ("", 0.0),
    ],
)
def test_the_lexical_similarity_of_two_texts_by_hand(text: str, score: float) -> None:
    assert lexical(terms_of(QUERY), terms_of(text)) == pytest.approx(score, abs=1e-12)


def test_the_index_scores_as_the_formula_does_while_it_grows() -> None:
    chance, index, held = random.Random(1), LexicalIndex(), list[frozenset[str]]()
    draw = lambda n: frozenset(f"w{int(400 * chance.random() ** 2)}" for _ in range(chance.randint(0, n)))
    for size in (1, 511, 1, 600, 1, 1_500):
        new = [draw(40) for _ in range(size)]
        index.add(new)
        held += new
        query = draw(20) | {"unknown"}
        assert index.scores(query).tolist() == pytest.approx([lexical(query, each) for each in held], abs=1e-12)


def test_of_equal_scores_later_rows_come_first_then_names() -> None:
    scores, wrote = np.array([0.5, 0.5, 0.5, 0.9, -np.inf, 0.5]), np.array([1, 2, 2, 0, 3, 0])
    name = lambda n: "abcdef"[n]
    assert best_rows(scores, 3, wrote=wrote, name=name) == [3, 1, 2]
    assert best_rows(scores, 9, wrote=wrote, name=name) == [3, 1, 2, 0, 5]
    assert best_rows(scores, 9, wrote=wrote, name=name, at_least=0.6) == [3]
    assert best_rows(scores, 0, wrote=wrote, name=name) == []


def origin(row: int, task: str) -> Origin:
    return Origin(row, Task(task, f"goal {row}", "home 1", "train", ""), True)


def test_a_task_sees_the_newest_version_that_owes_nothing_to_it() -> None:
    items, one, two = Items(), origin(0, "t1"), origin(1, "t2")
    items.put("mug", "the mug was in shelf 1", 0, [one])
    items.put("pen", "the pen was in desk 1", 1, [two])
    items.put("mug", "the mug was in sofa 1", 1, [one, two], actions=["take mug 1 from sofa 1"])
    seen = lambda own: [version.text for _, version in items.search("the mug", 5, own, at_least=0.01)]
    assert seen("t3") == ["the mug was in sofa 1", "the pen was in desk 1"]
    assert seen("t2") == ["the mug was in shelf 1"]
    assert seen("t1") == ["the pen was in desk 1"]
    assert items.visible("mug", "t1") is None and len(items) == 2
    entry = items.entry("x/mug.2", "x")
    assert entry.provenance.task_id == "t2" and entry.provenance.actions == ("take mug 1 from sofa 1",)
    assert items.entry("x/mug.1", "x").text == "the mug was in shelf 1"  # superseded ones stay readable
    for unknown in ("x/mug.3", "x/mug.0", "x/mug.-1", "x/mug", "y/mug.1", "x/cup.1", "mug.1"):
        with pytest.raises(KeyError):
            items.entry(unknown, "x")


def test_a_text_states_a_fact_if_it_names_the_thing_and_the_numbered_place() -> None:
    taken, heated = ("take mug 1 from countertop 2",), ("heat mug 1 with microwave 1",)
    stated = lambda text: stated_actions(text, E1.actions, READER)
    assert stated("In FloorPlan1 the mug was on countertop 2") == taken
    assert stated("In FloorPlan1 the mug was on a countertop") == ()
    assert stated("there was something on countertop 2") == ()
    assert stated("the mug was on countertop 21") == ()
    assert stated("the mug of countertop 2 was heated by Microwave 1") == taken + heated
    assert stated("the mug of countertop 2 went into microwave 1") == taken
    lamp = ("go to desk 1", "take mug 1 from desk 1", "go to shelf 2", "use desklamp 1")
    told = facts_with_actions(lamp, READER)
    assert told[-1] == (Fact("find desklamp", "shelf 2"), ("go to shelf 2", "use desklamp 1"))
    assert len(told) == len(READER.facts(lamp)) == 2
    assert all(fact in READER.facts(commands) for fact, commands in told)
    assert facts_with_actions(E2.actions, READER)[0] == (Fact("find mug", "shelf 1"), ("take mug 1 from shelf 1",))


def test_an_unusable_answer_is_asked_for_once_more_and_then_counted() -> None:
    failures, said = Counter[str](), list[int]()

    def told(*answers: str | None):
        left = list(answers)

        def ask(messages, role, tokens):
            said.append(len(messages))
            return left.pop(0)

        read = lambda value: value.get("x")
        return ask_json(ask, [{"role": "user", "content": "?"}], "r", max_tokens=9, read=read, failures=failures)

    assert told('```json\n{"x": 1}\n```') == 1 and said == [1]
    assert told("no", '{"x": 2}') == 2 and said[1:] == [1, 3] and not failures
    assert told("[]", '{"y": 2}') is None and told(None) is None and failures == {"r": 2}
    assert ask_until_usable(None, [], "r", max_tokens=9, read=str, failures=failures) is None and failures == {"r": 2}


def test_texts_of_a_model_become_short_lines() -> None:
    assert line("  1. take\n\u2028 the mug \ud800") == "take the mug ?" and len(line("x" * 999)) == 300
    assert lines_in(["- a", "a", 3, "", None, "b", "c"], 2) == ["a", "b"] and lines_in({"a": 1}, 2) == []


def test_vectors_of_stored_texts_are_computed_once(tmp_path) -> None:
    asked = list[str]()

    def embed(texts: list[str]) -> np.ndarray:
        asked.extend(texts)
        return np.array([[len(text), 1.0] for text in texts])

    first = TextIndex(CachedEmbed(embed, tmp_path))
    first.add("mug")
    first.add("a mug")
    scores = first.scores("pen")
    assert scores[0] == pytest.approx(1.0) and scores[1] < 1 and asked == ["mug", "a mug", "pen"]
    again = TextIndex(CachedEmbed(embed, tmp_path))
    again.add("mug")
    again.add("mug\ud800")
    assert again.scores("pen", store=True)[0] == scores[0] and asked[3:] == ["mug?", "pen"]
    CachedEmbed(embed, tmp_path)(["pen"])
    assert len(asked) == 5
    (tmp_path / VECTORS).unlink()
    CachedEmbed(embed, tmp_path)(["mug"])
    assert asked[5:] == ["mug"]
