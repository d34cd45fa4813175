"""Scene-event units (S3Mem, Eq. 2): what is written of a history once, with no question in sight; and how one reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from envs.household.trajectories import fetching
from memory.entry import MemoryEntry, Provenance
from memory.pictures import at_hand, read_picture
from memory.protocol import ESTIMATED, Costs
from memory.retrieval import encodable
from memory.s3mem.text import NUMBERED
from memory.trajectory import one_line

NAME = "s3mem"
Representation = Literal["full", "chunk", "event", "objects"]
REFUSED = " (refused)"


@dataclass(frozen=True, slots=True)
class Change:
    """A key such as "mug 1.location", with its value before ("" for unknown) and after."""

    key: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a unit comes from: the field c of the paper."""

    history: str
    kind: Literal["step", "turn"]
    actor: str = ""
    task_id: str = ""
    scene: str = ""
    goal: str = ""
    split: str = ""
    success: bool = True


@dataclass(frozen=True, slots=True)
class Unit:
    """The paper's eight fields: t is `order` and `when`, e `event` and `action`, o `objects`, l `place`, s `changes`,
    r `relations`, c `origin`, rho `pointers`. `raw` is the text of the records that it points to."""

    order: int  # its place in its history
    when: str
    event: str
    origin: Origin
    pointers: tuple[str, ...]
    action: str = ""  # the kind of event, as a verb
    objects: tuple[str, ...] = ()
    place: str = ""
    changes: tuple[Change, ...] = ()
    relations: tuple[tuple[str, str], ...] = ()  # kind, id of the other unit
    raw: str = ""
    id: str = ""
    pictures: tuple[str, ...] = ()  # paths of its records' pictures

    @property
    def command(self) -> str:
        """Return what was done, without how it ended."""
        return self.event.partition(": ")[0].removesuffix(REFUSED)

    def serialised(self) -> str:
        """Write all fields that say something (`t=3 | e=mix picture | ...`)."""
        fields = {
            "t": self.when or str(self.order),
            "e": self.event,
            "o": ", ".join(self.objects),
            "l": self.place,
            "s": ", ".join(map(changed, self.changes)),
            "r": ", ".join(kind for kind, _ in self.relations),
            "c": self.origin.actor,
        }
        return " | ".join(f"{name}={text}" for name, text in fields.items() if text)

    def rendered(self, how: Representation = "full") -> str:
        """Write the one line that a reader sees: a text of the unit alone, whatever is asked."""
        return one_line(encodable(_RENDERED[how](self)))

    def searched(self, how: Representation = "full") -> str:
        """Return what retrieval reads of it: who, what and where, without the date."""
        if how == "event":
            return self.event
        if how == "objects":
            return ", ".join(self.objects)
        what = self.raw if how == "chunk" or self.origin.kind == "turn" else _what(self)
        return f"{self.origin.actor}: {what}" if self.origin.actor else f"{self.place} {what}"

    def cost(self, how: Representation = "full", costs: Costs = ESTIMATED) -> float:
        """Count its tokens as it is rendered, with those of its pictures for a reader that sees them."""
        shown = costs.picture * len(at_hand(self.pictures)) if costs.picture else 0
        return costs.text(self.rendered(how)) + shown

    def entry(self, how: Representation = "full", pictures: bool = False) -> MemoryEntry:
        """Return it as a memory's entry, on request with its pictures. Raises: ValueError, where one cannot be read."""
        of = self.origin
        done = (self.command,) if of.kind == "step" and not self.event.endswith(REFUSED) else ()
        provenance = Provenance(of.task_id, of.scene, of.goal, of.split, of.success, (*done, *self._fetching()), NAME)
        images = tuple(map(read_picture, at_hand(self.pictures))) if pictures else ()
        return MemoryEntry(self.id, self.rendered(how), provenance, images)

    def _fetching(self) -> tuple[str, ...]:
        """Return the commands that take what was seen at a place, where nothing was changed there."""
        numbered = NUMBERED.fullmatch
        if self.origin.kind != "step" or self.changes or not numbered(self.place):
            return ()
        return tuple(fetching(each, self.place) for each in self.objects if numbered(each) and each != self.place)


def unit_id(history: str, pointers: Sequence[str], ordinal: int, event: str) -> str:
    told = json.dumps([history, list(pointers), ordinal, event])
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def changed(change: Change) -> str:
    return f"{change.key} {change.before or '?'} -> {change.after}"


def _what(unit: Unit) -> str:
    """Write event, objects and changes, but nothing twice."""
    said = unit.event.lower()
    more = [each for each in unit.objects if each not in said and each != unit.place]
    parts = [unit.event]
    if more and unit.origin.kind == "step":
        parts.append(f"objects: {', '.join(more)}")
    parts += [f"state: {', '.join(map(changed, unit.changes))}"] if unit.changes else []
    return "; ".join(parts)


def _full(unit: Unit) -> str:
    """Say when, where and by whom in brackets, then what. A turn reads as people write one."""
    if unit.origin.kind == "turn":
        said = f"{unit.origin.actor}: {_what(unit)}" if unit.origin.actor else _what(unit)
        return f"({unit.when}) {said}" if unit.when else said
    scene = f"in {unit.origin.scene}" if unit.origin.scene else ""
    at = f"at {unit.place}" if unit.place else ""
    head = ", ".join(filter(None, (scene, unit.when, at, unit.origin.actor)))
    return f"[{head}] {_what(unit)}" if head else _what(unit)


def _chunk(unit: Unit) -> str:
    said = f"{unit.origin.actor}: {unit.raw}" if unit.origin.actor else unit.raw
    return f"({unit.when}) {said}" if unit.when else said


_RENDERED = {
    "full": _full,
    "chunk": _chunk,
    "event": lambda unit: unit.event,
    "objects": lambda unit: ", ".join(unit.objects),
}
