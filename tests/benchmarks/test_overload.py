"""`memcompiler bench serving overload`: a proxy that puts off most requests, beside bad clients, loses none."""

from __future__ import annotations

import asyncio
import os
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the proxy needs the extra serve")

from benchmarks.serving import bad_clients, overload
from benchmarks.serving.bad_clients import BadClients
from benchmarks.serving.in_thread import serving
from benchmarks.serving.proxy import TimedCompiler, checksum_api, timed_proxy
from benchmarks.serving.traffic import run_clients
from compiler.language import Emission
from configs.proxy import ProxyConfig


class Busy(TimedCompiler):
    """A compiler that is slow; one that counts never gives the same guidance twice."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__(0.05, queue.SimpleQueue())
        self.counts, self.asked = counts, 0

    def compile(self, requests: Any, seeds: Any = None, wanted: Any = None) -> list[Any]:
        self.asked += len(requests)
        made = super().compile(requests, seeds, wanted)
        emission = Emission(f"go to cabinet {self.asked}", "it was there")
        return [replace(each, emission=emission) for each in made] if self.counts else made


@contextmanager
def proxied(folder: Path, compiler: TimedCompiler) -> Iterator[str]:
    """Serve a proxy for whose compiler one request may wait."""
    with serving(checksum_api) as upstream:
        settings = {"upstream": {"url": f"{upstream}/v1"}, "queue": 1, "batch": 1, "on_failure": "refuse"}
        with serving(timed_proxy(folder, ProxyConfig.model_validate(settings), compiler)) as url:
            yield url


@pytest.mark.seconds
def test_a_proxy_under_too_many_requests_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bad_clients, "SLOW_S", 0.4)
    bad = BadClients(slow=1, half_open=1, cancelling=1)
    with proxied(tmp_path, Busy()) as url:
        overload.remember(url)
        alone = asyncio.run(run_clients(url, overload.traffic("alone"), 1, 0.3))
        over = asyncio.run(overload.overload(url, alone, 2.0, 1.0, bad, os.getpid()))
        text = "\n".join(overload.report(url, alone, over, bad))
    assert over.retries > 0 and over.latencies and not over.lost and not over.different and not bad.lost
    assert bad.did["cancelled requests"] > 0 and bad.did["half-open connections"] == 1
    assert "ready at the end: True" in text and "memory of the proxy:" in text


@pytest.mark.parametrize("counts", [True, False])
def test_other_guidance_for_the_same_turn_in_a_new_session_is_counted(counts: bool, tmp_path: Path) -> None:
    with proxied(tmp_path, Busy(counts)) as url:
        first = asyncio.run(run_clients(url, overload.traffic("first"), 1, 0.0))
        same = asyncio.run(run_clients(url, overload.traffic("first"), 1, 0.0, texts=first.texts))
        new = asyncio.run(run_clients(url, overload.traffic("new"), 1, 0.0, texts=first.texts))
    assert same.different == 0 and new.different == int(counts)  # a session repeats a turn without compiling again
