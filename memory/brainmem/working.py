"""Working memory: the last steps of the attempt, what they say of the agent, and what contradicts itself (section
3.2.1, C.1).

Warnings are a pure function of the window and of what is held, over steps that were taken, and are shown at the next
decision; no second call of the planner is made for them. The rules are ours, for the paper gives one instance alone:

R1  a refused action that was refused before in the window    R4  the same action again, with nothing changed
R2  taking something while something is held                  R6  opening what is open, closing what is closed
R3  putting or treating something while nothing is held

(R5, about water, is EB-ALFRED's: ALFWorld cleans with one command.)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from memory.brainmem.settings import Working

MOST_WARNINGS = 2
KEY_GUIDELINES = (
    "Check what is held before choosing an action.",
    "Do not repeat at once an action that has just failed.",
    "Trust feedback that says where something is.",
    "To clean a thing, take it to a sink; to nest things, put the inner one in first.",
    "Where nothing helps here, try another place.",
)
REMINDERS = ("Look at what is held first.", "Put it down before taking something else.")
STRATEGY = "Strategy: go on with what worked, change what failed."
_TAKE, _USED = re.compile(r"take |pick up "), re.compile(r"(?:move|put|heat|cool|clean|slice) ")
_DOOR = re.compile(r"(open|close) (.+)")


@dataclass(frozen=True, slots=True)
class WorkStep:
    """A step as working memory keeps it; `holds` and `at` are of after it."""

    t: int
    action: str
    ok: bool
    summary: str
    at: str
    holds: str
    held_before: str
    rise: float | None = None  # of progress
    changed: bool = True  # view or what is held is another than before
    reasoning: str = ""


def warnings(window: Sequence[WorkStep]) -> list[str]:
    """Say what is inconsistent in the last step, the first two hits."""
    if not window:
        return []
    last, before, found = window[-1], window[:-1], list[str]()
    if not last.ok and any(step.action == last.action and not step.ok for step in before):
        found.append(f"'{last.action}' failed before with the same result: do not repeat it.")
    if _TAKE.match(last.action) and last.held_before:
        found.append(f"'{last.action}' while {last.held_before} was held: put it down first.")
    if _USED.match(last.action) and not last.held_before:
        found.append(f"'{last.action}' while nothing was held: pick something up first.")
    twice = any(step.action == last.action for step in before[-1:])
    if twice and last.ok and not last.changed and not last.rise:
        found.append(f"'{last.action}' again changed nothing: this is a loop.")
    door = _DOOR.fullmatch(last.action)
    if door and any(step.action == last.action and step.ok for step in before) and not _reversed(door, before):
        found.append(f"{door[2]} is {'open' if door[1] == 'open' else 'closed'} already.")
    return found[:MOST_WARNINGS]


def _reversed(door: re.Match[str], before: Sequence[WorkStep]) -> bool:
    """Tell whether the door was last used the other way."""
    uses = [m[1] for step in before if step.ok and (m := _DOOR.fullmatch(step.action)) and m[2] == door[2]]
    return uses[-1] != door[1]


def rate(window: Sequence[WorkStep]) -> str:
    """Write the success rate of the window's steps (B.1.1)."""
    return f"{100 * sum(step.ok for step in window) / len(window):.1f}%"


def rendered(window: Sequence[WorkStep], taken: int, settings: Working) -> str:
    """Write the section in C.1's order; `taken` counts the attempt's actions. "" before the first."""
    if not window:
        return ""
    lines = ["Working Memory:"]
    for step in window:
        lines += _step_lines(step, settings)
    if settings.format == "full":
        lines += ["Key Guidelines:", *(f"- {text}" for text in KEY_GUIDELINES)]
    if settings.consistency_check and (found := warnings(window)):
        lines += [f"CONSISTENCY WARNING: {text} Reconsider." for text in found]
    places = dict.fromkeys(step.at for step in window if step.at)
    if settings.format == "full" and places:
        lines.append(f"Recently Visited Locations: {', '.join(places)}")
    if settings.agent_state:
        lines.append(f"CURRENT ROBOT STATE: {_holding(window[-1].holds)}")
        lines += REMINDERS if settings.format == "full" else ()
    if settings.success_state:
        lines.append(f"Performance: success rate {rate(window)}, actions {taken}")
    return "\n".join([*lines, STRATEGY] if settings.format == "full" else lines)


def _step_lines(step: WorkStep, settings: Working) -> list[str]:
    mark = f" ({'Success' if step.ok else 'Failure'}{_reward(step)})" if settings.feedback else ""
    lines = [f"Step {step.t + 1}: Action: {step.action}{mark}"]
    if settings.format == "short":
        return [f"{lines[0]}, {_holding(step.holds)}, at {step.at or 'start'}"]
    lines.append(f"Observation Summary: {step.summary}")
    return [*lines, f"Reasoning: {step.reasoning}"] if step.reasoning else lines


def _reward(step: WorkStep) -> str:
    return "" if step.rise is None else f", reward={step.rise:.2f}"


def _holding(holds: str) -> str:
    return f"holding {holds}" if holds else "holding nothing"
