"""A thousand episodes while workers are killed and stopped: every job comes back, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from agent.deliveries import Delivery
from agent.episode import EpisodeLimits, EpisodeSpec, run_episodes
from envs.pool import EnvironmentPool
from envs.spec import PoolLimits, WorkerSpec
from executor.records import PAPER_VIEW, Action, Grounding
from runtime.errors import StopReason
from tests.envs.hosted_examples import alive

HOMES = WorkerSpec(
    "envs.household.environment:HouseholdEnvironment", {"scenes": {"train": 2, "test": 2}, "images": False}
)
LIMITS = PoolLimits(beat_s=0.2, unresponsive_s=4.0, restarts=1000)
ROUNDS, JOBS = 4, 250
EVERY = 40


class FirstCommand:
    """Acts without reading."""

    accepts_soft = sees_images = False
    reads = PAPER_VIEW

    def act(self, requests):
        return [Action(r.admissible[0], Grounding.CHOICE, "", (), 0, 0) for r in requests]


class Saboteur(threading.Thread):
    """Kills a random worker, or stops it, whenever `EVERY` more episodes are over."""

    def __init__(self, pool: EnvironmentPool) -> None:
        super().__init__(daemon=True)
        self.pool, self.turns, self.over = pool, threading.Semaphore(0), False
        self.pids: dict[int, str] = {}  # what each worker got
        self._episodes, self._random = 0, random.Random(0)

    def on_episode(self, _: object) -> None:
        self._episodes += 1
        if self._episodes % EVERY == 0:
            self.turns.release()

    def run(self) -> None:
        while self.turns.acquire() and not self.over:
            time.sleep(self._random.uniform(0, 0.1))  # not always at the end of an episode
            unhurt = [pid for pid in self.pool.pids if pid not in self.pids]
            if unhurt:
                pid, name = self._random.choice(unhurt), "SIGSTOP" if len(self.pids) % 10 == 5 else "SIGKILL"
                self.pids[pid] = name  # first: its failure may be looked up at once
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, getattr(signal, name))

    def end(self) -> None:
        self.over = True
        self.turns.release()
        self.join()


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc to see memory and processes")
def test_a_thousand_episodes_survive_a_saboteur(capsys) -> None:
    reasons: Counter[str] = Counter()
    with EnvironmentPool(HOMES, 4, LIMITS) as pool:
        with contextlib.closing(pool.lease()) as env:
            tasks = env.tasks("test")
        saboteur = Saboteur(pool)
        saboteur.start()
        resident = []
        ever = set(pool.pids)
        for number in range(ROUNDS):
            specs = [EpisodeSpec(tasks[(number + i) % len(tasks)]) for i in range(JOBS)]
            episodes = run_episodes(
                pool.lease,
                specs,
                Delivery("none", "none"),
                FirstCommand(),
                EpisodeLimits(4),
                on_episode=saboteur.on_episode,
            )
            assert [e.task_id for e in episodes] == [spec.task.id for spec in specs]
            for episode in episodes:
                reasons[str(episode.stop_reason)] += 1
                if episode.stop_reason is StopReason.ENVIRONMENT_FAILURE:
                    named = re.match(r"worker (\d+) (died \(killed by SIGKILL\)|sent no heartbeat)", episode.error)
                    assert named and int(named[1]) in saboteur.pids, episode.error
                else:
                    assert len(episode.steps) == 4 and not episode.error
            ever |= set(pool.pids)
            resident.append(resident_mib())
        saboteur.end()
    counters, hits = pool.counters, Counter(saboteur.pids.values())
    with capsys.disabled():
        print(f"\n  {dict(reasons)}, {dict(hits)}, {counters}, resident {resident[1]:.0f} to {resident[-1]:.0f} MiB")
    assert sum(reasons.values()) == ROUNDS * JOBS
    failed = reasons["environment_failure"]
    assert 0 < failed <= counters.lost <= hits.total() and reasons.total() - failed > 0.9 * ROUNDS * JOBS
    assert set(counters.failures) == {"silent", "died"} and hits["SIGSTOP"] > 0
    assert resident[-1] - resident[1] < 32
    assert not any(alive(pid) for pid in ever | saboteur.pids.keys())
