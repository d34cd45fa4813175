"""Working memory: the last steps of the attempt, the agent's state, and consistency warnings (section 3.2.1, C.1).

Warnings are a pure function of the window and appear at the next decision. The paper gives one example; the rules are:

R1  a refused action that was refused before in the window    R4  a repeated action that changes nothing
R2  taking an object while holding one                        R6  opening an open or closing a closed receptacle
R3  putting or treating an object while holding none

(R5, about water, is EB-ALFRED's: ALFWorld cleans with one command.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from envs.command_reader import CommandReader, StepEffect
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
_USES = ("put", "heat", "cool", "clean", "slice")


@dataclass(frozen=True, slots=True)
class WorkStep:
    """A step of the window; `at` and `holds` describe the agent after it."""

    t: int
    action: str
    ok: bool
    summary: str
    at: str
    holds: str
    held_before: str
    changed: bool = True  # the view or the held object


def warnings(window: Sequence[WorkStep], reader: CommandReader) -> list[str]:
    """Return the first two warnings about the last step. R2 and R3 are for agents that hold one thing at a time."""
    if not window:
        return []
    last, before, found = window[-1], window[:-1], list[str]()
    meant = reader.intent(last.action)
    verb = meant.verb if meant else ""
    if not last.ok and any(step.action == last.action and not step.ok for step in before):
        found.append(f"'{last.action}' failed before with the same result: do not repeat it.")
    if verb == "take" and last.held_before and reader.one_hand:
        found.append(f"'{last.action}' while {last.held_before} was held: put it down first.")
    if verb in _USES and not last.held_before and reader.one_hand:
        found.append(f"'{last.action}' while nothing was held: pick something up first.")
    twice = any(step.action == last.action for step in before[-1:])
    if twice and last.ok and not last.changed:
        found.append(f"'{last.action}' again changed nothing: this is a loop.")
    if meant and verb in ("open", "close") and _last_use(meant.thing, before, reader) == meant:
        found.append(f"{meant.thing} is {'open' if verb == 'open' else 'closed'} already.")
    return found[:MOST_WARNINGS]


def _last_use(door: str, before: Sequence[WorkStep], reader: CommandReader) -> StepEffect | None:
    """Return the last executed command that opened or closed a door; None if there is none."""
    meant = (reader.intent(step.action) for step in reversed(before) if step.ok)
    return next((use for use in meant if use and use.thing == door and use.verb in ("open", "close")), None)


def success_rate(window: Sequence[WorkStep]) -> str:
    """Format the success rate of the window (B.1.1)."""
    return f"{100 * sum(step.ok for step in window) / len(window):.1f}%"


def render_section(window: Sequence[WorkStep], taken: int, settings: Working, reader: CommandReader) -> str:
    """Write the section in C.1's order; "" for an empty window. `taken`: the attempt's number of actions."""
    if not window:
        return ""
    lines = ["Working Memory:"]
    for step in window:
        mark = f" ({'Success' if step.ok else 'Failure'})" if settings.feedback else ""
        lines += [f"Step {step.t + 1}: Action: {step.action}{mark}", f"Observation Summary: {step.summary}"]
    lines += ["Key Guidelines:", *(f"- {text}" for text in KEY_GUIDELINES)]
    if settings.consistency_check and (found := warnings(window, reader)):
        lines += [f"CONSISTENCY WARNING: {text} Reconsider." for text in found]
    if places := dict.fromkeys(step.at for step in window if step.at):
        lines.append(f"Recently Visited Locations: {', '.join(places)}")
    if settings.agent_state:
        lines += [f"CURRENT ROBOT STATE: holding {window[-1].holds or 'nothing'}", *REMINDERS]
    if settings.success_state:
        lines.append(f"Performance: success rate {success_rate(window)}, actions {taken}")
    return "\n".join([*lines, STRATEGY])
