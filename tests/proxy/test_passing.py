"""What the proxy passes on: bytes as they are and as they come, and failures of the upstream."""

from __future__ import annotations

import base64
import gzip
import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

pytest.importorskip("fastapi", reason="the proxy needs the extra serve")
pytest.importorskip("uvicorn", reason="the proxy needs the extra serve")

import uvicorn

from proxy import upstream as upstream_module
from runtime import http as http_module
from tests.upstreams import (
    JSON,
    SSE,
    Numbering,
    Reply,
    ScriptedUpstream,
    completion,
    deltas,
    listening_proxy,
    make_proxy,
    proxied,
)

NONE = {"X-Memcompiler-Deliver": "none"}
HOPS = {"connection", "transfer-encoding", "date", "keep-alive"}
PICTURE = "data:image/png;base64," + base64.b64encode(bytes(range(256))).decode()
CALL = {"id": "call_1", "type": "function", "function": {"name": "do", "arguments": '{ "command":"go" }'}}
ASKED = {
    "text": b'{"model": "m",  "messages":[{"role":"user","content":"caf\\u00e9 \xc3\xa9 \\ud83d\\ude00"}]'
    b', "x_new": [1.10, 1e3, null]}',
    "tools": json.dumps(
        {
            "model": "m",
            "tools": [{"type": "function", "function": {"name": "do", "parameters": {"type": "object"}}}],
            "messages": [
                {"role": "user", "content": "go"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "done"},
            ],
        },
        indent=1,
    ).encode(),
    "picture": json.dumps(
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": PICTURE}}]}]}
    ).encode(),
    "no conversation": b'{"messages": "hello"}',
    "no JSON": b"\x00{{",
}
REPLIES = {
    "answer": Reply(
        [completion("go on").replace(b", ", b" ,\n")],
        headers=[JSON, ("x-request-id", "r1"), ("X-Two", "a"), ("X-Two", "b")],
    ),
    "tool call": Reply([completion({"role": "assistant", "content": None, "tool_calls": [CALL]})]),
    "stream": Reply(deltas("go", " on"), headers=[SSE]),
    "packed": Reply([gzip.compress(completion("go on"))], headers=[JSON, ("Content-Encoding", "gzip")]),
    "400": Reply([b'{"error": {"message": "no", "code": "bad"}}'], 400),
    "429": Reply([b'{"error": {"message": "slow down"}}'], 429, [JSON, ("Retry-After", "7")]),
    "500": Reply([b"<html>broken</html>"], 500, [("Content-Type", "text/html")]),
}


