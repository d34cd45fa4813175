"""Reads what a run ended with, without clocks: the facts that two runs must share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from compiler import checkpoint
from memory.bank import MemoryBank
from runtime.store import JsonLines, read_json, to_json

Facts = dict[str, str]  # name of a part of the result -> its content, as JSON or hash
CLOCKS = ("seconds", "latency", "git", "started", "resumed")  # keys, or their beginnings, that differ between runs


def without_clocks(value: Any) -> Any:
    """Leave out what a clock or the machine says."""
    if isinstance(value, Mapping):
        return {k: without_clocks(inner) for k, inner in value.items() if not k.startswith(CLOCKS)}
    return [without_clocks(inner) for inner in value] if isinstance(value, list) else value


def numbered(parts: Iterable[tuple[str, str]]) -> Facts:
    """Name parts; a repeated name gets a number, so that no part counts twice unseen."""
    seen, found = Counter[str](), Facts()
    for name, content in parts:
        seen[name] += 1
        found[name if seen[name] == 1 else f"{name} again {seen[name]}"] = content
    return found


def rows_of(run: Path, name: str, key: Callable[[Mapping[str, Any]], object]) -> Facts:
    """Return the rows of a JSON Lines file of a run folder."""
    return numbered((f"{name} {key(row)}", to_json(without_clocks(row))) for row in JsonLines(run / name))


def bank_of(folder: Path) -> Facts:
    """Return the entries of a bank by their texts: ids may be drawn at random."""
    bank = MemoryBank(folder) if folder.exists() else ()
    return numbered((f"{folder.name}: {entry.text}", to_json(entry.provenance.actions)) for entry in bank)


def collected(run: Path) -> Facts:
    """Return SFT rows, memory and episodes of `collect`."""
    from data_gen.rows import load_rows

    rows = {f"row {i}": repr(row) for i, row in enumerate(load_rows(run / "rows"))}
    return rows | bank_of(run / "bank") | rows_of(run, "episodes.jsonl", lambda row: row["task_id"])


def trained(run: Path) -> Facts:
    """Return the weights' hash, and metrics and rollouts by step."""
    weights = {"weights": checkpoint.sha256(checkpoint.find(run))}
    metrics = rows_of(run, "metrics.jsonl", lambda row: row.get("step", row.get("update")))
    rollouts = rows_of(run, "rollouts.jsonl", lambda row: (row["update"], row["task"], row.get("sample", "")))
    return weights | metrics | rollouts


def evaluated(run: Path) -> Facts:
    """Return results, episodes and the memories that grew, of one cell or of all cells of a matrix."""
    results = without_clocks(read_json(run / "results.json"))
    facts = {f"result {name}": to_json(result) for name, result in results["results"].items()}
    for lines in sorted(run.rglob("episodes.jsonl")):
        cell = lines.relative_to(run).as_posix()
        facts |= rows_of(run, cell, lambda row: (row["delivery"], row["task_id"]))
    for memory in sorted(run.glob("memory/*")):
        facts |= bank_of(memory)
    return facts
