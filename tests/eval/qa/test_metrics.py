"""Scores against numbers that are worked out beside them (S3Mem's specification, sections 4 and 7)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from unicodedata import normalize

import pytest

from eval.qa.metrics import abstains, bleu_1, locomo_score, set_f1
from tests.memory.languages import LANGUAGES, Language

every_language = pytest.mark.parametrize("language", LANGUAGES.values(), ids=LANGUAGES)
COUNTS = (282, 321, 96, 841, 446)  # LoCoMo's questions: multi-hop, temporal, open-domain, single-hop, adversarial
TABLE_1 = {  # of each category, and as printed overall
    "LoCoMo": ((0.28, 0.09, 0.16, 0.62, 0.53), (0.18, 0.06, 0.15, 0.54, 0.51), (0.44, 0.39)),
    "A-Mem": ((0.33, 0.39, 0.17, 0.48, 0.36), (0.24, 0.31, 0.16, 0.43, 0.36), (0.41, 0.35)),
    "S3Mem": ((0.33, 0.46, 0.21, 0.61, 0.39), (0.23, 0.40, 0.18, 0.50, 0.36), (0.48, 0.40)),
}


def weighted(scores: Sequence[float], counts: Sequence[int]) -> float:
    """Average over categories, weighted by their questions."""
    return sum(score * n for score, n in zip(scores, counts, strict=True)) / sum(counts)


def test_a_short_date_against_the_whole_one() -> None:
    assert set_f1("7 May", "7 May 2023") == pytest.approx(0.8)
    assert bleu_1("7 May", "7 May 2023") == pytest.approx(math.exp(1 - 3 / 2)) == pytest.approx(0.6065, abs=1e-4)


def test_nothing_in_common_is_nothing_but_for_bleus_smoothing() -> None:
    assert set_f1("a", "b") == 0 and set_f1("", "b") == 0 and bleu_1("", "b") == 0
    assert bleu_1("a", "b") == pytest.approx(0.1)
    assert set_f1("May, may!", "may") == 1 and set_f1("2022", str(2022)) == 1


@pytest.mark.parametrize("method", TABLE_1)
def test_the_papers_overall_scores_come_out_of_its_categories(method: str) -> None:
    f1, bleu, printed = TABLE_1[method]
    assert weighted(f1, COUNTS) == pytest.approx(printed[0], abs=0.01)
    assert weighted(bleu, COUNTS) == pytest.approx(printed[1], abs=0.01)
    if method == "S3Mem":
        assert (round(weighted(f1, COUNTS), 3), round(weighted(bleu, COUNTS), 3)) == (0.477, 0.399)


def test_locomos_own_score_goes_by_category() -> None:
    assert locomo_score("the painting", "painted", "single-hop") == pytest.approx(1.0)  # stems, no article
    assert locomo_score("swimming, pottery", "pottery, camping", "multi-hop") == pytest.approx(0.5)
    assert locomo_score("yes", "yes; because", "open-domain") == 1.0
    assert locomo_score("That is not mentioned.", "blue", "adversarial") == 1.0
    assert locomo_score("blue", "blue", "adversarial") == 0.0
    assert abstains("No information available") and not abstains("blue")


@every_language
def test_a_right_answer_of_any_script_scores_one_and_a_wrong_one_nothing(language: Language) -> None:
    scores = (
        set_f1,
        bleu_1,
        *(partial(locomo_score, category=each) for each in ("single-hop", "multi-hop", "open-domain")),
    )
    for _, right, wrong in language.asked:
        for written in (
            right,
            f"{right}{language.stop}",
            f"“{right}”",
            f"\u200f{right}\ufeff",
            normalize("NFD", right),
        ):
            assert [score(written, right) for score in scores] == [1] * len(scores)
        assert set_f1(wrong, right) == locomo_score(wrong, right, "single-hop") == 0


@pytest.mark.parametrize(
    ("answer", "gold", "f1"),
    [
        ("２０２３年", "2023年", 1),
        ("٢٠٢٣", "2023", 1),
        ("STRASSE", "Straße", 1),
        ("ﾋﾟｱﾉ", "ピアノ", 1),
        ("مُحَمَّد", "محمد", 1),
        ("“it’s”", "it's", 1),
        ("👍🏽", "👍", 1),
        ("🇵🇱", "🇯🇵", 0),
        ("má", "mà", 0),
        ("。", "X", 0),
        ("黒い猫", "黒い犬", 2 / 3),  # by characters, as in MLQA
        ("cat — dog", "cat dog", 1),
    ],
)
def test_answers_are_folded_before_they_are_compared(answer: str, gold: str, f1: float) -> None:
    assert set_f1(answer, gold) == locomo_score(answer, gold, "single-hop") == pytest.approx(f1)


def test_commas_of_any_script_part_a_multi_hop_answer() -> None:
    for comma in "，、،":
        assert locomo_score(f"猫{comma}犬", "犬,猫", "multi-hop") == 1.0
    assert locomo_score("猫", "猫；理由", "open-domain") == 1.0
