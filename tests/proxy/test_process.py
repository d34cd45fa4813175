"""`memcompiler serve proxy` as a process: what a kill leaves, and how it ends."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from queue import SimpleQueue

import httpx
import pytest

pytest.importorskip("fastapi", reason="the proxy needs the extra serve")
pytest.importorskip("uvicorn", reason="the proxy needs the extra serve")

from benchmarks.serving.proxy import TimedCompiler, measured_rows
from configs.load import ConfigError
from configs.proxy import ProxyConfig
from memory.bank import MemoryBank
from proxy.serve import load_proxy
from runtime.http import free_port, responds
from runtime.processes import ChildProcess
from tests.upstreams import Reply, ScriptedUpstream, completion, listening_proxy, make_proxy, proxied

SAID = ["put a mug in desk", "go to shelf 1", "You see a mug 1.", "take mug 1"]


def chat(n: int) -> dict[str, object]:
    roles = ("user", "assistant")
    return {"model": "m", "messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(SAID[:n])]}


@pytest.mark.slow
def test_a_killed_proxy_goes_on_and_commits_the_whole_episode(tmp_path: Path, repository: Path) -> None:
    port = free_port()
    url, out, log = f"http://127.0.0.1:{port}", tmp_path / "out", tmp_path / "log"
    answers = [Reply([completion(SAID[1])]), Reply([completion(SAID[3])])]
    command = [sys.executable, "-m", "memcompiler", "serve", "proxy", "-c", "serve/proxy", "deliver=disclosure"]
    command += ["compiler.checkpoint=null", "--port", str(port), "--out", str(out)]
    env = {**os.environ, "PYTHONPATH": str(repository)}
    with ScriptedUpstream(answers) as upstream:
        with ChildProcess([*command, f"upstream.url={upstream.url}"], cwd=tmp_path, env=env, output=log) as proxy:
            proxy.wait_until_ready(lambda: responds(f"{url}/ready"), 500)
            assert httpx.post(f"{url}/v1/chat/completions", json=chat(1), timeout=60).status_code == 200
            proxy.signal(signal.SIGKILL)
            assert proxy.wait(60) == -signal.SIGKILL
        assert "put a mug" not in log.read_text()
        with listening_proxy(make_proxy(upstream.url, out, deliver="disclosure")) as url:
            answer = httpx.post(f"{url}/v1/chat/completions", json=chat(3), timeout=60)
            id = answer.headers["x-memcompiler-session"]
            ended = httpx.post(f"{url}/sessions/{id}/end", json={"success": True}, timeout=60).json()
    assert (ended["added"], ended["steps"]) == (1, 2)
    [entry] = MemoryBank(out / "bank").entries()
    assert entry.provenance.actions == (SAID[1], SAID[3])


def test_settings_that_do_not_fit_are_named_before_anything_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    for settings, word in (
        ({}, "compiler.checkpoint"),
        ({"deliver": "compiled_low_confidence"}, "not for a proxy"),
        ({"deliver": "none", "upstream": {"key_env": "NO_SUCH_KEY"}}, "NO_SUCH_KEY"),
        ({"deliver": "none", "memory": {"isolation": "scene"}}, "mapping.scene"),
    ):
        with pytest.raises(ConfigError, match=word):
            load_proxy(ProxyConfig.model_validate(settings), tmp_path)
    with pytest.raises(ValueError, match="read-only"):
        ProxyConfig.model_validate({"memory": {"version": 1}})
    for wrong in ({"path": "content"}, {"match": "("}, {"path": "$.a[x]"}):
        with pytest.raises(ValueError, match=r"\bis no (path|regular expression)"):
            ProxyConfig.model_validate({"mapping": {"goal": wrong}})


def test_the_benchmark_reports_what_the_proxy_adds(tmp_path: Path) -> None:
    took: SimpleQueue[float] = SimpleQueue()
    with proxied(tmp_path, TimedCompiler(0.001, took)) as (upstream, url):
        addresses = [upstream.url.removesuffix("/v1"), url]
        lines = measured_rows(addresses, took, lambda: 0.0, requests=4, turns=2)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    assert [row[0] for row in rows[1:]] == ["the upstream alone", "proxy, none", "proxy, static", "proxy, compiled"]
    assert all(float(row[1]) > 0 for row in rows) and rows[1][3] == "0.00" and took.empty()
    assert len(upstream.sent) == 4 * (4 + 2)
