"""The public API: cheap to import, and an agent that decides as the evaluation's loop does."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import memcompiler as mc
from agent import deliveries
from agent.episode import EpisodeLimits, run_episodes
from agent.records import Episode
from compiler.checkpoint import CheckpointError
from configs.load import ConfigError
from data_gen.experience import collect_experience
from data_gen.tasks import episode_specs
from envs.registry import Environments, settings_of
from runtime.errors import StopReason
from tests.fakes import Recorder

HEAVY = ("torch", "transformers", "pydantic", "numpy", "PIL", "typer", "memcompiler.api")


def test_importing_it_imports_nothing_else() -> None:
    code = f"import sys, memcompiler; print([name for name in {HEAVY} if name in sys.modules], *dir(memcompiler))"
    [line] = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    assert line.startswith("[] ") and set(mc.__all__) <= set(line.split())


@pytest.mark.parametrize("name", mc.__all__)
def test_every_public_name_is_there_with_a_docstring(name: str) -> None:
    assert getattr(mc, name).__doc__


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="no attribute 'compile'"):
        mc.compile  # noqa: B018


# Against the evaluation's loop ----------------------------------------------------------------------------------------


@dataclass
class World:
    """Models that ship, a home, and a bank of what its expert did."""

    compiler: Any
    executor: Any
    envs: Environments
    memory: Any
    tasks: list[mc.Task]


class Unexplained:
    def rationales(self, episodes: Sequence[Episode]) -> list[str]:
        return ["" for _ in episodes]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    compiler, executor = mc.load("zoo/alfworld", "executor.device=cpu", "compiler.device=cpu")
    memory = mc.open_memory(tmp_path_factory.mktemp("api") / "bank")
    with Environments(settings_of({"name": "household", "scenes": {"train": 1, "test": 1}})) as envs:
        tasks = envs.tasks("train")
        collect_experience(envs.lease, tasks[4:8], memory, Unexplained())
        yield World(compiler, executor, envs, memory, tasks[:3])


def decisions(episode: Episode) -> list[tuple[object, ...]]:
    return [(s.action, s.guidance, s.reason, s.brief_after, s.soft, s.soft_read, s.feedback) for s in episode.steps]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["compiled", "compiled_text", "compiled_low_confidence", "compiled_gated", "static", "none"]
)
def test_an_agent_decides_as_the_evaluation_does(world: World, name: str) -> None:
    gate = mc.load_gate("zoo/alfworld") if name == "compiled_gated" else None
    delivery = deliveries.find(name).create(world.compiler, 0, None, gate)
    specs = episode_specs(world.tasks, world.memory, 4)
    expected = run_episodes(
        world.envs.lease, specs, delivery, world.executor, EpisodeLimits(max_steps=6), concurrency=1
    )
    agent = mc.Agent(world.compiler, world.executor, world.memory, delivery=name, gate=gate)
    for task, reference in zip(world.tasks, expected, strict=True):
        env = world.envs.lease()
        observation, progress, success = env.reset(task), 0.0, False
        agent.begin(task.goal, task.scene, task_id=task.id)
        for record in reference.steps:
            step = agent.act(observation, progress=progress)
            assert (step.action, step.guidance, step.state) == (record.action, record.guidance, record.brief_after)
            assert (step.soft is not None) == record.soft_read
            transition = env.step(step.action)
            observation, progress, success = transition.observation, transition.progress, transition.success
        episode = agent.end(success, observation.text, commit=False)
        assert decisions(episode) == decisions(reference) and episode.success == reference.success
        assert (episode.memory_ids, episode.memory_text) == (reference.memory_ids, reference.memory_text)


# With stand-ins of the models -----------------------------------------------------------------------------------------


def played(agent: mc.Agent, success: bool, **how: Any) -> Episode:
    """Two steps of a task."""
    agent.begin("put a mug in cabinet", "home 1", **how)
    agent.act("You are in a kitchen.", ["go north", "go south"])
    agent.act("You see a mug.", ["go north", "go south"])
    return agent.end(success, "Done.")


def test_an_episode_that_ended_is_in_memory(tmp_path: Path) -> None:
    recorder, memory = Recorder(), mc.open_memory(tmp_path / "bank")
    agent = mc.Agent(recorder, recorder, memory)
    episode = played(agent, True, task_id="kitchen/1")
    assert (episode.success, episode.stop_reason, episode.memory_ids) == (True, StopReason.SUCCESS, ())
    assert [(s.observation, s.feedback) for s in episode.steps] == [
        ("You are in a kitchen.", "You see a mug."),
        ("You see a mug.", "Done."),
    ]
    [entry] = memory
    assert entry.provenance.success and entry.provenance.actions == tuple(s.action for s in episode.steps)
    assert played(agent, False, task_id="kitchen/1").memory_ids == ()  # nothing that its own task left
    assert entry.id in played(agent, False).memory_ids
    assert "failed: done" in next(e.text for e in memory if not e.provenance.success)
    assert len(mc.open_memory(tmp_path / "bank", version=memory.snapshot())) == len(memory)


def test_an_agent_works_where_an_event_loop_runs() -> None:
    async def in_a_notebook() -> Episode:
        return played(mc.Agent(Recorder(), Recorder()), True)

    assert len(asyncio.run(in_a_notebook()).steps) == 2


def test_a_failure_is_raised_recorded_and_not_committed(tmp_path: Path) -> None:
    class Broken(Recorder):
        def act(self, requests: Any) -> Any:
            raise OSError("no GPU")

    memory = mc.open_memory(tmp_path / "bank")
    agent = mc.Agent(Recorder(), Broken(), memory)
    agent.begin("put a mug in cabinet")
    with pytest.raises(RuntimeError, match="no GPU"):
        agent.act("You are in a kitchen.")
    episode = agent.end(False)
    assert episode.stop_reason == StopReason.EXECUTOR_FAILURE and len(memory) == 0
    with pytest.raises(RuntimeError, match=r"call agent\.begin"):
        agent.act("You are in a kitchen.")


def test_deliveries_that_need_what_is_not_there_are_refused() -> None:
    for name, why in (("expert_compiler", "control"), ("compiled_gated", "needs"), ("compiled", "trained compiler")):
        with pytest.raises(ValueError, match=why):
            mc.Agent(Recorder() if name == "compiled_gated" else None, Recorder(), delivery=name)


def test_a_registered_delivery_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries, "DELIVERIES", dict(deliveries.DELIVERIES))
    spec = mc.DeliverySpec("compiled_twice", "compiled, twice", compiler=lambda trained, *_: trained)
    mc.register_delivery(spec)
    mc.register_delivery(spec)
    assert played(mc.Agent(Recorder(), Recorder(), delivery="compiled_twice"), True).delivery == "compiled_twice"
    with pytest.raises(ValueError, match="'compiled_twice' already"):
        mc.register_delivery(replace(spec, label="another"))


def test_what_cannot_be_loaded_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        mc.load(tmp_path)
    (tmp_path / "state.json").write_text(json.dumps({"environment": "household"}))
    with pytest.raises(ConfigError, match="names compiler and executor"):
        mc.load(tmp_path)
    with pytest.raises(ConfigError, match=r"executor\.modell"):
        mc.load("zoo/alfworld", "executor.modell=x")


def test_no_public_name_is_a_submodule() -> None:
    """Importing a submodule sets the package's attribute of its name, which would replace the public one."""
    assert not [name for name in mc.__all__ if find_spec(f"memcompiler.{name}")]
