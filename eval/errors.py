"""Why episodes failed, and whether the compiler looked up the right entry: by rule from records; no model judges.

The kinds are those of error analyses of embodied planners that a record can decide. Of every failed episode we keep
all labels that apply and one primary kind, the first that applies in this order:

broken             our own machinery failed (environment, compiler or executor)
wrong_termination  the environment ended the episode (the agent said that it was done, or did too much that is invalid)
repeated_action    the same action was taken LOOP times in the face of the same observation
invalid_action     INVALID_SHARE or more of its actions were refused: not grounded, or answered by a refusal
never_found        the object that the goal names was never in view
missing_step       some of the goal was reached, or its object found, and a needed step was never taken
step_limit         none of these: it ran out of steps

`never_found`, and `missing_step` where nothing of the goal was reached, need a goal in ALFWorld's words; elsewhere they
cannot be decided and `undecided` counts those episodes. What only pictures show (a misread view) is not decided at all.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from agent.episode import EpisodeSpec
from agent.expert import entry_for_goal
from agent.records import Episode, StepRecord, refused
from envs.household.trajectories import subgoals, taken
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
class Needs:
    """What a goal in ALFWorld's words asks for: an object, and the steps to take with it, as `subgoals` names them."""

    thing: str
    steps: tuple[str, ...]


def needs(goal: str) -> Needs | None:
    """Read what `goal` asks for; None for a goal in other words."""
    match = next((m for pattern in _GOALS if (m := pattern.fullmatch(goal.strip().rstrip(".").lower()))), None)
    if match is None:
        return None
    found, thing = match.groupdict(), match["thing"]
    verb = found.get("verb") or _VERBS.get(found.get("state") or "", "")
    if found.get("lamp"):
        return Needs(thing, (f"find {thing}", f"use {found['lamp']}"))
    steps = (f"find {thing}", *((f"{verb} {thing}",) if verb else ()), f"put {thing} in {found['place']}")
    return Needs(thing, (steps[0], steps[-1]) * 2 if found.get("two") else steps)


def labels(episode: Episode) -> tuple[str, ...]:
    """List all kinds of error that apply to a failed episode, in the order of KINDS; () for a success."""
    if is_failure(episode.stop_reason):
        return ("broken",)
    if episode.success:
        return ()
    wanted = needs(episode.goal)
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
    """Count the errors of one delivery, ready for JSON.

    `primary` adds up to `failed`; `labels` may not, for an episode can have several. Rates are over all steps.
    """
    failed = [(episode, marks) for episode in episodes if (marks := labels(episode))]
    first = Counter(marks[0] for _, marks in failed)
    every = Counter(mark for _, marks in failed for mark in marks)
    steps = [step for episode in episodes for step in episode.steps]
    again = sum(n - 1 for episode in episodes for n in _repeats(episode.steps).values())
    return {
        "failed": len(failed),
        "primary": {kind: first[kind] for kind in KINDS},
        "labels": {kind: every[kind] for kind in KINDS},
        "undecided": sum(needs(episode.goal) is None for episode, marks in failed if marks != ("broken",)),
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


def _missing(wanted: Needs, episode: Episode) -> list[str]:
    """List steps that the goal needs and that were never taken, as often as it needs them."""
    reached = subgoals([step.action for step in episode.steps if not refused(step)])
    kinds = Counter(re.sub(r" \d+$", "", name) for name in reached)  # "put mug in cabinet 2": any cabinet will do
    return [name for name, times in Counter(wanted.steps).items() if kinds[name] < times]


# look-up: decided where an entry says where the goal's object was -----------------------------------------------------


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
    """Find where the right entry says that the goal's object is; None if no entry says so."""
    entry = entry_for_goal(spec.goal, spec.memory)
    fact = taken(entry.provenance.actions) if entry else None
    return fact[1] if fact else None


def _first_place(episode: Episode) -> str | None:
    guidance = next((s.guidance for s in episode.steps if s.guidance), "")
    return guidance.removeprefix("go to ") if guidance.startswith("go to ") else None
