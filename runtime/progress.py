"""A progress bar on a terminal, or a plain line every 20 seconds elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

EVERY = 20.0  # seconds between plain lines


@contextmanager
def progress(name: str, total: int, done: int = 0) -> Iterator[Callable[[object], None]]:
    """Yield `advance(note)`, which counts a finished unit and displays the note if it is a string."""
    if sys.stdout.isatty():
        columns = (TextColumn("  {task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, TextColumn("{task.fields[note]}")) as bar:
            task = bar.add_task(name, total=total, completed=done, note="")
            yield lambda note=None: bar.update(task, advance=1, note=note if isinstance(note, str) else "")
        return
    state = {"done": done, "next": time.monotonic() + EVERY}
    started = time.monotonic()

    def advance(note: object = None) -> None:
        state["done"] += 1
        if time.monotonic() >= state["next"]:
            state["next"] = time.monotonic() + EVERY
            print(f"  {name}: {state['done']}/{total}  {note if isinstance(note, str) else ''}", flush=True)

    yield advance
    print(f"  {name}: {state['done']}/{total} in {time.monotonic() - started:.1f} s", flush=True)


def disable_library_progress_bars() -> None:
    """Disable the progress bars of transformers and datasets."""
    from transformers.utils import logging  # does not import torch

    logging.disable_progress_bar()
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # read on import, which takes half a second
    if datasets := sys.modules.get("datasets"):
        datasets.disable_progress_bars()
