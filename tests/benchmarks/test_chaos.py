"""The chaos benchmark finds what a kill costs: tried on commands that resume well, forget, repeat or hang."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from benchmarks import chaos
from benchmarks.chaos import Stage, Tally, compare, rows_of, run_chaos, without_clocks
from runtime.store import JsonLines

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


def stage(how: str) -> Stage:
    facts: Callable[[Path], dict[str, str]] = lambda run: rows_of(run, "rows.jsonl", lambda row: row["n"])
    return Stage(lambda whole: [sys.executable, "-c", COMMAND, how], facts)


@pytest.mark.seconds
@pytest.mark.parametrize("how", ["resume", "forget", "repeat", "hang"])
def test_what_a_kill_costs_is_found(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos, "STAGES", {"rows": stage(how)})
    monkeypatch.setattr(chaos, "MOST_PER_RUN", 1)
    monkeypatch.setattr(chaos, "EXTRA_S", 1.0)
    monkeypatch.setattr(chaos, "SLOWER", 1.0 if how == "hang" else 100.0)
    tally = run_chaos(["rows"], 3, Random(1), tmp_path / "runs")
    found = {"lost": tally.lost > 0, "different": tally.different > 0, "hung": tally.hung > 0}
    expected = {"resume": None, "forget": "lost", "repeat": "different", "hang": "hung"}[how]
    assert [name for name, so in found.items() if so] == ([expected] if expected else [])
    assert tally.kills == 3 or how == "hang"


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
