"""Brief State b_t (paper section 3.2.2): the structured runtime context that the compiler reads and maintains.

It holds task progress (goal, completed, current and pending subgoals) and environment beliefs (key -> value). It is an
immutable value; four operations return a changed one (Create, Update, Delete, Fold). The reserved key `plan` addresses
task progress: creating it sets current and pending subgoals from a `; `-separated list, updating replaces them,
deleting clears them. Every other key is a belief.

Beliefs last until they are updated or deleted. A belief may list items, separated by ", ", of which Delete removes one:
a list that shrinks is not written again. Fold completes the current subgoal and leaves beliefs unchanged. The
state is bounded: it holds the `MAX_ITEMS` latest beliefs and the `MAX_ITEMS` latest completed subgoals. An operation
fails if its plan has more subgoals, or a text has more than `MAX_CHARACTERS` characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from runtime.parsing import without_newlines

PLAN = "plan"
MAX_ITEMS, MAX_CHARACTERS = 32, 800
BETWEEN = ", "  # items of a list


class BriefStateError(ValueError):
    """An operation that does not apply to this state. The loop records it and leaves the state unchanged."""


@dataclass(frozen=True, slots=True)
class Create:
    key: str
    value: str


@dataclass(frozen=True, slots=True)
class Update:
    key: str
    value: str


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a belief, or the first `item` of its list that reads so."""

    key: str
    item: str = ""


@dataclass(frozen=True, slots=True)
class Fold:
    summary: str


Op = Create | Update | Delete | Fold


@dataclass(frozen=True, slots=True)
class Belief:
    """A fact. White space in key and value is collapsed."""

    key: str
    value: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", one_line(self.key))
        object.__setattr__(self, "value", one_line(self.value))


@dataclass(frozen=True, slots=True)
class BriefState:
    """The state b_t. Newlines are removed from the goal; white space in subgoals is collapsed."""

    goal: str
    completed: tuple[str, ...] = ()
    current: str = ""
    pending: tuple[str, ...] = ()
    beliefs: tuple[Belief, ...] = ()  # in the order of their last Create or Update

    def __post_init__(self) -> None:
        object.__setattr__(self, "goal", without_newlines(self.goal))
        object.__setattr__(self, "completed", tuple(map(one_line, self.completed)))
        object.__setattr__(self, "current", one_line(self.current))
        object.__setattr__(self, "pending", tuple(map(one_line, self.pending)))

    def apply(self, op: Op) -> BriefState:
        """Return the state after one operation. Raises: BriefStateError, if the operation does not apply."""
        planned, known = bool(self.current or self.pending), {belief.key for belief in self.beliefs}
        match op:
            case Fold(summary):
                _require(bool(self.current), "fold: no current subgoal")
                _require_short("fold", summary)
                return replace(self, completed=(*self.completed, summary)[-MAX_ITEMS:])._with_plan(self.pending)
            case Create(key, value) if key == PLAN:
                _require(not planned, "create: there is a plan already")
                return self._with_plan(_subgoals("create", value))
            case Update(key, value) if key == PLAN:
                _require(planned, "update: there is no plan")
                return self._with_plan(_subgoals("update", value))
            case Delete(key, item) if key == PLAN:
                _require(not item, "delete: an item of the plan")
                _require(planned, "delete: there is no plan")
                return self._with_plan(())
            case Create(key, value):
                _require(key not in known, f"create: key exists: {key}")
                _require_short("create", key, value)
                return replace(self, beliefs=(*self.beliefs, Belief(key, value))[-MAX_ITEMS:])
            case Update(key, value):
                _require(key in known, f"update: no such key: {key}")
                _require_short("update", value)
                return replace(self, beliefs=(*self._beliefs_without(key), Belief(key, value)))
            case Delete(key, item):
                _require(key in known, f"delete: no such key: {key}")
                return self._without_item(key, item) if item else replace(self, beliefs=self._beliefs_without(key))

    def noting(self, notes: Iterable[tuple[str, str]]) -> BriefState:
        """Return the state with these keys and values, which replace those with the same key; "" removes a key."""
        beliefs = {belief.key: belief for belief in self.beliefs}
        for key, value in notes:
            beliefs[key] = Belief(key, value)
        return replace(self, beliefs=tuple(belief for belief in beliefs.values() if belief.value))

    def belief(self, key: str) -> str | None:
        """Return the value of a belief; None without it."""
        return next((b.value for b in self.beliefs if b.key == key), None)

    def _beliefs_without(self, key: str) -> tuple[Belief, ...]:
        return tuple(belief for belief in self.beliefs if belief.key != key)

    def _without_item(self, key: str, item: str) -> BriefState:
        """Remove an item from a belief's list, which keeps its position; an empty list is deleted."""
        items = (self.belief(key) or "").split(BETWEEN)
        _require(item in items, f"delete: {key} does not list {item}")
        items.remove(item)
        if not items:
            return replace(self, beliefs=self._beliefs_without(key))
        shorter = Belief(key, BETWEEN.join(items))
        return replace(self, beliefs=tuple(shorter if belief.key == key else belief for belief in self.beliefs))

    def _with_plan(self, subgoals: Sequence[str]) -> BriefState:
        current, *pending = subgoals or ("",)
        return replace(self, current=current, pending=tuple(pending))


