"""Rule-based parsing of questions into anchors (S3Mem, section 3.1): what a question names and asks for."""

from __future__ import annotations

import re
from collections.abc import Collection, Set
from dataclasses import dataclass, field
from typing import Literal

from memory.s3mem.text import MONTHS, NUMBERED, STOP_WORDS, folded_dates, name_key
from memory.words import words

Kind = Literal["event", "state", "source"]
_OPS = {
    "count": r"how (?:many|often)|number of|count",
    "between": r"\bbetween\b|from steps? \d+ to",
    "before": r"\bbefore\b|previous|prior to|just before",
    "after": r"\bafter\b|following|next (?:did|action|step)",
    "first": r"\bfirst\b|earliest|initially|at the beginning",
    "last": r"\blast (?:seen|time|step|action|place|did)|\blatest\b|most recent|finally|\bnow\b|currently|in the end",
    "compare": r"\bcompared?\b|\bboth\b|in common|\bdifferen|\bsame\b|\bmore than\b|\bor\b.*\?",
    "cause": r"\bwhy\b|\bcaus|because|\bled to\b|\bmade\b.*\b(?:become|hot|cold|clean|open)|which action",
    "when": r"\bwhen\b|what (?:date|day|month|year|time)|how long|which (?:day|month|year|step)|at which step",
    "where": r"\bwhere\b|which (?:place|room|city|country|receptacle)|what (?:place|city|country)",
    "who": r"\bwho\b|\bwhose\b|\bwhom\b",
}
_COMPILED = {op: re.compile(pattern) for op, pattern in _OPS.items()}
_NTH = re.compile(r"\b(second|third|fourth|fifth|sixth|(\d+)(?:st|nd|rd|th))\b(?! of (?:january|may|june))")
_NUMBERS = {"first": 1, "second": 2, "third": 3, "fourth": 4, "fifth": 5, "sixth": 6}
_STEPS = re.compile(r"\bsteps? (\d+)(?:(?: to | and |-)(?:step )?(\d+))?")
_DATE = re.compile(
    rf"\b(\d{{1,2}})?(?:st|nd|rd|th)?(?: of)? ?\b({'|'.join(MONTHS)})\b(?: (\d{{1,2}})\b)?(?:,? (\d{{4}}))?"
)
_QUOTED = re.compile(r"['\"“`「『«]([^'\"”`」』»]{2,80})['\"”`」』»]")
_STATE = re.compile(r"\bstate\b|\blocation\b|\bwhere (?:was|is|were|are)\b|\btemperature\b|\bcondition\b|\bopen or\b")
_SOURCE = re.compile(
    r"\bwho said\b|\baccording to\b|\bmention|\bsay\b|\bsaid\b|\btell\b|\btold\b|in which (?:session|turn)"
)
MULTI_HOP = frozenset({"count", "compare", "between", "cause", "before", "after"})


@dataclass(frozen=True, slots=True)
class Anchor:
    """A parsed question: its kind, its operations and the names in it.

    Attributes:
        steps: a range of step numbers, both ends included.
        dates: as "8 may 2023", without the parts that the question omits.
        nth: which occurrence is meant, from 1.
        multi_hop: the answer needs several linked units.
    """

    text: str
    kind: Kind = "event"
    ops: frozenset[str] = frozenset()
    events: tuple[str, ...] = ()
    objects: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    steps: tuple[int, int] | None = None
    dates: tuple[str, ...] = ()
    nth: int | None = None
    multi_hop: bool = False


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Names in a memory that a question may use: events, objects, places and actors, in lower case."""

    events: Collection[str] = ()
    objects: Collection[str] = ()
    places: Collection[str] = ()
    actors: Collection[str] = ()
    _by_key: dict[str, dict[str, str]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for kind in ("events", "objects", "places", "actors"):
            self._by_key[kind] = {name_key(name): name for name in getattr(self, kind) if name}

    def lookup(self, kind: str, keys: Set[str]) -> set[str]:
        """Return the names of one kind whose key is among `keys`."""
        return {self._by_key[kind][key] for key in keys & self._by_key[kind].keys()}


def parse_question(question: str, known: Vocabulary) -> Anchor:
    """Parse a question by rules, with the names that the memory knows."""
    text, plain = " ".join(question.lower().split()), folded_dates(question)
    ops = {op for op, pattern in _COMPILED.items() if pattern.search(plain)}
    nth = _NUMBERS.get(m[1]) or int(m[2] or 0) if (m := _NTH.search(plain)) else None
    ops |= {"nth"} if nth else set()
    spans = _spans(text)
    events = [*dict.fromkeys(quoted for quoted in _QUOTED.findall(text) if quoted in known.events)]
    events = events or _longest(known.lookup("events", spans), text)
    objects = [each for each in _longest(known.lookup("objects", spans), text) if each not in STOP_WORDS]
    places = _longest(known.lookup("places", spans), text)
    sources = sorted(known.lookup("actors", spans))
    steps = (int(m[1]), int(m[2] or m[1])) if (m := _STEPS.search(plain)) else None
    kind: Kind = "state" if _STATE.search(plain) else "source" if _SOURCE.search(plain) else "event"
    numbered = {each for each in objects if NUMBERED.fullmatch(each)} - {part for e in events for part in _spans(e)}
    linked = len(events) > 1 or len(numbered) > 1
    return Anchor(
        question,
        kind,
        frozenset(ops),
        events=tuple(events),
        objects=tuple(objects),
        places=tuple(places),
        sources=tuple(sources),
        steps=steps,
        dates=tuple(
            " ".join(filter(None, (d[0] or d[2], d[1], d[3]))) for d in _DATE.findall(plain) if d[0] or d[2] or d[3]
        ),
        nth=nth,
        multi_hop=bool(ops & MULTI_HOP) or linked,
    )


def _spans(text: str) -> set[str]:
    """List all runs of up to six words, the numbered objects, and every non-ASCII character."""
    tokens = words(text)
    runs = {" ".join(tokens[i : i + n]) for n in range(1, 7) for i in range(len(tokens) - n + 1)}
    return runs | set(NUMBERED.findall(text)) | {each for each in text if not each.isascii()}


def _longest(found: Collection[str], text: str) -> list[str]:
    """Drop names that are part of a longer one; order the others by their position in the text."""
    longest = [each for each in found if not any(each != other and f" {each} " in f" {other} " for other in found)]
    return sorted(longest, key=lambda each: (text.find(each), each))


def matches_date(when: str, dates: Collection[str]) -> bool:
    """Return whether a time such as "1:56 pm on 8 May, 2023" falls on one of the dates."""
    parts = set(words(folded_dates(when)))
    return any(set(date.split()) <= parts for date in dates)
