"""One checkpoint = one folder: adapter and projector (`compiler.checkpoint`), and what training goes on from.

    optimizer.safetensors   AdamW moments by parameter name
    state.json              step, cursor, seed, bank version, hashes, versions

Random numbers need no state: every draw of a step is seeded by (seed, step). A checkpoint is written beside its final
place and renamed, so a folder that bears the name of a checkpoint is whole, whenever the process was killed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from compiler.checkpoint import (
    BEST,
    POLICY,
    PROJECTOR,
    CheckpointError,
    checkpoints,
    name_of,
    read_weights,
    save_projector,
)
from compiler.hf import MemoryCompiler
from runtime.store import sync


@dataclass(frozen=True, slots=True)
class Tensors:
    """What training changes, whole and on the CPU, under the names of the compiler's parameters."""

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]  # AdamW's, as "<parameter>:<key>"


def save_checkpoint(
    folder: Path, compiler: MemoryCompiler, tensors: Tensors, state: Mapping[str, Any], keep: int = 0, best: int = 0
) -> Path:
    """Write `folder/step-NNNNNN` atomically; with keep > 0 older ones beyond that number go, but not that of step
    `best` (0: nothing is known of one).

    The compiler says what the files look like; what is in them comes from `tensors`, for its own may be in slices.
    """
    final = folder / name_of(state["step"])
    part = folder / f".part-{final.name}"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    adapter = {n.removeprefix(POLICY): t for n, t in tensors.weights.items() if n.startswith(POLICY)}
    compiler.policy.save_pretrained(part / "adapter", state_dict=adapter, save_embedding_layers=False)
    projector = {n.removeprefix(PROJECTOR): t for n, t in tensors.weights.items() if n.startswith(PROJECTOR)}
    save_projector(part, compiler.projector.config, projector)
    save_file(tensors.moments, part / "optimizer.safetensors")
    (part / "state.json").write_text(json.dumps(dict(state), indent=1))
    for written in (*part.rglob("*"), part):  # before the rename makes it visible
        sync(written)
    shutil.rmtree(final, ignore_errors=True)
    part.replace(final)
    sync(folder)
    if best:
        mark_best(folder, best)
    if keep:
        for old in checkpoints(folder)[:-keep]:
            if old.name != name_of(best):
                shutil.rmtree(old)
    return final


def mark_best(folder: Path, step: int) -> None:
    """Have `folder/best` lead to the checkpoint of a step."""
    link = folder / f".part-{BEST}"
    link.unlink(missing_ok=True)
    link.symlink_to(name_of(step))
    link.replace(folder / BEST)
    sync(folder)


def read_checkpoint(folder: Path, compiler: MemoryCompiler) -> tuple[Tensors, dict[str, Any]]:
    """Read all that training goes on from, for a backend to take in. Raises: CheckpointError."""
    weights, state = read_weights(folder, compiler)
    try:
        moments = load_file(folder / "optimizer.safetensors")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot go on training from {folder}: {error}") from error
    if strangers := {name.rsplit(":", 1)[0] for name in moments} - weights.keys():
        raise CheckpointError(f"{folder} has moments of parameters without weights: {sorted(strangers)[:3]} ...")
    return Tensors(weights, moments), state
