"""The compiler of commands for a frozen public executor: its vocabulary, attention, batches and recipe."""

import json
import random
import re
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agent.command_teacher import CommandTeacher
from agent.records import EpisodeContext
from compiler.brief_state import BriefState, Create
from compiler.language import Emission, render
from compiler.prompt import compiler_parts
from compiler.records import Compilation, CompileRequest
from envs.alfworld.export import export_split
from envs.household.command_reader import AlfworldReader
from envs.household.engine import enumerated
from envs.household.environment import HouseholdEnvironment
from envs.household.errands import kind_of, listed_places, place_notes, shown_notes
from lm.attention import SHARED
from lm.backbone import Backbone, load_backbone
from memory.entry import MemoryEntry, Provenance
from zoo import stages
from zoo.alfworld import commands
from zoo.alfworld.command_gate import command_gates, judged, judged_silence
from zoo.alfworld.words import COMMAND_LEXICON, LEXICON
from zoo.curriculum import IGNORE, pad
from zoo.models import make_tokenizer

OLD, NEW = make_tokenizer(LEXICON), make_tokenizer(COMMAND_LEXICON)


def tiny_model(tokenizer) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **sizes))


def played(goal: str, *views: str, memory: tuple[MemoryEntry, ...] = ()) -> list[commands.State]:
    states, state, history = [], BriefState(goal), ()
    for view in views:
        asked = CompileRequest(goal, memory, state, view, history=history)
        said = CommandTeacher(reader=AlfworldReader()).emission(asked)
        states.append(commands.State(asked, f"{said.guidance or '='}{len(states)}"))
        history += ("look",)
    return states


GOAL = "in FloorPlan7: put a mug in cabinet"
STATES = played(GOAL, "You see a cabinet 1.", "Nothing happens.", "You arrive at shelf 1.")


def encoded(*episodes: list[commands.State]) -> list[commands.EncodedEpisode]:
    return [commands.encode_episode(Backbone(tiny_model(NEW), NEW), states) for states in episodes]


def test_known_tokens_keep_their_embeddings_and_new_ones_get_their_length():
    old = tiny_model(OLD)
    before, text = old.get_input_embeddings().weight.clone(), "go to shelf 1"
    states = old.model(**OLD(text, return_tensors="pt")).last_hidden_state
    new = commands.with_vocabulary(old, OLD, NEW, seed=0)
    torch.testing.assert_close(new.model(**NEW(text, return_tensors="pt")).last_hidden_state, states)
    added = [i for token, i in NEW.get_vocab().items() if token not in OLD.get_vocab()]
    lengths = new.get_input_embeddings().weight[added].norm(dim=1)
    assert len(NEW("unsearched holding")["input_ids"]) == 2 and len(added) > 20
    torch.testing.assert_close(lengths, before.norm(dim=1).mean().expand(len(added)))


