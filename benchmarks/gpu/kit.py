"""Runs parts one after another, each in a process of its own, and keeps what they found.

OUT/gpu_check.json is replaced after every part, and OUT/gpu_check.md with it. A part that stands there is not run
again; whatever ends one (an error, a signal, its time limit) is written down, and the next one begins.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import Part, Row, Setup
from runtime.processes import ChildProcess
from runtime.store import JsonLines, to_json, write_atomically

ROOT = Path(__file__).parents[2]
RECORD, TABLE, LOGS = "gpu_check.json", "gpu_check.md", "parts"
LEAST_S = 20.0  # a part is not begun for less time
SHOWN = 300  # characters of an error in the table


@dataclass(frozen=True, slots=True)
class Kit:
    """A folder, and what is measured into it."""

    out: Path
    setup: Setup
    parts: Sequence[Part]

    def run(self, names: Sequence[str] = (), minutes: float = 25.0, again: bool = False) -> bool:
        """Run the parts of these names (default: all) that are not recorded, or with `again` all of them, until the
        time is over.

        Returns:
            Whether no part that is recorded failed, and none was left out for want of time.

        Raises:
            ValueError: there is no part of this name, or the folder holds another setup's measurements.
        """
        known = {part.name: part for part in self.parts}
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"no part {', '.join(unknown)}: there are {', '.join(known)}")
        record = self.record()
        if record["setup"] != asdict(self.setup):
            raise ValueError(f"{self.out} holds measurements of {record['setup']}: choose another --out")
        end, left = time.monotonic() + 60 * minutes, []
        for part in [known[name] for name in names] or self.parts:
            if part.name in record["parts"] and not again:
                print(f"{part.name}: recorded before ({record['parts'][part.name]['status']})", flush=True)
                continue
            limit = min(part.limit_s, end - time.monotonic())
            if limit < min(LEAST_S, part.limit_s):
                left.append(part.name)
                continue
            print(f"{part.name}: at most {limit:.0f} s ...", flush=True)
            record["parts"][part.name] = made = self._measure(part, limit)
            self._write(record)
            why = f" ({made['reason'] or made['error']})" if made["status"] != "passed" else ""
            print(f"{part.name}: {made['status']} after {made['seconds']:.0f} s{why}", flush=True)
        if left:
            print(f"no time for {', '.join(left)}: run this again", flush=True)
        return not left and all(made["status"] != "failed" for made in record["parts"].values())

    def record(self) -> dict[str, Any]:
        """Read what is recorded."""
        path = self.out / RECORD
        return json.loads(path.read_text()) if path.exists() else {"setup": asdict(self.setup), "parts": {}}

    def _measure(self, part: Part, limit_s: float) -> dict[str, Any]:
        """Run a part in a process of its own, and say how it ended."""
        folder = self.out / LOGS
        folder.mkdir(parents=True, exist_ok=True)
        rows, log = folder / f"{part.name}.jsonl", folder / f"{part.name}.log"
        rows.unlink(missing_ok=True)
        started = time.monotonic()
        with ChildProcess(self._command(part, rows), name=part.name, cwd=ROOT, output=log) as child:
            status = child.wait(limit_s)
            ending, words = child.ending, child.last_words()
        seconds = time.monotonic() - started
        said: dict[str, Any] = {"skipped": None, "error": None}
        found: list[Row] = []
        for line in JsonLines(rows):
            found += [line["row"]] if "row" in line else []
            said |= {name: line[name] for name in said if name in line}
        if status is None:
            said["error"] = f"ended after {limit_s:.0f} s, its time limit"
        elif status and said["error"] is None and any(row.get("passed") is False for row in found):
            said["error"] = f"{sum(row.get('passed') is False for row in found)} rows did not pass"
        elif status and said["error"] is None:
            said["error"] = f"{ending}{words}"
        outcome = "failed" if said["error"] else "skipped" if said["skipped"] else "passed"
        return {
            "status": outcome, "seconds": round(seconds, 1), "limit_s": round(limit_s, 1), "reason": said["skipped"],
            "error": said["error"], "rows": found,
        }  # fmt: skip

    def _command(self, part: Part, rows: Path) -> list[str]:
        start = [sys.executable]
        if part.shared and self.setup.processes > 1:
            from runtime.processes import torchrun_command

            start = torchrun_command(self.setup.processes)
        given = ["--device", self.setup.device, "--size", self.setup.size, "--processes", str(self.setup.processes)]
        return [*start, "-m", "benchmarks.gpu", "--out", str(rows.resolve()), "--inside", part.runs, *given]

    def _write(self, record: dict[str, Any]) -> None:
        write_atomically(self.out / RECORD, to_json(record, indent=1) + "\n")
        write_atomically(self.out / TABLE, "\n".join(tables(json.loads(to_json(record)))) + "\n")


def tables(record: dict[str, Any]) -> list[str]:
    """Write a record as Markdown: one line for each part, then a table for each that has rows."""
    from eval.table import escape, markdown_table

    parts: dict[str, dict[str, Any]] = record["parts"]
    setup = ", ".join(f"{name} {value}" for name, value in record["setup"].items())
    overview = [
        [name, made["status"], cell(made["seconds"]), escape((made["reason"] or made["error"] or "")[:SHOWN])]
        for name, made in parts.items()
    ]
    lines = [f"Setup: {setup}.", "", *markdown_table(["part", "status", "seconds", "why"], overview)]
    for name, made in parts.items():
        if made["rows"]:
            heads = list(dict.fromkeys(key for row in made["rows"] for key in row))
            cells = [[escape(cell(row.get(head))) for head in heads] for row in made["rows"]]
            lines += ["", f"### {name}", "", *markdown_table([escape(head) for head in heads], cells)]
    return lines


def cell(value: object) -> str:
    """Show a value: numbers to four digits, what is not there as a dash."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
