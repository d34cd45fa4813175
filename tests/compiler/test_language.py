"""The emission language and the Brief State: round trips, totality, the four operations as the paper has them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiler.brief_state import (
    MAX_CHARACTERS,
    MAX_ITEMS,
    Belief,
    BriefState,
    Create,
    Delete,
    Fold,
    Update,
    apply_ops,
    one_line,
    parse_brief_state,
    render_brief_state,
)
from compiler.language import Emission, Kind, ParseError, parse, render

text = st.text(min_size=0, max_size=30).map(one_line)
words = text.filter(bool)
ops = st.one_of(
    st.builds(Create, words, words),
    st.builds(Update, words, words),
    st.builds(Delete, words, st.just("") | words),
    st.builds(Fold, words),
)
emissions = st.builds(lambda g, r, o: Emission(g, r if g else "", tuple(o)), text, text, st.lists(ops, max_size=4))
states = st.builds(
    BriefState,
    words,
    st.lists(words, max_size=3).map(tuple),
    text,
    st.lists(words, max_size=3).map(tuple),
    st.lists(st.builds(Belief, words, words), max_size=4, unique_by=lambda belief: belief.key).map(tuple),
)


@given(emissions)
def test_parse_inverts_render(emission):
    assert parse(render(emission, guidance_last=True)) == parse(render(emission))
    parsed = parse(render(emission))
    assert parsed.error is None
    assert parsed.emission == emission


@given(st.text(max_size=80) | st.text(alphabet=">+~-^.|:\\ ab\n", max_size=40))
def test_parser_is_total(garbage):
    parsed = parse(garbage)
    assert parsed.error is None or (parsed.emission == Emission() and parsed.error in ParseError)


@given(states)
def test_brief_state_round_trips(state):
    assert parse_brief_state(render_brief_state(state)) == state


hostile = st.lists(
    st.sampled_from(
        [
            "\n",
            "\r",
            "\x0b",
            "\x0c",
            "\x1c",
            "\x85",
            "\u2028",
            "\u2029",
            "note: door = locked",
            "goal: x",
            " = ",
            "; ",
            " - ",
            "# x",
            "\\",
            ":",
            "> a | b",
            "\n~ k: v",
        ]
    )
    | st.text(max_size=5),
    max_size=6,
).map("".join)


@given(hostile, hostile, hostile.filter(one_line), hostile)
def test_no_text_makes_lines_of_a_brief_state(goal, subgoal, key, value):
    state = BriefState(goal, (subgoal,) * bool(one_line(subgoal)), subgoal, (), (Belief(key, value), Belief("k", "v")))
    text = render_brief_state(state)
    assert parse_brief_state(text) == state
    assert len(text.splitlines()) == 2 + 2 * bool(one_line(subgoal))
    assert state.goal.split() == goal.split() and state.belief("k") == "v"


@pytest.mark.parametrize(
    "text",
    ["", "now: x", "goal: a\ngoal: b", "goal: a\nnote: x", "goal: a\nnote: a = b = c", "goal: a\nRules: b", "\n"],
)
def test_what_is_no_brief_state_is_refused(text):
    with pytest.raises(ValueError, match="not a Brief State"):
        parse_brief_state(text)


@given(states, st.lists(ops, max_size=6))
def test_apply_never_raises_and_counts_failures(state, operations):
    after, errors = apply_ops(operations, state)
    assert len(errors) <= len(operations)
    assert after.goal == state.goal
    if len(errors) == len(operations):
        assert after == state


@given(states, words, words)
def test_create_then_delete_restores(state, key, value):
    if key == "plan" or state.belief(key) is not None:
        return
    assert state.apply(Create(key, value)).apply(Delete(key)) == state


def test_one_item_of_a_list_is_deleted_and_the_list_keeps_its_position():
    state, _ = apply_ops([Create("mug", "shelf 2, shelf 1, shelf 2"), Create("desk 1", "no mug")], BriefState("g"))
    emission = parse("- mug: shelf 2").emission
    after, errors = apply_ops([*emission.ops, Delete("mug", "shelf 9"), Delete("desk", "shelf 9")], state)
    assert emission.ops == (Delete("mug", "shelf 2"),)
    assert after.beliefs == (Belief("mug", "shelf 1, shelf 2"), Belief("desk 1", "no mug"))
    assert errors == ("delete: mug does not list shelf 9", "delete: no such key: desk")
    assert after.apply(Delete("desk 1", "no mug")).belief("desk 1") is None
    planned = after.apply(Create("plan", "find mug; heat mug"))
    assert apply_ops([Delete("plan", "heat mug")], planned) == (planned, ("delete: an item of the plan",))


def test_kinds():
    assert Emission("go to cabinet 2", "it was there").kind is Kind.EXPERIENCE
    assert Emission(ops=(Fold("done"),)).kind is Kind.BRIEF
    assert Emission("go", ops=(Delete("k"),)).kind is Kind.HYBRID
    assert Emission().kind is Kind.NOACTION
    assert render(Emission()) == "."


def test_named_parse_errors():
    cases = {
        "": ParseError.EMPTY,
        "go to shelf 1": ParseError.UNKNOWN_LINE,
        "> a\n> b": ParseError.TWO_GUIDANCES,
        "+ k: v\n> a\n- k": ParseError.GUIDANCE_BETWEEN,
        ">": ParseError.EMPTY_FIELD,
        "+ key": ParseError.MISSING_VALUE,
        ".\n> a": ParseError.NOTHING_AND_MORE,
    }
    assert {raw: parse(raw).error for raw in cases} == cases


def test_operations_follow_the_paper():
    b0 = BriefState(goal="put a hot mug in cabinet")
    b1 = b0.apply(Create("plan", "find mug; heat mug; put mug in cabinet"))
    assert (b1.current, b1.pending) == ("find mug", ("heat mug", "put mug in cabinet"))
    b2, errors = apply_ops([Create("shelf 1", "no mug"), Create("shelf 1", "again"), Update("shelf 9", "x")], b1)
    assert len(errors) == 2 and b2.belief("shelf 1") == "no mug"
    b3 = b2.apply(Fold("took mug 1"))
    assert (b3.completed, b3.current, b3.beliefs) == (("took mug 1",), "heat mug", b2.beliefs)  # they last
    b4, errors = apply_ops([Fold("a"), Fold("b"), Fold("c")], b3)
    assert b4.current == "" and errors == ("fold: no current subgoal",)


@given(states, words)
def test_a_fold_leaves_every_belief_until_it_is_updated_or_deleted(state, summary):
    after, _ = apply_ops([Fold(summary)], state)
    assert after.beliefs == state.beliefs


@given(states, ops)
def test_operations_make_new_states_and_one_that_fails_changes_nothing(state, operation):
    before, text = replace(state), render_brief_state(state)
    after, errors = apply_ops([operation], state)
    assert state == before and render_brief_state(state) == text
    assert after == state if errors else after == state.apply(operation)


@pytest.mark.seconds
@given(st.lists(st.one_of(ops, st.builds(Create, words, st.just("y" * 900))), min_size=60, max_size=90))
def test_a_state_is_bounded_whatever_is_written(operations):
    state, _ = apply_ops([Create("plan", "; ".join("abc")), *operations], BriefState("g"))
    many = [Create(f"key {i}", str(i)) for i in range(2 * MAX_ITEMS)]
    for operation in [*many, *(op for i in range(MAX_ITEMS) for op in (Update("plan", f"{i}; x"), Fold(f"did {i}")))]:
        state, _ = apply_ops([operation], state)
    texts = (*state.completed, state.current, *state.pending, *(t for b in state.beliefs for t in (b.key, b.value)))
    assert max(map(len, texts)) <= MAX_CHARACTERS
    assert len(state.beliefs) == MAX_ITEMS and len(state.completed) <= MAX_ITEMS and len(state.pending) < MAX_ITEMS
    assert parse_brief_state(render_brief_state(state)) == state


def test_the_belief_that_was_written_longest_ago_makes_room():
    full, errors = apply_ops([Create(f"k{i}", "v") for i in range(MAX_ITEMS)], BriefState("g"))
    assert not errors and len(full.beliefs) == MAX_ITEMS
    after, errors = apply_ops([Update("k0", "again"), Create("new", "v")], full)
    assert not errors and len(after.beliefs) == MAX_ITEMS
    assert after.belief("k1") is None and after.belief("k0") == "again" and after.beliefs[-1] == Belief("new", "v")


def test_a_plan_or_a_text_that_is_too_long_is_an_operation_that_fails():
    state = BriefState("g")
    plan = "; ".join(f"step {i}" for i in range(MAX_ITEMS + 1))
    long = "x" * (MAX_CHARACTERS + 1)
    after, errors = apply_ops([Create("plan", plan), Create("k", long), Create(long, "v"), Create("plan", long)], state)
    assert after == state and errors == (
        "create: a plan of more than 32 subgoals",
        *("create: a text of more than 800 characters",) * 3,
    )
