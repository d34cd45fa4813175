"""A stage of a recipe: batches, drawn one after another by a function of the step, under `transformers.Trainer`.

A stage leaves a model folder and its log; a stage that was interrupted goes on from its last checkpoint, and one that
is finished is read. With the same seed and the same number of threads a stage gives the same weights, interrupted or
not.
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

from zoo.curriculum import IGNORE, Batch


class Batches(Dataset):
    """Batches as a dataset: item i is the whole batch of step i + 1."""

    def __init__(self, steps: int, draw: Callable[[int], Batch]) -> None:
        self.steps, self.draw = steps, draw

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, i: int) -> Batch:
        return self.draw(i + 1)


class AnswerLoss:
    """A trainer's loss that gives the output head only the positions with a label: one in fifty, where memory is long.

    Batches are padded on the right, so the causal mask is the only one needed. Where a batch has `given` (B, G), padded
    on the left by `given_mask`, that is read once, and an equal part of the sequences goes on from each row of it.
    """

    bf16 = False  # matrices are multiplied in bfloat16

    def compute_loss(self, model: Any, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None):
        """Mean NLL of the labelled tokens; as outputs, which of them are predicted. Where several tokens serve equally
        well, the batch lists them: `equals` (labelled tokens in their order, alternatives), padded with IGNORE."""
        apart = ("labels", "attention_mask", "equals", "given", "given_mask")
        sequence: dict[str, Any] = {name: value for name, value in inputs.items() if name not in apart}
        labels = inputs["labels"][:, 1:]
        asked = labels != IGNORE
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            begun = _begun(model, inputs) if "given" in inputs else {"use_cache": False}
            hidden = model.model(**sequence, **begun).last_hidden_state[:, :-1]
            logits = model.lm_head(hidden[asked])
        logits, target = logits.float(), labels[asked]
        if "equals" not in inputs:
            loss = torch.nn.functional.cross_entropy(logits, target)
            return (loss, {"right": logits.argmax(-1) == target}) if return_outputs else loss
        equals = inputs["equals"]
        real = equals != IGNORE
        logprobs = logits.log_softmax(-1).gather(1, equals.clamp(min=0)).masked_fill(~real, -torch.inf)
        loss = -logprobs.logsumexp(1).mean()
        return (loss, {"right": (logits.argmax(-1)[:, None] == equals).any(1)}) if return_outputs else loss


def _begun(model: Any, inputs: Batch) -> dict[str, Any]:
    """Read what sequences go on from, and return it as the arguments of what goes on."""
    mask, (rows, length) = inputs["given_mask"], inputs["input_ids"].shape
    each = rows // len(mask)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    read = model.model(input_ids=inputs["given"], attention_mask=mask, position_ids=places, use_cache=True)
    cache = read.past_key_values
    cache.batch_repeat_interleave(each)
    known = mask.repeat_interleave(each, 0)
    return {
        "past_key_values": cache,
        "attention_mask": torch.cat([known, known.new_ones(rows, length)], 1),
        "position_ids": known.sum(1, keepdim=True) + torch.arange(length),
    }


class AnswerTrainer(AnswerLoss, Trainer):  # type: ignore[misc]
    """Trains on batches as they are drawn."""


class CloningTrainer(AnswerLoss, SFTTrainer):  # type: ignore[misc]
    """Trains on prompts and completions. (Without a GPU TRL's own loss scores every position: half as fast again.)"""


class Stopwatch(TrainerCallback):
    """Notes in each row of the log how much processor time the stage has taken, earlier runs of it included."""

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        earlier = state.log_history[-1]["cpu_seconds"] if state.log_history else 0
        self.started = time.process_time() - earlier

    def on_log(self, args, state, control, **kwargs) -> None:
        state.log_history[-1]["cpu_seconds"] = round(time.process_time() - self.started)


def arguments(folder: Path, seed: int, steps: int, rate: float, every: int, warmup: float) -> dict[str, Any]:
    """Say what all stages have in common; a share of `warmup` under 1 brings a cosine down to a fiftieth with it."""
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
        "use_cache": True,  # what the config of the model that is saved says; losses here ask for none
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
    paces: Mapping[str, Tensor] | None = None,
) -> PreTrainedModel:
    """Train on the batches that `draw(step)` gives, with the accuracy on `exam(1)` in the log; the trained model.
    `paces`: by parameter name, the part of the rate at which some weights learn (what broadcasts to them)."""
    settings = TrainingArguments(
        **arguments(folder, seed, steps, rate, every, warmup),
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
        callbacks=[Stopwatch(), *callbacks],
        optimizers=(_paced(model, settings, paces) if paces else None, None),
    )
    trainer.bf16 = bf16
    return run(trainer, folder)


class PacedAdamW(torch.optim.AdamW):
    """AdamW by which some weights go a part of each step: `paces`, by parameter, what broadcasts to it."""

    def __init__(self, *args: Any, paces: Mapping[torch.nn.Parameter, Tensor], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._paces = paces

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        before = {weight: weight.clone() for weight in self._paces}
        loss = super().step(closure)
        for weight, pace in self._paces.items():
            weight.copy_(before[weight] + (weight - before[weight]) * pace)
        return loss


def _paced(model: PreTrainedModel, settings: TrainingArguments, paces: Mapping[str, Tensor]) -> PacedAdamW:
    """Make the trainer's own optimizer, but for its paces: matrices alone decay."""
    named = dict(model.named_parameters())
    groups = [
        {"params": [w for w in named.values() if w.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [w for w in named.values() if w.ndim == 1], "weight_decay": 0.0},
    ]
    return PacedAdamW(
        groups,
        lr=settings.learning_rate,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_epsilon,
        paces={named[name]: pace for name, pace in paces.items()},
    )


def accuracy(outcome: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float(outcome.predictions.mean())}  # type: ignore[union-attr]


def run(trainer: Trainer, folder: Path) -> PreTrainedModel:
    """Train from the last checkpoint, if there is one, to the end; the trained model, which lies in `folder` too."""
    if finished(folder):
        return type(trainer.model).from_pretrained(folder)  # type: ignore[union-attr]
    last = get_last_checkpoint(str(folder)) if folder.exists() else None
    if last and _ended(last):  # killed between its last checkpoint and its end: one more step would be another model
        trainer.model = type(trainer.model).from_pretrained(last)  # type: ignore[union-attr]
        trainer.state = TrainerState.load_from_json(f"{last}/{TRAINER_STATE_NAME}")
    else:
        trainer.train(resume_from_checkpoint=last)
    trainer.save_state()
    trainer.save_model(str(folder))
    return trainer.model  # type: ignore[return-value]


def finished(folder: Path) -> bool:
    """Tell whether a stage is through: its model lies in the folder itself, not in a checkpoint's."""
    return (folder / "model.safetensors").exists()


def _ended(checkpoint: str) -> bool:
    """Tell whether a callback let training stop at a checkpoint, before the last of its steps."""
    state = json.loads(Path(checkpoint, TRAINER_STATE_NAME).read_text())
    stopped = state["stateful_callbacks"]["TrainerControl"]["args"]["should_training_stop"]
    return stopped and state["global_step"] < state["max_steps"]


def log_of(folder: Path) -> list[dict[str, float]]:
    """Read the log of a stage, row by row."""
    return json.loads((folder / TRAINER_STATE_NAME).read_text())["log_history"]
