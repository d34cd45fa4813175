"""Dialogues of our own: two people tell each other, session after session, what they did at home, and the questions
about that, whose evidence is exact by construction.

What was done, with what and where, are the steps of two histories; with whom and what for is drawn. An event is told
over a few turns, a part of it in each, between reactions and small talk, in a manner that is drawn for each dialogue
(`Style`). A question names some parts of an event and asks for another; each part recurs in other events.
"""

from __future__ import annotations

import datetime
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, pairwise

from data_gen.cases import Case, Question
from data_gen.small_talk import NAMES, PADDING, PLACES, REACTIONS, SMALL_TALK, TIMES
from envs.base import Task
from envs.household.telling import kind, views
from memory.protocol import Record, Trace
from memory.s3mem.writing import written

VERBS = {  # of what was done: as the teller may say it, and as a question may
    "take": (("found", "spotted", "came across", "finally got hold of", "dug out"), ("find", "come across", "get")),
    "put": (("put away", "left", "stowed away", "placed"), ("put away", "leave", "place")),
    "hot": (("heated", "warmed up", "microwaved"), ("heat", "warm up")),
    "cold": (("cooled", "chilled"), ("cool", "chill")),
    "clean": (("cleaned", "washed", "rinsed", "scrubbed"), ("clean", "wash")),
    "open": (("opened", "looked into", "went through"), ("open", "look into")),
    "see": (("saw", "noticed", "had a look at"), ("see", "notice")),
}
COMPANIONS = (
    "my sister",
    "my brother",
    "my neighbour",
    "my aunt",
    "a colleague",
    "my grandmother",
    "the children",
    "an old friend",
)
OCCASIONS = (
    "the party|the exam|the wedding|the move|the holidays|the picnic|the visit|the concert|the storm|the anniversary"
).split("|")
LOOKS = "old|new|blue|broken|tiny|heavy|wooden|shiny|borrowed|favourite".split("|")
PARTS = ("thing", "place", "companion", "occasion")  # of an event, each told in some turn
ASKED = {
    "thing": "What did {by} {verb}{place}{companion}{occasion}?",
    "place": "Where did {by} {verb} the {thing}{companion}{occasion}?",
    "companion": "Who was with {by} to {verb} the {thing}{place}{occasion}?",
    "occasion": "What did {by} {verb} the {thing}{place}{companion} for?",
    "day": "When did {by} {verb} the {thing}{place}{companion}{occasion}?",
}


@dataclass(frozen=True, slots=True)
class Event:
    """What somebody did or saw: verb of VERBS, thing and place as a history has them, "" for what is not told."""

    by: str
    verb: str
    thing: str
    place: str
    companion: str
    occasion: str


@dataclass(slots=True)
class Told:
    """An event as it was told: on which day, and by part in which turn."""

    event: Event
    day: str
    turns: dict[str, str]


@dataclass(frozen=True, slots=True)
class Style:
    """How a pair talks, drawn for each dialogue, so that no habit of theirs is one of all people: share of an event's
    parts that come later, shares of small talk and of reactions that name the thing, sentences around another, events
    in a session, share of parts that the other one guesses."""

    spread: float
    chat: float
    echo: float
    around: float
    events: int
    guesses: float

    @classmethod
    def drawn(cls, draw: random.Random) -> Style:
        within = draw.uniform
        return cls(
            within(0.3, 0.9), within(0, 0.6), within(0.5, 1), within(0.3, 1.5), draw.randint(2, 5), within(0, 0.5)
        )


def deeds(trace: Trace) -> list[tuple[str, str, str]]:
    """List verb, thing and place of what a history's steps did and showed, in their order."""
    found = list[tuple[str, str, str]]()
    for unit, record in zip(written(trace), trace.records, strict=True):
        for change in unit.changes:
            thing, _, what = change.key.rpartition(".")
            if what == "location":
                taken = change.after == "held"
                found.append(("take" if taken else "put", kind(thing), kind(change.before if taken else change.after)))
            elif change.after in VERBS:
                found.append((change.after, kind(thing), kind(unit.place) if change.after != "open" else ""))
        for view in views(record.feedback):
            found += [("see", kind(thing), kind(view.at)) for thing in (view.seen or ())[:1]]
    return found


