"""Pretraining of the tiny models that the repository ships, on CPU, from nothing.

    memcompiler zoo compiler --out zoo/household/compiler
    memcompiler zoo executor --out zoo/household/executor

Both start with the same text curriculum (`curriculum.py`): copying, key-value recall, memory documents of growing
length, until look-up works. The compiler base then learns to answer questions about task memory and picture in the
compiler's own prompt format ("ask: where is the mug", "ask: emission"), as an instruction-tuned VLM would, and to
gather at the reserved memory tokens what a picture marks; to write emissions unasked, and to speak to an executor in
soft tokens, is left to SFT. The executor then clones a scripted executor on prompts
without memory, with all of M pasted, with right guidance and with wrong guidance. All scenes are of the split
`pretrain`; no other split shares a layout.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen2ForCausalLM

from agent.expert import location, taken
from agent.records import compile_request
from compiler.prompt import compiler_parts
from data_gen.rows import SftRow
from lm.backbone import Backbone
from lm.prompt import Part, Prompt
from training.losses import cosine_with_warmup
from zoo.household import curriculum, episodes
from zoo.household.models import as_llama, make_compiler, make_executor, make_processor, make_tokenizer, save

RATE = 2e-3
LOG_EVERY = 100


@dataclass
class Log:
    """Progress on the terminal and the record that ships with the model."""

    rows: list[dict[str, Any]]
    started: float

    def add(self, **row: Any) -> None:
        row["seconds"] = round(time.perf_counter() - self.started)
        self.rows.append(row)
        print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# Stage 1, both models: the text curriculum


def text_curriculum(
    model: torch.nn.Module, forward: Callable[[Tensor], Tensor], tokenizer: Any, seed: int, log: Log
) -> None:
    """Copying until 90 %, recall until 97 %, then memory documents with ever more filler until 99 % at 12 actions.

    The embedding table starts wide (std 0.15): with 1,600 tokens and tied embeddings the usual 0.02 to 0.04 leaves
    tokens so alike that copying takes three times as long to form (measured).
    """
    torch.nn.init.normal_(model.get_input_embeddings().weight, std=0.15)  # type: ignore[operator]
    vocabulary = curriculum.Vocabulary.of(tokenizer)
    rng, draw = np.random.default_rng(seed), random.Random(seed)
    optimizer = _adamw(model)
    stage, filler = "copy", 0

    def documents(batch: int, entries: int) -> tuple[Tensor, Tensor]:
        return curriculum.memory_documents(tokenizer, vocabulary, draw, batch, entries, filler)

    for step in range(1, 12_000):
        u = draw.random()
        if stage == "copy" or (stage == "recall" and u < 0.5) or (stage == "documents" and u < 0.1):
            batch = curriculum.repeated_segments(vocabulary, rng, 64)
        elif stage == "recall" or u < 0.2:
            batch = curriculum.key_value(vocabulary, rng, 64)
        else:
            batch = documents(32, draw.choice([2, 3, 4, 4, 5, 6]))
        loss = _train(model, optimizer, forward, batch, min(1.0, step / 50))
        if step % 50:
            continue
        copy = _accuracy(forward, curriculum.repeated_segments(vocabulary, rng, 64))
        recall = _accuracy(forward, curriculum.key_value(vocabulary, rng, 64, 12))
        lookup = _accuracy(forward, documents(64, 4))
        log.add(stage=stage, step=step, filler=filler, loss=loss, copy=copy, recall=recall, lookup=lookup)
        if stage == "copy" and copy > 0.9:
            stage = "recall"
        elif stage == "recall" and recall > 0.97:
            stage = "documents"
        elif stage == "documents" and lookup > 0.97:
            if filler >= 12 and lookup > 0.985:
                return
            filler = min(12, filler + 2)
    raise RuntimeError("the curriculum did not get through: look at the log, try another seed")


# ---------------------------------------------------------------------------------------------------------------------
# Stage 2 of the compiler base: questions about memory and picture, in the compiler's prompt


def conversation(
    row: SftRow, marked: str, rng: random.Random, emissions: bool
) -> tuple[list[Part], list[tuple[str, str]]]:
    """A compile request and three to five questions on it with their answers, in random order.

    where: the place that the right memory entry holds, of the goal's object or of any entry's; marked: what the
    picture marks; emission: the teacher's. Several questions per prompt make the signal dense.
    """
    facts = [fact for fact in map(_fact, row.memory_texts) if fact]
    asked = [(f"where in {scene} is the {thing}", location(scene, thing, place)) for scene, thing, place in facts]
    talk = rng.sample(asked, min(2, len(asked)))
    if goal := _goal_fact(row):
        talk.append((f"where is the {goal[1]}", location(*goal)))
    if row.image is not None and not any(a.startswith("take ") for a in row.history):
        talk.append(("what is marked", marked or "nothing"))
    if emissions:
        talk.append(("emission", row.emission))
    rng.shuffle(talk)
    return compiler_parts(compile_request(row.step_input())), talk


@dataclass(frozen=True)
class Lesson:
    """A conversation as token ids, with labels on the answers."""

    prompt: Prompt
    labels: tuple[int, ...]


def lesson(backbone: Backbone, row: SftRow, marked: str, rng: random.Random, emissions: bool) -> Lesson:
    parts, talk = conversation(row, marked, rng, emissions)
    ask, answer = talk[0]
    encoded = backbone.encode([*parts, Part(text=f"\nask: {ask}")])
    tokenize = lambda text: backbone.tokenizer(text, add_special_tokens=False)["input_ids"]
    ids, labels = list(encoded.ids), [curriculum.IGNORE] * len(encoded.ids)
    for i, (ask, answer) in enumerate(talk):
        turn = tokenize(f"\n<|im_start|>user\nask: {ask}<|im_end|>\n<|im_start|>assistant\n") if i else []
        said = [*tokenize(answer), backbone.end_id]
        ids, labels = ids + turn + said, labels + [curriculum.IGNORE] * len(turn) + said
    return Lesson(Prompt(tuple(ids), encoded.pixels, encoded.grid), tuple(labels))


def gathering(backbone: Backbone, row: SftRow, marked: str, rng: random.Random) -> Lesson:
    """What the reserved tokens are for: behind an emission they gather what the text does not say, the marked place.

    Each of 4 to 8 memory tokens has to predict the place that the picture marks, or " nothing". The emission itself is
    not learned here. SFT then has a direction to read; without this stage LoRA on q and v alone did not find the mark
    in a few hundred steps (measured: action loss 0.87 a token before and after).
    """
    tokenize = lambda text: backbone.tokenizer(text, add_special_tokens=False)["input_ids"]
    encoded = backbone.encode(compiler_parts(compile_request(row.step_input())))
    before = [*encoded.ids, *tokenize(row.emission), backbone.end_id]
    n = rng.randint(4, 8)
    target = tokenize(f" {marked if _shows_mark(row, marked) else 'nothing'}")
    labels = [curriculum.IGNORE] * (len(before) + 1) + target * n  # a memory token predicts at its own position
    return Lesson(Prompt((*before, *[backbone.memory_id] * n), encoded.pixels, encoded.grid), tuple(labels))


def _shows_mark(row: SftRow, marked: str) -> bool:
    return bool(marked) and not any(action.startswith("take ") for action in row.history)


def lesson_loss(backbone: Backbone, lessons: Sequence[Lesson]) -> tuple[Tensor, float]:
    """Mean NLL of the answers' tokens, and the share of them that is predicted."""
    batch = backbone.pad([x.prompt for x in lessons], "right")
    hidden = backbone.hidden(batch)
    row = torch.tensor([i for i, x in enumerate(lessons) for t in x.labels if t != curriculum.IGNORE])
    at = torch.tensor([t for x in lessons for t, y in enumerate(x.labels) if y != curriculum.IGNORE])
    target = torch.tensor([y for x in lessons for y in x.labels if y != curriculum.IGNORE])
    logits = backbone.logits(hidden[row, at - 1])
    return torch.nn.functional.cross_entropy(logits, target), (logits.argmax(-1) == target).float().mean().item()


