"""Data of SFT: rows of all collections, checked, split, and encoded as token ids in batches."""

from __future__ import annotations

import functools
import io
import random
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from agent.records import compile_request, executor_request
from compiler.hf import MemoryCompiler
from compiler.language import parse
from compiler.prompt import compiler_parts, instructions_of, pictures_of
from configs.training import SftConfig
from data_gen.dataset import compiler_text
from data_gen.leakage import check_rows, rows_by_environment
from data_gen.rows import (
    SftRow,
    SftRowDataset,
    continues,
    row_folders,
    split_row_indices,
    without_brief_state,
    without_memory_and_text,
)
from executor.hf import FrozenExecutor
from executor.prompt import executor_chat
from lm.prompt import Prompt, PromptEncoder, PromptPart
from runtime.store import read_json
from training import distributed

MAX_CACHED_VALUES = 2**28  # of encoded rows in a trainer's cache (1 GiB in fp32)
LOADER_TIMEOUT_S = 600  # for a worker to encode a batch
PICTURE = 1000  # length of a picture in characters, some 250 tokens
MAX_SHOWN = 5  # bad rows in an error message
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, OSError, SyntaxError)  # Pillow raises SyntaxError


@dataclass
class SftData:
    """Rows of all collections, and the indices of the training and validation rows.

    Attributes:
        tasks: Task id of every row.
        leaks: Problems that `allow_leakage` ignores.
    """

    folders: list[Path]
    parts: list[SftRowDataset]
    leaks: list[str] = field(default_factory=list)
    training: list[int] = field(default_factory=list)
    validation: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = ConcatDataset[SftRow](self.parts)
        self.tasks = [task for part in self.parts for task in part.tasks]

    @classmethod
    def load(cls, config: SftConfig) -> SftData:
        """Open the rows, check them for leakage, and hold out whole tasks. Raises: ConfigError."""
        folders = row_folders(config.rows)
        by_name = rows_by_environment(folders)
        environment = {folder: name for name, some in by_name.items() for folder in some}
        edits = [functools.partial(_edited, environment[folder], config) for folder in folders]
        data = cls(folders, [SftRowDataset(folder, edit) for folder, edit in zip(folders, edits, strict=True)])
        for folder, part in zip(folders, data.parts, strict=True):
            data.leaks += check_rows(folder, part.tasks, config.allow_leakage)
        named = [environment[folder] for folder, part in zip(folders, data.parts, strict=True) for _ in part.tasks]
        for name in by_name:  # whole tasks of each environment
            rows = [i for i, of in enumerate(named) if of == name]
            parts = split_row_indices([data.tasks[i] for i in rows], config.validation.share, config.seed)
            training, validation = ([rows[i] for i in part] for part in parts)
            data.training, data.validation = sorted(data.training + training), sorted(data.validation + validation)
        return data

    def validation_tasks(self) -> dict[Path, set[str]]:
        """Return the held-out tasks by their collection's folder."""
        held: dict[Path, set[str]] = {}
        validation, start = set(self.validation), 0
        for folder, part in zip(self.folders, self.parts, strict=True):
            held[folder] = {task for i, task in enumerate(part.tasks, start) if i in validation}
            start += len(part)
        return held

    def bank_versions(self) -> dict[str, Any]:
        """Return the bank version of the collection; of several collections a list, in order."""
        records = [folder.parent / "collect.json" for folder in self.folders]
        versions = [read_json(path)["bank_version"] if path.exists() else None for path in records]
        if len(versions) > 1:
            return {"bank_versions": versions}
        return {"bank_version": versions[0]} if versions[0] is not None else {}


def memory_systems(folders: Sequence[Path]) -> dict[str, list[str]]:
    """Return the memory systems whose entries the rows show, for a checkpoint's state; of rows that record none,
    nothing."""
    records = [read_json(path) for folder in folders if (path := folder.parent / "collect.json").exists()]
    systems = dict.fromkeys(record["memory_system"] for record in records if "memory_system" in record)
    return {"memory_systems": list(systems)} if systems else {}


def _edited(environment: str, config: SftConfig, row: SftRow) -> SftRow:
    named = replace(row, environment=environment)
    if not config.text:
        return without_memory_and_text(named)
    return named if config.brief_state else without_brief_state(named)


# -- examples and batches ----------------------------------------------------------------------------------------------


