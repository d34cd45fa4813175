"""Error analysis by rule: why episodes failed, and whether the compiler looked up the right entry.

The kinds are those of error analyses of embodied planners that follow from a record. A failed episode has all labels
that apply, and one primary kind, the first that applies in this order:

broken             technical failure (environment, compiler or executor)
wrong_termination  the environment ended the episode (the agent declared success, or acted invalidly too often)
repeated_action    the same action was taken LOOP times at the same observation
invalid_action     at least INVALID_SHARE of the actions were not grounded, or refused by the environment
never_found        the goal's object was never in view
missing_step       part of the goal was reached, or its object found, and a required step was never taken
step_limit         none of these: the episode reached its step limit

`never_found`, and `missing_step` without progress, need a goal in ALFWorld's wording; for other goals they stay
undecided, and `undecided` counts those episodes. Errors that only pictures show are not detected."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from agent.episode import EpisodeSpec
from agent.expert import entry_for_goal
from agent.records import Episode, StepRecord, refused
from envs.household.command_reader import first_taken, subgoals
from runtime.errors import StopReason, is_failure

LOOP = 3
INVALID_SHARE = 0.25
KINDS = (
    "broken",
    "wrong_termination",
    "repeated_action",
    "invalid_action",
    "never_found",
    "missing_step",
    "step_limit",
)

_GOALS = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?:put|find) (?P<two>two) (?P<thing>\w+) (?:and put them )?(?:in|on) (?P<place>\w+)",
        r"put (?:a|an|some) (?:(?P<state>clean|hot|cool) )?(?P<thing>\w+) (?:in|on) (?P<place>\w+)",
        r"(?P<verb>clean|heat|cool) (?:a|an|some) (?P<thing>\w+) and put it (?:in|on) (?P<place>\w+)",
        r"(?:look at|examine) (?:(?:a|an|the|some) )?(?P<thing>\w+) (?:under|with) the (?P<lamp>\w+)",
    )
)
_VERBS = {"clean": "clean", "hot": "heat", "cool": "cool"}


@dataclass(frozen=True, slots=True)
class Requirements:
    """Object of a goal in ALFWorld's wording, and the steps to take with it, named as by `subgoals`."""

    thing: str
    steps: tuple[str, ...]


def requirements(goal: str) -> Requirements | None:
    """Parse a goal; None for a goal in other wording."""
    match = next((m for pattern in _GOALS if (m := pattern.fullmatch(goal.strip().rstrip(".").lower()))), None)
    if match is None:
        return None
    found, thing = match.groupdict(), match["thing"]
    verb = found.get("verb") or _VERBS.get(found.get("state") or "", "")
    if found.get("lamp"):
        return Requirements(thing, (f"find {thing}", f"use {found['lamp']}"))
    steps = (f"find {thing}", *((f"{verb} {thing}",) if verb else ()), f"put {thing} in {found['place']}")
    return Requirements(thing, (steps[0], steps[-1]) * 2 if found.get("two") else steps)


def labels(episode: Episode) -> tuple[str, ...]:
    """Return all labels of a failed episode, in the order of KINDS; () for a success."""
    if is_failure(episode.stop_reason):
        return ("broken",)
    if episode.success:
        return ()
    wanted = requirements(episode.goal)
    named = re.compile(rf"\b{re.escape(wanted.thing)} \d") if wanted else None
    views = (text for step in episode.steps for text in (step.observation, step.feedback))
    found = named is not None and any(named.search(text) for text in views)
    applies = {
        "wrong_termination": episode.stop_reason is StopReason.DONE,
        "repeated_action": max(_repeats(episode.steps).values(), default=0) >= LOOP,
        "invalid_action": sum(map(refused, episode.steps)) >= max(1, INVALID_SHARE * len(episode.steps)),
        "never_found": wanted is not None and not found,
        "missing_step": 0 < episode.progress < 1 or (wanted is not None and found and bool(_missing(wanted, episode))),
        "step_limit": episode.stop_reason is StopReason.STEP_LIMIT,
    }
    return tuple(kind for kind in KINDS if applies.get(kind))


def analyse(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Count the errors of one delivery, ready for JSON. `primary` adds up to `failed`; rates are over all steps."""
    failed = [(episode, marks) for episode in episodes if (marks := labels(episode))]
    first = Counter(marks[0] for _, marks in failed)
    every = Counter(mark for _, marks in failed for mark in marks)
    steps = [step for episode in episodes for step in episode.steps]
    again = sum(n - 1 for episode in episodes for n in _repeats(episode.steps).values())
    return {
        "failed": len(failed),
        "primary": {kind: first[kind] for kind in KINDS},
        "labels": {kind: every[kind] for kind in KINDS},
        "undecided": sum(requirements(episode.goal) is None for episode, marks in failed if marks != ("broken",)),
        "examples": {
            kind: sorted(episode.task_id for episode, marks in failed if marks[0] == kind)[:3]
            for kind in KINDS
            if first[kind]
        },
        "invalid_action_rate": sum(map(refused, steps)) / len(steps) if steps else 0.0,
        "repeated_action_rate": again / len(steps) if steps else 0.0,
    }


def _repeats(steps: Sequence[StepRecord]) -> Counter[tuple[str, str]]:
    return Counter((step.observation, step.action) for step in steps if step.action)


def _missing(wanted: Requirements, episode: Episode) -> list[str]:
    """Return the required steps that were not taken often enough."""
    reached = subgoals([step.action for step in episode.steps if not refused(step)])
    kinds = Counter(re.sub(r" \d+$", "", name) for name in reached)  # "put mug in cabinet 2": any cabinet will do
    return [name for name, times in Counter(wanted.steps).items() if kinds[name] < times]


# look-up: defined if an entry states where the goal's object was -----------------------------------------------------


def lookup(episodes: Iterable[Episode], specs: Iterable[EpisodeSpec]) -> dict[str, float]:
    """Return the share of episodes, among those with a right entry, whose first guidance names that entry's place."""
    named = [_first_place(e) == truth for e, spec in zip(episodes, specs, strict=True) if (truth := _right_place(spec))]
    return {"accuracy": sum(named) / max(1, len(named)), "n": len(named)}


def chance(specs: Iterable[EpisodeSpec]) -> float:
    """Return the look-up accuracy of a random choice among the retrieved entries."""
    shares = [
        sum(fact[1] == truth for e in spec.memory if (fact := first_taken(e.provenance.actions))) / len(spec.memory)
        for spec in specs
        if (truth := _right_place(spec))
    ]
    return sum(shares) / max(1, len(shares))


def _right_place(spec: EpisodeSpec) -> str | None:
    """Return the place of the goal's object in the right entry; None if there is none."""
    entry = entry_for_goal(spec.goal, spec.memory)
    fact = first_taken(entry.provenance.actions) if entry else None
    return fact[1] if fact else None


def _first_place(episode: Episode) -> str | None:
    guidance = next((s.guidance for s in episode.steps if s.guidance), "")
    return guidance.removeprefix("go to ") if guidance.startswith("go to ") else None
