"""Porter's stemmer (1980)."""

from __future__ import annotations

import re
from functools import lru_cache

_STEP_2 = (
    "ational:ate tional:tion enci:ence anci:ance izer:ize abli:able alli:al entli:ent eli:e ousli:ous ization:ize "
    "ation:ate ator:ate alism:al iveness:ive fulness:ful ousness:ous aliti:al iviti:ive biliti:ble"
)
_STEP_3 = "icate:ic ative: alize:al iciti:ic ical:ic ful: ness:"
_STEP_4 = "al ance ence er ic able ible ant ement ment ent ion ou ism ate iti ous ive ize"


def _longest_first(rules: str) -> list[tuple[str, str]]:
    parted = (rule.partition(":") for rule in rules.split())
    return sorted(((suffix, other) for suffix, _, other in parted), key=lambda pair: -len(pair[0]))


_SUFFIXES = (_longest_first(_STEP_2), _longest_first(_STEP_3))
_ENDINGS = [suffix for suffix, _ in _longest_first(_STEP_4)]


@lru_cache(2**16)
def stem(word: str) -> str:
    """Return the stem of a lower-case word."""
    if len(word) <= 2:
        return word
    word = _step_1(word)
    for rules in _SUFFIXES:
        word = _replace_suffix(word, rules)
    word = _step_4(word)
    if word.endswith("e"):
        rest = word[:-1]
        word = rest if _measure(rest) > 1 or (_measure(rest) == 1 and not _short(rest)) else word
    return word[:-1] if word.endswith("ll") and _measure(word) > 1 else word


def _step_1(word: str) -> str:
    """Remove plural endings, -ed and -ing; turn a final y into i."""
    if word.endswith(("sses", "ies")):
        word = word[:-2]
    elif word.endswith("s") and not word.endswith("ss"):
        word = word[:-1]
    if word.endswith("eed"):
        word = word[:-1] if _measure(word[:-3]) else word
    else:
        bare = next((word[: -len(end)] for end in ("ed", "ing") if word.endswith(end)), "")
        word = _restore_ending(bare) if "v" in _form(bare) else word
    return f"{word[:-1]}i" if word.endswith("y") and "v" in _form(word[:-1]) else word


def _restore_ending(word: str) -> str:
    """Restore the final e, or undo a doubled consonant, after removing -ed or -ing."""
    if word.endswith(("at", "bl", "iz")):
        return f"{word}e"
    if len(word) > 1 and word[-1] == word[-2] and _form(word)[-1] == "c":
        return word if word[-1] in "lsz" else word[:-1]
    return f"{word}e" if _measure(word) == 1 and _short(word) else word


def _replace_suffix(word: str, rules: list[tuple[str, str]]) -> str:
    for suffix, other in rules:
        if word.endswith(suffix):
            rest = word[: -len(suffix)]
            return rest + other if _measure(rest) else word
    return word


def _step_4(word: str) -> str:
    for suffix in _ENDINGS:
        if word.endswith(suffix):
            rest = word[: -len(suffix)]
            return rest if _measure(rest) > 1 and (suffix != "ion" or rest.endswith(("s", "t"))) else word
    return word


@lru_cache(2**16)
def _form(word: str) -> str:
    """Return the word with c for each consonant and v for each vowel."""
    form = ""
    for letter in word:
        form += "v" if letter in "aeiou" or (letter == "y" and form.endswith("c")) else "c"
    return form


def _measure(word: str) -> int:
    return len(re.findall("v+c+", _form(word)))


def _short(word: str) -> bool:
    """Return whether the word ends consonant, vowel, consonant other than w, x, y."""
    return _form(word).endswith("cvc") and word[-1] not in "wxy"
