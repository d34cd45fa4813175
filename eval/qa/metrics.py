"""Scores of short answers: set F1 and BLEU-1 as A-Mem's scorer has them, and LoCoMo's own.

Beyond ASCII answers are folded first (`memory.words`): a character of a script without spaces is a token, as in MLQA.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Sequence

from memory.stemming import stem
from memory.words import folded

ABSTAINED = ("not mentioned", "no information available")
_COMMA = re.compile("[,，、،]")
_NOUGHT = 0.1  # of nltk's smoothing method 1: matches that are counted where there are none


def tokens_of(text: str) -> list[str]:
    return re.sub(r"[.,!?]", " ", folded(str(text))).split()


def set_f1(answer: str, gold: str) -> float:
    """F1 of the sets of lower-case tokens."""
    told, wanted = set(tokens_of(answer)), set(tokens_of(gold))
    return _f1(len(told & wanted), len(told), len(wanted))


def bleu_1(answer: str, gold: str) -> float:
    """BLEU of single tokens, with the penalty for short answers."""
    told, wanted = tokens_of(answer), tokens_of(gold)
    if not told:
        return 0.0
    matched = (Counter(told) & Counter(wanted)).total() or _NOUGHT
    return min(1.0, math.exp(1 - len(wanted) / len(told))) * matched / len(told)


def locomo_score(answer: str, gold: str, category: str) -> float:
    """Score as LoCoMo's script does: F1 of stems; of a multi-hop answer, each part's best; of an adversarial one,
    whether it abstains."""
    if category == "adversarial":
        return float(abstains(answer))
    if category == "multi-hop":
        told = _COMMA.split(str(answer))
        best = [max(_stem_f1(each, part) for each in told) for part in _COMMA.split(str(gold))]
        return sum(best) / len(best)
    return _stem_f1(answer, re.split("[;；؛]", str(gold))[0] if category == "open-domain" else gold)


def abstains(answer: str) -> bool:
    return any(phrase in answer.lower() for phrase in ABSTAINED)


def _stem_f1(answer: str, gold: str) -> float:
    told, wanted = _stems(answer), _stems(gold)
    return _f1((Counter(told) & Counter(wanted)).total(), len(told), len(wanted))


def _stems(text: str) -> list[str]:
    plain = folded(str(text)).translate(str.maketrans("", "", string.punctuation))
    return [stem(word) for word in re.sub(r"\b(a|an|the|and)\b", " ", plain).split()]


def _f1(matched: int, told: int, wanted: int) -> float:
    return 2 * matched / (told + wanted) if matched else 0.0


def weighted(scores: Sequence[float], counts: Sequence[int]) -> float:
    """Average categories by their questions."""
    return sum(score * n for score, n in zip(scores, counts, strict=True)) / sum(counts)
