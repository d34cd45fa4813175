"""One checkpoint = one folder: adapter (PEFT format), projector, optimiser, cursor. No pickle anywhere.

    adapter/                adapter_config.json, adapter_model.safetensors (PEFT)
    projector.safetensors   projector.json holds its configuration
    optimizer.safetensors   AdamW moments by parameter name
    state.json              step, cursor, seed, bank version, hashes, versions

Random numbers need no state: every draw of a step is seeded by (seed, step). A checkpoint is written beside its final
place and renamed, so a folder that bears the name of a checkpoint is whole, whenever the process was killed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from compiler.model import MemoryCompiler
from soft_mem.projector import Projector, ProjectorConfig

PREFIX = "step-"


class CheckpointError(RuntimeError):
    """A checkpoint that is missing, incomplete, corrupt or made for another model; the message says which."""


def save(
    folder: Path,
    compiler: MemoryCompiler,
    optimizer: torch.optim.Optimizer | None,
    state: Mapping[str, Any],
    keep: int = 0,
) -> Path:
    """Write `folder/step-NNNNNN` atomically; with keep > 0 older ones beyond that number go."""
    final = folder / f"{PREFIX}{int(state['step']):06d}"
    part = folder / f".part-{final.name}"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    compiler.policy.save_pretrained(part / "adapter", safe_serialization=True, save_embedding_layers=False)
    save_projector(part, compiler.projector)
    if optimizer is not None:
        save_file(_moments(compiler, optimizer), part / "optimizer.safetensors")
    (part / "state.json").write_text(json.dumps(dict(state), indent=1))
    _sync(part)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(part, final)
    if keep:
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    return final


def save_projector(folder: Path, projector: Projector) -> None:
    save_file(
        {k: v.detach().cpu().contiguous() for k, v in projector.state_dict().items()}, folder / "projector.safetensors"
    )
    (folder / "projector.json").write_text(json.dumps(asdict(projector.config), indent=1))


def load_projector(folder: Path) -> Projector:
    """Raises: CheckpointError."""
    try:
        projector = Projector(ProjectorConfig(**json.loads((folder / "projector.json").read_text())))
        projector.load_state_dict(load_file(folder / "projector.safetensors"))
    except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"no readable projector in {folder}: {error}") from error
    return projector


def load(folder: Path, compiler: MemoryCompiler, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Adapter, projector and (if given) optimiser of a checkpoint into a compiler of the same shape; returns its state.

    Raises:
        CheckpointError: missing or corrupt files, or weights that do not fit the model.
    """
    try:
        result = set_peft_model_state_dict(compiler.policy, load_peft_weights(str(folder / "adapter"), device="cpu"))
        if result.unexpected_keys:
            raise CheckpointError(f"{folder} was made for another model: it has {result.unexpected_keys[:3]} ...")
        missing = [
            k
            for k in get_peft_model_state_dict(compiler.policy)
            if k not in load_file(folder / "adapter" / "adapter_model.safetensors")
        ]
        if missing:
            raise CheckpointError(f"{folder} was made for another model: it lacks {missing[:3]} ...")
        compiler.projector.load_state_dict(load_projector(folder).state_dict())
        if optimizer is not None:
            _restore_moments(compiler, optimizer, load_file(folder / "optimizer.safetensors"))
        return json.loads((folder / "state.json").read_text())
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"cannot load the checkpoint {folder}: {error}") from error


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


def _moments(compiler: MemoryCompiler, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    names = {id(p): n for n, p in compiler.named_parameters()}
    return {
        f"{names[id(p)]}:{key}": torch.as_tensor(value).detach().cpu().contiguous()
        for p, values in optimizer.state.items()
        for key, value in values.items()
    }


def _restore_moments(compiler: MemoryCompiler, optimizer: torch.optim.Optimizer, saved: dict[str, Tensor]) -> None:
    parameters = dict(compiler.named_parameters())
    for name, value in saved.items():
        parameter, key = name.rsplit(":", 1)
        target = parameters[parameter]
        optimizer.state[target][key] = value if key == "step" else value.to(target.device, target.dtype)


def _sync(folder: Path) -> None:
    """Flush to disk before the rename makes it visible."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
