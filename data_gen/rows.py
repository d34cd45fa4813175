"""SFT rows: what a teacher's step teaches the compiler (-> emission) and what the executor should do (-> action).

Rows are stored as a `datasets` dataset (Arrow, pictures as an `Image` feature that keeps the PNG bytes); a row knows
how to become the compiler's and the executor's requests, so training reads exactly what the loop reads. What is kept of
a collection, counted and published: `data_gen.dataset`, `data_gen.publish`.
"""

from __future__ import annotations

import glob
import io
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from agent.records import Episode
from compiler.brief_state import parse_brief_state, render_brief_state
from compiler.language import Kind, parse
from compiler.records import CompileRequest
from executor.prompt import Delivered, ExecutorRequest
from memory.entry import MemoryEntry, Provenance
from memory.trajectory import png_bytes

if TYPE_CHECKING:
    from datasets import Dataset, Features

TUPLES = ("memory_ids", "memory_texts", "history")


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
    success: bool = True  # of the row's episode
    steps: int = 0  # of the row's episode; 0: unknown (rows of an older version)

    @property
    def kind(self) -> Kind:
        return parse(self.emission).emission.kind

    @property
    def memory_text(self) -> str:
        return "\n\n".join(self.memory_texts)

    def compile_request(self) -> CompileRequest:
        nowhere = Provenance("", "", "", self.split, True)
        memory = [MemoryEntry(i, text, nowhere) for i, text in zip(self.memory_ids, self.memory_texts, strict=True)]
        return CompileRequest(
            self.goal, tuple(memory), parse_brief_state(self.state), self.observation, self._picture(), self.history
        )

    def executor_request(self, n_tokens: int) -> ExecutorRequest:
        """The executor's side of the row: the teacher's guidance in text, and room for N soft tokens."""
        emission = parse(self.emission).emission
        lines = render_brief_state(parse_brief_state(self.state)).split("\n")[1:]
        room = torch.empty(n_tokens, 0) if n_tokens else None
        delivered = Delivered(state="\n".join(lines), guidance=emission.guidance, reason=emission.reason, soft=room)
        return ExecutorRequest(self.goal, delivered, self.history, self.observation, image=self._picture())

    def _picture(self) -> Image.Image | None:
        return Image.open(io.BytesIO(self.image)).convert("RGB") if self.image else None


def rows_of(episode: Episode) -> list[SftRow]:
    """One row per step of a teacher's episode. The label is what the expert would do, also where it strayed.

    A step at which environment, compiler or executor failed teaches nothing and gives no row.
    """
    rows, history = [], ()
    for step in episode.steps:
        if step.compilation is None or not step.action:
            continue
        request = step.compilation.request
        assert request is not None
        image = None if step.image is None else png_bytes(step.image)
        rows.append(
            SftRow(
                task_id=episode.task_id, split=episode.split, family=episode.family, t=step.t, goal=request.goal,
                memory_ids=tuple(e.id for e in request.memory), memory_texts=tuple(e.text for e in request.memory),
                state=step.brief_before, observation=step.observation, image=image, history=history,
                emission=step.emission_text, action=step.executor_text, success=episode.success,
                steps=len(episode.steps),
            )
        )  # fmt: skip
        history = (*history, step.action)
    return rows


# -- on disk ----------------------------------------------------------------------------------------------------------


def row_features() -> Features:
    from datasets import Features, Image, List, Value

    text, number = Value("string"), Value("int64")
    return Features(
        {
            "task_id": text, "split": text, "family": text, "t": number, "goal": text, "memory_ids": List(text),
            "memory_texts": List(text), "state": text, "observation": text, "image": Image(), "history": List(text),
            "emission": text, "action": text, "success": Value("bool"), "steps": number,
        }
    )  # fmt: skip


def as_dataset(rows: Sequence[SftRow]) -> Dataset:
    """Rows as what they are stored and published as."""
    from datasets import Dataset

    return Dataset.from_list([asdict(row) for row in rows], features=row_features())


def save_rows(rows: Sequence[SftRow], folder: Path) -> None:
    """Raises: ValueError, for no rows at all."""
    if not rows:
        raise ValueError("there are no rows to save: no teacher episode succeeded, or the filters left nothing")
    as_dataset(rows).save_to_disk(str(folder))


def row_folders(rows: str | Path | Sequence[str | Path]) -> list[Path]:
    """The folders that are meant: one, several, or patterns such as `runs/shard-*/rows` (in alphabetical order).

    Raises:
        FileNotFoundError: one of them holds no rows, or a pattern fits nothing (the message says what makes them).
    """
    named = [rows] if isinstance(rows, str | Path) else list(rows)
    found: list[Path] = []
    for name in map(str, named):
        matches = [name] if Path(name).exists() else sorted(glob.glob(name))
        for folder in map(Path, matches or [name]):
            if not (folder / "dataset_info.json").is_file():
                makes = f"`memcompiler collect --out {folder.parent}` makes them"
                raise FileNotFoundError(f"no SFT rows in {folder}: {makes}")
            found.append(folder)
    if not found:
        raise FileNotFoundError("no SFT rows are named: `memcompiler collect` makes them (setting `rows`)")
    return list(dict.fromkeys(found))


def load_rows(rows: str | Path | Sequence[str | Path]) -> list[SftRow]:
    """All rows of the folders that `row_folders` finds, in their order.

    Raises:
        FileNotFoundError: no rows there.
        ValueError: a dataset, but not of rows.
    """
    return [row for folder in row_folders(rows) for row in _read(folder)]


def _read(folder: Path) -> list[SftRow]:
    from datasets import Dataset, Image

    dataset = Dataset.load_from_disk(str(folder))
    needed = {field.name for field in fields(SftRow) if field.default is MISSING}
    if missing := sorted(needed - set(dataset.column_names)):
        raise ValueError(f"{folder} holds a dataset, but not of SFT rows: it lacks {', '.join(missing)}")
    dataset = dataset.select_columns([field.name for field in fields(SftRow) if field.name in dataset.column_names])
    if isinstance(dataset.features["image"], Image):  # rows of an older version hold plain bytes
        dataset = dataset.cast_column("image", Image(decode=False))
    return [_row(values) for values in dataset]


def _row(values: Any) -> SftRow:
    image = values["image"]
    png = image["bytes"] if isinstance(image, dict) else image
    lists = {name: tuple(values[name]) for name in TUPLES}
    return SftRow(**{**values, **lists, "image": png})
