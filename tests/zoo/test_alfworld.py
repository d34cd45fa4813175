"""The small models of real ALFWorld: tokens, lessons, the script that teaches the executor, gates, and the recipes."""

from __future__ import annotations

import hashlib
import json
import random
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from agent.expert import Search
from agent.records import read_episodes
from compiler import checkpoint
from compiler.brief_state import BriefState, Create
from compiler.language import Emission
from compiler.records import CompileRequest
from envs.alfworld.export import export_split
from envs.household.environment import HouseholdEnvironment
from envs.household.observation_parser import parse_room
from eval.runs import EPISODES
from executor.prompt import DEFAULT_HISTORY, ExecutorRequest, MemoryBlock
from lm.attention import SHARED
from lm.backbone import load_backbone
from memory.entry import MemoryEntry, Provenance
from tests.commands.running import memcompiler
from zoo.alfworld import gate, lessons, play, recipes
from zoo.alfworld.play import ChoiceSource
from zoo.alfworld.words import LEXICON, SCENES
from zoo.curriculum import ANSWER, IGNORE, REFUSED, ROOM, Vocabulary, ways
from zoo.gates import GateResult
from zoo.models import make_tokenizer

TOKENIZER = make_tokenizer(LEXICON)
PLACES = ("cabinet 1", "cabinet 2", "fridge 1", "shelf 1")


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("text", [" FloorPlan301", "FloorPlan5", " drawer 27", "shelf 5", ", and a", " was in"])
def test_scenes_places_and_phrases_are_one_token(text):
    assert len(ids(text)) == 1


def test_a_thing_has_the_same_token_with_its_number_and_without():
    assert ids(" statue 5") == [*ids(" statue"), *ids(" 5")] and len(ids(" statue 5")) == 2
    assert ids(" take vase 3 from shelf 12")[1] == ids(" vase")[0]


@pytest.mark.parametrize(
    "text", ["FloorPlan3010 on", "ago to", ", apple", "You arrive at cabinet 99.", "{} %s é", "to therapy", "no\nsee:x"]
)
def test_any_text_comes_back(text):
    assert TOKENIZER.decode(ids(text)) == text


def test_a_step_of_a_search_takes_few_tokens():
    view = "You open the cabinet 17. The cabinet 17 is open. In it, you see a plate 2."
    assert len(ids(view)) == 12


def test_ways_are_proposed_by_memory_or_the_first_view_and_refused_where_one_has_been():
    vocabulary = Vocabulary.of(TOKENIZER, LEXICON)
    batch = ways(vocabulary, TOKENIZER, random.Random(2), 64)
    proposed, refused = {"told": 0, "next": 0}, [0, 0]
    for i, (row, labels) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
        text = TOKENIZER.decode(row).replace("<|endoftext|>", "")
        prompt, answer = text.split(ANSWER)
        view, _, rest = prompt.removeprefix("<|im_start|>user\nfirst: ").partition("\n")
        been, memory = re.findall(r"(?<=go to )\w+ \d+(?= ;|\n)", rest.rpartition("did:")[2]), rest.partition("did:")[0]
        place = answer.removeprefix("go to ").removesuffix(REFUSED).removesuffix("<|im_end|>")
        assert answer.endswith(REFUSED if "did:" in rest and place in been else "<|im_end|>")
        refused[i % 2] += answer.endswith(REFUSED)
        asked = TOKENIZER.decode(labels[labels != IGNORE])
        assert f"go to{asked}" == answer if i % 2 == 0 else answer.endswith(asked) and place not in asked
        if i % 2 == 0:
            scene, thing = re.search(r"\ngoal: in (\w+): .*? (?:a|some)(?: hot| cool| clean)? (\w+) ", rest).groups()
            told = f"because in {scene} the {thing} was in {place}\n" in memory
            places, here = parse_room(view), re.search(r"You arrive at (\w+ \d+)", rest)[1]
            following = places[(places.index(here) + 1) % len(places)] if here in places else places[0]
            assert told or place == following
            proposed["told" if told else "next"] += 1
    assert 16 < proposed["told"] < 40 and 2 < refused[0] < 30 and refused[1] > 40


