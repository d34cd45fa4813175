"""What teachers take from memory and episodes: the places that M names for a need, and rationales."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from agent.records import Episode
from envs.command_reader import CommandReader, Fact
from memory.entry import MemoryEntry


@dataclass(frozen=True, slots=True)
class Lead:
    """A place to try, and the entry's fact that supports it."""

    place: str
    scene: str
    fact: Fact


def scene_of(goal: str) -> str:
    """Return the scene that a goal names; "" without one."""
    return goal.split(":")[0].removeprefix("in ") if goal.startswith("in ") else ""


def of_scene(goal: str, entry: MemoryEntry) -> bool:
    """Return whether an entry is of the goal's scene, or of an environment without scenes."""
    return not entry.provenance.scene or goal.startswith(f"in {entry.provenance.scene}: ")


def answers(reader: CommandReader, memory: Sequence[MemoryEntry], need: str) -> list[tuple[MemoryEntry, Fact]]:
    """List the entries' facts about the need, each place once per entry; if there are none, about its kind."""
    known = [(entry, reader.facts(entry.provenance.actions)) for entry in memory]
    exact = any(fact.need == need for _, facts in known for fact in facts)
    kind = reader.need_kind(need)
    found = dict[tuple[int, str], tuple[MemoryEntry, Fact]]()
    for number, (entry, facts) in enumerate(known):
        for fact in facts:
            if fact.need == need or (not exact and kind and reader.need_kind(fact.need) == kind):
                found.setdefault((number, fact.place), (entry, fact))
    return list(found.values())


def find_leads(
    reader: CommandReader, goal: str, memory: Sequence[MemoryEntry], need: str, known_places: str
) -> list[Lead]:
    """List the places where the need is met according to M, best first.

    This scene's places come first, in M's order (without scenes, by the number of entries that name them). Then
    come the kinds of places that most entries of other scenes name (beside this scene's own, at least two).

    Args:
        known_places: a text that names this scene's places.
    """
    here, elsewhere = list[Lead](), list[Lead]()
    for entry, fact in answers(reader, memory, need):
        lead = Lead(fact.place, entry.provenance.scene, fact)
        (here if of_scene(goal, entry) else elsewhere).append(lead)
    alike = [
        Lead(place, lead.scene, lead.fact)
        for lead in elsewhere
        for place in reader.similar_places(lead.place, known_places)
    ]
    ranked = dict[str, Lead]()
    own = here if scene_of(goal) else _most_said(here)
    for lead in (*own, *_most_said(alike, at_least=2 if here else 1)):
        ranked.setdefault(lead.place, lead)
    return list(ranked.values())


def find_facts(
    reader: CommandReader, goal: str, memory: Sequence[MemoryEntry], need: str, known_places: str
) -> list[Lead]:
    """List where M's entries met the need, in M's order: those of this scene, or all where scenes are alike."""
    return [
        Lead(fact.place, entry.provenance.scene, fact)
        for entry, fact in answers(reader, memory, need)
        if reader.scenes_alike or of_scene(goal, entry)
    ]


def find_random_lead(
    reader: CommandReader, goal: str, memory: Sequence[MemoryEntry], need: str, known_places: str, seed: int
) -> list[Lead]:
    """Draw an entry that does not answer the need, and claim that its first place meets it."""
    others = [
        entry
        for entry in memory
        if (facts := reader.facts(entry.provenance.actions))
        and (all(f.need != need for f in facts) or not (reader.scenes_alike or of_scene(goal, entry)))
    ]
    if not others:
        return []
    entry = random.Random(f"{seed} {goal}").choice(others)
    place = reader.facts(entry.provenance.actions)[0].place
    if reader.scenes_alike and not of_scene(goal, entry):
        place = next(iter(reader.similar_places(place, known_places)), "")
    return [Lead(place, scene_of(goal), Fact(need, place))] if place else []


def rationales(reader: CommandReader, episodes: Sequence[Episode]) -> list[str]:
    """Explain why each episode succeeded, or return how it stopped."""
    return [
        reader.rationale(episode.scene, [step.action for step in episode.steps])
        if episode.success
        else str(episode.stop_reason)
        for episode in episodes
    ]


def _most_said(leads: Sequence[Lead], at_least: int = 1) -> list[Lead]:
    """Return the first lead to each place, by how many leads name it; drop places with fewer than `at_least`."""
    votes = Counter(lead.place for lead in leads)
    first = {lead.place: lead for lead in reversed(leads)}
    return [first[place] for place, n in votes.most_common() if n >= at_least]
