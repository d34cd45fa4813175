"""S3Mem's tables (arXiv 2605.28831) with what runs of `memcompiler qa` measured beside them. A run fills columns of its
own, named by its data: other questions or another reader than the paper's are an analogue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from envs.base import Task
from eval.paper.tables import ABOUT, MEASURED, PAPER, Row, Table, TableCell
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
ASKED = "From steps 1 to 39, how many times did you execute mix picture?"


def question_table(number: int, runs: Sequence[Path]) -> Table:
    """Make table `number`, with the results of `runs`. Raises: ValueError, for no such table, or a run without any."""
    told = yaml.safe_load(Path(__file__).with_name("s3mem.yaml").read_text(encoding="utf-8"))["tables"]
    if number not in told:
        raise ValueError(f"S3Mem's results are in tables {', '.join(map(str, told))}; there is no table {number}")
    printed = told[number]
    shown = lambda values: {c: TableCell(float(v)) for c, v in zip(printed["columns"], values, strict=True)}
    rows = [
        Row(reader, method, PAPER, shown(numbers["values"]))
        for reader, methods in printed["executors"].items()
        for method, numbers in methods.items()
    ]
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
    return Table(number, title, columns, plotted, [*rows, *measured], about, notes)


def _measured(run: Path, number: int) -> Row:
    """Read a run's results as a row: F1 and BLEU-1 by category in Table 1, F1 alone elsewhere."""
    if not (run / RESULTS).exists():
        raise ValueError(f"{run} has no {RESULTS}: make it with memcompiler qa --out {run}")
    results: Mapping[str, Any] = read_json(run / RESULTS)
    if "by_category" not in results:
        raise ValueError(f"{run} is no run of memcompiler qa, whose results S3Mem's tables are made of")
    parts = {**results["by_category"], "overall": results["overall"]}
    shown = [("f1", "F1"), ("bleu_1", "BLEU")] if number == 1 else [("f1", "F1")]
    cells = {
        f"{results['data']}: {category} {name}": _percent(of[key])
        for category, of in parts.items()
        if number in (1, 2) or category == "overall"
        for key, name in shown
    }
    cells[f"{results['data']}: {TOKENS}"] = TableCell(results["tokens_per_question"], n=results["n"])
    engine, _, reader = results["reader"].partition(":")  # a folder by its name alone: where it lies tells nobody else
    read_by = f"{engine}:{Path(reader).name}" if Path(reader).is_absolute() else results["reader"]
    return Row(read_by, _method(results, number), MEASURED, cells)


def _method(results: Mapping[str, Any], number: int) -> str:
    settings = {**results["settings"], **results.get("models", {})}
    name = "S3Mem" if results["memory"] == NAME else results["memory"]
    if number == 4 and results["memory"] == NAME:
        return REPRESENTATIONS.get(settings.get("representation", "full"), "full unit")
    told = ", ".join(f"{key}={value}" for key, value in sorted(settings.items()))
    return f"{name} [{told}]" if told else name


def _percent(of: Mapping[str, Any]) -> TableCell:
    return TableCell(100 * of["mean"], 100 * of["low"], 100 * of["high"], of["n"])


def _example() -> Iterator[Row]:
    """Have the shipped router score the paper's example."""
    actions = [ACTIONS.get(t, "wait") for t in range(max(ACTIONS) + 1)]
    records = tuple(Record(t, "", action, "") for t, action in enumerate(actions))
    units = write_units(Trace(Task("example", "", "", "", "log"), records, True))
    nodes = load_router().nodes(UnitIndex(units, S3MemSettings()).score(ASKED))
    ranked = sorted(nodes, key=lambda node: (-node.support, node.place))
    for rank, node in enumerate(ranked, 1):
        if node.unit.order in ACTIONS:
            cells = {"rank": rank, "y_sup": node.support, "y_anc": node.anchor, "cost": node.cost}
            told = {name: TableCell(float(value)) for name, value in cells.items()}
            yield Row("shipped router", f"step {node.unit.order}: {node.unit.event}", MEASURED, told)
