"""GRPO on Ray: trainers, compilers that roll out and executors that act, as actors of one placement group.

Each trainer runs `training.run.train_grpo`, the same as under torchrun, whose variables it finds set. Engines are asked
by `training.engines`. An engine that is lost is replaced by Ray while the run goes on. Where a trainer is lost, all of
them begin again at the newest checkpoint, beside the same engines; what was learnt since is learnt once more.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from configs.load import ConfigError
from configs.run_folder import check_run
from configs.training import MAY_CHANGE_ON_RESUME, GrpoConfig
from envs.registry import compiler_told, executor_told
from runtime.actors import Holder, Place, Runner, meeting, packed, surroundings, why
from runtime.cluster import ClusterError, ray_cluster, require_ray
from runtime.lock import FolderLock
from runtime.store import JsonLines
from training.engines import CompilerEngine, Engines, ExecutorEngine, Tell
from training.run import train_grpo

console = Console(width=120)
RECORD = "cluster.jsonl"  # of the run folder: who was where, who was lost and why, who came instead
GRACE_S = 15.0  # in which it shows whether a trainer failed of itself, or because another one is gone


@dataclass(frozen=True, slots=True)
class Share:
    """Processes of a role: how many, GPUs of each (a part of one shares it), and of one GPU what an engine may fill."""

    count: int
    gpus: float = 0.0
    utilization: float | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """Who gets what of a cluster."""

    trainers: Share
    compilers: Share
    executors: Share

    @property
    def shares(self) -> dict[str, Share]:
        return {"trainer": self.trainers, "compiler": self.compilers, "executor": self.executors}

    @property
    def gpus(self) -> float:
        return sum(share.count * share.gpus for share in self.shares.values())


Lay = Callable[[int, float], Layout]  # from a cluster's number of GPUs, and GiB of one


class TrainerLost(Exception):
    """A trainer's process or node is gone, before or after it began."""

    def __init__(self, number: int, reason: str, began: bool) -> None:
        super().__init__(f"trainer {number}: {reason}")
        self.number, self.reason, self.began = number, reason, began


def train_on_ray(config: GrpoConfig, out: Path, on_exists: str, lay: Lay) -> None:
    """Run stage 2 on Ray, or go on with it; returns when it is done.

    Raises:
        ModuleNotFoundError: Ray is not installed; names the extra.
        ConfigError: there is nothing to roll out with, or there are fewer GPUs than are asked for.
        ClusterError: there is no room, or trainers were lost once more than `placement.restarts`, of those that had
            begun, or of those that had not (as on a node that is gone, which Ray does not know yet).
        Exception: what a trainer raised.
    """
    require_ray()
    check_run(out, config, on_exists, MAY_CHANGE_ON_RESUME)
    with FolderLock(out, f"memcompiler {config.COMMAND}"), ray_cluster() as ray:
        layout, tell = layout_here(ray, config, lay), _Record(out / RECORD)
        with _Seats(ray, config, layout) as seats:
            engines = _engines(seats, config, layout, tell)
            losses = Counter[bool]()  # of trainers that had begun, and of those that had not
            while True:
                try:
                    return _train(seats, config, out, on_exists, engines, tell)
                except TrainerLost as lost:
                    tell({"role": "trainer", "event": "lost", "number": lost.number, "reason": lost.reason})
                    losses[lost.began] += 1
                    if losses[lost.began] > config.placement.restarts:
                        raise ClusterError(f"trainers were lost {losses.total()} times; the last: {lost}") from lost
                    console.print("  all trainers begin again at the newest checkpoint")
                    on_exists = "resume"


class _Record:
    """Tells what happens to processes, and puts it on record once a trainer has made the run folder."""

    def __init__(self, path: Path) -> None:
        self._rows, self._pending, self._made = JsonLines(path), list[Mapping[str, Any]](), False

    def __call__(self, row: Mapping[str, Any]) -> None:
        if row["event"] in ("lost", "given up", "back"):
            console.print(f"  {row['role']} {row['number']}: {row['event']} {row.get('reason', '')}", markup=False)
        self._made = self._made or row["event"] == "began"
        self._pending.append({"at": time.time(), **row})
        if self._made:
            self._rows.append(*self._pending)
            self._pending.clear()


