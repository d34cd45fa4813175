"""A worker process that hosts one environment, possibly under another interpreter.

    PYTHON envs/worker.py --factory module:Class --arguments '{"seed": 0}' --socket FD

`envs.pool` starts it. It imports the standard library only and runs on Python 3.9, for simulators that need an old
interpreter. The hosted object is an `envs.base.Environment` or, if its attribute `plain` is true or `envs.base` is not
imported, a plain object:

    tasks(split) -> dicts with the fields of `envs.base.Task`
    reset(task dict) -> {"text": str, "image": PNG bytes, PIL image or None, "admissible": list or None,
                         "beliefs": list of pairs; optional}
    sequences(split) -> dicts with the fields of `envs.base.TaskSequence`, and proceed(task dict) -> as reset; optional
    step(action) -> {"observation": as above, "progress": float, "success": bool, "done": bool,
                     "truncated": bool}
    expert() -> list or None, and close(); optional

A frame on the socket is the mark, the length of a JSON object, the object, and the blobs (PNG pictures) whose lengths
the object lists. A request is {"call": name, ...}, its answer {"ok": value} or {"error": {"type", "message"}}; the
first answer reports the start. During a call the worker sends heartbeats, {"beat": true}.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import os
import pkgutil
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MARK = b"MCW1"
HEAD = struct.Struct("!4sI")
FRAME_LIMIT = 64 * 2**20  # bytes; a 4k picture as PNG stays far below
SEQUENCE_FIELDS = ("id", "scene", "split", "family")
TEXT_FIELDS = ("id", "goal", "scene", "split", "kind", "family")  # of a task
CALLS = ("tasks", "sequences", "reset", "proceed", "step", "expert", "close", "ping")
PNG_MARK = b"\x89PNG\r\n\x1a\n"

Value = tuple[Any, list[bytes]]  # a JSON-ready answer and the pictures that it refers to by position


class FrameError(RuntimeError):
    """An invalid frame, or one over the size limit."""


class Channel:
    """One end of a socket that sends and receives frames. Not thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._buffer = sock, bytearray()

    def send(self, header: Mapping[str, Any], blobs: Sequence[bytes] = (), until: float | None = None) -> None:
        """Send one frame before `until` (`time.monotonic` seconds).

        Raises:
            FrameError: the frame is over the limit; nothing is sent.
            OSError: a time-out, or the connection is closed.
        """
        body = json.dumps({**header, "blobs": [len(blob) for blob in blobs]}).encode()
        _check_size(len(body) + sum(map(len, blobs)))
        self._wait_until(until)
        self._sock.sendall(b"".join([HEAD.pack(MARK, len(body)), body, *blobs]))

    def receive(self, until: float | None = None) -> tuple[dict[str, Any], list[bytes]]:
        """Receive the next frame, completely before `until`.

        Raises:
            EOFError: the other end is closed.
            FrameError: the bytes are no frame, or over the limit.
            OSError: a time-out.
        """
        mark, length = HEAD.unpack(self._read(HEAD.size, until))
        if mark != MARK:
            raise FrameError(f"expected a frame, got {mark!r}")
        _check_size(length)
        try:
            header = json.loads(self._read(length, until))
            sizes = [int(size) for size in header.pop("blobs")]
            assert min(sizes, default=0) >= 0
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError) as error:
            raise FrameError(f"a frame has an invalid header: {error!r}") from error
        _check_size(length + sum(sizes))
        return header, [self._read(size, until) for size in sizes]

    def _read(self, size: int, until: float | None) -> bytes:
        while len(self._buffer) < size:
            self._wait_until(until)
            chunk = self._sock.recv(max(65536, size - len(self._buffer)))
            if not chunk:
                raise EOFError
            self._buffer += chunk
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    def _wait_until(self, until: float | None) -> None:
        if until is not None:
            self._sock.settimeout(max(1e-3, until - time.monotonic()))


def _check_size(size: int) -> None:
    if size > FRAME_LIMIT:
        raise FrameError(f"a frame of {size} bytes is over the limit of {FRAME_LIMIT}: send less at a time")


def field(record: Any, name: str, *default: Any) -> Any:
    """Return a dict's item or a record's attribute; without a default, it must exist."""
    if isinstance(record, Mapping):
        return record.get(name, *default) if default else record[name]
    return getattr(record, name, *default)


def task_to_json(task: Any) -> dict[str, Any]:
    """Convert a `Task` or a dict to a JSON-ready dict."""
    isolation = {key: list(labels) for key, labels in field(task, "isolation", {}).items()}
    texts = {name: field(task, name, "") for name in TEXT_FIELDS}
    return {**texts, "data": dict(field(task, "data", {})), "isolation": isolation}


def plan_to_json(plan: Any) -> dict[str, Any]:
    """Convert a `FloorPlan` or a dict to a JSON-ready dict."""
    return {"things": dict(field(plan, "things", {})), "reachable": list(field(plan, "reachable", ()))}


def png(image: Any) -> bytes:
    """Encode a picture as PNG; return PNG bytes unchanged."""
    if isinstance(image, (bytes, bytearray)):
        if not image.startswith(PNG_MARK):
            raise TypeError("image bytes must be PNG")
        return bytes(image)
    if not callable(getattr(image, "save", None)):
        raise TypeError(f"image must be PNG bytes, a PIL image or None, not {type(image).__name__}")
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", compress_level=1)  # loopback is faster than strong compression
    return buffer.getvalue()


