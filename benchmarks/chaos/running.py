"""Runs stages, kills them at random moments, and compares what they end with."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated

import typer

from benchmarks.chaos.facts import Facts
from benchmarks.chaos.stages import STAGES, Stage
from runtime.http import LOOPBACK, free_port, http_url, responds

app = typer.Typer()
MOST_PER_RUN = 3  # kills of one run
READ = ("collect", "sft")  # stages that the others read
UNDISTURBED_S = 3600.0  # longest undisturbed run
EXTRA_S, SLOWER = 300.0, 20.0  # a command hangs beyond this many seconds plus so many undisturbed runs


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


# -- running and killing ----------------------------------------------------------------------------------------------


def start(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command in a process group of its own."""
    with log.open("ab") as file:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=file, stderr=file, env=env, start_new_session=True)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a command and what it started."""
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def lines_in(out: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in out.rglob("*.jsonl")) if out.exists() else 0


class Run:
    """A run of a stage in its folder, which is killed and resumed."""

    def __init__(self, stage: Stage, whole: Path, out: Path) -> None:
        self.stage, self.out, self.log = stage, out, out.with_suffix(".log")
        out.parent.mkdir(parents=True, exist_ok=True)
        self.command = [*stage.command(whole), *(["--out", str(out)] if stage.has_folder else [])]
        self.seconds = 0.0  # that its end took
        if stage.use is not None:
            self._url = http_url(LOOPBACK, port := free_port())
            self.command += ["--port", str(port)]
            threads = ThreadPoolExecutor(1)
            self._answers: Future[Facts] = threads.submit(stage.use, self._url)
            threads.shutdown(wait=False)

    def kill_after(self, moment_s: float) -> bool:
        """Start the command and kill it after so many seconds; return False if it, or its use, ended before."""
        process = self._start()
        ended = self._has_ended(process, moment_s)
        kill(process)
        return not ended

    def finish(self, limit_s: float) -> Facts | None:
        """Start the command and wait for its end, or its clients'; return the facts, None if that is an error."""
        process, began = self._start(), time.monotonic()
        ended, status = self._has_ended(process, limit_s), process.poll()
        self.seconds = time.monotonic() - began
        kill(process)
        if not ended or (self.stage.use is None and status != 0):
            return None
        try:
            answers = self._answers.result(0) if self.stage.use else {}
        except Exception as error:
            with self.log.open("a") as log:
                log.write(f"a client failed: {type(error).__name__}: {error}\n")
            return None
        return answers | self.stage.facts(self.out)

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the process; wait for a command's folder, or until a server is ready: before, nothing is disturbed."""
        process = start(self.command, self.log)
        while not self._has_begun() and process.poll() is None:
            time.sleep(0.01)
        return process

    def _has_begun(self) -> bool:
        if self.stage.use is None:
            return self.out.exists()
        return self._answers.done() or responds(f"{self._url}/ready")

    def _has_ended(self, process: subprocess.Popen[bytes], limit_s: float) -> bool:
        """Wait for a command, or for the clients of a server; return whether that ended in time."""
        if self.stage.use is not None:
            return bool(wait([self._answers], limit_s).done)
        try:
            process.wait(limit_s)
            return True
        except subprocess.TimeoutExpired:
            return False


def undisturbed(names: Sequence[str], whole: Path) -> Iterator[tuple[str, float, Facts]]:
    """Run each stage once without a kill, beginning with those whose results others read; yield its name, seconds and
    facts."""
    for name in STAGES:
        if name in names or (name in READ and set(names) - {"collect"}):
            run = Run(STAGES[name], whole, whole / name)
            facts = run.finish(UNDISTURBED_S)
            if facts is None:
                raise RuntimeError(f"{name} failed undisturbed: see {whole / name}.log")
            yield name, run.seconds, facts


def torment(run: Run, moments: Sequence[float], limit_s: float, tally: Tally, name: str) -> Facts:
    """Kill a run at these moments, let it end and return its facts; none if it does not end."""
    for moment in moments:
        if not run.kill_after(moment):
            tally.late += 1
            break
        tally.kills += 1
        tally.moments[f"{name} with {lines_in(run.out)} rows"] += 1
    facts = run.finish(limit_s)
    tally.hung += facts is None
    return facts or {}


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
        own = folder / f"{number:03d}-{name}"  # with what the run writes beside its folder
        before, run = tally.kills, Run(STAGES[name], folder / "whole", own / "run")
        moments = [rng.uniform(0, seconds) for _ in range(min(rng.randint(1, MOST_PER_RUN), kills - tally.kills))]
        found = torment(run, moments, EXTRA_S + SLOWER * seconds, tally, name)
        wrong = compare(whole, found, tally) if tally.hung == 0 else [f"hung, or ended with an error: {run.log}"]
        typer.echo(f"{own.name}: {tally.kills - before} kills, {'; '.join(wrong[:5]) or 'the same'}")
        if not wrong:
            shutil.rmtree(own)
    typer.echo(f"late: {tally.late}; at a kill there were: {json.dumps(dict(sorted(tally.moments.items())))}")
    return tally