def test_batches_are_drawn_from_several_parts_in_their_shares():
    draw = recipes.mix((0.25, lambda rng: {"a": rng.random()}), (0.75, lambda rng: {"b": rng.random()}))
    drawn = [next(iter(draw(random.Random(seed)))) for seed in range(400)]
    assert 70 < drawn.count("a") < 130


# -- the script -------------------------------------------------------------------------------------------------------


def request(
    observation: str = "x",
    history: tuple[str, ...] = (),
    plan: tuple[str, ...] = (),
    first: str = "",
    opens: bool = False,
    **given,
) -> tuple[ExecutorRequest, list[str]]:
    """A request, and the expert's plan beside it."""
    commands = tuple(f"go to {place}" for place in PLACES) + ((f"open {PLACES[0]}",) if opens else ())
    commands += tuple(c for c in plan[:1] if not c.startswith("go to "))
    plan = plan or ("go to fridge 1", "open fridge 1", "take mug 1 from fridge 1", "move mug 1 to shelf 1")
    block = MemoryBlock(**given)
    goal = "in FloorPlan1: put a mug in shelf"
    return ExecutorRequest(goal, block, history, observation, commands, first=first), list(plan)


def entry(scene: str, place: str) -> MemoryEntry:
    actions = (f"go to {place}", f"take mug 2 from {place}", "move mug 2 to shelf 1")
    text = f"in {scene}: put a mug in shelf\n{' ; '.join(actions)}\nbecause in {scene} the mug was in {place}"
    return MemoryEntry(f"{scene} {place}", text, Provenance("t", scene, "put a mug in shelf", "train", True, actions))


def does(script: play.ScriptedPolicy, asked: tuple[ExecutorRequest, list[str]]) -> tuple[tuple[str, ...], ChoiceSource]:
    choice = script.choices(*asked)
    return choice.commands, choice.source


def test_the_script_goes_on_to_the_next_place_of_the_first_view_and_knows_no_more_than_its_prompt():
    script, view = play.ScriptedPolicy({}), f"{ROOM} a {', a '.join(PLACES[:-1])}, and a {PLACES[-1]}."
    assert does(script, request(view)) == ((f"go to {PLACES[0]}",), ChoiceSource.SEARCH)
    at = lambda place, **more: does(script, request(history=(f"go to {place}",), first=view, **more))
    for place, following in zip(PLACES, (*PLACES[1:], PLACES[0]), strict=True):
        assert at(place) == ((f"go to {following}",), ChoiceSource.SEARCH)
    back = (f"go to {PLACES[2]}", f"go to {PLACES[1]}")  # on to where it has not been
    assert does(script, request(history=back, first=view)) == ((f"go to {PLACES[3]}",), ChoiceSource.SEARCH)
    taken = (*back[:1], f"take mug 1 from {PLACES[2]}", *back[1:])  # since it took something, it has not been there
    assert does(script, request(history=taken, first=view)) == ((f"go to {PLACES[2]}",), ChoiceSource.SEARCH)
    assert at(PLACES[0], opens=True) == ((f"open {PLACES[0]}",), ChoiceSource.SEARCH)
    long_ago = (f"go to {PLACES[1]}", *["look"] * DEFAULT_HISTORY)
    assert does(script, request(history=long_ago, first=view)) == ((f"go to {PLACES[0]}",), ChoiceSource.SEARCH)


def test_the_script_follows_guidance_but_not_to_where_it_has_been():
    script, told = (
        play.ScriptedPolicy({}),
        {"guidance": "go to shelf 1", "reason": "in FloorPlan1 the mug was in shelf 1"},
    )
    assert does(script, request(**told)) == (("go to shelf 1",), ChoiceSource.GIVEN)
    assert does(script, request(history=("go to shelf 1",), **told))[1] is ChoiceSource.SEARCH
    back = ("go to shelf 1", "take mug 1 from shelf 1", "go to cabinet 1")  # it may hold another one
    assert does(script, request(history=back, **told)) == (("go to shelf 1",), ChoiceSource.GIVEN)


