"""Generated dialogues of two people about their lives at home, in sessions.

The events (verb, object, place) are the steps of two expert histories; companion and occasion are drawn. An event
spreads over a few turns, one or more of its parts in each, between reactions and small talk, in a style that is drawn
for each dialogue. `data_gen.questions.dialogue_questions` asks about the events.
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from data_gen.questions.phrases import (
    COMPANIONS,
    LOOKS,
    NAMES,
    OCCASIONS,
    PADDING,
    PLACES,
    REACTIONS,
    SMALL_TALK,
    TIMES,
    VERBS,
)
from envs.base import Task
from envs.command_reader import kind
from envs.household.observation_parser import parse_places
from memory.protocol import Record, Trace
from memory.s3mem.rule_writer import write_units


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a speaker did or saw: a key of VERBS, object and place from the history; "" for unknown parts."""

    by: str
    verb: str
    thing: str
    place: str
    companion: str
    occasion: str

    def phrases(self) -> dict[str, str]:
        """Word the parts that follow the verb and its object."""
        return {
            "place": f"in the {self.place}",
            "companion": f"with {self.companion}",
            "occasion": f"for {self.occasion}",
        }


@dataclass(slots=True)
class Mention:
    """An event in the dialogue: the date of its session, and the id of the turn that mentions each part."""

    event: Event
    day: str
    turns: dict[str, str]


@dataclass(frozen=True, slots=True)
class Style:
    """Conversation style, drawn for each dialogue so that the router learns no single one.

    Attributes:
        spread: probability that a part of an event comes in a later turn.
        chat: probability of small talk before an event.
        echo: probability that a reaction names the event's parts.
        padding: mean number of filler sentences in a turn.
        events: largest number of events of a speaker in a session.
        guesses: probability that the listener guesses a part.
    """

    spread: float
    chat: float
    echo: float
    padding: float
    events: int
    guesses: float

    @classmethod
    def sample(cls, draw: random.Random) -> Style:
        return cls(
            spread=draw.uniform(0.3, 0.9),
            chat=draw.uniform(0, 0.6),
            echo=draw.uniform(0.5, 1),
            padding=draw.uniform(0.3, 1.5),
            events=draw.randint(2, 5),
            guesses=draw.uniform(0, 0.5),
        )


def extract_events(trace: Trace) -> list[tuple[str, str, str]]:
    """List (verb, object, place) of what a history's steps changed and showed, in step order."""
    found = list[tuple[str, str, str]]()
    for unit, record in zip(write_units(trace), trace.records, strict=True):
        for change in unit.changes:
            thing, _, what = change.key.rpartition(".")
            if what == "location":
                taken = change.after == "held"
                found.append(("take" if taken else "put", kind(thing), kind(change.before if taken else change.after)))
            elif change.after in VERBS:
                found.append((change.after, kind(thing), kind(unit.place) if change.after != "open" else ""))
        for view in parse_places(record.feedback):
            found += [("see", kind(thing), kind(view.at)) for thing in view.seen[:1]]
    return found


