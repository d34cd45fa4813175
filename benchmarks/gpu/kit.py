"""Runs the parts one after another, each in a process of its own, and records what they found.

OUT/gpu_check.json is replaced after every part, and OUT/gpu_check.md with it. A part that is recorded there is not run
again; whatever ends one (an error, a signal, its time limit) is recorded, and the next one begins.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import Part, Row, Setup
from benchmarks.gpu.planned import data_sheet, joined
from runtime.processes import ChildProcess
from runtime.store import JsonLines, to_json, write_atomically

ROOT = Path(__file__).parents[2]
RECORD, TABLE, LOGS, ARCHIVE = "gpu_check.json", "gpu_check.md", "parts", "gpu_check.tgz"
LEAST_S = 15.0  # a part is not begun for less time
CLOSING_S = 5.0  # kept of the time for the table and the archive
SHOWN = 300  # characters of an error in the table
SUMMARY = 200  # lines of the table that are printed at the end


@dataclass(frozen=True, slots=True)
class Kit:
    """A folder, and what is measured into it."""

    out: Path
    setup: Setup
    parts: Sequence[Part]

    def run(self, names: Sequence[str] = (), minutes: float = 25.0, again: bool = False) -> bool:
        """Run the parts of these names (default: all) that are not recorded, or with `again` all of them. Each gets its
        share of the time that is left.

        Returns:
            Whether no part that is recorded failed, and none was left out for want of time.

        Raises:
            ValueError: there is no part of this name, or the folder holds another setup's measurements.
        """
        end = time.monotonic() + 60 * minutes - CLOSING_S
        record = self.record()
        if record["setup"] != asdict(self.setup):
            raise ValueError(f"{self.out} holds measurements of {record['setup']}: choose another --out")
        due, left = self._due(names, record, again), list[str]()
        measured = [part for part in due if not part.beside]
        with self._beside([part for part in due if part.beside], record, end):
            for number, part in enumerate(measured):
                share = part.share / sum(other.share for other in measured[number:])
                limit = share * (end - time.monotonic())
                if limit < min(LEAST_S, 60 * minutes):
                    left.append(part.name)
                    continue
                print(f"{part.name}: at most {limit:.0f} s ...", flush=True)
                self._keep(record, part, self._measure(part, limit))
        self._pack()
        if left:
            print(f"no time for {', '.join(left)}: run this again", flush=True)
        return not left and all(made["status"] != "failed" for made in record["parts"].values())

    def record(self) -> dict[str, Any]:
        """Read what is recorded."""
        path = self.out / RECORD
        return json.loads(path.read_text()) if path.exists() else {"setup": asdict(self.setup), "parts": {}}

    def summary(self) -> str:
        """Return the first lines of the table."""
        lines = (self.out / TABLE).read_text().splitlines() if (self.out / TABLE).exists() else []
        return "\n".join(lines[:SUMMARY])

    def _due(self, names: Sequence[str], record: dict[str, Any], again: bool) -> list[Part]:
        """List the parts to run. What has nothing to measure here is recorded as skipped. Raises: ValueError."""
        known = {part.name: part for part in self.parts}
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"no part {', '.join(unknown)}: there are {', '.join(known)}")
        due = []
        for part in [known[name] for name in names] or self.parts:
            if part.name in record["parts"] and not again:
                print(f"{part.name}: recorded before ({record['parts'][part.name]['status']})", flush=True)
            elif reason := part.skipped(self.setup):
                self._keep(record, part, _outcome("skipped", 0.0, 0.0, [], reason=reason))
            else:
                due.append(part)
        return due

    @contextlib.contextmanager
    def _beside(self, parts: Sequence[Part], record: dict[str, Any], end: float) -> Iterator[None]:
        """Run parts that need no GPU beside the others, until the end."""
        started = time.monotonic()
        with contextlib.ExitStack() as stack:
            children = [(part, stack.enter_context(self._start(part))) for part in parts]
            yield
            for part, child in children:
                child.wait(end - time.monotonic())
                limit = end - started
                self._keep(record, part, self._found(part, child, time.monotonic() - started, limit))

    def _measure(self, part: Part, limit_s: float) -> dict[str, Any]:
        """Run a part in a process of its own, and return how it ended and its rows."""
        started = time.monotonic()
        with self._start(part) as child:
            child.wait(limit_s)
            return self._found(part, child, time.monotonic() - started, limit_s)

    def _start(self, part: Part) -> ChildProcess:
        folder = self.out / LOGS
        folder.mkdir(parents=True, exist_ok=True)
        self._rows(part).unlink(missing_ok=True)
        return ChildProcess(self._command(part), name=part.name, cwd=ROOT, output=folder / f"{part.name}.log")

    def _rows(self, part: Part) -> Path:
        return self.out / LOGS / f"{part.name}.jsonl"

    def _found(self, part: Part, child: ChildProcess, seconds: float, limit_s: float) -> dict[str, Any]:
        """Return how a part's process ended and the rows that it has written."""
        status = child.status
        lines = list(JsonLines(self._rows(part)))
        rows: list[Row] = [line["row"] for line in lines if "row" in line]
        said = [line["error"] for line in lines if "error" in line]
        if said:
            return _outcome("failed", seconds, limit_s, rows, error=said[0])
        if status is None:
            ended = "cut" if rows else "failed"
            return _outcome(ended, seconds, limit_s, rows, error=f"ended after {limit_s:.0f} s, its time limit")
        if bad := sum(row.get("passed") is False for row in rows):
            return _outcome("failed", seconds, limit_s, rows, error=f"{bad} rows did not pass")
        error = f"{child.ending}{child.last_words()}" if status else None
        return _outcome("failed" if error else "passed", seconds, limit_s, rows, error=error)

    def _command(self, part: Part) -> list[str]:
        start = [sys.executable]
        if part.shared and self.setup.processes > 1:
            from runtime.processes import torchrun_command

            start = torchrun_command(self.setup.processes)
        given = [word for name, value in asdict(self.setup).items() for word in (f"--{name}", str(value))]
        return [*start, "-m", "benchmarks.gpu", "--out", str(self._rows(part).resolve()), "--inside", part.runs, *given]

    def _keep(self, record: dict[str, Any], part: Part, made: dict[str, Any]) -> None:
        """Record a part and write the table anew."""
        record["parts"][part.name] = made
        write_atomically(self.out / RECORD, to_json(record, indent=1) + "\n")
        write_atomically(self.out / TABLE, "\n".join(tables(json.loads(to_json(record)))) + "\n")
        why = f" ({made['reason'] or made['error']})" if made["status"] != "passed" else ""
        print(f"{part.name}: {made['status']} after {made['seconds']:.0f} s{why}", flush=True)

    def _pack(self) -> None:
        """Put the record, the table, and all rows and logs into one archive."""
        with tarfile.open(self.out / ARCHIVE, "w:gz") as archive:
            for name in (RECORD, TABLE, LOGS):
                if (self.out / name).exists():
                    archive.add(self.out / name, name)


