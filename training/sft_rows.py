"""SFT rows as token ids, and the rows of every batch."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from agent.records import compile_request, executor_request
from compiler.hf import MemoryCompiler
from compiler.prompt import pictures_of
from data_gen.dataset import compiler_text
from data_gen.rows import SftRow
from executor.hf import FrozenExecutor
from lm.prompt import Prompt

MAX_CACHED_VALUES = 2**28  # of encoded rows in a trainer's cache (1 GiB in fp32)
LOADER_TIMEOUT_S = 600  # for a worker to encode a batch
PICTURE = 1000  # length of a picture in characters, some 250 tokens


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
        emission=compiler.emission_ids(row.emission),
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
