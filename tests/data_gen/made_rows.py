"""Synthetic SFT rows."""

from __future__ import annotations

import io
from dataclasses import replace

from PIL import Image as Picture

from data_gen.rows import SftRow


def png(color: int) -> bytes:
    buffer = io.BytesIO()
    # A setting that is not PIL's default: bytes that were encoded again would differ.
    Picture.new("RGB", (64, 64), (color, 10, 200)).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def row(i: int, **changes: object) -> SftRow:
    made = SftRow(
        task_id=f"t{i}",
        split="train",
        family="text",
        t=0,
        goal=f"in home {i}: put a mug in cabinet",
        memory_ids=("a", "b")[: i % 3],
        memory_texts=("in home 1: put a mug in shelf", "in home 9: heat an egg")[: i % 3],
        state=f"goal: in home {i}: put a mug in cabinet",
        observation="You see a cabinet 1.",
        image=None if i == 1 else png(i),
        history=("look",) * i,
        emission="> go to shelf 1" if i % 2 else ".",
        action="go to shelf 1",
        steps=4,
    )
    return replace(made, **changes)
