"""RAM that SFT takes as its rows grow in number: they stay on disk, so it should be flat.

    python -m benchmarks.rows_memory [--rows 1000 --rows 100000] [--steps 50] [--workers 1]

Makes rows with a picture of their own each (32 x 32 of noise, some 3 kB as PNG, in view and in memory), and takes steps
on them with the shipped models of generated homes, each number of rows in a process of its own. Counted is what belongs
to the processes alone (anonymous memory of trainer and workers): pages of the rows' files, which the system takes back
when it needs them, are not.
"""

from __future__ import annotations

import io
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import psutil
import torch
import typer
from PIL import Image

from compiler.build import load_compiler
from configs.load import load_config
from configs.training import SftConfig
from data_gen.rows import SftRow, StoredRows, as_dataset
from envs.spec import Told
from executor.build import load_frozen
from training.sft import SftTrainer

PART = 2_000  # rows that are made at a time
SIDE = 32
MIB = 2**20


def rows(start: int, n: int) -> Iterator[SftRow]:
    """Make rows of a made-up home."""
    for i in range(start, start + n):
        noise = io.BytesIO()
        pixels = np.random.default_rng(i).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(noise, format="PNG")
        png, place = noise.getvalue(), f"shelf {i % 9 + 1}"
        yield SftRow(
            task_id=f"t{i // 10}", split="train", family="text", t=i % 10, goal="in home 1: put a mug in cabinet",
            memory_ids=("a", "b"), memory_texts=(f"in home 1 the mug was in {place}", "in home 9: heat an egg"),
            state="goal: in home 1: put a mug in cabinet", observation=f"You see a {place}.", image=png,
            history=("look",) * (i % 10), emission=f"> in home 1 the mug was in {place} | go to {place}",
            action=f"go to {place}", memory_images=((png,), ()),
        )  # fmt: skip


def anonymous() -> float:
    """Count the anonymous MiB of this process and its children, what they share once. (Linux. Their `uss` would count
    pages of files, too, that nobody else has open.)"""
    me = psutil.Process()
    rolled = [Path(f"/proc/{p.pid}/smaps_rollup").read_text() for p in (me, *me.children(recursive=True))]
    return sum(int(line.split()[1]) for text in rolled for line in text.splitlines() if "Pss_Anon:" in line) / 1024


def train(folder: Path, steps: int, workers: int, answer: multiprocessing.Queue) -> None:
    """Take steps and tell the memory after the first ones and at the end, and rows a second."""
    torch.set_num_threads(1)
    sizes = ["batch_size=8", "micro_batch_size=8", f"max_steps={steps}", f"loader_workers={workers}"]
    config = load_config(SftConfig, "sft/quickstart", [*sizes, "save_every=1000000"])
    executor = load_frozen(config.executor, Told(""))
    trainer = SftTrainer(config, load_compiler(config.compiler, executor), executor, StoredRows(folder), folder / "out")
    started, used = time.perf_counter(), list[float]()
    for metrics in trainer.steps():
        if metrics["step"] in (5, steps):
            used.append(anonymous())
    answer.put((*used, 8 * steps / (time.perf_counter() - started)))


def main(
    rows_: Annotated[list[int], typer.Option("--rows")] = [1_000, 10_000, 100_000],  # noqa: B006 (typer's way)
    steps: int = 50, workers: int = 1,
) -> None:  # fmt: skip
    from datasets import Dataset, concatenate_datasets

    context, taken = multiprocessing.get_context("spawn"), list[float]()
    for n in rows_:
        with tempfile.TemporaryDirectory() as name:
            folder, parts = Path(name), list[Path]()
            for start in range(0, n, PART):
                parts.append(folder / f"part-{start}")
                as_dataset(list(rows(start, min(PART, n - start)))).save_to_disk(str(parts[-1]))
            concatenate_datasets([Dataset.load_from_disk(str(part)) for part in parts]).save_to_disk(
                str(folder / "rows")
            )
            size = sum(file.stat().st_size for file in (folder / "rows").rglob("*") if file.is_file()) / MIB
            answer: multiprocessing.Queue = context.Queue()
            process = context.Process(target=train, args=(folder / "rows", steps, workers, answer))
            process.start()
            early, late, rate = answer.get(timeout=3600)
            process.join()
        taken.append(late)
        print(
            f"{n:>8} rows ({size:.0f} MiB on disk): {early:.0f} MiB after 5 steps, {late:.0f} MiB after {steps}; "
            f"{rate:.1f} rows/s"
        )
    print(f"ratio: {taken[-1] / taken[0]:.2f} (memory at {rows_[-1]} rows over {rows_[0]})")


if __name__ == "__main__":
    typer.run(main)
