"""Export of SFT rows as TRL conversations: the compiler's input as prompt, the emission as completion.

datasets.load_dataset(OUT)
trl sft --dataset_name OUT --model_name_or_path NAME
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.records import compile_request
from compiler.prompt import Instructions, compiler_parts, instructions_of
from data_gen.dataset import write_parquet
from data_gen.rows import SftRow, split_rows
from lm.prompt import chat_messages, chat_of
from memory.trajectory import png_bytes
from runtime.store import atomic_folder

if TYPE_CHECKING:
    from datasets import Dataset

    from compiler.records import Entries, History


def row_to_conversation(
    row: SftRow,
    instructions: Instructions = "",
    images: bool = False,
    history: History = 1,
    entries: Entries = "whole",
) -> dict[str, Any]:
    """Convert a row into a conversation. With `images`, every content is a list of parts, and `images` holds the
    pictures (PNG) in the order of their parts. `history`, `entries`: see `compiler_parts`."""
    parts = compiler_parts(compile_request(row.step_input()), images, history, entries)
    turns = {
        "prompt": chat_messages(chat_of(parts, instructions_of(instructions, row.environment))),
        "completion": [{"role": "assistant", "content": row.emission}],
    }
    if not images:
        return turns
    pictures = [{"bytes": png_bytes(part.image)} for part in parts if part.image is not None]
    return {name: [_content_parts(turn) for turn in some] for name, some in turns.items()} | {"images": pictures}


def _content_parts(turn: dict[str, Any]) -> dict[str, Any]:
    content = turn["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return turn | {"content": [{"text": None, **part} for part in parts]}


def rows_to_conversations(
    rows: Sequence[SftRow],
    instructions: Instructions = "",
    images: bool = False,
    history: History = 1,
    entries: Entries = "whole",
) -> Dataset:
    """Convert rows into a TRL dataset, one conversation per row."""
    from datasets import Dataset, Features, Image, List, Value

    text = Value("string")
    turns = List({"role": text, "content": List({"text": text, "type": text}) if images else text})
    features = {"prompt": turns, "completion": turns, **({"images": List(Image())} if images else {})}
    conversations = [row_to_conversation(row, instructions, images, history, entries) for row in rows]
    return Dataset.from_list(conversations, features=Features(features))


def export_conversations(
    rows: Sequence[SftRow],
    out: Path,
    *,
    instructions: Instructions = "",
    images: bool = False,
    history: History = 1,
    entries: Entries = "whole",
    held_out: float = 0.0,
    seed: int = 0,
) -> dict[str, int]:
    """Write rows as conversations into a new folder; return the number of rows by split.

    Args:
        instructions: system turn of every conversation, or by the environment of its row.
        history: past commands in the prompt (`compiler.history`).
        entries: what the prompt shows of raw trajectories (`compiler.entries`).
        held_out: share of the tasks in split `test`, the same tasks as `validation.share` holds out.

    Raises:
        FileExistsError: the folder exists.
        ValueError: the rows cannot be split.
    """
    training, testing = split_rows(rows, held_out, seed)
    splits = {"train": training, **({"test": testing} if testing else {})}
    with atomic_folder(out) as folder:
        for split, part in splits.items():
            write_parquet(rows_to_conversations(part, instructions, images, history, entries), folder, split)
    return {split: len(part) for split, part in splits.items()}
