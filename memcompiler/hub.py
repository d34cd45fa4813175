"""Trained compilers by name, and their repositories on the Hugging Face Hub (whose token comes from the environment).

A repository holds a checkpoint (adapter and projector, or a merged model), the compile gate where there is one,
models.json with the settings of both models, and a model card with the run's results. Nothing in it is pickled.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compiler import checkpoint
from compiler.checkpoint import HUB, HUB_FILES, CheckpointError, local_folder, run_file
from compiler.gate import load_gate
from configs.evaluation import EvalConfig
from configs.load import ConfigError, load_config, read_yaml
from configs.models import CompilerConfig, ExecutorConfig
from configs.run_folder import CONFIG
from eval.runs import RESULTS
from eval.table import interval, markdown_table
from runtime.store import RecordError, read_json, to_json

MODELS = "models.json"
SHIPPED = {
    "zoo/alfworld": ("eval/alfworld",),
    "zoo/household": ("eval/quickstart", "compiler.checkpoint=null"),
}
# The settings that a repository may set. Others (endpoints, keys, devices, paths) belong to the user's machine.
_BOTH = {
    "model",
    "revision",
    "dtype",
    "chat_template",
    "memory_token",
    "instructions",
    "max_new_tokens",
}
_SHARED = {
    "compiler": _BOTH | {"soft"},
    "executor": _BOTH | {"mode", "images"} | set(ExecutorConfig().reading),
}
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def model_settings(name: str | Path, overrides: Sequence[str] = (), revision: str | None = None) -> EvalConfig:
    """Return the settings of compiler, executor and environment for a run or checkpoint folder, a shipped name, or a
    Hub repository. Raises: ConfigError or CheckpointError."""
    if str(name) in SHIPPED:
        config, *own = SHIPPED[str(name)]
        return load_config(EvalConfig, config, [*own, *overrides])
    folder = _folder(str(name), revision)
    if (folder / MODELS).is_file():
        settings = _shared_settings(folder / MODELS)
        found = folder
    else:
        found = checkpoint.find(folder)
        settings = _run_settings(found)
    settings["compiler"]["checkpoint"] = str(found)
    given = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return load_config(EvalConfig, None, [*given, *overrides])


def _folder(name: str, revision: str | None) -> Path:
    """Return the folder of a run or checkpoint, or of a Hub repository where there is no folder of that name."""
    if Path(name).exists() or name.startswith("zoo/") or not _REPOSITORY.fullmatch(name.removeprefix(HUB)):
        return local_folder(name)
    try:
        return local_folder(HUB + name.removeprefix(HUB) + (f"@{revision}" if revision else ""))
    except CheckpointError as error:
        raise CheckpointError(f"{name} is neither a folder nor a Hub repository that can be read: {error}") from error


def _run_settings(found: Path) -> dict[str, Any]:
    """Read the model settings of the run that a checkpoint belongs to."""
    path = run_file(found, CONFIG)
    tree = read_yaml(path) if path is not None else {}
    if not {"compiler", "executor"} <= tree.keys():
        raise ConfigError(f"{found}: no {CONFIG} of a training run beside it names compiler and executor")
    return {"compiler": dict(tree["compiler"]), "executor": tree["executor"]} | _environment(found)


def _environment(found: Path) -> dict[str, str]:
    names = checkpoint.environments(found)
    return {"env": names[0]} if names else {}


def _shared_settings(path: Path) -> dict[str, Any]:
    """Read models.json. Raises: ConfigError, for a setting that a repository must not set."""
    try:
        settings = read_json(path)
        strange = [f"{role}.{key}" for role, allowed in _SHARED.items() for key in settings[role].keys() - allowed]
    except (OSError, RecordError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path}: no settings of compiler and executor ({error!r})") from error
    if strange := sorted([*strange, *(settings.keys() - {*_SHARED, "env"})]):
        raise ConfigError(f"{path} sets what a repository must not set: {', '.join(strange)}")
    return settings


# -- push -------------------------------------------------------------------------------------------------------------


def push(run: str | Path, repository: str, private: bool = True, overrides: Sequence[str] = ()) -> str:
    """Upload a trained compiler, and return its name for `compiler.checkpoint` and `mc.load`.

    Args:
        run: a run or checkpoint folder, or a shipped name.
        repository: ORG/NAME, which is created where it does not exist.
        overrides: settings over the run's, as `executor.model=ORG/NAME` for a base that was a local folder.

    Raises:
        CheckpointError: the run has no checkpoint.
        ConfigError: the settings are missing, or name a model that only this machine has.
    """
    from huggingface_hub import HfApi

    config = model_settings(run, overrides)
    if config.compiler.checkpoint is None:
        raise CheckpointError(f"{run} has no checkpoint: nothing was trained")
    found = checkpoint.find(config.compiler.checkpoint)
    settings = shared_settings(config, merged=checkpoint.is_merged(found))
    with tempfile.TemporaryDirectory(prefix="memcompiler-push-") as name:
        folder = Path(name)
        _copy_checkpoint(found, folder, settings["compiler"].get("model"))
        if (gate := load_gate(str(found))) is not None:
            gate.save(folder)
        (folder / MODELS).write_text(to_json(settings, indent=2), encoding="utf-8")
        (folder / "README.md").write_text(model_card(found, settings, _results(Path(run))), encoding="utf-8")
        api = HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload a memory compiler")
    return f"{HUB}{repository}"


def shared_settings(config: EvalConfig, merged: bool) -> dict[str, Any]:
    """Return what models.json holds of the settings. Raises: ConfigError, for a model in a local folder."""
    settings: dict[str, Any] = {"env": config.env.name}
    models: Mapping[str, CompilerConfig | ExecutorConfig] = {"compiler": config.compiler, "executor": config.executor}
    for role, of in models.items():
        settings[role] = of.model_dump(mode="json", include=_SHARED[role])
        is_local = Path(of.model).exists() or Path(of.model).is_absolute()
        if role == "compiler" and merged:
            del settings[role]["model"], settings[role]["revision"]  # the repository holds the model
        elif is_local and not of.model.startswith("zoo/"):
            raise ConfigError(
                f"{role}.model is a local folder, which readers of the repository lack: upload it and push with "
                f"{role}.model=ORG/NAME"
            )
    return settings


def _copy_checkpoint(found: Path, folder: Path, base: str | None) -> None:
    """Copy what loading reads: no optimizer state, and no path of this machine; `base` is the adapter's model."""
    for pattern in HUB_FILES:
        for file in found.rglob(pattern):
            if file.name != "optimizer.safetensors" and (file.parent == found or file.parent.name == "adapter"):
                copy = folder / file.relative_to(found)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, copy)
    (folder / "state.json").write_text(to_json(_public_state(found), indent=1), encoding="utf-8")
    if (adapter := folder / "adapter" / "adapter_config.json").is_file():
        settings = {**read_json(adapter), "base_model_name_or_path": base}
        adapter.write_text(to_json(settings, indent=2), encoding="utf-8")