class HostedEnvironment:
    """Wrapper of the hosted object that returns JSON values and PNG pictures."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.plain = inner, getattr(inner, "plain", "envs.base" not in sys.modules)

    def ping(self) -> Value:
        name = getattr(self.inner, "name", type(self.inner).__name__)
        return {"name": str(name), "python": sys.version.split()[0], "pid": os.getpid()}, []

    def tasks(self, split: str) -> Value:
        return [task_to_json(task) for task in self.inner.tasks(split)], []

    def sequences(self, split: str) -> Value:
        listed = [
            {
                **{name: field(each, name, "") for name in SEQUENCE_FIELDS},
                "tasks": list(map(task_to_json, field(each, "tasks"))),
                "plan": plan_to_json(field(each, "plan", {})),
            }
            for each in self._living().sequences(split)
        ]
        return listed, []

    def reset(self, task: dict[str, Any]) -> Value:
        return self._observation(self.inner.reset(self._task(task)))

    def proceed(self, task: dict[str, Any]) -> Value:
        return self._observation(self._living().proceed(self._task(task)))

    def _task(self, task: dict[str, Any]) -> Any:
        if self.plain:
            return task
        from envs.base import task_from_json

        return task_from_json(task)

    def _living(self) -> Any:
        """Return the hosted object. Raises: RuntimeError, if its worlds do not persist across tasks."""
        if not callable(getattr(self.inner, "proceed", None)):
            raise RuntimeError(f"{type(self.inner).__name__} starts every task in a new world")
        return self.inner

    def step(self, action: str) -> Value:
        transition = self.inner.step(action)
        observation, blobs = self._observation(field(transition, "observation"))
        return {
            "observation": observation,
            "progress": float(field(transition, "progress")),
            "success": bool(field(transition, "success")),
            "done": bool(field(transition, "done")),
            "truncated": bool(field(transition, "truncated", False)),
        }, blobs

    def expert(self) -> Value:
        plan = getattr(self.inner, "expert", lambda: None)()
        return (None if plan is None else [str(command) for command in plan]), []

    def close(self) -> Value:
        getattr(self.inner, "close", lambda: None)()
        return None, []

    @staticmethod
    def _observation(observation: Any) -> Value:
        image, admissible = field(observation, "image", None), field(observation, "admissible", None)
        blobs = [] if image is None else [png(image)]
        commands = None if admissible is None else [str(command) for command in admissible]
        shown = {"text": str(field(observation, "text")), "admissible": commands, "image": bool(blobs)}
        beliefs = [[str(key), str(text)] for key, text in field(observation, "beliefs", ())]
        return {**shown, **({"beliefs": beliefs} if beliefs else {})}, blobs


class CallServer:
    """The worker's end of the channel, which answers calls and sends heartbeats during a call."""

    def __init__(self, channel: Channel, beat_s: float) -> None:
        self._channel, self._beat_s, self._lock, self._busy = channel, beat_s, threading.Lock(), False
        threading.Thread(target=self._beat, daemon=True).start()

    def answer(self, call: Callable[[], Value]) -> bool:
        """Run a call and send its result, or its exception as an error; return whether it succeeded."""
        self._busy = True
        try:
            value, blobs = call()
            self._reply({"ok": value}, blobs)
            return True
        except Exception as error:  # of the environment, or of encoding the answer
            traceback.print_exc()  # the pool reports the end of stderr
            self._reply({"error": {"type": type(error).__name__, "message": str(error)[:4000]}})
            return False

    def _reply(self, header: dict[str, Any], blobs: Sequence[bytes] = ()) -> None:
        with self._lock:
            self._channel.send(header, blobs)
            self._busy = False  # under the lock, so that no heartbeat follows the answer

    def _beat(self) -> None:
        parent = os.getppid()
        while os.getppid() == parent:
            with self._lock:
                if self._busy:
                    try:
                        self._channel.send({"beat": True})
                    except OSError:
                        break
            time.sleep(self._beat_s)
        end_group()


def end_group() -> None:
    """End this process and its process group."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def die_with_parent() -> None:
    """Let the kernel kill this process group when the parent ends (Linux; elsewhere it ends when the socket closes).

    Standard input is a pipe that the parent holds open; when it closes, the kernel sends SIGKILL, even to a group that
    is stopped or holds the interpreter's lock. PR_SET_PDEATHSIG would not reach child processes.
    """
    import fcntl

    lifeline = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # child processes must not inherit the pipe
    if hasattr(fcntl, "F_SETSIG") and os.getpgrp() == os.getpid():
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def serve(channel: Channel, server: CallServer, factory: str, arguments: str) -> int:
    """Build the environment, then answer calls until `close`; return the exit status."""
    calls: dict[str, Callable[..., Value]] = {}

    def start() -> Value:
        hosted = HostedEnvironment(pkgutil.resolve_name(factory)(**json.loads(arguments)))
        calls.update({name: getattr(hosted, name) for name in CALLS})
        return hosted.ping()

    if not server.answer(start):
        return 1
    while True:
        request, _ = channel.receive()
        name = request.pop("call")
        server.answer(functools.partial(calls[name], **request))
        if name == "close":
            return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="Host one environment for envs.pool.")
    parser.add_argument("--factory", required=True, help="module:Class")
    parser.add_argument("--arguments", default="{}", help="keyword arguments as a JSON object")
    parser.add_argument("--socket", type=int, required=True, help="inherited file descriptor of the pool's socket")
    parser.add_argument("--beat", type=float, default=1.0, help="seconds between heartbeats during a call")
    options = parser.parse_args()
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry) != here]  # no top-level modules here
    die_with_parent()
    os.set_inheritable(options.socket, False)
    channel = Channel(socket.socket(fileno=options.socket))
    try:
        return serve(channel, CallServer(channel, options.beat), options.factory, options.arguments)
    except (EOFError, OSError):  # the parent has ended
        end_group()
        raise


if __name__ == "__main__":
    sys.exit(main())
