"""The emission language and the Brief State: round trips, totality, the four operations as the paper has them."""

import re

from hypothesis import given
from hypothesis import strategies as st

from compiler.brief_state import (
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
from compiler.language import SPACES, Emission, Kind, ParseError, grammar, parse, render

text = st.text(min_size=0, max_size=30).map(one_line)
words = text.filter(bool)
ops = st.one_of(
    st.builds(Create, words, words), st.builds(Update, words, words), st.builds(Delete, words), st.builds(Fold, words)
)
emissions = st.builds(lambda g, r, o: Emission(g, r if g else "", tuple(o)), text, text, st.lists(ops, max_size=4))
states = st.builds(
    BriefState,
    words,
    st.lists(words, max_size=3).map(tuple),
    text,
    st.lists(words, max_size=3).map(tuple),
    st.lists(st.tuples(words, words), max_size=4, unique_by=lambda kv: kv[0]).flatmap(
        lambda kvs: st.integers(0, len(kvs)).map(
            lambda n: tuple(Belief(k, v, local=i >= n) for i, (k, v) in enumerate(kvs))
        )
    ),
)


@given(emissions)
def test_parse_inverts_render(emission):
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
        "+ k: v\n> a": ParseError.GUIDANCE_NOT_FIRST,
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
    assert (b3.completed, b3.current, b3.beliefs) == (("took mug 1",), "heat mug", ())  # the subgoal's belief went too
    b4, errors = apply_ops([Fold("a"), Fold("b"), Fold("c")], b3)
    assert b4.current == "" and errors == ("fold: no current subgoal",)


def test_lasting_beliefs_survive_a_fold():
    state = BriefState("g").apply(Create("door", "locked")).apply(Create("plan", "a; b")).apply(Fold("did a"))
    assert state.belief("door") == "locked"


def test_grammar_defines_every_rule_that_it_uses():
    rules = dict(line.split(" ::= ", 1) for line in grammar().strip().split("\n"))
    for body in rules.values():
        bare = re.sub(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]', " ", body)
        assert set(re.findall(r"[a-z]+", bare)) <= set(rules)
    assert "root" in rules


@given(emissions)
def test_the_grammar_as_a_regular_expression_accepts_what_is_rendered(emission):
    assert re.fullmatch(_as_regex(), render(emission))


@given(st.from_regex(re.compile("(?:[>+~^.-] ?)?[a\\\\|:. \\n>+~^.\u3000\x0b\x85\x1f-]{0,12}"), fullmatch=True))
def test_whatever_the_grammar_accepts_is_parsed(text):
    if re.fullmatch(_as_regex(), text):
        assert parse(text).error is None


def test_no_field_of_the_grammar_holds_white_space():
    """A field of such a character alone would be empty for the parser."""
    assert set(SPACES) == {chr(i) for i in range(0x110000) if chr(i).isspace()}
    accepts = re.compile(_as_regex())
    for space in SPACES:
        assert not accepts.fullmatch(f"> {space}") and not accepts.fullmatch(f"+ a: {space}")
    for shape in ("> {}", "> {} | {}", "+ {}: {}", "~ {}: {}", "- {}", "^ {}"):
        for character in "aä中😀\x00\x7f\ud7ff\ue000\U0010ffff":
            text = shape.replace("{}", character)
            assert accepts.fullmatch(text) and parse(text).error is None, text


def _as_regex() -> str:
    """The grammar is not recursive: each rule expands into a regular expression."""
    rules = dict(line.split(" ::= ", 1) for line in grammar().strip().split("\n"))

    def expand(name: str) -> str:
        tokens = re.findall(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|[a-z]+|[()|*?]', rules[name])
        parts = []
        for token in tokens:
            if token.startswith('"'):
                parts.append(f"(?:{re.escape(token[1:-1].encode().decode('unicode_escape'))})")
            else:
                parts.append(expand(token) if token.isalpha() else token.replace("(", "(?:") if token == "(" else token)
        return f"(?:{''.join(parts)})"

    return expand("root")
