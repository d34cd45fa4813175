"""Steps of both worlds' recipes: the text curriculum, a stage, and the model folder.

Recipes of a world may share a work folder of stages, where a finished stage is loaded instead of trained again.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
import trl
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2ForCausalLM, set_seed

from zoo import stages
from zoo.curriculum import LEVELS, Batch, Kind, Level, TextCurriculum
from zoo.models import Lexicon, make_executor, save

RATE = 2e-3
TEXT: Mapping[str, tuple[float, tuple[Kind, ...]]] = {
    "copying": (RATE, ("copy", "recall")),
    "look_up": (RATE / 2, ("facts", "documents", "goals")),
}
"""Stages of the text curriculum, with their learning rate and kinds of documents."""
Draw = Callable[[random.Random], Batch]


def train_text(
    tokenizer: PreTrainedTokenizerFast,
    lexicon: Lexicon,
    work: Path,
    seed: int,
    levels: Sequence[Level] = LEVELS,
    steps: int = 6_000,
) -> Qwen2ForCausalLM:
    """Train a Qwen2 on the text curriculum: first copying, then look-up at half the rate.

    Raises:
        RuntimeError: a stage did not pass its levels in `steps` steps.
    """
    set_seed(seed)
    model: PreTrainedModel = make_executor(tokenizer)
    # With the usual 0.02 to 0.04, copying takes three times as long to form.
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.15)  # type: ignore[arg-type]
    for name, (rate, kinds) in TEXT.items():
        curriculum = TextCurriculum(tokenizer, lexicon, seed, [level for level in levels if level.kind in kinds])
        model = stages.train_on_answers(
            model,
            work / name,
            seed=seed,
            steps=steps,
            draw=curriculum.batch,
            exam=curriculum.exam,
            rate=rate,
            every=25,
            warmup=50,
            callbacks=[curriculum],
        )
    return model  # type: ignore[return-value]


def train_stage(
    model: PreTrainedModel,
    work: Path,
    name: str,
    seed: int,
    steps: int,
    draw: Draw,
    exam: Draw,
    rate: float,
    **options: Any,
) -> PreTrainedModel:
    """Train one stage in `work/name` on batches of `draw`, and log the accuracy on one batch of `exam`.

    Args:
        options: of `stages.train_on_answers`.
    """
    return stages.train_on_answers(
        model,
        work / name,
        seed=seed,
        steps=steps,
        draw=lambda step: draw(random.Random(f"{seed}/{name}/{step}")),
        exam=lambda _: exam(random.Random(seed)),
        rate=rate,
        every=50,
        **options,
    )


def write_model(
    recipe: str,
    out: Path,
    model: PreTrainedModel,
    processor: Any,
    work: Path,
    names: Sequence[str],
    settings: dict[str, Any],
) -> None:
    """Write the model folder and RECORD.json: settings, logs, versions and the hash of the weights."""
    save(out, model, processor)
    logs = {name: stages.read_log(work / name) for name in names}
    record = {
        "command": f"memcompiler zoo {recipe} --seed {settings['seed']} --threads {torch.get_num_threads()}",
        "settings": settings,
        "parameters": sum(p.numel() for p in model.parameters()),
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, trl, accelerate)},
        "threads": torch.get_num_threads(),
        "steps": {name: log[-1]["step"] for name, log in logs.items()},
        "cpu_seconds": sum(log[-1]["cpu_seconds"] for log in logs.values()),
        "sha256": {"model.safetensors": hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()},
        "log": logs,
    }
    (out / "RECORD.json").write_text(json.dumps(record, indent=1))
