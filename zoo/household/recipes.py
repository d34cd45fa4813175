"""Recipes of the small models of generated homes: trained from scratch on CPU, with one thread.

    memcompiler zoo compiler --out zoo/household/compiler
    memcompiler zoo executor --out zoo/household/executor

Both start with the text curriculum (`zoo/curriculum.py`). The compiler base then learns to answer questions about
memory and pictures after the compiler's prompt, and to gather the content of pictures at memory tokens (`lessons.py`);
SFT teaches emissions without a question, and soft tokens. The executor clones a scripted executor (`episodes.py`) on
prompts without memory, with all of M pasted, with right guidance and with wrong guidance.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerFast, set_seed
from trl.trainer.sft_config import SFTConfig

from lm.backbone import Backbone
from zoo import stages
from zoo.curriculum import LEVELS, Level
from zoo.household import episodes, lessons, pictures
from zoo.household.words import LEXICON
from zoo.models import as_llama, make_compiler, make_processor, make_tokenizer
from zoo.recipes import RATE, TEXT, train_stage, train_text, write_model

COMPILER_STAGES = (*TEXT, "marks", "questions", "emissions", "gathering")


def train_compiler(
    out: Path,
    work: Path,
    seed: int = 0,
    scenes: int = 300,
    steps: tuple[int, int, int, int] = (600, 400, 450, 160),
    batch: int = 24,
    levels: Sequence[Level] = LEVELS,
) -> None:
    """Train the compiler base.

    Stages: text curriculum; marks in pictures; questions; questions about M's pictures and the emission; gathering.

    Args:
        scenes: pretraining scenes of the third stage; later stages use half.
        steps: steps of the four stages after the text curriculum.
    """
    settings = {"seed": seed, "scenes": scenes, "steps": steps, "batch": batch}
    tokenizer = make_tokenizer(LEXICON)
    processor = make_processor(tokenizer)
    text_model = train_text(tokenizer, LEXICON, work=work, seed=seed, levels=levels)
    set_seed(seed)
    model: Any = make_compiler(tokenizer)
    model.model.language_model.load_state_dict(text_model.model.state_dict())  # the same function of text
    backbone = Backbone(model, processor)
    view_steps = steps[0] // 3  # the first steps ask about views only
    model = stages.train_on_answers(
        model,
        work / "marks",
        seed=seed,
        steps=steps[0],
        draw=lambda step: pictures.picture_batch(
            backbone,
            random.Random(f"{seed}/marks/{step}"),
            3 * batch if step <= view_steps else batch,
            views=step <= view_steps,
        ),
        exam=lambda _: pictures.picture_batch(backbone, random.Random(seed), 64, views=False),
        rate=RATE / 2,
        every=50,
    )

    def stage(name: str, steps: int, make_batch: Callable[..., stages.Batch], learned: Any, held_out: Any) -> Any:
        backbone = Backbone(model, processor)
        draw, exam = (
            lambda rng, of=of, size=size: make_batch(backbone, of, rng, size)
            for of, size in ((learned, batch), (held_out, 64))
        )
        return train_stage(model, work, name=name, seed=seed, steps=steps, draw=draw, exam=exam, rate=RATE / 2)

    few = max(4, scenes // 25)
    examples, held_out = episodes.compiler_examples(scenes, seed), episodes.compiler_examples(few, seed + 1)
    model = stage("questions", steps[1], make_batch=lessons.question_batch, learned=examples, held_out=held_out)
    examples, held_out = (
        episodes.compiler_examples(number, seed + i, pictures=1) for i, number in enumerate((scenes // 2, few))
    )
    model = stage(
        "emissions",
        steps[2],
        make_batch=partial(lessons.question_batch, emissions=True),
        learned=examples,
        held_out=held_out,
    )
    model = stage("gathering", steps[3], make_batch=lessons.gathering_batch, learned=examples, held_out=held_out)
    write_model("compiler", out, model=model, processor=processor, work=work, names=COMPILER_STAGES, settings=settings)


def train_executor(
    out: Path,
    work: Path,
    seed: int = 0,
    scenes: int = 800,
    steps: int = 2400,
    batch: int = 48,
    levels: Sequence[Level] = LEVELS,
) -> None:
    """Train the executor: text curriculum, then behaviour cloning in batches of prompts of similar length."""
    tokenizer = make_tokenizer(LEXICON)
    model = train_text(tokenizer, LEXICON, work=work, seed=seed, levels=levels)
    config = SFTConfig(
        **stages.training_arguments(work / "clone", seed, steps, RATE / 2, every=50, warmup=0.02),
        per_device_train_batch_size=batch,
        train_sampling_strategy="group_by_length",
        max_length=None,
        completion_only_loss=True,
        bf16=False,
        gradient_checkpointing=False,
    )
    examples = [_prompt_and_completion(tokenizer, example) for example in episodes.executor_examples(scenes, seed)]
    trainer = stages.CloningTrainer(
        model,
        config,
        train_dataset=Dataset.from_list(examples),
        processing_class=tokenizer,
        callbacks=[stages.CpuTimer()],
    )
    model: Any = stages.run_stage(trainer, work / "clone")
    settings = {"seed": seed, "scenes": scenes, "steps": steps, "batch": batch}
    write_model(
        "executor",
        out,
        model=as_llama(model),
        processor=tokenizer,
        work=work,
        names=(*TEXT, "clone"),
        settings=settings,
    )


def _prompt_and_completion(tokenizer: PreTrainedTokenizerFast, example: episodes.ExecutorExample) -> dict[str, str]:
    """Return both as text, so that the completion ends with the end of turn, without the newline after it."""
    chat = [{"role": "user", "content": example.prompt}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return {"prompt": prompt, "completion": f"{example.action}{tokenizer.eos_token}"}  # type: ignore[dict-item]
