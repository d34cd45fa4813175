"""`memcompiler launch grpo`: a node's GPUs shared out to actors, rollout engines and executors (paper C.3.2: 4, 3, 1).

Rollout engines are `memcompiler serve compiler` and executors `memcompiler serve executor`, each on a GPU and a
loopback port of its own; the actors are one torchrun. They know each other by URLs alone, and weights go through a
folder. If one of them ends, all are ended, and the run goes on from its newest checkpoint when launched again.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from rich.console import Console

from configs.load import ConfigError, to_yaml
from configs.serving import ServeConfig
from configs.training import GrpoConfig
from runtime.network import LOOPBACK, answers, free_port, http_url
from runtime.processes import ChildProcess, ProcessError, check_alive, ended_together

console = Console(width=120)
START_S = 1800.0  # that a service may take to load its model


@dataclass(frozen=True, slots=True)
class Service:
    """A process that others find at its URL."""

    process: ChildProcess
    url: str
    ready: str  # the path that answers 200 once its model is loaded


def run_launch(config: GrpoConfig, out: Path, torchrun: str = "", on_exists: str = "resume") -> None:
    """Start all, wait for the actors, end all.

    Args:
        torchrun: further arguments of torchrun, such as those that make several nodes meet.

    Raises:
        ConfigError: more GPUs are asked for than there are, or a checkpoint is missing.
        ProcessError: a process did not start, or ended before the run did; with its last words.
    """
    place = config.placement
    if config.compiler.checkpoint is None:
        raise ConfigError("rollout engines start from compiler.checkpoint: name the SFT run")
    shares = shared_out(place.actors, place.rollouts, place.executors)
    folder = scratch_of(out) / socket.gethostname()  # of this node: all may share the file system
    folder.mkdir(parents=True, exist_ok=True)
    with ended_together() as children:
        services = []
        for start, gpus in ((_compiler, shares[1]), (_executor, shares[2])):
            for i, gpu in enumerate(gpus):
                services.append(start(config, folder, i, gpu))
                children.append(services[-1].process)
        for service in services:
            service.process.wait_until_ready(partial(answers, service.url + service.ready), START_S, children)
        settings = config.model_copy(update={
            "rollout_urls": tuple(s.url for s in services[: len(shares[1])]),
            "executor_urls": tuple(s.url for s in services[len(shares[1]) :]),
        })  # fmt: skip
        (folder / "grpo.yaml").write_text(to_yaml(settings))
        command = [
            sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={place.actors}",
            *(shlex.split(torchrun) or ["--standalone"]), "-m", "training.grpo", "--config", str(folder / "grpo.yaml"),
            "--out", str(out), "--on-exists", on_exists,
        ]  # fmt: skip
        actors = _start("actors", command, shares[0][0])
        children.append(actors)
        _wait_for(actors, children[:-1])


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


def _compiler(config: GrpoConfig, folder: Path, i: int, gpu: str) -> Service:
    serve = ServeConfig(compiler=config.compiler, adapters=str(folder.parent.resolve()), seed=config.seed)
    path = folder / "serve.yaml"
    path.write_text(to_yaml(serve))
    port = free_port()
    command = [sys.executable, "-m", "memcompiler", "serve", "compiler", "-c", str(path), "--port", str(port)]
    process = _start(f"rollout-{i}", command, gpu, folder / f"rollout-{i}.log")
    return Service(process, http_url(LOOPBACK, port), "/ready")


def _executor(config: GrpoConfig, folder: Path, i: int, gpu: str) -> Service:
    port, model = free_port(), config.executor.model
    command = [sys.executable, "-m", "memcompiler", "serve", "executor", "--model", model, "--port", str(port)]
    vllm = config.executor.vllm
    command += ["--", "--dtype", config.executor.dtype, "--gpu-memory-utilization", str(vllm.gpu_memory_utilization)]
    command += ["--max-model-len", str(vllm.max_model_len)] if vllm.max_model_len else []
    process = _start(f"executor-{i}", command, gpu, folder / f"executor-{i}.log")
    return Service(process, http_url(LOOPBACK, port), "/health")


def _start(
    name: str, command: Sequence[str], gpus: str, output: Path | Literal["terminal"] = "terminal"
) -> ChildProcess:
    env = {**os.environ, **({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {})}
    child = ChildProcess(command, name=name, env=env, output=output)
    where = f" on GPU {gpus}" if gpus else ""
    console.print(f"  {name}: process {child.pid}{where}{f', log {output}' if output != 'terminal' else ''}")
    return child


def _wait_for(actors: ChildProcess, services: Sequence[ChildProcess]) -> None:
    while actors.wait(0.5) is None:
        check_alive(services)
    if actors.status:
        raise ProcessError(f"the actors ended with status {actors.status}: see above")