def _fact(text: str) -> tuple[str, str, str] | None:
    """(scene, thing, place) of an entry's last line."""
    words = text.rsplit("because in ", 1)[-1].split(" the ", 1)
    if len(words) < 2 or " was in " not in words[1]:
        return None
    thing, place = words[1].split(" was in ", 1)
    return words[0], thing, place


def _goal_fact(row: SftRow) -> tuple[str, str, str] | None:
    """(scene, thing, place) of the entry that fits the goal."""
    scene, goal = row.goal.removeprefix("in ").split(": ", 1)
    facts = [fact for fact in map(_fact, row.memory_texts) if fact]
    return next((fact for fact in facts if fact[0] == scene and fact[1] in goal.split()), None)


def _adamw(model: torch.nn.Module, rate: float = RATE) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.05)


def _train(
    model: torch.nn.Module, optimizer: torch.optim.AdamW, forward: Callable[[Tensor], Tensor],
    batch: tuple[Tensor, Tensor], factor: float,
) -> float:  # fmt: skip
    tokens, labels = batch
    for group in optimizer.param_groups:
        group["lr"] = RATE * factor
    logits = forward(tokens[:, :-1])
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=curriculum.IGNORE
    )
    _update(model, optimizer, loss)
    return loss.item()


def _update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@torch.no_grad()
def _accuracy(forward: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> float:
    tokens, labels = batch
    known = labels[:, 1:] != curriculum.IGNORE
    return (forward(tokens[:, :-1]).argmax(-1) == labels[:, 1:])[known].float().mean().item()


Situation = tuple[SftRow, str]  # a teacher's row, and what its picture marks


def train_lessons(
    backbone: Backbone, situations: Sequence[Situation], held_out: Sequence[Situation], steps: int, batch: int,
    seed: int, log: Log, emissions: bool,
) -> None:  # fmt: skip
    """`steps` updates over random situations, each with fresh questions; warm-up and cosine."""
    draw = random.Random(seed)
    optimizer = _adamw(backbone.model, RATE / 2)
    exam = [lesson(backbone, row, marked, draw, emissions) for row, marked in held_out]
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = RATE / 2 * cosine_with_warmup(step, steps, 0.02, floor=0.02)
        lessons = [lesson(backbone, row, marked, draw, emissions) for row, marked in draw.sample(situations, batch)]
        loss, accuracy = lesson_loss(backbone, lessons)
        _update(backbone.model, optimizer, loss)
        if step % LOG_EVERY == 0:
            with torch.no_grad():
                _, held = lesson_loss(backbone, exam)
            log.add(stage="lessons", step=step, loss=loss.item(), answers=accuracy, held_out_answers=held)


def train_gathering(
    backbone: Backbone, situations: Sequence[Situation], steps: int, batch: int, seed: int, log: Log
) -> None:
    """Two thirds gathering (mostly of marked views), one third of the earlier lessons, so that nothing is forgotten."""
    draw = random.Random(seed)
    optimizer = _adamw(backbone.model, RATE / 2)
    shown = [s for s in situations if _shows_mark(*s)]
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = RATE / 2 * cosine_with_warmup(step, steps, 0.05, floor=0.02)
        gathered = [*draw.sample(shown, batch // 2), *draw.sample(situations, batch // 6)]
        lessons = [gathering(backbone, row, marked, draw) for row, marked in gathered]
        lessons += [lesson(backbone, row, m, draw, True) for row, m in draw.sample(situations, batch - len(lessons))]
        loss, accuracy = lesson_loss(backbone, lessons)
        _update(backbone.model, optimizer, loss)
        if step % (LOG_EVERY // 4) == 0:
            with torch.no_grad():
                exam = [gathering(backbone, row, marked, draw) for row, marked in draw.sample(shown, batch)]
                _, marks = lesson_loss(backbone, exam)
            log.add(stage="gathering", step=step, loss=loss.item(), answers=accuracy, marks=marks)


def household_situations(scenes: int, seed: int) -> list[Situation]:
    """What a compiler meets in teacher episodes in `scenes` pretraining scenes."""
    rng = random.Random(seed)
    env = episodes.make_env(scenes, seed)
    pool = episodes.EntryPool.collect(env, env.tasks(f"{episodes.SPLIT}_experience"))
    specs = episodes.specs(env, env.tasks(episodes.SPLIT), pool, rng)
    marked = {spec.task.id: _marked(env, spec.task) for spec in specs}
    rows = episodes.teacher_rows(env, specs, seed)
    return [(row, marked[row.task_id]) for row in rows]


def _marked(env: Any, task: Any) -> str:
    """What the picture marks: in the visual family the place of the goal's object, else nothing."""
    if task.family != "visual":
        return ""
    env.reset(task)
    fact = taken(env.expert() or [])
    return fact[1] if fact else ""


def start_from_text(target: torch.nn.Module, text_model: torch.nn.Module) -> None:
    """Copy a Qwen2 decoder into a Qwen2.5-VL's language model: for text the same function."""
    weights = {k.removeprefix("model."): v for k, v in text_model.state_dict().items() if k.startswith("model.")}
    target.model.language_model.load_state_dict(weights)  # type: ignore[union-attr]


def text_base(seed: int, log: Log) -> tuple[Any, Qwen2ForCausalLM]:
    """Tokenizer, and a Qwen2 that has been through the text curriculum."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    model = make_executor(tokenizer)

    def forward(tokens: Tensor) -> Tensor:
        return model.lm_head(model.model(input_ids=tokens, use_cache=False).last_hidden_state)

    text_curriculum(model, forward, tokenizer, seed, log)
    return tokenizer, model


def pretrain_compiler(
    out: Path, seed: int = 0, scenes: int = 300, steps: tuple[int, int, int] = (700, 400, 160), batch: int = 24
) -> None:
    """Text curriculum, then questions, then questions among which is "ask: emission" (a base that, like a large
    instruction-tuned one, can write the language when asked; writing it unasked, from the state, is SFT's part), then
    gathering at the memory tokens (what they gather reaches an executor only through SFT's projector)."""
    log = Log([], time.perf_counter())
    tokenizer, text_model = text_base(seed, log)
    model = make_compiler(tokenizer)
    start_from_text(model, text_model)
    backbone = Backbone(model, make_processor(tokenizer))
    situations = household_situations(scenes, seed)
    held_out = random.Random(seed).sample(household_situations(12, seed + 1), 64)
    train_lessons(backbone, situations, held_out, steps[0], batch, seed, log, emissions=False)
    train_lessons(backbone, situations, held_out, steps[1], batch, seed + 1, log, emissions=True)
    train_gathering(backbone, situations, steps[2], batch, seed + 2, log)
    finish(
        out,
        model,
        tokenizer,
        make_processor(tokenizer),
        log,
        {"seed": seed, "scenes": scenes, "steps": steps, "batch": batch},
    )


# ---------------------------------------------------------------------------------------------------------------------
# Stage 2 of the executor: cloning a scripted executor


def executor_material(scenes: int, seed: int) -> list[episodes.ExecutorExample]:
    """Examples under all kinds of prompts, in equal shares of episodes."""
    rng = random.Random(seed)
    env = episodes.make_env(scenes, seed)
    pool = episodes.EntryPool.collect(env, env.tasks(f"{episodes.SPLIT}_experience"))
    specs = episodes.specs(env, env.tasks(episodes.SPLIT), pool, rng)
    rng.shuffle(specs)
    shares = {mode: specs[i :: len(episodes.MODES)] for i, mode in enumerate(episodes.MODES)}
    return [x for mode, mine in shares.items() for x in episodes.executor_examples(env, mine, mode, seed)]


def clone(
    model: torch.nn.Module, tokenizer: Any, examples: Sequence[episodes.ExecutorExample], steps: int, batch: int,
    seed: int, log: Log,
) -> None:  # fmt: skip
    """Behaviour cloning: NLL of the action's tokens. Batches hold prompts of similar length, to waste no padding."""
    encoded = [_encode_example(tokenizer, example) for example in examples]
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i][0]))
    buckets = [order[i : i + batch] for i in range(0, len(order) - batch + 1, batch)]
    draw, optimizer = random.Random(seed), _adamw(model, RATE / 2)
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = RATE / 2 * cosine_with_warmup(step, steps, 0.02, floor=0.02)
        loss, accuracy = _clone_loss(model, tokenizer, [encoded[i] for i in draw.choice(buckets)])
        _update(model, optimizer, loss)
        if step % LOG_EVERY == 0:
            log.add(stage="clone", step=step, loss=loss.item(), actions=accuracy)


def _encode_example(tokenizer: Any, example: episodes.ExecutorExample) -> tuple[list[int], int]:
    """(ids of prompt and action, where the action begins)."""
    chat = [{"role": "user", "content": example.prompt}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    action = [*tokenizer(example.action, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return prompt + action, len(prompt)


def _clone_loss(model: Any, tokenizer: Any, rows: Sequence[tuple[list[int], int]]) -> tuple[Tensor, float]:
    tokens = curriculum.pad([ids for ids, _ in rows], tokenizer.pad_token_id)
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    row = torch.tensor([i for i, (ids, start) in enumerate(rows) for _ in range(start, len(ids))])
    at = torch.tensor([t for ids, start in rows for t in range(start, len(ids))])
    target = tokens[row, at]
    logits = model.lm_head(hidden[row, at - 1])
    return torch.nn.functional.cross_entropy(logits, target), (logits.argmax(-1) == target).float().mean().item()


def pretrain_executor(out: Path, seed: int = 0, scenes: int = 800, steps: int = 2400, batch: int = 48) -> None:
    log = Log([], time.perf_counter())
    tokenizer, model = text_base(seed, log)
    clone(model, tokenizer, executor_material(scenes, seed), steps, batch, seed, log)
    finish(out, as_llama(model), tokenizer, None, log, {"seed": seed, "scenes": scenes, "steps": steps, "batch": batch})


def finish(out: Path, model: Any, tokenizer: Any, processor: Any, log: Log, settings: dict[str, Any]) -> None:
    """Model folder and RECORD.json: settings, log, versions and the hash of the weights."""
    import transformers

    save(out, model, tokenizer, processor)
    record = {
        "command": f"memcompiler zoo {'compiler' if processor else 'executor'} --out {out.name}",
        "settings": settings, "parameters": sum(p.numel() for p in model.parameters()),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "threads": torch.get_num_threads(), "seconds": round(time.perf_counter() - log.started),
        "sha256": {"model.safetensors": hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()},
        "log": log.rows,
    }  # fmt: skip
    (out / "RECORD.json").write_text(json.dumps(record, indent=1))
