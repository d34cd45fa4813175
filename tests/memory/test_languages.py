"""Every memory system on the same small dialogue in many languages: what answers a question is recalled, and budgets
hold as much of it as in English."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from agent.disclosure import disclose, words
from compiler.brief_state import BriefState
from compiler.records import CompileRequest
from envs.base import Task
from eval.qa.retrievers import open_retriever
from memory.brainmem.semantic import Experience, agreeing_texts
from memory.entry import MemoryEntry, Provenance
from memory.karma.recall import distances
from memory.karma.units import goal_words
from memory.replies import line
from memory.retrieval import query_words
from memory.s3mem.anchors import Vocabulary, matches_date, parse_question
from memory.s3mem.rule_writer import write_units
from memory.s3mem.text import proper_names
from memory.trajectory import goal_without_scene
from memory.words import search_terms, truncate_words, word_tokens
from tests.memory.languages import ANSWERS, LANGUAGES

every_language = pytest.mark.parametrize("language", LANGUAGES.values(), ids=LANGUAGES)


@pytest.mark.parametrize("memory", ["s3mem", "trajectory", "hybrid", "characters"])
@every_language
def test_what_answers_a_question_is_recalled_within_a_third_of_the_dialogue(language, memory, tmp_path: Path) -> None:
    case = language.case()
    most = sum(unit.cost() for unit in write_units(case.histories[0])) / 3
    ask = open_retriever(memory, case, {}, tmp_path)
    packs = [ask(question, round(most)) for question in case.questions]
    assert all(pack.tokens <= most for pack in packs)
    assert [pack.recall(q.evidence) for pack, q in zip(packs, case.questions, strict=True)] == [1, 1, 1, 1]


@every_language
def test_a_budget_holds_the_same_share_of_the_records(language, tmp_path: Path) -> None:
    case = language.case()
    most = sum(unit.cost() for unit in write_units(case.histories[0])) / 2
    pack = open_retriever("s3mem", case, {"fill": True}, tmp_path)(case.questions[0], round(most))
    assert 4 <= len(pack.texts) <= 7


@every_language
def test_karma_finds_what_an_instruction_is_about(language) -> None:
    turns = [language.turns[at] for at in ANSWERS]
    for place, (question, _, _) in enumerate(language.asked):
        assert np.argmin(distances(question, turns)) == place
    assert goal_words(language.turns[0]) & goal_words(f"{language.turns[0]} 2")


@every_language
def test_brainmem_knows_who_says_the_same(language) -> None:
    experiences = [
        Experience(f"e{t}", f"t{t}", "", "", frozenset(), True, learning_insights=(text,))
        for t, text in enumerate(language.turns)
    ]
    for text in language.turns:
        assert agreeing_texts(experiences, f"{text.rstrip('.。।؟?？')}!") == [text]


@every_language
def test_rules_disclose_what_shares_words_with_the_goal(language) -> None:
    goal = language.turns[-1]
    about = lambda *lines: (MemoryEntry("m", "\n".join(lines), Provenance("other", "", "", "", True)),)
    shown = disclose(CompileRequest(goal, about(goal, *language.turns), BriefState(goal), "")).guidance
    assert shown.split(" / ")[0] == goal
    assert disclose(CompileRequest(goal, about("x y", *language.turns), BriefState(goal), "")).guidance == ""


def test_a_thing_of_any_script_keeps_its_number() -> None:
    assert {"杯子", "杯子 2"} <= words("把杯子2放进柜子") and {"кружка", "кружка 2"} <= words("Кружка 2")


@pytest.mark.parametrize("name", ["林", "王小明", "アレクサンドラ", "Zoë", "Иван Петров", "மாலா"])
def test_an_anchor_names_speakers_of_any_script(name: str) -> None:
    known = Vocabulary(actors=[name.lower(), "someone"])
    assert parse_question(f"{name}? 12", known).sources == (name.lower(),)
    assert parse_question(f"昨天{name}说什么？" if not name[0].isupper() else f"«{name}»", known).sources == (
        name.lower(),
    )


@pytest.mark.parametrize(
    "day", ["8 May 2023", "2023-05-08", "2023年5月8日", "２０２３年５月８日", "2023. 5. 8", "2023/5/8"]
)
def test_dates_of_any_form_meet(day: str) -> None:
    assert parse_question(f"在{day}发生了什么" if "年" in day else f"What of {day}?", Vocabulary()).dates == (
        "8 may 2023",
    )
    assert matches_date(f"1:56 pm on {day}", ["8 may 2023"]) and not matches_date(day, ["8 june 2023"])


def test_names_begin_with_a_capital_of_any_alphabet() -> None:
    assert proper_names("Then Élodie met Иван, NASA and Jose\u0301 in Paris. Then 小明 left.") == [
        "élodie",
        "иван",
        "josé",
        "paris",
    ]


def test_a_goal_without_spaces_is_searched_without_its_scene() -> None:
    assert goal_without_scene("在厨房1找杯子", "厨房1") == "在 找杯子"
    assert goal_without_scene("在厨房17找杯子", "厨房1") == "在厨房17找杯子"
    goal = "home 1: not home 17 or my-home 1, but home 1"
    assert goal_without_scene(goal, "home 1") == " : not home 17 or my- , but  "
    assert goal_without_scene("ahome 1 home 1home 1", "home 1") == "ahome 1 home 1home 1"
    assert query_words(Task("t", "在厨房1找杯子", "厨房1", "", "")) == ["在", "找杯", "杯子"]
    assert query_words(Task("t", "put Mug-1 in café", "", "", "")) == ["put", "mug-1", "in", "cafe"]


@pytest.mark.parametrize(
    ("said", "kept"),
    [("1. 拿杯子", "拿杯子"), ("2、拿杯子", "拿杯子"), ("3个杯子", "3个杯子"), ("* 10 mugs", "10 mugs")],
)
def test_a_line_of_a_model_loses_its_mark_and_no_number(said: str, kept: str) -> None:
    assert line(said) == kept


@every_language
def test_a_long_answer_of_the_world_is_cut_alike(language) -> None:
    text = " ".join(language.turns * 9)
    cut = truncate_words(text, 16)
    assert text.startswith(cut) and 0.6 <= word_tokens(cut) / word_tokens("word " * 16) <= 1.1
    assert truncate_words(language.turns[-1], 99) == " ".join(language.turns[-1].split())


def test_encoded_data_costs_what_it_is_and_has_few_terms() -> None:
    data = "data:image/png;base64," + "iVBORw0KGgoAAAANSUhEUgAA" * 5000
    assert word_tokens(data) > 50_000 and len(search_terms(data)) < 50 and len(search_terms(f"图{data}图 杯子")) < 60
    assert word_tokens("a photo of a cat") == pytest.approx(1.3 * 5)
