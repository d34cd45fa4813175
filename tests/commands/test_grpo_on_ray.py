"""GRPO on Ray, on two nodes that share this machine: what a single process learns, whoever dies meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from benchmarks.ray_nodes import node_of, parent, processes, ray_nodes
from compiler import checkpoint
from configs.collect import CollectConfig
from configs.load import ConfigError, load_config
from configs.training import GrpoConfig, SftConfig
from memcompiler.collection import run_collect
from runtime.checksums import parse_row
from tests import vllm_engines
from tests.waiting import lines, until
from training.grpo import train_grpo
from training.ray_placement import ClusterLayout, RoleLayout
from training.ray_trainer import RECORD, layout_on
from training.sft import train_sft

ROOT = Path(__file__).parents[2]
SCENES = "env.scenes={train: 3, test: 1}"
UPDATES = 4


@pytest.fixture(scope="module")
def sft(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("sft")
    run_collect(load_config(CollectConfig, "collect/quickstart", [SCENES]), out / "collect")
    rows = [f"rows={out}/collect/rows", "max_steps=25"]
    train_sft(load_config(SftConfig, "sft/quickstart", rows), out / "sft")
    return out / "sft"


def settings(sft: Path, **more: Any) -> list[str]:
    given = {
        "compiler.checkpoint": sft,
        "tasks": 2,
        "group_size": 4,
        "max_steps": 6,
        "updates": UPDATES,
        "save_every": 1,
        "keep": UPDATES,
        "sampling.temperature": 1.2,
        "env.visual_share": 0.5,
        **more,
    }
    return [SCENES, *(f"{name}={value}" for name, value in given.items())]


def grpo(sft: Path, out: Path, **more: Any) -> Path:
    train_grpo(load_config(GrpoConfig, "grpo/quickstart", settings(sft, **more)), out)
    return out


@pytest.fixture(scope="module")
def local(sft, tmp_path_factory) -> Path:
    return grpo(sft, tmp_path_factory.mktemp("local") / "run")


def rows(path: Path) -> list[dict[str, Any]]:
    return [parse_row(line) for line in path.read_text().splitlines()] if path.exists() else []


def numbers(out: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if "seconds" not in k} for row in rows(out / "metrics.jsonl")]


def assert_same_run(one: Path, other: Path) -> None:
    assert numbers(one) == numbers(other)
    assert rows(one / "rollouts.jsonl") == rows(other / "rollouts.jsonl")
    found = [checkpoint.find(out) for out in (one, other)]
    for file in ("adapter/adapter_model.safetensors", "projector.safetensors"):
        mine, theirs = (load_file(folder / file) for folder in found)
        assert mine.keys() == theirs.keys() and all(mine[name].equal(theirs[name]) for name in mine)


def kill(out: Path, role: str) -> float:
    """Kill the one of a role that came last; returns when."""
    os.kill(newest(out, role), signal.SIGKILL)
    return time.time()


def newest(out: Path, role: str) -> int:
    return [row["pid"] for row in rows(out / RECORD) if row["role"] == role and "pid" in row][-1]


def meanwhile(*acts: tuple[Callable[[], Any], Callable[[], Any]]) -> Callable[[], list[Any]]:
    """Do things, each as soon as its condition holds; what is returned waits for what they gave."""
    given: list[Any] = []
    failed: list[Exception] = []

    def watch() -> None:
        try:
            for condition, act in acts:
                until(condition, 400, 0.02)
                given.append(act())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()

    def done() -> list[Any]:
        thread.join(30)
        if failed:
            raise failed[0]
        assert len(given) == len(acts), f"{len(given)} of {len(acts)} were done before the run was over"
        return given

    return done


@pytest.mark.slow
@pytest.mark.alone
def test_a_run_over_which_every_role_was_killed_and_then_their_node_is_that_of_a_single_process(sft, local, tmp_path):
    out = tmp_path / "run"
    at = lambda n: lambda: lines(out / "metrics.jsonl") >= n
    with ray_nodes(0, 1, 1) as cluster:  # nobody can work on the head; one node has room for all

        def lose_node() -> dict[str, float]:
            lost, when = node_of(cluster, newest(out, "trainer")), time.time()
            cluster.remove_node(lost, allow_graceful=False)
            return {"node": when}

        engines = lambda: {role: kill(out, role) for role in ("compiler", "executor")}
        trainer = lambda: {"trainer": kill(out, "trainer")}
        done = meanwhile((at(1), engines), (at(2), trainer), (at(3), lose_node))
        grpo(sft, out, cluster="ray", **{"placement.cpus": 0.3})
        killed = {role: when for given in done() for role, when in given.items()}
    assert_same_run(out, local)
    assert any(row.get("samples") for row in numbers(out)) and not any(row["failures"] for row in numbers(out))
    record = rows(out / RECORD)
    for role, back in (("compiler", "back"), ("trainer", "began")):  # nobody may have asked the executor meanwhile
        own = [row for row in record if row["role"] == role and row["at"] >= killed[role]]
        assert [row["event"] for row in own][:2] == ["lost", back] and own[0]["reason"], own
        seen, there = (row["at"] - killed[role] for row in own[:2])
        print(f"{role}: seen after {seen:.1f} s, replaced after {there:.1f} s")
    after = [row for row in record if row["role"] == "trainer" and row["at"] >= killed["node"]]
    *lost, began = [row["event"] for row in after]  # twice, where Ray put the next one there before it knew
    assert set(lost) == {"lost"} and began == "began", after
    print(f"node: replaced after {after[-1]['at'] - killed['node']:.1f} s")


@pytest.mark.slow
@pytest.mark.alone
def test_two_trainers_learn_with_two_compilers_and_executors_of_their_own(sft, tmp_path):
    """In slices, which rank 0 gives out: nobody but the engines has the compiler whole. Episodes of the second update
    are played while it is learnt from those of the first."""
    more = {"placement.trainers": 2, "placement.compilers": 2, "placement.executors": 0, "backend": "fsdp"}
    more |= {"max_staleness": 1, "loss.importance_cap": 2.0}
    with ray_nodes(1, 1):
        out = grpo(sft, tmp_path / "run", cluster="ray", updates=2, save_every=2, **more)
    made = numbers(out)
    assert [(row["update"], row["staleness"]) for row in made] == [(1, 0), (2, 1)]
    assert not any(row["failures"] for row in made)
    # Engines and trainers find the same log-probabilities where they have the weights of the very update.
    apart = [max(row["apart_text_max"], row["apart_latent_max"]) for row in made]
    assert apart[0] < 1e-3 < apart[1]
    assert len({row["pid"] for row in rows(out / RECORD) if row["event"] in ("began", "ready")}) == 4
    assert checkpoint.read_state(checkpoint.find(out))["step"] == 2


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.alone
@vllm_engines.marks[-1]
def test_vllm_rolls_out_and_acts_and_is_replaced_when_its_own_process_dies(sft, tmp_path, monkeypatch):
    out, more = tmp_path / "run", {"loss.latent_gradient": "density_root", "updates": 2}
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # a process of its own, as on a GPU
    more |= {
        f"{role}.{name}": value
        for role in ("compiler", "executor")
        for name, value in {"engine": "vllm", "vllm.enforce_eager": "true"}.items()
    }

    def kill_engine() -> None:
        [actor] = [row["pid"] for row in rows(out / RECORD) if (row["role"], row["event"]) == ("compiler", "ready")]
        started = {pid: command for pid, command in processes("").items() if parent(pid) == actor}
        # vLLM names its process, but not where the environment moved in memory: then it is the one that was spawned.
        engines = [pid for pid, command in started.items() if "EngineCore" in command or "spawn_main" in command]
        assert len(engines) == 1, started
        os.kill(engines[0], signal.SIGKILL)

    with ray_nodes(1, 1):
        done = meanwhile((lambda: lines(out / "metrics.jsonl") >= 1, kill_engine))
        grpo(sft, out, cluster="ray", **more)
        done()
    made = numbers(out)
    assert [row["update"] for row in made] == [1, 2] and not any(row["failures"] for row in made)
    learnt = [row for row in made if row.get("samples")]
    assert learnt and all(max(row["apart_text_max"], row["apart_latent_max"]) < 1e-3 for row in learnt)
    events = [row["event"] for row in rows(out / RECORD) if row["role"] == "compiler"]
    assert events[:2] == ["ready", "lost"] and events[-1] == "back"


@pytest.mark.slow
@pytest.mark.alone
def test_a_killed_driver_leaves_no_process_and_the_run_goes_on_without_ray(sft, local, tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    out, mark = tmp_path / "run", f"MARK={tmp_path}"
    command = [sys.executable, "-m", "memcompiler", "train", "grpo", "-c", "grpo/quickstart", *settings(sft)]
    quiet: Any = {"cwd": ROOT, "env": {**os.environ, "MARK": str(tmp_path)}, "stdout": subprocess.DEVNULL}
    with subprocess.Popen([*command, "cluster=ray", "--out", str(out)], stderr=subprocess.STDOUT, **quiet) as driver:
        until(lambda: lines(out / "metrics.jsonl") >= 1, 400, 0.02, driver)
        driver.send_signal(signal.SIGKILL)
    until(lambda: not processes(mark), 90, 0.5, words=lambda: processes(mark))
    assert_same_run(grpo(sft, out), local)


# -- what needs no Ray -------------------------------------------------------------------------------------------------


def test_without_ray_a_run_says_which_extra_is_missing_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match="cluster=ray needs Ray: uv sync --inexact --extra ray"):
        grpo(tmp_path / "sft", tmp_path / "run", cluster="ray")
    assert not list(tmp_path.iterdir())


class Gpus:
    """A cluster with so many."""

    def __init__(self, number: int) -> None:
        self._number = number

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 8.0, **({"GPU": float(self._number)} if self._number else {})}

    def remote(self, num_gpus: int) -> Any:
        return lambda call: SimpleNamespace(remote=lambda: 80.0)

    def get(self, ref: float) -> float:
        return ref


def test_a_layout_that_cannot_be_is_refused_before_anything_is_started(monkeypatch):
    config = load_config(GrpoConfig, "grpo/quickstart", [])
    layout = ClusterLayout(RoleLayout(2, 1.0), RoleLayout(1, 1.0, 0.9), RoleLayout(1, 0.5, 0.45))
    monkeypatch.setattr("training.ray_trainer.plan_layout", lambda config, gpus, gib: layout)
    with pytest.raises(ConfigError, match=r"has 2 GPUs, but the run needs 3.5 \(2 trainers of 1, 1 compilers of 1"):
        layout_on(Gpus(2), config)
    assert layout_on(Gpus(4), config) is layout
    nameless = load_config(GrpoConfig, "grpo/quickstart", ["compiler.checkpoint=null"])
    with pytest.raises(ConfigError, match=r"compiler\.checkpoint: name the SFT run"):
        layout_on(Gpus(0), nameless)
