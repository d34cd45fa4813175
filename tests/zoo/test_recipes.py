"""The recipes of the tiny models: a few steps of each from nothing to a model folder, and stages that are resumed."""

import hashlib
import json
import random
import re

import pytest
import torch
from transformers import TrainerCallback

from envs.household.render import MARK, RECEPTACLE_NAMES
from lm.backbone import load_backbone
from tests.tiny_models import tokenizer
from zoo import stages
from zoo.curriculum import Level, TextCurriculum
from zoo.household import episodes, lessons, pictures, recipes
from zoo.household.words import LEXICON
from zoo.models import make_executor
from zoo.recipes import train_text

ALWAYS_PASSED = (Level("copy", 0, -1.0), Level("documents", 2, -1.0))


class KilledAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def text_stage(folder, levels=ALWAYS_PASSED, steps=20, callbacks=()):
    torch.manual_seed(0)
    model = make_executor(tokenizer(), hidden=32, layers=1)
    curriculum = TextCurriculum(tokenizer(), LEXICON, 0, levels)
    model = stages.train_on_answers(
        model, folder, 0, steps, curriculum.batch, curriculum.exam, 1e-3, every=3, callbacks=[curriculum, *callbacks]
    )
    return model.state_dict(), curriculum


@pytest.mark.seconds
def test_a_killed_stage_goes_on_to_the_same_weights(tmp_path):
    """The last checkpoint stands where an exam was passed: the level that this brought is known after the restart."""
    weights, curriculum = text_stage(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        text_stage(tmp_path / "killed", callbacks=[KilledAt(5)])
    resumed, again = text_stage(tmp_path / "killed")
    assert curriculum.passed == again.passed == [3, 6]
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    log = stages.read_log(tmp_path / "killed")
    assert [row["step"] for row in log if "eval_accuracy" in row] == [3, 6]


def test_a_finished_stage_is_read_and_not_made_again(tmp_path):
    weights, _ = text_stage(tmp_path / "text")
    again, _ = text_stage(tmp_path / "text", callbacks=[KilledAt(1)])
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_a_stage_that_was_killed_at_its_last_checkpoint_takes_no_further_step(tmp_path):
    weights, _ = text_stage(tmp_path / "text")
    (tmp_path / "text" / "model.safetensors").unlink()  # written after the checkpoint
    again, _ = text_stage(tmp_path / "text", callbacks=[KilledAt(7)])
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert (tmp_path / "text" / "model.safetensors").exists()


def test_a_curriculum_without_end_is_an_error(tmp_path):
    unreachable = (Level("copy", 0, 1.0),)
    for _ in range(2):  # it does not pass for finished afterwards
        with pytest.raises(RuntimeError, match="did not pass all levels"):
            train_text(tokenizer(), LEXICON, tmp_path, 0, unreachable, steps=1)


def test_a_level_counts_from_the_batch_after_the_one_that_was_drawn_ahead():
    curriculum = TextCurriculum(tokenizer(), LEXICON, 0, ALWAYS_PASSED)
    drawn_ahead = curriculum.batch(4)["input_ids"]
    curriculum.passed = [3]
    assert torch.equal(curriculum.batch(4)["input_ids"], drawn_ahead)
    assert {len(curriculum.batch(step)["input_ids"]) for step in range(5, 30)} == {32, 64}  # documents, and copying


def test_compiler_examples_ask_for_the_mark_only_while_it_is_of_use():
    examples = episodes.compiler_examples(2, seed=3)
    for example in examples:
        taken = any(action.startswith("take ") for action in example.request.history)
        assert (example.marked is None) == (taken or example.request.image is None)
    assert any(example.shows_place for example in examples)
    assert all(example.marked == example.shown and not example.pictured for example in examples)


def test_what_only_a_picture_in_memory_shows_is_gathered_where_that_picture_is_there():
    examples = [s for s in episodes.compiler_examples(3, seed=3, pictures=1) if s.marked is not None]
    assert any(s.marked == "nothing" and s.shows_place for s in examples)  # M's
    assert any(s.marked == s.shown != "nothing" for s in examples)  # the view's
    assert any(s.shown == "nothing" for s in examples)  # what text tells
    for example in examples:
        scene = example.request.goal.split(":")[0].removeprefix("in ")
        assert example.shown in ("nothing", example.marked, example.pictured.get(scene))
        asked = dict(lessons.dialogue(example, random.Random(0), emissions=True))
        told = {ask: answer for ask, answer in asked.items() if ask.startswith("what is marked in ")}
        there = {f"what is marked in {s}": f" {place}" for s, place in example.pictured.items()}
        assert told.items() <= there.items()
        assert len(told) == min(2, len(example.pictured))


def test_lessons_in_pictures_ask_for_what_each_of_them_marks():
    backbone, answers = load_backbone("zoo/household/compiler", torch.float32, "cpu"), set()
    for seed in range(20):
        lesson = pictures.picture_lesson(backbone, random.Random(seed))
        text = backbone.tokenizer.decode(lesson.prompt.ids)
        told = re.findall(r"ask: what is marked(?: in (home \d+))?<.*?assistant\n (.*?)<", text, re.DOTALL)
        homes = re.findall(r"because in (home \d+) the \w+ was in [a-z]+ \d+\n<\|vision_start", text)
        assert len(told) == len(homes) + 1 == len(lesson.prompt.images)
        assert [dict(told)[home] for home in (*homes, "")] == list(map(marked_in, lesson.prompt.images))
        answers |= {answer == "nothing" for _, answer in told}
        view = pictures.view_lesson(backbone, random.Random(seed)).prompt
        asked = f"what is marked<|im_end|>\n<|im_start|>assistant\n {marked_in(*view.images)}<|im_end|>"
        assert backbone.tokenizer.decode(view.ids).endswith(asked)
    assert answers == {True, False}


def marked_in(image) -> str:
    """The place whose cell wears the mark."""
    corners = {name: (cell % 8 * 8, cell // 8 * 8) for cell, name in enumerate(RECEPTACLE_NAMES)}
    found = [name for name, corner in corners.items() if image.getpixel(corner) == MARK]
    assert len(found) < 2
    return found[0] if found else "nothing"


@pytest.mark.slow
def test_both_recipes_leave_a_model_that_loads_and_its_record(tmp_path):
    levels = (Level("copy", 0, -1.0), Level("facts", 0, -1.0))
    text = ["copying", "look_up"]
    recipes.train_compiler(
        tmp_path / "compiler", tmp_path / "work", 0, scenes=4, steps=(2, 2, 2, 2), batch=6, levels=levels
    )
    recipes.train_executor(tmp_path / "executor", tmp_path / "work", 0, scenes=2, steps=2, batch=4, levels=levels)
    for name, made in (("compiler", list(recipes.COMPILER_STAGES)), ("executor", [*text, "clone"])):
        folder = tmp_path / name
        record = json.loads((folder / "RECORD.json").read_text())
        digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
        assert record["sha256"] == {"model.safetensors": digest}
        assert list(record["log"]) == made and record["steps"] == dict.fromkeys(made, 2) | dict.fromkeys(text, 25)
        assert load_backbone(folder, torch.float32, "cpu").is_vlm == (name == "compiler")
