"""SFT rows: what a teacher's step teaches the compiler (-> emission) and what the executor should do (-> action).

Rows are stored as a `datasets` dataset (Arrow, pictures as PNG); a row knows how to become the compiler's and the
executor's requests, so training reads exactly what the loop reads.
"""

from __future__ import annotations

import io
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from PIL import Image

from agent.records import Episode
from compiler.brief_state import parse_brief_state, render_brief_state
from compiler.language import Emission, parse, render
from compiler.records import CompileRequest
from executor.prompt import Delivered, ExecutorRequest
from memory.entry import MemoryEntry, Provenance
from memory.trajectory import png_bytes


@dataclass(frozen=True, slots=True)
class SftRow:
    task_id: str
    split: str
    family: str
    t: int
    goal: str  # as agent and memory state it
    memory_ids: tuple[str, ...]
    memory_texts: tuple[str, ...]
    state: str  # rendered Brief State b_t
    observation: str
    image: bytes | None  # PNG
    history: tuple[str, ...]
    emission: str  # target of L_text
    action: str  # target of L_action

    @property
    def memory_text(self) -> str:
        return "\n\n".join(self.memory_texts)

    def compile_request(self) -> CompileRequest:
        nowhere = Provenance("", "", "", self.split, True)
        memory = [MemoryEntry(i, text, nowhere) for i, text in zip(self.memory_ids, self.memory_texts, strict=True)]
        picture = Image.open(io.BytesIO(self.image)).convert("RGB") if self.image else None
        return CompileRequest(
            self.goal, tuple(memory), parse_brief_state(self.state), self.observation, picture, self.history
        )

    def executor_request(self, n_tokens: int) -> ExecutorRequest:
        """The executor's side of the row: the teacher's guidance in text, and room for N soft tokens."""
        emission = parse(self.emission).emission
        lines = render_brief_state(parse_brief_state(self.state)).split("\n")[1:]
        room = torch.empty(n_tokens, 0) if n_tokens else None
        delivered = Delivered(state="\n".join(lines), guidance=emission.guidance, reason=emission.reason, soft=room)
        return ExecutorRequest(self.goal, delivered, self.history, self.observation)


def rows_of(episode: Episode) -> list[SftRow]:
    """One row per step of a teacher's episode. The label is what the expert would do, also where it strayed."""
    rows, history = [], ()
    for step in episode.steps:
        assert step.compilation is not None and step.compilation.request is not None
        request = step.compilation.request
        image = None if step.image is None else png_bytes(step.image)
        rows.append(
            SftRow(
                task_id=episode.task_id, split=episode.split, family=episode.family, t=step.t, goal=request.goal,
                memory_ids=tuple(e.id for e in request.memory), memory_texts=tuple(e.text for e in request.memory),
                state=step.brief_before, observation=step.observation, image=image, history=history,
                emission=step.emission_text, action=step.executor_text,
            )
        )  # fmt: skip
        history = (*history, step.action)
    return rows


def balance(rows: Sequence[SftRow], keep_noaction: float, seed: int) -> list[SftRow]:
    """All rows with something to say, and a seeded share of those with nothing (most steps need nothing)."""
    draw = random.Random(seed)
    nothing = render(Emission())
    return [row for row in rows if row.emission != nothing or draw.random() < keep_noaction]


def save_rows(rows: Sequence[SftRow], folder: Path) -> None:
    """Raises: ValueError, for no rows at all."""
    from datasets import Dataset

    if not rows:
        raise ValueError("there are no rows to save: no teacher episode succeeded")
    Dataset.from_list([asdict(row) for row in rows]).save_to_disk(str(folder))


def load_rows(folder: Path) -> list[SftRow]:
    """Raises: FileNotFoundError, when the folder holds no rows (the message says what makes them)."""
    from datasets import load_from_disk

    if not (folder / "dataset_info.json").is_file():
        raise FileNotFoundError(f"no SFT rows in {folder}: `memcompiler collect --out {folder.parent}` makes them")
    tuples = ("memory_ids", "memory_texts", "history")
    return [
        SftRow(**{k: tuple(v) if k in tuples else v for k, v in row.items()}) for row in load_from_disk(str(folder))
    ]
