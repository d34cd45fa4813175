"""Episodes back from `episodes.jsonl`: the inverse of `Episode.to_json`, and a reader that holds one line at a time."""

from __future__ import annotations

import base64
import binascii
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from agent.records import Episode, StepRecord
from runtime.errors import StopReason

_TUPLES = ("admissible", "op_errors", "executor_prompt_ids")
_STEP_FIELDS = frozenset(field.name for field in fields(StepRecord)) - {"compilation", "image"}
_EPISODE_FIELDS = frozenset(field.name for field in fields(Episode)) - {"steps"}


def episode_from_json(row: Mapping[str, Any], images: bool = True) -> Episode:
    """The episode that `to_json` wrote, pictures included if they were; tensors are gone. Unknown keys are ignored.

    Args:
        images: False leaves the pictures undecoded and out: numbers need none.

    Raises:
        ValueError: when a needed key is missing or a value cannot be what it should be.
    """
    try:
        head = {key: value for key, value in row.items() if key in _EPISODE_FIELDS}
        head["memory_ids"] = tuple(head.get("memory_ids", ()))
        head["stop_reason"] = StopReason(head["stop_reason"])
        return Episode(**head, steps=[_step_from_json(step, images) for step in row["steps"]])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not an episode: {error}") from error


def read_episodes(path: Path, images: bool = True) -> Iterator[Episode]:
    """Episodes of a JSONL file, one at a time: a long run's file does not fit into memory as objects.

    Raises:
        ValueError: naming the line that holds no episode.
    """
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield episode_from_json(json.loads(line), images)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error


def read_matrix(run_dir: Path, results: Mapping[str, Any], images: bool = True) -> Iterator[Episode]:
    """Episodes of all cells that the results of a matrix list, under the names that its tables have.

    A task of another set of scenes is another task, though it may have the same id.
    """
    for cell in results["cells"].values():
        for episode in read_episodes(run_dir / cell["path"] / "episodes.jsonl", images):
            episode.delivery = f"{cell['group']}/{episode.delivery}" if cell["group"] else episode.delivery
            episode.task_id = f"{cell['scene_seed']}/{episode.task_id}"
            yield episode


def _step_from_json(row: Mapping[str, Any], images: bool) -> StepRecord:
    step = {key: value for key, value in row.items() if key in _STEP_FIELDS}
    step |= {key: tuple(step[key]) for key in _TUPLES if step.get(key) is not None}
    return StepRecord(**step, image=_picture(row.get("image")) if images else None)


def _picture(data: str | None) -> Image.Image | None:
    if data is None:
        return None
    try:
        picture = Image.open(io.BytesIO(base64.b64decode(data, validate=True)), formats=["PNG"])
        picture.load()
    except (binascii.Error, UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError) as error:
        raise ValueError(f"a picture is not base64 PNG: {error}") from error
    return picture
