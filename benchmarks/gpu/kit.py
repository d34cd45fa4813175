"""Run the parts of the GPU check one after another, each in its own process, and record their rows.

OUT/gpu_check.json and OUT/gpu_check.md are replaced after every part. A recorded part does not run again. An error, a
signal or the time limit ends a part and is recorded; the next part starts.
"""

from __future__ import annotations

import json
import sys
import tarfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import Part, Setup
from benchmarks.gpu.planned import find_gpu, with_predictions
from runtime.processes import ChildProcess, torchrun_command
from runtime.store import JsonLines, to_json, write_atomically

ROOT = Path(__file__).parents[2]
RECORD, TABLE, LOGS, ARCHIVE = "gpu_check.json", "gpu_check.md", "parts", "gpu_check.tgz"
SHORTEST_S = 15.0  # a part does not start with less time
CLOSING_S = 5.0  # reserved for table and archive
ERROR_LENGTH = 300  # characters of an error in the table


@dataclass(frozen=True, slots=True)
class Kit:
    """Parts, and the folder of their records."""

    out: Path
    setup: Setup
    parts: Sequence[Part]

    def run(self, names: Sequence[str] = (), minutes: float = 25.0, again: bool = False) -> bool:
        """Run the named parts (default: all) that are not recorded; with `again`, recorded ones too.

        Each part gets its share of the remaining time.

        Returns:
            Whether no recorded part failed and none lacked time.

        Raises:
            ValueError: a name is unknown, or the folder holds measurements of another setup.
        """
        started, limit_s = time.monotonic(), 60 * minutes - CLOSING_S
        record = self.record()
        if record["setup"] != asdict(self.setup):
            raise ValueError(f"{self.out} holds measurements of {record['setup']}: choose another --out")
        due, omitted = self._due(names, record, again), list[str]()
        foreground = [part for part in due if not part.background]
        with ExitStack() as stack:
            background = [(part, stack.enter_context(self._start(part))) for part in due if part.background]
            for number, part in enumerate(foreground):
                share = part.share / sum(other.share for other in foreground[number:])
                limit = share * (limit_s - (time.monotonic() - started))
                if limit < min(SHORTEST_S, 60 * minutes):
                    omitted.append(part.name)
                    continue
                print(f"{part.name}: at most {limit:.0f} s ...", flush=True)
                with self._start(part) as child:
                    self._finish(record, part, child=child, started=time.monotonic(), limit_s=limit)
            for part, child in background:
                self._finish(record, part, child=child, started=started, limit_s=limit_s)
        with tarfile.open(self.out / ARCHIVE, "w:gz") as archive:
            for name in filter(lambda name: (self.out / name).exists(), (RECORD, TABLE, LOGS)):
                archive.add(self.out / name, name)
        if omitted:
            print(f"no time for {', '.join(omitted)}: run this again", flush=True)
        return not omitted and all(outcome["status"] != "failed" for outcome in record["parts"].values())

    def record(self) -> dict[str, Any]:
        path = self.out / RECORD
        return json.loads(path.read_text()) if path.exists() else {"setup": asdict(self.setup), "parts": {}}

    def _due(self, names: Sequence[str], record: dict[str, Any], again: bool) -> list[Part]:
        """List the parts to run, and record parts that cannot run here as skipped. Raises: ValueError."""
        known = {part.name: part for part in self.parts}
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"no part {', '.join(unknown)}: there are {', '.join(known)}")
        due = []
        for part in [known[name] for name in names] or self.parts:
            if part.name in record["parts"] and not again:
                print(f"{part.name}: recorded before ({record['parts'][part.name]['status']})", flush=True)
            elif reason := part.skip_reason(self.setup):
                self._save(
                    record, part, {"status": "skipped", "why": reason, "seconds": 0.0, "limit_s": 0.0, "rows": []}
                )
            else:
                due.append(part)
        return due

    def _rows(self, part: Part) -> Path:
        return self.out / LOGS / f"{part.name}.jsonl"

    def _start(self, part: Part) -> ChildProcess:
        rows = self._rows(part).resolve()
        rows.parent.mkdir(parents=True, exist_ok=True)
        rows.unlink(missing_ok=True)
        sharded = part.sharded and self.setup.processes > 1
        start = torchrun_command(self.setup.processes) if sharded else [sys.executable]
        options = [word for name, value in asdict(self.setup).items() for word in (f"--{name}", str(value))]
        command = [*start, "-m", "benchmarks.gpu", "--out", str(rows), "--inside", part.runs, *options]
        return ChildProcess(command, name=part.name, cwd=ROOT, output=rows.with_suffix(".log"))

    def _finish(self, record: dict[str, Any], part: Part, child: ChildProcess, started: float, limit_s: float) -> None:
        """Wait for a part until its time limit, and record its status and rows."""
        child.wait(max(0.0, started + limit_s - time.monotonic()))
        lines = list(JsonLines(self._rows(part)))
        rows = [line["row"] for line in lines if "row" in line]
        status, why = "failed", next((line["error"] for line in lines if "error" in line), None)
        if why is None and child.status is None:
            status, why = "cut" if rows else "failed", f"ended after {limit_s:.0f} s, its time limit"
        elif why is None and (bad := sum(row.get("passed") is False for row in rows)):
            why = f"{bad} rows did not pass"
        elif why is None and child.status:
            why = f"{child.ending}{child.output_suffix()}"
        elif why is None:
            status = "passed"
        times = {"seconds": round(time.monotonic() - started, 1), "limit_s": round(limit_s, 1)}
        self._save(record, part, {"status": status, "why": why, **times, "rows": rows})

    def _save(self, record: dict[str, Any], part: Part, outcome: dict[str, Any]) -> None:
        record["parts"][part.name] = outcome
        write_atomically(self.out / RECORD, to_json(record, indent=1) + "\n")
        write_atomically(self.out / TABLE, "\n".join(tables(json.loads(to_json(record)))) + "\n")
        why = f" ({outcome['why']})" if outcome["why"] else ""
        print(f"{part.name}: {outcome['status']} after {outcome['seconds']:.0f} s{why}", flush=True)


def tables(record: dict[str, Any]) -> list[str]:
    """Format a record as Markdown: an overview of the parts, then each part's rows beside the plan's figures."""
    from eval.table import escape, markdown_table

    parts: dict[str, dict[str, Any]] = record["parts"]
    setup = ", ".join(f"{name} {value}" for name, value in record["setup"].items())
    overview = [
        [name, outcome["status"], cell(outcome["seconds"]), escape((outcome["why"] or "")[:ERROR_LENGTH])]
        for name, outcome in parts.items()
    ]
    lines = [f"Setup: {setup}.", "", *markdown_table(["part", "status", "seconds", "why"], overview)]
    names = [row["value"] for row in parts.get("machine", {}).get("rows", []) if row["what"] == "GPU 0"]
    gpu = find_gpu(names[0]) if names else None
    for name, outcome in parts.items():
        if outcome["rows"] and name != "plan":
            planned = parts.get("plan", {}).get("rows", [])
            rows = with_predictions(name, outcome["rows"], planned, gpu and gpu.tflops)
            heads = list(dict.fromkeys(key for row in rows for key in row))
            cells = [[escape(cell(row.get(head))) for head in heads] for row in rows]
            lines += ["", f"### {name}", "", *markdown_table([escape(head) for head in heads], cells)]
    return lines


def cell(value: object) -> str:
    """Format a value: numbers with four digits, None as a dash."""
    if isinstance(value, bool) or value is None:
        return {None: "–", True: "yes", False: "no"}[value]
    return f"{value:.4g}" if isinstance(value, float) else str(value)
