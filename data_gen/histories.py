"""Long histories of our own: what the expert does in a living world, task after task, as one trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agent.deliveries import Delivery
from agent.episode import EpisodeSpec, Limits, run_episodes, run_sequences
from agent.expert import ExpertExecutor
from data_gen.experience import EXPERT_STEPS, traces_of
from envs.base import Task
from envs.registry import Environments
from memory.protocol import Trace

SIDE_BY_SIDE = 16


def lived(envs: Environments, split: str, noise: float = 0.0, seed: int = 0) -> list[Trace]:
    """Have the expert go through the split's sequences; return one history of each world. `noise`: share of its actions
    that are detours."""
    sequences = envs.sequences(split)
    actor, limits = ExpertExecutor(noise, seed), Limits(EXPERT_STEPS)
    specs = [[EpisodeSpec(task) for task in sequence.tasks] for sequence in sequences]
    played = run_sequences(envs.lease, specs, Delivery("expert", "none"), actor, limits, SIDE_BY_SIDE)
    told = zip(sequences, played, strict=True)
    return [joined([t for [t] in traces_of(e)], sequence.id, sequence.scene, split) for sequence, e in told if e]


def played(envs: Environments, tasks: Sequence[Task], noise: float = 0.0, seed: int = 0) -> list[Trace]:
    """Have the expert play tasks, each a history of its own."""
    specs, actor = [EpisodeSpec(task) for task in tasks], ExpertExecutor(noise, seed)
    episodes = run_episodes(envs.lease, specs, Delivery("expert", "none"), actor, Limits(EXPERT_STEPS), SIDE_BY_SIDE)
    return [trace for [trace] in traces_of(episodes)]


def joined(traces: Sequence[Trace], id: str, scene: str, split: str) -> Trace:
    """Join what was done one after another in one world, its steps numbered from 0."""
    records = [replace(record, t=t) for t, record in enumerate(r for trace in traces for r in trace.records)]
    return Trace(Task(id, "", scene, split, "history"), tuple(records), all(trace.success for trace in traces))
