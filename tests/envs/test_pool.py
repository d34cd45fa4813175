"""The pool: leases that behave as environments, and every way in which a worker or its parent may end."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from agent.deliveries import Delivery
from agent.episode import EpisodeLimits, EpisodeSpec, run_episodes
from agent.expert import ExpertExecutor
from envs.base import Environment, EnvironmentFailure, Task
from envs.pool import EnvironmentPool
from envs.spec import PoolLimits, WorkerSpec
from envs.worker_process import WorkerFailure
from runtime.errors import StopReason
from tests.envs.hosted_examples import alive

ROOT = Path(__file__).parents[2]
COUNTDOWN = WorkerSpec("tests.envs.hosted_examples:Countdown")
QUICK = PoolLimits(step_s=20, beat_s=0.05, unresponsive_s=20)


def task(n: int, kind: str = "") -> Task:
    return Task(str(n), "wait", "", "test", kind)


def tasks_of(pool: EnvironmentPool, split: str) -> list[Task]:
    with closing(pool.lease()) as env:
        return env.tasks(split)


def wait_until(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_lease_is_an_environment() -> None:
    with EnvironmentPool(COUNTDOWN, 1, QUICK) as pool:
        assert pool.pids == []
        made = tasks_of(pool, "test")
        assert made[1] == Task("2", "wait", "", "test", "", data={"n": "2"}, isolation={"scene": ("a", "b")})
        with pytest.raises(ValueError, match="no split 'x'"):
            tasks_of(pool, "x")
        env = pool.lease()
        assert isinstance(env, Environment) and env.name == "countdown" and env.in_process is False
        seen = env.reset(made[1])
        assert (seen.text, seen.admissible) == ("start of wait", ("wait", "look"))
        assert seen.image is not None and seen.image.size == (1, 1) and seen.image.getpixel((0, 0)) == 2
        assert env.expert() == ["wait", "wait"]
        after = env.step("wait")
        assert (after.progress, after.success, after.done) == (0.5, False, False)
        assert env.step("look").success
        env.close()
        assert (pool.counters.started, pool.counters.lost) == (1, 0)


def test_the_household_is_the_same_in_a_worker() -> None:
    from envs.household.environment import HouseholdEnvironment

    arguments = {"scenes": {"train": 2, "test": 2}, "seed": 3, "notes_places": True}
    direct = HouseholdEnvironment(**arguments)  # type: ignore[arg-type]
    with EnvironmentPool(WorkerSpec("envs.household.environment:HouseholdEnvironment", arguments), 1) as pool:
        assert tasks_of(pool, "test") == direct.tasks("test")
        remote = pool.lease()
        for one in direct.tasks("test")[:4]:
            pairs = [(direct.reset(one), remote.reset(one))]
            assert [key for key, _ in pairs[0][0].beliefs] == ["places", "unsearched"]
            plan = direct.expert()
            assert plan == remote.expert() and plan
            for action in plan:
                here, there = direct.step(action), remote.step(action)
                pairs.append((here.observation, there.observation))
                assert (here.progress, here.success, here.done) == (there.progress, there.success, there.done)
            for here, there in pairs:
                assert (here.text, here.admissible, here.beliefs) == (there.text, there.admissible, there.beliefs)
                assert here.image.tobytes() == there.image.tobytes()  # type: ignore[union-attr]


def test_a_worker_is_used_again_and_others_wait_for_it() -> None:
    with EnvironmentPool(COUNTDOWN, 1, PoolLimits(lease_s=0.2)) as pool:
        first, second = pool.lease(), pool.lease()
        first.reset(task(1))
        [pid] = pool.pids
        with pytest.raises(EnvironmentFailure, match=r"no worker became free.*at most 1"):
            second.reset(task(1))
        first.close()
        second.reset(task(1))
        assert pool.pids == [pid]
        for wrong in (lambda: first.reset(task(1)), lambda: pool.lease().step("wait")):
            with pytest.raises(EnvironmentFailure, match=r"closed|no live episode"):
                wrong()


def test_what_the_environment_raises_leaves_the_worker_alive() -> None:
    with EnvironmentPool(COUNTDOWN, 1, QUICK) as pool:
        env = pool.lease()
        env.reset(task(3))
        with pytest.raises(EnvironmentFailure, match="KeyError in step: 'lamp'"):
            env.step("raise lamp")
        env.step("wait")
        with pytest.raises(EnvironmentFailure, match="RuntimeError in reset: this game is corrupt"):
            env.reset(task(3, "broken"))
        with pytest.raises(EnvironmentFailure, match="over the limit"):
            env.step("huge")
        with pytest.raises(EnvironmentFailure, match="TypeError in reset: the request cannot be sent"):
            env.reset(Task("1", "wait", "", "test", "", data={"path": Path()}))  # type: ignore[dict-item]
        [pid] = pool.pids
        env.close()  # twice in a row without a step: it may be broken for good
        assert pool.pids == [] and not alive(pid)
        assert pool.counters.failures == {
            "KeyError": 1,
            "RuntimeError": 1,
            "FrameError": 1,
            "TypeError": 1,
            "faulty": 1,
        }


@pytest.mark.parametrize(
    ("action", "limits", "name", "says"),
    [
        (
            "sleep 60",
            PoolLimits(step_s=0.5, beat_s=0.05),
            "timeout",
            r"timed out after 0.5 s in step.*PoolLimits.step_s",
        ),
        ("exit 3", QUICK, "died", r"(?s)died \(exit 3\) in step; its last output:.*something terrible happened"),
        ("stop", PoolLimits(beat_s=0.05, unresponsive_s=1), "silent", r"no heartbeat for 1 s in step"),
        ("garbage", QUICK, "garbled", r"sent an invalid frame .*Unit"),
        ("nonsense", QUICK, "garbled", r"invalid (answer|header)"),
    ],
)
def test_a_broken_worker_is_killed_with_its_children_and_replaced(
    action: str, limits: PoolLimits, name: str, says: str, tmp_path: Path
) -> None:
    with EnvironmentPool(COUNTDOWN, 1, limits) as pool:
        env = pool.lease()
        env.reset(task(9))
        [pid] = pool.pids
        env.step(f"child {tmp_path / 'pid'}")
        grandchild = int((tmp_path / "pid").read_text())
        assert alive(grandchild)
        with pytest.raises(WorkerFailure, match=says) as caught:
            env.step(action)
        assert caught.value.name == name and f"worker {pid} " in str(caught.value)
        assert not alive(pid) and pool.pids == []
        wait_until(lambda: not alive(grandchild))
        env.close()
        fresh = pool.lease()
        assert fresh.reset(task(1)).text == "start of wait" and fresh.step("wait").success
        assert (pool.counters.started, pool.counters.restarted, pool.counters.lost) == (2, 1, 1)
        assert pool.counters.killed == (name != "died") and pool.counters.failures == {name: 1}


def test_a_worker_that_dies_at_rest_costs_no_episode() -> None:
    with EnvironmentPool(COUNTDOWN, 1, QUICK) as pool:
        tasks_of(pool, "test")
        [pid] = pool.pids
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not alive(pid))
        assert pool.lease().reset(task(1)).text == "start of wait"
        assert pool.counters.restarted == 1


def test_the_restart_budget_ends() -> None:
    with EnvironmentPool(COUNTDOWN, 1, PoolLimits(restarts=1)) as pool:
        for _ in range(2):
            env = pool.lease()
            env.reset(task(2))
            with pytest.raises(WorkerFailure):
                env.step("exit 9")
        with pytest.raises(EnvironmentFailure, match=r"budget is spent \(1\).*'died': 2.*exit 9"):
            env.reset(task(2))


def test_a_start_that_fails_says_why() -> None:
    for spec, says in (
        (WorkerSpec("tests.envs.hosted_examples:Unbuildable"), "OSError in start: no display: start Xvfb"),
        (WorkerSpec("no.such.module:Class"), "ModuleNotFoundError in start"),
        (WorkerSpec("json:dumps", python="/no/such/python"), "cannot start /no/such/python.*WorkerSpec.python"),
        (WorkerSpec("tests.envs.hosted_examples:Countdown", {"start_s": 60}), "timed out after 1 s in start"),
    ):
        with EnvironmentPool(spec, 1, PoolLimits(start_s=1 if spec.arguments else 60)) as pool:
            with pytest.raises(WorkerFailure, match=says) as caught:
                tasks_of(pool, "test")
            assert caught.value.name == ("timeout" if spec.arguments else "start") and pool.pids == []


def test_a_foreign_python_sees_nothing_of_ours(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "foreign.py").write_text(
        "import sys\n"
        "class Path:\n"
        "    def tasks(self, split):\n"
        "        return [dict(id=p, goal='', scene='', split=split, kind='') for p in sys.path]\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    spec = WorkerSpec("foreign:Path", python=sys.executable, env={"PYTHONPATH": str(tmp_path)})
    with EnvironmentPool(spec, 1) as pool:
        seen = {Path(one.id).resolve() for one in tasks_of(pool, "x")}
    assert tmp_path.resolve() in seen and not seen & {ROOT, ROOT / "envs"}


def test_closing_a_pool_closes_environments_at_rest_and_cuts_short_those_at_work(tmp_path: Path) -> None:
    pool = EnvironmentPool(WorkerSpec(COUNTDOWN.factory, {"closed_at": str(tmp_path / "closed")}), 2)
    rest, work = pool.lease(), pool.lease()
    rest.reset(task(2))
    work.reset(task(2))
    rest.close()
    failures: list[BaseException] = []

    def step() -> None:
        try:
            work.step("sleep 60")
        except EnvironmentFailure as failure:
            failures.append(failure)

    thread = threading.Thread(target=step)
    thread.start()
    pids = pool.pids
    wait_until(lambda: work._worker is not None and work._worker.mid_call)
    pool.close()
    thread.join(20)
    assert len(failures) == 1 and not any(alive(pid) for pid in pids) and len(pids) == 2
    assert (tmp_path / "closed").read_text() == "closed\n"
    with pytest.raises(EnvironmentFailure, match="pool is closed"):
        pool.lease().reset(task(1))
    pool.close()


def test_a_call_cut_short_from_another_thread_costs_the_worker() -> None:
    with EnvironmentPool(COUNTDOWN, 1) as pool:
        env = pool.lease()
        env.reset(task(2))
        [pid] = pool.pids
        timer = threading.Timer(0.2, env.close)
        timer.start()
        with pytest.raises(WorkerFailure, match=r"ended by the pool|killed by SIGTERM|closed its socket"):
            env.step("sleep 60")
        timer.join()
        assert not alive(pid) and pool.counters.failures == {"abandoned": 1}


# Through the loop -----------------------------------------------------------------------------------------------------


def test_the_loop_never_asks_for_more_than_the_pool_has_and_batches_alike() -> None:
    class Batches(ExpertExecutor):
        batched = True  # as models are

        def act(self, requests, contexts=()):
            seen.append([(r.history, context.plan) for r, context in zip(requests, contexts, strict=True)])
            return super().act(requests, contexts)

    specs = [EpisodeSpec(task(n)) for n in (2, 4, 3, 1, 2, 5, 1)]
    runs = []
    with EnvironmentPool(COUNTDOWN, 2, PoolLimits(lease_s=20)) as pool:
        for _ in range(2):
            seen: list = []
            episodes = run_episodes(
                pool.lease, specs, Delivery("none", "none"), Batches(), EpisodeLimits(9), concurrency=64
            )
            assert [len(e.steps) for e in episodes] == [2, 4, 3, 1, 2, 5, 1] and all(e.success for e in episodes)
            runs.append(seen)
    assert runs[0] == runs[1] and max(map(len, runs[0])) == 2


def test_episodes_wait_for_slow_environments_side_by_side() -> None:
    """Four episodes at once can only be seen if none blocks the loop: each step waits until all four have come."""
    together, gate = [], threading.Barrier(4, timeout=20)

    class Meeting:
        name, in_process = "meeting", False

        def reset(self, task):
            gate.wait()
            together.append(threading.get_ident())
            raise EnvironmentFailure("met")

        def close(self):
            raise OSError("the display is gone")

    specs = [EpisodeSpec(task(1))] * 4
    episodes = run_episodes(Meeting, specs, Delivery("none", "none"), ExpertExecutor(), EpisodeLimits(9))  # type: ignore[arg-type]
    assert len(set(together)) == 4 and [e.error for e in episodes] == ["met"] * 4


def test_a_failing_close_does_not_lose_the_episode() -> None:
    with EnvironmentPool(COUNTDOWN, 1) as pool:

        def lease():
            env = pool.lease()
            give_back = env.close

            def close() -> None:
                give_back()
                raise OSError("the display is gone")

            env.close = close
            return env

        [episode] = run_episodes(
            lease, [EpisodeSpec(task(2))], Delivery("none", "none"), ExpertExecutor(), EpisodeLimits(9), 1
        )
    assert episode.stop_reason is StopReason.SUCCESS and "OSError: the display is gone" in episode.error


def test_an_expert_that_fails_ends_its_own_episode_only() -> None:
    class Batches(ExpertExecutor):
        batched = True  # both episodes are in one batch: the other one must not fail with it

    with EnvironmentPool(COUNTDOWN, 2) as pool:

        def lease():
            env, calls = pool.lease(), itertools.count()
            plan = env.expert

            def expert() -> list[str] | None:
                if next(calls) == 1 and next(killed) == 0:
                    os.kill(env._worker.pid, signal.SIGKILL)
                    time.sleep(0.1)
                return plan()

            env.expert = expert
            return env

        killed = itertools.count()
        specs = [EpisodeSpec(task(3)), EpisodeSpec(task(5))]
        episodes = run_episodes(lease, specs, Delivery("none", "none"), Batches(), EpisodeLimits(9))
    reasons = sorted(str(e.stop_reason) for e in episodes)
    assert reasons == ["environment_failure", "success"]
    assert "died (killed by SIGKILL) in expert" in "".join(e.error for e in episodes)


# The parent's ends ----------------------------------------------------------------------------------------------------

PARENT = """
import sys, time, threading
from envs.base import Task
from envs.pool import EnvironmentPool
from envs.spec import WorkerSpec

