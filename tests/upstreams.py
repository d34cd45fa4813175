"""An HTTP server on loopback that answers by script and keeps what it was sent, and a proxy in front of it."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import uvicorn

from compiler.language import Emission, render
from compiler.records import Compilation
from configs.proxy import ProxyConfig
from data_gen.memory_factory import initialise_memory, open_memory
from proxy.app import Proxy, proxy_app
from proxy.guide import Guide
from proxy.mapping import mapped
from proxy.sessions import SessionStore
from proxy.upstream import Upstream
from runtime.http import bound_socket
from tests.waiting import until

JSON = ("Content-Type", "application/json")
SSE = ("Content-Type", "text/event-stream")


@dataclass
class Reply:
    """What the server sends: chunks one after the other, and if `cut`, no end."""

    chunks: Sequence[bytes] = (b"{}",)
    status: int = 200
    headers: Sequence[tuple[str, str]] = (JSON,)
    cut: bool = False
    before: Callable[[], object] = lambda: None  # called before the headers
    wait: Callable[[int], object] = lambda i: None  # called before chunk i


@dataclass
class Sent:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    port: int  # of the connection that it came by

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.body)

    @property
    def messages(self) -> list[dict[str, Any]]:
        return self.json["messages"]


def completion(message: dict[str, Any] | str) -> bytes:
    """A chat completion with one message."""
    message = {"role": "assistant", "content": message} if isinstance(message, str) else message
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
    head = {"id": "c1", "object": "chat.completion", "created": 1, "model": "m"}
    return json.dumps({**head, "choices": [choice], "usage": usage}).encode()


def event(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def deltas(*texts: str) -> list[bytes]:
    """The events of a streamed text."""
    return [*(event({"choices": [{"index": 0, "delta": {"content": text}}]}) for text in texts), event(b"[DONE]")]


@dataclass
class ScriptedUpstream:
    """The server, as a context manager. Requests beyond the script get `answer`."""

    script: list[Reply] = field(default_factory=list)
    answer: Callable[[Sent], bytes] = lambda sent: completion("go on")
    sent: list[Sent] = field(default_factory=list)

    def __enter__(self) -> ScriptedUpstream:
        handler = type("Handler", (_Handler,), {"owner": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"


class _Handler(BaseHTTPRequestHandler):
    owner: ScriptedUpstream
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        sent = Sent(
            self.command, self.path, dict(self.headers.items()), self.rfile.read(length), self.client_address[1]
        )
        self.owner.sent.append(sent)
        reply = self.owner.script.pop(0) if self.owner.script else Reply([self.owner.answer(sent)])
        with contextlib.suppress(OSError):
            self._send(reply)

    do_POST = do_GET

    def _send(self, reply: Reply) -> None:
        streams = SSE in reply.headers
        reply.before()
        self.send_response(reply.status)
        for name, value in reply.headers:
            self.send_header(name, value)
        length = sum(map(len, reply.chunks)) + 100 * reply.cut
        self.send_header(*(("Transfer-Encoding", "chunked") if streams else ("Content-Length", str(length))))
        self.end_headers()
        for i, chunk in enumerate(reply.chunks):
            reply.wait(i)
            self.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n" if streams else chunk)
            self.wfile.flush()
        if reply.cut:
            self.close_connection = True
            return
        if streams:
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        pass


class Numbering:
    """A compiler whose guidance says how many actions came before, and which plans at the first step."""

    def __init__(self, fails: Callable[[Any], bool] = lambda request: False, seconds: float = 0.0) -> None:
        self.requests, self.fails, self.seconds = list[Any](), fails, seconds

    def compile(self, requests: Sequence[Any]) -> list[Compilation]:
        time.sleep(self.seconds)
        self.requests += requests
        if any(map(self.fails, requests)):
            raise RuntimeError(f"SECRET {requests[0].goal}")
        found = [Emission(f"go to shelf {len(r.history) + 1}", "it is there") for r in requests]
        return [Compilation(render(emission), emission, request=r) for emission, r in zip(found, requests, strict=True)]


def make_proxy(url: str, folder: Path, compiler: Any = None, gate: Any = None, **settings: Any) -> Proxy:
    """Create a proxy with a compiler of the test."""
    config = ProxyConfig.model_validate({"upstream": {"url": url, "timeout_s": 20}} | settings)
    memory = open_memory(config.memory, folder / "bank", config.env)
    initialise_memory(memory, config.env)

    async def compile(request: Any) -> Compilation:
        import asyncio

        [found] = await asyncio.to_thread(compiler.compile, [request])
        return found

    guide = Guide(
        config=config,
        mapping=mapped(config.mapping),
        store=SessionStore(folder / "sessions", config.sessions),
        memory=memory,
        compile=compile,
        compiler=compiler,
        gate=gate,
    )
    return Proxy(guide, Upstream(config.upstream))


@contextlib.contextmanager
def listening_proxy(proxy: Proxy, key: str | None = None) -> Iterator[str]:
    """Serve a proxy on a free port; yield its address."""
    settings = uvicorn.Config(proxy_app(proxy, key), log_level="critical", server_header=False, date_header=False)
    server, bound = uvicorn.Server(settings), bound_socket("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    until(lambda: server.started)
    yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    server.should_exit = server.force_exit = True
    thread.join(20)
    bound.close()


@contextlib.contextmanager
def proxied(
    folder: Path,
    compiler: Any = None,
    script: Sequence[Reply] = (),
    answer: Callable[[Sent], bytes] = lambda sent: completion("go on"),
    **settings: Any,
) -> Iterator[tuple[ScriptedUpstream, str]]:
    """Serve a scripted upstream and a proxy in front of it; yield the upstream, and the proxy's address."""
    with ScriptedUpstream(list(script), answer) as upstream:
        proxy = make_proxy(upstream.url, folder, Numbering() if compiler is None else compiler, **settings)
        with listening_proxy(proxy) as url:
            yield upstream, url
