"""Text of any script: words that retrieval and scores compare, and an estimate of the tokens that a model reads.

Text is folded before it is compared: compatibility forms are replaced (full-width letters, ligatures), letters lose
their case, digits of any script become 0-9, and what is optional or invisible goes: vowel points, tatweel, marks of
direction, joiners, skin tones. Where a script puts no spaces between words (or, as Korean, appends particles to them),
a word is a character with its marks, as in the multilingual scores of question answering (MLQA, KorQuAD); retrieval
takes pairs of neighbours. An emoji or a flag is a word. ASCII text is only lower-cased.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache
from itertools import chain, pairwise

from memory.stemming import stem

LONGEST = 40  # characters of a term: a longer word is several
_DATA = re.compile("(?<![!-~])([!-~]{1000})[!-~]+")  # encoded data without a space: its beginning is enough
_WORD = re.compile(f"[^\0-/:-@\\[-`{{-\x7f]{{1,{LONGEST}}}")  # of folded text, where ASCII separates words
_ACCENTS = re.compile("(?<=[a-z])[\u0300-\u036f]+")
_OPTIONAL = re.compile(  # Hebrew and Arabic points, tatweel, variation selectors, keycaps, skin tones; the dot of İ
    "[\u0591-\u05bd\u05bf\u05c1\u05c2\u05c7\u0610-\u061a\u0640\u064b-\u065f\u0670\u06d6-\u06dc\u06df-\u06e8"
    "\u06ea-\u06ed\u20e3\ufe00-\ufe0f\U0001f3fb-\U0001f3ff]|(?<=[Ii])\u0307"
)
_PICTURES = "\u231a\u231b\u23e9-\u23fa\u2600-\u27bf\u2b00-\u2bff\U0001f000-\U0001faff"
_EMOJI = re.compile(f"[\U0001f1e6-\U0001f1ff]{{2}}|[{_PICTURES}]")  # a flag is two letters
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
SPACED = f"[^\\W{_LETTERS}]"  # a pattern: a letter or digit of a script that has spaces between words

# Tokens of a text where no tokenizer is known. Measured with the tokenizers of Qwen 3, GPT-4o, Llama 3 and Gemma 3 on
# article 1 of the Declaration of Human Rights, the dialogue of tests/memory/languages.py and LoCoMo's: English has 1.1
# to 1.3 a word, another script by character what is the mean of the four.
WORD_TOKENS = 1.3
_DATA_TOKENS = 0.5  # of a character of a word longer than LONGEST: 0.4 of addresses, 0.7 of base64
_SCRIPT_TOKENS = {
    re.compile(f"[{characters}]"): tokens
    for characters, tokens in {
        "\u0370-\u058f": 0.4,  # Greek, Cyrillic, Armenian
        "\u0590-\u08ff": 0.5,  # Hebrew, Arabic
        "\u0900-\u0dff": 0.8,  # of India: 0.3 to 1.5, by tokenizer
        "\u0e00-\u0e7f": 0.5,  # Thai
        "\u0e80-\u10ff\u1200-\u1dff\u2c00-\u2dff\ua000-\uabff": 1.2,  # Lao, Burmese, Khmer, Georgian, Ethiopic, ...
        "\u1100-\u11ff\u2e80-\u9fff\uac00-\ud7ff\uf900-\ufaff\ufe30-\ufe6f\uff00-\uffef\U00020000-\U0003ffff": 0.8,
        f"{_PICTURES}\u200d\ufe0f": 1.5,
    }.items()
}


def terms(text: str) -> list[str]:
    """List the terms that full-text search compares: words without accents on Latin letters, stemmed where they are
    English; of scripts without spaces each pair of neighbours."""
    return list(chain.from_iterable(map(_terms, text.lower().split())))


@lru_cache(2**16)  # commands and goals repeat: most of a bank's text has been seen
def _terms(chunk: str) -> tuple[str, ...]:
    return tuple(map(stem, words(chunk)))


def words(text: str) -> list[str]:
    """List the terms of a text before they are stemmed."""
    plain = _DATA.sub(r"\1", text) if len(text) > 1000 else text
    if plain.isascii():
        plain = plain.lower()
    else:
        plain = folded(_ACCENTS.sub("", unicodedata.normalize("NFKD", plain.lower())), pairs=True)
    return _WORD.findall(plain)


def folded(text: str, pairs: bool = False) -> str:
    """Fold a text: beyond ASCII, one space is between words and in the place of punctuation. With `pairs`, characters
    of scripts without spaces overlap in pairs."""
    if text.isascii():
        return text.lower()
    plain = _OPTIONAL.sub("", unicodedata.normalize("NFKD", text)).casefold()
    plain = _EMOJI.sub(r" \g<0> ", unicodedata.normalize("NFC", plain).translate(_FOLDING))
    return " ".join(_UNSPACED.sub(lambda run: f" {' '.join(_units(run[0], pairs))} ", plain).split())


class _Folding(dict[int, str]):
    """What stands for a character in folded text, for `str.translate`."""

    def __missing__(self, code: int) -> str:
        self[code] = found = _character(chr(code))
        return found


def _character(character: str) -> str:
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
    """Split a run into characters with their marks, or into pairs of these."""
    units = _MARKED.findall(run)
    return [one + other for one, other in pairwise(units)] if pairs and len(units) > 1 else units


def word_tokens(text: str) -> float:
    """Estimate the tokens of a text: of its words, and of characters of other scripts than Latin."""
    tokens = 0.0
    for script, each in () if text.isascii() else _SCRIPT_TOKENS.items():
        text, found = script.subn(" ", text)
        tokens += each * found
    found = text.split()
    data = sum([len(word) for word in found if len(word) > LONGEST])
    return tokens + WORD_TOKENS * len(found) + _DATA_TOKENS * data


def shortened(text: str, most: int) -> str:
    """Keep so many words of a text, or as many tokens of another script."""
    kept, left = list[str](), WORD_TOKENS * most
    for chunk in text.split():
        tokens = word_tokens(chunk)
        kept.append(chunk if tokens <= left + 1e-9 else chunk[: int(len(chunk) * left / tokens)])
        left -= tokens
        if left < 1e-9:
            break
    return " ".join(filter(None, kept))
