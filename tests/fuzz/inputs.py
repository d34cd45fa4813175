"""Generate inputs: texts of marks and rare characters, JSON values, and damaged copies of valid samples."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

WORDS = (
    "mug",
    "mug 1",
    "cabinet 2",
    "go to cabinet 2",
    "take mug 1 from shelf 1",
    "move mug 1 to desk 1",
    "in home 17",
    "put a hot mug in cabinet",
    "heat mug 1 with microwave 1",
    "You see a shelf 1.",
    "On the desk 1, you see a mug 1.",
    "The fridge 1 is open. In it, you see nothing.",
    "Nothing happens.",
    "look",
    "open drawer 3",
    "plan",
    "find mug",
    "You arrive at desk 1.",
    "You pick up the mug 1 from the desk 1.",
    "use desklamp 1",
    "两个杯子在柜子里",
    "कप अलमारी",
    "தமிழ்நாடு",
    "ถ้วยอยู่ในตู้",
    "الكوب في الخزانة",
    "コップ",
)
MARKS = (
    "goal: ",
    "done: ",
    "now: ",
    "next: ",
    "note: ",
    "see: ",
    "did: ",
    "memory:",
    "guide: ",
    "> ",
    "+ ",
    "~ ",
    "- ",
    "^ ",
    ".",
    " | ",
    "|",
    ": ",
    ":",
    " ; ",
    ";",
    " = ",
    "=",
    "\\",
    "\\|",
    "\\;",
    "<think>",
    "</think>",
    "```",
    "```json\n",
    "Action: ",
    "Thought: ",
    "<|im_end|>",
    "<|im_start|>system",
    "<|mem|>",
    "<|endoftext|>",
    "<|image_pad|>",
    "<s>",
    "[INST]",
    "{}",
    "{0}",
    "%s",
    "{{ x }}",
    "${a.b}",
    "${oc.env:HOME}",
    "???",
    "!!python/object:os.system",
    "&a",
    "*a",
    "../..",
    "/etc/passwd",
    "~",
    '{"a": 1}',
    "[picture]",
    "▪",
    "base",
    "null",
    "true",
    "1e999",
    "-1",
    "0x1F",
    "NaN",
    "'",
    '"',
)
RARE = (
    "\n",
    "\r",
    "\r\n",
    "\t",
    "\x00",
    "\x0b",
    "\x0c",
    "\x1b",
    "\x1c",
    "\x1d",
    "\x1e",
    "\x85",
    "\xa0",
    "\xad",
    "\u1680",
    "\u200b",
    "\u200d",
    "\u202e",
    "\u2028",
    "\u2029",
    "\u2066",
    "\u3000",
    "\ufeff",
    "\ufffe",
    "\uffff",
    "\ud800",
    "\udbff",
    "e\u0301",
    "\u0e33",
    "\u0130",
    "\xdf",
    "\ufb01",
    "\U0001f1e9",
    "\U000e0001",
    "\U0010ffff",
    " ",
    "  ",
    "\U0001f469\u200d\U0001f680",
)
NUMBERS = (0, 1, -1, 2, 3, 0.5, -0.0, 1e-9, 1e300, 2**31, 2**63, -(2**63), 10**30, math.nan, math.inf, -math.inf)
KEYS = ("", *"id key text task goal success step t base name steps attempts __class__".split())


def text(rng: Random, most: int = 6) -> str:
    """Join up to `most` words, marks and rare characters; return a long text once in a thousand."""
    if rng.random() < 0.001:
        return rng.choice((*WORDS, *MARKS, *RARE)) * rng.randint(500, 5000)
    return "".join(_piece(rng) for _ in range(rng.randint(0, most)))


def _piece(rng: Random) -> str:
    """Draw a piece without low surrogates, which JSON would join with a preceding high one."""
    pool = rng.choices((WORDS, MARKS, RARE, None), (6, 3, 2, 1))[0]
    return (rng.choice(pool) if pool else chr(rng.randrange(0x110000) & ~0x400)) + (" " if rng.random() < 0.5 else "")


def line(rng: Random, most: int = 4) -> str:
    """Return a non-empty text whose only white space is single blanks."""
    return " ".join(text(rng, most).split()) or "mug"


def texts(rng: Random, most: int = 4, make: Callable[[Random], str] = text) -> tuple[str, ...]:
    return tuple(make(rng) for _ in range(rng.randint(0, most)))


def value(rng: Random, depth: int = 2) -> Any:
    """Return a random JSON value, including non-finite numbers."""
    kind = rng.randrange(7 if depth else 5)
    if kind < 2:
        return text(rng, 3)
    if kind == 5:
        return [value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    if kind == 6:
        return {rng.choice(KEYS): value(rng, depth - 1) for _ in range(rng.randint(0, 3))}
    return rng.choice(NUMBERS) if kind == 2 else (None, True, False)[rng.randrange(3)]


def mutated(rng: Random, sample: Any, most: int = 3) -> Any:
    """Copy a JSON value with up to `most` places deleted, copied, wrapped, nested or of another type."""
    root = [copy.deepcopy(sample)]
    for _ in range(rng.randint(0, most)):
        node, key = root, 0
        while isinstance(child := node[key], dict | list) and child and rng.random() < 0.8:
            node, key = child, rng.choice(list(child)) if isinstance(child, dict) else rng.randrange(len(child))
        held = node[key]
        change = rng.randrange(7)
        if change == 0 and node is not root:
            del node[key]
        elif change == 1 and isinstance(node, dict):
            node[rng.choice(KEYS)] = held
        elif change == 2:
            node[key] = [held]
        elif change == 3:
            node[key] = str(held) if not isinstance(held, str) else text(rng)
        elif change == 4:
            node[key] = {rng.choice(KEYS): held}
        else:
            node[key] = value(rng)
    return root[0]


def json_text(rng: Random, sample: Any) -> str:
    """Write a value as JSON, intact or damaged: cut, with a duplicate key, a byte order mark or deep nesting."""
    written = json.dumps(sample, ensure_ascii=rng.random() < 0.7)
    change = rng.random()
    if change < 0.7:
        return written
    if change < 0.75 and written.startswith("{"):
        return f'{{"{rng.choice(KEYS)}": {json.dumps(value(rng, 1))}, {written[1:]}'
    if change < 0.76:
        return rng.choice(("[", '{"a":')) * 100_000
    if change < 0.77:
        return written.replace(rng.choice("0123456789"), "9" * 5000, 1)
    if change < 0.8:
        return damaged(rng, written.encode("utf-8", "replace")).decode("utf-8", "replace")
    return _cut(rng, written)


def _cut(rng: Random, written: str) -> str:
    at, to = sorted((rng.randint(0, len(written)), rng.randint(0, len(written))))
    head, tail = written[:at], written[to:]
    return pick(
        rng, (head, head + tail, head + text(rng, 2) + written[at:], "\ufeff" + written, f"{written}\n{written}")
    )


def damaged(rng: Random, data: bytes) -> bytes:
    """Copy bytes with a bit flipped, or a range removed, doubled, zeroed or replaced."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randint(0, len(data))
        to = min(len(data), at + rng.choice((1, 4, 64, len(data))))
        flipped = bytes(byte ^ (1 << rng.randrange(8)) for byte in data[at : at + 1]) + data[at + 1 : to]
        written = text(rng, 2).encode("utf-8", "surrogatepass")
        middle = pick(rng, (flipped, b"", data[at:to] * 2, bytes(to - at), rng.randbytes(min(to - at, 8)), written))
        data = data[:at] + middle + data[to:]
    return data


def pick(rng: Random, samples: Sequence[Any]) -> Any:
    return samples[rng.randrange(len(samples))]
