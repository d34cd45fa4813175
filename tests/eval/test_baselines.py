"""Baselines by rule: what disclosure shows and notes, and static delivery of the best entry alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agent.deliveries import find, recorded_step
from agent.disclosure import PIECES, RuleDisclosure, disclose, words
from agent.episode import EpisodeLimits, EpisodeSpec
from agent.records import compile_request
from compiler.brief_state import Belief, BriefState, Create, Update
from compiler.language import Emission, render
from compiler.records import Compilation, CompileRequest
from envs.base import Observation, Task, Transition
from eval.metrics import results
from eval.rollouts import Evaluation
from eval.table import to_markdown
from executor.records import PAPER_VIEW, Action, Grounding
from memory.entry import MemoryEntry, Provenance
from memory.protocol import FixedSession, Recall

GOAL = "in home 3: put a mug in cabinet"


def entry(id: str, text: str) -> MemoryEntry:
    return MemoryEntry(id, text, Provenance("other", "", "", "", True))


RIGHT = entry(
    "a",
    "in home 3: put a mug in cabinet\n"
    "go to shelf 2 ; take mug 1 from shelf 2 ; go to cabinet 4 ; move mug 1 to cabinet 4\n"
    "because in home 3 the mug was in shelf 2",
)
OTHER = entry(
    "b", "in home 9: cool some apple and put it in fridge\ngo to fridge 1\nbecause in home 9 the apple was in fridge 1"
)


def request(view: str = "You see a room.", state: BriefState | None = None, **changes) -> CompileRequest:
    return CompileRequest(GOAL, (OTHER, RIGHT), state or BriefState(GOAL), view, **changes)


def test_words_keep_a_thing_s_number() -> None:
    assert words("Put a mug in Cabinet 2") == {"mug", "cabinet", "cabinet 2"}


def test_pieces_of_the_matching_entry_are_disclosed_and_no_others() -> None:
    shown = disclose(request()).guidance.split(" / ")
    assert shown[0] == "because in home 3 the mug was in shelf 2" and shown[1].startswith("go to shelf 2 ; take mug 1")
    assert len(shown) == PIECES and not any("apple" in piece for piece in shown)


def test_of_a_raw_entry_the_same_pieces_are_disclosed() -> None:
    heading, actions, why = RIGHT.text.split("\n")
    turns = [f"> {action}\nYou see a mug 1 in cabinet 4." for action in actions.split(" ; ")]
    raw = entry("a", "\n".join([heading, "You see a cabinet 4 and a shelf 2.", *turns, why]))
    given = request("You arrive at cabinet 4. The cabinet 4 is closed. A mug 1 is in your hand.")
    assert disclose(replace(given, memory=(OTHER, raw))) == disclose(given)


def test_what_is_in_view_triggers_what_it_names() -> None:
    shown = disclose(request("You arrive at cabinet 4. The cabinet 4 is closed. A mug 1 is in your hand.")).guidance
    assert "move mug 1 to cabinet 4" in shown
    assert "move mug 1 to cabinet 4" not in disclose(request()).guidance


def test_nothing_matches_nothing_is_shown() -> None:
    alone = CompileRequest(GOAL, (OTHER,), BriefState(GOAL), "You see a room.")
    [made] = RuleDisclosure().compile([alone])
    assert made.emission.guidance == "" and made.text == "."


def test_the_state_is_kept_by_rule() -> None:
    seen = request("On the desk 1, you see a mug 2.", history=("look", "go to desk 1"))
    assert disclose(seen).ops == (Create("mug 2", "in view after go to desk 1"),)
    known = BriefState(GOAL, beliefs=(Belief("mug 2", "in view after look"),))
    assert disclose(request(seen.observation, known, history=seen.history)).ops == (
        Update("mug 2", "in view after go to desk 1"),
    )
    stuck = disclose(request(history=("open safe 1", "open safe 1")))
    assert stuck.ops == (Create("repeated", "open safe 1"),)


class OneRoom:
    """Ends after one step."""

    name, in_process = "room", True

    def reset(self, task):
        return Observation("a room", None, ("look",))

    def step(self, action):
        return Transition(Observation("a room", None, ("look",)), 0.0, False, True)

    def close(self):
        pass


class Reader:
    """An executor that writes down the memory it is shown."""

    accepts_soft = sees_images = False
    reads = PAPER_VIEW

    def __init__(self):
        self.seen = []

    def act(self, requests):
        self.seen += [r.delivered.memory for r in requests]
        return [Action("look", Grounding.CHOICE, "look", (), 1, 1) for _ in requests]


def test_static_top1_shows_the_best_entry_and_static_shows_all() -> None:
    tasks = [Task(f"t{i}", "put a mug in cabinet", "home 3", "test", "") for i in range(3)]
    specs, top = ([EpisodeSpec(task, memory) for task in tasks] for memory in ((OTHER, RIGHT), (RIGHT,)))
    for name, shown in (("static", f"{OTHER.text}\n\n{RIGHT.text}"), ("static_top1", RIGHT.text), ("none", "")):
        reader = Reader()
        evaluation = Evaluation(OneRoom, specs, reader, None, EpisodeLimits(2), top_specs=top)
        episodes = evaluation.run(name, played={"t1"})
        assert reader.seen == [shown] * 2 and [e.task_id for e in episodes] == ["t0", "t2"]
        assert {e.delivery for e in episodes} == {name}


def test_compiled_no_memory_gives_the_compiler_a_state_and_no_memory() -> None:
    asked = []

    class Compiler:
        def compile(self, requests):
            asked.extend(requests)
            made = Emission("go to shelf 2", "", (Create("shelf 2", "unseen"),))
            return [Compilation(render(made), made) for _ in requests]

    task, reader = Task("t", "put a mug in cabinet", "home 3", "test", ""), Reader()
    spec = EpisodeSpec(
        task, (OTHER, RIGHT), 7, lambda: FixedSession(Recall((OTHER, RIGHT)))
    )  # a memory system gives sessions
    evaluation = Evaluation(OneRoom, [spec], reader, Compiler(), EpisodeLimits(2))
    [episode] = evaluation.run("compiled_no_memory")
    assert [(request.memory, request.state) for request in asked] == [((), BriefState(spec.goal))]
    assert (episode.memory_ids, episode.memory_text, episode.delivery) == ((), "", "compiled_no_memory")
    assert episode.steps[0].brief_after.endswith("note: shelf 2 = unseen") and episode.steps[0].guidance
    step = recorded_step(episode, 0)  # what a record shows again
    assert asked[0].soft_on == "never"  # this executor takes none
    assert compile_request(replace(step, emission=None)) == replace(asked[0], soft_on="always")
    evaluation.run("compiled")
    assert asked[-1].memory == (OTHER, RIGHT)
    meta = {"environment": "household", "split": "test", "n_tasks": 1, "seed": 0}
    made = results({"none": [episode], "compiled_no_memory": [episode], "compiled": [episode]}, meta, [])
    assert {"compiled_no_memory - none", "compiled_no_memory - compiled"} <= set(made["paired_difference"])
    assert f"| *{find('compiled_no_memory').label}* |" in to_markdown(made)  # a control


def test_names_of_deliveries() -> None:
    assert find("disclosure").create(None, 0).soft is False
    with pytest.raises(ValueError, match=r"compiler\.checkpoint"):
        find("compiled").create(None, 0)