class Rows(Protocol):
    """Rows by index, such as a list or rows on disk."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> SftRow: ...


@dataclass(frozen=True, slots=True)
class Example:
    """A row as token ids: compiler prompt -> emission, executor prompt (with N placeholders) -> action."""

    prompt: Prompt
    emission: tuple[int, ...]
    executor_prompt: Prompt
    action: tuple[int, ...]
    memory_ids: tuple[int, ...]  # the memory's text, in the executor's tokens
    soft_read: bool  # whether the executor reads soft tokens at this step; if not, only L_text has the row
    memory_pictures: Prompt | None = None  # for an executor that reads pictures

    @property
    def size(self) -> int:
        """Count values in memory: pixels, and 8 for each token."""
        prompts = [p for p in (self.prompt, self.executor_prompt, self.memory_pictures) if p is not None]
        tokens = sum(len(ids) for ids in (self.emission, self.action, self.memory_ids, *(p.ids for p in prompts)))
        return 8 * tokens + sum(picture.values for prompt in prompts for picture in prompt.pictures)


def encode_row(row: SftRow, compiler: MemoryCompiler, executor: FrozenExecutor, soft: bool) -> Example:
    """Encode a row for both models; with `soft`, the executor's prompt has placeholders for the soft tokens."""
    step = row.step_input(compiler.n_tokens if soft else 0)
    request = executor_request(step, executor)
    pictures = pictures_of(step.memory) if executor.sees_images else []
    return Example(
        prompt=compiler.encode(compile_request(step)),
        emission=compiler.emission_ids(row.emission) if compiler.writes_text else (),
        executor_prompt=replace(executor.encode(request), soft=None),
        action=executor.action_ids(row.action),
        memory_ids=executor.encoder.ids(row.memory_text),
        soft_read=request.delivered.n_soft > 0,
        memory_pictures=executor.encoder.pictures(pictures) if pictures else None,
    )


class EncodedRows:
    """Encodes rows on demand, and caches them up to `MAX_CACHED_VALUES`. Its length is that of the cache."""

    def __init__(self, rows: Rows, compiler: MemoryCompiler, executor: FrozenExecutor, soft: bool) -> None:
        self._rows, self._encode = rows, functools.partial(encode_row, compiler=compiler, executor=executor, soft=soft)
        self._cached: dict[int, Example] = {}
        self._values = 0

    def __len__(self) -> int:
        return len(self._cached)

    def __getitem__(self, index: int) -> Example:
        """Encode a row. Raises: ValueError, names the row."""
        if index in self._cached:
            return self._cached[index]
        row = self._rows[index]
        try:
            example = self._encode(row)
        except ValueError as error:
            raise ValueError(f"row {index} (task {row.task_id}, step {row.t}) cannot be encoded: {error}") from error
        if self._values + example.size <= MAX_CACHED_VALUES:
            self._cached[index], self._values = example, self._values + example.size
        return example


class StepBatches(Dataset[list[Example]]):
    """This rank's examples of each optimiser step."""

    def __init__(self, total: int, examples: Callable[[int], list[Example]]) -> None:
        self._total, self._examples = total, examples

    def __len__(self) -> int:
        return self._total

    def __getitem__(self, step: int) -> list[Example]:
        return self._examples(step)

    def load(self, start: int, workers: int) -> Iterator[list[Example]]:
        """Yield the examples of step `start` and those after it, encoded ahead by worker processes (0: here)."""
        loader = DataLoader(
            self,
            batch_size=None,
            sampler=range(start, self._total),
            collate_fn=list,
            num_workers=workers,
            timeout=LOADER_TIMEOUT_S if workers else 0,
            generator=torch.Generator(),
            multiprocessing_context="fork" if workers else None,  # inherits tokenizers and rows
        )
        return iter(loader)


def episodes_of(rows: Rows) -> list[list[int]]:
    """Return the indices of each episode's rows: rows in sequence of one task, whose steps increase; or first states
    of several tasks with one task's memory."""
    episodes, last = list[list[int]](), None
    for i in range(len(rows)):
        row = rows[i]
        if last is None or not continues(row, last):
            episodes.append([])
        episodes[-1].append(i)
        last = row
    return episodes


def row_length(row: SftRow) -> int:
    """Estimate a row's length for the compiler without its tokenizer, in characters read and written."""
    pictures = sum(map(len, row.memory_images)) + (row.image is not None)
    return len(compiler_text(row)) + len(row.emission) + PICTURE * pictures


def bucketed(order: Sequence[int], lengths: Sequence[int], size: int, window: int, seed: str) -> list[list[int]]:
    """Split an epoch's order into batches of `size` rows of similar length: sort the rows of `window` batches, split
    them, and shuffle the batches. One batch of the epoch may be smaller."""
    rng, batches = random.Random(seed), []
    for at in range(0, len(order), size * window):
        rows = sorted(order[at : at + size * window], key=lengths.__getitem__)
        split = [rows[i : i + size] for i in range(0, len(rows), size)]
        rng.shuffle(split)
        batches += split
    return batches


# -- rows that cannot be trained on ----------------------------------------------------------------------------------
# A row is tokenised only if its bytes exceed a model's context (a token has at least one byte); otherwise a check takes
# a fraction of a millisecond.


