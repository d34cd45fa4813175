"""Text analysis for indexes, anchors and features: stems, names, dates and numbers."""

from __future__ import annotations

import re
import unicodedata

from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS as STOP_WORDS

from memory.stemming import stem
from memory.words import fold_text, words

NUMBERED = re.compile(r"\b([a-z]+ \d+)\b")  # an object of a text world: "mug 1"
MONTHS = "january february march april may june july august september october november december".split()
_YEAR_FIRST = re.compile(r"(?<!\d)((?:19|20)\d\d) ?[-/.年년] ?(\d\d?) ?[-/.月월] ?(\d\d?)(?!\d) ?[日일]?")
_TIME = re.compile(
    rf"\b(?:yesterday|today|tonight|tomorrow|ago|last|next|since|recently|weekend|(?:{'|'.join(MONTHS)})|"
    r"(?:mon|tues|wednes|thurs|fri|satur|sun)day|(?:week|month|year|day|morning|evening)s?|(?:19|20)\d\d)\b"
)
_NUMBER = re.compile(r"\b(?:\d+|one|two|three|four|five|six|seven|eight|nine|ten|once|twice|couple|few|several)\b")


def stems(text: str) -> list[str]:
    """List the stems of all words except stop words."""
    return [stem(word) for word in words(text) if word not in STOP_WORDS]


def terms(text: str) -> list[str]:
    """List stems, and each numbered object ("mug 1") as one more term."""
    return [*stems(text), *NUMBERED.findall(fold_text(text))]


def is_question(text: str) -> bool:
    return any(mark in text for mark in "?？؟")


def mentions_time(text: str) -> bool:
    return _TIME.search(fold_text(text)) is not None


def mentions_number(text: str) -> bool:
    return _NUMBER.search(fold_text(text)) is not None


def proper_names(text: str) -> list[str]:
    """List distinct capitalised words inside sentences, in lower case."""
    found = re.findall(r"(?<![.!?:\"'] )(?<!^)\b([^\W\d_]{2,})\b", unicodedata.normalize("NFC", text))
    return list(dict.fromkeys(word.lower() for word in found if word[0].isupper() and word[1:].islower()))


def name_key(name: str) -> str:
    """Return a name's words in the form in which questions are searched for it."""
    return name if name.isascii() else " ".join(words(name))


def folded_dates(text: str) -> str:
    """Fold a text and rewrite dates such as 2023-05-08 or 2023年5月8日 as "8 may 2023"."""
    return " ".join(_YEAR_FIRST.sub(_spell_date, fold_text(text)).split())


def _spell_date(date: re.Match[str]) -> str:
    year, month, day = date.groups()
    return f" {int(day)} {MONTHS[int(month) - 1]} {year} " if 1 <= int(month) <= 12 else date[0]
