"""An OpenAI-compatible server on loopback that misbehaves by script: one fault per request, until it is empty."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from configs.models import EndpointConfig

FAULTS = (
    "429",
    "429 retry-after",
    "500",
    "hang",
    "truncated",
    "html",
    "empty choices",
    "null content",
    "array",
    "closed",
    "garbage",
    "400",
    "401",
)
MODEL = "faulty-1"


def hashed(messages: list[dict[str, Any]]) -> str:
    """Return a text that depends on the request alone."""
    return "echo " + hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:12]


class FaultyServer:
    """The server, as a context manager.

    Attributes:
        faults: faults of the next requests in order; further requests are answered.
        answer: returns the answer to messages: a text, or a dictionary as the whole choice with its finish_reason.
        served: number of requests by fault, or "answer".
        bodies, keys: bodies and API keys of the requests.
        on_request: receives the number of requests so far, before each reply.
    """

    def __init__(
        self,
        faults: Iterable[str] = (),
        answer: Callable[[list[dict[str, Any]]], Any] = hashed,
        on_request: Callable[[int], None] = lambda n: None,
        vector: Callable[[str], list[float]] = lambda text: [float(len(text)), 1.0],
    ) -> None:
        self.faults, self.answer, self.on_request, self.vector = list(faults), answer, on_request, vector
        self.served: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.over = threading.Event()
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"owner": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True

    def __enter__(self) -> FaultyServer:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()  # ends hanging requests
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @property
    def requests(self) -> int:
        return self.served.total()

    def config(self, **settings: Any) -> EndpointConfig:
        """Return settings of this server, with short waits after faults."""
        fast = {"key_env": None, "backoff_s": 0.001, "timeout_s": 10.0}
        return EndpointConfig(base_url=self.url, model=MODEL, **(fast | settings))

    def next_fault(self, body: dict[str, Any], key: str | None) -> str:
        with self._lock:
            fault = self.faults.pop(0) if self.faults else "answer"
            self.served[fault] += 1
            self.bodies.append(body)
            self.keys.add(key)
            n = self.requests
        self.on_request(n)
        return fault


class _Handler(BaseHTTPRequestHandler):
    owner: FaultyServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        match self.owner.next_fault(body, self.headers.get("Authorization")):
            case "429" | "500" | "400" | "401" as status:
                # As some servers do, it quotes the key.
                self._send(json.dumps({"error": {"message": f"no: {self.headers.get('Authorization')}"}}), int(status))
            case "429 retry-after":
                self._send("{}", 429, {"Retry-After": "0.05"})
            case "hang":
                self.owner.over.wait(60)
            case "truncated":
                self._send(self._answer(body, "never read")[:40])
            case "html":
                self._send("<html>Bad gateway</html>", kind="text/html")
            case "empty choices":
                self._send(json.dumps({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 0}}))
            case "null content":
                self._send(json.dumps({"choices": [{"message": {"content": None}}]}))
            case "array":
                self._send("[1, 2]")
            case "closed":
                self.connection.close()
            case "garbage":
                self._send(self._answer(body, "Sure! {0} %s <|im_end|> \u0000 I would go\nto the fridge"))
            case vectors if "input" in body:
                self._send(self._vectors(body, vectors))
            case _:
                self._send(self._answer(body, self.owner.answer(body["messages"])))

    def _vectors(self, body: dict[str, Any], fault: str) -> str:
        """Embed the texts, the last one first, or with a fault."""
        data = [{"index": i, "embedding": self.owner.vector(text)} for i, text in enumerate(body["input"])]
        match fault:
            case "one too few":
                data.pop()
            case "one twice":
                data[0]["index"] = len(data) - 1
            case "of other length":
                data[0]["embedding"] = [1.0]
            case "not finite":
                data[0]["embedding"] = [float("nan"), 1.0]
            case "too large":
                data[0]["embedding"] = [1e300, 1.0]
            case "text":
                data[0]["embedding"] = ["a", "b"]
            case "empty":
                data = [{**row, "embedding": []} for row in data]
        return json.dumps({"data": data[::-1], "model": body["model"], "usage": {"prompt_tokens": 5 * len(data)}})

    def _answer(self, body: dict[str, Any], said: Any) -> str:
        usage = {"prompt_tokens": 100, "completion_tokens": 10}
        choice = {"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        choice = said if isinstance(said, dict) else choice
        return json.dumps({"id": "1", "model": body["model"], "choices": [choice], "usage": usage})

    def _send(
        self, text: str, status: int = 200, headers: dict[str, str] | None = None, kind: str = "application/json"
    ) -> None:
        try:
            self.send_response(status)
            for name, value in {"Content-Type": kind, "Content-Length": str(len(text)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode("ascii"))
        except OSError:
            pass  # the client was killed

    def log_message(self, *_: object) -> None:
        pass
