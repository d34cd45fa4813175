"""Words, stems and what is said of times: what indexes, anchors and features read of a text."""

from __future__ import annotations

import re

from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS as STOP_WORDS

from memory.stemming import stem

NUMBERED = re.compile(r"\b([a-z]+ \d+)\b")  # a thing as text worlds name it: "mug 1"
MONTHS = "january february march april may june july august september october november december".split()
_WORD = re.compile(r"[a-z0-9]+")
_TIME = re.compile(
    rf"\b(?:yesterday|today|tonight|tomorrow|ago|last|next|since|recently|weekend|(?:{'|'.join(MONTHS)})|"
    r"(?:mon|tues|wednes|thurs|fri|satur|sun)day|(?:week|month|year|day|morning|evening)s?|(?:19|20)\d\d)\b"
)
_NUMBER = re.compile(r"\b(?:\d+|one|two|three|four|five|six|seven|eight|nine|ten|once|twice|couple|few|several)\b")


def words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def stems(text: str) -> list[str]:
    """List the stems of all words but stop words."""
    return [stem(word) for word in words(text) if word not in STOP_WORDS]


def terms(text: str) -> list[str]:
    """List stems, and numbered things ("mug 1") as one term each."""
    return [*stems(text), *NUMBERED.findall(text.lower())]


def tells_time(text: str) -> bool:
    return _TIME.search(text.lower()) is not None


def tells_number(text: str) -> bool:
    return _NUMBER.search(text.lower()) is not None


def names(text: str) -> list[str]:
    """List the words with a capital that do not begin a sentence, in lower case, each once."""
    found = re.findall(r"(?<![.!?:\"'] )(?<!^)\b([A-Z][a-z]+)\b", text)
    return list(dict.fromkeys(word.lower() for word in found))
