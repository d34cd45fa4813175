"""Training checkpoints: one folder each, with adapter, projector and the state to resume from.

    optimizer.safetensors   AdamW moments by parameter name
    state.json              step, seed, bank version, hashes, versions
    SHA256SUMS              checksums of these files, which are checked when they are read (`runtime.checksums`)

Random numbers need no state: every step seeds them from (seed, step). A checkpoint is written under another name
and renamed, so a kill never leaves an incomplete one.
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
    checkpoint_name,
    checkpoints,
    read_weights,
    save_adapter,
    save_projector,
)
from compiler.hf import MemoryCompiler
from runtime.checksums import RecordError, check_folder, record_folder
from runtime.store import sync

OPTIMIZER = "optimizer.safetensors"


@dataclass(frozen=True, slots=True)
class TrainingTensors:
    """Trained weights and AdamW's moments, unsliced on the CPU, by the compiler's parameter names."""

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]  # by "<parameter>:<key>"


def save_checkpoint(
    folder: Path,
    compiler: MemoryCompiler,
    tensors: TrainingTensors,
    state: Mapping[str, Any],
    keep: int = 0,
    best: int = 0,
) -> Path:
    """Write `folder/step-NNNNNN` atomically.

    Args:
        compiler: Supplies the files' settings; its own weights may be in slices.
        keep: Delete older checkpoints beyond this number (0: none), except the best.
        best: Step of the best checkpoint; 0 if there is none.
    """
    final = folder / checkpoint_name(state["step"])
    part = folder / f".part-{final.name}"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    adapter = {n.removeprefix(POLICY): t for n, t in tensors.weights.items() if n.startswith(POLICY)}
    save_adapter(part, compiler, adapter)
    projector = {n.removeprefix(PROJECTOR): t for n, t in tensors.weights.items() if n.startswith(PROJECTOR)}
    save_projector(part, compiler.projector.config, projector)
    save_file(tensors.moments, part / OPTIMIZER)
    (part / "state.json").write_text(json.dumps(dict(state), indent=1))
    record_folder(part)
    for written in (*part.rglob("*"), part):  # to disk, before the rename
        sync(written)
    shutil.rmtree(final, ignore_errors=True)
    part.replace(final)
    sync(folder)
    if best:
        mark_best(folder, best)
    if keep:
        for old in checkpoints(folder)[:-keep]:
            if old.name != checkpoint_name(best):
                shutil.rmtree(old)
    return final


def mark_best(folder: Path, step: int) -> None:
    """Link `folder/best` to the checkpoint of a step."""
    link = folder / f".part-{BEST}"
    link.unlink(missing_ok=True)
    link.symlink_to(checkpoint_name(step))
    link.replace(folder / BEST)
    sync(folder)


def read_checkpoint(folder: Path, compiler: MemoryCompiler) -> tuple[TrainingTensors, dict[str, Any]]:
    """Read weights, moments and state to resume from. Raises: CheckpointError."""
    weights, state = read_weights(folder, compiler)
    try:
        check_folder(folder, OPTIMIZER)
        moments = load_file(folder / OPTIMIZER)
    except (OSError, RecordError, SafetensorError) as error:
        raise CheckpointError(f"cannot resume training from {folder}: {error}") from error
    if unknown := {name.rsplit(":", 1)[0] for name in moments} - weights.keys():
        raise CheckpointError(f"{folder} has moments of parameters without weights: {sorted(unknown)[:3]} ...")
    return TrainingTensors(weights, moments), state
