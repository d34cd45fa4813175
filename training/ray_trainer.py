"""GRPO on Ray: trainers, compiler engines and executor engines as actors of one placement group.

Each trainer runs `training.grpo`'s loop as under torchrun, with the variables that torchrun would set. Ray replaces a
lost engine while the run continues (`training.ray_engines`). If a trainer is lost, all trainers restart from the newest
checkpoint beside the same engines, and repeat the updates since.
"""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from configs.load import ConfigError
from configs.run_folder import check_run
from configs.training import MAY_CHANGE_ON_RESUME, GrpoConfig
from runtime.cluster import ClusterError, ray_cluster, require_ray
from runtime.lock import FolderLock
from runtime.ray_actors import (
    FunctionActor,
    ObjectActor,
    ProcessPlace,
    driver_context,
    loss_reason,
    torchrun_variables,
)
from runtime.store import JsonLines
from training.grpo_tasks import told_to_compiler, told_to_executor
from training.ray_engines import CompilerEngine, ExecutorEngine, RayEngines, Report
from training.ray_placement import ClusterLayout, RoleLayout, plan_layout

console = Console(width=120)
RECORD = "cluster.jsonl"  # in the run folder: start, loss and replacement of every process
SPARE_CALLS = 4  # beside requests of episodes: `about`
GRACE_S = 15.0  # after a trainer's error, time to find out whether another trainer's loss caused it
Train = Callable[[GrpoConfig, Path, str, RayEngines], object]  # runs one trainer


class TrainerLost(Exception):
    """A trainer's process or node is gone, before or after its training began."""

    def __init__(self, number: int, reason: str, began: bool) -> None:
        super().__init__(f"trainer {number}: {reason}")
        self.number, self.reason, self.began = number, reason, began


def train_on_ray(config: GrpoConfig, out: Path, on_exists: str, train: Train) -> None:
    """Run `train` in every trainer's process, beside engines; restart trainers if one is lost.

    Raises:
        ModuleNotFoundError: Ray is not installed; names the extra.
        ConfigError: Compiler engines lack a checkpoint, or the layout needs more GPUs than there are.
        ClusterError: There is no room, or trainers were lost more than `placement.restarts` times (counted separately
            before and after they began, because Ray notices a lost node late).
        Exception: What a trainer raised.
    """
    require_ray()
    check_run(out, config, on_exists, MAY_CHANGE_ON_RESUME)
    with FolderLock(out, f"memcompiler {config.COMMAND}"), ray_cluster() as ray:
        layout, report = layout_on(ray, config), EventRecord(out / RECORD)
        with ProcessGroup(ray, config, layout) as group:
            engines = _start_engines(group, config, layout, report)
            losses = Counter[bool]()  # by whether training had begun
            while True:
                try:
                    return _train(
                        group, config, out=out, on_exists=on_exists, engines=engines, report=report, train=train
                    )
                except TrainerLost as lost:
                    report({"role": "trainer", "event": "lost", "number": lost.number, "reason": lost.reason})
                    losses[lost.began] += 1
                    if losses[lost.began] > config.placement.restarts:
                        raise ClusterError(f"trainers were lost {losses.total()} times; the last: {lost}") from lost
                    console.print("  all trainers restart from the newest checkpoint")
                    on_exists = "resume"


class EventRecord:
    """Prints events of processes, and records them once a trainer has created the run folder."""

    def __init__(self, path: Path) -> None:
        self._rows, self._pending, self._has_folder = JsonLines(path), list[Mapping[str, Any]](), False

    def __call__(self, row: Mapping[str, Any]) -> None:
        if row["event"] in ("lost", "given up", "back"):
            console.print(f"  {row['role']} {row['number']}: {row['event']} {row.get('reason', '')}", markup=False)
        self._has_folder = self._has_folder or row["event"] == "began"
        self._pending.append({"at": time.time(), **row})
        if self._has_folder:
            self._rows.append(*self._pending)
            self._pending.clear()


# -- processes ---------------------------------------------------------------------------------------------------------


