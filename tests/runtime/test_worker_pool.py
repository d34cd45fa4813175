"""Worker pool: every item is answered once, also when workers die, start late, fall silent or raise."""

from __future__ import annotations

from collections import Counter

import pytest

from runtime import worker_pool
from runtime.cluster import ClusterError, RaySettings
from runtime.worker_pool import Lost, WorkerPool, WorkUnit, split_into_units
from tests.worker_backends import Echo, InProcessBackend

ITEMS = {f"k{i}": i for i in range(10)}


@pytest.fixture(autouse=True)
def _looks_around_all_the_time(monkeypatch):
    monkeypatch.setattr(worker_pool, "EVERY_S", 0.0)


class Record(list):
    """What was recorded; everything that is no more than noted as broken apart."""

    broken: dict[str, str]

    def __init__(self) -> None:
        self.broken = {}

    def lost(self, what, key, item, why):
        self.broken[key] = why
        return f"{what}: lost {item}"


def play(fleet: InProcessBackend, size: int = 3, **settings) -> Record:
    record = Record()
    with WorkerPool(fleet, RaySettings(**settings)) as pool:
        pool.run(list(split_into_units("unit", ITEMS, size)), record.extend, record.lost)
    return record


def test_every_item_is_answered_once_and_units_hold_what_belongs_together():
    fleet = InProcessBackend(Echo)
    record = play(fleet)
    assert Counter(key for key, _ in record) == Counter(list(ITEMS)) and dict(record)["k4"] == "unit: 4"
    assert [list(unit.items) for _, unit in fleet.begun] == [list(ITEMS)[i : i + 3] for i in (0, 3, 6, 9)]
    assert {handle for handle, _ in fleet.begun} == {0, 1} and not fleet.events  # and all were dismissed


def test_there_are_no_more_workers_than_settings_room_or_work_allow():
    fleets = [InProcessBackend(Echo, (9,)), InProcessBackend(Echo, (2,)), InProcessBackend(Echo, (9,))]
    play(fleets[0], workers=2)
    play(fleets[1])
    play(fleets[2], size=9)
    assert [fleet.most for fleet in fleets] == [2, 3, 2]  # room for two, and one that may come later; two units


def test_what_a_lost_worker_had_not_answered_goes_to_another_one_and_nothing_else_does():
    fleet = InProcessBackend(Echo, deaths={0: 2, 1: 1})
    record = play(fleet, size=5)
    assert Counter(key for key, _ in record) == Counter(list(ITEMS)) and not record.broken
    again = [list(unit.items) for _, unit in fleet.begun if unit.lost]
    assert again == [["k2", "k3", "k4"], ["k6", "k7", "k8", "k9"]]


class Mined(InProcessBackend):
    """Whoever gets to the item 4 is gone."""

    def submit(self, handle: int, unit: WorkUnit) -> None:
        if "k4" in unit.items:
            self.deaths[handle] = list(unit.items).index("k4")
        super().submit(handle, unit)
        if "k4" in unit.items and not self.deaths[handle]:
            events = self.events[handle]
            events[-1] = Lost("out of memory")


def test_an_item_that_kills_whoever_has_it_is_recorded_with_the_reasons_and_takes_no_other_with_it():
    fleet = Mined(Echo)
    record = play(fleet, size=10, retries=2)
    assert Counter(key for key, _ in record) == Counter(list(ITEMS))
    assert list(record.broken) == ["k4"] and dict(record)["k4"] == "unit: lost 4"
    assert record.broken["k4"] == ("3 workers were lost over it: out of memory; out of memory; out of memory")
    assert len([unit for _, unit in fleet.begun if "k4" in unit.items]) == 3


def test_workers_that_die_before_they_are_ready_end_the_run_with_the_reason():
    with pytest.raises(
        ClusterError, match="3 workers in a row were lost before they were ready, the last: died at birth"
    ):
        play(InProcessBackend(Echo, deaths=dict.fromkeys(range(9), -1)), retries=2)


def test_what_a_worker_raises_ends_the_run_and_what_others_said_is_recorded():
    items, record = {**ITEMS, "k9": "raise"}, Record()
    with (
        WorkerPool(fleet := InProcessBackend(Echo, (4,)), RaySettings()) as pool,
        pytest.raises(ValueError, match="own error"),
    ):
        pool.run(list(split_into_units("unit", items, 5)), record.extend, record.lost)
    assert {"k0", "k1", "k2", "k3", "k5"} <= {key for key, _ in record} and not fleet.events


def test_a_worker_for_whom_there_is_room_later_is_used():
    fleet = InProcessBackend(Echo, (0, 0, 2))
    play(fleet, size=1)
    assert {handle for handle, _ in fleet.begun} > {0}


def test_a_worker_that_says_nothing_is_given_up():
    fleet = InProcessBackend(Echo, mute=(0,))
    record = play(fleet, size=5, unresponsive_s=0.05)
    assert Counter(key for key, _ in record) == Counter(list(ITEMS)) and 0 in fleet.dismissed
    [unit] = [unit for _, unit in fleet.begun if unit.lost]
    assert unit.lost == ("it was silent for 0.05 s",)


def test_nobody_comes():
    class Empty(InProcessBackend):
        def _let_in(self) -> None:
            pass

    with pytest.raises(ClusterError, match=r"one takes 2 CPUs \(ray.cpus\) and 1 GPUs"):
        play(Empty(Echo), unresponsive_s=0.05, cpus=2, gpus=1)


def test_workers_are_kept_from_one_play_to_the_next_and_answer_questions():
    fleet = InProcessBackend(Echo, (1,))
    with WorkerPool(fleet, RaySettings(workers=1)) as pool:
        assert pool.run_one("question") == "question: None"
        pool.run([WorkUnit("unit", ITEMS)], list[object]().extend, lambda *_: "")
    assert fleet.hired == 1
