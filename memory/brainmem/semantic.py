"""Semantic memory: experiences, and guidelines ranked by utility (BrainMem, section 3.2.3 and B.3).

    confidence = n_success / n_total      usage = min(n_success / 10, 1)
    utility    = 0.7 confidence + 0.3 usage

An episode applies the listed guidelines of its task type; its first attempt decides success. Above 1.5 M guidelines,
those of least utility are dropped until M are left, except protected ones (confidence of at least 0.8 and at least five
successes). For dropping, but not for listing, utility decays with the episodes since the last use.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, groupby

from memory.words import words as words_of

SATURATION = 10  # successes at which usage is 1
CONFIDENCE_WEIGHT, USAGE_WEIGHT = 0.7, 0.3
PROTECTED_CONFIDENCE, PROTECTED_SUCCESSES = 0.8, 5
SOFT_LIMIT = 1.5  # times M, above which guidelines are dropped
AGREE = 0.5  # minimal Jaccard index of the words of two texts that agree
SUPPORT = 2  # tasks whose experiences must agree on a guideline


@dataclass(frozen=True, slots=True)
class Experience:
    """The lessons of one episode with all its attempts; `success` is the first attempt's."""

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
        """List the texts that may become guidelines."""
        avoid = [f"Avoid: {cause}" for cause in self.failure_causes]
        return [*self.success_patterns, *avoid, *self.learning_insights, *self.recommendations]


class Experiences(Sequence[Experience]):
    """Experiences in order, indexed by task and by text to bound the time of a query."""

    def __init__(self, experiences: Iterable[Experience] = ()) -> None:
        self._all, self._places = list[Experience](), dict[str, int]()  # indices by id
        # Indices in ascending order by (task type, objects), and by these and room.
        self._about = dict[tuple[str, frozenset[str]], list[int]]()
        self._there = dict[tuple[str, frozenset[str], str], list[int]]()
        # By (task type, object or "") and text.
        self._saying = dict[tuple[str, str], dict[str, list[Experience]]]()
        for e in experiences:
            self.append(e)

    def append(self, e: Experience) -> None:
        """Add the latest experience."""
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
        """Return the experiences with these ids in order."""
        return [self._all[place] for place in sorted(self._places[id] for id in ids if id in self._places)]

    def recalled(self, room: str, task_type: str, objects: frozenset[str], k: int, own: str = "") -> list[Experience]:
        """Return the k experiences most similar to a task, except those of task `own`.

        The task type counts 2, the share of common objects 1. Ties are broken by this room first, then latest first.
        """

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
        """Return the experiences that agree with a text of a new one: of its type, of another task, and with a common
        object where both name objects."""
        keys = [(new.task_type, thing) for thing in ("", *new.objects)]
        if not new.objects:
            keys = [key for key in self._saying if key[0] == new.task_type]
        texts = chain.from_iterable(self._saying.get(key, {}).items() for key in keys)
        alike = (e for other, mine in texts if _agree(text, other) for e in mine if e.task_id != new.task_id)
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
    basis: str  # the rules' text that its support agrees on; `text` may be a model's wording

    @property
    def confidence(self) -> float:
        return self.n_success / self.n_total if self.n_total else 0.0

    @property
    def utility(self) -> float:
        """Return 0.7 confidence + 0.3 usage (B.3.1)."""
        return CONFIDENCE_WEIGHT * self.confidence + USAGE_WEIGHT * min(self.n_success / SATURATION, 1)

    @property
    def protected(self) -> bool:
        """Whether it is never dropped (B.3.2); by counts, without decay."""
        return self.confidence >= PROTECTED_CONFIDENCE and self.n_success >= PROTECTED_SUCCESSES

    def applied(self, success: bool, episode: int) -> Guideline:
        """Return the guideline after an episode that applied it."""
        return replace(self, n_success=self.n_success + success, n_total=self.n_total + 1, last_applied=episode)


def best_guidelines(guidelines: Iterable[Guideline], most: int) -> list[Guideline]:
    """Return at most `most` guidelines, best first (C.3)."""
    return sorted(guidelines, key=lambda g: (-g.utility, -g.n_success, g.id))[:most]


def prune_guidelines(guidelines: Sequence[Guideline], most: int, now: int, decay: float = 1.0) -> list[Guideline]:
    """Drop the least useful guidelines if there are more than 1.5 `most`; keep the order of the others."""
    if len(guidelines) <= SOFT_LIMIT * most:
        return list(guidelines)
    effective = lambda g: g.utility * decay ** (now - g.last_applied)
    worst_first = sorted(guidelines, key=lambda g: (effective(g), g.n_success, g.id))
    dropped = {g.id for g in [g for g in worst_first if not g.protected][: len(guidelines) - most]}
    return [g for g in guidelines if g.id not in dropped]


def count_application(
    guidelines: Sequence[Guideline], shown: frozenset[str], task_type: str, success: bool, episode: int
) -> list[Guideline]:
    """Count an episode for the guidelines that it applied."""
    return [g.applied(success, episode) if g.id in shown and task_type in g.task_types else g for g in guidelines]


def update_guidelines(
    guidelines: Sequence[Guideline],
    experiences: Experiences,
    new: Experience,
    episode: int,
    id: str,
    words: Mapping[str, str] = {},
) -> list[Guideline]:
    """Return the guidelines after a new experience.

    The experience joins the support of guidelines it agrees with, without changing their counts. Each other text of it
    that an experience of another task agrees with becomes a guideline, with the counts of its support.

    Args:
        id: prefix of the ids of new guidelines.
        words: a model's wording of some texts.
    """
    joined, left = list(guidelines), new.texts()
    for i, g in enumerate(joined):
        agreeing = [text for text in left if _agree(g.basis, text)]
        if agreeing and _applies(g.task_types, g.objects, new):
            joined[i] = replace(g, support=g.support | {new.id})
            left = [text for text in left if text not in agreeing]
    for number, text in enumerate(left):
        if any(_agree(g.basis, text) for g in joined):
            continue
        support = [new, *experiences.saying(text, new)]
        if len({e.task_id for e in support}) < SUPPORT:
            continue
        objects = frozenset.intersection(*(e.objects for e in support))
        joined.append(
            Guideline(
                id=f"{id}.{number}",
                text=words.get(text, text),
                n_success=sum(e.success for e in support),
                n_total=len(support),
                task_types=frozenset(e.task_type for e in support),
                objects=objects,
                support=frozenset(e.id for e in support),
                last_applied=episode,
                basis=text,
            )
        )
    return joined


def agreeing_texts(experiences: Iterable[Experience], text: str) -> list[str]:
    """List the distinct texts of experiences that agree with a text."""
    return list(dict.fromkeys(other for e in experiences for other in e.texts() if _agree(text, other)))


def _applies(task_types: frozenset[str], objects: frozenset[str], new: Experience) -> bool:
    """Return whether a guideline's task types and objects match an experience; no objects match all."""
    return new.task_type in task_types and (not objects or not new.objects or bool(objects & new.objects))


def _agree(one: str, other: str) -> bool:
    a, b = _words(one), _words(other)
    return len(a & b) >= AGREE * len(a | b) > 0


@lru_cache(maxsize=1 << 16)
def _words(text: str) -> frozenset[str]:
    return frozenset(words_of(text))
