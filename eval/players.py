"""Who plays an evaluation: the models and environments that cells share, here or in the workers on Ray."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agent.deliveries import Delivery, DeliverySpec, find
from agent.episode import EpisodeSpec, Limits, lost_episode, run_episodes
from agent.records import Episode
from compiler import checkpoint
from compiler.build import load_compiler, load_remote_compiler, load_served_compiler, report_reading
from compiler.gate import Need, need_for
from compiler.records import Compiler
from configs.evaluation import EvalConfig
from data_gen.memories import open_memory
from data_gen.tasks import specs_for
from envs.base import Environment, Task, TaskSequence
from envs.registry import Environments, compiler_told, executor_told, reader_of
from envs.trajectories import TrajectoryReader
from eval.provenance import identity_of_models
from eval.runs import EpisodeRecord, Key, line_of
from executor.build import load_executor
from executor.records import Executor
from memory.protocol import MemorySystem
from runtime.crew import Crew, Line, Unit, units_of
from runtime.progress import progress
from runtime.ray_fleet import ray_crew
from runtime.store import to_json

log = logging.getLogger("memcompiler.eval")


class ModelCache:
    """What evaluations have in use: executor, compiler, environments, workers. Made when one asks for it, kept while
    the next ask for the same, and let go before another is made. Close it after use (it is a context manager)."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[object, Any]] = {}
        self._workers = ExitStack()

    @classmethod
    def holding(cls, config: EvalConfig, executor: Any, compiler: Compiler | None) -> ModelCache:
        loaded = cls()
        loaded._held = {"executor": (_executor_key(config), executor), "compiler": (_compiler_key(config), compiler)}
        return loaded

    def __enter__(self) -> ModelCache:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.close()
        if "environments" in self._held:
            self._held.pop("environments")[1].close()

    def executor(self, config: EvalConfig) -> Any:
        told = executor_told(config.env)
        return self._get("executor", _executor_key(config), lambda: load_executor(config.executor, told))

    def compiler(self, config: EvalConfig) -> Compiler | None:
        """Return the trained compiler, if any of the deliveries asks for it."""
        if not needs_checkpoint(config):
            return None
        return self._get("compiler", _compiler_key(config), lambda: self._load_compiler(config))

    def environments(self, config: EvalConfig) -> Environments:
        return self._get("environments", config.env, lambda: Environments(config.env))

    def crew(self, config: EvalConfig) -> Crew:
        """Return the workers on Ray, which load what they need themselves."""
        return self._get("crew", config.ray, lambda: self._workers.enter_context(ray_crew(config.ray, EvalWorker)))

    def _load_compiler(self, config: EvalConfig) -> Compiler:
        """Load it, and warn where the executor reads something else than it was trained for."""
        if config.compiler.engine == "http":
            remote = load_remote_compiler(config.compiler, config.seed)
            trained = remote.about()
            report_reading(trained.get("executor_reads"), config.executor, str(config.compiler.url))
            if (theirs := trained.get("environment")) != config.env.name:
                log.warning(
                    "the service at %s is told about %s, this run plays %s: serve with env=%s",
                    config.compiler.url,
                    theirs,
                    config.env.name,
                    config.env.name,
                )
            return remote
        found, told = checkpoint.find(Path(str(config.compiler.checkpoint))), compiler_told(config.env)
        report_reading(checkpoint.executor_reading(found), config.executor, str(found))
        if config.compiler.engine == "hf":
            return load_compiler(config.compiler, self.executor(config), config.seed, told)
        return load_served_compiler(config.compiler, config.seed, told)

    def _get(self, role: str, key: object, make: Callable[[], Any]) -> Any:
        if role not in self._held or self._held[role][0] != key:
            if role == "environments" and role in self._held:
                self._held[role][1].close()
            if role == "crew":
                self._workers.close()
            self._held.pop(role, None)
            if role == "executor":
                self._held.pop("compiler", None)  # its projector is made for one executor
            gc.collect()
            self._held[role] = (key, make())
        return self._held[role][1]


def _executor_key(config: EvalConfig) -> object:
    return config.executor, executor_told(config.env)


def _compiler_key(config: EvalConfig) -> object:
    seed = config.seed if config.compiler.temperature else 0
    return config.compiler, config.executor, seed, compiler_told(config.env)


def limits_of(config: EvalConfig) -> Limits:
    return Limits(config.max_steps, config.seed, config.sure)


def needed_by(config: EvalConfig) -> Need | None:
    """Read what guesses which steps need compiling, where a delivery asks it. Raises: CheckpointError, where it
    does not stand beside the checkpoint, or cannot be read."""
    asked = [name for name in config.deliveries if find(name).where_needed]
    return need_for(asked, config.compiler.checkpoint, config.needed)


