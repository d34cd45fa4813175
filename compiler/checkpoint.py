"""Finds, loads and saves checkpoints of a compiler: adapter and projector, without pickle.

    adapter/                adapter_config.json, adapter_model.safetensors (PEFT)
    projector.safetensors   projector.json holds its configuration
    state.json              the state of training (`training.checkpoint`)

The adapter's configuration (rank, alpha, dropout, targets) decides the compiler's shape. A merged checkpoint
(`training.merge`) holds the whole model instead of an adapter.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from configs.models import model_path
from runtime.checksums import RecordError, check_folder
from runtime.store import read_json
from soft_mem.projector import Projector, ProjectorConfig

if TYPE_CHECKING:  # finding a checkpoint must not import transformers and PEFT
    from peft import LoraConfig

    from compiler.hf import MemoryCompiler

HUB = "hub:"
HUB_FILES = ("*.json", "*.safetensors", "*.jinja")  # no pickle, no code
PROJECTOR_FILE, ADAPTER_CONFIG = "projector.safetensors", "adapter/adapter_config.json"
ADAPTER_WEIGHTS = "adapter/adapter_model.safetensors"
PREFIX = "step-"
BEST = "best"  # symbolic link to the checkpoint with the lowest validation loss, in runs with validation
POLICY, PROJECTOR = "policy.", "projector."  # prefixes of the compiler's parameter names
_ADAPTER = ".default."  # PEFT's name of the default adapter, which its files leave out
_LORA = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")  # settings that scale the weights


class CheckpointError(RuntimeError):
    """A checkpoint is missing, incomplete, corrupt or of another model; the message names the cause."""


def checkpoints(folder: Path) -> list[Path]:
    """List the complete checkpoints, oldest first."""
    return sorted(p for p in folder.glob(f"{PREFIX}*") if (p / "state.json").is_file()) if folder.is_dir() else []


def checkpoint_name(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"{PREFIX}{step:06d}"


def latest(folder: Path) -> Path | None:
    """Return the newest checkpoint; None without one."""
    found = checkpoints(folder)
    return found[-1] if found else None


def best(folder: Path) -> Path | None:
    """Return the checkpoint with the lowest validation loss; None without validation."""
    link = folder / BEST
    return folder / link.readlink() if link.is_symlink() and (link / "state.json").is_file() else None


def local_folder(name: str | Path) -> Path:
    """Return the folder that `name` means: a path, a shipped `zoo/...`, or `hub:ORG/NAME[@REVISION]`, which is
    downloaded from the Hugging Face Hub into its cache. Raises: CheckpointError, where the download fails."""
    if not str(name).startswith(HUB):
        return Path(model_path(str(name)))
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    repository, _, revision = str(name).removeprefix(HUB).partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=list(HUB_FILES)))
    except (OSError, HFValidationError) as error:  # HfHubHTTPError is an OSError
        raise CheckpointError(f"cannot download {name}: {str(error).strip().splitlines()[0]}") from error


def find(path: str | Path) -> Path:
    """Find the checkpoint of a folder (its own, a run's, or `checkpoints`): the best with validation, else the newest.

    Args:
        path: as in `local_folder`.

    Raises:
        CheckpointError: there is none.
    """
    path = local_folder(path)
    if (path / "state.json").is_file():
        return path
    for folder in (path, path / "checkpoints"):
        if candidate := best(folder) or latest(folder):
            return candidate
    raise CheckpointError(f"no checkpoint in {path}: expected a folder with state.json, or checkpoints/step-*")


def check_files(folder: Path) -> None:
    """Compare all files of a checkpoint with their checksums. Raises: CheckpointError, which names the file."""
    try:
        check_folder(folder)
    except (OSError, RecordError) as error:
        raise CheckpointError(f"no readable checkpoint in {folder}: {error}") from error


def is_merged(folder: Path) -> bool:
    """Return whether a checkpoint is a whole model with its projector."""
    return (folder / "config.json").is_file()


def run_file(path: Path, name: str) -> Path | None:
    """Find a file in a run folder, given the folder or one of its checkpoints; None without it."""
    folders = (path, *path.resolve().parents[:2])
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def sha256(folder: Path) -> str:
    """Hash names and bytes of adapter and projector, or of a merged model."""
    digest = hashlib.sha256()
    added = [*(folder / "adapter").glob("adapter_*"), *folder.glob("projector.*"), *folder.glob("model*.safetensors")]
    for path in sorted(added):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def read_state(folder: Path) -> dict[str, Any]:
    """Read the state of training. Raises: CheckpointError."""
    try:
        return read_json(folder / "state.json")
    except (OSError, RecordError) as error:
        raise CheckpointError(f"no readable checkpoint in {folder}: {error}") from error


def executor_inputs(folder: Path) -> dict[str, Any] | None:
    """Return what the executor read in training (`ExecutorConfig.reading`); None if it was not recorded."""
    return read_state(folder).get("executor_reads")


def compiler_inputs(folder: Path) -> dict[str, Any] | None:
    """Return what the compiler read in training (`CompilerConfig.reading`); None if it was not recorded."""
    return read_state(folder).get("compiler_reads")


def writes_text(folder: Path) -> bool:
    """Return whether a checkpoint's compiler was trained to write text beside its soft tokens."""
    return read_state(folder).get("text", True)


def environments(folder: Path) -> tuple[str, ...]:
    """Return the names of the training environments; () if they were not recorded."""
    state = read_state(folder)
    if several := state.get("environments"):
        return tuple(several)
    return (state["environment"],) if state.get("environment") else ()


def environment_facts(names: Sequence[str]) -> dict[str, Any]:
    """Return the entry of a checkpoint's state that names its training environments."""
    return {"environment": names[0]} if len(names) == 1 else {"environments": list(names)}


def trained_parameters(compiler: MemoryCompiler) -> dict[str, nn.Parameter]:
    """Return the parameters of LoRA and projector by name (the projector also if its loss is off)."""
    return {n: p for n, p in compiler.named_parameters() if p.requires_grad or n.startswith(PROJECTOR)}


def save_weights(folder: Path, compiler: MemoryCompiler) -> None:
    """Write adapter and projector of an unsharded compiler into a folder, without a state of training."""
    save_adapter(folder, compiler)
    save_projector(folder, compiler.projector.config, compiler.projector.state_dict())
    (folder / "state.json").write_text("{}")


def save_adapter(folder: Path, compiler: MemoryCompiler, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write the adapter, by default with its own weights; equal adapters give equal bytes."""
    compiler.policy.save_pretrained(
        folder / "adapter", state_dict=weights, safe_serialization=True, save_embedding_layers=False
    )
    settings = read_json(folder / ADAPTER_CONFIG)
    for name in ("target_modules", "exclude_modules"):  # sets in PEFT, whose order differs between processes
        if isinstance(settings.get(name), list):
            settings[name] = sorted(settings[name])
    (folder / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True))


def save_projector(folder: Path, config: ProjectorConfig, weights: Mapping[str, Tensor]) -> None:
    """Write a projector's weights and configuration."""
    save_file({name: w.contiguous() for name, w in weights.items()}, folder / PROJECTOR_FILE)
    (folder / "projector.json").write_text(json.dumps(asdict(config), indent=1))


def load_projector(folder: Path) -> Projector:
    """Load a checkpoint's projector. Raises: CheckpointError."""
    try:
        check_folder(folder, PROJECTOR_FILE)
        projector = Projector(ProjectorConfig(**read_json(folder / "projector.json")))
        projector.load_state_dict(load_file(folder / PROJECTOR_FILE))
    except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"no readable projector in {folder}: {error}") from error
    return projector


def lora_config(folder: Path) -> LoraConfig:
    """Read the adapter's configuration, ready for training. Raises: CheckpointError."""
    from peft import LoraConfig

    path = folder / ADAPTER_CONFIG
    try:
        check_folder(folder, ADAPTER_CONFIG)
        settings = read_json(path)
        if settings.get("peft_type") != "LORA":
            raise ValueError(f"an adapter of type {settings.get('peft_type')}, not LORA")
        config = LoraConfig.from_pretrained(str(path.parent))
        assert isinstance(config, LoraConfig)  # follows from peft_type
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"no readable adapter in {folder}: {error}") from error
    config.inference_mode = False  # otherwise PEFT freezes the weights
    return config


