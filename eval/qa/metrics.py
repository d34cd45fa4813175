"""Scores of short answers: set F1 and BLEU-1 as in A-Mem's scorer, and LoCoMo's own score.

Answers are folded first (`memory.words`): in a script without spaces each character is a token, as in MLQA.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter

from memory.stemming import stem
from memory.words import fold_text

ABSTAINED = ("not mentioned", "no information available")
_COMMA = re.compile("[,，、،]")
_SMOOTHED = 0.1  # matches counted if there are none (nltk's smoothing method 1)


def tokens_of(text: str) -> list[str]:
    return re.sub(r"[.,!?]", " ", fold_text(str(text))).split()


def set_f1(answer: str, gold: str) -> float:
    """Compute the F1 score of the sets of lower-case tokens."""
    given, wanted = set(tokens_of(answer)), set(tokens_of(gold))
    return _f1(len(given & wanted), len(given), len(wanted))


def bleu_1(answer: str, gold: str) -> float:
    """Compute the BLEU score of single tokens, with the brevity penalty."""
    given, wanted = tokens_of(answer), tokens_of(gold)
    if not given:
        return 0.0
    matched = (Counter(given) & Counter(wanted)).total() or _SMOOTHED
    return min(1.0, math.exp(1 - len(wanted) / len(given))) * matched / len(given)


def locomo_score(answer: str, gold: str, category: str) -> float:
    """Compute LoCoMo's score: F1 of stems; for multi-hop the mean of each gold part's best match; for adversarial
    whether the answer abstains."""
    if category == "adversarial":
        return float(abstains(answer))
    if category == "multi-hop":
        given = _COMMA.split(str(answer))
        best = [max(_stem_f1(each, part) for each in given) for part in _COMMA.split(str(gold))]
        return sum(best) / len(best)
    return _stem_f1(answer, re.split("[;；؛]", str(gold))[0] if category == "open-domain" else gold)


def abstains(answer: str) -> bool:
    return any(phrase in answer.lower() for phrase in ABSTAINED)


def _stem_f1(answer: str, gold: str) -> float:
    given, wanted = _stems(answer), _stems(gold)
    return _f1((Counter(given) & Counter(wanted)).total(), len(given), len(wanted))


def _stems(text: str) -> list[str]:
    plain = fold_text(str(text)).translate(str.maketrans("", "", string.punctuation))
    return [stem(word) for word in re.sub(r"\b(a|an|the|and)\b", " ", plain).split()]


def _f1(matched: int, given: int, wanted: int) -> float:
    return 2 * matched / (given + wanted) if matched else 0.0
