"""Commands around SFT rows: what a collection leaves beside them, and `memcompiler data`.

statistics.json   what `memcompiler data inspect` prints
plots/rows.png    the same, drawn
rows/README.md    the dataset card
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from configs.run_folder import RunFolder
from data_gen import publish
from data_gen.dataset import in_words, statistics, statistics_plot, statistics_table
from data_gen.rows import SftRow, load_rows, row_folders
from memcompiler import build

console = Console(width=120)


def describe_rows(run: RunFolder, rows: Sequence[SftRow], collected: Mapping[str, Any]) -> None:
    """Statistics (also printed), their plot and the rows' card. `collected`: what collect.json says."""
    played = {name: collected[name] for name in ("episodes", "successes")}
    found = statistics(rows) | {"played": played, "dropped": collected["dropped"]}
    run.write_json("statistics.json", found)
    statistics_plot(rows, run.path / "plots" / "rows.png")
    made = publish.provenance(run.path / "rows") | {"teacher": collected["teacher"]}
    (run.path / "rows" / publish.CARD).write_text(publish.dataset_card(made, found), encoding="utf-8")
    _print(found)


def run_inspect(rows: Sequence[str], tokenizer: str | None) -> None:
    """Print what rows hold, all folders together."""
    build.quiet()
    folders = row_folders(rows)
    reader = None
    if tokenizer is not None:
        from transformers import AutoTokenizer

        reader = AutoTokenizer.from_pretrained(build.model_path(tokenizer))
    found = statistics(load_rows(folders), reader)
    if len(folders) == 1:
        found |= publish.of_collection(folders[0])
    _print(found)


def run_push(rows: Path, repo: str, public: bool) -> None:
    """Rows and card to the hub."""
    build.quiet()
    console.print(publish.push(rows, repo, private=not public))


def _print(found: Mapping[str, Any]) -> None:
    console.print(statistics_table(found))
    for line in in_words(found):
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
