"""Small GRPO trainers, and environments whose outcome does not depend on the compiler."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import OmegaConf

from agent.episode import EpisodeLimits, EpisodeSpec
from compiler import checkpoint
from compiler.hf import MemoryCompiler
from configs.training import GrpoConfig
from envs.base import EnvironmentFailure, Observation, Task, Transition
from executor.hf import FrozenExecutor
from executor.records import FULL_VIEW
from soft_mem.projector import Projector
from tests import tiny_models
from tests.tiny_models import entry
from training.evaluation import HeldOutTasks, eval_decoding
from training.grpo import GrpoTrainer
from training.rollout import Group, RolloutEngine, Sample, samples_of

COMMANDS = ("go to cabinet 1", "go to shelf 1", "look")


class Bandit:
    """Ends after one step; one of the commands wins."""

    name = "bandit"

    def tasks(self, split: str) -> list[Task]:
        return []

    def reset(self, task: Task) -> Observation:
        return Observation("You see a shelf.", None, COMMANDS[:2])

    def step(self, action: str) -> Transition:
        won = action == COMMANDS[0]  # the less likely one
        return Transition(Observation("Done.", None, COMMANDS[:2]), float(won), won, True)

    def expert(self) -> None:
        return None

    def close(self) -> None:
        pass


class LuckyEnv:
    """Ends after two steps; every other episode succeeds, and tasks of a kind break."""

    name = "lucky"

    def __init__(self, number: int) -> None:
        self.number = number

    def tasks(self, split: str) -> list[Task]:
        return []

    def reset(self, task: Task) -> Observation:
        self.left, self.kind = 2, task.kind
        return Observation(f"You see a cabinet {self.number % 4}.", None, COMMANDS)

    def step(self, action: str) -> Transition:
        if self.kind == "fragile" and self.number % 4 == 0:
            raise EnvironmentFailure("the simulator is gone")
        self.left -= 1
        won = self.left == 0 and self.number % 2 == 0
        return Transition(Observation("It is dark.", None, COMMANDS), float(won), won, self.left == 0)

    def expert(self) -> None:
        return None

    def close(self) -> None:
        pass


def spec(i: int, kind: str = "") -> EpisodeSpec:
    return EpisodeSpec(
        Task(f"t{i}", f"put a mug in cabinet {i}", f"home {i}", "train", kind), (entry(i, "in home 1: look"),)
    )


def executor(device: str = "cpu", **kwargs) -> FrozenExecutor:
    """Create a trainer whose executor reads soft tokens at every step, because random models rarely guide."""
    return FrozenExecutor(tiny_models.lm_backbone(seed=1, device=device), **{"reads": FULL_VIEW, **kwargs})


class Engine(MemoryCompiler):
    """An engine that compiles for a trainer, with the weights that it receives."""

    def load_adapter(self, folder: Path, version: int, projector: Projector) -> None:
        checkpoint.load(folder, self)
        self.weight_version = version


def engine(make_env=None, served=None, **kwargs) -> RolloutEngine:
    numbers = itertools.count()
    make_env = make_env or (lambda: LuckyEnv(next(numbers)))
    return RolloutEngine(make_env, executor(**kwargs), EpisodeLimits(3), served=served)


PATHWISE = {"loss": {"latent_gradient": "pathwise"}, "executor": {"temperature": 30.0}}


def merged(*settings: dict[str, Any]) -> dict[str, Any]:
    """Merge nested settings."""
    return cast(dict[str, Any], OmegaConf.to_container(OmegaConf.merge(*settings)))


def trainer(
    tmp_path, specs=None, make_env=None, projector="gaussian", held_out=(), served=False, device="cpu", **settings
) -> GrpoTrainer:
    defaults = {
        "compiler": {"max_new_tokens": 8},
        "updates": 4,
        "tasks": 2,
        "group_size": 4,
        "optimizer": {"lr": 1e-3},
        "save_every": 2,
        "micro_batch_size": 3,
    }
    config = GrpoConfig(**merged(defaults, settings))
    make = lambda **kind: tiny_models.memory_compiler(False, projector={"kind": projector}, device=device, **kind)
    served_by, acts = make(kind=Engine) if served else None, config.executor
    player = engine(make_env, served_by, mode=acts.mode, temperature=acts.temperature, device=device)
    compiler, specs = make(), specs or [spec(i) for i in range(3)]
    held = HeldOutTasks(config.evaluation, player, held_out, eval_decoding(config.compiler)) if held_out else None
    return GrpoTrainer(config, compiler, player.executor, player, specs, tmp_path, None, held)


def trainable(t: GrpoTrainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in t.compiler.named_parameters() if p.requires_grad}


def fresh_samples(t: GrpoTrainer, update: int = 0) -> list[Sample]:
    t.compiler.generator.manual_seed(update)
    return samples_of(played(t, t.compiler, update), t.compiler, t.policy.pathwise)


def played(t: GrpoTrainer, compiler: MemoryCompiler, update: int = 0) -> list[Group]:
    """Return the complete groups of an update."""
    k = t.config.group_size
    episodes = t.engine.run(compiler, [spec for spec in t.specs_of(update) for _ in range(k)])
    return [Group(tuple(episodes[i : i + k])) for i in range(0, len(episodes), k)]