pool = EnvironmentPool(WorkerSpec("tests.envs.hosted_examples:Countdown"), 2)
rest, work = pool.lease(), pool.lease()
for env, name in ((rest, "a"), (work, "b")):
    env.reset(Task("9", "wait", "", "test", ""))
    env.step("child " + sys.argv[1] + "/" + name)
rest.close()
print(*pool.pids, flush=True)
sys.stdin.readline()  # they have been seen alive
end = sys.argv[2]
if end == "exit":
    pass
elif end == "exception":
    raise RuntimeError("a bug")
elif end == "collected":
    del pool, rest, work, env
    print("collected", flush=True)
    time.sleep(60)
else:
    work.step("stop" if end == "SIGKILL" else "sleep 60")
"""

LOOP = """
import sys
from agent.deliveries import Delivery
from agent.episode import EpisodeSpec, EpisodeLimits, run_episodes
from envs.base import Task
from envs.pool import EnvironmentPool
from envs.spec import WorkerSpec
from executor.records import PAPER_VIEW, Action, Grounding

class Sleeper:
    accepts_soft = sees_images = False
    reads = PAPER_VIEW
    def act(self, requests):
        print(*pool.pids, flush=True)
        return [Action("sleep 60", Grounding.CHOICE, "", (), 0, 0) for _ in requests]

