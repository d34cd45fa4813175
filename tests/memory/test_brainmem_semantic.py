"""BrainMem's semantic memory: utility, pruning, counts and formation, against the specification's worked numbers."""

from __future__ import annotations

import pytest

from memory.brainmem.semantic import (
    Experience,
    Experiences,
    Guideline,
    best_guidelines,
    count_application,
    prune_guidelines,
    update_guidelines,
)

HEAT = "pick_heat_then_place_in_recep"


def guideline(id: str, n_success: int, n_total: int, last: int = 0) -> Guideline:
    return Guideline(id, f"text {id}", n_success, n_total, frozenset({HEAT}), frozenset(), frozenset(), last, "")


def experience(id: str, *insights: str, task: str = "", success: bool = True, objects: str = "mug") -> Experience:
    things = frozenset(objects.split())
    return Experience(id, task or id, "FloorPlan1", HEAT, things, success, learning_insights=insights)


@pytest.mark.parametrize(
    ("n_success", "n_total", "utility"),
    [
        (23, 25, 0.9440),
        (18, 20, 0.9300),
        (15, 17, 0.9176),
        (12, 14, 0.9000),
        (10, 12, 0.8833),
        (1, 1, 0.73),
        (0, 3, 0),
        (4, 4, 0.82),
        (9, 12, 0.795),
        (10, 10, 1.0),
        (2, 3, 0.5267),
        (3, 4, 0.615),
        (0, 0, 0),
    ],
)
def test_utility(n_success: int, n_total: int, utility: float) -> None:
    assert guideline("g", n_success, n_total).utility == pytest.approx(utility, abs=5e-5)


def test_one_more_episode_won_with_it() -> None:
    assert guideline("g", 2, 3).applied(True, 7) == guideline("g", 3, 4, 7)
    assert guideline("g", 2, 3).applied(False, 7).utility == pytest.approx(0.7 * 2 / 4 + 0.06)


def test_they_are_listed_by_utility_and_the_older_of_equals_first() -> None:
    made = [guideline("b", 1, 1), guideline("a", 1, 1), guideline("c", 10, 12), guideline("d", 12, 14)]
    assert [g.id for g in best_guidelines(made, 3)] == ["d", "c", "a"]


def test_the_31st_brings_them_down_to_20_and_protection_beats_order() -> None:
    protected = [guideline("5/6", 5, 6)]
    rest = [guideline("10/13", 10, 13), guideline("4/4", 4, 4), *(guideline(f"w{i:02}", 19, 20) for i in range(27))]
    assert protected[0].utility == pytest.approx(0.7333, abs=5e-5) and protected[0].protected
    assert not guideline("4/4", 4, 4).protected and not guideline("10/13", 10, 13).protected
    assert prune_guidelines([*protected, *rest], 20, now=0) == [*protected, *rest]  # 30
    weak = [guideline(f"x{i:02}", 11, 15) for i in range(31 - 20 - 2)]  # 0.8133, of no confidence to be protected
    kept = prune_guidelines([*protected, *rest[:2], *weak, *rest[2:21]], 20, now=0)
    assert len(kept) == 20 and kept[0].id == "5/6"
    assert not {"10/13", "4/4"} & {g.id for g in kept}  # better than 5/6, and dropped


def test_more_protected_ones_than_are_shown_are_all_kept() -> None:
    many = [guideline(f"p{i:02}", 9, 10) for i in range(31)]
    assert prune_guidelines(many, 20, now=0) == many and len(best_guidelines(many, 20)) == 20


def test_what_is_unused_ranks_lower_when_some_are_dropped_and_nowhere_else() -> None:
    old, fresh = guideline("old", 1, 1, last=0), guideline("fresh", 2, 4, last=50)
    assert old.utility * 0.99**50 == pytest.approx(0.4417, abs=5e-5)
    assert pytest.approx(fresh.utility) == 0.41 and [g.id for g in best_guidelines([fresh, old], 1)] == ["old"]
    older = guideline("older", 2, 4, last=0)
    assert [g.id for g in prune_guidelines([old, older], 1, now=50, decay=0.99)] == ["old"]
    better = guideline("better", 1, 2, last=50)  # 0.38 + nothing: below 0.4417
    assert [g.id for g in prune_guidelines([old, better], 1, now=50, decay=0.99)] == ["old"]
    assert [g.id for g in prune_guidelines([old, guideline("won", 2, 3, last=50)], 1, now=50, decay=0.99)] == [
        "won"
    ]  # 0.5267
    assert [g.id for g in prune_guidelines([old, guideline("won", 2, 3, last=50)], 1, now=50)] == ["old"]


def test_an_episode_counts_for_those_that_were_shown_and_are_of_its_type() -> None:
    other = Guideline("other", "t", 1, 1, frozenset({"look"}), frozenset(), frozenset(), 0, "")
    before = [guideline("shown", 1, 2), guideline("hidden", 1, 2), other]
    after = count_application(before, frozenset({"shown", "other"}), HEAT, success=False, episode=9)
    assert after == [guideline("shown", 1, 3, 9), *before[1:]]


def test_two_experiences_of_different_tasks_that_agree_make_one() -> None:
    first = experience("e1", "the mug is often in cabinet 2")
    assert update_guidelines([], Experiences(), first, 1, "g1") == []
    assert (
        update_guidelines(
            [], Experiences([first]), experience("e2", "the mug is often in cabinet 2", task="e1"), 2, "g2"
        )
        == []
    )
    second = experience("e3", "The mug is often in cabinet 3.", success=False)
    [made] = update_guidelines([], Experiences([first]), second, 2, "g2")
    assert (made.text, made.n_success, made.n_total) == ("The mug is often in cabinet 3.", 1, 2)
    assert made.support == {"e1", "e3"} and made.objects == {"mug"} and made.last_applied == 2
    third = experience("e4", "the mug is often in cabinet 1")
    [joined] = update_guidelines([made], Experiences([first, second]), third, 3, "g3")
    assert joined.support == {"e1", "e3", "e4"} and (joined.n_success, joined.n_total) == (1, 2)
    elsewhere = experience("e5", "the mug is often in cabinet 2", objects="egg")
    assert update_guidelines([made], Experiences([first]), elsewhere, 3, "g3") == [made]


def test_experiences_are_recalled_by_type_and_object() -> None:
    mug, egg = experience("mug", objects="mug"), experience("egg", objects="egg")
    look = Experience("look", "look", "FloorPlan2", "look", frozenset({"mug"}), True)
    strange = Experience("strange", "s", "FloorPlan1", "look", frozenset({"pan"}), True)
    of = lambda k, room="FloorPlan1": [
        e.id for e in Experiences([mug, strange, look, egg]).recalled(room, HEAT, frozenset({"mug"}), k)
    ]
    assert of(9) == ["mug", "egg", "look"] and of(2) == ["mug", "egg"] and of(0) == []
    twin = Experience("twin", "t", "FloorPlan9", HEAT, frozenset({"mug"}), True)
    ranked = lambda room: [e.id for e in Experiences([mug, twin]).recalled(room, HEAT, frozenset({"mug"}), 2)]
    assert ranked("FloorPlan9") == ["twin", "mug"] and ranked("FloorPlan1") == ["mug", "twin"]
    assert ranked("FloorPlan3") == ["twin", "mug"]  # the latest
