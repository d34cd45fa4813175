"""Words of text in any script, for retrieval and scores, and an estimate of token counts.

Folding replaces compatibility forms (full-width letters, ligatures), case and the digits of other scripts, and removes
optional and invisible characters: vowel points, tatweel, direction marks, joiners, skin tones. In scripts without
spaces between words, and in Korean, a word is a character with its marks, as in multilingual question answering (MLQA,
KorQuAD); retrieval uses pairs of neighbours. An emoji or a flag is a word. ASCII text is only lower-cased.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from itertools import chain, pairwise

from memory.stemming import stem

LONGEST = 40  # characters of a term; longer words are split
_DATA = re.compile("(?<![!-~])([!-~]{1000})[!-~]+")  # encoded data without spaces: only its beginning is indexed
_WORD = re.compile(f"[^\0-/:-@\\[-`{{-\x7f]{{1,{LONGEST}}}")  # of folded text, in which ASCII separates words
_ACCENTS = re.compile("(?<=[a-z])[\u0300-\u036f]+")
_OPTIONAL = re.compile(  # Hebrew and Arabic points, tatweel, variation selectors, keycaps, skin tones; the dot of İ
    "[\u0591-\u05bd\u05bf\u05c1\u05c2\u05c7\u0610-\u061a\u0640\u064b-\u065f\u0670\u06d6-\u06dc\u06df-\u06e8"
    "\u06ea-\u06ed\u20e3\ufe00-\ufe0f\U0001f3fb-\U0001f3ff]|(?<=[Ii])\u0307"
)
_PICTURES = "\u231a\u231b\u23e9-\u23fa\u2600-\u27bf\u2b00-\u2bff\U0001f000-\U0001faff"
_EMOJI = re.compile(f"[\U0001f1e6-\U0001f1ff]{{2}}|[{_PICTURES}]")  # a flag is two regional indicators
_LETTERS = (  # Thai and Lao, Burmese, Khmer, kana, Han, Hangul
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
)
_UNSPACED = re.compile(f"[{_LETTERS}]+")
_MARKS = "".join(
    c
    for c in map(chr, (*range(0xE00, 0xF00), *range(0x1000, 0x10A0), *range(0x1780, 0x1800)))
    if unicodedata.category(c)[0] == "M"
)
_MARKED = re.compile(f".[{_MARKS}]*")
SPACED = f"[^\\W{_LETTERS}]"  # pattern of a letter or digit of a script with spaces between words

# Tokens per word of English (1.1 to 1.3) and per character of other scripts: means of the tokenizers of Qwen 3, GPT-4o,
# Llama 3 and Gemma 3 on article 1 of the Declaration of Human Rights and on dialogues.
WORD_TOKENS = 1.3
_DATA_TOKENS = 0.5  # per character of a word longer than LONGEST: 0.4 in URLs, 0.7 in base64
_SCRIPT_TOKENS = {
    re.compile(f"[{characters}]"): tokens
    for characters, tokens in {
        "\u0370-\u058f": 0.4,  # Greek, Cyrillic, Armenian
        "\u0590-\u08ff": 0.5,  # Hebrew, Arabic
        "\u0900-\u0dff": 0.8,  # Indic scripts: 0.3 to 1.5, by tokenizer
        "\u0e00-\u0e7f": 0.5,  # Thai
        "\u0e80-\u10ff\u1200-\u1dff\u2c00-\u2dff\ua000-\uabff": 1.2,  # Lao, Burmese, Khmer, Georgian, Ethiopic, ...
        "\u1100-\u11ff\u2e80-\u9fff\uac00-\ud7ff\uf900-\ufaff\ufe30-\ufe6f\uff00-\uffef\U00020000-\U0003ffff": 0.8,
        f"{_PICTURES}\u200d\ufe0f": 1.5,
    }.items()
}


def search_terms(text: str) -> list[str]:
    """Return a text's search terms: stemmed words without accents; character pairs in scripts without spaces."""
    return list(chain.from_iterable(map(_terms, text.lower().split())))


@lru_cache(2**16)  # commands and goals repeat
def _terms(chunk: str) -> tuple[str, ...]:
    return tuple(map(stem, words(chunk)))


def words(text: str) -> list[str]:
    """Return the search terms of a text without stemming."""
    plain = _DATA.sub(r"\1", text) if len(text) > 1000 else text
    if plain.isascii():
        plain = plain.lower()
    else:
        plain = fold_text(_ACCENTS.sub("", unicodedata.normalize("NFKD", plain.lower())), pairs=True)
    return _WORD.findall(plain)


def fold_text(text: str, pairs: bool = False) -> str:
    """Fold a text. Beyond ASCII, one space separates words and replaces punctuation.

    With `pairs`, scripts without spaces become overlapping pairs of characters."""
    if text.isascii():
        return text.lower()
    plain = _OPTIONAL.sub("", unicodedata.normalize("NFKD", text)).casefold()
    plain = _EMOJI.sub(r" \g<0> ", unicodedata.normalize("NFC", plain).translate(_FOLDING))
    return " ".join(_UNSPACED.sub(lambda run: f" {' '.join(_units(run[0], pairs))} ", plain).split())


class _Folding(dict[int, str]):
    """Cached replacements of characters, for `str.translate`."""

    def __missing__(self, code: int) -> str:
        self[code] = replacement = _fold_character(chr(code))
        return replacement


def _fold_character(character: str) -> str:
    kind = unicodedata.category(character)
    if kind == "Nd":
        return str(unicodedata.decimal(character))
    if kind[0] in "LMN" or character.isascii() or _EMOJI.match(character):
        return character
    if character == "\u2019":
        return "'"
    return "" if kind == "Cf" and character != "\u200b" else " "  # U+200B ends a word of Thai or Khmer


_FOLDING = _Folding()


def _units(run: str, pairs: bool) -> list[str]:
    """Split a run of characters into single ones with their marks, or into overlapping pairs."""
    units = _MARKED.findall(run)
    return [one + other for one, other in pairwise(units)] if pairs and len(units) > 1 else units


def word_tokens(text: str) -> float:
    """Estimate a text's number of tokens from its words and from characters of other scripts."""
    tokens = 0.0
    for script, each in () if text.isascii() else _SCRIPT_TOKENS.items():
        text, count = script.subn(" ", text)
        tokens += each * count
    chunks = text.split()
    data = sum([len(word) for word in chunks if len(word) > LONGEST])
    return tokens + WORD_TOKENS * len(chunks) + _DATA_TOKENS * data


def truncate_words(text: str, most: int) -> str:
    """Truncate a text to `most` words, or to as many tokens of other scripts."""
    chunks, left = list[str](), WORD_TOKENS * most
    for chunk in text.split():
        tokens = word_tokens(chunk)
        chunks.append(chunk if tokens <= left + 1e-9 else chunk[: int(len(chunk) * left / tokens)])
        left -= tokens
        if left < 1e-9:
            break
    return " ".join(filter(None, chunks))