pool = EnvironmentPool(WorkerSpec("tests.envs.hosted_examples:Countdown"), 2)
specs = [EpisodeSpec(Task("9", "wait", "", "test", ""))] * 4
run_episodes(pool.lease, specs, Delivery("none", "none"), Sleeper(), EpisodeLimits(9))
"""


def start(code: str, *arguments: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A parent of its own, and its two workers."""
    command = [sys.executable, "-c", code, *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    parent = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
    assert parent.stdin is not None and parent.stdout is not None
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2 and all(map(alive, workers))
    parent.stdin.write("\n")
    parent.stdin.flush()
    return parent, workers


@pytest.mark.parametrize("end", ["exit", "exception", "collected", "SIGINT", "SIGTERM", "SIGKILL"])
def test_nothing_survives_the_parent(end: str, tmp_path: Path) -> None:
    parent, workers = start(PARENT, str(tmp_path), end)
    family = [*workers, *(int((tmp_path / name).read_text()) for name in "ab")]
    if end.startswith("SIG"):
        time.sleep(0.3)  # into the call
        parent.send_signal(getattr(signal, end))
    if end == "collected":
        assert parent.stdout is not None and parent.stdout.readline() == "collected\n"
    else:
        parent.wait(30)
    wait_until(lambda: not any(map(alive, family)))
    if end == "collected":
        parent.kill()
    _, errors = parent.communicate()
    assert {"exception": "a bug", "SIGINT": "KeyboardInterrupt"}.get(end, "") in errors


@pytest.mark.slow  # imports torch anew
def test_ctrl_c_ends_a_run_at_once() -> None:
    parent, workers = start(LOOP)
    time.sleep(0.3)  # into the steps, which would take a minute
    parent.send_signal(signal.SIGINT)
    _, errors = parent.communicate(timeout=30)
    assert "KeyboardInterrupt" in errors
    wait_until(lambda: not any(map(alive, workers)))
