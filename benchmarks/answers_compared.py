"""Runs of `memcompiler qa` beside each other, on the questions that all of them have answered: scores, and what each
differs from the first one, paired by question.

    python -m benchmarks.answers_compared out/qa/random-500 out/qa/s3mem-500 out/qa/oracle-500 [--out out/qa/compared]

F1 and the log-probability of the right answer's tokens (nats, mean over its tokens: what a reader too weak to answer
still shows of what it has read) are of questions that have an answer; abstention is of the others. Intervals: 95 %,
bootstraps over questions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.intervals import Interval, bootstrap_mean
from eval.qa.answers import ANSWERS, ASKED
from eval.table import DASH, markdown_table
from runtime.store import JsonLines, to_json, write_atomically

Rows = Mapping[str, Mapping[str, Any]]  # a run's answers by id of the question


def answers_of(run: Path) -> Rows:
    """Read a run's answers, of a run that is still going on, too. Raises: ValueError, where there are none."""
    rows = {row["id"]: row for row in JsonLines(run / ANSWERS, ("id", "answer"))} if (run / ANSWERS).exists() else {}
    if not rows:
        raise ValueError(f"{run} has no {ANSWERS}: make it with memcompiler qa --out {run}")
    return rows


def compared(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """Sum up each run on the questions that all have. Raises: ValueError, as above, or where none is shared."""
    told = [answers_of(run) for run in runs]
    shared = [id for id in told[0] if all(id in rows for rows in told)]
    if not shared:
        raise ValueError("the runs share no question: give them the same data and limit")
    absent = [id for id in shared if told[0][id]["absent"]]
    present = [id for id in shared if not told[0][id]["absent"]]
    return [{**_of(run, rows, shared, absent, present), **_gaps(rows, told[0], present)}
            for run, rows in zip(runs, told, strict=True)]  # fmt: skip


def _of(run: Path, rows: Rows, shared: Sequence[str], absent: Sequence[str], present: Sequence[str]) -> dict[str, Any]:
    asked = json.loads((run / ASKED).read_text(encoding="utf-8"))
    mean = lambda key, ids: _interval([float(rows[id][key]) for id in ids if rows[id].get(key) is not None])
    return {
        "run": run.name, **{key: asked[key] for key in ("memory", "settings", "tokens", "facts", "reader", "data")},
        "n": len(shared), "answerable": len(present), "recall": mean("recall", shared),
        "evidence_tokens": mean("tokens", shared), "f1": mean("f1", present), "logprob": mean("logprob", present),
        "abstained_rightly": mean("abstained", absent), "abstained_wrongly": mean("abstained", present),
    }  # fmt: skip


def _gaps(rows: Rows, first: Rows, present: Sequence[str]) -> dict[str, Any]:
    pairs = {key: [(rows[id].get(key), first[id].get(key)) for id in present] for key in ("f1", "logprob")}
    return {
        f"{key}_gap": _interval([a - b for a, b in of if a is not None and b is not None]) for key, of in pairs.items()
    }


def _interval(values: Sequence[float]) -> Interval | None:
    return bootstrap_mean(values) if values else None


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    heads = [
        "run", "evidence found %", "tokens", "F1 %", "difference", "log-probability", "difference",
        "abstained %, right / wrong",
    ]  # fmt: skip
    shown = [
        [
            row["run"], cell(row["recall"], 100), cell(row["evidence_tokens"], bare=True), cell(row["f1"], 100),
            cell(row["f1_gap"], 100, "+"), cell(row["logprob"], form=".2f"), cell(row["logprob_gap"], 1, "+", ".2f"),
            f"{cell(row['abstained_rightly'], 100, bare=True)} / {cell(row['abstained_wrongly'], 100, bare=True)}",
        ]
        for row in rows
    ]  # fmt: skip
    return "\n".join(markdown_table(heads, shown))


def cell(of: Interval | None, scale: float = 1, sign: str = "", form: str = ".1f", bare: bool = False) -> str:
    if of is None:
        return DASH
    mean, low, high = (f"{scale * value:{sign}{form}}" for value in (of.mean, of.low, of.high))
    return mean if bare else f"{mean} [{low}, {high}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of memcompiler qa; the first is compared with")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = compared(options.runs)
    print(table(rows))
    print(f"n = {rows[0]['n']} questions, {rows[0]['answerable']} of them with an answer")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        write_atomically(options.out / "compared.json", to_json([_plain(row) for row in rows], indent=1))


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("mean", "low", "high", "n")
    return {k: {key: getattr(v, key) for key in keys} if isinstance(v, Interval) else v for k, v in row.items()}


if __name__ == "__main__":
    main()
