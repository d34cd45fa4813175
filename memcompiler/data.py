"""`memcompiler data`: what SFT rows hold, and rows to the hub."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from data_gen import dataset
from data_gen.dataset import print_statistics, statistics
from data_gen.rows import load_rows, row_folders


def run_inspect(rows: Sequence[str], tokenizer: str | None) -> None:
    """Print what rows hold, all folders together."""
    from lm.loading import model_path, quiet

    quiet()
    folders = row_folders(rows)
    reader = None
    if tokenizer is not None:
        from transformers import AutoTokenizer

        reader = AutoTokenizer.from_pretrained(model_path(tokenizer))
    found = statistics(load_rows(folders), reader)
    if len(folders) == 1:
        found |= dataset.of_collection(folders[0])
    print_statistics(found)


def run_push(rows: Path, repo: str, public: bool) -> None:
    """Rows and card to the hub."""
    from lm.loading import quiet

    quiet()
    Console(width=120).print(dataset.push(rows, repo, private=not public))
