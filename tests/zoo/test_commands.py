"""The compiler of commands for a frozen public executor: its vocabulary, attention, batches and recipe."""

import json
import random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agent.command_teacher import CommandTeacher
from compiler.brief_state import BriefState
from compiler.prompt import compiler_parts
from compiler.records import CompileRequest
from envs.alfworld.export import export_split
from envs.household.command_reader import AlfworldReader
from envs.household.environment import HouseholdEnvironment
from lm.backbone import Backbone, load_backbone
from zoo import attention, stages
from zoo.alfworld import commands
from zoo.alfworld.words import COMMAND_LEXICON, LEXICON
from zoo.curriculum import IGNORE
from zoo.models import make_tokenizer

OLD, NEW = make_tokenizer(LEXICON), make_tokenizer(COMMAND_LEXICON)


def tiny_model(tokenizer) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **sizes))


def played(goal: str, *views: str) -> list[commands.State]:
    states, state, history = [], BriefState(goal), ()
    for view in views:
        asked = CompileRequest(goal, (), state, view, history=history)
        said = CommandTeacher(reader=AlfworldReader()).emission(asked)
        states.append(commands.State(asked, f"{said.guidance or '='}{len(states)}"))
        history += ("look",)
    return states


GOAL = "in FloorPlan7: put a mug in cabinet"
STATES = played(GOAL, "You see a cabinet 1.", "Nothing happens.", "You arrive at shelf 1.")


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


def test_shared_beginnings_give_the_loss_and_gradients_of_repeated_ones():
    model, episodes = tiny_model(NEW), [STATES, played("in FloorPlan1: put a pan in shelf", "a", "You see a pan 1.")]
    batch = commands.EpisodeBatches(model, NEW, episodes, rows=2).draw(random.Random(1))
    found = {}
    for kind in ("eager", attention.NAME):
        model.set_attn_implementation(kind)
        model.zero_grad()
        loss = stages.AnswerLoss().compute_loss(model, batch)
        loss.backward()
        found[kind] = [loss.detach(), *(weight.grad.clone() for weight in model.parameters())]
    for ours, theirs in zip(found[attention.NAME], found["eager"], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_a_row_of_a_batch_is_a_compile_prompt_and_its_emission_with_other_scene_labels():
    backbone = Backbone(tiny_model(NEW), NEW)
    batch = commands.EpisodeBatches(backbone.model, NEW, [STATES], rows=1).draw(random.Random(0))
    begun = batch["given"][0][batch["given_mask"][0] == 1].tolist()
    expected = {
        NEW.decode(backbone.encode(compiler_parts(state.request, images=False)).ids).replace(
            "FloorPlan7", "SCENE"
        ): f"{state.emission}<|im_end|>"
        for state in STATES
    }
    for row, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        prompt = NEW.decode([*begun, *row[: int((labels != IGNORE).nonzero()[0])].tolist()])
        scene = prompt.split("goal: in ")[1].split(":")[0]
        assert NEW.decode(labels[labels != IGNORE]) == expected[prompt.replace(scene, "SCENE")]


@pytest.mark.slow
def test_the_recipe_plays_games_and_leaves_a_model_that_loads(tmp_path, monkeypatch):
    export_split(HouseholdEnvironment(scenes={"train": 2}, images=False), "train", tmp_path / "data", limit=6)
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "data"))
    base = tmp_path / "base"
    tiny_model(OLD).save_pretrained(base)
    OLD.save_pretrained(base)
    commands.train_compiler(tmp_path / "out", tmp_path / "work", games=4, steps=2, rows=1, base=base)
    record = json.loads((tmp_path / "out" / "RECORD.json").read_text())
    assert record["steps"] == {"commands": 2} and load_backbone(tmp_path / "out", torch.float32, "cpu")
