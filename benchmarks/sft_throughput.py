"""SFT's tokens per second and memory, by what it is asked to do, beside plain `transformers.Trainer` on the same rows.

    python -m benchmarks.sft_throughput ROWS [--model DIR] [--steps 5] [--batch 4] [--micro 2] [--way text ...]

ROWS: a folder of `memcompiler collect`. DIR, a text model, is compiler and executor (N = 16). Plain is a causal LM of
transformers with the same LoRA by PEFT, which learns the emission behind the prompt and knows nothing of soft tokens:
`text` does the same work. Steps of all ways alternate, on the same rows (but for `like lengths`, which chooses others),
so that whatever else the machine does falls on all; medians are compared. Tokens are those of prompts and labels that a
way's models read; memory is what torch's allocator gives out at most in one step more, beside what stays.
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

from benchmarks.plan_check import peak, staying
from compiler.build import load_compiler
from configs.load import load_config
from configs.models import model_path
from configs.training import SftConfig
from data_gen.rows import SftRow, load_rows
from envs.household.environment import INSTRUCTIONS
from envs.spec import Told
from eval.table import markdown_table
from executor.build import load_frozen
from runtime.progress import quiet
from training.sft import SftTrainer
from training.sft_data import Example
from zoo.curriculum import IGNORE, pad

PLAIN, TEXT = "plain Trainer", "text"
WAYS = {  # name: settings of SFT
    TEXT: ["soft=false"],
    "text and soft": [],
    "layers computed again": ["gradient_checkpointing=true"],
    "eager attention": ["compiler.attention=eager", "executor.attention=eager"],
    "bfloat16": ["compiler.dtype=bfloat16", "executor.dtype=bfloat16"],
    "like lengths": ["length_buckets=50"],
}
MIB = 2**20


class Ours:
    """A trainer of ours."""

    def __init__(self, config: SftConfig, rows: Sequence[SftRow], out: Path) -> None:
        executor = load_frozen(config.executor, Told(INSTRUCTIONS))
        self.config, self.trainer = (
            config,
            SftTrainer(config, load_compiler(config.compiler, executor), executor, rows, out),
        )
        self.trainer.compiler.train()
        self._models = [self.trainer.compiler, *([executor.model] if config.soft else [])]

    def step(self) -> float:
        """Take a step; returns its seconds."""
        return self.trainer.take_step()["seconds"]

    @property
    def coming(self) -> list[Example]:
        """Give the rows of the coming step."""
        return [self.trainer.examples[i] for i in self.trainer.batch_indices(self.trainer.step)]

    @property
    def tokens(self) -> int:
        """Count what the coming step reads."""
        return tokens(self.coming, self.config.soft)

    @property
    def stays(self) -> int:
        return staying(self._models, self.trainer.backend.optimizer)


class Clock(TrainerCallback):
    """Times a trainer's step."""

    seconds = 0.0

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.seconds = time.perf_counter() - self._began


class Plain:
    """`transformers.Trainer` on what a trainer of ours is about to learn."""

    def __init__(self, ours: Ours, out: Path) -> None:
        self._ours, self._out, self._clock = ours, out, Clock()
        lora, model = ours.config.compiler.lora, model_path(ours.config.compiler.model)
        adapter = LoraConfig(
            r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=list(lora.targets)
        )
        self._model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), adapter)

    def step(self) -> float:
        """Take a step; returns its seconds."""
        config, rows = self._ours.config, [_row(example) for example in self._ours.coming]
        micro = config.micro_batch_size
        settings = TrainingArguments(
            str(self._out),
            max_steps=1,
            per_device_train_batch_size=micro,
            use_cpu=True,
            report_to="none",
            gradient_accumulation_steps=len(rows) // micro,
            learning_rate=config.optimizer.lr,
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            train_sampling_strategy="sequential",
        )
        empty = {"input_ids": self._ours.trainer.compiler.backbone.pad_id, "attention_mask": 0, "labels": IGNORE}
        padded = lambda rows: {name: pad([row[name] for row in rows], value) for name, value in empty.items()}
        self._trainer = Trainer(self._model, settings, padded, rows, callbacks=[self._clock])  # type: ignore[arg-type]
        self._trainer.train()
        return self._clock.seconds

    @property
    def tokens(self) -> int:
        return tokens(self._ours.coming, soft=False)

    @property
    def stays(self) -> int:
        optimizer: Any = self._trainer.optimizer
        return staying([self._model], optimizer.optimizer)


def _row(example: Example) -> dict[str, list[int]]:
    prompt, emission = list(example.prompt.ids), list(example.emission)
    ids = prompt + emission
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [IGNORE] * len(prompt) + emission}


def tokens(examples: Sequence[Example], soft: bool) -> int:
    """Count what is read of these, without the memory tokens behind them."""
    read = [(e.executor_prompt.ids, e.action) for e in examples if soft and e.soft_read]
    return sum(len(ids) for e in examples for ids in (e.prompt.ids, e.emission)) + sum(len(i) for p in read for i in p)


def main(
    rows: Path,
    model: Annotated[str, typer.Option(help="of both parts")] = "zoo/alfworld/compiler",
    steps: int = 5,
    batch: int = 4,
    micro: int = 2,
    way: Annotated[list[str] | None, typer.Option(help=f"of: {', '.join(WAYS)}")] = None,
) -> None:
    quiet()
    played = load_rows(rows)
    common = [
        f"batch_size={batch}",
        f"micro_batch_size={micro}",
        "save_every=100000",
        "max_steps=100000",
        f"compiler.model={model}",
        f"executor.model={model}",
        "compiler.soft.n_tokens=16",
    ]
    with tempfile.TemporaryDirectory() as name:
        folder, running = Path(name), dict[str, Any]()
        for each in dict.fromkeys([TEXT, *(way or WAYS)]):
            config = load_config(SftConfig, "sft/quickstart", [*common, *WAYS[each]])
            running[each] = Ours(config, played, folder / each)
        running = {PLAIN: Plain(running[TEXT], folder / PLAIN), **running}
        rates: dict[str, list[float]] = {each: [] for each in running}
        for step in range(steps + 1):
            for each, trainer in running.items():
                read = trainer.tokens
                seconds = trainer.step()
                rates[each] += [read / seconds] * (step > 0)  # the first one warms up
        table = []
        for each, trainer in running.items():
            most = (peak(trainer.step) + trainer.stays) / MIB
            table.append([each, f"{statistics.median(rates[each]):.0f}", f"{most:.0f}"])
    print(*markdown_table(["way", "tokens/s", "MiB at most"], table), sep="\n")
    ratios = [a / b for a, b in zip(rates[TEXT], rates[PLAIN], strict=True)]
    print(f"\n{len(ratios)} steps of {batch} rows; ratio by step from {min(ratios):.2f} to {max(ratios):.2f}")
    print(f"ratio of {TEXT} to {PLAIN}: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    typer.run(main)