@pytest.mark.parametrize("bf16", [False, True])
def test_shared_beginnings_give_the_loss_and_gradients_of_whole_rows(bf16):
    model = tiny_model(NEW)
    episodes = encoded(STATES, played("in FloorPlan1: put a pan in shelf", "a", "You see a pan 1."))
    batch = commands.EpisodeBatches(NEW, [episodes], rows=2).draw(random.Random(1))
    given = [row[:n].tolist() for row, n in zip(batch["given"], batch["given_lengths"], strict=True)]
    begun = [row for row, n in zip(given, batch["behind"].tolist(), strict=True) for _ in range(n)]
    join = lambda name, start: [[*start(row), *rest.tolist()] for row, rest in zip(begun, batch[name], strict=True)]
    whole = {
        "input_ids": pad(join("input_ids", list), NEW.pad_token_id),
        "labels": pad(join("labels", lambda row: [IGNORE] * len(row)), IGNORE),
    }
    model.set_attn_implementation(SHARED)
    found = []
    for each in (whole, batch):
        answers = stages.AnswerLoss()
        answers.bf16 = bf16
        model.zero_grad()
        loss = answers.compute_loss(model, each)
        loss.backward()
        found.append([loss.detach(), *(weight.grad.clone() for weight in model.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=5e-3 if bf16 else 1e-5, rtol=5e-2 if bf16 else 1e-4)


def test_a_row_of_a_batch_is_a_compile_prompt_and_its_emission_with_other_scene_labels():
    backbone = Backbone(tiny_model(NEW), NEW)
    batch = commands.EpisodeBatches(NEW, [encoded(STATES)], rows=1).draw(random.Random(0))
    begun = batch["given"][0][: batch["given_lengths"][0]].tolist()
    expected = {
        NEW.decode(backbone.encode(compiler_parts(state.request, images=False, entries="commands")).ids).replace(
            "FloorPlan7", "SCENE"
        ): f"{state.emission}<|im_end|>"
        for state in STATES
    }
    for row, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        prompt = NEW.decode([*begun, *row[: int((labels != IGNORE).nonzero()[0])].tolist()])
        scene = prompt.split("goal: in ")[1].split(":")[0]
        assert NEW.decode(labels[labels != IGNORE]) == expected[prompt.replace(scene, "SCENE")]


def test_exchanged_numbers_are_those_of_things_and_equal_in_a_whole_episode():
    view = "On the shelf 1, you see a mug 1, a mug 2, and a pan 9."
    states = [commands.State(CompileRequest(GOAL, (), None, view, history=()), "> x | take mug 2 from shelf 1")]
    batches = commands.EpisodeBatches(NEW, [encoded(states)], rows=1)
    seen = set()
    for seed in range(20):
        batch = batches.draw(random.Random(seed))
        text = NEW.decode([*batch["given"][0].tolist(), *batch["input_ids"][0].tolist()])
        first, second, pan = re.search(r"shelf 1, you see a mug (\d), a mug (\d), and a pan (\d)\.", text).groups()
        assert f"take mug {second} from shelf 1" in text and len({first, second, pan}) == 3
        seen.add((first, second, pan))
    assert len(seen) > 5 and ("1", "2", "9") in seen


def test_a_memory_is_asked_for_what_it_knows_and_for_what_it_does_not_with_first_states_of_other_games():
    did = ("take mug 1 from shelf 1", "move mug 1 to cabinet 1")
    known = (MemoryEntry("", "", Provenance("", "FloorPlan2", "put a mug in cabinet", "train", True, did)),)
    goals = [f"in FloorPlan{scene}: put a {thing} in cabinet" for scene in range(1, 21) for thing in ("mug", "pan")]
    goals += [f"in FloorPlan{scene}: cool some mug and put it in cabinet" for scene in range(1, 21)]
    asked = [commands.FirstState.of(CompileRequest(goal, (), None, "a view")) for goal in goals]
    drawn = commands.first_requests(known, asked, random.Random(0))
    of = lambda words: sum(words in request.goal for request in drawn)
    assert len(drawn) == commands.QUESTIONS and all(request.memory == known for request in drawn)
    assert of("put a mug") >= 7 and of("cool some mug") >= 3 and of("put a pan") >= 3


def test_a_small_home_has_the_goal_s_place_and_its_notes_are_those_of_its_view():
    did = ("take mug 1 from shelf 1", "move mug 1 to cabinet 1")
    known = (MemoryEntry("", "", Provenance("", "FloorPlan2", "put a mug in cabinet", "train", True, did)),)
    names = [f"{kind} {n}" for kind in ("cabinet", "drawer", "shelf", "stoveburner") for n in range(9, 0, -1)]
    view = f"You are in the middle of a room. Looking quickly around you, you see {enumerated(names)}."
    asked, shelves = CompileRequest("in FloorPlan7: put a mug in cabinet", known, BriefState(GOAL), view), 0
    for seed in range(20):
        small = commands.in_small_home(asked, random.Random(seed))
        places = listed_places(small.observation)
        assert "cabinet" in {kind_of(place) for place in places} and len(places) <= commands.MOST_PLACES
        assert [place for place in names if place in places] == places  # in their order
        notes = shown_notes(dict(place_notes(small.observation)), in_front=())
        assert notes == {note.key: note.value for note in small.state.beliefs}
        shelves += sum(kind_of(place) == "shelf" for place in places)
    assert 10 < shelves < 80  # each of the nine, a kind that M names, is left in about a fifth of the homes


@dataclass
class Mute:
    """A compiler that says nothing, and takes one note."""

    needs_expert = False

    def compile(self, requests, contexts=()):
        said = Emission(ops=(Create("seen", "nothing"),))
        return [Compilation(render(said), said, request=request) for request in requests]


def test_states_of_a_compiler_hold_its_own_notes_and_the_teacher_s_emissions(tmp_path, monkeypatch):
    export_split(HouseholdEnvironment(scenes={"train": 2}, images=False), "train", tmp_path / "data", limit=3)
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "data"))
    make_env, specs = commands.material(tmp_path / "bank", 0, 3)
    (first, *states), *_ = commands.recorded_states(make_env, specs, 0, Mute())
    teacher = CommandTeacher(reader=AlfworldReader())
    assert all(state.request.state.belief("seen") == "nothing" for state in states)
    assert all(state.emission == render(teacher.emission(state.request)) for state in (first, *states))
    subgoals = commands.recorded_states(make_env, specs, 0, level="subgoal")
    assert all("> " not in s.emission or "go to" not in s.emission for of in subgoals for s in of)
    assert [len(of) for of in subgoals] == [len(of) for of in commands.recorded_states(make_env, specs, 0)]