def layout_on(ray: Any, config: GrpoConfig) -> ClusterLayout:
    """Plan a run's layout on a cluster. Raises: ConfigError, if it cannot run."""
    gpus = int(ray.cluster_resources().get("GPU", 0))
    layout = plan_layout(config, gpus, ray.get(ray.remote(num_gpus=1)(_gpu_gib).remote()) if gpus else 0.0)
    if layout.compilers.count and config.compiler.checkpoint is None:
        raise ConfigError(
            "compiler engines start from compiler.checkpoint: name the SFT run (or set placement.compilers=0)"
        )
    if layout.gpus > gpus:
        needed = ", ".join(f"{role.count} {name}s of {role.gpus:g}" for name, role in layout.roles.items())
        raise ConfigError(
            f"the cluster has {gpus} GPUs, but the run needs {layout.gpus:g} ({needed}): set placement.trainers, "
            "placement.compilers and placement.executors"
        )
    return layout


def _gpu_gib() -> float:
    """Measure the memory of this process's GPU, in GiB."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory / 2**30


class ProcessGroup:
    """Placement group with one bundle per process; the replacement of a lost process reuses its bundle."""

    def __init__(self, ray: Any, config: GrpoConfig, layout: ClusterLayout) -> None:
        self.ray, self._context = ray, driver_context()
        self._placement, self._layout = config.placement, layout
        self._actors: dict[tuple[str, int], Any] = {}
        self._order = [(name, number) for name, role in layout.roles.items() for number in range(role.count)]
        self._cpus = config.placement.cpus or cpus_per_process(ray.nodes(), len(self._order))

    def __enter__(self) -> ProcessGroup:
        gpus = [self._layout.roles[name].gpus for name, _ in self._order]
        bundles = [{"CPU": self._cpus, **({"GPU": n} if n else {})} for n in gpus]
        self._group = self.ray.util.placement_group(bundles, strategy="PACK")
        if not self._group.wait(self._placement.unresponsive_s):
            self.__exit__()
            raise ClusterError(
                f"no nodes have had room for {bundles} in {self._placement.unresponsive_s:g} s (placement.*)"
            )
        return self

    def __exit__(self, *error: object) -> None:
        for name in self._layout.roles:
            self.stop(name)
        self.ray.util.remove_placement_group(self._group)

    def __getitem__(self, role: str) -> list[Any]:
        return [actor for (name, _), actor in self._actors.items() if name == role]

    def start(self, role: str, kind: type, restarts: int, *arguments: Any, calls: int = 1) -> None:
        """Start an actor in every bundle of a role, which answers up to `calls` calls at a time."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        needs = {"num_cpus": self._cpus, "num_gpus": self._layout.roles[role].gpus, "max_task_retries": 0}
        needs |= {"max_concurrency": calls} if calls > 1 else {}
        actor = self.ray.remote(max_restarts=restarts, **needs)(kind)
        for bundle, (name, number) in enumerate(self._order):
            if name == role:
                place = PlacementGroupSchedulingStrategy(self._group, bundle)
                started = actor.options(scheduling_strategy=place).remote(self._context, *arguments)
                self._actors[role, number] = started

    def stop(self, role: str) -> None:
        """Stop all actors of a role."""
        for key in [key for key in self._actors if key[0] == role]:
            self.ray.kill(self._actors.pop(key))


def cpus_per_process(nodes: Sequence[Mapping[str, Any]], processes: int) -> float:
    """Return the CPUs of each process: 1, or the largest fraction of one that leaves room for all of them. Raises:
    ClusterError, if no node has a CPU."""
    has = [node["Resources"].get("CPU", 0.0) for node in nodes if node["Alive"]]
    if not any(has):
        raise ClusterError("no node of this Ray has a CPU: start it with --num-cpus")
    # Ray counts in ten-thousandths: round 1/3 down, so that three processes fit.
    parts = (int(1e4 / k) / 1e4 for k in range(1, 10_000))
    return next(part for part in parts if sum(int(cpus / part + 1e-6) for cpus in has) >= processes)


