"""Stems, names and what is said of times: what indexes, anchors and features read of a text."""

from __future__ import annotations

import re
import unicodedata

from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS as STOP_WORDS

from memory.stemming import stem
from memory.words import folded, words

NUMBERED = re.compile(r"\b([a-z]+ \d+)\b")  # a thing as text worlds name it: "mug 1"
MONTHS = "january february march april may june july august september october november december".split()
_YEAR_FIRST = re.compile(r"(?<!\d)((?:19|20)\d\d) ?[-/.年년] ?(\d\d?) ?[-/.月월] ?(\d\d?)(?!\d) ?[日일]?")
_TIME = re.compile(
    rf"\b(?:yesterday|today|tonight|tomorrow|ago|last|next|since|recently|weekend|(?:{'|'.join(MONTHS)})|"
    r"(?:mon|tues|wednes|thurs|fri|satur|sun)day|(?:week|month|year|day|morning|evening)s?|(?:19|20)\d\d)\b"
)
_NUMBER = re.compile(r"\b(?:\d+|one|two|three|four|five|six|seven|eight|nine|ten|once|twice|couple|few|several)\b")


def stems(text: str) -> list[str]:
    """List the stems of all words but stop words."""
    return [stem(word) for word in words(text) if word not in STOP_WORDS]


def terms(text: str) -> list[str]:
    """List stems, and numbered things ("mug 1") as one term each."""
    return [*stems(text), *NUMBERED.findall(folded(text))]


def is_question(text: str) -> bool:
    return any(mark in text for mark in "?？؟")


def tells_time(text: str) -> bool:
    return _TIME.search(folded(text)) is not None


def tells_number(text: str) -> bool:
    return _NUMBER.search(folded(text)) is not None


def names(text: str) -> list[str]:
    """List the words with a capital that do not begin a sentence, in lower case, each once."""
    found = re.findall(r"(?<![.!?:\"'] )(?<!^)\b([^\W\d_]{2,})\b", unicodedata.normalize("NFC", text))
    return list(dict.fromkeys(word.lower() for word in found if word[0].isupper() and word[1:].islower()))


def key_of(name: str) -> str:
    """Return the words of a name, as questions are searched for them."""
    return name if name.isascii() else " ".join(words(name))


def folded_dates(text: str) -> str:
    """Fold a text, with dates such as 2023-05-08 or 2023年5月8日 as "8 may 2023"."""
    return " ".join(_YEAR_FIRST.sub(_in_words, folded(text)).split())


def _in_words(date: re.Match[str]) -> str:
    year, month, day = date.groups()
    return f" {int(day)} {MONTHS[int(month) - 1]} {year} " if 1 <= int(month) <= 12 else date[0]