def raw_post(
    url: str, path: str, body: bytes, headers: Mapping[str, str | bytes]
) -> tuple[int, list[tuple[str, str]], bytes]:
    """Post with these headers only; return status, headers that are not for the connection, and the bytes."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.request("POST", path, body, headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, [(k.lower(), v) for k, v in answer.getheaders() if k.lower() not in HOPS], content


def without_host(headers: dict[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items() if name.lower() not in {"host", *HOPS}}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ScriptedUpstream, str]]:
    with ScriptedUpstream() as upstream:
        proxy = make_proxy(upstream.url, tmp_path_factory.mktemp("proxy"), Numbering())
        with listening_proxy(proxy) as url:
            yield upstream, url


@pytest.mark.parametrize("reply", REPLIES)
@pytest.mark.parametrize("asked", ASKED)
def test_with_memory_off_an_exchange_is_byte_for_byte_the_upstreams(
    pair: tuple[ScriptedUpstream, str], asked: str, reply: str
) -> None:
    upstream, url = pair
    if reply not in ("answer", "stream") and asked != "text":
        return
    headers: dict[str, str | bytes] = {"Content-Type": "application/json", "Authorization": "Bearer k"}
    headers |= {"X-Own": "é".encode(), "Accept-Encoding": "gzip"}
    upstream.sent.clear()
    upstream.script += [REPLIES[reply], REPLIES[reply]]
    straight = raw_post(upstream.url, "/v1/chat/completions?a=1", ASKED[asked], headers)
    through = raw_post(url, "/v1/chat/completions?a=1", ASKED[asked], headers | NONE)
    assert through == straight
    first, second = upstream.sent
    assert first.body == second.body == ASKED[asked] and (first.method, first.path) == (second.method, second.path)
    assert without_host(first.headers) == without_host(second.headers)


def test_models_and_embeddings_are_the_upstreams(pair: tuple[ScriptedUpstream, str]) -> None:
    upstream, url = pair
    upstream.sent.clear()
    upstream.script += [Reply([b'{"data": []}']), Reply([b'{"id": "a/b"}']), Reply([b'{"data": [1]}'])]
    assert httpx.get(f"{url}/v1/models", timeout=60).json() == {"data": []}
    assert httpx.get(f"{url}/v1/models/a/b", timeout=60).json() == {"id": "a/b"}
    assert httpx.post(f"{url}/v1/embeddings", json={"input": "x"}, timeout=60).json() == {"data": [1]}
    assert [sent.path for sent in upstream.sent] == ["/v1/models", "/v1/models/a/b", "/v1/embeddings"]
    assert upstream.sent[2].json == {"input": "x"}
    assert raw_post(url, "/v1/completions", b"{}", {})[0] == 404
    assert (
        httpx.get(f"{url}/v1/models/%2e%2e/%2e%2e/metrics", timeout=60).status_code == 404 and len(upstream.sent) == 3
    )


def chat(*messages: tuple[str, str]) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": role, "content": text} for role, text in messages]}


START = chat(("system", "You act."), ("user", "put a mug in cabinet"))
SHELF = "\nMemory: it is there. Do now: go to shelf 1"


def test_a_stream_arrives_as_it_comes_and_is_read_for_its_action(tmp_path: Path) -> None:
    go = threading.Event()
    reply = Reply(deltas("go to", " shelf 1"), headers=[SSE], wait=lambda i: i == 0 or go.wait(20))
    with proxied(tmp_path, script=[reply]) as (_, url), httpx.Client(timeout=60) as client:
        with client.stream("POST", f"{url}/v1/chat/completions", json=START | {"stream": True}) as answer:
            chunks = answer.iter_raw()
            assert next(chunks) == reply.chunks[0] and not go.is_set()
            go.set()
            assert b"".join(chunks) == b"".join(reply.chunks[1:])
        session = client.get(f"{url}/sessions/{answer.headers['x-memcompiler-session']}").json()
    assert [step["action"] for step in session["steps"]] == ["go to shelf 1"]


def test_a_client_that_repeats_after_a_failure_finds_everything_as_it_was(tmp_path: Path) -> None:
    half = completion("go to shelf 1")[:40]
    faults = [
        Reply([b"{}"], 429),
        Reply([b"{}"], 503),
        Reply([half], cut=True),
        Reply(deltas("go"), headers=[SSE], cut=True),
    ]
    compiler = Numbering()
    with proxied(tmp_path, compiler, faults) as (upstream, url), httpx.Client(timeout=60) as client:
        post = lambda body: client.post(f"{url}/v1/chat/completions", json=body)
        assert [post(START).status_code for _ in range(2)] == [429, 503]
        for _ in range(2):
            with pytest.raises(httpx.RemoteProtocolError):  # as the upstream broke it off
                post(START)
        assert post(START).status_code == 200
        later = chat(
            *[(m["role"], m["content"]) for m in START["messages"]],
            ("assistant", "go to shelf 1"),
            ("user", "nothing"),
        )
        assert post(later).status_code == 200
    assert len({sent.body for sent in upstream.sent[:5]}) == 1 and len(compiler.requests) == 2
    texts = [message["content"] for message in upstream.sent[5].messages]
    assert texts[1] == "put a mug in cabinet" + SHELF and texts[3].endswith("Do now: go to shelf 2")


def test_an_upstream_that_is_gone_or_too_slow_is_named(tmp_path: Path) -> None:
    never, compiler = threading.Event(), Numbering()
    with ScriptedUpstream([Reply(wait=lambda i: never.wait(5)), Reply(before=lambda: never.wait(5))]) as upstream:
        slow = make_proxy(upstream.url, tmp_path, compiler, upstream={"url": upstream.url, "timeout_s": 0.3})
        with listening_proxy(slow) as url:
            with pytest.raises(httpx.RemoteProtocolError):  # its headers came, its content did not
                httpx.post(f"{url}/v1/chat/completions", json=START, timeout=60)
            answer = httpx.post(f"{url}/v1/chat/completions", json=START, timeout=60)
            assert answer.status_code == 504 and "within 0.3 s" in answer.json()["error"]["message"]
        never.set()
    gone = make_proxy(upstream.url, tmp_path, compiler)
    with listening_proxy(gone) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json=START, timeout=60)
    assert answer.status_code == 502 and "cannot be reached" in answer.json()["error"]["message"]
    assert len(compiler.requests) == 1  # the session of the first proxy went on in the second


@pytest.mark.parametrize(("keep_s", "connections"), [(0.0, 2), (60.0, 1)])
def test_an_idle_connection_is_left_before_the_upstream_closes_it(
    keep_s: float, connections: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = uvicorn.Config("app:app").timeout_keep_alive  # of vLLM, too
    assert usual > upstream_module.KEEP_ALIVE_S and (httpx.Limits().keepalive_expiry or 0) < http_module.KEEP_ALIVE_S
    monkeypatch.setattr(upstream_module, "KEEP_ALIVE_S", keep_s)
    with proxied(tmp_path) as (upstream, url):
        for _ in range(2):
            assert httpx.post(f"{url}/v1/chat/completions", json=START, headers=NONE, timeout=60).status_code == 200
    assert len({sent.port for sent in upstream.sent}) == connections


def test_keys_come_from_the_environment_and_do_not_leak(tmp_path: Path) -> None:
    from proxy.upstream import Upstream

    with ScriptedUpstream() as upstream:
        proxy = make_proxy(upstream.url, tmp_path, Numbering())
        proxy.upstream = Upstream(proxy.config.upstream, key="theirs", drops_key=True)
        with listening_proxy(proxy, key="ours") as url:
            post = lambda key, path: httpx.post(
                f"{url}{path}", json=START, headers={"Authorization": f"Bearer {key}"}, timeout=60
            )
            for path in ("/v1/chat/completions", "/v1/embeddings", "/sessions/a/end"):
                assert post("wrong", path).status_code == 401
            assert (
                httpx.get(f"{url}/sessions", timeout=60).status_code
                == httpx.get(f"{url}/metrics", timeout=60).status_code
                == 401
            )
            assert post("ours", "/v1/chat/completions").status_code == 200
        [sent] = upstream.sent
        assert sent.headers["authorization"] == "Bearer theirs" and b"ours" not in json.dumps(sent.headers).encode()


def test_headers_that_are_not_utf8_and_socks_proxies_are_refused(
    pair: tuple[ScriptedUpstream, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from configs.proxy import UpstreamConfig
    from proxy.upstream import Upstream

    upstream, url = pair
    upstream.sent.clear()
    status, _, content = raw_post(url, "/v1/chat/completions", ASKED["text"], NONE | {"X-Own": b"\xe9"})
    assert status == 400 and b"x-own" in content and not upstream.sent
    monkeypatch.setattr("proxy.upstream.getproxies", lambda: {"https": "socks5://me:secret@127.0.0.1:9"})
    monkeypatch.setattr("proxy.upstream.proxy_bypass", lambda host: False)
    with pytest.raises(ValueError, match=r"socks5 proxy for api\.test.*HTTP proxies only") as refused:
        Upstream(UpstreamConfig(url="https://api.test/v1"))
    assert "secret" not in str(refused.value)
    Upstream(UpstreamConfig())  # this machine needs no proxy
