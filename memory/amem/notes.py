"""A-Mem's notes as a fold over journal rows: attributes by rule or by a model's answers, links, and evolution.

A note is an episode's text with keywords, tags and a sentence of context. A new note is linked with some of its nearest
notes, in both directions. Evolution then changes the attributes of these notes, never the text of an episode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from envs.command_reader import CommandReader, StepEffect, kind
from memory.amem.settings import AMemSettings
from memory.brainmem import rules
from memory.brainmem.episodic import topic_of
from memory.items import Items, Origin, Version
from memory.journal import Row
from memory.protocol import Trace
from memory.replies import line
from memory.similarity import CachedEmbed
from memory.trajectory import command_lines, raw_lines, trajectory_id

MOST_KEYWORDS, MOST_TAGS, WORD = 6, 8, 80  # per note; characters of a keyword or tag
FOUND = 1e-9  # minimal score of a neighbour or of a hit


@dataclass(frozen=True, slots=True)
class Attributes:
    """What a note says about its episode."""

    keywords: tuple[str, ...]
    tags: tuple[str, ...]
    context: str

    def __str__(self) -> str:
        named = {"keywords": ", ".join(self.keywords), "tags": ", ".join(self.tags), "context": self.context}
        return "; ".join(f"{name}: {value}" for name, value in named.items())


@dataclass(frozen=True, slots=True)
class Note:
    """An episode's text, which never changes, and what the rules for links compare.

    Attributes:
        key: hash of task, commands and outcome, by which answers name the note.
        objects: kinds of the things that the episode handled.
    """

    name: str
    key: str
    origin: Origin
    shown: str
    compact: str
    objects: frozenset[str]
    trace: Trace


def attributes_by_rule(trace: Trace, done: Sequence[StepEffect], reader: CommandReader) -> Attributes:
    """Write keywords, tags and context of an episode without a language model. `done`: its effects."""
    task = trace.task
    names = (reader.in_words(kind(name)) for effect in done for name in (effect.thing, effect.place) if name)
    keywords = tuple(dict.fromkeys(map(line, names)))[:MOST_KEYWORDS]
    outcome = "success" if trace.success else "failure"
    tags = tuple(filter(None, (line(task.kind, WORD), line(task.scene, WORD), outcome)))
    if trace.success:
        return Attributes(keywords, tags, f"{line(task.goal)}: reached")
    why = rules.cause(trace, topic_of(task, reader, trace.first), reader)
    return Attributes(keywords, tags, f"{line(task.goal)}: not reached, {line(why)}")


def with_answer(by_rule: Attributes, answer: Mapping[str, Any]) -> Attributes:
    """Replace the attributes written by rule by those in a model's answer."""
    given = {name: answer[name] for name in ("keywords", "tags", "context") if answer.get(name)}
    return replace(by_rule, **{name: v if isinstance(v, str) else tuple(v) for name, v in given.items()})


