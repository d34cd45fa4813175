"""Clients of the servers that the chaos benchmark kills. They repeat what was not answered, as any client would."""

from __future__ import annotations

import json
import threading
import time
import zlib
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from benchmarks.chaos.facts import Facts, numbered, without_clocks
from benchmarks.serving.load import compile_bodies
from benchmarks.serving.scripted import Script, read_script
from configs.models import COMPILER_KEY
from runtime.http import RemoteServer
from runtime.store import to_json

MODEL = "zoo/household/compiler"
EPISODES, STEPS = 3, 8  # that are compiled
GOALS, TURNS = ("put a mug in desk", "put a mug in shelf", "put a book in desk"), 4  # conversations with the proxy
ANSWERED_S = 900.0  # a request hangs that has no answer after so many seconds and restarts
AGAIN = (429, 502, 503)  # statuses that ask for a retry


def compile_all(url: str) -> Facts:
    """Ask the compiler service for the steps of some episodes, one after the other; return its answers."""
    server, script = RemoteServer(url, COMPILER_KEY, "memcompiler serve compiler", ANSWERED_S), _script()
    bodies = [body for n in range(EPISODES) for body in compile_bodies(script, script.spec(n), STEPS)]
    return {f"answer {n}": to_json(without_clocks(server.post_all("/compile", [b])[0])) for n, b in enumerate(bodies)}


def _script() -> Script:
    return Script(MODEL, MODEL, 100, read_script())


def converse(url: str) -> Facts:
    """Play conversations through the proxy and end each as an episode; return what the upstream answered."""
    said = list[tuple[str, str]]()
    with httpx.Client(base_url=url, timeout=120.0, trust_env=False) as client:
        for number, goal in enumerate(GOALS):
            session = {"X-Memcompiler-Session": f"chaos-{number}"}
            messages = [{"role": "user", "content": f"Your task is to: {goal}. You are in the middle of a room."}]
            for turn in range(TURNS):
                body = {"model": "m", "messages": messages}
                reply = answered(client, "/v1/chat/completions", body, session).json()
                text = reply["choices"][0]["message"]["content"]
                said.append((f"answer {number}, {turn}", text))
                messages += [{"role": "assistant", "content": text}]
                messages += [{"role": "user", "content": f"You arrive. You see a mug {turn} and a desk {turn}."}]
            answered(client, f"/sessions/chaos-{number}/end", {"success": True}, {}, known=(200, 404))
    return numbered(said)


def answered(
    client: httpx.Client, path: str, body: Any, headers: dict[str, str], known: tuple[int, ...] = (200,)
) -> httpx.Response:
    """Send a request until it is answered. 404 at the end of a session: its first end was not answered, but done."""
    until = time.monotonic() + ANSWERED_S
    while True:
        try:
            reply = client.post(path, json=body, headers=headers)
            if reply.status_code in known:
                return reply
            if reply.status_code not in AGAIN:
                reply.raise_for_status()
        except httpx.TransportError:  # the server was killed
            pass
        if time.monotonic() > until:
            raise TimeoutError(f"{path} has no answer after {ANSWERED_S:g} s")
        time.sleep(0.1)


@cache
def echoing_upstream() -> str:
    """Start an OpenAI API in a thread of this process whose answers are a checksum of the messages; return its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Echo)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_address[1]}/v1"


class _Echo(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        action = f"go to shelf {zlib.crc32(json.dumps(sent['messages']).encode())}"
        message = {"role": "assistant", "content": action}
        answer = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Write no log."""