def _require(holds: bool, error: str) -> None:
    if not holds:
        raise BriefStateError(error)


def _require_short(operation: str, *texts: str) -> None:
    _require(
        max(map(len, texts), default=0) <= MAX_CHARACTERS,
        f"{operation}: a text of more than {MAX_CHARACTERS} characters",
    )


def _subgoals(operation: str, value: str) -> list[str]:
    subgoals = _texts(value)
    _require(len(subgoals) <= MAX_ITEMS, f"{operation}: a plan of more than {MAX_ITEMS} subgoals")
    _require_short(operation, *subgoals)
    return subgoals


def apply_ops(ops: Sequence[Op], state: BriefState) -> tuple[BriefState, tuple[str, ...]]:
    """Return b_{t+1} = Apply(ops, b_t), and the errors of the operations that failed and were skipped."""
    errors: list[str] = []
    for op in ops:
        try:
            state = state.apply(op)
        except BriefStateError as error:
            errors.append(str(error))
    return state, tuple(errors)


# ---------------------------------------------------------------------------------------------------------------------
# Text form: parse_brief_state(render_brief_state(b)) == b


def render_brief_state(state: BriefState) -> str:
    """Render the state as text, one line per non-empty field."""
    fields = {
        "goal": [escape(state.goal, ";")],
        "done": [escape(subgoal, ";") for subgoal in state.completed],
        "now": [escape(state.current, ";")],
        "next": [escape(subgoal, ";") for subgoal in state.pending],
        "note": [_belief(belief) for belief in state.beliefs],
    }
    lines = {name: " ; ".join(items) for name, items in fields.items()}
    return "\n".join(f"{name}: {value}" for name, value in lines.items() if value or name == "goal")


def parse_brief_state(text: str) -> BriefState:
    """Parse the text of `render_brief_state`. Raises: ValueError, if the text is no rendered Brief State."""
    parts = [line.partition(": ") for line in text.split("\n")]
    lines = {name if separator else name.rstrip(":"): value for name, separator, value in parts}
    if unknown := set(lines) - {"goal", "done", "now", "next", "note"}:
        raise ValueError(f"not a Brief State: unknown lines {sorted(unknown)}")
    if "goal" not in lines or len(lines) < len(parts):
        raise ValueError("not a Brief State: no line `goal`, or two lines of one name")
    done, now, ahead, note = (lines.get(name, "") for name in ("done", "now", "next", "note"))
    return BriefState(
        goal=unescape(lines["goal"]),
        completed=tuple(_texts(done)),
        current=unescape(now),
        pending=tuple(_texts(ahead)),
        beliefs=tuple(_parse_belief(item) for item in _items(note)),
    )


def one_line(text: str) -> str:
    """Collapse white space of any kind to single spaces."""
    return " ".join(text.split())


def escape(text: str, marks: str) -> str:
    """Escape backslashes and `marks` with a backslash."""
    return re.sub(rf"([\\{re.escape(marks)}])", r"\\\1", text)


def unescape(text: str) -> str:
    """Remove the escapes of `escape`."""
    return re.sub(r"\\(.)", r"\1", text)


def split_unescaped(text: str, mark: str) -> list[str]:
    """Split at every unescaped `mark`. The parts keep their escapes."""
    parts, begin = list[str](), 0
    for found in re.finditer(rf"\\.|{re.escape(mark)}", text, re.DOTALL):
        if found[0] == mark:
            parts.append(text[begin : found.start()])
            begin = found.end()
    return [*parts, text[begin:]]


def _belief(belief: Belief) -> str:
    return f"{escape(belief.key, ';=')} = {escape(belief.value, ';=')}"


def _parse_belief(item: str) -> Belief:
    key, *values = split_unescaped(item, "=")
    if len(values) != 1:
        raise ValueError(f"not a Brief State: {item!r} is no note of the form `key = value`")
    return Belief(unescape(key), unescape(values[0]))


def _items(text: str) -> list[str]:
    return [part.strip() for part in split_unescaped(text, ";") if part.strip()]


def _texts(text: str) -> list[str]:
    return [unescape(item) for item in _items(text)]
