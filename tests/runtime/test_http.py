"""The one HTTP client: again where a server is busy, in words where it refuses, and the first failure is told."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate

import pytest

from runtime.http import RefusedError, RemoteError, RemoteServer, free_port, responds, retry_after


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers with the statuses that the body lists, one for each attempt at it, and then with the body."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            attempts = self.server.attempts.setdefault(asked["id"], [])
            attempts.append(time.monotonic())
        time.sleep(asked.get("seconds", 0))
        status = (asked["statuses"][len(attempts) - 1 :] or [200])[0]
        data = json.dumps(asked if status == 200 else {"error": {"message": "in words"}}).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        if asked.get("wait"):
            self.send_header("retry-after", str(asked["wait"]))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def scripted() -> Iterator[http.server.ThreadingHTTPServer]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.attempts, server.lock = {}, threading.Lock()
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


def client(server: http.server.ThreadingHTTPServer, timeout: float = 20) -> RemoteServer:
    return RemoteServer(f"http://127.0.0.1:{server.server_address[1]}", "NO_KEY", "it", timeout)


def test_answers_come_in_order_and_busy_servers_are_asked_again(scripted: http.server.ThreadingHTTPServer) -> None:
    bodies = [{"id": i, "statuses": [503, 429][: i % 3]} for i in range(6)]
    assert client(scripted).post_all("/", bodies) == bodies
    assert [len(scripted.attempts[i]) for i in range(6)] == [1, 2, 3, 1, 2, 3]


def test_a_server_that_says_how_long_is_given_so_long(scripted: http.server.ThreadingHTTPServer) -> None:
    client(scripted).post_all("/", [{"id": 0, "statuses": [503], "wait": 0.4}])
    first, second = scripted.attempts[0]
    assert second - first >= 0.4


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, RefusedError),
        (413, RefusedError),
        (422, RefusedError),
        (401, RemoteError),
        (404, RemoteError),
        (500, RemoteError),
    ],
)
def test_a_refusal_is_told_in_the_servers_words(
    scripted: http.server.ThreadingHTTPServer, status: int, kind: type
) -> None:
    with pytest.raises(RemoteError, match=f"answered {status}: in words") as raised:
        client(scripted).post_all("/", [{"id": 0, "statuses": [status]}])
    assert type(raised.value) is kind and len(scripted.attempts[0]) == 1


def test_the_first_failure_of_a_batch_is_told_and_ends_it(scripted: http.server.ThreadingHTTPServer) -> None:
    """One that is busy for 4 s and one that takes 4 s come before it."""
    bodies = [{"id": 0, "statuses": [], "seconds": 4}, {"id": 1, "statuses": [503], "wait": 4}]
    started = time.monotonic()
    with pytest.raises(RefusedError, match="422"):
        client(scripted).post_all("/", [*bodies, {"id": 2, "statuses": [422], "seconds": 0.2}])
    assert time.monotonic() - started < 3.5 and len(scripted.attempts[1]) <= 1


def test_a_batch_ends_before_its_deadline(scripted: http.server.ThreadingHTTPServer) -> None:
    started = time.monotonic()
    with pytest.raises(RemoteError, match=r"no answer in \d attempts \(503: in words\): is it up\? Start it by `it`"):
        client(scripted, timeout=1).post_all("/", [{"id": i, "statuses": [503] * 99} for i in range(2)])
    assert time.monotonic() - started < 3


def test_no_proxy_is_asked_for_a_server_on_this_machine(
    scripted: http.server.ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")  # where nobody is
    monkeypatch.delenv("no_proxy", raising=False)
    body = {"id": 0, "statuses": []}
    assert responds(client(scripted).url) and client(scripted).post_all("/", [body]) == [body]


def test_retry_after() -> None:
    assert retry_after("2.5") == 2.5 and retry_after("9999") == 120
    assert 20 < retry_after(formatdate(time.time() + 30, usegmt=True)) <= 31
    assert [retry_after(value) for value in (None, "", "soon", "-1", "nan", "Thu, 01 Jan 1970 00:00:00 GMT")] == [0] * 6
