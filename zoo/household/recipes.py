"""The recipes of the tiny models that the repository ships: from nothing, on CPU, with one thread.

    memcompiler zoo compiler --out zoo/household/compiler
    memcompiler zoo executor --out zoo/household/executor

Both start with the same text curriculum (`zoo/curriculum.py`): copying, key-value recall, facts told with ever more
words, memory documents of growing length, until look-up works. The compiler base then learns to answer questions about
task memory and pictures in the compiler's own prompt format, as an instruction-tuned VLM would, and to gather at
reserved memory tokens what a picture shows (`lessons.py`); to write emissions unasked, and to speak to an executor in
soft tokens, is left to SFT. The executor clones a scripted executor (`episodes.py`) under `trl.SFTTrainer`, on prompts
without memory, with all of M pasted, with right guidance and with wrong guidance. All scenes are of the split
`pretrain`; no other split shares a layout.

Stages lie in a work folder, which both recipes may share: what is finished there is not made again.
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
from zoo.recipes import RATE, TEXT, finish, train_text

COMPILER = (*TEXT, "marks", "questions", "emissions", "gathering")


def train_compiler(
    out: Path,
    work: Path,
    seed: int = 0,
    scenes: int = 300,
    steps: tuple[int, int, int, int] = (600, 400, 450, 160),
    batch: int = 24,
    levels: Sequence[Level] = LEVELS,
) -> None:
    """Make the compiler base: text curriculum, marks in pictures, questions, then also questions about M's pictures and
    "ask: emission" (a base that, like a large instruction-tuned one, can write the language when asked), then gathering
    at the memory tokens (what they gather reaches an executor only through SFT's projector)."""
    settings = {"seed": seed, "scenes": scenes, "steps": steps, "batch": batch}
    tokenizer = make_tokenizer(LEXICON)
    processor = make_processor(tokenizer)
    text_model = train_text(tokenizer, LEXICON, work, seed, levels)
    set_seed(seed)
    model: Any = make_compiler(tokenizer)
    model.model.language_model.load_state_dict(text_model.model.state_dict())  # for text the same function
    backbone = Backbone(model, processor)
    views = steps[0] // 3  # in so many steps nothing but views is asked for
    model = stages.train_on_answers(
        model,
        work / "marks",
        seed,
        steps[0],
        lambda step: pictures.picture_batch(
            backbone, random.Random(f"{seed}/marks/{step}"), 3 * batch if step <= views else batch, step <= views
        ),
        lambda _: pictures.picture_batch(backbone, random.Random(seed), 64, views=False),
        RATE / 2,
        50,
    )
    situations = episodes.situations(scenes, seed)
    held_out = episodes.situations(max(4, scenes // 25), seed + 1)
    stage = partial(_compiler_stage, processor, seed=seed, batch=batch, work=work)
    model = stage(situations, held_out, model, "questions", lessons.question_batch, steps=steps[1])
    situations = episodes.situations(scenes // 2, seed, pictures=1)
    held_out = episodes.situations(max(4, scenes // 25), seed + 1, pictures=1)
    asked_for_emissions = partial(lessons.question_batch, emissions=True)
    model = stage(situations, held_out, model, "emissions", asked_for_emissions, steps=steps[2])
    model = stage(situations, held_out, model, "gathering", lessons.gathering_batch, steps=steps[3])
    finish("compiler", out, model, processor, work, COMPILER, settings)


def _compiler_stage(
    processor: Any,
    situations: Sequence[lessons.Situation],
    held_out: Sequence[lessons.Situation],
    model: Any,
    name: str,
    draw: Callable[..., stages.Batch],
    *,
    seed: int,
    batch: int,
    work: Path,
    steps: int,
) -> Any:
    backbone = Backbone(model, processor)
    return stages.train_on_answers(
        model,
        work / name,
        seed,
        steps,
        lambda step: draw(backbone, situations, random.Random(f"{seed}/{name}/{step}"), batch),
        lambda _: draw(backbone, held_out, random.Random(seed), 64),
        RATE / 2,
        50,
    )


def train_executor(
    out: Path,
    work: Path,
    seed: int = 0,
    scenes: int = 800,
    steps: int = 2400,
    batch: int = 48,
    levels: Sequence[Level] = LEVELS,
) -> None:
    """Make the executor: text curriculum, then behaviour cloning on prompts and actions, in batches of like length."""
    tokenizer = make_tokenizer(LEXICON)
    model = train_text(tokenizer, LEXICON, work, seed, levels)
    config = SFTConfig(
        **stages.arguments(work / "clone", seed, steps, RATE / 2, 50, 0.02),
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
        callbacks=[stages.Stopwatch()],
    )
    model = stages.run(trainer, work / "clone")
    settings = {"seed": seed, "scenes": scenes, "steps": steps, "batch": batch}
    finish("executor", out, as_llama(model), tokenizer, work, (*TEXT, "clone"), settings)  # type: ignore[arg-type]


def _prompt_and_completion(tokenizer: PreTrainedTokenizerFast, example: episodes.ExecutorExample) -> dict[str, str]:
    """Give both as text, so that the completion ends with the end of turn and not with the newline behind it."""
    chat = [{"role": "user", "content": example.prompt}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    return {"prompt": prompt, "completion": f"{example.action}{tokenizer.eos_token}"}  # type: ignore[dict-item]