@dataclass
class Notes:
    """All notes after `learned` rows."""

    settings: AMemSettings
    reader: CommandReader
    embed: CachedEmbed | None = None
    learned: int = 0
    by_name: dict[str, Note] = field(default_factory=dict)
    by_key: dict[str, str] = field(default_factory=dict)  # names
    links: dict[str, dict[str, None]] = field(default_factory=dict)  # by name, in order of creation, both directions
    items: Items = field(init=False)
    _attributes: dict[tuple[str, int], Attributes] = field(default_factory=dict)  # by name and version

    def __post_init__(self) -> None:
        self.items = Items(self.embed)

    def learn(self, row: Row) -> None:
        """Add a note per attempt. Attempts of one row are not each other's neighbours."""
        answers = _listed(row.answers.get("notes"), len(row.attempts))
        new = [self.new_note(trace, n, answers[n]) for n, trace in enumerate(row.attempts)]
        # Neighbours are needed only where no usable answer names the links.
        near = [[] if "links" in answers[n] else self.neighbours(*each) for n, each in enumerate(new)]
        for (note, attributes), found, answer in zip(new, near, answers, strict=True):
            self._add(note, attributes, found, answer)
        self.learned += 1

    def new_note(self, trace: Trace, n: int, answer: Mapping[str, Any]) -> tuple[Note, Attributes]:
        """Return the note of the next row's attempt n, not yet added, and its attributes."""
        compact = "\n".join(command_lines(trace))
        shown = compact if self.settings.text == "commands" else "\n".join(raw_lines(trace))
        done = rules.effects(trace, self.reader)
        objects = frozenset(kind(effect.thing) for effect in done)
        key = trajectory_id(trace.task.id, trace.actions, trace.success)
        name = f"n{len(self.by_name) + 1 + n}"
        note = Note(name, key, Origin.of(self.learned, trace), shown, compact, objects, trace)
        return note, with_answer(attributes_by_rule(trace, done, self.reader), answer)

    def neighbours(self, note: Note, attributes: Attributes) -> list[Version]:
        """Return the notes nearest to a new one's text and context, nearest first."""
        text = f"{note.compact}\n{attributes.context}"
        found = self.items.search(text, self.settings.neighbours, at_least=FOUND, store=True)
        return [version for _, version in found]

    def attributes(self, version: Version) -> Attributes:
        return self._attributes[version.item, version.number]

    def _add(self, note: Note, attributes: Attributes, near: Sequence[Version], answer: Mapping[str, Any]) -> None:
        """Add a note with its links, and rewrite the attributes of linked notes."""
        self.by_name[note.name], self.by_key[note.key] = note, note.name
        self.links[note.name] = {}
        self._write(note, attributes, (note.origin,))
        known = (self.by_key.get(key) for key in answer.get("links", ()))
        linked = [name for name in known if name] if "links" in answer else self._linked_by_rule(note, near)
        for name in linked:
            if name != note.name:
                self.links[note.name][name] = self.links[name][note.name] = None
        if self.settings.evolve:
            self._evolve(note, attributes, answer)

    def _linked_by_rule(self, note: Note, near: Sequence[Version]) -> list[str]:
        """Return the neighbours that handled one of the same kinds of objects in the same scene or kind of task."""
        task, others = note.origin.task, (self.by_name[version.item] for version in near)
        alike = lambda other: task.scene == other.scene != "" or task.kind == other.kind != ""
        return [each.name for each in others if each.objects & note.objects and alike(each.origin.task)]

    def _evolve(self, note: Note, attributes: Attributes, answer: Mapping[str, Any]) -> None:
        """Update attributes after a note was added, to what a model wrote about the note and its neighbours. Without
        such an answer, linked notes get the new note's tags."""
        linked, written = self.links[note.name], answer.get("evolved")
        if own := answer.get("own_tags"):  # written with the neighbours in view
            told = [self.by_name[name].origin for name in linked]
            self._write(note, replace(attributes, tags=tuple(own)), (note.origin, *told))
        by_key = (
            {name: {} for name in linked}
            if written is None
            else {name: new for key, new in written.items() if (name := self.by_key.get(key)) and name != note.name}
        )
        for name, new in by_key.items():
            version = self.items.version(name)
            old = self.attributes(version)
            union = (*old.tags, *attributes.tags) if name in linked else old.tags
            tags = tuple(new.get("tags") or dict.fromkeys(union))[:MOST_TAGS]
            changed = Attributes(old.keywords, tags, new.get("context") or old.context)
            if changed != old:
                self._write(self.by_name[name], changed, (*version.origins, note.origin))

    def _write(self, note: Note, attributes: Attributes, origins: Sequence[Origin]) -> None:
        """Write a note's first or next version."""
        version = self.items.put(
            note.name,
            f"{note.shown}\n{attributes}",
            self.learned,
            origins,
            actions=note.trace.actions,
            images=note.trace.views,
            told=note.origin,
            searched=f"{note.compact}\n{attributes}",
        )
        self._attributes[version.item, version.number] = attributes


def _listed(answers: Any, n: int) -> list[Mapping[str, Any]]:
    """Return the answers about n attempts, {} for an attempt without an answer."""
    given = answers if isinstance(answers, list) else []
    return [given[i] if i < len(given) and isinstance(given[i], dict) else {} for i in range(n)]
