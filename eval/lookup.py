"""Does the compiler look up the right entry? Decided where an entry says where the goal's object was."""

from __future__ import annotations

from collections.abc import Iterable

from agent.episode import EpisodeSpec
from agent.expert import entry_for_goal, taken
from agent.records import Episode


def lookup(episodes: Iterable[Episode], specs: Iterable[EpisodeSpec]) -> dict[str, float]:
    """Return the share of episodes whose first guidance names the place that the right entry holds (where there is
    one)."""
    named = [_first_place(e) == truth for e, spec in zip(episodes, specs, strict=True) if (truth := _right_place(spec))]
    return {"accuracy": sum(named) / max(1, len(named)), "n": len(named)}


def chance(specs: Iterable[EpisodeSpec]) -> float:
    """Return the look-up accuracy of citing a random one of the retrieved entries."""
    shares = [
        sum(fact[1] == truth for e in spec.memory if (fact := taken(e.provenance.actions))) / len(spec.memory)
        for spec in specs
        if (truth := _right_place(spec))
    ]
    return sum(shares) / max(1, len(shares))


def _right_place(spec: EpisodeSpec) -> str | None:
    """Where the right entry says that the goal's object is; None if no entry says so."""
    entry = entry_for_goal(spec.goal, spec.memory)
    fact = taken(entry.provenance.actions) if entry else None
    return fact[1] if fact else None


def _first_place(episode: Episode) -> str | None:
    guidance = next((s.guidance for s in episode.steps if s.guidance), "")
    return guidance.removeprefix("go to ") if guidance.startswith("go to ") else None
