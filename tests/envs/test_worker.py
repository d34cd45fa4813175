"""The worker's own promises: the protocol, any Python from 3.9 on, and never outliving its parent."""

from __future__ import annotations

import io
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from envs.base import Task
from envs.worker import FRAME_LIMIT, HEAD, MARK, Channel, FrameError, HostedEnvironment, png
from tests.envs.hosted_examples import Countdown, alive, tiny_png

WORKER = Path(__file__).parents[2] / "envs" / "worker.py"


def linked() -> tuple[Channel, Channel, socket.socket]:
    ours, theirs = socket.socketpair()
    return Channel(ours), Channel(theirs), theirs


def test_a_frame_arrives_as_it_was_sent() -> None:
    ours, theirs, _ = linked()
    blobs = [b"", bytes(300_000), b"\x00\xff"]
    sender = threading.Thread(target=lambda: [ours.send({"text": "½\ud800", "n": i}, blobs) for i in range(2)])
    sender.start()
    got = [theirs.receive(time.monotonic() + 10) for _ in range(2)]
    sender.join()
    assert got == [({"text": "½\ud800", "n": i}, blobs) for i in range(2)]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"Unity 2019 starting\n", "expected a frame"),
        (HEAD.pack(MARK, 4) + b"[1]\n", "head"),
        (HEAD.pack(MARK, 14) + b'{"blobs":[-1]}', "head"),
        (HEAD.pack(MARK, FRAME_LIMIT + 1), "over the limit"),
        (HEAD.pack(MARK, 22) + b'{"blobs":[9999999999]}', "over the limit"),
    ],
)
def test_what_is_no_frame_is_refused(data: bytes, says: str) -> None:
    ours, _, theirs = linked()
    theirs.sendall(data)
    with pytest.raises(FrameError, match=says):
        ours.receive(time.monotonic() + 5)


def test_a_frame_over_the_limit_is_not_sent() -> None:
    ours, theirs, _ = linked()
    with pytest.raises(FrameError, match="over the limit"):
        ours.send({}, [bytes(FRAME_LIMIT)])
    ours.send({"next": 1})
    assert theirs.receive(time.monotonic() + 5) == ({"next": 1}, [])


def test_a_channel_tells_silence_from_the_end() -> None:
    ours, _theirs, end = linked()
    with pytest.raises(TimeoutError):
        ours.receive(time.monotonic() + 0.05)
    end.close()
    with pytest.raises(EOFError):
        ours.receive(time.monotonic() + 5)


def test_our_environments_and_plain_objects_are_told_apart() -> None:
    from envs.household.environment import HouseholdEnvironment

    env = HouseholdEnvironment(scenes={"train": 2, "test": 2})
    ours = HostedEnvironment(env)
    tasks, _ = ours.tasks("test")
    assert [Task(**task).id for task in json.loads(json.dumps(tasks))] == [task.id for task in env.tasks("test")]
    seen, [picture] = ours.reset(tasks[0])
    direct = env.reset(env.tasks("test")[0])
    assert (seen["text"], tuple(seen["admissible"])) == (direct.text, direct.admissible)
    from PIL import Image

    assert direct.image is not None and Image.open(io.BytesIO(picture)).tobytes() == direct.image.tobytes()
    plain = HostedEnvironment(Countdown())
    made, [picture] = plain.reset({"id": "2", "goal": "wait", "kind": ""})
    assert made == {"text": "start of wait", "admissible": ["wait", "look"], "image": True}
    assert picture == tiny_png(2)


def test_pictures_must_be_pictures() -> None:
    for wrong in (b"JFIF", [[0, 1]], "picture.png"):
        with pytest.raises(TypeError, match="PNG"):
            png(wrong)


class Parent:
    """A worker that is driven by hand."""

    def __init__(self, python: str = sys.executable, *, folder: Path, beat: float = 0.05) -> None:
        ours, theirs = socket.socketpair()
        self.process = subprocess.Popen(
            [
                python,
                str(WORKER),
                "--factory",
                "hosted_examples:Countdown",
                "--socket",
                str(theirs.fileno()),
                "--arguments",
                json.dumps({"closed_at": str(folder / "closed")}),
                "--beat",
                str(beat),
            ],
            stdin=subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
            env={"PYTHONPATH": str(Path(__file__).parent)},
            stdout=subprocess.PIPE,
        )
        theirs.close()
        self.sock, self.channel = ours, Channel(ours)
        self.hello = self.answer()

    def receive(self) -> dict:
        return self.channel.receive(time.monotonic() + 60)[0]

    def ask(self, call: str, **arguments: object) -> dict:
        self.channel.send({"call": call, **arguments})
        return self.answer()

    def answer(self) -> dict:
        while "beat" in (answer := self.receive()):
            pass
        return answer


@pytest.mark.parametrize("name", ["python3.9", "python3.12", sys.executable])
def test_a_worker_runs_in_any_python_from_3_9_on(name: str, tmp_path: Path) -> None:
    python = shutil.which(name)
    asked = [python or "", "-c", "import sys; print(sys.version.split()[0])"]
    if python is None or (version := subprocess.run(asked, capture_output=True, text=True)).returncode:
        pytest.skip(f"needs {name} on PATH")
    parent = Parent(python, folder=tmp_path)
    assert parent.hello["ok"]["python"] == version.stdout.strip() and parent.hello["ok"]["name"] == "countdown"
    [task, *_] = parent.ask("tasks", split="test")["ok"]
    assert task["isolation"] == {"scene": ["a", "b"]} and task["family"] == ""
    parent.ask("reset", task=task)
    assert parent.ask("expert")["ok"] == ["wait"]
    assert parent.ask("step", action="wait")["ok"]["success"] is True
    assert parent.ask("tasks", split="x")["error"] == {"type": "ValueError", "message": "no split 'x': use test"}
    assert parent.ask("ping")["ok"]["pid"] == parent.process.pid
    assert parent.ask("close") == {"ok": None}
    assert parent.process.wait(20) == 0 and (tmp_path / "closed").read_text() == "closed\n"


def test_it_beats_only_while_a_call_runs(tmp_path: Path) -> None:
    parent = Parent(folder=tmp_path)
    parent.ask("reset", task={"id": "2", "goal": "", "kind": ""})
    parent.channel.send({"call": "step", "action": "sleep 0.5"})
    assert parent.receive() == {"beat": True}
    assert parent.answer()["ok"]["observation"]["text"] == "did sleep 0.5"
    with pytest.raises(TimeoutError):
        parent.channel.receive(time.monotonic() + 0.3)
    parent.process.kill()
    parent.process.wait()


@pytest.mark.parametrize("end", ["socket", "standard input"])
def test_it_ends_with_its_parent_and_takes_its_children_along(end: str, tmp_path: Path) -> None:
    parent = Parent(folder=tmp_path)
    parent.ask("reset", task={"id": "2", "goal": "", "kind": ""})
    parent.ask("step", action=f"child {tmp_path / 'pid'}")
    grandchild = int((tmp_path / "pid").read_text())
    assert alive(grandchild)
    if end == "socket":
        parent.sock.close()
    else:
        parent.channel.send({"call": "step", "action": "stop"})
        wait_until(lambda: "T" in Path(f"/proc/{parent.process.pid}/stat").read_text().rpartition(")")[2][:3])
        assert parent.process.stdin is not None
        parent.process.stdin.close()
    assert parent.process.wait(20) == -9
    wait_until(lambda: not alive(grandchild))


def wait_until(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