def test_the_script_reads_pasted_memory_as_guidance():
    entries = [entry("FloorPlan2", "shelf 1"), entry("FloorPlan1", "cabinet 2"), entry("FloorPlan1", "fridge 1")]
    script = play.ScriptedPolicy({each.text: each for each in entries})
    memory = "\n\n".join(each.text for each in entries)
    assert does(script, request(memory=memory)) == (("go to cabinet 2", "go to fridge 1"), ChoiceSource.GIVEN)
    history = ("go to cabinet 2", "go to cabinet 1")
    choice = script.choices(*request("On the cabinet 1, you see nothing.", history, memory=memory))
    assert choice.commands == ("go to fridge 1",) and choice.source is ChoiceSource.GIVEN
    assert choice.known == ("go to cabinet 2", "go to fridge 1") and choice.visited == history
    history = ("go to cabinet 2", "go to fridge 1", "go to cabinet 1")
    choice = script.choices(*request("On the cabinet 1, you see nothing.", history, memory=memory))
    assert choice.source is ChoiceSource.SEARCH and choice.known == history[:2] and choice.visited == history


def test_the_script_knows_all_that_memory_names_and_leaves_out_where_it_has_been_since_it_took_something():
    entries = [entry("FloorPlan1", "shelf 1"), entry("FloorPlan1", "fridge 1")]
    script, memory = (
        play.ScriptedPolicy({each.text: each for each in entries}),
        "\n\n".join(each.text for each in entries),
    )
    nothing, told = "On the shelf 1, you see nothing.", ("go to shelf 1", "go to fridge 1")
    seen = script.choices(*request(nothing, ("go to shelf 1",), memory=memory))  # shelves are seen when gone to
    assert seen.commands == told[1:] and seen.known == told and seen.visited == told[:1]
    later = ("go to shelf 1", "take mug 1 from cabinet 1", "go to cabinet 1")
    assert does(script, request("x", later, memory=memory)) == (told, ChoiceSource.GIVEN)


def test_the_script_acts_on_what_it_has_found():
    plan = ("take mug 1 from fridge 1", "go to shelf 1", "move mug 1 to shelf 1")
    assert does(play.ScriptedPolicy({}), request(plan=plan, guidance="go to cabinet 1")) == (
        plan[:1],
        ChoiceSource.PLAN,
    )


@pytest.mark.parametrize(
    "plan, history, commands, wanted",
    [
        (  # any mug in view does
            ("go to bed 1", "take mug 3 from bed 1", "move mug 3 to shelf 2"),
            ("go to desk 1",),
            ("take mug 1 from desk 1", "take mug 2 from desk 1", "take pen 1 from desk 1", "go to bed 1"),
            ("take mug 1 from desk 1", "take mug 2 from desk 1"),
        ),
        (  # and any shelf
            ("go to shelf 2", "move mug 1 to shelf 2"),
            ("go to desk 1",),
            ("move mug 1 to desk 1", "go to shelf 1", "go to shelf 2", "go to bed 1"),
            ("go to shelf 1", "go to shelf 2"),
        ),
        (  # here is one
            ("go to shelf 2", "move mug 1 to shelf 2"),
            ("go to shelf 1",),
            ("move mug 1 to shelf 1", "go to shelf 2"),
            ("move mug 1 to shelf 1",),
        ),
        (  # which is closed
            ("go to shelf 2", "move mug 1 to shelf 2"),
            ("go to shelf 1",),
            ("open shelf 1", "go to shelf 2"),
            ("open shelf 1",),
        ),
        (  # and any sink
            ("go to sinkbasin 2", "clean mug 1 with sinkbasin 2", "go to shelf 1", "move mug 1 to shelf 1"),
            (),
            ("go to sinkbasin 1", "go to sinkbasin 2", "go to shelf 1"),
            ("go to sinkbasin 1", "go to sinkbasin 2"),
        ),
        (("open fridge 1", "use desklamp 1"), (), ("use desklamp 1",), ("open fridge 1",)),
    ],
)
def test_commands_that_serve_equally_well(plan, history, commands, wanted) -> None:
    asked = ExecutorRequest("put a mug in shelf", MemoryBlock(), history, "x", commands)
    assert does(play.ScriptedPolicy({}), (asked, list(plan))) == (wanted, ChoiceSource.PLAN)


