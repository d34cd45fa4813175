"""S3Mem's tables (arXiv 2605.28831) with the results of `memcompiler qa` runs in further columns, named by their data,
because questions or reader may differ from the paper's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from envs.base import Task
from eval.paper.tables import ABOUT, MEASURED, Row, Table, TableCell, paper_rows, percent_cell
from eval.qa.answers import RESULTS
from memory.protocol import Record, Trace
from memory.s3mem.index import UnitIndex
from memory.s3mem.router import load_router
from memory.s3mem.rule_writer import write_units
from memory.s3mem.settings import S3MemSettings
from runtime.store import read_json

NAME = "s3mem"
TOKENS = "tokens"
REPRESENTATIONS = {"chunk": "plain chunk", "event": "event field only", "objects": "object field only"}
EXAMPLE = 7  # the table of router training
ACTIONS = {1: "look at orange", 3: "mix picture", 4: "mix picture", 5: "mix door to kitchen", 39: "focus on hallway"}
QUESTION = "From steps 1 to 39, how many times did you execute mix picture?"


def s3mem_table(number: int, runs: Sequence[Path]) -> Table:
    """Return table `number` with the results of `runs`. Raises: ValueError, for no such table or missing results."""
    tables = yaml.safe_load(Path(__file__).with_name("s3mem.yaml").read_text(encoding="utf-8"))["tables"]
    if number not in tables:
        raise ValueError(f"S3Mem's results are in tables {', '.join(map(str, tables))}; there is no table {number}")
    printed = tables[number]
    measured = list(_example()) if number == EXAMPLE else [_measured(run, number) for run in runs]
    further = dict.fromkeys(column for row in measured for column in row.cells)
    columns = (*printed["columns"], *(column for column in further if column not in printed["columns"]))
    plotted = [column for column in columns if not column.endswith(TOKENS) and column not in ("rank", "cost")]
    about = [{"run": run.name, **dict.fromkeys(ABOUT, ())} for run in runs]
    notes = [
        "Rows marked paper: as printed in arXiv 2605.28831. Rows marked measured: this project's, with 95 % bootstrap "
        "intervals over questions and n. Their columns name the data: an analogue wherever data or reader is not the "
        "paper's.",
    ]
    if number == EXAMPLE:
        notes.append("Measured: the rank, probabilities and tokens that the shipped router gives the same steps.")
    title = f"Table {number}. {printed['title']}"
    return Table(
        number, title, columns=columns, plotted=plotted, rows=[*paper_rows(printed), *measured], runs=about, notes=notes
    )


def _measured(run: Path, number: int) -> Row:
    """Convert a run's results to a row: F1 and BLEU-1 by category in Table 1, F1 by category in Table 2, else overall
    F1."""
    if not (run / RESULTS).exists():
        raise ValueError(f"{run} has no {RESULTS}: run memcompiler qa --out {run}")
    results: Mapping[str, Any] = read_json(run / RESULTS)
    if "by_category" not in results:
        raise ValueError(f"{run} is no run of memcompiler qa, which S3Mem's tables need")
    parts = {**results["by_category"], "overall": results["overall"]}
    shown = [("f1", "F1"), ("bleu_1", "BLEU")] if number == 1 else [("f1", "F1")]
    cells = {
        f"{results['data']}: {category} {name}": percent_cell(of[key])
        for category, of in parts.items()
        if number in (1, 2) or category == "overall"
        for key, name in shown
    }
    cells[f"{results['data']}: {TOKENS}"] = TableCell(results["tokens_per_question"], n=results["n"])
    engine, _, reader = results["reader"].partition(":")  # no private paths
    read_by = f"{engine}:{Path(reader).name}" if Path(reader).is_absolute() else results["reader"]
    return Row(read_by, _method(results, number), MEASURED, cells)


def _method(results: Mapping[str, Any], number: int) -> str:
    settings = {**results["settings"], **results.get("models", {})}
    name = "S3Mem" if results["memory"] == NAME else results["memory"]
    if number == 4 and results["memory"] == NAME:
        return REPRESENTATIONS.get(settings.get("representation", "full"), "full unit")
    shown = ", ".join(f"{key}={value}" for key, value in sorted(settings.items()))
    return f"{name} [{shown}]" if shown else name


def _example() -> Iterator[Row]:
    """Score the paper's example with the shipped router."""
    actions = [ACTIONS.get(t, "wait") for t in range(max(ACTIONS) + 1)]
    records = tuple(Record(t, "", action, "") for t, action in enumerate(actions))
    units = write_units(Trace(Task("example", "", scene="", split="", kind="log"), records, True))
    nodes = load_router().nodes(UnitIndex(units, S3MemSettings()).score(QUESTION))
    ranked = sorted(nodes, key=lambda node: (-node.support, node.place))
    for rank, node in enumerate(ranked, 1):
        if node.unit.order in ACTIONS:
            cells = {"rank": rank, "y_sup": node.support, "y_anc": node.anchor, "cost": node.cost}
            scores = {name: TableCell(float(value)) for name, value in cells.items()}
            yield Row("shipped router", f"step {node.unit.order}: {node.unit.event}", MEASURED, scores)
