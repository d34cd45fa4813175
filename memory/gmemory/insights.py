"""G-Memory's insights: sentences of advice with a score and the tasks that support them.

Operations change them: ADD gives a score of 2, AGREE and EDIT add 1, REMOVE takes 1 (3 if there are ten insights or
more), and a score of 0 deletes. They name insights by text, so that they keep their meaning when another writer's
episodes come before them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memory.items import Origin

ADDED, AGREED, USED_WELL, USED_BADLY = 2, 1, 1, -2
MANY = 10  # insights from which REMOVE takes 3
COUNT = "{tasks}"  # in a rule's sentence, replaced by the number of supporting tasks


@dataclass
class Insight:
    """A sentence with its supporting tasks.

    Attributes:
        text: may contain COUNT, which only rules write.
        support: origins of the supporting episodes, by node name.
        worded: tasks whose episodes a model had in view when it wrote the text; rules' texts follow from each single
            supporting episode.
    """

    text: str
    score: int
    support: dict[str, Origin]
    worded: frozenset[str] = frozenset()
    by_rule: bool = False
    tasks: Counter[str] = field(default_factory=Counter)  # supporting episodes by task

    def seen_by(self, own: str) -> tuple[str, Origin] | None:
        """Return the sentence and its latest supporter without a task's own episodes; None if none is left."""
        if own in self.worded or not (count := len(self.support) - self.tasks[own]):
            return None
        latest = next(origin for origin in reversed(self.support.values()) if origin.task.id != own)
        return self.shown(count), latest

    def shown(self, count: int) -> str:
        """Return the sentence for a number of supporting tasks."""
        return self.text.replace(COUNT, f"{count} task{'s' * (count != 1)}", 1) if self.by_rule else self.text


def insight_id(text: str) -> str:
    """Hash a sentence as it is shown to 16 hex digits."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


@dataclass
class Insights:
    """All insights, by text."""

    by_text: dict[str, Insight] = field(default_factory=dict)
    shown: dict[str, tuple[str, Insight]] = field(default_factory=dict)  # every sentence that was ever shown, by hash
    of_node: dict[str, dict[str, None]] = field(default_factory=dict)  # texts of the insights a node supports

    def __len__(self) -> int:
        return len(self.by_text)

    def __iter__(self) -> Iterator[Insight]:
        return iter(self.by_text.values())

    def apply(self, operation: Mapping[str, Any], support: Mapping[str, Origin]) -> None:
        """Apply an operation of a round. An unknown text makes EDIT, REMOVE and AGREE void.

        Args:
            operation: {"op", "text"}, and {"new"} of EDIT and MERGE; MERGE has lists of texts.
            support: the tasks that the operation follows from, by node name.
        """
        text, worded = operation["text"], frozenset(operation.get("worded", ()))
        match operation["op"]:
            case "ADD" if text not in self.by_text:
                self._put(Insight(text, ADDED, dict(support), worded, bool(operation.get("by_rule"))))
            case "ADD" | "AGREE" if known := self.by_text.get(text):
                self._support(known, support)
                self.change_score(known, AGREED)
            case "EDIT" if known := self.by_text.get(text):
                self._drop(known)
                both, wordings = {**known.support, **support}, known.worded | worded
                self._put(Insight(operation["new"], known.score + AGREED, both, wordings))
            case "REMOVE" if known := self.by_text.get(text):
                self.change_score(known, -1 if len(self) < MANY else -3)
            case "MERGE":
                self._merge(text, operation["new"])

    def change_score(self, insight: Insight, by: int) -> None:
        """Add to a score; 0 or less deletes the insight."""
        insight.score += by
        if insight.score <= 0:
            self._drop(insight)

    def judge(self, ids: Iterable[str], success: bool) -> None:
        """Reward or punish the insights that an episode was shown, by the hashes of their sentences."""
        used = {id(insight): insight for each in ids if each in self.shown for insight in [self.shown[each][1]]}
        for insight in used.values():
            if self.by_text.get(insight.text) is insight:
                self.change_score(insight, USED_WELL if success else USED_BADLY)

    def ranked(self, nodes: Sequence[str], own: str) -> Iterator[tuple[str, Origin]]:
        """Yield sentences and their latest supporter of the insights that some nodes support: those of
        most nodes first, then by score, then by text."""
        counts: dict[str, int] = {}
        for node in nodes:
            for text in self.of_node.get(node, ()):
                counts[text] = counts.get(text, 0) + 1
        order = sorted(counts, key=lambda text: (-counts[text], -self.by_text[text].score, text))
        return (seen for text in order if (seen := self.by_text[text].seen_by(own)) is not None)

    def _put(self, new: Insight) -> None:
        """Add an insight; one with the same text is merged into it."""
        if known := self.by_text.get(new.text):
            self._drop(known)
            new.support, new.worded = known.support | new.support, known.worded | new.worded
            new.score = max(known.score, new.score)
        self.by_text[new.text] = new
        support, new.support, new.tasks = new.support, {}, Counter()
        self._support(new, support)

    def _support(self, insight: Insight, support: Mapping[str, Origin]) -> None:
        for node, origin in sorted(support.items(), key=lambda item: item[1].row):
            if node not in insight.support:
                insight.support[node] = origin
                insight.tasks[origin.task.id] += 1
                self.of_node.setdefault(node, {})[insight.text] = None
                shown = insight.shown(len(insight.support))
                self.shown[insight_id(shown)] = shown, insight

    def _drop(self, insight: Insight) -> None:
        """Delete an insight. Its sentences stay readable by their hashes."""
        del self.by_text[insight.text]
        for node in insight.support:
            self.of_node[node].pop(insight.text, None)

    def _merge(self, texts: Sequence[str], new: Sequence[str]) -> None:
        """Replace insights by fewer ones, which all their tasks support and whose scores start again."""
        merged = [self.by_text[text] for text in dict.fromkeys(texts) if text in self.by_text]
        if not merged or not new:
            return
        support = {node: origin for insight in merged for node, origin in insight.support.items()}
        worded = frozenset(origin.task.id for origin in support.values()).union(*(each.worded for each in merged))
        for insight in merged:
            self._drop(insight)
        for text in new:
            self._put(Insight(text, ADDED, dict(support), worded))


# advice by rule -----------------------------------------------------------------------------------------------------

_FIRST = {"take": "take the thing", "put": "put the thing down", "on": "turn something on", "off": "turn something off"}
_THEN = {
    "take": "taking it",
    "put": "putting it down",
    "heat": "heating it",
    "cool": "cooling it",
    "clean": "cleaning it",
    "slice": "slicing it",
    "on": "turning something on",
    "off": "turning something off",
    "use": "using something",
    "open": "opening something",
    "close": "closing something",
}


def advice(verbs: Sequence[str], kind: str) -> str:
    """Write what a success shows: what was done before what; "" if it did only one kind of thing."""
    order = list(dict.fromkeys(verbs))
    if len(order) < 2:
        return ""
    first = _FIRST.get(order[0], f"{order[0]} something")
    return f"{first} before {_THEN.get(order[1], order[1])}, because {COUNT}{_of_kind(kind)} succeeded so"


def warning(cause: str, kind: str) -> str:
    """Write what a failure shows beside a success of its kind."""
    return f"avoid this: {_plain(cause).rstrip('.')}, because {COUNT}{_of_kind(kind)} failed so"


def _of_kind(kind: str) -> str:
    return f" of kind {_plain(kind)}" if kind else ""


def _plain(text: str) -> str:
    """Return data without the mark of a count."""
    return text.replace(COUNT, "(tasks)")