def test_the_second_of_two_things_goes_where_the_first_one_lies() -> None:
    commands = ("take mug 1 from shelf 1", "go to shelf 1", "go to shelf 2")
    request = ExecutorRequest("put two mug in shelf", MemoryBlock(), ("go to bed 1",), "x", commands)
    asked = lambda plan: does(play.ScriptedPolicy({}), (request, list(plan)))
    assert asked(("go to shelf 1", "move mug 2 to shelf 1")) == (("go to shelf 1",), ChoiceSource.PLAN)
    lying = ("take mug 1 from shelf 1", "go to shelf 2", "move mug 1 to shelf 2")
    assert asked(lying) == (("take mug 1 from shelf 1",), ChoiceSource.PLAN)
    assert (
        play._alike(
            ("go to desk 1", "take mug 2 from desk 1", "move mug 2 to shelf 1"), "put two mug in shelf", "", commands
        )
        == ()
    )


def test_a_lamp_is_searched_as_things_are() -> None:
    view = f"{ROOM} a {', a '.join(PLACES[:-1])}, and a {PLACES[-1]}."
    plan = ("go to fridge 1", "use desklamp 1")
    assert script_of(view, plan) == ((f"go to {PLACES[0]}",), ChoiceSource.SEARCH)


def script_of(view: str, plan: tuple[str, ...]) -> tuple[tuple[str, ...], ChoiceSource]:
    return does(play.ScriptedPolicy({}), request(view, plan=plan))


# -- lessons ----------------------------------------------------------------------------------------------------------


def test_equally_good_commands_share_what_is_to_be_predicted():
    choice = play.ScriptedChoice(("go to shelf 1", "go to bed 1"), ChoiceSource.PLAN)
    example = play.ScriptedStep("goal: in FloorPlan1: x\nsee: y", choice, "go to bed 1")
    labels, deed = lessons.SceneLabels(TOKENIZER), lessons.encode_step(TOKENIZER, example)
    batch = lessons.step_batch(labels, [[deed]], random.Random(0), 0, 7)
    go, end = ids("go to")[0], TOKENIZER.eos_token_id
    equals = [sorted({token for token in row if token != IGNORE}) for row in batch["equals"].tolist()]
    assert equals == [[go], sorted(ids(" shelf 1") + ids(" bed 1")), [end]]
    assert int((batch["labels"] != IGNORE).sum()) == len(equals)


def drawn_from(choice: play.ScriptedChoice, times: int = 200) -> set[tuple[str, str, str]]:
    """Draw batches; list what is drawn with its end, what is asked, and all that would be right."""
    deed = lessons.encode_step(TOKENIZER, play.ScriptedStep("goal: x\nsee: y", choice, ""))
    labels, rng, refused = lessons.SceneLabels(TOKENIZER), random.Random(0), ids(REFUSED)[0]
    found = set[tuple[str, str, str]]()
    for _ in range(times):
        batch = lessons.step_batch(labels, [[deed]], rng, 0, refused)
        (row,), (asked,) = batch["input_ids"].tolist(), batch["labels"].tolist()
        right = [TOKENIZER.decode([i for i in row if i != IGNORE]) for row in batch["equals"].tolist()]
        said = TOKENIZER.decode([token for token in asked if token != IGNORE])
        found.add((TOKENIZER.decode(row[len(deed.prompt) :]), said, "|".join(right)))
    return found


def test_ways_where_one_has_been_are_refused_at_their_end_and_nothing_else_is_learned_of_them() -> None:
    choice = play.ScriptedChoice(("go to bed 1",), ChoiceSource.PLAN, visited=("go to shelf 1", "go to desk 1"))
    assert drawn_from(choice) == {
        ("go to bed 1<|im_end|>", "go to bed 1<|im_end|>", "go to| bed 1|<|im_end|>"),
        ("go to shelf 1 ;", " ;", " ;"),
        ("go to desk 1 ;", " ;", " ;"),
    }


