"""Brief State b_t (paper section 3.2.2): the structured runtime context that the compiler reads and maintains.

Two dimensions: task progress (goal, completed, current and pending subgoals) and environment belief (key -> value).
Pure data with value semantics; four operations change it (Create, Update, Delete, Fold). The reserved key `plan`
addresses task progress with the same operations: creating it sets current and pending subgoals from a
`; `-separated list, updating replaces them, deleting clears them. Every other key is a belief.

A belief that is created while a subgoal is current belongs to that subgoal: Fold drops it together with the subgoal.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

PLAN = "plan"


class BriefStateError(ValueError):
    """An operation that does not apply to this state. The loop counts it and goes on with the state unchanged."""


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
    key: str


@dataclass(frozen=True, slots=True)
class Fold:
    summary: str


Op = Create | Update | Delete | Fold


@dataclass(frozen=True, slots=True)
class Belief:
    key: str
    value: str
    local: bool = False  # belongs to the current subgoal and goes when it is folded


@dataclass(frozen=True, slots=True)
class BriefState:
    goal: str
    completed: tuple[str, ...] = ()
    current: str = ""
    pending: tuple[str, ...] = ()
    beliefs: tuple[Belief, ...] = ()

    def apply(self, op: Op) -> BriefState:
        """The state after one operation.

        Raises:
            BriefStateError: Create on an existing key, Update or Delete on a missing one, Fold without a subgoal.
        """
        match op:
            case Fold(summary):
                return self._fold(summary)
            case Create(key, value) if key == PLAN:
                if self.current or self.pending:
                    raise BriefStateError("create: there is a plan already")
                return self._with_plan(value)
            case Update(key, value) if key == PLAN:
                self._require_plan("update")
                return self._with_plan(value)
            case Delete(key) if key == PLAN:
                self._require_plan("delete")
                return replace(self, current="", pending=())
            case Create(key, value):
                if self.belief(key) is not None:
                    raise BriefStateError(f"create: key exists: {key}")
                return replace(self, beliefs=(*self.beliefs, Belief(key, value, local=bool(self.current))))
            case Update(key, value):
                self._require_belief("update", key)
                new = tuple(replace(b, value=value) if b.key == key else b for b in self.beliefs)
                return replace(self, beliefs=new)
            case Delete(key):
                self._require_belief("delete", key)
                return replace(self, beliefs=tuple(b for b in self.beliefs if b.key != key))

    def belief(self, key: str) -> str | None:
        return next((b.value for b in self.beliefs if b.key == key), None)

    def _fold(self, summary: str) -> BriefState:
        if not self.current:
            raise BriefStateError("fold: no current subgoal")
        return BriefState(
            goal=self.goal,
            completed=(*self.completed, summary),
            current=self.pending[0] if self.pending else "",
            pending=self.pending[1:],
            beliefs=tuple(b for b in self.beliefs if not b.local),
        )

    def _with_plan(self, value: str) -> BriefState:
        current, *pending = _split(value, ";")
        return replace(self, current=current, pending=tuple(pending))

    def _require_plan(self, what: str) -> None:
        if not (self.current or self.pending):
            raise BriefStateError(f"{what}: there is no plan")

    def _require_belief(self, what: str, key: str) -> None:
        if self.belief(key) is None:
            raise BriefStateError(f"{what}: no such key: {key}")


def apply_ops(ops: Sequence[Op], state: BriefState) -> tuple[BriefState, tuple[str, ...]]:
    """b_{t+1} = Apply(ops, b_t): each operation in order; a failing one is skipped and its error returned."""
    errors: list[str] = []
    for op in ops:
        try:
            state = state.apply(op)
        except BriefStateError as error:
            errors.append(str(error))
    return state, tuple(errors)


# ---------------------------------------------------------------------------------------------------------------------
# Text form: few tokens, and it round-trips (parse_brief_state(render_brief_state(b)) == b).


def render_brief_state(state: BriefState) -> str:
    """One line per non-empty field. `know` holds lasting beliefs, `note` those of the current subgoal."""
    lasting = [b for b in state.beliefs if not b.local]
    local = [b for b in state.beliefs if b.local]
    fields = [
        ("goal", escape(state.goal, ";")),
        ("done", _join(state.completed, ";")),
        ("now", escape(state.current, ";")),
        ("next", _join(state.pending, ";")),
        ("know", " ; ".join(_belief(b) for b in lasting)),
        ("note", " ; ".join(_belief(b) for b in local)),
    ]
    return "\n".join(f"{name}: {value}" for name, value in fields if value or name == "goal")


def parse_brief_state(text: str) -> BriefState:
    """Inverse of `render_brief_state`.

    Raises:
        ValueError: for text that no Brief State renders to.
    """
    parts = (line.partition(": ") for line in text.split("\n"))
    lines = {name if separator else name.rstrip(":"): value for name, separator, value in parts}
    if unknown := set(lines) - {"goal", "done", "now", "next", "know", "note"}:
        raise ValueError(f"not a Brief State: unknown lines {sorted(unknown)}")
    beliefs = [_parse_belief(item, local=False) for item in _items(lines.get("know", ""))]
    beliefs += [_parse_belief(item, local=True) for item in _items(lines.get("note", ""))]
    return BriefState(
        goal=unescape(lines["goal"]),
        completed=tuple(unescape(item) for item in _items(lines.get("done", ""))),
        current=unescape(lines.get("now", "")),
        pending=tuple(unescape(item) for item in _items(lines.get("next", ""))),
        beliefs=tuple(beliefs),
    )


def one_line(text: str) -> str:
    """White space of any kind collapsed to single spaces: what every field of the language holds."""
    return " ".join(text.split())


def escape(text: str, marks: str) -> str:
    return re.sub(rf"([\\{re.escape(marks)}])", r"\\\1", text)


def unescape(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


def split_unescaped(text: str, mark: str) -> list[str]:
    """Split at every `mark` that no backslash escapes; the parts keep their escapes."""
    parts = re.findall(rf"((?:\\.|[^\\{re.escape(mark)}])*)(?:{re.escape(mark)}|$)", text)
    return parts[:-1] if parts and parts[-1] == "" and not text.endswith(mark) else parts


def _belief(belief: Belief) -> str:
    return f"{escape(belief.key, ';=')} = {escape(belief.value, ';=')}"


def _parse_belief(item: str, local: bool) -> Belief:
    key, value = split_unescaped(item, "=")[:2]
    return Belief(unescape(key.strip()), unescape(value.strip()), local)


def _join(items: Sequence[str], mark: str) -> str:
    return f" {mark} ".join(escape(item, mark) for item in items)


def _items(text: str) -> list[str]:
    return [part.strip() for part in split_unescaped(text, ";") if part.strip()]


def _split(text: str, mark: str) -> list[str]:
    return [unescape(part.strip()) for part in split_unescaped(text, mark) if part.strip()] or [""]