def needs_checkpoint(config: EvalConfig) -> list[str]:
    """Name the deliveries that need a trained compiler."""
    return [name for name in config.deliveries if find(name).needs_checkpoint]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Everything that one comparison holds fixed.

    Attributes:
        specs: the tasks with what was retrieved for each.
        top_specs: the same tasks with the best entry alone (empty where no delivery asks for it).
        title: what the progress bar says beside the delivery.
    """

    make_env: Callable[[], Environment]
    specs: Sequence[EpisodeSpec]
    executor: Executor
    compiler: Compiler | None
    limits: Limits
    concurrency: int = 64
    top_specs: Sequence[EpisodeSpec] = ()
    title: str = ""
    reader: TrajectoryReader | None = None  # of the environment, which teachers need
    worlds: Sequence[TaskSequence] = ()  # whose tasks the specs are, where they are lived in
    need: Need | None = None  # beside the compiler's checkpoint

    def run(
        self, delivery: str | Delivery, record: Callable[[Episode], None] = lambda _: None, played: Collection[str] = ()
    ) -> list[Episode]:
        """Play all specs under a delivery, or the one of that name, but for the tasks that were played already.

        Raises:
            ValueError: no tasks, no such delivery, or one without the compiler that it needs.
        """
        if not self.specs:
            raise ValueError("there are no tasks to evaluate: check split, limit and the environment's data")
        specs = self.specs
        if isinstance(delivery, str):
            specs = self._specs_of(find(delivery))
            delivery = self.delivery(delivery)
        left = [spec for spec in specs if spec.task.id not in played]
        with progress(f"{self.title} {delivery.name}".strip(), len(specs), len(played)) as advance:

            def on_episode(episode: Episode) -> None:
                record(episode)
                advance(episode)

            return run_episodes(self.make_env, left, delivery, self.executor, self.limits, self.concurrency, on_episode)

    def delivery(self, name: str) -> Delivery:
        """Make the delivery of this name. Raises: ValueError, as `DeliverySpec.make`."""
        return find(name).make(self.compiler, self.limits.seed, self.reader, self.need)

    def _specs_of(self, delivery: DeliverySpec) -> Sequence[EpisodeSpec]:
        """Give the tasks with the M that a delivery starts from."""
        if delivery.memory == "empty":
            return [EpisodeSpec(spec.task, bank_version=spec.bank_version) for spec in self.specs]  # no session either
        return self.top_specs if delivery.memory == "top" else self.specs


def specs_of(
    config: EvalConfig, tasks: Sequence[Task], bank: MemorySystem, deliveries: Sequence[str]
) -> tuple[list[EpisodeSpec], list[EpisodeSpec]]:
    """Recall what tasks start from; and the best entry alone, where one of the deliveries asks for it."""
    wants_top = any(find(name).memory == "top" for name in deliveries)
    top = specs_for(tasks, bank, min(1, config.memory.k)) if wants_top else []
    return specs_for(tasks, bank, config.memory.k), top


# -- on Ray ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """What a worker must know to play tasks of a cell under a delivery; without one, to say which models it has."""

    config: EvalConfig
    cell: Mapping[str, str]
    bank: Path
    version: int
    delivery: str = ""


class EvalWorker:
    """Plays parts of cells with models and environments of its own, kept from one part to the next. The bank, too, has
    to lie under the same path on every node."""

    def __init__(self) -> None:
        self._loaded = ModelCache()
        self._bank: tuple[object, MemorySystem] | None = None

    def play(self, unit: Unit, done: Callable[[str, str], None]) -> None:
        part: Part = unit.what
        config, loaded = part.config, self._loaded
        executor, compiler = loaded.executor(config), loaded.compiler(config)
        if not part.delivery:
            done("", to_json(identity_of_models(config, executor, compiler, needed_by(config))))
            return
        specs, top = specs_of(config, list(unit.items.values()), self._bank_of(part), [part.delivery])
        evaluation = Evaluation(
            loaded.environments(config).lease,
            specs,
            executor,
            compiler,
            limits_of(config),
            config.concurrency,
            top,
            reader=reader_of(config.env),
            need=needed_by(config),
        )
        evaluation.run(part.delivery, lambda e: done(_key(part, e.task_id), line_of(e, part.cell)))

    def _bank_of(self, part: Part) -> MemorySystem:
        known = part.config.memory.model_copy(update={"bank": str(part.bank), "version": part.version})
        if self._bank is None or self._bank[0] != known:
            self._bank = known, open_memory(known, part.bank)
        return self._bank[1]


def models_of(crew: Crew, part: Part) -> dict[str, Any]:
    """Have a worker state which weights and prompts it plays with."""
    return json.loads(crew.ask(part))


def play_by(crew: Crew, part: Part, tasks: Sequence[Task], record: EpisodeRecord) -> None:
    """Have a crew play what the record does not hold yet, all deliveries at once; it is recorded as it comes."""
    played, units = record.played(), list[Unit]()
    for name in part.config.deliveries:
        of, done = replace(part, delivery=name), set(played.get(name, ()))
        left = {_key(of, task.id): task for task in tasks if task.id not in done}
        alone = find(name).interdependent  # of the episodes beside them: all are played by one worker
        size = len(tasks) if alone else part.config.ray.unit or part.config.concurrency
        units += units_of(of, left, size)
    total, left = len(tasks) * len(part.config.deliveries), sum(len(unit.items) for unit in units)
    with progress(" ".join(part.cell.values()) or "episodes", total, total - left) as advance:

        def note(lines: Sequence[Line]) -> None:
            record.add((_from_key(key), line) for key, line in lines)
            for key, _ in lines:
                advance(key)

        crew.play(units, note, _lost)


def _lost(part: Part, key: str, task: Task, why: str) -> str:
    return line_of(lost_episode(task, part.delivery, part.config.seed, why, part.version), part.cell)


def _key(part: Part, task: str) -> str:
    return f"{part.delivery} {task}"


def _from_key(key: str) -> Key:
    delivery, _, task = key.partition(" ")
    return delivery, task
