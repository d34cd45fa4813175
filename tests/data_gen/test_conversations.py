"""Rows as TRL conversations: the tokens that our own SFT reads, and TRL trains on them as they are."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer
from typer.testing import CliRunner

from agent.records import compile_request
from compiler.prompt import compiler_parts
from data_gen.conversations import export_conversations, row_to_conversation
from data_gen.rows import save_rows, split_rows
from lm.backbone import load_backbone
from memcompiler.cli import app
from runtime.progress import disable_library_progress_bars
from tests.training.sft_trainers import ROWS, png

ROOT = Path(__file__).parents[2]
PICTURES = [replace(row, memory_images=((png(7),), ())[: len(row.memory_ids)]) for row in ROWS]
TOLD = "You compile memory."


def trained(folder: Path, model: str, out: Path) -> SFTTrainer:
    """Two steps of TRL's trainer, on what lies in the folder."""
    config = SFTConfig(
        output_dir=str(out),
        max_steps=2,
        per_device_train_batch_size=3,
        learning_rate=1e-2,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        max_length=None,
        seed=0,
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        lr_scheduler_type="constant",
    )
    data = load_dataset(str(folder), cache_dir=str(out / "cache"))["train"]
    trainer = SFTTrainer(str(ROOT / "zoo" / "household" / model), args=config, train_dataset=data)
    trainer.train()
    return trainer


def test_trl_trains_on_exported_rows_and_reads_the_tokens_that_our_sft_reads(tmp_path):
    disable_library_progress_bars()
    export_conversations(ROWS, tmp_path / "rows", instructions=TOLD)
    trainer = trained(tmp_path / "rows", "executor", tmp_path / "out")
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == 2 and losses[1] < losses[0]
    encoder = load_backbone(ROOT / "zoo" / "household" / "executor", torch.float32, "cpu")
    for row, read in zip(ROWS, trainer.train_dataset, strict=True):
        prompt = encoder.encode(compiler_parts(compile_request(row.step_input()), images=False), TOLD)
        emission = (*encoder.ids(row.emission), encoder.end_id)
        ids, learnt = read["input_ids"], [id for id in read["labels"] if id != -100]
        assert tuple(ids[: len(prompt.ids) + len(emission)]) == (*prompt.ids, *emission)
        assert encoder.tokenizer.decode(ids[len(prompt.ids) + len(emission) :]) == "\n"  # the template's, behind a turn
        assert tuple(learnt[: len(emission)]) == emission and len(learnt) == len(emission) + 1


def test_a_model_that_sees_trains_on_rows_with_their_pictures(tmp_path):
    disable_library_progress_bars()
    export_conversations(PICTURES, tmp_path / "rows", images=True)
    trainer = trained(tmp_path / "rows", "compiler", tmp_path / "out")
    assert len([row for row in trainer.state.log_history if "loss" in row]) == 2


def test_pictures_stand_beside_their_places_in_order():
    told = row_to_conversation(PICTURES[3], TOLD, images=True)
    system, user = told["prompt"]
    assert [part["text"] for part in system["content"]] == [TOLD]
    kinds = [part["type"] for part in user["content"]]
    assert kinds == ["text", "image", "text", "image", "text"] and len(told["images"]) == 2
    assert told["images"][0]["bytes"] == png(7)  # of memory; the view is the last one
    plain = row_to_conversation(PICTURES[3])
    assert set(plain) == {"prompt", "completion"} and [turn["role"] for turn in plain["prompt"]] == ["user"]
    texts = "".join(part["text"] or "" for part in user["content"])
    assert texts.replace("view: \n", "") == plain["prompt"][0]["content"].replace("view: \n", "")


def test_the_held_out_split_is_that_of_our_own_validation(tmp_path):
    assert export_conversations(ROWS, tmp_path / "rows", held_out=0.4, seed=3) == {"train": 3, "test": 2}
    data = load_dataset(str(tmp_path / "rows"), cache_dir=str(tmp_path / "cache"))
    _, testing = split_rows(ROWS, 0.4, 3)
    assert [turns[0]["content"] for turns in data["test"]["completion"]] == [row.emission for row in testing]
    with pytest.raises(FileExistsError, match="choose another folder"):
        export_conversations(ROWS, tmp_path / "rows")
    with pytest.raises(ValueError, match="cannot be split"):
        export_conversations(ROWS[:1], tmp_path / "one", held_out=0.4)
    assert not (tmp_path / "one").exists()


def test_the_command_writes_what_rows_hold(tmp_path):
    save_rows(ROWS, tmp_path / "collect" / "rows")
    command = ["data", "export", str(tmp_path / "collect" / "rows"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and "{'train': 5}" in done.stdout, done.output
    data = load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))["train"]
    assert data[0]["prompt"][0]["role"] == "system" and data[0]["completion"][0]["content"] == ROWS[0].emission
