"""What the episodes of a run may recall: everything, nothing of their own scene, other kinds of tasks only, or nothing.

A compiler that was always taught with entries of the scene asserts places where there are none, and one that was
always taught with fitting entries never learns to be silent. Seed and task id alone decide what an episode recalls, so
a resumed run recalls the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from agent.episode import EpisodeSpec
from agent.records import ALL_KINDS, NOTHING, OTHER_KINDS, OTHER_SCENES
from configs.collect import CollectConfig, MemoryConfig
from configs.training import GrpoConfig
from data_gen.tasks import episode_specs
from envs.base import Task
from envs.command_reader import CommandReader
from envs.household.command_reader import HouseholdReader
from envs.household.errands import kind_of_episode, read_errand, steps_of
from envs.registry import command_reader_for
from memory.entry import MemoryEntry
from memory.protocol import Isolation, MemorySystem, Query

WIDE = 16  # entries retrieved for each of K, to find some of other kinds


@dataclass(frozen=True, slots=True)
class RecallMix:
    """Shares of episodes by what they recall.

    Args:
        own_scene: of the other episodes, the share that may recall entries of the own scene.
        nothing: the share with an empty M.
        other_kinds: the share whose M holds entries of other kinds of tasks only.
        reader: says of what kind an entry is.
    """

    own_scene: float = 1.0
    nothing: float = 0.0
    other_kinds: float = 0.0
    seed: int = 0
    reader: CommandReader = field(default_factory=CommandReader)

    def recall_of(self, task: Task) -> str:
        """Return what an episode of the task recalls: a constant of `agent.records`."""
        drawn = random.Random(f"{self.seed} {task.id} memory").random()
        if drawn < self.nothing:
            return NOTHING
        if drawn < self.nothing + self.other_kinds:
            return OTHER_KINDS
        own = not task.scene or random.Random(f"{self.seed} {task.id} scene").random() < self.own_scene
        return ALL_KINDS if own else OTHER_SCENES

    def specs(self, tasks: Sequence[Task], bank: MemorySystem, memory: MemoryConfig) -> list[EpisodeSpec]:
        """Retrieve M for every task, in order."""
        groups = dict[str, list[Task]]()
        for task in tasks:
            groups.setdefault(self.recall_of(task), []).append(task)
        made = dict[str, EpisodeSpec]()
        for recall, some in groups.items():
            isolation: Isolation = "scene" if recall == OTHER_SCENES else memory.isolation
            if recall == NOTHING:
                found = [EpisodeSpec(task, bank_version=bank.snapshot()) for task in some]
            elif recall == OTHER_KINDS:
                found = self._of_other_kinds(some, bank, memory)
            else:
                found = episode_specs(some, bank, memory.k, isolation)
            made |= {spec.task.id: replace(spec, recall=recall) for spec in found}
        return [made[task.id] for task in tasks]

    def _of_other_kinds(self, tasks: Sequence[Task], bank: MemorySystem, memory: MemoryConfig) -> list[EpisodeSpec]:
        version = bank.snapshot()
        recalled = bank.recall([Query(task, WIDE * memory.k, isolation=memory.isolation) for task in tasks])
        chosen = (
            [entry for entry in found.entries if of_other_kind(self.reader, task.goal, entry)][: memory.k]
            for task, found in zip(tasks, recalled, strict=True)
        )
        return [EpisodeSpec(task, tuple(of), version) for task, of in zip(tasks, chosen, strict=True)]


def recall_mix(config: CollectConfig | GrpoConfig) -> RecallMix:
    """Return the mix of a collection or of GRPO, which has no episodes that are to be silent."""
    mix = RecallMix(config.own_scene, seed=config.seed, reader=command_reader_for(config.env))
    if isinstance(config, GrpoConfig):
        return mix
    return replace(mix, nothing=config.empty_memory, other_kinds=config.other_kinds)


def of_other_kind(reader: CommandReader, goal: str, entry: MemoryEntry) -> bool:
    """Return whether an entry is of another kind of task than the goal."""
    if not isinstance(reader, HouseholdReader):
        return not reader.related(goal, entry.provenance.goal)
    errand = read_errand(goal)
    return errand is not None and kind_of_episode(steps_of(entry.provenance.actions)) != errand.kind