def layout_here(ray: Any, config: GrpoConfig, lay: Lay) -> Layout:
    """Lay a run out over the cluster that is there. Raises: ConfigError, where it cannot be."""
    gpus = int(ray.cluster_resources().get("GPU", 0))
    layout = lay(gpus, ray.get(ray.remote(num_gpus=1)(_gib).remote()) if gpus else 0.0)
    if layout.compilers.count and config.compiler.checkpoint is None:
        raise ConfigError(
            "engines that roll out start from compiler.checkpoint: name the SFT run (or set placement.compilers=0)"
        )
    if layout.gpus > gpus:
        asked = ", ".join(f"{share.count} {role}s of {share.gpus:g}" for role, share in layout.shares.items())
        raise ConfigError(
            f"the cluster has {gpus} GPUs, and {layout.gpus:g} are asked for ({asked}): set placement.trainers, "
            "placement.compilers and placement.executors"
        )
    return layout


def _gib() -> float:
    """Measure the memory of the GPU that this process has."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory / 2**30


# -- who is where ------------------------------------------------------------------------------------------------------


class _Seats:
    """The placement group: a bundle for each process, which whoever takes a lost one's place gets, too."""

    def __init__(self, ray: Any, config: GrpoConfig, layout: Layout) -> None:
        self.ray, self._around = ray, surroundings()
        self._rules, self._layout = config.placement, layout
        self._actors: dict[tuple[str, int], Any] = {}
        self._cpus = config.placement.cpus or cpus_of_each(ray.nodes(), sum(s.count for s in layout.shares.values()))
        self._numbers = {role: range(share.count) for role, share in layout.shares.items()}
        self._order = [(role, number) for role, numbers in self._numbers.items() for number in numbers]

    def __enter__(self) -> _Seats:
        needs = [self._needs(role) for role, _ in self._order]
        bundles = [{"CPU": cpus, **({"GPU": gpus} if gpus else {})} for cpus, gpus in needs]
        self._group = self.ray.util.placement_group(bundles, strategy="PACK")
        if not self._group.wait(self._rules.silence_s):
            self.__exit__()
            raise ClusterError(f"no nodes have had room for {bundles} in {self._rules.silence_s:g} s (placement.*)")
        return self

    def __exit__(self, *error: object) -> None:
        for role in self._layout.shares:
            self.leave(role)
        self.ray.util.remove_placement_group(self._group)

    def __getitem__(self, role: str) -> list[Any]:
        return [self._actors[role, number] for number in self._numbers[role]]

    def take(self, role: str, kind: type, restarts: int, *arguments: Any) -> None:
        """Start an actor in every place of a role."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        cpus, gpus = self._needs(role)
        for number in self._numbers[role]:
            place = PlacementGroupSchedulingStrategy(self._group, self._order.index((role, number)))
            made = self.ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=restarts, max_task_retries=0)(kind)
            self._actors[role, number] = made.options(scheduling_strategy=place).remote(self._around, *arguments)

    def leave(self, role: str) -> None:
        """End the actors of a role."""
        for number in self._numbers[role]:
            if (actor := self._actors.pop((role, number), None)) is not None:
                self.ray.kill(actor)

    def _needs(self, role: str) -> tuple[float, float]:
        return self._cpus, self._layout.shares[role].gpus


def cpus_of_each(nodes: Sequence[Mapping[str, Any]], processes: int) -> float:
    """Say how many CPUs each process gets: 1, or the largest part of one that leaves room for all of them. Raises:
    ClusterError, where nodes have none."""
    has = [node["Resources"].get("CPU", 0.0) for node in nodes if node["Alive"]]
    if not any(has):
        raise ClusterError("no node of this Ray has a CPU to give: start it with --num-cpus")
    # Ray counts in ten-thousandths: a little less than 1/3, for three of them have to fit.
    parts = (int(1e4 / k) / 1e4 for k in range(1, 10_000))
    return next(part for part in parts if sum(int(cpus / part + 1e-6) for cpus in has) >= processes)


def _engines(seats: _Seats, config: GrpoConfig, layout: Layout, tell: Tell) -> Engines:
    """Start the engines, and wait until they have loaded their models. Raises: what one raised."""
    kept, told = config.placement.restarts, (compiler_told(config.env), executor_told(config.env))
    make = partial(CompilerEngine, _on(config.compiler, layout.compilers), config.seed, told[0])
    seats.take("compiler", Holder, kept, packed(make))
    seats.take(
        "executor", Holder, kept, packed(partial(ExecutorEngine, _on(config.executor, layout.executors), told[1]))
    )
    for role in ("compiler", "executor"):
        for number, engine in enumerate(seats[role]):
            try:
                about = seats.ray.get(engine.about.remote(), timeout=config.placement.silence_s)
            except seats.ray.exceptions.RayError as error:
                raise ClusterError(f"{role} {number} did not start: {error}") from error
            tell({"role": role, "number": number, "event": "ready", **about})
            console.print(f"  {role} {number}: process {about['pid']} on {about['node']}")
    return Engines(seats["compiler"], seats["executor"], config.placement)


def _on(config: Any, share: Share) -> Any:
    """Give an engine's settings its share of a GPU."""
    vllm = config.vllm
    if share.utilization is not None:
        vllm = vllm.model_copy(update={"gpu_memory_utilization": share.utilization})
    if vllm.tensor_parallel_size > 1:  # by itself, vLLM would have Ray place its workers anew
        vllm = vllm.model_copy(update={"extra": {"distributed_executor_backend": "mp", **vllm.extra}})
    return config.model_copy(update={"vllm": vllm})