def load(folder: Path, compiler: MemoryCompiler) -> dict[str, Any]:
    """Load adapter and projector into an unsharded compiler of the same shape; return the state of training. Raises:
    CheckpointError, for missing or corrupt files, or weights that do not fit."""
    weights, state = read_weights(folder, compiler)
    copy_weights(compiler, weights)
    return state


@torch.no_grad()
def copy_weights(compiler: MemoryCompiler, weights: Mapping[str, Tensor]) -> None:
    """Copy weights by name into an unsharded compiler."""
    for name, parameter in trained_parameters(compiler).items():
        parameter.copy_(weights[name])


def read_weights(folder: Path, compiler: MemoryCompiler) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read weights by parameter name, and the state of training. Raises: as `load`."""
    try:
        check_folder(folder, ADAPTER_WEIGHTS)
        adapter = load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, RecordError, SafetensorError) as error:
        raise CheckpointError(f"cannot load the checkpoint {folder}: {error}") from error
    state = read_state(folder)
    _check_scaling(folder, compiler)
    saved = {f"{PROJECTOR}{name}": w for name, w in load_projector(folder).state_dict().items()} | adapter
    expected = trained_parameters(compiler)
    files = {name: name.removeprefix(POLICY).replace(_ADAPTER, ".") for name in expected}
    if missing := [file for file in files.values() if file not in saved]:
        raise CheckpointError(f"{folder} is of another model: it lacks {missing[:3]} ...")
    if unknown := sorted(saved.keys() - set(files.values())):
        raise CheckpointError(f"{folder} is of another model: it has {unknown[:3]} ...")
    for name, parameter in expected.items():
        shape = getattr(parameter, "ds_shape", parameter.shape)  # ds_shape: of a ZeRO-3 shard
        found = saved[files[name]].shape
        if shape != found:
            raise CheckpointError(f"{folder} is of another model: {name} is {tuple(found)}, not {tuple(shape)}")
    return {name: saved[file] for name, file in files.items()}, state


def _check_scaling(folder: Path, compiler: MemoryCompiler) -> None:
    """Refuse an adapter that the compiler would scale differently."""
    config = getattr(compiler.policy, "peft_config", {}).get("default")
    if config is None:
        return
    theirs = lora_config(folder)
    for name in _LORA:
        if getattr(theirs, name) != getattr(config, name):
            raise CheckpointError(
                f"{folder} has an adapter with {name} = {getattr(theirs, name)}, the compiler has "
                f"{getattr(config, name)}: create the compiler from the checkpoint"
            )