def _start_engines(group: ProcessGroup, config: GrpoConfig, layout: ClusterLayout, report: Report) -> RayEngines:
    """Start the engines, and wait until they have loaded their models. Raises: what one raised."""
    compiler = partial(
        CompilerEngine,
        _with_layout(config.compiler, layout.compilers),
        config.seed,
        told_to_compiler(config),
    )
    executor = partial(ExecutorEngine, _with_layout(config.executor, layout.executors), told_to_executor(config))
    for role, make, engine in (
        ("compiler", compiler, config.compiler.engine),
        ("executor", executor, config.executor.engine),
    ):
        # A vLLM engine answers the requests of all episodes side by side.
        calls = config.concurrency * max(1, layout.trainers.count) + SPARE_CALLS if engine == "vllm" else 1
        group.start(role, ObjectActor, config.placement.restarts, pickle.dumps(make), calls=calls)
    for role in ("compiler", "executor"):
        for number, engine in enumerate(group[role]):
            try:
                about = group.ray.get(engine.about.remote(), timeout=config.placement.unresponsive_s)
            except group.ray.exceptions.RayError as error:
                raise ClusterError(f"{role} {number} did not start: {error}") from error
            report({"role": role, "number": number, "event": "ready", **about})
            console.print(f"  {role} {number}: process {about['pid']} on {about['node']}")
    return RayEngines(group["compiler"], group["executor"], config.placement)


def _with_layout(config: Any, role: RoleLayout) -> Any:
    """Set an engine's share of a GPU in its settings."""
    vllm = config.vllm
    if role.utilization is not None:
        vllm = vllm.model_copy(update={"gpu_memory_utilization": role.utilization})
    if vllm.tensor_parallel_size > 1:  # by default, vLLM inside Ray would place its workers elsewhere
        vllm = vllm.model_copy(update={"extra": {"distributed_executor_backend": "mp", **vllm.extra}})
    return config.model_copy(update={"vllm": vllm})


# -- training ----------------------------------------------------------------------------------------------------------


def _train(
    group: ProcessGroup,
    config: GrpoConfig,
    out: Path,
    on_exists: str,
    engines: RayEngines,
    report: Report,
    train: Train,
) -> None:
    """Run all trainers to the end. Raises: TrainerLost; else what one of them raised."""
    group.start("trainer", FunctionActor, 0)
    try:
        trainers = group["trainer"]
        places = [_place_of(group.ray, trainer, number, config) for number, trainer in enumerate(trainers)]
        run = partial(_run_trainer, train, config, out, on_exists)
        streams = {
            trainer.run.options(num_returns="streaming").remote(variables, run, engines): number
            for number, (trainer, variables) in enumerate(zip(trainers, torchrun_variables(places), strict=True))
        }
        for number, output in _outputs(group.ray, streams):
            if isinstance(output, Mapping):
                report(output)
            elif number == 0:  # other trainers print nothing else
                print(output, flush=True)
    finally:
        group.stop("trainer")


def _place_of(ray: Any, trainer: Any, number: int, config: GrpoConfig) -> ProcessPlace:
    """Ask a trainer for its place. Raises: TrainerLost; ClusterError, if no node has room for it."""
    wait = config.placement.unresponsive_s
    try:
        return ray.get(trainer.place.remote(), timeout=wait)
    except ray.exceptions.GetTimeoutError as error:
        raise ClusterError(f"no node has had room for trainer {number} in {wait:g} s") from error
    except ray.exceptions.RayActorError as error:
        raise TrainerLost(number, loss_reason(error), began=False) from error


def _run_trainer(
    train: Train, config: GrpoConfig, out: Path, on_exists: str, engines: RayEngines, report: Report
) -> None:
    """Train, in a trainer's process."""
    train(config, out, on_exists, replace(engines, report=report))


def _outputs(ray: Any, streams: dict[Any, int]) -> Iterator[tuple[int, Any]]:
    """Yield the trainers' outputs with their numbers, until all are done. Raises: TrainerLost; else what one raised,
    unless another trainer's loss caused it."""
    failed: tuple[BaseException, float] | None = None
    while streams:
        ready, _ = ray.wait(list(streams), num_returns=1, timeout=1.0)
        for stream in ready:
            try:
                yield from ((streams[stream], output) for output in ray.get(next(stream)))
            except StopIteration:
                del streams[stream]
            except ray.exceptions.RayTaskError as error:
                failed = failed or (error, time.monotonic())
                del streams[stream]
            except ray.exceptions.RayError as error:
                raise TrainerLost(streams[stream], loss_reason(error), began=True) from error
        if failed and (not streams or time.monotonic() - failed[1] > GRACE_S):
            raise getattr(failed[0], "cause", None) or failed[0]