@dataclass(slots=True)
class _Dialogue:
    """A dialogue in the making."""

    name: str
    speakers: tuple[str, str]
    draw: random.Random
    things: Sequence[str]
    places: Sequence[str]
    style: Style
    records: list[Record] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    day: str = ""
    session: int = 0

    def say(self, who: int, *sentences: str) -> str:
        """Add a turn, other sentences around what is said; return its id."""
        n = min(int(self.draw.expovariate(1 / self.style.around)), 3)
        told = self.draw.sample(PADDING, n)
        at = self.draw.randint(0, n)
        text = self.filled(" ".join([*told[:at], *sentences, *told[at:]]), who)
        t = len(self.records)
        id = f"{self.name}:{self.session}.{t}"
        self.records.append(Record(t, "", text, "", id=id, actor=self.speakers[who], when=self.day))
        return id

    def filled(self, text: str, who: int) -> str:
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

    def tell(self, who: int, event: Event) -> None:
        """Tell an event: its deed and thing first, or after the thing was named; the rest at once or later on."""
        draw, turns = self.draw, dict[str, str]()
        time, look = draw.choice((*TIMES, "", "", "")), draw.choice((*LOOKS, *[""] * 5))
        verb = draw.choice(VERBS[event.verb][0])
        named_before = draw.random() < 0.4
        if named_before:
            self._introduce(who, event.thing)
        thing = "it" if named_before else f"the {look} {event.thing}"
        it = draw.choice(("it", "it", f"the {event.thing}"))
        later = {
            "place": f"{it.capitalize()} was in the {event.place}.",
            "companion": f"{event.companion.capitalize()} helped me with {it}.",
            "occasion": f"{it.capitalize()} is for {event.occasion}.",
        }
        parts = [part for part in later if getattr(event, part)]
        draw.shuffle(parts)
        rest = [part for part in parts if draw.random() < self.style.spread]
        ends = _named(event)
        deed = " ".join(
            [
                f"{draw.choice(('So', 'Well,', 'Guess what,', 'You know,'))} I {verb} {thing}",
                *(ends[part] for part in parts if part not in rest),
                time,
            ]
        )
        turn = self.say(who, f"{' '.join(deed.split())}.")
        turns |= {part: turn for part in ("thing", "day", *parts) if part not in rest}
        while rest:
            self.react(1 - who, event)
            together = draw.randint(1, len(rest))
            if draw.random() < self.style.guesses:  # the other one says it, and is right
                turn = self.say(1 - who, *(f"Let me guess, {ends[part]}?" for part in rest[:together]))
                self.say(who, draw.choice(("Exactly!", "How did you know?", "Yes, that is right.")))
            else:
                turn = self.say(who, *(later[part] for part in rest[:together]))
            turns |= dict.fromkeys(rest[:together], turn)
            rest = rest[together:]
        for speaker in (1 - who, who)[: draw.randrange(3)]:
            self.react(speaker, event)
        self.told.append(Told(event, self.day, turns))

    def _introduce(self, who: int, thing: str) -> None:
        """Name the thing before anything is said of it, by the one or the other."""
        if self.draw.random() < 0.5:
            self.say(1 - who, f"And your {thing}, what about it?")
        else:
            self.say(who, f"Remember the {thing} that I told you about?")
            self.say(1 - who, self.draw.choice(("Of course, go on.", "Yes! Any news?", "How could I forget.")))

    def react(self, who: int, event: Event) -> None:
        said = self.draw.choice(REACTIONS)
        if self.draw.random() < self.style.echo:
            for part in ("thing", "occasion", "companion"):
                said = said.replace(f"{{{part}}}", getattr(event, part) or f"{{{part}}}")
        self.say(who, said)


