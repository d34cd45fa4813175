"""The writer by rule (S3Mem, section 3.1): from a history to units, one a record, without any question in sight."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from envs.household.telling import Body, views
from memory.protocol import Record, Trace
from memory.s3mem.text import NUMBERED, STOP_WORDS, names
from memory.s3mem.units import REFUSED, Change, Origin, Unit, unit_id
from memory.trajectory import trajectory_id
from memory.words import shortened, words

RARE_WORDS = 5  # of a turn that count as its objects
HELD = "held"
_RESULT_WORDS = 16  # of an answer that no rule reads
_THING = r"([a-z]+(?: [a-z]+)*?(?: \d+)?)"
_VERB = re.compile(r"(?:pick up|look at|go to|turn on|turn off|focus on|teleport to|[a-z]+)")
_ROOM = re.compile(r"This room is called the ([a-z ]+)\.|This outside location is called the ([a-z ]+)\.")
_WENT = re.compile(r"(?:go|teleport) to ([a-z]+(?: [a-z]+)*(?: \d+)?)")
_MOVES = [  # what an action changes: pattern, key's last part, value before, value after; {1} and {2} are its groups
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
    """Name a history: by its task where its records have names of their own, else by all that happened in it."""
    named = any(record.id for record in trace.records)
    return trace.task.id if named else trajectory_id(trace.task.id, trace.actions, trace.success)


def record_ids(trace: Trace) -> list[str]:
    """Return what pointers name the records by."""
    history = history_id(trace)
    return [record.id or f"{history}#{record.t}" for record in trace.records]


def pictures(record: Record) -> tuple[str, ...]:
    return (record.picture,) if record.picture else ()


def is_dialogue(trace: Trace) -> bool:
    return any(record.actor for record in trace.records)


def written(trace: Trace) -> list[Unit]:
    """Write a history's units, with the relations that follow from it."""
    units = list(_turns(trace) if is_dialogue(trace) else _steps(trace))
    return related([replace(u, id=unit_id(u.origin.history, u.pointers, u.order, u.event)) for u in units])


def origin_of(trace: Trace, actor: str = "") -> Origin:
    task, kind = trace.task, "turn" if is_dialogue(trace) else "step"
    return Origin(history_id(trace), kind, actor, task.id, task.scene, task.goal, task.split, trace.success)


# turns ---------------------------------------------------------------------------------------------------------------


def _turns(trace: Trace) -> Iterator[Unit]:
    """Write a unit of each turn: what was said, the names and rare words in it, its session."""
    ids, often = record_ids(trace), Counter[str]()
    for record in trace.records:
        often.update(set(words(record.action)))
    for order, (record, session) in enumerate(zip(trace.records, sessions(trace.records), strict=True)):
        said = set(words(record.action))
        telling = (w for w in said if (len(w) > 2 or not w.isascii()) and w not in STOP_WORDS)
        rare = sorted(telling, key=lambda w: (often[w], w))
        objects = dict.fromkeys([*names(record.action), *rare[:RARE_WORDS]])
        yield Unit(
            order,
            record.when,
            record.action,
            origin_of(trace, record.actor),
            (ids[order],),
            "say",
            tuple(objects),
            f"session {session}",
            raw=record.action,
            pictures=pictures(record),
        )


def sessions(records: Sequence[Record]) -> list[int]:
    """Give each turn the number of its session: what was said at one time, in a row."""
    numbers, number = list[int](), 0
    for i, record in enumerate(records):
        number += i == 0 or record.when != records[i - 1].when
        numbers.append(number)
    return numbers


# steps ---------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _World:
    """What the steps so far have told: where the agent is, and the last value of each key."""

    body: Body = field(default_factory=Body)
    room: str = ""
    known: dict[str, str] = field(default_factory=dict)

    def after(self, record: Record) -> None:
        """Take in where the agent is after a step."""
        if record.refused:
            return
        self.body = self.body.after(record.action, record.feedback)
        if found := _ROOM.search(record.feedback):
            self.room = found[1] or found[2]
        elif went := _WENT.fullmatch(record.action):
            self.room = went[1]

    def changes(self, record: Record) -> tuple[Change, ...]:
        """Say what a step changed, by its command, unless it was refused."""
        if record.refused or record.feedback.startswith("Nothing happens"):
            return ()
        for pattern, name, before, after in _MOVES:
            if found := pattern.fullmatch(record.action):
                groups = ["", *found.groups()]
                key = f"{groups[1]}.{name}"
                was = self.known.get(key) or before.replace("{2}", groups[-1])
                self.known[key] = after.replace("{2}", groups[-1])
                return (Change(key, was, self.known[key]),)
        return ()


def _steps(trace: Trace) -> Iterator[Unit]:
    """Write a unit of each step: the command, what was seen and what changed."""
    ids, world = record_ids(trace), _World()
    for order, record in enumerate(trace.records):
        world.after(record)
        changes = world.changes(record)
        seen = [entity for view in views(record.feedback) for entity in view.seen or ()]
        things = [*NUMBERED.findall(record.action), *seen, *(change.key.rpartition(".")[0] for change in changes)]
        verb = found[0] if (found := _VERB.match(record.action)) else ""
        result = _result(record, bool(changes or views_any(record.feedback)))
        yield Unit(
            order,
            f"step {record.t}",
            f"{record.action}{result}",
            origin_of(trace),
            (ids[order],),
            verb,
            tuple(dict.fromkeys(things)),
            world.body.at or world.room,
            changes,
            raw=f"{record.action} -> {record.feedback}",
            pictures=pictures(record),
        )


def views_any(text: str) -> bool:
    return next(views(text), None) is not None


def _result(record: Record, read: bool) -> str:
    """Write how an action ended, where no rule has read it."""
    if record.refused:
        return REFUSED
    told = shortened(record.feedback, _RESULT_WORDS)
    return f": {told}" if told and not read else ""


# relations -----------------------------------------------------------------------------------------------------------


def related(units: Sequence[Unit]) -> list[Unit]:
    """Add to the units of one history the relations that follow from them: what a change led to, the next mention of
    what was changed, the turn that is replied to."""
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
