"""Environments for workers to host: well-behaved, odd and broken. Plain objects: any Python from 3.9 on runs them."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
import zlib


def tiny_png(grey: int) -> bytes:
    """A grey picture of one pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack("!I", len(data)) + kind + data + struct.pack("!I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack("!2I5B", 1, 1, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(bytes([0, grey]))) + chunk(b"IEND", b"")


class Countdown:
    """Succeeds after a number of steps, the task's id. Some actions misbehave instead."""

    plain = True
    name = "countdown"

    def __init__(self, start_s: float = 0.0, closed_at: str = "") -> None:
        time.sleep(start_s)
        self._closed_at = closed_at
        self._left = self._total = 0

    def tasks(self, split):
        if split != "test":
            raise ValueError("no split %r: use test" % split)  # noqa: UP031
        one = {"goal": "wait", "scene": "", "split": split, "kind": "", "isolation": {"scene": ["a", "b"]}}
        return [{**one, "id": str(n), "data": {"n": str(n)}} for n in (1, 2, 3)]

    def reset(self, task):
        if task["kind"] == "broken":
            raise RuntimeError("this game is corrupt")
        print("noise on standard output")
        self._left = self._total = int(task["id"])
        return self._see("start of " + task["goal"])

    def step(self, action):
        verb, _, argument = action.partition(" ")
        getattr(self, "_" + verb, lambda _: None)(argument)
        self._left -= 1
        seen = self._see("did " + action)
        return {
            "observation": seen,
            "progress": 1 - self._left / self._total,
            "success": self._left == 0,
            "done": self._left == 0,
        }

    def expert(self):
        return ["wait"] * self._left

    def close(self):
        if self._closed_at:
            with open(self._closed_at, "a") as file:
                file.write("closed\n")

    def _see(self, text):
        return {"text": text, "image": tiny_png(self._left), "admissible": ["wait", "look"]}

    # Actions that misbehave ---------------------------------------------------------------------------------------

    def _raise(self, message):
        raise KeyError(message)

    def _sleep(self, seconds):
        time.sleep(float(seconds))

    def _exit(self, status):
        sys.stderr.write("something terrible happened\n")
        sys.stderr.flush()
        os._exit(int(status))

    def _stop(self, _):
        os.kill(os.getpid(), signal.SIGSTOP)

    def _garbage(self, _):
        for name in os.listdir("/proc/self/fd"):  # the pool's socket has the number that it had in the parent
            fd = int(name)
            try:
                if os.path.realpath("/proc/self/fd/%d" % fd).split("/")[-1].startswith("socket:"):  # noqa: UP031
                    os.write(fd, b"Unity says hello, and here is a lot of text\n")
            except OSError:
                continue

    def _huge(self, _):
        self._see = lambda text: {"text": "x" * (65 * 2**20)}

    def _nonsense(self, _):
        self._see = lambda text: {"text": "", "image": b"\x89PNG\r\n\x1a\n and then nothing of the kind"}

    def _child(self, path):
        """Start a grandchild that ignores SIGTERM, as some simulators do; its process id goes to the file."""
        code = (
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(300)"
        )
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        child.stdout.readline()
        with open(path, "w") as file:
            file.write(str(child.pid))


class Unbuildable:
    def __init__(self) -> None:
        raise OSError("no display: start Xvfb")


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        with open("/proc/%d/stat" % pid) as file:  # noqa: UP031
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
