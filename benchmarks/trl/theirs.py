"""TRL's side of `memcompiler bench trl`: steps of SFTTrainer or GRPOTrainer inside their own loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import PrinterCallback, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer
from trl.trainer.utils import pad

from benchmarks.trl.task import (
    ALPHA,
    BETAS,
    CLIP,
    DECAY,
    EPS,
    RANK,
    RATE,
    TARGETS,
    Clock,
    Row,
    Task,
    Tell,
    Wait,
    fill_lora,
    tokens_of,
)
from zoo.curriculum import IGNORE


def run(task: Task, out: Path, wait: Wait, tell: Tell) -> None:
    """Take the task's steps, each after `wait`, and pass what each took to `tell`."""
    trainer = (_sft if task.stage == "sft" else _grpo)(task, out)
    assert trainer.model is not None
    fill_lora(trainer.model)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Turns(task, wait, tell))
    trainer.train()


class Turns(TrainerCallback):
    """Waits before every step, and tells what it took: from its first micro-batch to AdamW's update."""

    def __init__(self, task: Task, wait: Wait, tell: Tell) -> None:
        self._batches, self._wait, self._tell = iter(task.batches), wait, tell
        self._clock = Clock()

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self._wait()
        self._clock.start()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self._clock.stop()

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if logs and "grad_norm" in logs:  # of a step; the last log is a summary
            self._tell(self._clock.measured(logs["loss"], float(logs["grad_norm"]), tokens_of(next(self._batches))))


def _settings(task: Task, out: Path) -> dict[str, Any]:
    """Return the arguments of both trainers; what is absent has TRL's default."""
    return {
        "output_dir": str(out),
        "max_steps": task.sizes.steps,
        "per_device_train_batch_size": task.sizes.micro,
        "gradient_accumulation_steps": task.sizes.batch // task.sizes.micro,
        "gradient_checkpointing": task.checkpointing,
        "model_init_kwargs": {"dtype": task.dtype},
        "bf16": False,  # weights have the data type; no autocast, as ours
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "adam_epsilon": EPS,
        "weight_decay": DECAY,
        "max_grad_norm": CLIP,
        "use_cpu": not torch.cuda.is_available(),
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def _lora() -> LoraConfig:
    return LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=list(TARGETS), task_type="CAUSAL_LM")


def _sft(task: Task, out: Path) -> SFTTrainer:
    arguments = SFTConfig(**_settings(task, out), max_length=None, train_sampling_strategy="sequential")
    rows = [row for batch in task.batches for row in batch]
    labels = [[IGNORE] * len(row.prompt) + list(row.completion) for row in rows]
    data = Dataset.from_dict({"input_ids": [[*row.prompt, *row.completion] for row in rows], "labels": labels})
    return SFTTrainer(task.model, args=arguments, train_dataset=data, peft_config=_lora())


class GivenCompletions(GRPOTrainer):
    """GRPOTrainer whose completions and advantages are given: the prompt of a row is the number of its batch."""

    batches: Sequence[Sequence[Row]]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        rows, device = self.batches[int(inputs[0]["prompt"])], self.accelerator.device
        blank: Any = self._tokenizer.pad_token_id
        given = {}
        for name, side, texts in (
            ("prompt", "left", [torch.tensor(row.prompt) for row in rows]),
            ("completion", "right", [torch.tensor(row.completion) for row in rows]),
        ):
            given[f"{name}_ids"] = pad(texts, padding_value=blank, padding_side=side)
            given[f"{name}_mask"] = pad([torch.ones_like(ids) for ids in texts], padding_value=0, padding_side=side)
        given["advantages"] = torch.tensor([row.advantage for row in rows])
        given["num_items_in_batch"] = given["completion_mask"].sum()
        return {name: tensor.to(device) for name, tensor in given.items()}


def _grpo(task: Task, out: Path) -> GRPOTrainer:
    arguments = GRPOConfig(
        **_settings(task, out),
        num_generations=task.sizes.batch,
        shuffle_dataset=False,
        epsilon=0.2,
        epsilon_high=0.28,
    )
    trainer = GivenCompletions(
        model=task.model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),  # never called
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": [str(number) for number in range(task.sizes.steps)]}),
        peft_config=_lora(),
    )
    trainer.batches = task.batches
    return trainer
