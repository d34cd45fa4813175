"""Chats that train an executor to read pasted memory."""

import pytest

from agent.records import Episode, StepRecord
from compiler.language import Emission
from executor.base import TokenExecutor
from executor.records import ExecutorView
from experiments.trained_executor.run import chat_ids
from lm.backbone import load_encoder
from zoo.curriculum import IGNORE

MEMORY = "in home 17: put a mug in desk\n> go to shelf 1\n> take mug 1 from shelf 1"
VIEWS = ("You see a shelf 1, and a desk 1.", "On the shelf 1, you see a mug 2.", "You pick up the mug 2.")
DONE = ("go to shelf 1", "look", "take mug 2 from shelf 1")
SAID = ("go to shelf 1", "take mug 2 from shelf 1", "take mug 2 from shelf 1")  # the second step strays


@pytest.fixture(scope="module")
def executor() -> TokenExecutor:
    return TokenExecutor(
        load_encoder("zoo/household/executor"), instructions="Play.", reads=ExecutorView(context="turns")
    )


def an_episode() -> Episode:
    steps = [
        StepRecord(t, view, None, None, "", guidance=said, action=done)
        for t, (view, said, done) in enumerate(zip(VIEWS, SAID, DONE, strict=True))
    ]
    return Episode("task", "put a mug in desk", "home 3", "train", "", "", "", 0, memory_text=MEMORY, steps=steps)


def learned(executor: TokenExecutor, chat: dict[str, list[int]]) -> str:
    """Check that labels repeat the tokens below them, and decode them."""
    kept = [(token, label) for token, label in zip(chat["input_ids"], chat["labels"], strict=True) if label != IGNORE]
    assert all(token == label for token, label in kept)
    return executor.tokenizer.decode([label for _, label in kept])


@pytest.mark.parametrize("reads", ["none", "static", "command"])
def test_the_commands_of_the_teacher_are_learned_and_strays_are_not(executor, reads):
    chat = chat_ids(executor, an_episode(), reads, [Emission(said, "so it was") for said in SAID])
    end = executor.tokenizer.decode([executor.end_id])
    assert learned(executor, chat) == f"{DONE[0]}{end}{DONE[2]}{end}"
    text = executor.tokenizer.decode(chat["input_ids"])
    assert (MEMORY in text) == (reads == "static")
    assert text.count("Do now: ") == (3 if reads == "command" else 0)
    assert all(view in text for view in VIEWS)
