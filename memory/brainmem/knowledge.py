"""BrainMem's state as a fold over journal rows, and the sections of the planner's context that follow from it (C.5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import starmap
from typing import NamedTuple

from envs.command_reader import CommandReader
from memory.brainmem import agent, rules
from memory.brainmem.episodic import SpatialGraph, Topic, TrajectoryGraph, topic_of
from memory.brainmem.semantic import (
    Experience,
    Experiences,
    Guideline,
    best_guidelines,
    count_application,
    prune_guidelines,
    update_guidelines,
)
from memory.brainmem.settings import BrainMemSettings
from memory.journal import Row

NAME = "brainmem"
SPATIAL_ADVICE = (
    "Use what is known of the room before searching.",
    "Search likely receptacles first, and each only once.",
    "A place that lacked the object need not be visited again.",
    "Containers may be closed: open them to look inside.",
)


SPATIAL = "Spatial Reasoning Guidance"
ORDER = ("Valuable Guidelines", "Room Successful Patterns", "Relevant Experiences", "Real-time Action Hints", SPATIAL)


class Section(NamedTuple):
    """A section's text, and the commands that fetch the objects it locates, most certain first."""

    text: str
    actions: tuple[str, ...] = ()


@dataclass
class Knowledge:
    """BrainMem's state after `episodes` rows, which `reader` reads."""

    settings: BrainMemSettings
    reader: CommandReader
    episodes: int = 0
    graph: TrajectoryGraph = field(init=False)
    spatial: SpatialGraph = field(init=False)
    experiences: Experiences = field(default_factory=Experiences)
    guidelines: list[Guideline] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.graph, self.spatial = TrajectoryGraph(self.reader), SpatialGraph(self.reader)

    def learn(self, row: Row) -> None:
        """Add an episode to graphs, experiences and guidelines (section 3.4)."""
        attempts, number, settings = row.attempts, self.episodes, self.settings
        topic = topic_of(attempts[0].task, self.reader, attempts[0].first)
        if settings.episodic.enabled and settings.episodic.trajectory:
            for trace in attempts:
                self.graph.learn(trace, topic)
        if settings.episodic.enabled and settings.episodic.spatial:
            self.spatial.learn(attempts, number)
        if settings.semantic.enabled:
            self._reflect(row, topic, number)
        self.episodes += 1

    def experience_of(self, row: Row, topic: Topic) -> Experience:
        """Return the experience of the next episode."""
        by_rule = rules.experience(row.attempts, topic, f"e{self.episodes}", self.reader)
        return agent.with_model_texts(by_rule, row.answers)

    def guidelines_with(self, new: Experience, words: Mapping[str, str] = {}) -> list[Guideline]:
        """Return the guidelines after a new experience; `words` maps the rules' texts to a model's."""
        return update_guidelines(
            self.guidelines, self.experiences, new=new, episode=self.episodes, id=f"g{self.episodes}", words=words
        )

    def _reflect(self, row: Row, topic: Topic, number: int) -> None:
        first, new = row.attempts[0], self.experience_of(row, topic)
        if self.settings.evolve.enabled and any(id.startswith(id_of(ORDER[0])) for id in first.shown):
            shown = frozenset(g.id for g in self.shown_guidelines())
            self.guidelines = count_application(
                self.guidelines, shown, task_type=topic.task_type, success=first.success, episode=number
            )
        self.guidelines = self.guidelines_with(new, row.answers.get("guidelines", {}))
        self.experiences.append(new)
        if self.settings.evolve.enabled:
            most, decay = self.settings.semantic.guidelines, self.settings.evolve.decay
            self.guidelines = prune_guidelines(self.guidelines, most, number, decay)

    # -- sections of the context --------------------------------------------------------------------------------------

    def sections(self, topic: Topic, own: str) -> dict[str, Section]:
        """Return the sections that depend on the task alone, without episodes of task `own`."""
        settings, texts, fetched = self.settings, dict[str, list[str]](), dict[str, tuple[str, ...]]()
        if settings.semantic.enabled and not settings.texts_only:
            texts["Valuable Guidelines"] = list(starmap(_line, enumerate(self.shown_guidelines(), 1)))
            found = self.experiences.recalled(topic.room, topic.task_type, topic.objects, settings.semantic.k, own)
            texts["Relevant Experiences"] = [text for e in found if (text := self._experience_line(e))]
        if settings.episodic.enabled and settings.episodic.trajectory and not settings.texts_only:
            texts["Room Successful Patterns"] = self.graph.patterns(topic, own)
            texts["Real-time Action Hints"] = self.graph.hints(topic, own)
        if (settings.episodic.enabled and settings.episodic.spatial) or settings.texts_only:
            with_facts = settings.episodic.facts and not settings.texts_only
            facts = self.spatial.facts(topic.room, topic.objects, own=own) if with_facts else []
            lines = [f"In {topic.room}: {'; '.join(map(str, facts))}"] if facts else []
            texts[SPATIAL] = [*lines, *SPATIAL_ADVICE]
            fetched[SPATIAL] = tuple(c for fact in facts for c in self.reader.fetch(fact.thing, fact.place))
        return {
            name: Section("\n".join([f"{name}:", *texts[name]]), fetched.get(name, ()))
            for name in ORDER
            if texts.get(name)
        }

    def shown_guidelines(self) -> list[Guideline]:
        """List the guidelines of the context, best first."""
        return best_guidelines(self.guidelines, self.settings.semantic.guidelines)

    def _experience_line(self, e: Experience) -> str:
        semantic = self.settings.semantic
        parts = [
            *(e.success_patterns[:1] if semantic.success_patterns else ()),
            *(f"Avoid: {cause}" for cause in e.failure_causes[:1] if semantic.failure_causes),
            *(e.learning_insights[:1] if semantic.learning_insights else ()),
        ]
        return f"- {'. '.join(parts)}" if parts else ""


def _line(number: int, g: Guideline) -> str:
    """Format a guideline as in C.3; the percentage is truncated."""
    confidence = f"Validated {g.n_success} times, {int(100 * g.confidence)}% confidence"
    return f"{number}. {g.text} ({confidence}) [{', '.join(sorted(g.task_types))}]"


def id_of(section: str) -> str:
    """Return the id prefix of a section's entries."""
    return f"{NAME}/{section.lower().replace(' ', '-')}/"
