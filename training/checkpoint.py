"""One checkpoint = one folder: adapter (PEFT format), projector, optimiser, cursor. No pickle anywhere.

    adapter/                adapter_config.json, adapter_model.safetensors (PEFT)
    projector.safetensors   projector.json holds its configuration
    optimizer.safetensors   AdamW moments by parameter name
    state.json              step, cursor, seed, bank version, hashes, versions

Random numbers need no state: every draw of a step is seeded by (seed, step). A checkpoint is written beside its final
place and renamed, so a folder that bears the name of a checkpoint is whole, whenever the process was killed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from compiler.hf import MemoryCompiler
from runtime.store import sync
from soft_mem.projector import Projector, ProjectorConfig

PREFIX = "step-"
_POLICY, _PROJECTOR = "policy.", "projector."  # of the compiler's parameter names
_ADAPTER = ".default."  # PEFT's name for an only adapter, left out in its files


class CheckpointError(RuntimeError):
    """A checkpoint that is missing, incomplete, corrupt or made for another model; the message says which."""


@dataclass(frozen=True, slots=True)
class Tensors:
    """What training changes, whole and on the CPU, under the names of the compiler's parameters."""

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]  # AdamW's, as "<parameter>:<key>"


def trained_parameters(compiler: MemoryCompiler) -> dict[str, nn.Parameter]:
    """LoRA and projector by name (the projector also where its loss is off: a checkpoint always has it)."""
    return {n: p for n, p in compiler.named_parameters() if p.requires_grad or n.startswith(_PROJECTOR)}


def save(folder: Path, compiler: MemoryCompiler, tensors: Tensors, state: Mapping[str, Any], keep: int = 0) -> Path:
    """Write `folder/step-NNNNNN` atomically; with keep > 0 older ones beyond that number go.

    The compiler says what the files look like; what is in them comes from `tensors`, for its own may be in slices.
    """
    final = folder / f"{PREFIX}{int(state['step']):06d}"
    part = folder / f".part-{final.name}"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    adapter = {n.removeprefix(_POLICY): t for n, t in tensors.weights.items() if n.startswith(_POLICY)}
    compiler.policy.save_pretrained(part / "adapter", state_dict=adapter, save_embedding_layers=False)
    projector = {n.removeprefix(_PROJECTOR): t for n, t in tensors.weights.items() if n.startswith(_PROJECTOR)}
    save_projector(part, compiler.projector.config, projector)
    save_file(tensors.moments, part / "optimizer.safetensors")
    (part / "state.json").write_text(json.dumps(dict(state), indent=1))
    for written in (*part.rglob("*"), part):  # before the rename makes it visible
        sync(written)
    shutil.rmtree(final, ignore_errors=True)
    part.replace(final)
    sync(folder)
    if keep:
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    return final


def save_weights(folder: Path, compiler: MemoryCompiler) -> None:
    """Adapter and projector of a whole compiler into an existing folder, for `load`: nothing to go on training from."""
    compiler.policy.save_pretrained(folder / "adapter", safe_serialization=True, save_embedding_layers=False)
    save_projector(folder, compiler.projector.config, compiler.projector.state_dict())
    (folder / "state.json").write_text("{}")


def save_projector(folder: Path, config: ProjectorConfig, weights: Mapping[str, Tensor]) -> None:
    save_file({name: w.contiguous() for name, w in weights.items()}, folder / "projector.safetensors")
    (folder / "projector.json").write_text(json.dumps(asdict(config), indent=1))


def load_projector(folder: Path) -> Projector:
    """Raises: CheckpointError."""
    try:
        projector = Projector(ProjectorConfig(**json.loads((folder / "projector.json").read_text())))
        projector.load_state_dict(load_file(folder / "projector.safetensors"))
    except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"no readable projector in {folder}: {error}") from error
    return projector


def load(folder: Path, compiler: MemoryCompiler) -> dict[str, Any]:
    """Adapter and projector of a checkpoint into a (whole) compiler of the same shape; returns its state.

    Raises:
        CheckpointError: missing or corrupt files, or weights that do not fit the model.
    """
    weights, state = _read(folder, compiler)
    put(compiler, weights)
    return state


def read(folder: Path, compiler: MemoryCompiler) -> tuple[Tensors, dict[str, Any]]:
    """All that training goes on from, for a backend to take in.

    Raises:
        CheckpointError: as `load`.
    """
    weights, state = _read(folder, compiler)
    try:
        moments = load_file(folder / "optimizer.safetensors")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot go on training from {folder}: {error}") from error
    if strangers := {name.rsplit(":", 1)[0] for name in moments} - weights.keys():
        raise CheckpointError(f"{folder} has moments of parameters without weights: {sorted(strangers)[:3]} ...")
    return Tensors(weights, moments), state


@torch.no_grad()
def put(compiler: MemoryCompiler, weights: Mapping[str, Tensor]) -> None:
    """Weights by name into a whole compiler."""
    for name, parameter in trained_parameters(compiler).items():
        parameter.copy_(weights[name])


def _read(folder: Path, compiler: MemoryCompiler) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        adapter = load_file(folder / "adapter" / "adapter_model.safetensors")
        state = json.loads((folder / "state.json").read_text())
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"cannot load the checkpoint {folder}: {error}") from error
    saved = {f"{_PROJECTOR}{name}": w for name, w in load_projector(folder).state_dict().items()} | adapter
    expected = trained_parameters(compiler)
    files = {name: name.removeprefix(_POLICY).replace(_ADAPTER, ".") for name in expected}
    if missing := [file for file in files.values() if file not in saved]:
        raise CheckpointError(f"{folder} was made for another model: it lacks {missing[:3]} ...")
    if strangers := sorted(saved.keys() - set(files.values())):
        raise CheckpointError(f"{folder} was made for another model: it has {strangers[:3]} ...")
    for name, parameter in expected.items():
        shape, found = getattr(parameter, "ds_shape", parameter.shape), saved[files[name]].shape  # ds: ZeRO-3's slices
        if shape != found:
            raise CheckpointError(f"{folder} was made for another model: {name} is {tuple(found)}, not {tuple(shape)}")
    return {name: saved[file] for name, file in files.items()}, state


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(p for p in folder.glob(f"{PREFIX}*") if (p / "state.json").is_file()) if folder.is_dir() else []


def latest(folder: Path) -> Path | None:
    found = checkpoints(folder)
    return found[-1] if found else None


def find(path: Path) -> Path:
    """A checkpoint from a checkpoint folder, a run folder or its `checkpoints` folder.

    Raises:
        CheckpointError: there is none.
    """
    for candidate in (path if (path / "state.json").is_file() else None, latest(path), latest(path / "checkpoints")):
        if candidate is not None:
            return candidate
    raise CheckpointError(f"no checkpoint in {path}: expected a folder with state.json, or checkpoints/step-*")


def sha256(folder: Path) -> str:
    """Over names and bytes of what a checkpoint adds to its base: adapter and projector."""
    digest = hashlib.sha256()
    for path in sorted([*(folder / "adapter").glob("adapter_*"), *folder.glob("projector.*")]):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
