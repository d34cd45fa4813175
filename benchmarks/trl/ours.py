"""Our side of `memcompiler bench trl`: steps of SftTrainer or GrpoTrainer without soft tokens in the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.prefixes import named_rows, sample
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
from compiler.build import load_compiler
from compiler.hf import MemoryCompiler
from configs.training import GrpoConfig, SftConfig
from envs.spec import ExecutorInstructions
from executor.build import load_frozen
from executor.hf import FrozenExecutor
from lm.prompt import Prompt
from training.grpo import GrpoTrainer
from training.sft import Example, SftTrainer

Step = Callable[[int], dict[str, float]]  # takes a step and returns its metrics


def run(task: Task, out: Path, wait: Wait, tell: Tell) -> None:
    """Take the task's steps, each after `wait`, and pass what each took to `tell`."""
    step, clock = (_sft if task.stage == "sft" else _grpo)(task, out), Clock()
    for number, batch in enumerate(task.batches):
        wait()
        clock.start()
        metrics = step(number)
        clock.stop()
        tell(clock.measured(metrics["loss"], metrics["grad_norm"], tokens_of(batch, behind=task.sizes.soft)))


def _settings(task: Task) -> dict[str, Any]:
    """Return what both stages are given."""
    optimizer = {"lr": RATE, "min_lr": RATE, "warmup": 0.0, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    lora = {"rank": RANK, "alpha": ALPHA, "dropout": 0.0, "targets": TARGETS}
    return {
        "compiler": {
            "model": task.model,
            "dtype": task.dtype,
            "lora": lora,
            "soft": {"n_tokens": task.sizes.soft, "emb_std": "auto"},
        },
        "executor": {"model": task.stand_in, "dtype": "float32"},
        "optimizer": {**optimizer, "grad_clip": CLIP},
        "micro_batch_size": task.sizes.micro,
        "gradient_checkpointing": task.checkpointing,
        "save_every": 10**6,
    }


def _models(config: SftConfig | GrpoConfig) -> tuple[MemoryCompiler, FrozenExecutor]:
    executor = load_frozen(config.executor, ExecutorInstructions(""))
    compiler = load_compiler(config.compiler, executor)
    fill_lora(compiler.policy)
    compiler.backbone.suppressed = []  # TRL scores the whole vocabulary
    return compiler, executor


def _example(row: Row) -> Example:
    return Example(
        prompt=Prompt(row.prompt),
        emission=row.completion,
        executor_prompt=Prompt(()),
        action=(),
        memory_ids=(),
        soft_read=False,
    )


def _sft(task: Task, out: Path) -> Step:
    """Load SFT's trainer. A batch is an episode of its own, in an order that is drawn again below."""
    size, steps = task.sizes.batch, task.sizes.steps
    config = SftConfig(
        **_settings(task),
        soft=False,
        label_smoothing=0.0,
        batch_size=size,
        max_steps=steps + 1,  # saves after the last
    )
    compiler, executor = _models(config)
    trainer = SftTrainer(config, compiler, executor=executor, rows=named_rows(steps, each=size), out=out)
    examples: list[Any] = [None] * (size * steps)
    for step, batch in enumerate(task.batches):
        for index, row in zip(trainer.batch_indices(step), batch, strict=True):
            examples[index] = _example(row)
    trainer.examples = examples  # pyright: ignore[reportAttributeAccessIssue]
    compiler.train()
    return lambda _: trainer.take_step()


def _grpo(task: Task, out: Path) -> Step:
    """Load GRPO's trainer with an engine that plays no episode."""
    config = GrpoConfig(
        **_settings(task),
        loss={"latent_weight": 0.0},  # pyright: ignore[reportArgumentType]
        sampling={"temperature": 1.0},  # pyright: ignore[reportArgumentType]
        updates=task.sizes.steps + 1,
    )
    compiler, executor = _models(config)
    engine: Any = SimpleNamespace(served=None, environment="")
    trainer = GrpoTrainer(config, compiler, executor=executor, engine=engine, specs=[engine], out=out)

    def step(number: int) -> dict[str, float]:
        rows = task.batches[number]
        samples = [replace(sample(_example(row), compiler, i), advantage=row.advantage) for i, row in enumerate(rows)]
        return trainer.learn(samples, number)

    return step