def test_a_way_is_proposed_whether_one_has_been_there_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    been = ("go to shelf 1",)
    choice = play.ScriptedChoice(
        ("go to bed 1",), ChoiceSource.GIVEN, ("go to bed 1", "go to shelf 1"), "go to desk 1", been
    )
    everything = {
        ("go to bed 1<|im_end|>", "go to bed 1<|im_end|>", "go to| bed 1|<|im_end|>"),
        ("go to shelf 1 ;", "go to shelf 1 ;", "go to| shelf 1| ;"),
        ("go to desk 1<|im_end|>", "go to desk 1<|im_end|>", "go to| desk 1|<|im_end|>"),
        ("go to shelf 1 ;", " ;", " ;"),
    }
    assert drawn_from(choice) == everything
    monkeypatch.setattr(lessons, "REFUSALS", 0.0)
    monkeypatch.setattr(lessons, "PROPOSED", 1.0)
    assert {command for command, *_ in drawn_from(choice)} == {"go to bed 1<|im_end|>", "go to shelf 1 ;"}


def kinds_drawn(short: bool) -> dict[str, int]:
    """Count what is asked in 100 batches of two rows, of which deeds to go are nine in ten; each has a beginning of its
    own."""
    deed = lambda i, verb, given="": play.ScriptedStep(
        f"first: a cabinet {i}{given}\nsee: y\ngoal: x",
        play.ScriptedChoice((f"{verb} z",), ChoiceSource.SEARCH),
        "look",
    )
    examples = [*(deed(i, "go to") for i in range(18)), deed(18, "open"), deed(19, "take", "\nmemory:\nm")]
    draws, rng = lessons.ExecutorBatches(TOKENIZER, examples, 2, short), random.Random(0)
    asked = [row for _ in range(100) for row in draws.draw(rng)["labels"][:: lessons.SIDE_BY_SIDE].tolist()]
    return {verb: sum(ids(verb)[0] in row for row in asked) for verb in ("go to", "open", "take")}


def test_rare_deeds_are_drawn_more_often_than_they_come() -> None:
    drawn = kinds_drawn(short=False)
    assert sum(drawn.values()) == 200 and all(30 < drawn[verb] < 70 for verb in ("open", "take"))  # a fifth


def test_short_prompts_hold_no_memory_and_all_kinds_alike() -> None:
    drawn = kinds_drawn(short=True)
    assert drawn["take"] == 0 and 75 < drawn["open"] < 125


def test_a_way_with_something_in_hand_is_a_kind_of_its_own() -> None:
    choice = lambda command, why: play.ScriptedChoice((command,), why)
    kind = lambda command, why, given="": lessons.kind_of(
        play.ScriptedStep(f"x{given}\nsee: y", choice(command, why), "")
    )
    assert kind("go to bed 1", ChoiceSource.PLAN) == ("", lessons.CARRIED) and kind(
        "go to bed 1", ChoiceSource.SEARCH
    ) == ("", "go")
    assert kind("go to bed 1", ChoiceSource.GIVEN, "\nguide: z") == (lessons.GUIDE, ChoiceSource.GIVEN)
    assert kind("go to bed 1", ChoiceSource.GIVEN, "\nguide: z\ndid: look") == (lessons.GUIDE, lessons.AGAIN)
    assert kind("take mug 1 from bed 1", ChoiceSource.PLAN, "\nmemory:\n") == (lessons.MEMORY, "take")


