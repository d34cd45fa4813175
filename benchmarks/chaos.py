"""Kill commands with SIGKILL at random moments, resume them, and compare what they end with to an undisturbed run.

    python -m benchmarks.chaos [--kills 100] [--seed 0] [--stage collect ...] [--out FOLDER]

Everything is small (generated homes, the shipped tiny models) and on this machine. Every stage runs once undisturbed.
Then a stage is drawn, its command is killed one to three times, each time at a moment drawn from the undisturbed run's
duration, and run to its end. Rows and weights must be equal where a run promises the same result; clocks are left out.
A stage is an entry of STAGES: its command and the facts of its result.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer

from compiler import checkpoint
from memory.bank import MemoryBank
from runtime.store import JsonLines, read_json, to_json

app = typer.Typer()
Facts = dict[str, str]  # name of a part of the result -> its content, as JSON or hash
CLOCKS = ("seconds", "latency", "git", "started", "resumed")  # keys, or their beginnings, that differ between runs
MOST_PER_RUN = 3  # kills of one run
EXTRA_S, SLOWER = 300.0, 20.0  # a command hangs beyond this many seconds plus so many undisturbed runs


@dataclass(frozen=True)
class Stage:
    """A command that can be resumed.

    Attributes:
        command: without its --out, given the folder of the undisturbed runs of the stages before it.
        facts: what its finished run folder holds, without clocks.
    """

    command: Callable[[Path], list[str]]
    facts: Callable[[Path], Facts]


@dataclass
class Tally:
    """What the kills did."""

    kills: int = 0
    late: int = 0  # the command had ended before its moment; not counted as a kill
    lost: int = 0  # parts of a result that are missing
    different: int = 0  # parts that are other ones, or too many
    hung: int = 0  # commands that did not end, or not without an error
    moments: Counter[str] = field(default_factory=Counter)  # rows on disk at a kill, by stage

    def line(self) -> str:
        return f"lost: {self.lost}, different: {self.different}, hung: {self.hung} of {self.kills}"


# -- what a run ended with --------------------------------------------------------------------------------------------


def without_clocks(value: Any) -> Any:
    """Leave out what a clock or the machine says."""
    if isinstance(value, Mapping):
        return {k: without_clocks(inner) for k, inner in value.items() if not k.startswith(CLOCKS)}
    return [without_clocks(inner) for inner in value] if isinstance(value, list) else value


def rows_of(run: Path, name: str, key: Callable[[Mapping[str, Any]], object]) -> Facts:
    """Return the rows of a JSON Lines file; a repeated key gets a number, so that no row counts twice unseen."""
    seen, found = Counter[str](), Facts()
    for row in JsonLines(run / name):
        label = f"{name} {key(row)}"
        seen[label] += 1
        found[label if seen[label] == 1 else f"{label} again {seen[label]}"] = to_json(without_clocks(row))
    return found


def collected(run: Path) -> Facts:
    from data_gen.rows import load_rows

    rows = {f"row {i}": repr(row) for i, row in enumerate(load_rows(run / "rows"))}
    bank = {f"bank {entry.id}": entry.text for entry in MemoryBank(run / "bank")} if (run / "bank").exists() else {}
    return rows | bank | rows_of(run, "episodes.jsonl", lambda row: row["task_id"])


def trained(run: Path) -> Facts:
    """Return the weights' hash, and metrics and rollouts by step."""
    weights = {"weights": checkpoint.sha256(checkpoint.find(run))}
    metrics = rows_of(run, "metrics.jsonl", lambda row: row.get("step", row.get("update")))
    rollouts = rows_of(run, "rollouts.jsonl", lambda row: (row["update"], row["task"], row.get("sample", "")))
    return weights | metrics | rollouts


def evaluated(run: Path) -> Facts:
    results = {f"result {k}": to_json(v) for k, v in without_clocks(read_json(run / "results.json"))["results"].items()}
    return results | rows_of(run, "episodes.jsonl", lambda row: (row["delivery"], row["task_id"]))


MEMCOMPILER = (sys.executable, "-m", "memcompiler")
HOMES = "env.scenes={train: 3, test: 3}"
STAGES: Mapping[str, Stage] = {
    "collect": Stage(lambda whole: [*MEMCOMPILER, "collect", "-c", "collect/quickstart", HOMES, "limit=12"], collected),
    "sft": Stage(
        lambda whole: [
            *(*MEMCOMPILER, "train", "sft", "-c", "sft/quickstart", f"rows={whole / 'collect' / 'rows'}"),
            *("max_steps=8", "batch_size=4", "micro_batch_size=4", "save_every=2"),
        ],
        trained,
    ),
    "grpo": Stage(
        lambda whole: [
            *(*MEMCOMPILER, "train", "grpo", "-c", "grpo/quickstart", f"compiler.checkpoint={whole / 'sft'}"),
            *(HOMES, "limit=6", "updates=3", "tasks=2", "group_size=2", "max_steps=4", "save_every=1"),
        ],
        trained,
    ),
    "eval": Stage(
        lambda whole: [
            *(*MEMCOMPILER, "eval", "-c", "eval/quickstart", f"compiler.checkpoint={whole / 'sft'}"),
            *(HOMES, "limit=6", "max_steps=4"),
        ],
        evaluated,
    ),
}


