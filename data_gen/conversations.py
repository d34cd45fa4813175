"""SFT rows as TRL's conversations, prompt and completion: what the compiler reads, and the emission it is to write.

datasets.load_dataset(OUT)
trl sft --dataset_name OUT --model_name_or_path NAME
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.records import compile_request
from compiler.prompt import compiler_parts
from data_gen.dataset import write_parquet
from data_gen.rows import SftRow, hold_out
from lm.prompt import messages
from memory.trajectory import png_bytes
from runtime.store import new_folder

if TYPE_CHECKING:
    from datasets import Dataset


def conversation(row: SftRow, instructions: str = "", images: bool = False) -> dict[str, Any]:
    """Write a row as a conversation, for models of text; with `images`, for models that see: every content is then a
    list of parts, and the pictures (PNG) stand beside in the order of their places."""
    parts = compiler_parts(compile_request(row.step_input()), images)
    turns = {"prompt": messages(parts, instructions), "completion": [{"role": "assistant", "content": row.emission}]}
    if not images:
        return turns
    pictures = [{"bytes": png_bytes(part.image)} for part in parts if part.image is not None]
    return {name: [_in_parts(turn) for turn in some] for name, some in turns.items()} | {"images": pictures}


def _in_parts(turn: dict[str, Any]) -> dict[str, Any]:
    content = turn["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return turn | {"content": [{"text": None, **part} for part in parts]}


def as_conversations(rows: Sequence[SftRow], instructions: str = "", images: bool = False) -> Dataset:
    """Turn rows into TRL's dataset, one conversation for each."""
    from datasets import Dataset, Features, Image, List, Value

    text = Value("string")
    turns = List({"role": text, "content": List({"text": text, "type": text}) if images else text})
    features = {"prompt": turns, "completion": turns, **({"images": List(Image())} if images else {})}
    told = [conversation(row, instructions, images) for row in rows]
    return Dataset.from_list(told, features=Features(features))


def export(
    rows: Sequence[SftRow],
    out: Path,
    instructions: str = "",
    images: bool = False,
    held_out: float = 0.0,
    seed: int = 0,
) -> dict[str, int]:
    """Write rows as conversations into a new folder, whole or not at all; returns their number by split: `train`, and
    `test` where a share of the tasks is held out, the same as `validation.share` holds out.

    Raises:
        FileExistsError: the folder is there.
        ValueError: the rows cannot be split.
    """
    training, testing = hold_out(rows, held_out, seed)
    splits = {"train": training, **({"test": testing} if testing else {})}
    with new_folder(out) as folder:
        for split, part in splits.items():
            write_parquet(as_conversations(part, instructions, images), folder, split)
    return {split: len(part) for split, part in splits.items()}
