"""The chaos benchmark finds what a kill costs: tried on commands that resume well, forget, repeat or hang."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random

import httpx
import pytest

from benchmarks.chaos import on_ray, running
from benchmarks.chaos.clients import answered
from benchmarks.chaos.facts import Facts, bank_of, rows_of, without_clocks
from benchmarks.chaos.on_ray import RayRun
from benchmarks.chaos.running import Tally, compare, run_chaos
from benchmarks.chaos.stages import Stage
from memory.bank import MemoryBank
from runtime.store import JsonLines
from tests.tiny_models import entry
from tests.waiting import lines, until

# Writes rows 0 to 9, slowly; what a run does with the rows that it finds is the first argument.
COMMAND = """
import sys, time
from pathlib import Path

how, out = sys.argv[1], Path(sys.argv[3])
out.mkdir(exist_ok=True)
file = out / "rows.jsonl"
there = file.read_bytes().splitlines(keepends=True) if file.exists() else []
done = sum(line.endswith(b"\\n") for line in there)
if there:
    time.sleep({"hang": 60}.get(how, 0))
    done += {"forget": 1, "repeat": -1}.get(how, 0)
with file.open("ab") as lines:
    for n in range(done, 10):
        time.sleep(0.05)
        lines.write(b'{"n": %d, "seconds": 0.5}\\n' % n)
        lines.flush()
"""

# Numbers the requests; a server that forgets begins again after a kill.
SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

how, out = sys.argv[1], Path(sys.argv[3])
out.mkdir(exist_ok=True)
asked = set()

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        name = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if how == "resume":
            (out / name).touch()
        asked.add(name)
        text = b"%d" % (len(list(out.iterdir())) if how == "resume" else len(asked))
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

HTTPServer(("127.0.0.1", int(sys.argv[5])), Handler).serve_forever()
"""

# Writes rows that an actor computes, which Ray restarts and asks again.
ON_RAY = """
import sys, time
from pathlib import Path

import ray

out = Path(sys.argv[2])
out.mkdir(exist_ok=True)
file = out / "rows.jsonl"
done = sum(line.endswith(b"\\n") for line in file.read_bytes().splitlines(keepends=True)) if file.exists() else 0
ray.init(log_to_driver=False, logging_level="error")

@ray.remote(num_cpus=0.5, max_restarts=-1, max_task_retries=-1)
class ObjectActor:
    def square(self, n):
        time.sleep(0.3)
        return n * n

actor = ObjectActor.remote()
with file.open("ab") as lines:
    for n in range(done, 40):
        lines.write(b'{"n": %d}\\n' % ray.get(actor.square.remote(n)))
        lines.flush()
"""


def stage(how: str) -> Stage:
    facts: Callable[[Path], dict[str, str]] = lambda run: rows_of(run, "rows.jsonl", lambda row: row["n"])
    return Stage(lambda whole: [sys.executable, "-c", COMMAND, how], facts)


@pytest.mark.seconds
@pytest.mark.parametrize("how", ["resume", "forget", "repeat", "hang"])
def test_what_a_kill_costs_is_found(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "STAGES", {"rows": stage(how)})
    monkeypatch.setattr(running, "MOST_PER_RUN", 1)
    monkeypatch.setattr(running, "EXTRA_S", 1.0)
    monkeypatch.setattr(running, "SLOWER", 1.0 if how == "hang" else 100.0)
    tally = run_chaos(["rows"], 3, Random(1), tmp_path / "runs")
    found = {"lost": tally.lost > 0, "different": tally.different > 0, "hung": tally.hung > 0}
    expected = {"resume": None, "forget": "lost", "repeat": "different", "hang": "hung"}[how]
    assert [name for name, so in found.items() if so] == ([expected] if expected else [])
    assert tally.kills == 3 or how == "hang"


def ask(url: str) -> Facts:
    """Ask ten requests, and each again until it is answered."""
    facts = Facts()
    with httpx.Client(base_url=url, trust_env=False) as client:
        for n in range(10):
            time.sleep(0.05)
            facts[f"answer {n}"] = answered(client, "/", n, {}).text
    return facts


@pytest.mark.seconds
@pytest.mark.parametrize("how", ["resume", "forget"])
def test_clients_of_a_killed_server_get_the_same_answers(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Stage(lambda whole: [sys.executable, "-c", SERVER, how], lambda out: {}, ask)
    monkeypatch.setattr(running, "STAGES", {"server": server})
    tally = run_chaos(["server"], 4, Random(1), tmp_path / "runs")
    assert tally.kills == 4 and tally.lost == tally.hung == 0
    assert (tally.different > 0) == (how == "forget")


@pytest.mark.slow
@pytest.mark.alone
def test_an_actor_a_node_and_the_driver_are_killed_on_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("ray") is None:  # an import here would come before Ray's token
        pytest.skip("needs the extra ray")
    facts: Callable[[Path], Facts] = lambda run: rows_of(run, "rows.jsonl", lambda row: row["n"])
    rows = tmp_path / "run" / "rows.jsonl"
    with closing(
        RayRun(Stage(lambda _: [sys.executable, "-c", ON_RAY], facts), tmp_path, rows.parent, Random(1))
    ) as run:
        for number, (victim, named) in enumerate((("process", "engine"), ("node", "node"), ("driver", "driver"))):
            monkeypatch.setattr(on_ray, "VICTIMS", (victim,))
            run.start()
            until(lambda wanted=4 * number + 2: lines(rows) >= wanted, 200)
            assert run.kill_after(0.0) == named
        found = run.finish(200.0)
    assert found == {f"rows.jsonl {n * n}": f'{{"n": {n * n}}}' for n in range(40)}


def test_entries_of_a_bank_are_named_by_their_texts(tmp_path: Path) -> None:
    for number in (1, 2):
        MemoryBank(tmp_path).write(entry(number, "found it"))
    assert sorted(bank_of(tmp_path)) == [f"{tmp_path.name}: found it", f"{tmp_path.name}: found it again 2"]
    assert bank_of(tmp_path / "none") == {}


def test_parts_are_compared_without_clocks(tmp_path: Path) -> None:
    assert without_clocks({"a": [{"seconds_env": 1, "b": 2}], "latency": {}, "git": 1}) == {"a": [{"b": 2}]}
    lines = JsonLines(tmp_path / "rows.jsonl")
    lines.append({"n": 1, "seconds": 1}, {"n": 1, "seconds": 2})
    rows = rows_of(tmp_path, "rows.jsonl", lambda row: row["n"])
    assert rows == {"rows.jsonl 1": '{"n": 1}', "rows.jsonl 1 again 2": '{"n": 1}'}
    tally = Tally(kills=4)
    wrong = compare({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "x", "d": "4"}, tally)
    assert wrong == ["lost: c", "different: b", "different: d"]
    assert tally.line() == "lost: 1, different: 2, hung: 0 of 4"
