"""A node's GPUs shared out to actors, rollout engines and executors (paper C.3.2: 4, 3, 1): `memcompiler launch grpo`.

Rollout engines are `memcompiler serve compiler` and executors `memcompiler serve executor`, each on a GPU and a
loopback port of its own; the actors are one torchrun. They know each other by URLs alone, and weights go through a
folder. If one of them ends, all are ended, and the run goes on from its newest checkpoint when launched again.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from configs.load import ConfigError, to_yaml
from configs.models import ServeConfig, VllmEngine
from configs.training import GrpoConfig
from lm.vllm import pinned
from runtime.http import LOOPBACK, answers, free_port, http_url
from runtime.processes import ChildProcess, ProcessError, check_alive, ended_together

console = Console(width=120)
START_S = 1800.0  # that a service may take to load its model
_OURS = (sys.executable, "-m", "memcompiler")


def launch_grpo(config: GrpoConfig, out: Path, torchrun: str = "", on_exists: str = "resume") -> None:
    """Start all, wait for the actors, end all. `torchrun`: further arguments of it, which make several nodes meet.

    Raises:
        ConfigError: more GPUs are asked for than there are, rollouts on GPUs without vLLM, or a checkpoint is missing.
        ProcessError: a process did not start, or ended before the run did; with its last words.
    """
    place = config.placement
    if config.compiler.checkpoint is None:
        raise ConfigError("rollout engines start from compiler.checkpoint: name the SFT run")
    actor_gpus, rollout_gpus, executor_gpus = shared_out(place.actors, place.rollouts, place.executors)
    if any(rollout_gpus) and config.compiler.engine != "vllm":
        raise ConfigError(
            "rollout services on GPUs run in vLLM, which decodes many times as fast as plain PyTorch: set "
            "compiler.engine=vllm (extra vllm), or placement.rollouts=0 to have the actors roll out"
        )
    folder = scratch_of(out) / socket.gethostname()  # of this node: all may share the file system
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "serve.yaml").write_text(to_yaml(compiler_service(config, folder.parent, any(rollout_gpus))))
    with ended_together() as children:

        def start(name: str, command: Callable[[int], list[str]], gpu: str) -> str:
            port = free_port()
            children.append(_start(name, command(port), gpu, folder / f"{name}.log"))
            return http_url(LOOPBACK, port)

        compiler, executor = partial(compiler_command, folder), partial(executor_command, config, any(executor_gpus))
        rollout_urls = tuple(start(f"rollout-{i}", compiler, gpu) for i, gpu in enumerate(rollout_gpus))
        executor_urls = tuple(start(f"executor-{i}", executor, gpu) for i, gpu in enumerate(executor_gpus))
        ready = [*(f"{url}/ready" for url in rollout_urls), *(f"{url}/health" for url in executor_urls)]
        for child, url in zip(tuple(children), ready, strict=True):  # answers 200 once its model is loaded
            child.wait_until_ready(partial(answers, url), START_S, children)
        settings = config.model_copy(update={"rollout_urls": rollout_urls, "executor_urls": executor_urls})
        (folder / "grpo.yaml").write_text(to_yaml(settings))
        command = [*torchrun_command(place.actors, torchrun), "-m", "memcompiler", "train", "grpo"]
        command += ["--config", str(folder / "grpo.yaml"), "--out", str(out), "--on-exists", on_exists]
        actors = _start("actors", command, actor_gpus[0])
        children.append(actors)
        while actors.wait(0.5) is None:
            check_alive(children[:-1])
    if actors.status:
        raise ProcessError(f"the actors ended with status {actors.status}: see above")


def scratch_of(out: Path) -> Path:
    """Beside the run folder (which the actors make): settings, logs, and weights on their way to the services."""
    return out.with_name(f"{out.name}.launch")


def shared_out(actors: int, rollouts: int, executors: int) -> tuple[list[str], list[str], list[str]]:
    """Share CUDA_VISIBLE_DEVICES out: one value for all actors, one for each engine; empty strings without GPUs.

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


def compiler_service(config: GrpoConfig, adapters: Path, own_gpu: bool) -> ServeConfig:
    """Make settings of a service that rolls out, with weights from under `adapters`. A request has the time that its
    client, the actor, gives it."""
    compiler = config.compiler.model_copy(update={"vllm": engine_of(config.compiler.vllm, own_gpu)})
    folder, timeout = str(adapters.resolve()), config.compiler.timeout_s
    return ServeConfig(compiler=compiler, adapters=folder, seed=config.seed, timeout_s=timeout)


def compiler_command(folder: Path, port: int) -> list[str]:
    """Write the command of a service that rolls out, for the settings in `folder`."""
    return [*_OURS, "serve", "compiler", "-c", str(folder / "serve.yaml"), "--port", str(port)]


def executor_command(config: GrpoConfig, own_gpu: bool, port: int) -> list[str]:
    """Write the command of a service that acts."""
    vllm = engine_of(config.executor.vllm, own_gpu)
    theirs = ["--dtype", config.executor.dtype, "--gpu-memory-utilization", str(vllm.gpu_memory_utilization)]
    theirs += ["--max-model-len", str(vllm.max_model_len)] if vllm.max_model_len else []
    theirs += engine_flags({**pinned(config.executor.revision), **vllm.extra})
    return [*_OURS, "serve", "executor", "--model", config.executor.model, "--port", str(port), "--", *theirs]


def engine_flags(arguments: Mapping[str, Any]) -> list[str]:
    """Write arguments of vllm.LLM as `vllm serve` takes them."""
    flags: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            flags += [f"--{flag}", *map(str, value)]
        elif value is not None:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def torchrun_command(processes: int, meeting: str = "") -> list[str]:
    """Write how torchrun starts a group's processes on this node; `-m MODULE ARGUMENT...` follows.

    torchrun would make a folder for their output, which goes to ours instead, and leave it in the temporary directory.
    """
    start = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
    return [*start, f"--log-dir={os.devnull}", *(shlex.split(meeting) or ["--standalone"])]


def engine_of(engine: VllmEngine, own_gpu: bool) -> VllmEngine:
    """Give a service its GPU to itself: by default, an engine leaves room there for another and for training."""
    shared = VllmEngine().gpu_memory_utilization
    if not own_gpu or engine.gpu_memory_utilization != shared:
        return engine
    return engine.model_copy(update={"gpu_memory_utilization": 2 * shared})


def _start(name: str, command: Sequence[str], gpus: str, log: Path | None = None) -> ChildProcess:
    env = {**os.environ, **({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {})}
    child = ChildProcess(command, name=name, env=env, output=log or "terminal")
    console.print(f"  {name}: process {child.pid}{f' on GPU {gpus}' if gpus else ''}{f', log {log}' if log else ''}")
    return child