@dataclass(slots=True)
class Dialogue:
    """A dialogue under construction: its turns so far, and the events that they mention."""

    name: str
    speakers: tuple[str, str]
    draw: random.Random
    things: Sequence[str]
    places: Sequence[str]
    style: Style
    records: list[Record] = field(default_factory=list)
    mentions: list[Mention] = field(default_factory=list)
    day: str = ""
    session: int = 0

    def history(self) -> Trace:
        task = Task(self.name, goal="", scene="", split="", kind="dialogue")
        return Trace(task, tuple(self.records), success=True)

    def say(self, who: int, *sentences: str) -> str:
        """Append a turn with filler sentences around the given ones; return its id."""
        n = min(int(self.draw.expovariate(1 / self.style.padding)), 3)
        filler = self.draw.sample(PADDING, n)
        at = self.draw.randint(0, n)
        text = self._fill_slots(" ".join([*filler[:at], *sentences, *filler[at:]]), who)
        t = len(self.records)
        id = f"{self.name}:{self.session}.{t}"
        self.records.append(Record(t, "", text, "", id=id, actor=self.speakers[who], when=self.day))
        return id

    def _fill_slots(self, text: str, who: int) -> str:
        draw = self.draw
        slots = {
            "{other}": self.speakers[1 - who],
            "{thing}": draw.choice(self.things),
            "{spot}": draw.choice(PLACES),
            "{place}": draw.choice(self.places),
            "{companion}": draw.choice(COMPANIONS),
            "{occasion}": draw.choice(OCCASIONS),
        }
        for slot, value in slots.items():
            text = text.replace(slot, value)
        return " ".join(text.split())

    def narrate(self, who: int, event: Event) -> None:
        """Append the turns about an event: verb and object first (or after an introduction), then the other parts."""
        draw, turns = self.draw, dict[str, str]()
        time, look = draw.choice((*TIMES, "", "", "")), draw.choice((*LOOKS, *[""] * 5))
        verb = draw.choice(VERBS[event.verb][0])
        introduced = draw.random() < 0.4
        if introduced:
            self._introduce(who, event.thing)
        thing = "it" if introduced else f"the {look} {event.thing}"
        it = draw.choice(("it", "it", f"the {event.thing}"))
        later = {
            "place": f"{it.capitalize()} was in the {event.place}.",
            "companion": f"{event.companion.capitalize()} helped me with {it}.",
            "occasion": f"{it.capitalize()} is for {event.occasion}.",
        }
        parts = [part for part in later if getattr(event, part)]
        draw.shuffle(parts)
        rest = [part for part in parts if draw.random() < self.style.spread]
        phrases = event.phrases()
        opening = draw.choice(("So", "Well,", "Guess what,", "You know,"))
        sentence = [f"{opening} I {verb} {thing}", *(phrases[part] for part in parts if part not in rest), time]
        turn = self.say(who, f"{' '.join(' '.join(sentence).split())}.")
        turns |= {part: turn for part in ("thing", "day", *parts) if part not in rest}
        while rest:
            self._react(1 - who, event)
            together = draw.randint(1, len(rest))
            if draw.random() < self.style.guesses:  # the listener guesses right
                turn = self.say(1 - who, *(f"Let me guess, {phrases[part]}?" for part in rest[:together]))
                self.say(who, draw.choice(("Exactly!", "How did you know?", "Yes, that is right.")))
            else:
                turn = self.say(who, *(later[part] for part in rest[:together]))
            turns |= dict.fromkeys(rest[:together], turn)
            rest = rest[together:]
        for speaker in (1 - who, who)[: draw.randrange(3)]:
            self._react(speaker, event)
        self.mentions.append(Mention(event, self.day, turns))

    def _introduce(self, who: int, thing: str) -> None:
        """Have either speaker name the object before the event."""
        if self.draw.random() < 0.5:
            self.say(1 - who, f"And your {thing}, what about it?")
        else:
            self.say(who, f"Remember the {thing} that I told you about?")
            self.say(1 - who, self.draw.choice(("Of course, go on.", "Yes! Any news?", "How could I forget.")))

    def _react(self, who: int, event: Event) -> None:
        reaction = self.draw.choice(REACTIONS)
        if self.draw.random() < self.style.echo:
            for part in ("thing", "occasion", "companion"):
                reaction = reaction.replace(f"{{{part}}}", getattr(event, part) or f"{{{part}}}")
        self.say(who, reaction)


def write_dialogue(name: str, traces: tuple[Trace, Trace], sessions: int, draw: random.Random) -> Dialogue:
    """Generate a dialogue about two histories, one of each speaker, in dated sessions."""
    events = [extract_events(trace) for trace in traces]
    first, second = draw.sample(NAMES, 2)
    dialogue = Dialogue(
        name,
        (first, second),
        draw,
        things=sorted({thing for own in events for _, thing, _ in own}),
        places=sorted({place for own in events for *_, place in own if place}),
        style=Style.sample(draw),
    )
    date = datetime.date(2020, 1, 1) + datetime.timedelta(draw.randrange(1000))
    for session in range(sessions):
        date += datetime.timedelta(draw.randint(1, 20))
        dialogue.session = session + 1
        clock = f"{draw.randint(1, 12)}:{draw.randrange(60):02} {draw.choice(('am', 'pm'))}"
        dialogue.day = f"{clock} on {date.day} {date:%B}, {date.year}"
        _write_session(
            dialogue, [own[session * len(own) // sessions : (session + 1) * len(own) // sessions] for own in events]
        )
    return dialogue


def _write_session(dialogue: Dialogue, events: Sequence[Sequence[tuple[str, str, str]]]) -> None:
    """Append one session: small talk, and each speaker's events since the last one."""
    draw, most = dialogue.draw, dialogue.style.events
    maybe = lambda choices: draw.choice(choices) if draw.random() < 0.5 else ""
    turns = [
        (who, Event(dialogue.speakers[who], *event, companion=maybe(COMPANIONS), occasion=maybe(OCCASIONS)))
        for who, own in enumerate(events)
        for event in draw.sample(own, min(most, len(own)))
    ]
    draw.shuffle(turns)
    for who in (0, 1):
        dialogue.say(who, draw.choice(SMALL_TALK))
    for who, event in turns:
        if draw.random() < dialogue.style.chat:
            dialogue.say(1 - who, draw.choice(SMALL_TALK))
        dialogue.narrate(who, event)
    dialogue.say(draw.randrange(2), draw.choice(SMALL_TALK))
