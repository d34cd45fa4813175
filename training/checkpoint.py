"""Training checkpoints, and their upload to the Hugging Face hub (whose token comes from the environment).

A checkpoint is a folder with adapter and projector (`compiler.checkpoint`) and the state to resume from:

    optimizer.safetensors   AdamW moments by parameter name
    state.json              step, seed, bank version, hashes, versions

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
    checkpoints,
    find,
    name_of,
    read_state,
    read_weights,
    save_projector,
)
from compiler.hf import MemoryCompiler
from runtime.store import read_json, sync


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
    for written in (*part.rglob("*"), part):  # to disk, before the rename
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
    """Link `folder/best` to the checkpoint of a step."""
    link = folder / f".part-{BEST}"
    link.unlink(missing_ok=True)
    link.symlink_to(name_of(step))
    link.replace(folder / BEST)
    sync(folder)


def read_checkpoint(folder: Path, compiler: MemoryCompiler) -> tuple[TrainingTensors, dict[str, Any]]:
    """Read weights, moments and state to resume from. Raises: CheckpointError."""
    weights, state = read_weights(folder, compiler)
    try:
        moments = load_file(folder / "optimizer.safetensors")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot resume training from {folder}: {error}") from error
    if unknown := {name.rsplit(":", 1)[0] for name in moments} - weights.keys():
        raise CheckpointError(f"{folder} has moments of parameters without weights: {sorted(unknown)[:3]} ...")
    return TrainingTensors(weights, moments), state


NOT_UPLOADED = ["optimizer.safetensors", "README.md"]  # needed for resuming only; written here


def model_card(checkpoint: Path) -> str:
    """Write a model card from the checkpoint's state and projector settings."""
    state = read_state(checkpoint)
    projector = read_json(checkpoint / "projector.json")
    facts = {k: v for k, v in state.items() if isinstance(v, int | float | str)}
    rows = "\n".join(f"| {name} | {value} |" for name, value in (facts | projector).items())
    return (
        "---\nlibrary_name: peft\ntags: [memcompiler, embodied-agents, memory]\n---\n\n"
        "# MemCompiler checkpoint\n\nA memory compiler: LoRA adapter (`adapter/`) and soft-token projector "
        "(`projector.safetensors`). The executor is not included; it stayed frozen, and its hash is below.\n\n"
        f"| fact | value |\n|---|---|\n{rows}\n"
    )


def push(run: Path, repo: str, private: bool = True) -> str:
    """Upload the checkpoint of a run or checkpoint folder; returns its address. Raises: CheckpointError, if there is
    none."""
    from huggingface_hub import HfApi

    checkpoint = find(run)
    api = HfApi()
    api.create_repo(repo, private=private, exist_ok=True)
    card = model_card(checkpoint).encode()
    api.upload_folder(repo_id=repo, folder_path=str(checkpoint), ignore_patterns=NOT_UPLOADED)
    api.upload_file(path_or_fileobj=card, path_in_repo="README.md", repo_id=repo)
    return f"hub:{repo}"
