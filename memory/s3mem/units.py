"""Scene-event units (S3Mem, Eq. 2): what a writer extracts from a history before any question is known, and how units
are rendered."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from envs.household.command_reader import HouseholdReader
from memory.entry import MemoryEntry, Provenance
from memory.pictures import existing_files, read_picture
from memory.protocol import ESTIMATED, TokenCosts
from memory.retrieval import encodable
from memory.s3mem.text import NUMBERED
from memory.trajectory import one_line

NAME = "s3mem"
Representation = Literal["full", "chunk", "event", "objects"]
REFUSED = " (refused)"


@dataclass(frozen=True, slots=True)
class StateChange:
    """A state such as "mug 1.location", with its value before ("" for unknown) and after."""

    key: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.key} {self.before or '?'} -> {self.after}"


@dataclass(frozen=True, slots=True)
class UnitOrigin:
    """The history and task that a unit comes from (the paper's field c)."""

    history: str
    kind: Literal["step", "turn"]
    actor: str = ""
    task_id: str = ""
    scene: str = ""
    goal: str = ""
    split: str = ""
    success: bool = True


@dataclass(frozen=True, slots=True)
class EventUnit:
    """One scene-event unit. The paper's fields: t is `order` and `when`, e `event` and `action`, o `objects`,
    l `place`, s `changes`, r `relations`, c `origin`, rho `pointers`."""

    order: int  # index in its history
    when: str
    event: str
    origin: UnitOrigin
    pointers: tuple[str, ...]  # ids of the records
    action: str = ""  # a verb
    objects: tuple[str, ...] = ()
    place: str = ""
    changes: tuple[StateChange, ...] = ()
    relations: tuple[tuple[str, str], ...] = ()  # kind, id of the other unit
    raw: str = ""  # text of the records
    id: str = ""
    pictures: tuple[str, ...] = ()  # paths of the records' pictures

    @property
    def command(self) -> str:
        """Return the command of the event, without its result."""
        return self.event.partition(": ")[0].removesuffix(REFUSED)

    def rendered(self, how: Representation = "full") -> str:
        """Return the line that a reader sees; it does not depend on the question."""
        return one_line(encodable(_RENDERED[how](self)))

    def searched(self, how: Representation = "full") -> str:
        """Return the text that retrieval indexes: actor, event and place, without the date."""
        if how == "event":
            return self.event
        if how == "objects":
            return ", ".join(self.objects)
        what = self.raw if how == "chunk" or self.origin.kind == "turn" else _event_text(self)
        return f"{self.origin.actor}: {what}" if self.origin.actor else f"{self.place} {what}"

    def cost(self, how: Representation = "full", costs: TokenCosts = ESTIMATED) -> float:
        """Count the tokens of its rendering, and of its pictures for a reader that sees them."""
        shown = costs.picture * len(existing_files(self.pictures)) if costs.picture else 0
        return costs.text(self.rendered(how)) + shown

    def entry(self, how: Representation = "full", pictures: bool = False) -> MemoryEntry:
        """Return the unit as a memory entry, on request with pictures. Raises: ValueError for an unreadable picture."""
        of = self.origin
        done = (self.command,) if of.kind == "step" and not self.event.endswith(REFUSED) else ()
        provenance = Provenance(
            task_id=of.task_id,
            scene=of.scene,
            goal=of.goal,
            split=of.split,
            success=of.success,
            actions=(*done, *self._take_commands()),
            source=NAME,
        )
        images = tuple(map(read_picture, existing_files(self.pictures))) if pictures else ()
        return MemoryEntry(self.id, self.rendered(how), provenance, images)

    def _take_commands(self) -> tuple[str, ...]:
        """Return commands that take the objects seen at a place, unless the step changed something there."""
        numbered = NUMBERED.fullmatch
        if self.origin.kind != "step" or self.changes or not numbered(self.place):
            return ()
        things = (each for each in self.objects if numbered(each) and each != self.place)
        return tuple(command for each in things for command in HouseholdReader().fetch(each, self.place))


def unit_id(history: str, pointers: Sequence[str], ordinal: int, event: str) -> str:
    """Return a stable id of a unit: a hash of what it was written from."""
    source = json.dumps([history, list(pointers), ordinal, event])
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def _event_text(unit: EventUnit) -> str:
    """Return event, objects and changes; objects that the event names are not repeated."""
    event = unit.event.lower()
    more = [each for each in unit.objects if each not in event and each != unit.place]
    parts = [unit.event]
    if more and unit.origin.kind == "step":
        parts.append(f"objects: {', '.join(more)}")
    parts += [f"state: {', '.join(map(str, unit.changes))}"] if unit.changes else []
    return "; ".join(parts)


def _full(unit: EventUnit) -> str:
    """Render a step as `[scene, time, place, actor] event`, a turn as `(time) actor: text`."""
    if unit.origin.kind == "turn":
        return _turn_text(unit, _event_text(unit))
    scene = f"in {unit.origin.scene}" if unit.origin.scene else ""
    at = f"at {unit.place}" if unit.place else ""
    head = ", ".join(filter(None, (scene, unit.when, at, unit.origin.actor)))
    return f"[{head}] {_event_text(unit)}" if head else _event_text(unit)


def _turn_text(unit: EventUnit, text: str) -> str:
    text = f"{unit.origin.actor}: {text}" if unit.origin.actor else text
    return f"({unit.when}) {text}" if unit.when else text


_RENDERED = {
    "full": _full,
    "chunk": lambda unit: _turn_text(unit, unit.raw),
    "event": lambda unit: unit.event,
    "objects": lambda unit: ", ".join(unit.objects),
}
