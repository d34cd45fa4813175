"""Training stage of a recipe under `transformers.Trainer`; a batch is a function of the step.

A stage writes a model folder with its log. An interrupted stage resumes from its last checkpoint; a finished one is
loaded. Equal seeds and numbers of threads give equal weights, with or without interruptions.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import EvalPrediction, get_last_checkpoint
from trl.trainer.sft_trainer import SFTTrainer

from lm.attention import SHARED
from lm.graph_cache import GraphCache
from zoo.curriculum import IGNORE, Batch


class Batches(Dataset):
    """A dataset of batches: item i is the whole batch of step i + 1."""

    def __init__(self, steps: int, draw: Callable[[int], Batch]) -> None:
        self.steps, self.draw = steps, draw

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, i: int) -> Batch:
        return self.draw(i + 1)


class AnswerLoss:
    """Trainer mixin that computes logits only at labelled positions, about one in fifty.

    Batches are padded on the right, so the causal mask suffices. `given` (E, G) holds prefixes that the
    model reads once, of `given_lengths` (E,) tokens; `behind` (E,) of the sequences continue each, in order.
    """

    bf16 = False  # multiply matrices in bfloat16

    def compute_loss(self, model: Any, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None):
        """Compute the mean NLL of labelled tokens, and as outputs whether each is predicted. `equals` (labelled tokens,
        alternatives), padded with IGNORE, lists equally right tokens."""
        other_inputs = ("labels", "attention_mask", "equals", "given", "given_lengths", "behind")
        sequence: dict[str, Any] = {name: value for name, value in inputs.items() if name not in other_inputs}
        labels = inputs["labels"][:, 1:]
        labelled = labels != IGNORE
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            prefix = _read_given(model, inputs) if "given" in inputs else {"use_cache": False}
            hidden = model.model(**sequence, **prefix).last_hidden_state[:, :-1]
            logits = model.lm_head(hidden[labelled])
        logits, target = logits.float(), labels[labelled]
        if "equals" not in inputs:
            loss = torch.nn.functional.cross_entropy(logits, target)
            return (loss, {"right": logits.argmax(-1) == target}) if return_outputs else loss
        equals = inputs["equals"]
        real = equals != IGNORE
        logprobs = logits.log_softmax(-1).gather(1, equals.clamp(min=0)).masked_fill(~real, -torch.inf)
        loss = -logprobs.logsumexp(1).mean()
        return (loss, {"right": (logits.argmax(-1)[:, None] == equals).any(1)}) if return_outputs else loss


def _read_given(model: Any, inputs: Batch) -> dict[str, Any]:
    """Read the shared prefixes and return the forward arguments of their continuations."""
    lengths, behind = inputs["given_lengths"], inputs["behind"]
    cache = GraphCache.empty(model.config)
    model.model(input_ids=inputs["given"], past_key_values=cache)
    groups = [rows.tolist() for rows in torch.arange(int(behind.sum())).split(behind.tolist())]
    return {
        "past_key_values": cache.beside(groups, lengths.tolist()),
        "position_ids": lengths.repeat_interleave(behind)[:, None] + torch.arange(inputs["input_ids"].shape[1]),
    }


class AnswerTrainer(AnswerLoss, Trainer):  # type: ignore[misc]
    """Trainer of batches in their order."""


class CloningTrainer(AnswerLoss, SFTTrainer):  # type: ignore[misc]
    """Trainer of prompts and completions, 1.5 times as fast on CPU as with TRL's loss at every position."""


class CpuTimer(TrainerCallback):
    """Callback that logs the stage's processor time in seconds, with that of earlier runs."""

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        earlier = state.log_history[-1]["cpu_seconds"] if state.log_history else 0
        self.started = time.process_time() - earlier

    def on_log(self, args, state, control, **kwargs) -> None:
        state.log_history[-1]["cpu_seconds"] = round(time.process_time() - self.started)


def training_arguments(folder: Path, seed: int, steps: int, rate: float, every: int, warmup: float) -> dict[str, Any]:
    """Return the arguments of all stages; with a `warmup` share below 1, a cosine falls to a fiftieth of the rate."""
    cosine = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.02}}
    return {
        "output_dir": str(folder),
        "seed": seed,
        "max_steps": steps,
        "learning_rate": rate,
        "warmup_steps": warmup,
        "adam_beta2": 0.95,
        "weight_decay": 0.05,
        "logging_steps": every,
        "save_steps": every,
        "save_total_limit": 2,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
        "use_cache": True,  # for the saved model's config; losses here use none
        **(cosine if warmup < 1 else {"lr_scheduler_type": "constant_with_warmup"}),
    }


