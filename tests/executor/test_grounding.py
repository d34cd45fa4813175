"""From free text to a command: grounding decides, and a line that is a command goes before any reading of it."""

import pytest

from executor.records import Grounding, ground

COMMANDS = ("go to shelf 1", "open fridge 1", "look", "action: wave", "> north", "`ls`", '{"action": "look"}')


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("go to shelf 1", "go to shelf 1"),
        ("Action: go to shelf 1", "go to shelf 1"),
        ("ACTION - Open fridge 1.", "open fridge 1"),
        ("> look", "look"),
        ("- `look`", "look"),
        ("1. go to shelf 1", "go to shelf 1"),
        ("```\nlook\n```", "look"),
        ("Thought: it may be there.\nAction: open fridge 1\nObservation: It is open.\nAction: look", "open fridge 1"),
        ('{"thought": "hm", "action": "go to shelf 1"}', "go to shelf 1"),
        ('```json\n{"command": "look"}\n```', "look"),
        ("Sure! This is what I do:\n\nopen fridge 1\n", "open fridge 1"),
        ("I would `open fridge 1` now.", "open fridge 1"),
        ("**look**", "look"),
        ("<action>look</action>", "look"),
        ("Action: wave", "action: wave"),
        ("> north", "> north"),
        ("`ls`", "`ls`"),
        ('{"action": "look"}', '{"action": "look"}'),
    ],
)
def test_a_command_is_found_in_what_models_write(text, command):
    assert ground(text, COMMANDS) == (command, Grounding.EXACT)


@pytest.mark.parametrize(
    ("text", "command", "how"),
    [
        ("Action: go to the shelf 1", "go to shelf 1", Grounding.FUZZY),
        ("open the fridge 1\nlook", "open fridge 1", Grounding.FUZZY),
        ("Action: sing", "sing", Grounding.FAILED),
        ("", "", Grounding.FAILED),
    ],
)
def test_what_is_no_command_is_sent_as_it_is_meant(text, command, how):
    assert ground(text, COMMANDS) == (command, how)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("mix a with b\nmore", "mix a with b"),
        ("Thought: x\nAction: mix a with b", "mix a with b"),
        ("answer: 42", "answer: 42"),
        ('{"action": "move", "x": 1}', '{"action": "move", "x": 1}'),
        ("-5", "-5"),
        ("say 'yes'", "say 'yes'"),
    ],
)
def test_where_no_commands_are_listed_the_reading_is_sent(text, action):
    assert ground(text, None) == (action, Grounding.FREE)
