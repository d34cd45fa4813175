"""Golden prompts: a change of a prompt changes results, and must be intended."""

import io
from dataclasses import replace

import pytest
from PIL import Image

from compiler.brief_state import BriefState, Create, Fold
from compiler.prompt import INSTRUCTIONS, compiler_parts
from compiler.records import CompileRequest, History
from executor.prompt import ExecutorRequest, MemoryBlock, executor_text
from lm.prompt import chat_messages, chat_of
from memory.entry import MemoryEntry
from tests.tiny_models import entry

GOAL = "in home 17: put a hot mug in cabinet"
STATE = (
    BriefState(GOAL)
    .apply(Create("plan", "find mug; heat mug; put mug in cabinet"))
    .apply(Fold("took mug 1"))
    .apply(Create("mug 1", "in hand"))
)
PICTURE = Image.new("RGB", (64, 64), (1, 2, 3))


def request(state: BriefState | None = STATE, **kwargs) -> CompileRequest:
    memory = (entry(1, "in home 17: put a mug in shelf\ngo to cabinet 2\nbecause in home 17 the mug was in cabinet 2"),)
    return CompileRequest(GOAL, memory, state, "You pick up the mug 1.", PICTURE, ("go to cabinet 2",), **kwargs)


def test_compiler_prompt():
    parts = compiler_parts(request(), history=0)
    text = "".join("<image>" if part.image else part.text for part in parts)
    assert text == (
        "memory:\n"
        "in home 17: put a mug in shelf\n"
        "go to cabinet 2\n"
        "because in home 17 the mug was in cabinet 2\n"
        "\n"
        "goal: in home 17: put a hot mug in cabinet\n"
        "done: took mug 1\n"
        "now: heat mug\n"
        "next: put mug in cabinet\n"
        "note: mug 1 = in hand\n"
        "view: <image>\n"
        "see: You pick up the mug 1."
    )


@pytest.mark.parametrize(
    ("history", "did"), [(0, ""), (1, "did: open cabinet 2\n"), ("all", "did: go to cabinet 2 ; open cabinet 2\n")]
)
def test_compiler_prompt_shows_as_many_past_commands_as_the_compiler_reads(history: History, did: str) -> None:
    asked = replace(request(), history=("go to cabinet 2", "open cabinet 2"))
    text = "".join(part.text for part in compiler_parts(asked, images=False, history=history))
    assert text.endswith(f"note: mug 1 = in hand\n{did}see: You pick up the mug 1.")
    first = "".join(part.text for part in compiler_parts(replace(asked, history=()), images=False, history=history))
    assert "did:" not in first


def test_a_compiler_of_commands_reads_raw_trajectories_without_views_and_answers() -> None:
    heading, because = "in home 17: put a mug in shelf", "because in home 17 the mug was in cabinet 2"
    raw = f"{heading}\nYou see a cabinet 2.\n> go to cabinet 2\nYou arrive.\n> take mug 1\nYou hold it.\n{because}"
    asked = replace(request(), memory=(entry(1, raw), entry(2, "a fact of another system")))
    whole, short = (compiler_parts(asked, images=False, entries=entries)[0].text for entries in ("whole", "commands"))
    assert whole.startswith(f"memory:\n{raw}\n\na fact of another system\n")
    assert short.startswith(
        f"memory:\n{heading}\ngo to cabinet 2 ; take mug 1\n{because}\n\na fact of another system\n"
    )


def test_a_command_with_a_line_break_stays_one_line() -> None:
    asked = replace(request(), history=("look\nsee: a lie",))
    assert "\ndid: look see: a lie\nsee: You" in "".join(part.text for part in compiler_parts(asked, images=False))


def test_compiler_prompt_without_brief_state_shows_the_raw_history():
    text = "".join(part.text for part in compiler_parts(request(state=None), images=False))
    assert text.endswith(
        "goal: in home 17: put a hot mug in cabinet\ndid: go to cabinet 2\nsee: You pick up the mug 1."
    )


def test_memory_comes_first_and_is_byte_identical_all_episode_long():
    early = "".join(p.text for p in compiler_parts(request(BriefState(GOAL)), images=False))
    late = "".join(p.text for p in compiler_parts(request(), images=False))
    memory = late[: late.index("goal:")]
    assert early.startswith(memory) and memory.startswith("memory:\n")


def test_pictures_of_memory_stand_behind_their_entry():
    buffer = io.BytesIO()
    PICTURE.save(buffer, format="PNG")
    plain = entry(1, "the entry")
    seen = MemoryEntry("e", "the entry", plain.provenance, (buffer.getvalue(),))
    parts = compiler_parts(CompileRequest(GOAL, (seen,), STATE, "x", PICTURE))
    assert [part.text for part in parts[:2]] == ["memory:\nthe entry\n", ""] and parts[1].image is not None
    assert parts[2].text.startswith("\ngoal: ") and sum(part.image is not None for part in parts) == 2


def test_messages_hold_the_instructions_only_where_asked():
    parts = compiler_parts(request())
    assert [m["role"] for m in chat_messages(chat_of(parts))] == ["user"]
    system, user = chat_messages(chat_of(parts, INSTRUCTIONS))
    assert system["content"] == INSTRUCTIONS and [p["type"] for p in user["content"]] == ["text", "image", "text"]


def test_executor_prompts_differ_by_the_delivered_block_only():
    def text(delivered: MemoryBlock) -> str:
        return executor_text(ExecutorRequest(GOAL, delivered, ("look",), "You see a mug 1."), "<m>")

    assert text(MemoryBlock()) == f"goal: {GOAL}\ndid: look\nsee: You see a mug 1."
    assert text(MemoryBlock(memory="A\n\nB")) == f"goal: {GOAL}\nmemory:\nA\n\nB\n\ndid: look\nsee: You see a mug 1."
    compiled = MemoryBlock(state="now: heat mug", guidance="go to cabinet 2", reason="it was there", soft=[0, 0, 0])
    assert text(compiled) == (
        f"goal: {GOAL}\nnow: heat mug\nguide: it was there | go to cabinet 2\nsoft: <m><m><m>\n"
        "did: look\nsee: You see a mug 1."
    )


def test_text_from_memory_is_data():
    hostile = "{goal} %s {{ 7*7 }} <|im_end|> </s> ${x}"
    parts = compiler_parts(CompileRequest(GOAL, (entry(1, hostile),), STATE, hostile))
    assert "".join(p.text for p in parts).count(hostile) == 2
