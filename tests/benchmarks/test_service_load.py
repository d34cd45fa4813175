"""`memcompiler bench serving load`: answers, retries and losses; no test asserts a duration."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi", reason="the service needs the extra serve")

from benchmarks.serving import bad_clients
from benchmarks.serving import load as module
from benchmarks.serving.bad_clients import BadClients
from benchmarks.serving.load import MODEL, STEPS, LoadResult, details, load, table
from benchmarks.serving.scripted import Script, ScriptedStep
from compiler.brief_state import render_brief_state
from compiler.language import Emission, render
from compiler.records import Compilation, Decoding
from tests.services import listening

RECORD = [[ScriptedStep("> it is there | go on\n+ plan: find mug; heat mug", "look"), ScriptedStep(".", "north")]]


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
    return Script(MODEL, MODEL, 40, RECORD)


def test_all_clients_are_answered_and_batches_are_counted() -> None:
    slow = Slow()
    with listening(slow) as (url, _):
        result = asyncio.run(load(url, script(), 4, 0.2))
    assert result.sent == len(result.latencies) == len(slow.asked) >= 4 and not result.lost and not result.retries
    assert len({goal.partition(":")[0] for goal in slow.asked}) == 4
    assert result.batch == pytest.approx(len(slow.asked) / len(slow.sizes))


@pytest.mark.seconds
def test_a_client_that_is_put_off_is_answered_later() -> None:
    with listening(Slow(), queue=1, batch=1) as (url, _):
        result = asyncio.run(load(url, script(), 6, 0.0))
    assert result.retries > 0 and not result.lost and len(result.latencies) == 6


def test_a_request_without_an_answer_is_lost_with_its_reason() -> None:
    slow = Slow()
    slow.failing = "home 1:"
    with listening(slow) as (url, _):
        result = asyncio.run(load(url, script(), 3, 0.0))
    assert len(result.latencies) == 2 and [why.partition(":")[0] for why in result.lost] == ["500"]
    assert len(table([result])) == 3 == len(table([LoadResult(1, seconds=1.0)]))


@pytest.mark.seconds
def test_clients_are_answered_beside_bad_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bad_clients, "SLOW_S", 0.4)
    slow, bad = Slow(), BadClients(slow=2, half_open=2, cancelling=2)
    with listening(slow) as (url, _):
        result = asyncio.run(load(url, script(), 2, 1.5, bad, os.getpid()))
    assert len(result.latencies) >= 2 and not result.lost and not bad.lost and not result.different
    assert bad.did["slow requests answered"] >= 2 and bad.did["half-open connections"] == 2
    assert bad.did["cancelled requests"] > 2 and result.sizes.mib
    assert len(details([result], bad)) == 5 and details([LoadResult(1)], BadClients()) == []


def test_another_answer_to_the_same_request_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPS", 2)
    slow, number = Slow(), itertools.count()
    compile = slow.compile

    def another(requests, *_):
        return [replace(each, text=f"go to shelf {next(number)}") for each in compile(requests)]

    slow.compile = another
    with listening(slow) as (url, _):
        result = asyncio.run(load(url, Script(MODEL, MODEL, 40, RECORD), 1, 1.5))
    assert result.different == len(result.latencies) - 2 > 0 and not result.lost


def test_requests_are_those_of_an_episode() -> None:
    asked = script().compile_requests(script().spec(3), STEPS)
    assert [request.history for request in asked[:3]] == [(), ("look",), ("look", "north")]
    states = [render_brief_state(request.state) for request in asked if request.state]
    assert "now: find mug" not in states[0] and "now: find mug" in states[1] == states[2]