# -- running and killing ----------------------------------------------------------------------------------------------


def start(stage: Stage, whole: Path, out: Path) -> subprocess.Popen[bytes]:
    """Start a command in a process group of its own, whose output is beside its folder."""
    command = [*stage.command(whole), "--out", str(out)]
    with out.with_suffix(".log").open("ab") as log:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a command and what it started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def finish(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Wait for a command; return whether it ended without an error."""
    try:
        return process.wait(limit_s) == 0
    except subprocess.TimeoutExpired:
        kill(process)
        return False


def lines_in(out: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in out.rglob("*.jsonl")) if out.exists() else 0


def killed_at(process: subprocess.Popen[bytes], out: Path, moment_s: float, limit_s: float) -> bool:
    """Kill a command so many seconds after its folder is there; return False if it ended before."""
    deadline = time.monotonic() + limit_s
    while not out.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        process.wait(moment_s)
        return False
    except subprocess.TimeoutExpired:
        kill(process)
        return True


def undisturbed(names: list[str], whole: Path) -> Iterator[tuple[str, float, Facts]]:
    """Run stages once, those that others read first; yield name, seconds from the folder's creation on, and facts."""
    for name in STAGES if set(names) - {"collect"} else ["collect"]:
        out = whole / name
        process = start(STAGES[name], whole, out)
        while not out.exists() and process.poll() is None:
            time.sleep(0.01)
        began = time.monotonic()
        if process.wait() != 0:
            raise RuntimeError(f"{name} failed undisturbed: see {out.with_suffix('.log')}")
        yield name, time.monotonic() - began, STAGES[name].facts(out)
        if name == list(STAGES)[max(map(list(STAGES).index, names))]:
            return


def torment(name: str, kills: int, rng: Random, seconds: float, folders: tuple[Path, Path], tally: Tally) -> Facts:
    """Kill a stage's command up to so many times, run it to its end and return its facts; none if it does not end."""
    whole, out = folders
    limit_s = EXTRA_S + SLOWER * seconds
    for _ in range(kills):
        process = start(STAGES[name], whole, out)
        if not killed_at(process, out, rng.uniform(0, seconds), limit_s):
            tally.late += 1
            break
        tally.kills += 1
        tally.moments[f"{name} with {lines_in(out)} rows"] += 1
    if not finish(start(STAGES[name], whole, out), limit_s):
        tally.hung += 1
        return {}
    return STAGES[name].facts(out)


def compare(whole: Facts, found: Facts, tally: Tally) -> list[str]:
    """Count and name the parts that are missing or other ones."""
    lost = sorted(whole.keys() - found.keys())
    different = sorted(k for k, v in found.items() if whole.get(k) != v)
    tally.lost += len(lost)
    tally.different += len(different)
    return [*(f"lost: {k}" for k in lost), *(f"different: {k}" for k in different)]


@app.command()
def chaos(
    kills: Annotated[int, typer.Option(min=1, help="Kills over all stages.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of stages and moments.")] = 0,
    stage: Annotated[list[str] | None, typer.Option(help=f"Stage, repeatable (default: {', '.join(STAGES)}).")] = None,
    out: Annotated[Path | None, typer.Option(help="Empty folder of all runs (default: a temporary one).")] = None,
) -> None:
    """Kill commands at random moments and compare what they end with; exit 1 unless every result is whole."""
    names = stage or list(STAGES)
    if unknown := [name for name in names if name not in STAGES]:
        raise typer.BadParameter(f"{', '.join(unknown)}: choose from {', '.join(STAGES)}", param_hint="--stage")
    with tempfile.TemporaryDirectory(prefix="memcompiler-chaos-") as temporary:
        tally = run_chaos(names, kills, Random(seed), out or Path(temporary))
    typer.echo(tally.line())
    raise typer.Exit(bool(tally.lost or tally.different or tally.hung))


def run_chaos(names: list[str], kills: int, rng: Random, folder: Path) -> Tally:
    """Run the undisturbed stages, then disturbed ones until there were so many kills."""
    (folder / "whole").mkdir(parents=True)
    wholes = {name: (seconds, facts) for name, seconds, facts in undisturbed(names, folder / "whole")}
    typer.echo(json.dumps({name: {"seconds": round(s, 1), "parts": len(f)} for name, (s, f) in wholes.items()}))
    tally, number = Tally(), 0
    while tally.kills < kills and tally.hung == 0 and tally.late <= 3 * kills:
        name, number = names[number % len(names)], number + 1
        seconds, whole = wholes[name]
        out = folder / f"{number:03d}-{name}"
        before = tally.kills
        wanted = min(rng.randint(1, MOST_PER_RUN), kills - tally.kills)
        found = torment(name, wanted, rng, seconds, (folder / "whole", out), tally)
        wrong = compare(whole, found, tally) if tally.hung == 0 else [f"hung, or ended with an error: {out}.log"]
        typer.echo(f"{out.name}: {tally.kills - before} kills, {'; '.join(wrong[:5]) or 'the same'}")
        if not wrong:
            shutil.rmtree(out)
    typer.echo(f"late: {tally.late}; at a kill there were: {json.dumps(dict(sorted(tally.moments.items())))}")
    return tally


if __name__ == "__main__":
    app()
