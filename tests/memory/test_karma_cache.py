"""What leaves KARMA's short-term memory, and how uses are counted: the worked numbers of the specification."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memory.karma.cache import AgingCounts, Cache, Fifo, Lru, WTinyLfu, make_cache
from memory.karma.settings import KarmaSettings

NEVER = 10**9  # a sample that no test reaches


def tiny(window: int, main: int, victim: str = "pool", sample: int = NEVER) -> WTinyLfu[str]:
    return WTinyLfu(window, main, AgingCounts(sample), victim)


def held(cache: Cache[str]) -> list[str]:
    return [value for _, value in cache.items()]


def written(cache: Cache[str], values: str) -> Cache[str]:
    """Write units; A' is a later unit of A."""
    for value in values.split():
        cache.write(value[0], value)
    return cache


def test_fifo_merges_in_place() -> None:
    assert held(written(Fifo(3), "A B C A'")) == ["A'", "B", "C"]
    assert held(written(Fifo(3), "A B C A' D")) == ["B", "C", "D"]


def test_w_tinylfu_compares_window_and_elimination() -> None:
    cache = written(tiny(2, 1), "A B C")
    assert isinstance(cache, WTinyLfu) and (list(cache.window), list(cache.elimination)) == (["B", "C"], ["A"])
    cache.use("A")
    assert cache.frequencies.estimate("A") == 2
    written(cache, "D")
    assert "B" not in cache
    written(cache, "E")
    assert "C" not in cache
    cache.use("D")
    written(cache, "F")
    assert sorted(held(cache)) == ["A", "D", "F"]
    assert held(written(Fifo(3), "A B C D E F")) == ["D", "E", "F"]


@pytest.mark.parametrize(("cache", "hits"), [(Fifo(2), 2), (Lru(2), 1), (tiny(1, 1), 2)])
def test_hit_rates_of_six_queries(cache: Cache[str], hits: int) -> None:
    found = 0
    for thing in "A B A C B A".split():
        if thing in cache:
            found += 1
            cache.use(thing)
        cache.write(thing, thing)
    assert found == hits


@pytest.mark.parametrize("order", ["AAAABBBC", "ABABABAC", "CBABABAA"])
def test_aging_halves_every_count_at_the_sample(order: str) -> None:
    counts = AgingCounts(8)
    for thing in order:
        counts.add(thing)
        counts.tick()
    assert [counts.estimate(thing) for thing in "ABC"] == [2, 1, 0] and counts.ticks == 4


def test_a_counter_has_four_bits() -> None:
    counts = AgingCounts(NEVER)
    for _ in range(20):
        counts.add("A")
    assert counts.estimate("A") == 15


def test_a_window_that_does_not_fit_is_refused_and_segments_follow() -> None:
    assert KarmaSettings().segments == (9, 1) and KarmaSettings(capacity=5, window=1).segments == (1, 4)
    assert KarmaSettings(capacity=1).segments == (1, 0)
    with pytest.raises(ValueError, match="does not fit a capacity of 5"):
        KarmaSettings(capacity=5, window=9)
    one = make_cache(KarmaSettings(capacity=1))
    written(one, "A B")
    assert held(one) == ["B"]


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=200), st.integers(1, 6), st.booleans())
@settings(max_examples=60, deadline=None)
def test_no_policy_holds_more_than_its_capacity_and_the_newcomer_stays(
    steps: list[tuple[int, bool]], capacity: int, duel: bool
) -> None:
    for policy in ("fifo", "lru", "wtinylfu"):
        cache = make_cache(KarmaSettings(policy=policy, capacity=capacity, sample=5, victim="duel" if duel else "pool"))
        for thing, use in steps:
            if use and str(thing) in cache:
                cache.use(str(thing))
            else:
                cache.write(str(thing), "")
                assert str(thing) in cache
            assert len(cache) <= capacity


def test_duel_with_a_window_of_one_is_tinylfu_step_by_step() -> None:
    theine_core = pytest.importorskip("theine_core", reason="theine-core, the oracle of this test, is not installed")
    rng, steps = random.Random(0), 0
    for _ in range(300):
        capacity = rng.randint(4, 20)
        theirs, ours = theine_core.TlfuCore(capacity), tiny(1, capacity - 1, "duel")
        uses = Counter[int]()
        for _ in range(rng.randint(20, 140)):
            key = rng.randint(1, 3 * capacity)
            if uses[key] >= 6 or sum(uses.values()) >= 9 * capacity:
                continue
            uses[key] += 1
            steps += 1
            if str(key) in ours:
                ours.use(str(key))
                theirs.access([key])
            else:
                ours.write(str(key), "")
                theirs.set([(key, 0)])
            assert {int(key) for key, _ in ours.items()} == set(theirs.keys())
    assert steps > 15_000
