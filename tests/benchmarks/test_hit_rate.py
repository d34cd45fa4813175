"""Hit rates on traces: what follows from arithmetic, and the directions of KARMA's Figures 4 to 6."""

from __future__ import annotations

from functools import cache

import pytest
from typer.testing import CliRunner

from benchmarks.memory import Stream, query_stream, replay
from memcompiler.cli import app
from memory.karma.settings import KarmaSettings

QUERIES, OBJECTS = 20_000, 40
POOL = {window: {"policy": "wtinylfu", "window": window} for window in (9, 5, 1)}
DUEL = {window: {**settings, "victim": "duel"} for window, settings in POOL.items()}
FIFO, LRU = {"policy": "fifo"}, {"policy": "lru"}


@cache
def asked(stream: Stream, seed: int) -> list[str]:
    return query_stream(stream, OBJECTS, QUERIES, seed)


def rate(stream: Stream, seed: int, settings: dict[str, object], capacity: int = 10) -> float:
    return replay(asked(stream, seed), KarmaSettings.model_validate({"capacity": capacity, **settings})).overall


@pytest.mark.parametrize(("capacity", "share"), [(5, 0.125), (10, 0.25), (25, 0.625)])
@pytest.mark.parametrize("policy", ["fifo", "lru", "wtinylfu"])
def test_uniform_queries_hit_as_often_as_there_is_room(policy: str, capacity: int, share: float) -> None:
    assert rate("uniform", 0, {"policy": policy}, capacity) == pytest.approx(share, abs=0.012)


@pytest.mark.parametrize("seed", range(3))
def test_steady_favourites_favour_counting(seed: int) -> None:
    fifo, lru = (rate("skewed", seed, settings) for settings in (FIFO, LRU))
    pool = [rate("skewed", seed, settings) for settings in POOL.values()]
    large, _, small = (rate("skewed", seed, settings) for settings in DUEL.values())
    assert min(pool) > lru > fifo and max(pool) - min(pool) < 0.01 and small > large + 0.05


@pytest.mark.parametrize("seed", range(3))
def test_drifting_favourites_favour_the_largest_window(seed: int) -> None:
    for of_victim in (POOL, DUEL):
        large, *others = (rate("drifting", seed, settings) for settings in of_victim.values())
        assert large > max(others) and large > rate("drifting", seed, FIFO) + 0.02


def test_faster_drift_turns_it_round() -> None:
    fast = query_stream("drifting", OBJECTS, QUERIES, 0, drift=25)
    of = lambda settings: replay(fast, KarmaSettings.model_validate(settings)).overall
    assert min(of(FIFO), of(LRU)) > of(POOL[9])


@pytest.mark.parametrize("stream", ["uniform", "skewed", "drifting"])
def test_more_room_hits_more(stream: Stream) -> None:
    for policy in ("fifo", "wtinylfu"):
        rates = [rate(stream, 0, {"policy": policy}, capacity) for capacity in (5, 10, 15, 20, 25)]
        assert rates == sorted(rates)


def test_a_memory_is_warmed_up_above_95_percent_of_its_capacity() -> None:
    hits = replay([str(n) for n in range(30)], KarmaSettings(policy="fifo", capacity=25))
    assert hits.warm_from == 24 and hits.overall == 0 and hits.without_first == 0


def test_the_command_ends_with_the_rate() -> None:
    line = "bench memory hit-rate --stream skewed --objects 40 --capacity 10 --policy {} --window 9 --queries 2000"
    for policy in ("fifo", "wtinylfu"):
        printed = CliRunner().invoke(app, line.format(policy).split())
        assert (
            printed.exit_code == 0 and {"fifo": "FIFO [10]", "wtinylfu": "W-TinyLFU [9, 1]"}[policy] in printed.output
        )
        assert 0.4 < float(printed.output.strip().splitlines()[-1].removeprefix("hit rate: ")) < 0.8
    bad = CliRunner().invoke(app, [*line.format("wtinylfu").split(), "--capacity", "5"])
    assert bad.exit_code != 0 and "does not fit a capacity of 5" in bad.output
