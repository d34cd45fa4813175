"""The endpoint teacher: what it reads, what its answers become, and what happens to bad ones."""

import pytest
from PIL import Image

from agent.records import Episode, StepRecord
from compiler.brief_state import BriefState, Create
from compiler.language import Emission, Kind, ParseError, render
from compiler.records import Compilation, CompileRequest
from data_gen.collect import valid_rows
from data_gen.endpoint_teacher import COMPILE, RETRY, EndpointTeacher, read_emission
from lm.answer_cache import Answer
from lm.endpoint import Endpoint, EndpointFailure
from runtime.errors import StopReason
from tests.faulty_server import FaultyServer
from tests.tiny_models import entry

STATE = BriefState("in home 1: put a mug in cabinet").apply(Create("plan", "find mug; put mug in cabinet"))
MEMORY = (entry(1, "in home 1: put a mug in shelf\ntake mug 1 from cabinet 2"),)


def request(**settings) -> CompileRequest:
    facts = {"state": STATE, "observation": "You see a cabinet 1.", "history": ("look", "go to cabinet 1")}
    return CompileRequest(STATE.goal, MEMORY, **(facts | settings))


def teacher(server, **settings) -> EndpointTeacher:
    return EndpointTeacher(Endpoint(server.config(**settings)), attempts=3, max_new_tokens=64)


def test_it_reads_what_the_compiler_reads_and_no_more():
    with FaultyServer(answer=lambda messages: "> it was there | go to cabinet 2\n^ looked") as server:
        [made] = teacher(server).compile([request()])
        [_, user] = server.bodies[0]["messages"]
    assert "EXPERIENCE" not in user["content"] and "in home 1: put a mug in shelf" in user["content"]
    assert "now: find mug" in user["content"] and "see: You see a cabinet 1." in user["content"]
    assert user["content"].endswith("\ndid: go to cabinet 1\nsee: You see a cabinet 1.")
    assert made.emission.guidance == "go to cabinet 2" and made.emission.kind == Kind.HYBRID
    assert made.text == render(made.emission) and made.request is not None and made.tokens_in == 100


def test_a_picture_goes_along_where_the_settings_say_so():
    picture = Image.new("RGB", (8, 8))
    with FaultyServer() as server:
        for images, kind in ((True, list), (False, str)):
            messages = teacher(server, images=images).messages(request(image=picture))
            assert isinstance(messages[1]["content"], kind)


def test_a_bad_answer_is_asked_for_again_with_the_reason():
    bad = {1: "Sure, here it is: go on!", 3: "+ plan: again", 5: "^ found it"}
    with FaultyServer(["hang"], answer=lambda messages: bad[len(messages) - 1]) as server:
        it = teacher(server, timeout_s=0.5)
        [made] = it.compile([request()])
        last = server.bodies[-1]["messages"]
    assert made.text == "^ found it" and made.parse_error is None and made.tokens_in == 300
    assert [m["content"] for m in last if m["role"] == "assistant"] == [bad[1], bad[3]]
    assert "unknown line" in last[3]["content"] and "there is a plan already" in last[5]["content"]
    roles = it.endpoint.account()["roles"]
    assert (roles[COMPILE]["answers"], roles[COMPILE]["requests"], roles[RETRY]["answers"]) == (1, 2, 2)


def test_an_emission_that_stays_malformed_is_a_recorded_noaction():
    """The same answer twice ends the attempts: a third would be paid for, too."""
    with FaultyServer(["garbage"] * 3) as server:
        [made] = teacher(server).compile([request()])
        assert server.requests == 2
    assert made.parse_error == ParseError.UNKNOWN_LINE and made.emission == Emission() and "{0} %s" in made.text


def test_a_failure_stands_in_the_place_of_one_compilation():
    with FaultyServer(["400"], lambda messages: ".") as server:
        bad, good = teacher(server, concurrency=1).compile([request(), request(observation="a shelf")])
    assert isinstance(bad, EndpointFailure) and isinstance(good, Compilation) and good.text == "."


@pytest.mark.parametrize(
    ("text", "truncated", "error"),
    [
        ("```\n.\n```", False, None),
        ("```text\n^ did it\n```", False, None),
        ("^ did it", True, ParseError.TRUNCATED),
        ("Here it is:\n```\n> a | b\n+ c: d\n```", False, None),
        ("Action: > a | b", False, None),
        ("Thought: hm.\nEmission:\n^ did it", False, None),
        ("> Action: go | look", False, None),
        ("```\n> a", True, ParseError.TRUNCATED),
        ("Action: look", False, ParseError.UNKNOWN_LINE),
        ("", False, ParseError.EMPTY),
        ("> a | b | c", False, ParseError.TOO_MANY_FIELDS),
    ],
)
def test_reading_an_answer(text, truncated, error):
    assert read_emission(Answer(text, 1, 1, truncated)).error == error


def test_reasoning_reaches_neither_emissions_nor_rationales():
    with FaultyServer(answer=lambda messages: "<think>\n> no | never\nnot mentioned</think>\n^ did it") as server:
        [made] = teacher(server).compile([request()])
        assert (made.text, made.parse_error, server.requests) == ("^ did it", None, 1)
        assert teacher(server).rationales([episode()]) == ["^ did it"]


def episode(success: bool = True) -> Episode:
    made = Episode("t1", "put a mug in cabinet", "home 1", "train", "", "", "teacher", 0, success=success)
    made.stop_reason = StopReason.SUCCESS if success else StopReason.STEP_LIMIT
    for t in range(4):
        step = StepRecord(t, f"observation {t}", None, None, "goal: g", emission_text=".", emission_kind="NOACTION")
        step.action, step.executor_text, step.grounding, step.feedback = f"do {t}", f"Do {t}!", "exact", f"did\n{t}"
        step.compilation = Compilation(".", Emission(), request=request())
        made.steps.append(step)
    return made


def test_a_rationale_is_what_follows_its_thought():
    with FaultyServer(answer=lambda messages: "Thought: hm.\nAction: the mug was there") as server:
        assert teacher(server).rationales([episode()]) == ["the mug was there"]


def test_rationales():
    with FaultyServer(["400"], lambda messages: "the mug\nwas there") as server:
        it = teacher(server, concurrency=1)
        assert it.rationales([episode(), episode(False)]) == ["success", "the mug was there"]
        told = server.bodies[1]["messages"][1]["content"]
    assert "do 1 -> did 1\n" in told and told.endswith("It failed (step_limit).")


def test_rows_leave_out_what_is_not_sound():
    made = episode()
    made.steps[0].parse_error, made.steps[1].op_errors, made.steps[2].grounding = "empty", ("no such key",), "failed"
    assert [(row.t, row.action) for row in valid_rows(made, MEMORY, own_label=False)] == [(2, "Do 2!"), (3, "Do 3!")]
    assert [(row.t, row.action) for row in valid_rows(made, MEMORY, own_label=True)] == [(3, "do 3")]
