"""Histories for synthetic questions: what the environments' experts do in the train splits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from agent.deliveries import Delivery
from agent.episode import EpisodeLimits, EpisodeSpec, run_episodes, run_sequences
from agent.expert import ExpertExecutor
from configs.evaluation import EvalConfig
from configs.load import load_config
from data_gen.experience import EXPERT_STEPS, episode_traces
from envs.base import Task
from envs.registry import Environments
from memory.protocol import Trace
from runtime.store import to_json

WORLDS, TASKS = 24, 8  # persistent worlds of each environment, tasks in each
SCIENCE_TASKS = 8  # ScienceWorld's episodes: the first of each kind of task
NOISE = 0.25  # share of detours among the expert's actions, so that objects recur
CONCURRENCY = 16  # episodes


@dataclass(frozen=True, slots=True)
class ExpertHistories:
    """The expert's histories in one environment."""

    environment: str
    histories: tuple[Trace, ...]

    def summary(self) -> dict[str, Any]:
        """Return counts and a hash of all actions, for the router's manifest."""
        rows = [[trace.task.id, *trace.actions] for trace in self.histories]
        sha = hashlib.sha256(to_json(rows, ascii=True).encode()).hexdigest()[:16]
        return {"histories": len(rows), "steps": sum(len(row) - 1 for row in rows), "sha256": sha}


def expert_histories(names: Sequence[str], seed: int = 0, worlds: int = WORLDS) -> list[ExpertHistories]:
    """Run the experts of the named environments: household and alfworld in persistent worlds, scienceworld task by
    task."""
    found, sequences = [], f"{{tasks: R, worlds: {worlds}, length: {TASKS}}}"
    for name in names:
        more = "" if name == "scienceworld" else f", sequences: {sequences}"
        engine = ", engine: native" if name == "alfworld" else ""
        config = load_config(EvalConfig, None, [f"env={{name: {name}{engine}{more}}}"])
        with Environments(config.env) as envs:
            if name == "scienceworld":
                first_of_kind: dict[str, Task] = {}
                for task in envs.tasks("train"):
                    first_of_kind.setdefault(task.kind, task)
                traces = play_tasks(envs, list(first_of_kind.values())[:SCIENCE_TASKS], NOISE, seed)
            else:
                traces = play_worlds(envs, "train", NOISE, seed)
        found.append(ExpertHistories(name, tuple(trace for trace in traces if trace.records)))
    return found


def play_worlds(envs: Environments, split: str, noise: float = 0.0, seed: int = 0) -> list[Trace]:
    """Play the split's task sequences with the expert; return one history per world.

    Args:
        noise: share of the expert's actions that are detours.
    """
    sequences = envs.sequences(split)
    specs = [[EpisodeSpec(task) for task in sequence.tasks] for sequence in sequences]
    played = run_sequences(
        envs.lease,
        specs,
        delivery=Delivery("expert", "none"),
        executor=ExpertExecutor(noise, seed),
        limits=EpisodeLimits(EXPERT_STEPS),
        concurrency=CONCURRENCY,
    )
    return [
        join_traces([trace for [trace] in episode_traces(episodes)], sequence.id, sequence.scene, split)
        for sequence, episodes in zip(sequences, played, strict=True)
        if episodes
    ]


def play_tasks(envs: Environments, tasks: Sequence[Task], noise: float = 0.0, seed: int = 0) -> list[Trace]:
    """Play tasks with the expert; return one history per task."""
    episodes = run_episodes(
        envs.lease,
        [EpisodeSpec(task) for task in tasks],
        delivery=Delivery("expert", "none"),
        executor=ExpertExecutor(noise, seed),
        limits=EpisodeLimits(EXPERT_STEPS),
        concurrency=CONCURRENCY,
    )
    return [trace for [trace] in episode_traces(episodes)]


def join_traces(traces: Sequence[Trace], id: str, scene: str, split: str) -> Trace:
    """Concatenate consecutive traces of one world; number the steps from 0."""
    records = [replace(record, t=t) for t, record in enumerate(r for trace in traces for r in trace.records)]
    task = Task(id, goal="", scene=scene, split=split, kind="history")
    return Trace(task, tuple(records), all(trace.success for trace in traces))