def test_places_begin_alike_with_their_kinds_and_the_rest_as_it_was():
    model = tiny_model(NEW)
    before = model.model.embed_tokens.weight.detach().clone()
    commands.relate_places(model, NEW)
    after, of = model.model.embed_tokens.weight.detach(), lambda text: NEW(text, add_special_tokens=False)["input_ids"]
    (place,), (kind,), (thing,) = of(" cabinet 3"), of(" cabinet"), of(" mug")
    assert torch.allclose(after[place], before[place] + commands.KIND_SHARE * before[kind])
    assert torch.equal(after[kind], before[kind]) and torch.equal(after[thing], before[thing])


def test_balanced_states_are_of_all_subgoals_and_none_comes_twice():
    many = ("find",) * 18 + ("put", "clean")
    nothing = tuple(np.zeros(1, np.uint16) for _ in many)
    episode, counts = commands.EncodedEpisode(nothing[0], nothing, nothing, many), Counter()
    for seed in range(100):
        drawn = episode.drawn(3, random.Random(seed), balanced=True)
        assert len(set(drawn)) == 3
        counts.update(many[i] for i in drawn)
    assert min(counts.values()) > 60  # 15 of 300 without the balance
    assert sorted(episode.drawn(20, random.Random(0), balanced=True)) == list(range(20))


@pytest.mark.slow
def test_the_recipe_plays_games_and_leaves_a_model_that_loads(tmp_path, monkeypatch):
    export_split(HouseholdEnvironment(scenes={"train": 2}, images=False), "train", tmp_path / "data", limit=6)
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "data"))
    base = tmp_path / "base"
    tiny_model(OLD).save_pretrained(base)
    OLD.save_pretrained(base)
    commands.train_compiler(
        tmp_path / "out",
        tmp_path / "work",
        games=4,
        small_steps=1,
        steps=2,
        rows=2,
        base=base,
        own_games=2,
        own_steps=1,
        play_steps=1,
        review_steps=1,
    )
    record = json.loads((tmp_path / "out" / "RECORD.json").read_text())
    assert record["steps"] == {"small_homes": 1, "commands": 2, "own_states": 1, "play": 1, "review": 1}
    assert load_backbone(tmp_path / "out", torch.float32, "cpu")
    commands.train_subgoal_compiler(tmp_path / "sub", tmp_path / "work", tmp_path / "out", games=4, steps=1, rows=2)
    assert json.loads((tmp_path / "sub" / "RECORD.json").read_text())["steps"] == {"subgoals": 1}
    export_split(HouseholdEnvironment(scenes={"valid_seen": 2}, images=False), "valid_seen", tmp_path / "data", limit=2)
    results = {r.name: r for r in command_gates(str(tmp_path / "out"), None, tmp_path / "work/gate", "valid_seen", 2)}
    assert not results["home in the bank: right command"].passed  # an untrained model
    assert results["memory empty: right silence"].n > 0
    assert results["home in the bank: teacher, obeyed, solves within 30 steps"].n == 2


def test_the_gates_count_commands_notes_citations_and_silence():
    did = ("go to shelf 1", "take mug 1 from shelf 1", "move mug 1 to cabinet 1")
    known = MemoryEntry("", "", Provenance("", "FloorPlan2", "put a mug in cabinet", "train", True, did))
    room = "Looking quickly around you, you see a cabinet 1, and a shelf 1."
    views = ("You are in the middle of a room. " + room, "You arrive at shelf 1. On the shelf 1, you see a mug 2.")
    asked = [state.request for state in played(GOAL, *views, memory=(known,))]
    right = CommandTeacher(reader=AlfworldReader()).compile(asked, [EpisodeContext(None)] * 2)
    states = [commands.State(request, said.text) for request, said in zip(asked, right, strict=True)]
    said = [each.emission for each in right]
    wrong = [Emission("go to bed 1", "in FloorPlan9 the mug was in bed 1"), said[1]]
    of = lambda emissions: {r.name.removeprefix("home: "): (r.right, r.n) for r in judged("home", states, emissions)}
    assert [each.guidance for each in said] == ["go to shelf 1", "take mug 2 from shelf 1"]
    assert set(of(said).values()) == {(2, 2)}
    counts = {"right command": (1, 2), "same notes": (1, 2), "cites an entry that exists": (1, 2)}
    assert of(wrong) == counts | {"whole emission": (1, 2)}
    assert [(r.right, r.n) for r in judged_silence("empty", states, [Emission(), said[1]])] == [(1, 2)]