def _public_state(found: Path) -> dict[str, Any]:
    """Return the records of a checkpoint that hold no path of this machine."""
    is_path = lambda value: isinstance(value, str) and Path(value).is_absolute()
    return {name: value for name, value in checkpoint.read_state(found).items() if not is_path(value)}


def _results(run: Path) -> dict[str, Any]:
    """Read the evaluation in the run folder, or in its parent for a stage of the quickstart; {} where there is none."""
    path = next((folder / RESULTS for folder in (run, run.resolve().parent) if (folder / RESULTS).is_file()), None)
    return read_json(path) if path is not None else {}


def model_card(found: Path, settings: Mapping[str, Any], results: Mapping[str, Any]) -> str:
    """Write the model card: how to load it, the evaluation, and the records of the checkpoint."""
    facts = {name: value for name, value in _public_state(found).items() if isinstance(value, int | float | str)}
    facts |= read_json(found / "projector.json")
    models = {role: settings[role].get("model", "merged, in this repository") for role in _SHARED}
    facts = {"environment": settings["env"]} | models | facts
    table = "\n".join(markdown_table(["fact", "value"], [[name, str(value)] for name, value in facts.items()], left=2))
    return (
        "---\nlibrary_name: peft\ntags: [memcompiler, embodied-agents, memory]\n---\n\n"
        "# MemCompiler checkpoint\n\n"
        "A memory compiler: it reads the agent's state and memory, and writes text guidance and soft tokens for a "
        "frozen executor. The executor is not in this repository.\n\n"
        '```python\nimport memcompiler as mc\n\ncompiler, executor = mc.load("ORG/NAME")  # this repository\n```\n'
        f"{_results_table(results)}\n## Training\n\n{table}\n"
    )


def _results_table(results: Mapping[str, Any]) -> str:
    if not results.get("results"):
        return ""
    where = " ".join(str(results[key]) for key in ("environment", "split") if results.get(key))
    success = {name: of["success"] for name, of in results["results"].items()}
    rows = [[name, interval(of, unit=" %"), str(of["n"])] for name, of in success.items()]
    table = "\n".join(markdown_table(["delivery", "success [95 % interval]", "episodes"], rows))
    return f"\n## Results on {where}\n\n{table}\n"