# -- training ----------------------------------------------------------------------------------------------------------


def _train(seats: _Seats, config: GrpoConfig, out: Path, on_exists: str, engines: Engines, tell: Tell) -> None:
    """Have all trainers train to the end. Raises: TrainerLost; else what one of them raised."""
    seats.take("trainer", Runner, 0)
    try:
        variables = meeting([_placed(seats, config, number) for number in range(len(seats["trainer"]))])
        call = partial(_trainer, config, out, on_exists)
        streams = {
            trainer.run.options(num_returns="streaming").remote(own, call, engines): number
            for number, (trainer, own) in enumerate(zip(seats["trainer"], variables, strict=True))
        }
        for number, said in _said(seats.ray, streams):
            if isinstance(said, Mapping):
                tell(said)
            elif number == 0:  # what the others print is the same, if anything
                print(said, flush=True)
    finally:
        seats.leave("trainer")


def _placed(seats: _Seats, config: GrpoConfig, number: int) -> Place:
    """Ask a trainer where it is. Raises: TrainerLost; ClusterError, where no node has room for it."""
    wait = config.placement.silence_s
    try:
        return seats.ray.get(seats["trainer"][number].place.remote(), timeout=wait)
    except seats.ray.exceptions.GetTimeoutError as error:
        raise ClusterError(f"no node has had room for trainer {number} in {wait:g} s") from error
    except seats.ray.exceptions.RayActorError as error:
        raise TrainerLost(number, why(error), began=False) from error


def _trainer(config: GrpoConfig, out: Path, on_exists: str, engines: Engines, tell: Tell) -> None:
    """Train, in a trainer's process."""
    train_grpo(config, out, on_exists, replace(engines, tell=tell))


def _said(ray: Any, streams: dict[Any, int]) -> Iterator[tuple[int, Any]]:
    """Yield what trainers say, with their numbers, until all are done. Raises: TrainerLost; else what one raised, if
    that is not because another one is gone."""
    failed: tuple[BaseException, float] | None = None
    while streams:
        ready, _ = ray.wait(list(streams), num_returns=1, timeout=1.0)
        for stream in ready:
            try:
                yield from ((streams[stream], said) for said in ray.get(next(stream)))
            except StopIteration:
                del streams[stream]
            except ray.exceptions.RayTaskError as error:
                failed = failed or (error, time.monotonic())
                del streams[stream]
            except ray.exceptions.RayError as error:
                raise TrainerLost(streams[stream], why(error), began=True) from error
        if failed and (not streams or time.monotonic() - failed[1] > GRACE_S):
            raise getattr(failed[0], "cause", None) or failed[0]
