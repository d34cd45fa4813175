"""Measure SFT's tokens/s and memory, by setting, beside `transformers.Trainer` on the same rows.

    memcompiler bench training ROWS [--model DIR] [--steps 5] [--batch 4] [--micro 2] [--variant "text only" ...]

ROWS is a folder of `memcompiler collect`; DIR is a text model that serves as compiler and executor (N = 16). The
baseline is a causal LM with the same LoRA by PEFT, trained on the emission alone: `text only` does the same work.
Variants alternate step by step on the same rows (`length buckets` draws its own), so that other load on the machine
affects all of them; medians are compared. Memory is the peak of allocations in one step plus weights and moments.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from benchmarks.measurement import peak_bytes, resident_bytes
from compiler.build import load_compiler
from configs.load import load_config
from configs.models import model_path
from configs.training import SftConfig
from data_gen.rows import SftRow, load_rows
from envs.household.environment import INSTRUCTIONS
from envs.spec import ExecutorInstructions
from eval.table import markdown_table
from executor.build import load_frozen
from runtime.progress import disable_library_progress_bars
from training.sft import Example, SftTrainer
from zoo.curriculum import IGNORE, pad

app = typer.Typer()
BASELINE, TEXT_ONLY = "transformers.Trainer", "text only"
VARIANTS = {  # name: settings of SFT
    TEXT_ONLY: ["soft=false"],
    "text and soft tokens": [],
    "gradient checkpointing": ["gradient_checkpointing=true"],
    "eager attention": ["compiler.attention=eager", "executor.attention=eager"],
    "bfloat16": ["compiler.dtype=bfloat16", "executor.dtype=bfloat16"],
    "length buckets": ["length_buckets=50"],
}
MIB = 2**20


class SftStep:
    """Our trainer, one step at a time."""

    def __init__(self, config: SftConfig, rows: Sequence[SftRow], out: Path) -> None:
        executor = load_frozen(config.executor, ExecutorInstructions(INSTRUCTIONS))
        self.config = config
        self.trainer = SftTrainer(
            config, load_compiler(config.compiler, executor), executor=executor, rows=rows, out=out
        )
        self.trainer.compiler.train()
        self._models = [self.trainer.compiler, *([executor.model] if config.soft else [])]

    def step(self) -> float:
        """Take a step and return its seconds."""
        return self.trainer.take_step()["seconds"]

    def next_examples(self) -> list[Example]:
        return [self.trainer.examples[i] for i in self.trainer.batch_indices(self.trainer.step)]

    def next_tokens(self) -> int:
        return count_tokens(self.next_examples(), self.config.soft)

    def resident_bytes(self) -> int:
        return resident_bytes(self._models, self.trainer.backend.optimizer)


class StepTimer(TrainerCallback):
    """Record the seconds of a trainer's last step."""

    seconds = 0.0

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.seconds = time.perf_counter() - self._started


class BaselineStep:
    """`transformers.Trainer` on the examples that one of our trainers reads next."""

    def __init__(self, ours: SftStep, out: Path) -> None:
        self._ours, self._out, self._timer = ours, out, StepTimer()
        lora, model = ours.config.compiler.lora, model_path(ours.config.compiler.model)
        adapter = LoraConfig(
            r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=list(lora.targets)
        )
        self._model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), adapter)

    def step(self) -> float:
        """Take a step and return its seconds."""
        config, rows = self._ours.config, [_labelled(example) for example in self._ours.next_examples()]
        settings = TrainingArguments(
            str(self._out),
            max_steps=1,
            per_device_train_batch_size=config.micro_batch_size,
            gradient_accumulation_steps=len(rows) // config.micro_batch_size,
            learning_rate=config.optimizer.lr,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            train_sampling_strategy="sequential",
        )
        empty = {"input_ids": self._ours.trainer.compiler.backbone.pad_id, "attention_mask": 0, "labels": IGNORE}
        padded = lambda rows: {name: pad([row[name] for row in rows], value) for name, value in empty.items()}
        self._trainer = Trainer(self._model, settings, padded, rows, callbacks=[self._timer])  # type: ignore[arg-type]
        self._trainer.train()
        return self._timer.seconds

    def next_tokens(self) -> int:
        return count_tokens(self._ours.next_examples(), soft=False)

    def resident_bytes(self) -> int:
        optimizer: Any = self._trainer.optimizer
        return resident_bytes([self._model], optimizer.optimizer)


def _labelled(example: Example) -> dict[str, list[int]]:
    prompt, emission = list(example.prompt.ids), list(example.emission)
    ids = prompt + emission
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [IGNORE] * len(prompt) + emission}


def count_tokens(examples: Sequence[Example], soft: bool) -> int:
    """Count the tokens of prompts and labels, memory tokens excluded."""
    compiled = sum(len(e.prompt.ids) + len(e.emission) for e in examples)
    return compiled + sum(len(e.executor_prompt.ids) + len(e.action) for e in examples if soft and e.soft_read)


@app.command()
def sft(
    rows: Annotated[Path, typer.Argument(help="Rows of `memcompiler collect`.")],
    model: Annotated[str, typer.Option(help="Text model of compiler and executor.")] = "zoo/alfworld/compiler",
    steps: Annotated[int, typer.Option(min=1, help="Timed steps.")] = 5,
    batch: Annotated[int, typer.Option(min=1, help="Rows per step.")] = 4,
    micro: Annotated[int, typer.Option(min=1, help="Rows per micro-batch.")] = 2,
    variant: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(VARIANTS)}; repeatable.")] = None,
) -> None:
    """Compare SFT's tokens/s and peak memory with `transformers.Trainer` on the same rows."""
    disable_library_progress_bars()
    common = [f"batch_size={batch}", f"micro_batch_size={micro}", "save_every=100000", "max_steps=100000"]
    common += [f"compiler.model={model}", f"executor.model={model}", "compiler.soft.n_tokens=16"]
    data = load_rows(rows)
    with tempfile.TemporaryDirectory() as folder:
        ours = {
            name: SftStep(
                load_config(SftConfig, "sft/quickstart", [*common, *VARIANTS[name]]), data, Path(folder, name)
            )
            for name in dict.fromkeys([TEXT_ONLY, *(variant or VARIANTS)])
        }
        trainers = {BASELINE: BaselineStep(ours[TEXT_ONLY], Path(folder, "baseline")), **ours}
        rates: dict[str, list[float]] = {name: [] for name in trainers}
        for step in range(steps + 1):
            for name, trainer in trainers.items():
                tokens, seconds = trainer.next_tokens(), trainer.step()
                rates[name] += [tokens / seconds] * (step > 0)  # the first step warms up
        table = [
            [
                name,
                f"{statistics.median(rates[name]):.0f}",
                f"{peak_bytes(t.step) / MIB + t.resident_bytes() / MIB:.0f}",
            ]
            for name, t in trainers.items()
        ]
    typer.echo("\n".join(markdown_table(["variant", "tokens/s", "peak MiB"], table)))
    ratios = [a / b for a, b in zip(rates[TEXT_ONLY], rates[BASELINE], strict=True)]
    typer.echo(f"\n{len(ratios)} steps of {batch} rows; ratio by step from {min(ratios):.2f} to {max(ratios):.2f}")
    typer.echo(f"ratio of {TEXT_ONLY} to {BASELINE}: {statistics.median(ratios):.2f}")