@pytest.mark.seconds
def test_deeds_of_one_beginning_are_read_as_each_alone() -> None:
    from zoo.induction_init import build_induction_model
    from zoo.stages import AnswerLoss

    model = build_induction_model(TOKENIZER, 3, gathers=LEXICON)
    model.set_attn_implementation(SHARED)
    given = "first: a cabinet 1, and a bed 2.\nmemory:\nin FloorPlan1: put a mug in bed\n"
    deeds = [
        lessons.encode_step(
            TOKENIZER, play.ScriptedStep(f"{given}{rest}\ngoal: in FloorPlan3: put a mug in bed", choice, "")
        )
        for rest, choice in [
            ("\nsee: You arrive at bed 2.", play.ScriptedChoice(("go to cabinet 1",), ChoiceSource.SEARCH)),
            ("\ndid: go to bed 2\nsee: y", play.ScriptedChoice(("open bed 2",), ChoiceSource.PLAN)),
        ]
    ]
    assert deeds[0].given == deeds[1].given == tuple(ids(f"<|im_start|>user\n{given}\n"))
    as_they_are = lessons.SceneLabels(TOKENIZER)
    as_they_are.exchange = lambda rng: np.arange(len(TOKENIZER))  # type: ignore[method-assign]
    opened = play.ScriptedChoice(("open bed 1",), ChoiceSource.PLAN)
    other = lessons.encode_step(TOKENIZER, play.ScriptedStep("first: a bed 1.\nsee: x\ngoal: y", opened, ""))
    batch = lessons.step_batch(as_they_are, [deeds, [other, other]], random.Random(1), 0, 7)
    with torch.no_grad():
        together = float(AnswerLoss().compute_loss(model, batch))
        alone = list[float]()
        for each in (*deeds, other, other):
            prompt, command = [*each.given, *each.prompt], list(each.wanted[0])
            row = {"input_ids": [prompt + command], "labels": [[IGNORE] * len(prompt) + command]}
            row = {name: torch.tensor(values) for name, values in row.items()}
            alone.append(float(AnswerLoss().compute_loss(model, row)))
    lengths = [len(each.wanted[0]) for each in (*deeds, other, other)]
    assert together == pytest.approx(sum(a * n for a, n in zip(alone, lengths, strict=True)) / sum(lengths), rel=1e-4)


def test_what_is_drawn_together_is_of_like_length() -> None:
    things = lessons.LengthPool(range(1000), lambda n: n)
    drawn = [things.near(length, random.Random(length)) for length in (0, 500, 999, 5000)]
    assert all(abs(n - length) <= 2 * lessons.NEAR for n, length in zip(drawn, (0, 500, 999, 999), strict=True))
    assert lessons.LengthPool("ab", len).near(7, random.Random(0)) in "ab"


def test_the_loss_of_equally_good_tokens_is_that_of_any_of_them():
    from types import SimpleNamespace

    from zoo.stages import AnswerLoss

    logits = torch.tensor([[[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]]])
    model = SimpleNamespace(model=lambda **_: SimpleNamespace(last_hidden_state=logits), lm_head=lambda hidden: hidden)
    inputs = {
        "input_ids": torch.zeros(1, 2),
        "labels": torch.tensor([[IGNORE, 1]]),
        "equals": torch.tensor([[1, 2, IGNORE]]),
    }
    loss, outcome = AnswerLoss().compute_loss(model, inputs, return_outputs=True)
    logprobs = torch.tensor([0.0, 1.0, 2.0]).log_softmax(0)
    assert loss == pytest.approx(float(-(logprobs[1].exp() + logprobs[2].exp()).log()))
    assert outcome["right"].tolist() == [True]
    assert AnswerLoss().compute_loss(model, {**inputs, "equals": torch.tensor([[0]])}) == pytest.approx(
        float(-logprobs[0])
    )


def test_scene_labels_are_exchanged_one_for_one():
    table = lessons.SceneLabels(TOKENIZER).exchange(random.Random(0))
    text = "in FloorPlan3: put a mug in shelf\nFloorPlan3 FloorPlan4"
    changed = TOKENIZER.decode(table[ids(text)].tolist())
    new = changed.split(":")[0].removeprefix("in ")
    assert new != "FloorPlan3" and changed.startswith(f"in {new}: put a mug in shelf\n{new} FloorPlan")
    assert sorted(table.tolist()) == list(range(len(TOKENIZER))) and new in SCENES


def situation(
    guidance: str = "go to cabinet 2", reason: str = "in FloorPlan1 the mug was in cabinet 2"
) -> play.TeacherStep:
    state = BriefState("in FloorPlan1: put a mug in shelf").apply(Create("cabinet 1", "no mug"))
    memory = (entry("FloorPlan1", "cabinet 1"), entry("FloorPlan1", "cabinet 2"))
    search = Search("find mug", ("cabinet 2", "cabinet 3"), ("cabinet 2",), frozenset({"cabinet 1"}))
    asked = CompileRequest(state.goal, memory, state, "You arrive at shelf 1. On the shelf 1, you see a mug 3.")
    return play.TeacherStep(asked, Emission(guidance, reason if guidance else ""), search)


