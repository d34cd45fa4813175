"""Merge a trained compiler's adapter into its base.

The result is a Hugging Face model and a checkpoint in one folder: `compiler.checkpoint=OUT` needs no `compiler.model`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors import safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from compiler import checkpoint
from compiler.build import load_compiler
from compiler.gate import copy_gate
from configs.load import load_config, read_yaml
from configs.models import CompilerConfig
from configs.run_folder import CONFIG
from data_gen.leakage import MANIFEST, file_of
from runtime.checksums import record_folder
from runtime.store import atomic_folder

OF_BASE = ("model", "revision", "dtype", "memory_token")  # settings that identify the base


def merge(run: Path, out: Path, overrides: Sequence[str] = ()) -> Path:
    """Merge the checkpoint of a run or checkpoint folder, and write the result to `out` atomically.

    Args:
        overrides: Settings of the compiler as a.b=c, over the run's; a checkpoint without its run names its base only.

    Raises:
        CheckpointError: There is no checkpoint, it does not fit the base, or it is already merged.
        FileExistsError: `out` exists.
    """
    found = checkpoint.find(run).resolve()
    if checkpoint.is_merged(found):
        raise checkpoint.CheckpointError(f"{found} is already merged")
    config = load_config(CompilerConfig, None, [*_base(found), *overrides, f"checkpoint={json.dumps(str(found))}"])
    with atomic_folder(out) as folder:
        compiler = load_compiler(config, None)
        compiler.policy.merge_and_unload(safe_merge=True).save_pretrained(folder)
        _index_weights(folder)
        compiler.backbone.processor.save_pretrained(folder)
        checkpoint.save_projector(folder, compiler.projector.config, compiler.projector.state_dict())
        state = checkpoint.read_state(found) | {"merged": {"base": config.model, "sha256": checkpoint.sha256(found)}}
        (folder / "state.json").write_text(json.dumps(state, indent=1))
        for name in ("", *checkpoint.environments(found)):  # training tasks, for later leakage checks
            if (manifest := checkpoint.run_file(found, file_of(MANIFEST, name))) is not None:
                shutil.copy(manifest, folder)
        record_folder(folder)
        copy_gate(str(found), folder)
    return out


def _index_weights(folder: Path) -> None:
    """Write the index of the model's weights where they are one file: without it, vLLM takes every safetensors file of
    the folder for the model's, the projector and the gate too."""
    whole = folder / SAFE_WEIGHTS_NAME
    if whole.exists():
        with safe_open(whole, "pt") as weights:
            places = dict.fromkeys(weights.keys(), whole.name)
        index = {"metadata": {"total_size": whole.stat().st_size}, "weight_map": places}
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=1))


def _base(found: Path) -> list[str]:
    """Return settings of the base from the run, or its name from the adapter."""
    path = checkpoint.run_file(found, CONFIG)
    if path is None:
        return [f"model={json.dumps(checkpoint.lora_config(found).base_model_name_or_path)}"]
    settings = read_yaml(path).get("compiler", {})
    return [f"{name}={json.dumps(settings[name])}" for name in OF_BASE if name in settings]
