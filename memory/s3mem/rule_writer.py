"""Rule-based writer (S3Mem, section 3.1): turns each record of a history into one unit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from envs.command_reader import AgentState
from envs.household.command_reader import HouseholdReader
from envs.household.observation_parser import parse_places
from memory.protocol import Record, Trace
from memory.s3mem.text import NUMBERED, STOP_WORDS, proper_names
from memory.s3mem.units import REFUSED, EventUnit, StateChange, UnitOrigin, unit_id
from memory.trajectory import trajectory_id
from memory.words import truncate_words, words

RARE_WORDS = 5  # most rare words of a turn that count as its objects
HELD = "held"
READER = HouseholdReader()  # of histories in ALFWorld's words; the patterns below read others
_RESULT_WORDS = 16  # of feedback that no rule parses
_THING = r"([a-z]+(?: [a-z]+)*?(?: \d+)?)"
_VERB = re.compile(r"(?:pick up|look at|go to|turn on|turn off|focus on|teleport to|[a-z]+)")
_ROOM = re.compile(r"This room is called the ([a-z ]+)\.|This outside location is called the ([a-z ]+)\.")
_WENT = re.compile(r"(?:go|teleport) to ([a-z]+(?: [a-z]+)*(?: \d+)?)")
_EFFECTS = [  # state changes of actions: pattern, state, value before, value after; {2} is the pattern's second group
    (re.compile(rf"(?:take|pick up) {_THING} from {_THING}"), "location", "{2}", HELD),
    (re.compile(rf"(?:take|pick up) {_THING}"), "location", "", HELD),
    (
        re.compile(rf"(?:put|move|pour|place|drop|dunk) {_THING} (?:to|into|in/on|in|on) {_THING}"),
        "location",
        "",
        "{2}",
    ),
    (re.compile(rf"open (?:door to )?{_THING}"), "state", "closed", "open"),
    (re.compile(rf"close (?:door to )?{_THING}"), "state", "open", "closed"),
    (re.compile(rf"(?:activate|turn on|use) {_THING}(?: on .+)?"), "power", "off", "on"),
    (re.compile(rf"(?:deactivate|turn off) {_THING}"), "power", "on", "off"),
    (re.compile(rf"heat {_THING} with .+"), "temperature", "", "hot"),
    (re.compile(rf"cool {_THING} with .+"), "temperature", "", "cold"),
    (re.compile(rf"clean {_THING} with .+"), "cleanness", "", "clean"),
    (re.compile(rf"slice {_THING} with .+"), "shape", "whole", "sliced"),
]


def history_id(trace: Trace) -> str:
    """Return a history's id: its task's if its records have ids, else a hash of its actions."""
    named = any(record.id for record in trace.records)
    return trace.task.id if named else trajectory_id(trace.task.id, trace.actions, trace.success)


def record_ids(trace: Trace) -> list[str]:
    """Return the ids of a history's records, which units point to."""
    history = history_id(trace)
    return [record.id or f"{history}#{record.t}" for record in trace.records]


def is_dialogue(trace: Trace) -> bool:
    return any(record.actor for record in trace.records)


def write_units(trace: Trace) -> list[EventUnit]:
    """Write a history's units and their relations."""
    units = list(_turns(trace) if is_dialogue(trace) else _steps(trace))
    return add_relations([replace(u, id=unit_id(u.origin.history, u.pointers, u.order, u.event)) for u in units])


def _origin(trace: Trace, actor: str = "") -> UnitOrigin:
    return UnitOrigin(
        history=history_id(trace),
        kind="turn" if is_dialogue(trace) else "step",
        actor=actor,
        task_id=trace.task.id,
        scene=trace.task.scene,
        goal=trace.task.goal,
        split=trace.task.split,
        success=trace.success,
    )


# turns ----------------------------------------------------------------------------------------------------------------