def test_questions_are_about_memory_search_view_and_emission():
    talk = dict(lessons.all_questions(situation(), random.Random(0)))
    unseen = {ask: answer for ask, answer in talk.items() if ask.startswith("here ") and ask != "here mug"}
    assert len(unseen) == lessons.UNSEEN and set(unseen.values()) == {" nothing"}
    assert {ask: answer for ask, answer in talk.items() if ask not in unseen} == {
        "emission": "> in FloorPlan1 the mug was in cabinet 2 | go to cabinet 2",
        "notes": ".",
        "search": "find mug",
        "here mug": " 3",
        "in FloorPlan1 find mug": " cabinet 1, cabinet 2",
        "left for mug": " cabinet 2, cabinet 3",
        "best": " cabinet 2",
    }


def test_of_the_state_alone_nothing_is_asked_that_memory_tells():
    request, talk = lessons.ask_state(situation(), random.Random(0))
    assert not request.memory and "emission" not in dict(talk) and not any(ask.startswith("in ") for ask, _ in talk)


def test_what_follows_from_the_state_alone_is_kept_without_memory():
    state = situation().request.state
    assert state is not None
    begun = replace(situation().request, state=state.apply(Create("plan", "find mug; put mug in shelf")))
    noted = replace(situation(), request=begun)
    elsewhere = replace(noted, emission=Emission("go to cabinet 2", "in FloorPlan9 the mug was in cabinet 7"))
    silent = replace(noted, emission=Emission())
    kept = lessons.without_memory([situation(), noted, elsewhere, silent])
    assert [each.emission for each in kept] == [noted.emission, silent.emission]
    assert not any(each.request.memory for each in kept)


def test_a_third_of_the_lessons_names_a_place():
    from lm.backbone import Backbone
    from zoo.models import make_executor

    asked = list[str]()

    def ask(each: play.TeacherStep, rng: random.Random):
        asked.append(each.emission.guidance)
        return lessons.ask_state(each, rng)

    backbone = Backbone(make_executor(TOKENIZER, hidden=32, layers=1), TOKENIZER)
    acting = replace(situation(""), search=None)
    draws = lessons.CompilerBatches(backbone, [situation(), *[situation("")] * 9, acting], 1, ask)
    rng = random.Random(0)
    for _ in range(200):
        draws.draw(rng)
    assert 45 < sum(map(bool, asked)) < 90


@pytest.mark.parametrize(
    ("name", "steps"),
    [("compiler", {"states": 200, "emissions": 2600, "writing": 1000}), ("executor", {"short": 100, "cloning": 800})],
)
def test_a_shipped_model_is_that_of_its_record(name: str, steps: dict[str, int]) -> None:
    folder = Path(recipes.__file__).parent / name
    record = json.loads((folder / "RECORD.json").read_text())
    assert record["steps"] == steps
    for file, sha256 in record["sha256"].items():
        assert hashlib.sha256((folder / file).read_bytes()).hexdigest() == sha256


def test_the_shipped_checkpoint_is_of_the_shipped_models() -> None:
    folder = Path(recipes.__file__).parent
    executor, compiler = (
        gate.load_executor(str(folder / "executor")),
        gate.load(str(folder / "compiler"), str(folder / "checkpoint")),
    )
    assert checkpoint.read_state(folder / "checkpoint")["executor_hash"] == executor.hash()
    assert compiler.projector.config.d_executor == executor.backbone.hidden_size
    first = (
        "You are in the middle of a room. Looking quickly around you, you see a cabinet 1, a fridge 1, and a shelf 1."
    )
    asked = CompileRequest("in FloorPlan1: put a mug in shelf", (entry("FloorPlan1", "fridge 1"),), None, first)
    [made] = compiler.compile([replace(asked, state=BriefState(asked.goal))])
    assert (made.emission.guidance, made.emission.reason) == ("go to fridge 1", "in FloorPlan1 the mug was in fridge 1")


# -- gates ------------------------------------------------------------------------------------------------------------


def test_a_share_says_its_interval_and_whether_it_is_enough():
    share = GateResult.of("right place", [True] * 96 + [False] * 4, 0.95)
    assert str(share) == "right place: 96.0% [90.2%, 98.4%] of 100, required 95%: passed"
    assert (
        not replace(share, right=94).passed
        and not GateResult("none", 0, 0, 0.95).passed
        and GateResult("told", 0, 0).passed
    )


