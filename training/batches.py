"""Which rows make up a batch: functions of (seed, epoch) and of the rows, so that a run resumes to the same ones."""

from __future__ import annotations

import random
from collections.abc import Sequence

from data_gen.dataset import compiler_text
from data_gen.rows import SftRow

PICTURE = 1000  # characters that a picture counts for: some 250 tokens


def length(row: SftRow) -> int:
    """Say about how long a row is for the compiler, without its tokenizer: characters read and written."""
    pictures = sum(map(len, row.memory_images)) + (row.image is not None)
    return len(compiler_text(row)) + len(row.emission) + PICTURE * pictures


def bucketed(order: Sequence[int], lengths: Sequence[int], size: int, window: int, seed: str) -> list[list[int]]:
    """Cut an epoch's order into batches of `size` rows that are of like length: those of `window` batches are sorted,
    cut, and shuffled as batches. Every row is in one of them, and only an epoch's last batch, wherever it goes, may be
    smaller."""
    draw, batches = random.Random(seed), []
    for at in range(0, len(order), size * window):
        rows = sorted(order[at : at + size * window], key=lengths.__getitem__)
        cut = [rows[i : i + size] for i in range(0, len(rows), size)]
        draw.shuffle(cut)
        batches += cut
    return batches
