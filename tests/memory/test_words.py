"""Terms of texts in any script, and BM25 over them: grown or made at once, and beside LanceDB's full-text search."""

from __future__ import annotations

import lancedb
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lancedb.index import FTS
from lancedb.query import MatchQuery

from memory.bm25 import BM25
from memory.words import search_terms


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Put 2 hot mugs in shelf_1, please!", "put 2 hot mug in shelf 1 pleas"),
        ("the mug's café, cafe\u0301 and CAFÉ", "the mug s cafe cafe and cafe"),
        ("положи кружку; поставь ее", "положи кружку поставь ее"),  # whole words, й and ё as they are
        ("पानी का गिलास", "पानी का गिलास"),  # whose vowel signs are marks, not letters
        ("把杯子放进柜子", "把杯 杯子 子放 放进 进柜 柜子"),
        ("がmug杯2", "が mug 杯 2"),
        (f"{'x' * 40} -- \0", "x" * 40),
        (f"{'x' * 41} {'ß' * 21}", f"{'x' * 40} x {'s' * 40} ss"),  # LONGEST counts characters, folded
        ("கணினிவிஞ்ஞானிகளுக்காக", "கணினிவிஞ்ஞானிகளுக்காக"),  # 62 bytes
        ("Donaudampfschifffahrtsgesellschaftskapitän", "donaudampfschifffahrtsgesellschaftskapit an"),
        ("แมวดำกินปลา ๒๐๒๓", "แม มว วดํ ดํา ากิ กิน นป ปล ลา 2023"),  # marks stay with their letter
        ("고양이는", "고양 양이 이는"),  # particles follow without a space
        ("\u1112\u1161\u11ab\u1100\u116e\u11a8 한국", "한국 한국"),  # decomposed
        ("ＦＵＬＬ ｗｉｄｔｈ １２３ ｶﾀｶﾅ ガ", "full width 123 カタ タカ カナ ガ"),
        ("STRASSE Straße İzmir", "strass strass izmir"),
        ("مُحَمَّد مـحـمد أحمد ٢٠٢٣", "محمد محمد احمد 2023"),  # vowel points, tatweel, hamza, digits
        ("שָׁלוֹם \u200fשלום\u200e، ok", "שלום שלום ok"),  # marks of direction, Arabic comma
        ("می\u200cخواهم ភាសា\u200bខ្មែរ", "میخواهم ភាសា ខ្មែ មែរ"),  # a joiner, a space of no width
        ("👍🏽👍 👨‍👩‍👧 ❤️❤ 🇯🇵🇨🇳 1️⃣", "👍 👍 👨 👩 👧 ❤ ❤ 🇯🇵 🇨🇳 1"),
        ("「猫」と、犬。", "猫 と 犬"),
        ("", ""),
    ],
)
def test_terms_are_words_of_any_script(text: str, expected: str) -> None:
    assert search_terms(text) == expected.split()


@given(st.text())
def test_any_text_has_terms_and_case_does_not_matter(text: str) -> None:
    assert all(term and not term.isspace() for term in search_terms(text))
    assert search_terms(f"{text} mug") == [*search_terms(text), "mug"]


@given(st.lists(st.lists(st.sampled_from("abcde"))), st.integers(0, 9))
def test_documents_added_later_score_as_if_they_had_been_there(documents: list[list[str]], first: int) -> None:
    whole, grown = BM25(documents), BM25(documents[:first])
    assert len(grown("ab")) == len(documents[:first])
    grown.add(documents[first:])
    for question in ("a", "edcba", "x", ""):
        assert np.array_equal(whole(question), grown(question))
        assert np.array_equal(whole.covered(question), grown.covered(question))


def test_words_score_as_in_lancedbs_full_text_search() -> None:
    """By which banks ranked before, with ICU's words, Snowball's English stems and its own BM25."""
    texts = [
        f"in home {i % 7}: {verb} {some} {thing} and put it in the fridge\ngo to shelf_{i} ; take {thing} 1 from it"
        for i, (verb, some, thing) in enumerate(
            (verb, some, thing)
            for verb in ("cool", "clean", "heated", "examining", "put")
            for some in ("some", "two", "a")
            for thing in ("mugs", "glassbottle", "dishes", "café", "кружка", "पानी", "knives", "cd's")
        )
    ]
    table = lancedb.connect("memory://").create_table("t", [{"row": i, "words": text} for i, text in enumerate(texts)])
    table.create_index("words", config=FTS(base_tokenizer="icu/split", remove_stop_words=False))
    ours = BM25(map(search_terms, texts))
    for word in sorted(
        {word for text in texts for word in text.split()} | {"mug", "dish", "cafe", "knife", "s", "zzz"}
    ):
        found = table.search(MatchQuery(word, "words"), query_type="fts").limit(999).to_list()
        theirs = np.zeros(len(texts))
        for row in found:
            theirs[row["row"]] = row["_score"]
        np.testing.assert_allclose(
            ours(search_terms(word)), theirs, rtol=1e-5, atol=1e-6, err_msg=word
        )  # theirs: float32