def _turns(trace: Trace) -> Iterator[EventUnit]:
    """Write a unit for each turn: its text, the names and rare words in it, its session."""
    ids, frequency = record_ids(trace), Counter[str]()
    for record in trace.records:
        frequency.update(set(words(record.action)))
    for order, (record, session) in enumerate(zip(trace.records, session_numbers(trace.records), strict=True)):
        content = (w for w in set(words(record.action)) if (len(w) > 2 or not w.isascii()) and w not in STOP_WORDS)
        rare = sorted(content, key=lambda w: (frequency[w], w))
        objects = dict.fromkeys([*proper_names(record.action), *rare[:RARE_WORDS]])
        yield EventUnit(
            order,
            when=record.when,
            event=record.action,
            origin=_origin(trace, record.actor),
            pointers=(ids[order],),
            action="say",
            objects=tuple(objects),
            place=f"session {session}",
            raw=record.action,
            pictures=tuple(filter(None, (record.picture,))),
        )


def session_numbers(records: Sequence[Record]) -> list[int]:
    """Return the session number of each turn: consecutive turns with the same time form a session."""
    numbers, number = list[int](), 0
    for i, record in enumerate(records):
        number += i == 0 or record.when != records[i - 1].when
        numbers.append(number)
    return numbers


# steps ----------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _WorldState:
    """The agent's position and the last known value of each state, from the steps so far."""

    body: AgentState = field(default_factory=AgentState)
    room: str = ""
    known: dict[str, str] = field(default_factory=dict)

    def update_position(self, record: Record) -> None:
        """Update the agent's position after a step."""
        if record.refused:
            return
        self.body = self.body.after(READER.read(self.body, record))
        if found := _ROOM.search(record.feedback):
            self.room = found[1] or found[2]
        elif went := _WENT.fullmatch(record.action):
            self.room = went[1]

    def changes(self, record: Record) -> tuple[StateChange, ...]:
        """Return what a step changed according to its command; nothing for a refused one."""
        if record.refused or record.feedback.startswith("Nothing happens"):
            return ()
        for pattern, name, before, after in _EFFECTS:
            if found := pattern.fullmatch(record.action):
                groups = ["", *found.groups()]
                key = f"{groups[1]}.{name}"
                was = self.known.get(key) or before.replace("{2}", groups[-1])
                self.known[key] = after.replace("{2}", groups[-1])
                return (StateChange(key, was, self.known[key]),)
        return ()


def _steps(trace: Trace) -> Iterator[EventUnit]:
    """Write a unit for each step: its command, the objects seen and the state changes."""
    ids, world = record_ids(trace), _WorldState()
    for order, record in enumerate(trace.records):
        world.update_position(record)
        changes, shown = world.changes(record), list(parse_places(record.feedback))
        seen = [entity for view in shown for entity in view.seen]
        things = [*NUMBERED.findall(record.action), *seen, *(change.key.rpartition(".")[0] for change in changes)]
        verb = found[0] if (found := _VERB.match(record.action)) else ""
        result = _result(record, parsed=bool(changes or shown))
        yield EventUnit(
            order,
            when=f"step {record.t}",
            event=f"{record.action}{result}",
            origin=_origin(trace),
            pointers=(ids[order],),
            action=verb,
            objects=tuple(dict.fromkeys(things)),
            place=world.body.at or world.room,
            changes=changes,
            raw=f"{record.action} -> {record.feedback}",
            pictures=tuple(filter(None, (record.picture,))),
        )


def _result(record: Record, parsed: bool) -> str:
    """Return the suffix for a refused action, or for feedback that no rule has parsed."""
    if record.refused:
        return REFUSED
    feedback = truncate_words(record.feedback, _RESULT_WORDS)
    return f": {feedback}" if feedback and not parsed else ""


# relations ------------------------------------------------------------------------------------------------------------


def add_relations(units: Sequence[EventUnit]) -> list[EventUnit]:
    """Add relations to the units of one history: from a change to the next unit with its object, `causes` if that
    changes something and `same_object` if not; from a turn to the previous one, `replies`."""
    found: list[list[tuple[str, str]]] = [[*unit.relations] for unit in units]
    changed = dict[str, int]()
    for i, unit in enumerate(units):
        for thing in unit.objects:
            if (cause := changed.get(thing)) is not None:
                found[cause].append(("causes" if unit.changes else "same_object", unit.id))
                del changed[thing]
        changed |= {change.key.rpartition(".")[0]: i for change in unit.changes}
        if unit.origin.kind == "turn" and i and units[i - 1].place == unit.place:
            found[i].append(("replies", units[i - 1].id))
    return [replace(unit, relations=tuple(dict.fromkeys(each))) for unit, each in zip(units, found, strict=True)]
