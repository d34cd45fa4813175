"""What the recipes of all worlds share: the text curriculum that each begins with, and the folder that each ends with.

Stages lie in a work folder, which the recipes of a world may share: what is finished there is not made again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
import trl
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2ForCausalLM, set_seed

from zoo import stages
from zoo.curriculum import LEVELS, Kind, Level, TextCurriculum
from zoo.models import Lexicon, make_executor, save

RATE = 2e-3
COPYING, LOOK_UP = "copying", "look_up"
Stages = Mapping[str, tuple[float, tuple[Kind, ...]]]
TEXT: Stages = {
    COPYING: (RATE, ("copy", "recall")),
    LOOK_UP: (RATE / 2, ("facts", "documents", "goals")),
}
"""The stages of text by name: the rate of each, and the kinds of documents that are learned."""


def train_text(
    tokenizer: PreTrainedTokenizerFast,
    lexicon: Lexicon,
    work: Path,
    seed: int,
    levels: Sequence[Level] = LEVELS,
    steps: int = 6_000,
    text: Stages = TEXT,
) -> Qwen2ForCausalLM:
    """Make a Qwen2 that has been through the text curriculum: it copies, then at half the rate it looks up.

    The embedding table starts wide (std 0.15): with 1,600 tokens and tied embeddings the usual 0.02 to 0.04 leaves
    tokens so alike that copying takes three times as long to form (measured).

    Raises:
        RuntimeError: a stage did not get through in `steps`.
    """
    set_seed(seed)
    model: PreTrainedModel = make_executor(tokenizer)
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.15)  # type: ignore[arg-type]
    for name, (rate, kinds) in text.items():
        curriculum = TextCurriculum(tokenizer, lexicon, seed, [level for level in levels if level.kind in kinds])
        model = through(model, work / name, curriculum, rate, steps)
    return model  # type: ignore[return-value]


def through(
    model: PreTrainedModel, folder: Path, curriculum: TextCurriculum, rate: float, steps: int = 6_000
) -> PreTrainedModel:
    """Train until the last of a curriculum's exams is passed. Raises: RuntimeError, as `train_text`."""
    return stages.train_on_answers(
        model,
        folder,
        curriculum.seed,
        steps,
        curriculum.batch,
        curriculum.exam,
        rate,
        25,
        warmup=50,
        callbacks=[curriculum],
    )


def finish(
    recipe: str,
    out: Path,
    model: PreTrainedModel,
    processor: Any,
    work: Path,
    names: Sequence[str],
    settings: dict[str, Any],
) -> None:
    """Write the model folder and RECORD.json: settings, log, versions and the hash of the weights."""
    save(out, model, processor)
    logs = {name: stages.log_of(work / name) for name in names}
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