def test_the_gates_tell_what_a_compiler_got_wrong():
    speaks, silent = situation(), situation("")
    wrong_place = Emission("go to cabinet 1", "in FloorPlan1 the mug was in cabinet 1")
    blend = Emission("go to cabinet 2", "in FloorPlan1 the mug was in shelf 1")
    second = Emission("go to cabinet 3", "in FloorPlan1 the mug was in cabinet 1")  # is left, too
    said = [speaks.emission, wrong_place, blend, second, Emission(), blend]
    found = {s.name: (s.right, s.n) for s in gate.judged([*[speaks] * 5, silent], said)}
    assert found == {
        "right place": (3, 5),
        "right silence": (0, 1),
        "right where something is ruled out": (3, 6),
        "cites an entry that exists": (3, 5),
        "the place is the teacher's": (2, 5),
        "the whole emission is the teacher's": (1, 6),
    }


def test_who_goes_elsewhere_on_one_occasion_is_counted_once() -> None:
    told = lambda episode, done, *ways: play.ScriptedStep(
        "", play.ScriptedChoice(ways, play.ChoiceSource.GIVEN), done, episode
    )
    strayed = [told("a", "look", "go to shelf 1"), told("a", "look", "go to shelf 1"), told("a", "look", "go to bed 1")]
    examples = [*strayed, told("b", "go to shelf 1", "go to shelf 1"), told("b", "look", "go to shelf 1")]
    assert list(gate._obeyed(gate._occasions(examples))) == [False, False, True]


# -- in games ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ALFWORLD_DATA folder of generated homes."""
    root = tmp_path_factory.mktemp("games")
    home = HouseholdEnvironment(scenes={"train": 2}, images=False)
    export_split(home, "train", root, limit=12)
    return root


@pytest.mark.slow
def test_the_evaluation_of_the_shipped_models_runs_at_once(games: Path, tmp_path: Path) -> None:
    done = memcompiler(
        "eval",
        "-c",
        "eval/alfworld",
        "split=train",
        "limit=2",
        "max_steps=3",
        "deliveries=[static, compiled]",
        "--out",
        str(tmp_path / "eval"),
        ALFWORLD_DATA=str(games),
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    episodes = list(read_episodes(tmp_path / "eval" / EPISODES))
    assert len(episodes) == 4 and not any(episode.error for episode in episodes)


@pytest.mark.slow
def test_both_recipes_leave_a_model_that_the_gates_can_read(games, tmp_path, monkeypatch):
    monkeypatch.setenv("ALFWORLD_DATA", str(games))
    work = tmp_path / "work"
    recipes.train_executor(tmp_path / "executor", work, steps=(2, 2, 2), batch=4)
    recipes.train_compiler(tmp_path / "compiler", work, steps=(2, 2, 2), batch=4)
    executor, compiler = list(recipes.EXECUTOR_STAGES), list(recipes.COMPILER_STAGES)
    for name, made in (("executor", executor), ("compiler", compiler)):
        record = json.loads((tmp_path / name / "RECORD.json").read_text())
        assert list(record["log"]) == made and record["command"].startswith(f"memcompiler zoo {name} --world alfworld")
        assert not load_backbone(tmp_path / name, torch.float32, "cpu").is_vlm
    monkeypatch.setattr(play, "run_games", partial(play.run_games, steps=15))  # instead of 50: untrained, they lose
    monkeypatch.setattr(gate, "TOKENS", 16)
    shares = gate.executor_gates(str(tmp_path / "executor"), work, "train", 1)
    assert {share.n for share in shares if "solved" in share.name} == {1} and not all(s.passed for s in shares)
    asked = {share.name: share for share in shares}  # pasted memory has to be worth what guidance is
    guided, static = (asked[f"{name}, solved within 15 steps"] for name in ("guided", "static"))
    assert guided.threshold is None and static.threshold == guided.interval.low
    shares = gate.compiler_gates(str(tmp_path / "compiler"), None, work, "train", 2)
    assert shares[0].n > 0 and not shares[0].passed
