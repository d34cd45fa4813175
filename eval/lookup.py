"""Does the compiler look up the right entry? Decided where an entry says where the goal's object was."""

from __future__ import annotations

from collections.abc import Iterable

from agent.episode import Job, goal_text
from agent.records import Episode
from data_gen.teacher import entry_for_goal, taken


def lookup(episodes: Iterable[Episode], jobs: Iterable[Job]) -> dict[str, float]:
    """Share of episodes whose first guidance names the place that the right entry holds (where there is one)."""
    named = [_first_place(e) == truth for e, job in zip(episodes, jobs, strict=True) if (truth := _right_place(job))]
    return {"accuracy": sum(named) / max(1, len(named)), "n": len(named)}


def chance(jobs: Iterable[Job]) -> float:
    """Look-up accuracy of citing a random one of the retrieved entries."""
    shares = [
        sum(fact[1] == truth for e in job.memory if (fact := taken(e.provenance.actions))) / len(job.memory)
        for job in jobs
        if (truth := _right_place(job))
    ]
    return sum(shares) / max(1, len(shares))


def _right_place(job: Job) -> str | None:
    """Where the right entry says that the goal's object is; None if no entry says so."""
    entry = entry_for_goal(goal_text(job.task), job.memory)
    fact = taken(entry.provenance.actions) if entry else None
    return fact[1] if fact else None


def _first_place(episode: Episode) -> str | None:
    guidance = next((s.guidance for s in episode.steps if s.guidance), "")
    return guidance.removeprefix("go to ") if guidance.startswith("go to ") else None
