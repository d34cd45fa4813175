"""Collection and evaluation by workers on Ray: the same records as in one process, whoever dies meanwhile."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.ray_nodes import SMALL, processes, ray_nodes, workers
from configs.collect import CollectConfig
from configs.evaluation import EvalConfig
from configs.load import ConfigError, load_config
from data_gen.rows import load_rows
from eval.evaluate import run_eval
from memcompiler.collection import run_collect
from memory.bank import MemoryBank
from runtime.checksums import parse_row
from tests.waiting import lines, until

ROOT = Path(__file__).parents[2]
GAMES = ["env.scenes={train: 24, test: 1}", "limit=48", "concurrency=4"]
ON_RAY = ["cluster=ray", "ray.batch_size=2"]
TINY = {"model": "zoo/household/executor", "dtype": "float32", "instructions": "none", "max_new_tokens": 16}
PLAIN: dict[str, Any] = {
    "env": {"name": "household", "scenes": {"train": 2, "test": 3}},
    "executor": TINY,
    "limit": 6,
    "max_steps": 3,
    "deliveries": ["none", "static_top1", "expert_compiler"],
    "baseline": "none",
}


def collect(out: Path, *settings: str) -> Path:
    run_collect(load_config(CollectConfig, "collect/quickstart", [*GAMES, *settings]), out)
    return out


def evaluate(out: Path, **settings: Any) -> Path:
    run_eval(EvalConfig.model_validate({**PLAIN, **settings}), out, "resume")
    return out


def without_clocks(value: Any) -> Any:
    if isinstance(value, list):
        return [without_clocks(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    clocks = ("seconds", "seconds_per_step", "latency", "git", "cluster", "ray")
    return {key: without_clocks(inner) for key, inner in value.items() if key not in clocks}


def record(out: Path) -> list[str]:
    """The lines of a record, without clocks."""
    rows = [parse_row(line) for line in (out / "episodes.jsonl").read_text().splitlines()]
    return [json.dumps(without_clocks(row)) for row in rows]


def assert_same_collection(one: Path, other: Path) -> None:
    assert record(one) == record(other)
    assert load_rows(one / "rows") == load_rows(other / "rows")
    assert MemoryBank(one / "bank").entries() == MemoryBank(other / "bank").entries()
    said = [without_clocks(json.loads((out / "collect.json").read_text())) for out in (one, other)]
    assert {k: v for k, v in said[0].items() if k != "bank"} == {k: v for k, v in said[1].items() if k != "bank"}


def meanwhile(out: Path, n: int, act: Callable[[], object]) -> Callable[[], None]:
    """Do something as soon as n episodes are on record; what is returned checks that it was done in the middle."""
    left: list[int] = []

    def watch() -> None:
        until(lambda: lines(out / "episodes.jsonl") >= n, 400, 0.002)
        act()
        left.append(48 - lines(out / "episodes.jsonl"))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()

    def done() -> None:
        thread.join(100)
        assert left and left[0] > 0, f"it ended before: {left}"

    return done


def command(out: Path) -> list[str]:
    collects = [sys.executable, "-m", "memcompiler", "collect", "-c", "collect/quickstart", "--out", str(out)]
    return [*collects, *GAMES, *ON_RAY]


@contextmanager
def started(out: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a collection by one worker in a process of its own, which is gone after."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([*command(out), "ray.workers=1"], cwd=ROOT, env=env, **pipes) as driver:
        try:
            yield driver
        finally:
            driver.kill()


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> Path:
    return collect(tmp_path_factory.mktemp("local") / "collect")


@pytest.mark.slow
@pytest.mark.alone
def test_two_nodes_collect_and_evaluate_as_a_single_process_does_with_a_worker_killed_as_well(tmp_path, local):
    """Evaluations byte for byte where each episode is alone in its batch; side by side, sums differ in their last
    digits at most, which no greedy choice and no number of this evaluation shows."""
    with ray_nodes(1, 1):
        before = signal.getsignal(signal.SIGTERM)
        done = meanwhile(tmp_path / "killed", 4, lambda: os.kill(until(workers)[0], signal.SIGKILL))
        assert_same_collection(collect(tmp_path / "killed", *ON_RAY), local)
        done()
        assert signal.getsignal(signal.SIGTERM) == before
        for name, settings in {"alone": {"concurrency": 1}, "beside": {"concurrency": 3}}.items():
            here = evaluate(tmp_path / f"{name}-here", **settings)
            there = evaluate(tmp_path / f"{name}-there", cluster="ray", ray={"batch_size": 3}, **settings)
            assert sorted(record(here)) == sorted(record(there))
            numbers = [json.loads((out / "results.json").read_text()) for out in (here, there)]
            assert without_clocks(numbers[0]) == without_clocks(numbers[1])


@pytest.mark.slow
@pytest.mark.alone
def test_a_node_that_is_lost_and_one_that_joins_late(tmp_path, local):
    out = tmp_path / "run"
    with ray_nodes(0, 1) as cluster:  # nobody can work on the head
        with started(out) as driver:  # nodes are added in a process's main thread alone, which has to be free
            until(lambda: lines(out / "episodes.jsonl") >= 4, 400, 0.002, process=driver)
            [lost] = cluster.worker_nodes
            cluster.remove_node(lost, allow_graceful=False)
            assert lines(out / "episodes.jsonl") < 48
            cluster.add_node(num_cpus=1, **SMALL)
            said, _ = driver.communicate(timeout=400)
        assert driver.returncode == 0, said[-2000:]
        assert_same_collection(out, local)


@pytest.mark.slow
@pytest.mark.alone
def test_a_driver_killed_with_its_own_ray_leaves_no_process_and_the_same_command_goes_on(tmp_path, local, monkeypatch):
    out, mark = tmp_path / "run", f"MARK={tmp_path}"
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("MARK", str(tmp_path))
    with started(out) as driver:
        until(lambda: lines(out / "episodes.jsonl") >= 4, 400, 0.002, process=driver)
        driver.send_signal(signal.SIGKILL)
        driver.wait(30)
    until(lambda: not processes(mark), 90, 0.5, words=lambda: processes(mark))
    before = (out / "episodes.jsonl").read_bytes()
    kept = Counter(parse_row(line)["task_id"] for line in before[: before.rfind(b"\n") + 1].splitlines())
    assert 4 <= len(kept) < 48
    with started(out) as driver:
        said, _ = driver.communicate(timeout=400)
    assert driver.returncode == 0, said[-2000:]
    assert f"resumed at task {len(kept)} of 48" in said
    assert_same_collection(out, local)
    until(lambda: not processes(mark), 60, 0.5, words=lambda: processes(mark))


@pytest.mark.slow
@pytest.mark.alone
def test_a_job_that_is_submitted_collects_what_a_single_process_does(tmp_path, local):
    out = tmp_path / "run"
    with ray_nodes(2, dashboard=True) as cluster:
        ray, address = Path(sys.executable).with_name("ray"), f"http://{cluster.head_node.webui_url}"
        submit = [str(ray), "job", "submit", "--address", address, "--", "env", "-C", str(ROOT), *command(out)]

        def answered() -> subprocess.CompletedProcess[str] | None:
            """What became of it, unless it is to be asked again: the agent that takes jobs starts after its node."""
            done = subprocess.run(submit, capture_output=True, text=True, timeout=400, cwd=tmp_path)
            return None if "No available agent to submit job" in done.stderr else done

        done = until(answered, 120, 1)
        assert done.returncode == 0 and "48 of 48 teacher episodes" in done.stdout, done.stdout[-2000:] + done.stderr
    assert_same_collection(out, local)


# -- what needs no Ray -------------------------------------------------------------------------------------------------


def test_without_ray_a_run_says_which_extra_is_missing_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for run in (lambda: collect(tmp_path / "run", *ON_RAY), lambda: evaluate(tmp_path / "run", cluster="ray")):
        with pytest.raises(ModuleNotFoundError, match="cluster=ray needs Ray: uv sync --inexact --extra ray"):
            run()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("schema", "settings", "words"),
    [
        (EvalConfig, ["memory.protocol=online"], "every episode depends on the memory"),
        (EvalConfig, ["memory.protocol=living"], "workers cannot share them: use cluster=local"),
        (EvalConfig, ["executor.engine=api", "executor.api.model=m"], "only one process can enforce the endpoint"),
        (EvalConfig, ["memory.api.model=m"], "only one process can enforce the budget"),
        (CollectConfig, ["teacher=endpoint", "api.model=m"], "bank grows round by round"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(schema, settings, words):
    load_config(schema, None, settings)
    with pytest.raises(ConfigError, match=words):
        load_config(schema, None, [*settings, "cluster=ray"])
