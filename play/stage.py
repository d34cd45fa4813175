"""What a server plays: a run's tasks, memory and models, which the first game loads, and its recorded episodes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from agent.deliveries import DELIVERIES, DeliverySpec, find
from agent.episode import EpisodeSpec
from agent.records import Episode
from compiler.build import load_compiler
from compiler.records import Compiler
from configs.collect import MemoryConfig
from configs.evaluation import EvalConfig
from configs.load import ConfigError
from data_gen.experience import experience_tasks, open_experience_bank, require_expert
from data_gen.memory_factory import open_memory
from data_gen.tasks import episode_specs
from envs.base import EnvironmentFailure, Task
from envs.registry import Environments, command_reader_for, compiler_instructions_for, evaluation_split
from eval.metrics import display_name
from eval.model_cache import ModelCache
from eval.rollouts import Evaluation, limits_of
from memory.protocol import MemorySystem
from play.game import Game, PlayError, recorded_moves
from play.library import Library

log = logging.getLogger("memcompiler.play")
TRAIN, FEW = "train", 32  # the split and the number of tasks where the settings name none
FAVOURITES = ("none", "compiled")  # side by side at first


@dataclass
class Stage:
    """Everything that games need.

    Attributes:
        config: the run's settings; None for a folder that can only be watched.
        library: recorded episodes.
        bank: the run's memory; None where it is filled by the expert.
        out: folder of the visitor's record, beside which the expert's memory is cached.
        models: loaded by the first game.
    """

    config: EvalConfig | None
    out: Path
    library: Library = field(default_factory=Library)
    bank: Path | None = None
    models: ModelCache = field(default_factory=ModelCache)

    def __post_init__(self) -> None:
        self.envs = Environments(self.config.env) if self.config is not None else None

    def close(self) -> None:
        """End the environments' workers."""
        if self.envs is not None:
            self.envs.close()

    def warm_up(self) -> None:
        """Load executor, compiler and memory. Raises: PlayError."""
        config, _ = self._playable()
        _loaded(lambda: self.models.executor(config))
        self._compiler()
        _ = self.memory

    @cached_property
    def split(self) -> str:
        """The split that is played: the settings', for recorded episodes the evaluated one, else the training split."""
        config, envs = self._playable()
        if config.split is not None:
            return config.split
        evaluated = evaluation_split(config.env)
        if self.library.episodes:
            return evaluated
        try:
            return TRAIN if envs.tasks(TRAIN) else evaluated
        except (ValueError, FileNotFoundError):
            return evaluated

    @cached_property
    def tasks(self) -> dict[str, Task]:
        """The tasks that can be played, by id; none for a folder that can only be watched."""
        if self.envs is None or self.config is None:
            return {}
        recorded = {episode.task_id for episode in self.library.episodes}
        try:
            listed = self.envs.tasks(self.split)
        except (EnvironmentFailure, ValueError, OSError, ImportError) as error:
            if not recorded:
                raise
            log.warning("the episodes can be watched only: %s", error)
            return {}
        if recorded:
            return {task.id: task for task in listed if task.id in recorded}
        return {task.id: task for task in listed[: self.config.limit or FEW]}

    def deliveries(self) -> list[str]:
        """Return the deliveries that can be played, in the order of tables."""
        return [name for name, spec in DELIVERIES.items() if self._can_play(spec)] if self.config else []

    def _can_play(self, spec: DeliverySpec) -> bool:
        _, envs = self._playable()
        if not spec.playable or spec.interdependent or spec.low_confidence_only or spec.gated:
            return False
        return envs.spec.expert or not spec.needs_expert

    def labels(self) -> list[dict[str, str]]:
        """Return name and label of each delivery that can be played."""
        return [{"name": name, "label": display_name(name)} for name in self.deliveries()]

    def open_game(self, task_id: str, delivery: str, recorded: Episode | None = None, t: int = 0) -> Game:
        """Open a game at its first step, or at step t of a recorded episode.

        Raises:
            PlayError: there is no such task or delivery, or models, memory or environment fail.
        """
        if self.config is None:
            raise PlayError("this folder names no models: its episodes can be watched only")
        if task_id not in self.tasks:
            raise PlayError(f"there is no task {task_id!r} in split {self.split}")
        if delivery not in self.deliveries():
            raise PlayError(f"delivery {delivery!r} cannot be played here")
        game = self._game(self._spec(self.tasks[task_id], find(delivery)), delivery)
        try:
            steps = recorded.steps if recorded is not None else []
            moves = recorded_moves(recorded, t) if recorded is not None else []
            game.start(moves, [step.observation for step in steps[: t + 1]])
        except Exception:
            game.close()
            raise
        return game

    def _game(self, spec: EpisodeSpec, delivery: str) -> Game:
        config, envs = self._playable()
        played = Evaluation(
            make_env=envs.lease,
            specs=[spec],
            executor=_loaded(lambda: self.models.executor(config)),
            compiler=self._compiler() if find(delivery).needs_checkpoint else None,
            limits=limits_of(config),
            reader=command_reader_for(config.env),
        )
        return Game(
            spec,
            delivery=played.delivery(delivery),
            executor=played.executor,
            lease=envs.lease,
            max_steps=config.max_steps,
            seed=config.seed,
        )

    def _compiler(self) -> Compiler | None:
        """Load the compiler; without a checkpoint, one with a new adapter and projector, as `mc.load` does."""
        config, _ = self._playable()
        if config.compiler.checkpoint is not None or config.compiler.engine != "hf":
            return _loaded(lambda: self.models.compiler(config.model_copy(update={"deliveries": ("compiled",)})))
        return self._untrained

    @cached_property
    def _untrained(self) -> Compiler:
        config, _ = self._playable()
        told, executor = compiler_instructions_for(config.env), self.models.executor(config)
        return _loaded(lambda: load_compiler(config.compiler, executor, config.seed, told))

    def _spec(self, task: Task, spec: DeliverySpec) -> EpisodeSpec:
        if not spec.recalls:
            return EpisodeSpec(task)
        config, _ = self._playable()
        memory = config.memory
        return episode_specs([task], self.memory, spec.entries(memory.k), memory.isolation)[0]

    @cached_property
    def memory(self) -> MemorySystem:
        """The run's memory, or one that the environment's expert fills for the tasks."""
        config, envs = self._playable()
        if self.bank is not None:
            opened: MemoryConfig = config.memory.model_copy(update={"bank": str(self.bank)})
            return _loaded(lambda: open_memory(opened, self.bank or Path(), config.env.name))
        if config.memory.protocol != "frozen":
            raise PlayError(f"memory.protocol {config.memory.protocol}: its memory grew during the run; watch it only")
        filled = config.memory.bank is None and config.memory.k > 0

        def fill() -> MemorySystem:
            if filled:
                require_expert(config)
            tasks = list(self.tasks.values())
            experience = experience_tasks(config, envs, self.split, tasks) if filled else []
            return open_experience_bank(config, envs, experience, self.out)

        return _loaded(fill)

    def _playable(self) -> tuple[EvalConfig, Environments]:
        if self.config is None or self.envs is None:
            raise PlayError("this folder names no models: its episodes can be watched only")
        return self.config, self.envs


def _loaded(load: Callable[[], Any]) -> Any:
    """Load something; a failure is a PlayError, since the page can still show what is recorded."""
    try:
        return load()
    except PlayError:
        raise
    except (ConfigError, RuntimeError, ValueError, OSError, LookupError, ImportError) as error:
        raise PlayError(f"cannot be loaded: {error}") from error
