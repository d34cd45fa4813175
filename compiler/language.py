"""The emission language, in which the compiler writes at every step (paper Eq. 4), in as few tokens as possible.

    > in home 17 the mug was in cabinet 2 | go to cabinet 2      the reason it applies now | guidance for the executor
    + cabinet 1: no mug                      Create a belief (key `plan`: the subgoals, `; `-separated)
    ~ cabinet 1: checked                     Update
    - cabinet 1                              Delete
    - mug: cabinet 1                         Delete an item of a list
    ^ took mug 1                             Fold the current subgoal, with a one-line summary
    .                                        nothing (NOACTION)

The reason precedes the guidance, since a small compiler copies a fact from memory most easily right after the words
that it shares with the entry. An emission has at most one guidance line, which comes first or last, and any number of
operations; where it comes last, it can follow from what the operations note. Its kind is EXPERIENCE (guidance only),
BRIEF (operations only), HYBRID (both) or NOACTION (neither). Separators inside a field (`|` in guidance and reason, `:`
in a key) are escaped by a backslash.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from enum import StrEnum

from compiler.brief_state import Create, Delete, Fold, Op, Update, escape, one_line, split_unescaped, unescape

GUIDE, CREATE, UPDATE, DELETE, FOLD, NOTHING = ">", "+", "~", "-", "^", "."


class Kind(StrEnum):
    """Kind of an emission."""

    EXPERIENCE = "EXPERIENCE"
    BRIEF = "BRIEF"
    HYBRID = "HYBRID"
    NOACTION = "NOACTION"


class ParseError(StrEnum):
    """Why a text is no emission."""

    EMPTY = "empty"
    UNKNOWN_LINE = "unknown_line"
    TWO_GUIDANCES = "two_guidances"
    GUIDANCE_BETWEEN = "guidance_between"  # neither first nor last
    EMPTY_FIELD = "empty_field"
    MISSING_VALUE = "missing_value"
    TOO_MANY_FIELDS = "too_many_fields"
    NOTHING_AND_MORE = "nothing_and_more"
    TRUNCATED = "truncated"  # set by the decoder: the token limit was reached before the end of turn


@dataclass(frozen=True, slots=True)
class Emission:
    """A parsed emission. White space in its fields is collapsed.

    Raises:
        ValueError: a reason without guidance, or an operation with an empty field.
    """

    guidance: str = ""
    reason: str = ""
    ops: tuple[Op, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "guidance", one_line(self.guidance))
        object.__setattr__(self, "reason", one_line(self.reason))
        object.__setattr__(self, "ops", tuple(_clean(op) for op in self.ops))
        if self.reason and not self.guidance:
            raise ValueError("an emission cannot hold a reason without guidance")

    @property
    def kind(self) -> Kind:
        if self.guidance:
            return Kind.HYBRID if self.ops else Kind.EXPERIENCE
        return Kind.BRIEF if self.ops else Kind.NOACTION


@dataclass(frozen=True, slots=True)
class ParseResult:
    """An emission, and the error if the text was none: the emission is NOACTION then."""

    emission: Emission
    error: ParseError | None = None


def render(emission: Emission, guidance_last: bool = False) -> str:
    """Write an emission as text, the guidance before or behind the operations."""
    ops = [_render_op(op) for op in emission.ops]
    if not emission.guidance:
        return "\n".join(ops) or NOTHING
    reason = f"{escape(emission.reason, '|')} | " if emission.reason else ""
    guidance = f"{GUIDE} {reason}{escape(emission.guidance, '|')}"
    return "\n".join([*ops, guidance] if guidance_last else [guidance, *ops])


def parse(text: str) -> ParseResult:
    """Parse any string as an emission, or as NOACTION with an error. parse(render(e)).emission == e."""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if not lines:
        return _failed(ParseError.EMPTY)
    if NOTHING in lines:
        return ParseResult(Emission()) if lines == [NOTHING] else _failed(ParseError.NOTHING_AND_MORE)
    guidance = reason = ""
    ops: list[Op] = []
    for i, line in enumerate(lines):
        sigil, body = line[0], line[1:].strip()
        if sigil == GUIDE:
            if guidance:
                return _failed(ParseError.TWO_GUIDANCES)
            if 0 < i < len(lines) - 1:
                return _failed(ParseError.GUIDANCE_BETWEEN)
            fields = [one_line(unescape(part)) for part in split_unescaped(body, "|")]
            if not 1 <= len(fields) <= 2 or not fields[-1]:
                return _failed(ParseError.EMPTY_FIELD if len(fields) <= 2 else ParseError.TOO_MANY_FIELDS)
            *reasons, guidance = fields
            reason = "".join(reasons)
            continue
        op = _parse_op(sigil, body)
        if isinstance(op, ParseError):
            return _failed(op)
        ops.append(op)
    return ParseResult(Emission(guidance, reason, tuple(ops)))


def _render_op(op: Op) -> str:
    match op:
        case Create(key, value) | Update(key, value):
            return f"{CREATE if isinstance(op, Create) else UPDATE} {escape(key, ':')}: {value}"
        case Delete(key, item):
            return f"{DELETE} {escape(key, ':')}" + (f": {item}" if item else "")
        case Fold(summary):
            return f"{FOLD} {summary}"


def _parse_op(sigil: str, body: str) -> Op | ParseError:
    if sigil not in (CREATE, UPDATE, DELETE, FOLD):
        return ParseError.UNKNOWN_LINE
    if sigil == FOLD:
        return Fold(one_line(body)) if body else ParseError.EMPTY_FIELD
    raw_key = split_unescaped(body, ":")[0]
    key, value = one_line(unescape(raw_key)), one_line(body[len(raw_key) + 1 :])  # a value may contain colons
    if not key:
        return ParseError.EMPTY_FIELD
    if sigil == DELETE:
        return Delete(key, value)
    if not value:
        return ParseError.MISSING_VALUE
    return Create(key, value) if sigil == CREATE else Update(key, value)


def _clean(op: Op) -> Op:
    fields = [one_line(field) for field in astuple(op)]
    if not all(fields[:1] if isinstance(op, Delete) else fields):
        raise ValueError(f"an operation cannot hold an empty field: {op}")
    return type(op)(*fields)


def _failed(error: ParseError) -> ParseResult:
    return ParseResult(Emission(), error)
