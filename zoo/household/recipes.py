"""The recipes of the tiny models that the repository ships: from nothing, on CPU, with one thread.

    memcompiler zoo compiler --out zoo/household/compiler
    memcompiler zoo executor --out zoo/household/executor

Both start with the same text curriculum (`curriculum.py`): copying, key-value recall, facts told with ever more words,
memory documents of growing length, until look-up works. The compiler base then learns to answer questions about task
memory and pictures in the compiler's own prompt format, as an instruction-tuned VLM would, and to gather at reserved
memory tokens what a picture shows (`lessons.py`); to write emissions unasked, and to speak to an executor in soft
tokens, is left to SFT. The executor clones a scripted executor (`episodes.py`) under `trl.SFTTrainer`, on prompts
without memory, with all of M pasted, with right guidance and with wrong guidance. All scenes are of the split
`pretrain`; no other split shares a layout.

Stages lie in a work folder, which both recipes may share: what is finished there is not made again.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
import trl
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2ForCausalLM, set_seed
from trl.trainer.sft_config import SFTConfig

from lm.backbone import Backbone
from zoo.household import episodes, lessons, stages
from zoo.household.curriculum import LEVELS, Level, TextCurriculum
from zoo.household.models import as_llama, make_compiler, make_executor, make_processor, make_tokenizer, save

RATE = 2e-3
TEXT = ("copying", "look_up")  # the stages that both recipes share
COMPILER = (*TEXT, "questions", "emissions", "pictures", "gathering")


def train_text(
    tokenizer: PreTrainedTokenizerFast, work: Path, seed: int, levels: Sequence[Level] = LEVELS, steps: int = 6_000
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
    for name, kinds, rate in ((TEXT[0], ("copy", "recall"), RATE), (TEXT[1], ("facts", "documents"), RATE / 2)):
        curriculum = TextCurriculum(tokenizer, seed, [level for level in levels if level.kind in kinds])
        model = stages.train_on_answers(
            model, work / name, seed, steps, curriculum.batch, curriculum.exam, rate, 25, warmup=50,
            callbacks=[curriculum],
        )  # fmt: skip
    return model  # type: ignore[return-value]


def train_compiler(
    out: Path, work: Path, seed: int = 0, scenes: int = 300, steps: tuple[int, int, int, int] = (700, 400, 400, 160),
    batch: int = 24, levels: Sequence[Level] = LEVELS,
) -> None:  # fmt: skip
    """Make the compiler base: text curriculum, questions, questions among which is "ask: emission" (a base that, like a
    large instruction-tuned one, can write the language when asked), the same with pictures in memory, then gathering at
    the memory tokens (what they gather reaches an executor only through SFT's projector)."""
    settings = {"seed": seed, "scenes": scenes, "steps": steps, "batch": batch}
    tokenizer = make_tokenizer()
    processor = make_processor(tokenizer)
    text_model = train_text(tokenizer, work, seed, levels)
    set_seed(seed)
    model: Any = make_compiler(tokenizer)
    model.model.language_model.load_state_dict(text_model.model.state_dict())  # for text the same function
    situations = episodes.situations(scenes, seed)
    held_out = episodes.situations(max(4, scenes // 25), seed + 1)
    stage = partial(_compiler_stage, processor, seed=seed, batch=batch, work=work)
    asked_for_emissions = partial(lessons.question_batch, emissions=True)
    model = stage(situations, held_out, model, "questions", lessons.question_batch, steps=steps[0])
    model = stage(situations, held_out, model, "emissions", asked_for_emissions, steps=steps[1])
    situations = episodes.situations(scenes // 2, seed, pictures=1)
    held_out = episodes.situations(max(4, scenes // 25), seed + 1, pictures=1)
    model = stage(situations, held_out, model, "pictures", asked_for_emissions, steps=steps[2])
    model = stage(situations, held_out, model, "gathering", lessons.gathering_batch, steps=steps[3])
    finish("compiler", out, model, processor, work, COMPILER, settings)


def _compiler_stage(
    processor: Any, situations: Sequence[lessons.Situation], held_out: Sequence[lessons.Situation],
    model: Any, name: str, draw: Callable[..., stages.Batch], *, seed: int, batch: int, work: Path, steps: int,
) -> Any:  # fmt: skip
    backbone = Backbone(model, processor)
    return stages.train_on_answers(
        model, work / name, seed, steps,
        lambda step: draw(backbone, situations, random.Random(f"{seed}/{name}/{step}"), batch),
        lambda _: draw(backbone, held_out, random.Random(seed), 64),
        RATE / 2, 50,
    )  # fmt: skip


def train_executor(
    out: Path, work: Path, seed: int = 0, scenes: int = 800, steps: int = 2400, batch: int = 48,
    levels: Sequence[Level] = LEVELS,
) -> None:  # fmt: skip
    """Make the executor: text curriculum, then behaviour cloning on prompts and actions, in batches of like length."""
    tokenizer = make_tokenizer()
    model = train_text(tokenizer, work, seed, levels)
    config = SFTConfig(
        **stages.arguments(work / "clone", seed, steps, RATE / 2, 50, 0.02), per_device_train_batch_size=batch,
        train_sampling_strategy="group_by_length", max_length=None, completion_only_loss=True, bf16=False,
        gradient_checkpointing=False,
    )  # fmt: skip
    examples = [_prompt_and_completion(tokenizer, example) for example in episodes.executor_examples(scenes, seed)]
    trainer = stages.CloningTrainer(
        model, config, train_dataset=Dataset.from_list(examples), processing_class=tokenizer,
        callbacks=[stages.Stopwatch()],
    )  # fmt: skip
    model = stages.run(trainer, work / "clone")
    settings = {"seed": seed, "scenes": scenes, "steps": steps, "batch": batch}
    finish("executor", out, as_llama(model), tokenizer, work, (*TEXT, "clone"), settings)  # type: ignore[arg-type]


def _prompt_and_completion(tokenizer: PreTrainedTokenizerFast, example: episodes.ExecutorExample) -> dict[str, str]:
    """Give both as text, so that the completion ends with the end of turn and not with the newline behind it."""
    chat = [{"role": "user", "content": example.prompt}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return {"prompt": prompt, "completion": f"{example.action}{tokenizer.eos_token}"}  # type: ignore[dict-item]


def finish(
    recipe: str, out: Path, model: PreTrainedModel, processor: Any, work: Path, names: Sequence[str],
    settings: dict[str, Any],
) -> None:  # fmt: skip
    """Write the model folder and RECORD.json: settings, log, versions and the hash of the weights."""
    save(out, model, processor)
    logs = {name: stages.log_of(work / name) for name in names}
    record = {
        "command": f"memcompiler zoo {recipe} --seed {settings['seed']}",
        "settings": settings, "parameters": sum(p.numel() for p in model.parameters()),
        "versions": {m.__name__: m.__version__ for m in (torch, transformers, trl, accelerate)},
        "threads": torch.get_num_threads(), "steps": {name: log[-1]["step"] for name, log in logs.items()},
        "cpu_seconds": sum(log[-1]["cpu_seconds"] for log in logs.values()),
        "sha256": {"model.safetensors": hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()},
        "log": logs,
    }  # fmt: skip
    (out / "RECORD.json").write_text(json.dumps(record, indent=1))
