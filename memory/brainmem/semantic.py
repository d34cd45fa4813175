"""Semantic memory: experiences, and the guidelines that form of them, by utility (BrainMem, section 3.2.3 and B.3).

    confidence = n_success / n_total      usage = min(n_success / 10, 1)
    utility    = 0.7 confidence + 0.3 usage

A guideline is applied in an episode when it was listed and its task types hold the episode's; a success is that of the
first attempt. When there are more than 1.5 M, those of least utility are dropped until M are left, but never one that
is protected (confidence of at least 0.8 with five successes or more). For the order of dropping alone, and not of
listing, utility decays by the episodes since the last use.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, groupby

from memory.words import words as words_of

SATURATION = 10  # successes from which use adds nothing
CONFIDENCE_WEIGHT, USAGE_WEIGHT = 0.7, 0.3
PROTECTED_CONFIDENCE, PROTECTED_SUCCESSES = 0.8, 5
SOFT_LIMIT = 1.5  # of the guidelines that are shown, from which on some are dropped
AGREE = 0.5  # Jaccard index of two texts' words, from which on they say the same
SUPPORT = 2  # experiences of different tasks that make a guideline


@dataclass(frozen=True, slots=True)
class Experience:
    """What one episode taught, all of its attempts together; `success` is that of the first."""

    id: str
    task_id: str
    room: str
    task_type: str
    objects: frozenset[str]
    success: bool
    success_patterns: tuple[str, ...] = ()
    failure_causes: tuple[str, ...] = ()
    learning_insights: tuple[str, ...] = ()
    recommendations: tuple[str, ...] = ()

    def texts(self) -> list[str]:
        """List what may become a guideline."""
        avoid = [f"Avoid: {cause}" for cause in self.failure_causes]
        return [*self.success_patterns, *avoid, *self.learning_insights, *self.recommendations]


class Experiences(Sequence[Experience]):
    """Experiences in their order. They are found by what they are about and by what they say, so that asking takes no
    longer as episodes go by that are about the same and say the same."""

    def __init__(self, experiences: Iterable[Experience] = ()) -> None:
        self._all, self._places = list[Experience](), dict[str, int]()  # places by id
        # Places in the order, the last at the end: of those of a task type and objects, in all and by room.
        self._about = dict[tuple[str, frozenset[str]], list[int]]()
        self._there = dict[tuple[str, frozenset[str], str], list[int]]()
        # By task type, object ("" where there is none) and text.
        self._saying = dict[tuple[str, str], dict[str, list[Experience]]]()
        for e in experiences:
            self.append(e)

    def append(self, e: Experience) -> None:
        """Take in the latest."""
        place = len(self._all)
        self._all.append(e)
        self._places[e.id] = place
        self._about.setdefault((e.task_type, e.objects), []).append(place)
        self._there.setdefault((e.task_type, e.objects, e.room), []).append(place)
        for thing in e.objects or ("",):
            texts = self._saying.setdefault((e.task_type, thing), {})
            for text in dict.fromkeys(e.texts()):
                texts.setdefault(text, []).append(e)

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, place):  # type: ignore[no-untyped-def]
        return self._all[place]

    def of_ids(self, ids: Iterable[str]) -> list[Experience]:
        """Return those of these ids, in their order."""
        return [self._all[place] for place in sorted(self._places[id] for id in ids if id in self._places)]

    def recalled(self, room: str, task_type: str, objects: frozenset[str], k: int, own: str = "") -> list[Experience]:
        """Return the k experiences of other tasks than `own` that say most about a task: its type counts two, the share
        of its objects one; where equal, this room's come first, then the latest. Those that share nothing are left
        out."""

        def score(about: tuple[str, frozenset[str]]) -> float:
            return 2.0 * (about[0] == task_type) + len(about[1] & objects) / max(1, len(objects))

        found = list[Experience]()
        for value, group in groupby(sorted(self._about, key=score, reverse=True), score):
            if not value or len(found) >= k:
                break
            alike = list(group)
            here = _latest_first(self._there.get((*about, room), []) for about in alike)
            elsewhere = (p for p in _latest_first(map(self._about.__getitem__, alike)) if self._all[p].room != room)
            for place in chain(here, elsewhere):
                if len(found) >= k:
                    break
                if self._all[place].task_id != own:
                    found.append(self._all[place])
        return found

    def saying(self, text: str, new: Experience) -> list[Experience]:
        """Return those that say the same as a text of a new one: of its task type, but not of its task, and, where both
        name any, of an object of its."""
        keys = [(new.task_type, thing) for thing in ("", *new.objects)]
        if not new.objects:
            keys = [key for key in self._saying if key[0] == new.task_type]
        said = chain.from_iterable(self._saying.get(key, {}).items() for key in keys)
        alike = (e for other, mine in said if _agree(text, other) for e in mine if e.task_id != new.task_id)
        return list({e.id: e for e in alike}.values())


def _latest_first(places: Iterable[Sequence[int]]) -> Iterator[int]:
    return heapq.merge(*(reversed(each) for each in places), reverse=True)


@dataclass(frozen=True, slots=True)
class Guideline:
    id: str
    text: str
    n_success: int
    n_total: int
    task_types: frozenset[str]
    objects: frozenset[str]  # empty: general
    support: frozenset[str]  # ids of experiences
    last_applied: int  # episode
    basis: str  # what its support agrees on, which `text` says in a model's words or the same

    @property
    def confidence(self) -> float:
        return self.n_success / self.n_total if self.n_total else 0.0

    @property
    def utility(self) -> float:
        """B.3.1."""
        return CONFIDENCE_WEIGHT * self.confidence + USAGE_WEIGHT * min(self.n_success / SATURATION, 1)

    @property
    def protected(self) -> bool:
        """Tell whether it is never dropped (B.3.2); by counts, without decay."""
        return self.confidence >= PROTECTED_CONFIDENCE and self.n_success >= PROTECTED_SUCCESSES

    def applied(self, success: bool, episode: int) -> Guideline:
        """Return it after an episode in which it was applied."""
        return replace(self, n_success=self.n_success + success, n_total=self.n_total + 1, last_applied=episode)


def listed(guidelines: Iterable[Guideline], most: int) -> list[Guideline]:
    """Return the best `most`, best first (C.3)."""
    ranked = sorted(guidelines, key=lambda g: (-g.utility, -g.n_success, g.id))
    return ranked[:most]


def pruned(guidelines: Sequence[Guideline], most: int, now: int, decay: float = 1.0) -> list[Guideline]:
    """Drop what is worth least once there are more than 1.5 `most`, in the order in which they were."""
    if len(guidelines) <= SOFT_LIMIT * most:
        return list(guidelines)
    effective = lambda g: g.utility * decay ** (now - g.last_applied)
    worst_first = sorted(guidelines, key=lambda g: (effective(g), g.n_success, g.id))
    dropped = {g.id for g in [g for g in worst_first if not g.protected][: len(guidelines) - most]}
    return [g for g in guidelines if g.id not in dropped]


def counted(
    guidelines: Sequence[Guideline], shown: frozenset[str], task_type: str, success: bool, episode: int
) -> list[Guideline]:
    """Count an episode for the guidelines that were applied in it."""
    return [g.applied(success, episode) if g.id in shown and task_type in g.task_types else g for g in guidelines]


def formed(
    guidelines: Sequence[Guideline],
    experiences: Experiences,
    new: Experience,
    episode: int,
    id: str,
    words: Mapping[str, str] = {},
) -> list[Guideline]:
    """Take in a new experience: it joins the support of guidelines that it agrees with, without changing their counts;
    and each of its texts that an experience of another task agrees with, and no guideline says yet, becomes one.

    `id` begins the ids of new guidelines. They start with the counts of their support; `words` says some of their texts
    in other words.
    """
    joined, left = list(guidelines), new.texts()
    for i, g in enumerate(joined):
        agreeing = [text for text in left if _agree(g.basis, text)]
        if agreeing and _meet(g.task_types, g.objects, new):
            joined[i] = replace(g, support=g.support | {new.id})
            left = [text for text in left if text not in agreeing]
    for number, text in enumerate(left):
        if any(_agree(g.basis, text) for g in joined):
            continue
        support = [new, *experiences.saying(text, new)]
        if len({e.task_id for e in support}) < SUPPORT:
            continue
        objects = frozenset.intersection(*(e.objects for e in support))
        made = Guideline(
            f"{id}.{number}",
            words.get(text, text),
            sum(e.success for e in support),
            len(support),
            frozenset(e.task_type for e in support),
            objects,
            frozenset(e.id for e in support),
            episode,
            text,
        )
        joined.append(made)
    return joined


def agreeing(experiences: Iterable[Experience], text: str) -> list[str]:
    """List what experiences say that agrees with a text, each once."""
    return list(dict.fromkeys(other for e in experiences for other in e.texts() if _agree(text, other)))


def _meet(task_types: frozenset[str], objects: frozenset[str], new: Experience) -> bool:
    """Tell whether task types meet, and objects, where neither side is general."""
    return new.task_type in task_types and (not objects or not new.objects or bool(objects & new.objects))


def _agree(one: str, other: str) -> bool:
    a, b = _words(one), _words(other)
    return len(a & b) >= AGREE * len(a | b) > 0


@lru_cache(maxsize=1 << 16)
def _words(text: str) -> frozenset[str]:
    return frozenset(words_of(text))