def bad_rows(
    rows: Rows, tasks: Sequence[str], compiler: MemoryCompiler, executor: FrozenExecutor, config: SftConfig
) -> dict[int, str]:
    """Return the rows that cannot be trained on: task and problem by index. Every rank must call it."""
    check, found = RowCheck(compiler, executor, config), dict[int, str]()
    for i in distributed.share(len(rows)):
        try:
            wrong = check.fault(rows[i])
        except UNREADABLE as error:
            wrong = f"{type(error).__name__}: {error}"
        if wrong:
            found[i] = f"task {tasks[i]}: {wrong}"
    return {i: wrong for share in distributed.gather(found) for i, wrong in share.items()}


def describe(bad: Mapping[int, str], total: int) -> str:
    """Describe the bad rows in one line."""
    some = "; ".join(f"row {i}, {wrong}" for i, wrong in list(bad.items())[:MAX_SHOWN])
    more = f"; and {len(bad) - MAX_SHOWN} more" if len(bad) > MAX_SHOWN else ""
    return f"{len(bad)} of {total} SFT rows cannot be trained on: {some}{more}"


class RowCheck:
    """Checks rows for a compiler and an executor."""

    def __init__(self, compiler: MemoryCompiler, executor: FrozenExecutor, config: SftConfig) -> None:
        self._compiler, self._executor, self._soft = compiler, executor, config.soft
        self._tokens: dict[Any, int] = {}  # of a chat with one picture, by encoder and picture size
        self._valid_pictures: set[int] = set()  # hashes; the same entries occur in many rows

    def fault(self, row: SftRow) -> str | None:
        """Return the problem of a row, or None. Raises: `UNREADABLE` errors, for rows that cannot be read."""
        if not (row.goal.strip() or row.observation.strip() or row.image):
            return "it has neither a goal nor an observation"
        if self._soft and not row.action.strip():
            return "it has no action"
        if self._compiler.writes_text and (error := parse(row.emission).error):
            return f"the emission {reprlib.repr(row.emission)} cannot be read ({error})"
        if row.memory_images and len(row.memory_images) != len(row.memory_ids):
            return f"{len(row.memory_ids)} memory entries have {len(row.memory_images)} lists of pictures"
        sees = self._compiler.encoder.is_vlm, self._executor.sees_images
        memory_pictures = [png for entry in row.memory_images for png in entry] if any(sees) else []
        pictures = [self._size(png) for png in [*([row.image] if row.image else ()), *memory_pictures]]
        return self._too_long(row, *(pictures if seeing else () for seeing in sees))

    def _too_long(self, row: SftRow, compiler_sees: Iterable[Any], executor_sees: Iterable[Any]) -> str | None:
        """Return whether, and where, a row exceeds a model's context: first by an upper bound, then by its tokens."""
        compiler, executor = self._compiler, self._executor
        step = replace(row, image=None, memory_images=()).step_input(compiler.n_tokens if self._soft else 0)
        request = executor_request(step, executor)
        read = compiler_parts(compile_request(step), images=False, history=compiler.history, entries=compiler.entries)
        texts = [part.text for part in read]
        compiled = [instructions_of(compiler.instructions, row.environment), *texts, row.emission]
        chat = executor_chat(request, *executor.rules(request))
        acted = [part.text + " " * part.soft for turn in chat for part in turn.parts] + [row.action]
        limits = compiler.context, executor.context if self._soft else None
        most = (
            self._bound(compiler.encoder, compiled, compiler_sees) + compiler.n_tokens,
            self._bound(executor.encoder, acted, executor_sees),
        )
        if all(context is None or tokens <= context for tokens, context in zip(most, limits, strict=True)):
            return None
        example = encode_row(row, compiler, executor, self._soft)
        exact = (
            len(example.prompt.ids) + len(example.emission) + compiler.n_tokens,
            len(example.executor_prompt.ids) + len(example.action) if example.soft_read else 0,
        )
        for role, tokens, context in zip(("compiler", "executor"), exact, limits, strict=True):
            if context is not None and tokens > context:
                return f"it has {tokens} tokens for the {role}, whose context is {context}"
        return None

    def _bound(self, encoder: PromptEncoder, texts: Iterable[str], pictures: Iterable[Any]) -> int:
        """Return an upper bound on the tokens of a chat with these texts and picture sizes."""
        text = sum(len(text.encode("utf-8", "replace")) for text in texts)
        return text + sum(self._chat_tokens(encoder, size) for size in (None, *pictures))

    def _chat_tokens(self, encoder: PromptEncoder, size: tuple[int, int] | None) -> int:
        """Count the tokens of a chat without text, or with one picture of this size."""
        key = id(encoder), size
        if key not in self._tokens:
            part = PromptPart("x") if size is None else PromptPart(image=Image.new("RGB", size))
            self._tokens[key] = len(encoder.encode([part], "x").ids)
        return self._tokens[key]

    def _size(self, png: bytes) -> tuple[int, int]:
        """Return a picture's size. Raises: Pillow's errors, for a damaged one."""
        with Image.open(io.BytesIO(png)) as image:
            if hash(png) not in self._valid_pictures:
                image.verify()
                self._valid_pictures.add(hash(png))
            return image.size