def _outcome(
    status: str, seconds: float, limit_s: float, rows: list[Row], reason: str | None = None, error: str | None = None
) -> dict[str, Any]:
    times = {"seconds": round(seconds, 1), "limit_s": round(limit_s, 1)}
    return {"status": status, **times, "reason": reason, "error": error, "rows": rows}


def tables(record: dict[str, Any]) -> list[str]:
    """Write a record as Markdown: one line for each part, then a table for each that has rows, with what the plan says
    of the same steps."""
    from eval.table import escape, markdown_table

    parts: dict[str, dict[str, Any]] = record["parts"]
    setup = ", ".join(f"{name} {value}" for name, value in record["setup"].items())
    overview = [
        [name, made["status"], cell(made["seconds"]), escape((made["reason"] or made["error"] or "")[:SHOWN])]
        for name, made in parts.items()
    ]
    lines = [f"Setup: {setup}.", "", *markdown_table(["part", "status", "seconds", "why"], overview)]
    planned, sheet = parts.get("plan", {}).get("rows", []), _sheet_tflops(parts)
    for name, made in parts.items():
        if made["rows"] and name != "plan":
            rows = joined(name, made["rows"], planned, sheet)
            heads = list(dict.fromkeys(key for row in rows for key in row))
            cells = [[escape(cell(row.get(head))) for head in heads] for row in rows]
            lines += ["", f"### {name}", "", *markdown_table([escape(head) for head in heads], cells)]
    return lines


def _sheet_tflops(parts: dict[str, dict[str, Any]]) -> float | None:
    """Return the dense bf16 TFLOP/s of the data sheet of the GPU that the part `machine` found."""
    named = [row["value"] for row in parts.get("machine", {}).get("rows", []) if row["what"] == "GPU 0"]
    gpu = data_sheet(named[0]) if named else None
    return gpu.tflops if gpu else None


def cell(value: object) -> str:
    """Show a value: numbers to four digits, what is not there as a dash."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
