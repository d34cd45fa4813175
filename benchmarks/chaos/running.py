"""Runs stages, kills them at random moments, and compares what they end with."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated

import typer

from benchmarks.chaos.facts import Facts
from benchmarks.chaos.on_ray import RayRun
from benchmarks.chaos.runs import Run, lines_in
from benchmarks.chaos.stages import STAGES

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
    moments: Counter[str] = field(default_factory=Counter)  # what was killed, with how many rows on disk

    def line(self) -> str:
        return f"lost: {self.lost}, different: {self.different}, hung: {self.hung} of {self.kills}"


def undisturbed(names: Sequence[str], whole: Path) -> Iterator[tuple[str, float, Facts]]:
    """Run each stage once without a kill, and so the stages whose results it reads or must equal; yield the name,
    seconds and facts of each."""
    needed = {*names, *(STAGES[name].same_as for name in names), *(READ if set(names) - {"collect"} else ())}
    for name in STAGES:
        if name in needed:
            with run_of(name, whole, whole / name, Random(0)) as run:
                facts = run.finish(UNDISTURBED_S)
            if facts is None:
                raise RuntimeError(f"{name} failed undisturbed: see {whole / name}.log")
            yield name, run.seconds, facts


def run_of(name: str, whole: Path, out: Path, rng: Random) -> contextlib.closing[Run]:
    """Return a new run of a stage, as a context that ends its processes."""
    stage = STAGES[name]
    return contextlib.closing(RayRun(stage, whole, out, rng) if stage.on_ray else Run(stage, whole, out))


def torment(run: Run, moments: Sequence[float], limit_s: float, tally: Tally, name: str) -> Facts:
    """Kill a run at these moments, let it end and return its facts; none if it does not end."""
    for moment in moments:
        if (killed := run.kill_after(moment)) is None:
            tally.late += 1
            break
        tally.kills += 1
        tally.moments[f"{killed} of {name} with {lines_in(run.out)} rows"] += 1
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
    on_ray = [name for name in names if STAGES[name].on_ray]
    if on_ray and importlib.util.find_spec("ray") is None:
        raise typer.BadParameter(f"{', '.join(on_ray)} need Ray (uv sync --inexact --extra ray): choose others")
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
    for name, (_, facts) in wholes.items():
        if (other := STAGES[name].same_as) in wholes:
            wrong = compare(wholes[other][1], facts, tally)
            typer.echo(f"{name}, not killed, and {other}: {'; '.join(wrong[:5]) or 'the same'}")
    while tally.kills < kills and tally.hung == 0 and tally.late <= 3 * kills:
        name, number = names[number % len(names)], number + 1
        seconds, whole = wholes[name]
        own = folder / f"{number:03d}-{name}"  # with what the run writes beside its folder
        before = tally.kills
        moments = [rng.uniform(0, seconds) for _ in range(min(rng.randint(1, MOST_PER_RUN), kills - tally.kills))]
        with run_of(name, folder / "whole", own / "run", rng) as run:
            found = torment(run, moments, EXTRA_S + SLOWER * seconds, tally, name)
        wrong = compare(whole, found, tally) if tally.hung == 0 else [f"hung, or ended with an error: {run.log}"]
        typer.echo(f"{own.name}: {tally.kills - before} kills, {'; '.join(wrong[:5]) or 'the same'}")
        if not wrong:
            shutil.rmtree(own)
    typer.echo(f"late: {tally.late}; at a kill there were: {json.dumps(dict(sorted(tally.moments.items())))}")
    return tally