def train_on_answers(
    model: PreTrainedModel,
    folder: Path,
    seed: int,
    steps: int,
    draw: Callable[[int], Batch],
    exam: Callable[[int], Batch],
    rate: float,
    every: int,
    warmup: float = 0.02,
    callbacks: Sequence[TrainerCallback] = (),
    bf16: bool = False,
    learning_rate_scales: Mapping[str, Tensor] | None = None,
) -> PreTrainedModel:
    """Train on the batches `draw(step)`, and log the accuracy on `exam(1)`; return the trained model.

    Args:
        rate: peak learning rate.
        every: steps between logs, exams and checkpoints.
        warmup: steps or, below 1, a share of them, after which a cosine schedule follows.
        bf16: multiply matrices in bfloat16.
        learning_rate_scales: factors of the rate by parameter name; broadcast to the weight.
    """
    settings = TrainingArguments(
        **training_arguments(folder, seed, steps=steps, rate=rate, every=every, warmup=warmup),
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        eval_strategy="steps",
        eval_steps=every,
    )
    trainer = AnswerTrainer(
        model,
        settings,
        data_collator=lambda rows: rows[0],
        train_dataset=Batches(steps, draw),
        eval_dataset=Batches(1, exam),
        compute_metrics=accuracy,
        callbacks=[CpuTimer(), *callbacks],
        optimizers=(_scaled_optimizer(model, settings, learning_rate_scales) if learning_rate_scales else None, None),
    )
    trainer.bf16 = bf16
    model.set_attn_implementation(SHARED)
    return run_stage(trainer, folder)


class ScaledAdamW(torch.optim.AdamW):
    """AdamW that scales the steps of some weights by `scales`, which broadcast to the weights."""

    def __init__(self, *args: Any, scales: Mapping[torch.nn.Parameter, Tensor], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._scales = scales

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        before = {weight: weight.clone() for weight in self._scales}
        loss = super().step(closure)
        for weight, scale in self._scales.items():
            weight.copy_(before[weight] + (weight - before[weight]) * scale)
        return loss


def _scaled_optimizer(model: PreTrainedModel, settings: TrainingArguments, scales: Mapping[str, Tensor]) -> ScaledAdamW:
    """Create the trainer's default optimizer, with weight decay for matrices only, and scaled steps."""
    named = dict(model.named_parameters())
    groups = [
        {"params": [w for w in named.values() if w.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [w for w in named.values() if w.ndim == 1], "weight_decay": 0.0},
    ]
    return ScaledAdamW(
        groups,
        lr=settings.learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_epsilon,
        scales={named[name]: scale for name, scale in scales.items()},
    )


def accuracy(outcome: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float(outcome.predictions.mean())}  # type: ignore[union-attr]


def run_stage(trainer: Trainer, folder: Path) -> PreTrainedModel:
    """Train to the end, from the last checkpoint if there is one, and save the model in `folder`."""
    if finished(folder):
        return type(trainer.model).from_pretrained(folder)  # type: ignore[union-attr]
    last = get_last_checkpoint(str(folder)) if folder.exists() else None
    if last and _ended(last):  # a further step would change the model
        trainer.model = type(trainer.model).from_pretrained(last)  # type: ignore[union-attr]
        trainer.state = TrainerState.load_from_json(f"{last}/{TRAINER_STATE_NAME}")
    else:
        trainer.train(resume_from_checkpoint=last)
    trainer.save_state()
    trainer.save_model(str(folder))
    return trainer.model  # type: ignore[return-value]


def finished(folder: Path) -> bool:
    """Return whether the folder holds a stage's final model."""
    return (folder / "model.safetensors").exists()


def _ended(checkpoint: str) -> bool:
    """Return whether a callback stopped training at a checkpoint before the last step."""
    state = json.loads(Path(checkpoint, TRAINER_STATE_NAME).read_text())
    stopped = state["stateful_callbacks"]["TrainerControl"]["args"]["should_training_stop"]
    return stopped and state["global_step"] < state["max_steps"]


def read_log(folder: Path) -> list[dict[str, float]]:
    """Read the log of a stage."""
    return json.loads((folder / TRAINER_STATE_NAME).read_text())["log_history"]
