"""`memcompiler launch grpo`: a node's GPUs shared out to actors, rollout engines and executors (paper C.3.2: 4, 3, 1).

Rollout engines are `memcompiler serve compiler` and executors `memcompiler serve executor`, each on a GPU and a
loopback port of its own; the actors are one torchrun. They know each other by URLs alone, and weights go through a
folder. If one of them ends, all are ended, and the run goes on from its newest checkpoint when launched again.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from configs.load import ConfigError, to_yaml
from configs.serving import ServeConfig
from configs.training import GrpoConfig
from runtime.processes import end_with_parent

console = Console(width=120)
START_S = 1800.0  # that a service may take to load its model
GRACE_S = 15.0  # between SIGTERM and SIGKILL


class LaunchError(Exception):
    """A process of the run is not there as it should be."""


@dataclass(slots=True)
class Child:
    """A process of the run, with a group of its own."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    url: str = ""

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])


def run_launch(config: GrpoConfig, out: Path, torchrun: str = "", on_exists: str = "resume") -> None:
    """Start all, wait for the actors, end all.

    Args:
        torchrun: further arguments of torchrun, such as those that make several nodes meet.

    Raises:
        ConfigError: more GPUs are asked for than there are, or a checkpoint is missing.
        LaunchError: a process did not start, or ended before the run did; with its last words.
    """
    place = config.placement
    if config.compiler.checkpoint is None:
        raise ConfigError("rollout engines start from compiler.checkpoint: name the SFT run")
    shares = shared_out(place.actors, place.rollouts, place.executors)
    folder = scratch_of(out) / socket.gethostname()  # of this node: all may share the file system
    folder.mkdir(parents=True, exist_ok=True)
    with _children() as children:
        compilers = [_compiler(config, folder, i, gpu) for i, gpu in enumerate(shares[1])]
        children += compilers
        executors = [_executor(config, folder, i, gpu) for i, gpu in enumerate(shares[2])]
        children += executors
        for child in children:
            _wait_until_ready(child, children)
        settings = config.model_copy(update={
            "rollout_urls": tuple(c.url for c in compilers), "executor_urls": tuple(c.url for c in executors)
        })  # fmt: skip
        (folder / "grpo.yaml").write_text(to_yaml(settings))
        command = [
            sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={place.actors}",
            *(shlex.split(torchrun) or ["--standalone"]), "-m", "training.grpo", "--config", str(folder / "grpo.yaml"),
            "--out", str(out), "--on-exists", on_exists,
        ]  # fmt: skip
        actors = _start("actors", command, shares[0], None)
        children.append(actors)
        _wait_for(actors, children)


def scratch_of(out: Path) -> Path:
    """Beside the run folder (which the actors make): settings, logs, and weights on their way to the services."""
    return out.with_name(f"{out.name}.launch")


def shared_out(actors: int, rollouts: int, executors: int) -> tuple[list[str], list[str], list[str]]:
    """Values of CUDA_VISIBLE_DEVICES: one for all actors, one for each engine; empty strings on machines without GPUs.

    Raises:
        ConfigError: there are GPUs, but too few.
    """
    import torch

    total = actors + rollouts + executors
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(i) for i in range(torch.cuda.device_count())] if named is None else named.split(",") if named else []
    if not gpus:
        return [""], [""] * rollouts, [""] * executors
    if len(gpus) < total:
        raise ConfigError(
            f"placement asks for {actors} + {rollouts} + {executors} GPUs and {len(gpus)} are there: set "
            "placement.actors, placement.rollouts and placement.executors"
        )
    return [",".join(gpus[:actors])], gpus[actors : actors + rollouts], gpus[actors + rollouts : total]


# ---------------------------------------------------------------------------------------------------------------------


def _compiler(config: GrpoConfig, folder: Path, i: int, gpu: str) -> Child:
    serve = ServeConfig(compiler=config.compiler, adapters=str(folder.parent.resolve()), seed=config.seed)
    path = folder / "serve.yaml"
    path.write_text(to_yaml(serve))
    port = _free_port()
    command = [sys.executable, "-m", "memcompiler", "serve", "compiler", "-c", str(path), "--port", str(port)]
    return _start(f"rollout-{i}", command, [gpu], folder / f"rollout-{i}.log", port)


def _executor(config: GrpoConfig, folder: Path, i: int, gpu: str) -> Child:
    port, model = _free_port(), config.executor.model
    command = [sys.executable, "-m", "memcompiler", "serve", "executor", "--model", model, "--port", str(port)]
    vllm = config.executor.vllm
    command += ["--", "--dtype", config.executor.dtype, "--gpu-memory-utilization", str(vllm.gpu_memory_utilization)]
    command += ["--max-model-len", str(vllm.max_model_len)] if vllm.max_model_len else []
    return _start(f"executor-{i}", command, [gpu], folder / f"executor-{i}.log", port)


def _start(name: str, command: Sequence[str], gpus: Sequence[str], log: Path | None, port: int = 0) -> Child:
    """`log`: where its words go; None for the terminal."""
    env = {**os.environ, **({"CUDA_VISIBLE_DEVICES": gpus[0]} if gpus and gpus[0] else {})}
    with contextlib.ExitStack() as stack:
        words = stack.enter_context(log.open("wb")) if log else None
        process = subprocess.Popen(
            command, env=env, stdout=words, stderr=words, start_new_session=True, preexec_fn=end_with_parent
        )
    where = f" on GPU {gpus[0]}" if gpus and gpus[0] else ""
    console.print(f"  {name}: process {process.pid}{where}{f', log {log}' if log else ''}")
    return Child(name, process, log or Path(os.devnull), f"http://127.0.0.1:{port}" if port else "")


def _wait_until_ready(child: Child, children: Sequence[Child]) -> None:
    """Services answer /ready (ours) or /health (vLLM's) once their model is loaded."""
    path = "/ready" if child.name.startswith("rollout") else "/health"
    deadline = time.monotonic() + START_S
    while True:
        _check_alive(children)
        with contextlib.suppress(OSError), urllib.request.urlopen(child.url + path, timeout=5) as answer:
            if answer.status == 200:
                return
        if time.monotonic() > deadline:
            raise LaunchError(f"{child.name} is not ready after {START_S:g} s; its last words:\n{child.tail()}")
        time.sleep(0.5)


def _wait_for(actors: Child, children: Sequence[Child]) -> None:
    services = [child for child in children if child is not actors]
    while actors.process.poll() is None:
        _check_alive(services)
        time.sleep(0.5)
    if actors.process.returncode:
        raise LaunchError(f"the actors ended with status {actors.process.returncode}: see above")


def _check_alive(children: Sequence[Child]) -> None:
    for child in children:
        if child.process.poll() is not None:
            raise LaunchError(f"{child.name} ended ({child.process.returncode}); its last words:\n{child.tail()}")


@contextlib.contextmanager
def _children() -> Iterator[list[Child]]:
    """Processes that end when this block does, whatever ends it; SIGTERM is as Ctrl-C."""
    children: list[Child] = []

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield children
    finally:
        signal.signal(signal.SIGTERM, before)
        _end(children)


def _end(children: Sequence[Child]) -> None:
    """SIGTERM to every group, then SIGKILL."""
    for number, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 5.0)):
        for child in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.process.pid, number)
        until = time.monotonic() + patience
        while any(child.process.poll() is None for child in children) and time.monotonic() < until:
            time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
