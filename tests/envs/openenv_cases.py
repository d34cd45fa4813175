"""OpenEnv's own client plays our household over loopback, several sessions at a time.

Run by `test_openenv.py` in the interpreter that has the extra `openenv`."""

from __future__ import annotations

import base64
import io
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openenv.core as openenv
import pytest
from PIL import Image

from envs.household.environment import HouseholdEnvironment
from envs.openenv_server import LOOPBACK, openenv_app

ROOT = Path(__file__).parents[2]
SERVER = """
import sys
from envs.household.environment import HouseholdEnvironment
from envs.openenv_server import serve_openenv
make_env = lambda: HouseholdEnvironment(scenes={"train": 2, "test": 2})
serve_openenv(make_env, "test", port=int(sys.argv[1]), max_sessions=2)
"""


def household() -> HouseholdEnvironment:
    return HouseholdEnvironment(scenes={"train": 2, "test": 2})


def get(url: str, body: dict | None = None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Start a server in a separate process, on a free loopback port."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, "-c", SERVER, str(port)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    address = f"http://{LOOPBACK}:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                get(f"{address}/health")
                break
            except OSError:
                assert process.poll() is None, process.stderr.read()
                assert time.monotonic() < deadline, "the server does not answer"
                time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)


def client(url: str):
    return openenv.GenericEnvClient(base_url=url, connect_timeout_s=30, message_timeout_s=60).sync()


def expert(index: int) -> list[str]:
    """Return the expert's commands, from a local environment."""
    env = household()
    env.reset(env.tasks("test")[index])
    commands = env.expert()
    assert commands
    return commands


def test_the_client_wins_with_the_experts_commands(url):
    task, commands = household().tasks("test")[3], expert(3)
    with client(url) as env:
        result = env.reset(task=task.id, episode_id="mine")
        seen = result.observation
        assert (seen["task"], seen["goal"], seen["scene"]) == (task.id, task.goal, task.scene)
        assert not result.done and seen["progress"] == 0 and commands[0] in seen["admissible"]
        picture = Image.open(io.BytesIO(base64.b64decode(seen["image"], validate=True)))
        assert picture.format == "PNG" and picture.size == (64, 64)
        for command in commands[:-1]:
            result = env.step({"command": command})
            assert (result.reward, result.done) == (0.0, False)
        result = env.step({"command": commands[-1]})
        assert (result.reward, result.done) == (1.0, True)
        assert result.observation["success"] and result.observation["progress"] == 1.0
        state = env.state()
        assert state["step_count"] == len(commands) and state["task"] == task.id and state["episode_id"] == "mine"
        with pytest.raises(Exception, match="reset first"):
            env.step({"command": "look"})
        assert not env.reset(index=0).done  # the session goes on


def test_sessions_do_not_disturb_each_other(url):
    ways = {0: expert(0), 5: expert(5)}
    with client(url) as one, client(url) as other:
        envs = {0: one, 5: other}
        first = {i: env.reset(index=i).observation for i, env in envs.items()}
        assert first[0]["task"] != first[5]["task"]
        last = {}
        for t in range(max(map(len, ways.values()))):  # by turns
            for i, env in envs.items():
                if t < len(ways[i]):
                    last[i] = env.step({"command": ways[i][t]})
        assert all(result.done and result.observation["success"] for result in last.values())
        with pytest.raises(Exception, match=r"(?i)capacity"), client(url) as third:
            third.reset()
    deadline = time.monotonic() + 30
    while True:  # their sessions are free once the server has noticed the disconnects
        try:
            with client(url) as third:
                assert third.reset().observation["task"]
            break
        except Exception:
            assert time.monotonic() < deadline
            time.sleep(0.2)


def test_which_task_a_reset_takes(url):
    tasks = household().tasks("test")
    with client(url) as env:
        assert env.reset(seed=len(tasks) + 1).observation["task"] == tasks[1].id
        in_turn = [env.reset().observation["task"] for _ in tasks]
        assert sorted(in_turn) == sorted(task.id for task in tasks)  # all of them before any comes again
        for wrong, message in [
            ({"task": "none"}, "no task 'none'"),
            ({"index": 999}, "no task 999"),
            ({"index": -1}, "no task -1"),
            ({"split": "train"}, "serves the split 'test'"),
            ({"seed": 1, "index": 2}, "set only one of"),
        ]:
            with pytest.raises(Exception, match=message):
                env.reset(**wrong)
        with pytest.raises(Exception, match=r"(?i)invalid"):
            env.step({"order": "look"})
        assert env.reset(seed=0).observation["task"] == tasks[0].id  # errors do not end the session


def test_tasks_can_be_listed(url):
    tasks = household().tasks("test")
    assert get(f"{url}/list_environments") == ["household"]
    assert [split["name"] for split in get(f"{url}/household/splits")] == ["test"]
    assert get(f"{url}/household/num_tasks", {"split": "test"}) == {"num_tasks": len(tasks)}
    listed = get(f"{url}/household/tasks", {"split": "test"})["tasks"]
    assert [task["id"] for task in listed] == [task.id for task in tasks]
    assert get(f"{url}/household/task", {"split": "test", "index": 2})["task"]["goal"] == tasks[2].goal
    for split, index in (("train", 0), ("test", 999), ("test", -1)):
        with pytest.raises(urllib.error.HTTPError, match="400"):
            get(f"{url}/household/task", {"split": split, "index": index})


def test_it_listens_on_loopback_only(url):
    port = int(url.rsplit(":", 1)[1])
    listening = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if Path(table).exists():
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
            listening |= {
                row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port
            }
    assert listening in (set(), {"0100007F"}), listening  # 127.0.0.1; nothing where /proc is not there


def test_nothing_to_serve():
    with pytest.raises(ValueError, match="no split 'nope'"):
        openenv_app(household, "nope")
    with pytest.raises(ValueError, match="no tasks"):
        openenv_app(lambda: HouseholdEnvironment(scenes={"test": 0}), "test")