def dialogue_case(
    name: str, traces: tuple[Trace, Trace], sessions: int, per_category: int, seed: int = 0, style: Style | None = None
) -> Case:
    """Make a dialogue about two histories, one of each speaker, and at most so many questions of each category."""
    draw = random.Random(f"{seed} {name}")
    told = [deeds(trace) for trace in traces]
    speakers = tuple(draw.sample(NAMES, 2))
    named = sorted({thing for of in told for _, thing, _ in of}), sorted({at for of in told for *_, at in of if at})
    dialogue = _Dialogue(name, (speakers[0], speakers[1]), draw, *named, style or Style.drawn(draw))
    date = datetime.date(2020, 1, 1) + datetime.timedelta(draw.randrange(1000))
    for session in range(sessions):
        date += datetime.timedelta(draw.randint(1, 20))
        dialogue.session = session + 1
        clock = f"{draw.randint(1, 12)}:{draw.randrange(60):02} {draw.choice(('am', 'pm'))}"
        dialogue.day = f"{clock} on {date.day} {date:%B}, {date.year}"
        _talk(dialogue, [of[session * len(of) // sessions : (session + 1) * len(of) // sessions] for of in told])
    history = Trace(Task(name, "", "", "", "dialogue"), tuple(dialogue.records), True)
    return Case(name, (history,), tuple(_chosen(dialogue, per_category)))


def _talk(dialogue: _Dialogue, stretches: Sequence[Sequence[tuple[str, str, str]]]) -> None:
    """Hold one session: small talk, and what each has done since the last one."""
    draw, most = dialogue.draw, dialogue.style.events
    some = lambda of, share: draw.choice(of) if draw.random() < share else ""
    turns = [
        (who, Event(dialogue.speakers[who], *deed, some(COMPANIONS, 0.5), some(OCCASIONS, 0.5)))
        for who, stretch in enumerate(stretches)
        for deed in draw.sample(stretch, min(most, len(stretch)))
    ]
    draw.shuffle(turns)
    for who in (0, 1):
        dialogue.say(who, draw.choice(SMALL_TALK))
    for who, event in turns:
        if draw.random() < dialogue.style.chat:
            dialogue.say(1 - who, draw.choice(SMALL_TALK))
        dialogue.tell(who, event)
    dialogue.say(draw.randrange(2), draw.choice(SMALL_TALK))


# questions -----------------------------------------------------------------------------------------------------------


def _chosen(dialogue: _Dialogue, most: int) -> Iterator[Question]:
    by_category: dict[str, list[Question]] = {}
    for question in (*_about_one(dialogue), *_about_several(dialogue)):
        by_category.setdefault(question.category, []).append(question)
    chosen = [q for of in by_category.values() for q in dialogue.draw.sample(of, min(most, len(of)))]
    return (replace(question, id=f"{dialogue.name}/{i}") for i, question in enumerate(chosen))


def _about_one(dialogue: _Dialogue) -> Iterator[Question]:
    """Ask for a part or the day of an event by others that single it out; or of the wrong person, where the turn shows
    that it was the other one."""
    counts = Counter(key for told in dialogue.told for key in _keys(told.event))
    for told in dialogue.told:
        event = told.event
        other = next(name for name in dialogue.speakers if name != event.by)
        for asked in ASKED:
            if asked != "day" and not getattr(event, asked):
                continue
            needed = {"thing"} - {asked}
            extra = [part for part in PARTS if part not in needed and part != asked and getattr(event, part)]
            named = needed | set(dialogue.draw.sample(extra, dialogue.draw.randint(0, len(extra))))
            if len(named) == 0 or counts[_key(event, named)] > 1:
                continue
            answer = told.day.partition(" on ")[2] if asked == "day" else getattr(event, asked)
            turn, ground = told.turns[asked], told.turns["thing"]
            links = ((ground, turn),) if ground != turn else ()
            made = Question(
                "",
                _worded(dialogue, event, asked, named, event.by),
                answer,
                "temporal" if asked == "day" else "single-hop",
                (turn,),
                anchors=(ground,),
                links=links,
            )
            yield made
            if asked != "day":
                yield replace(
                    made, text=_worded(dialogue, event, asked, named, other), category="adversarial", absent=True
                )


def _keys(event: Event) -> Iterator[tuple[object, ...]]:
    """Yield what questions may name an event by; whoever it was, for nobody else may have done the same."""
    for n in range(1, len(PARTS) + 1):
        for named in combinations(PARTS, n):
            if all(getattr(event, part) for part in named):
                yield _key(event, set(named))


def _key(event: Event, named: set[str]) -> tuple[object, ...]:
    return (event.verb, *((part, getattr(event, part)) for part in PARTS if part in named))


def _named(event: Event) -> dict[str, str]:
    """Word the parts of an event that follow what was done."""
    place, companion, occasion = event.place, event.companion, event.occasion
    return {"place": f"in the {place}", "companion": f"with {companion}", "occasion": f"for {occasion}"}


def _worded(dialogue: _Dialogue, event: Event, asked: str, named: set[str], by: str) -> str:
    parts: Mapping[str, str] = {part: f" {text}" if part in named else "" for part, text in _named(event).items()}
    verb = dialogue.draw.choice(VERBS[event.verb][1])
    text = ASKED[asked].format(by=by, verb=verb, thing=event.thing, **parts)
    return text.replace(" my ", " their ")


def _about_several(dialogue: _Dialogue) -> Iterator[Question]:
    """Ask for all that one of them did of a kind, with somebody, for something or with a thing."""
    groups: dict[tuple[str, str, str], list[Told]] = {}
    for told in dialogue.told:
        for part in ("verb", *PARTS):
            if getattr(told.event, part):
                groups.setdefault((told.event.by, part, getattr(told.event, part)), []).append(told)
    for (by, part, value), members in groups.items():
        turns = tuple(dict.fromkeys(told.turns[part if part in PARTS else "thing"] for told in members))
        if not 2 <= len(turns) <= 6:
            continue
        verb = dialogue.draw.choice(VERBS[value][1]) if part == "verb" else ""
        text = {
            "verb": f"What things did {by} {verb}?",
            "thing": f"What has {by} done with the {value}?",
            "place": f"What did {by} do in the {value}?",
            "companion": f"What has {by} done with {value}?",
            "occasion": f"What has {by} done for {value}?",
        }[part].replace(" my ", " their ")
        answer = ", ".join(dict.fromkeys(told.event.thing for told in members))
        yield Question("", text, answer, "multi-hop", turns, anchors=turns, links=tuple(pairwise(turns)))
