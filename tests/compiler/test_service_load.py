"""`benchmarks.service_load`: what its clients meet. Nothing here looks at how long anything took."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi", reason="the service needs the extra serve")

from benchmarks.scripted import Said, Script
from benchmarks.service_load import MODEL, Met, load, requests_of, table_of
from compiler.brief_state import render_brief_state
from compiler.language import Emission, render
from compiler.records import Compilation, Decoding
from tests.services import listening

SAID = [[Said("> it is there | go on\n+ plan: find mug; heat mug", "look"), Said(".", "north")]]


class Slow:
    """A compiler that takes a while, and fails in one home."""

    broken, failing = None, ""

    def __init__(self) -> None:
        self.decoding, self.sizes, self.asked = Decoding(), [], []
        self.projector = SimpleNamespace(config=SimpleNamespace(emb_std=0.5))

    def compile(self, requests, seeds=None, wanted=None):
        time.sleep(0.05)
        if self.failing and any(self.failing in request.goal for request in requests):
            raise RuntimeError("out of memory")
        self.sizes.append(len(requests))
        self.asked += [request.goal for request in requests]
        return [Compilation(render(Emission("go on")), Emission("go on")) for _ in requests]


def script() -> Script:
    return Script(MODEL, MODEL, 40, 4, SAID)


def test_all_clients_are_answered_and_batches_are_counted() -> None:
    slow = Slow()
    with listening(slow) as (url, _):
        met = asyncio.run(load(url, script(), 4, 0.2))
    assert met.sent == len(met.latencies) == len(slow.asked) >= 4 and not met.lost and not met.put_off
    assert len({goal.partition(":")[0] for goal in slow.asked}) == 4
    assert met.batch == pytest.approx(len(slow.asked) / len(slow.sizes))


@pytest.mark.seconds
def test_who_is_told_to_come_back_is_answered_later() -> None:
    with listening(Slow(), queue=1, batch=1) as (url, _):
        met = asyncio.run(load(url, script(), 6, 0.0))
    assert met.put_off > 0 and not met.lost and len(met.latencies) == 6


def test_what_gets_no_answer_is_lost_and_says_why() -> None:
    slow = Slow()
    slow.failing = "home 1:"
    with listening(slow) as (url, _):
        met = asyncio.run(load(url, script(), 3, 0.0))
    assert len(met.latencies) == 2 and [why.partition(":")[0] for why in met.lost] == ["500"]
    assert table_of([met]).row_count == 1 and table_of([Met(1, seconds=1.0)]).row_count == 1


def test_requests_are_those_of_an_episode() -> None:
    asked = requests_of(script().spec(3), script())
    assert [request.history for request in asked[:3]] == [(), ("look",), ("look", "north")]
    states = [render_brief_state(request.state) for request in asked if request.state]
    assert "now: find mug" not in states[0] and "now: find mug" in states[1] == states[2]
