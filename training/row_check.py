"""SFT rows that cannot be trained on, found before the first step.

Rows are read once, one at a time, by all ranks together. A row is only tokenised where it may be too long for a model:
where its bytes, of which a token has at least one, are more than the context. Without that a row takes a fraction of a
millisecond, about as long as reading it.
"""

from __future__ import annotations

import io
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from PIL import Image

from agent.records import compile_request, executor_request
from compiler.hf import MemoryCompiler
from compiler.language import parse
from compiler.prompt import compiler_parts
from configs.training import SftConfig
from data_gen.rows import SftRow
from executor.hf import FrozenExecutor
from executor.prompt import executor_text, instructed
from lm.prompt import Part, PromptEncoder
from training import distributed
from training.sft_rows import Rows, encode_row

SHOWN = 5  # bad rows that an error names
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, OSError, SyntaxError)  # the last one is Pillow's


def bad_rows(
    rows: Rows, tasks: Sequence[str], compiler: MemoryCompiler, executor: FrozenExecutor, config: SftConfig
) -> dict[int, str]:
    """Return the numbers of the rows that cannot be trained on, in order, each with its task and what is wrong. Every
    rank has to call it."""
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
    """Say in one line which rows cannot be trained on."""
    some = "; ".join(f"row {i}, {wrong}" for i, wrong in list(bad.items())[:SHOWN])
    more = f"; and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
    return f"{len(bad)} of {total} SFT rows cannot be trained on: {some}{more}"


class RowCheck:
    """Checks rows for two models."""

    def __init__(self, compiler: MemoryCompiler, executor: FrozenExecutor, config: SftConfig) -> None:
        self._compiler, self._executor, self._soft = compiler, executor, config.soft
        self._tokens: dict[Any, int] = {}  # of a chat with a picture alone, by encoder and size of the picture
        self._whole: set[int] = set()  # hashes of the pictures that can be read: entries come again and again

    def fault(self, row: SftRow) -> str | None:
        """Say what is wrong with a row; None for a good one. Raises: ValueError and the like, with the same meaning."""
        if not (row.goal.strip() or row.observation.strip() or row.image):
            return "there is neither a goal nor an observation"
        if self._soft and not row.action.strip():
            return "there is no action"
        if error := parse(row.emission).error:
            return f"the emission {reprlib.repr(row.emission)} cannot be read ({error})"
        if row.memory_images and len(row.memory_images) != len(row.memory_ids):
            return f"{len(row.memory_ids)} memory entries have {len(row.memory_images)} lists of pictures"
        sees = self._compiler.encoder.is_vlm, self._executor.sees_images
        remembered = [png for entry in row.memory_images for png in entry] if any(sees) else []
        pictures = [self._size(png) for png in [*([row.image] if row.image else ()), *remembered]]
        return self._too_long(row, *(pictures if seeing else () for seeing in sees))

    def _too_long(self, row: SftRow, compiler_sees: Iterable[Any], executor_sees: Iterable[Any]) -> str | None:
        """Compare a row's length with both models' contexts."""
        compiler, executor = self._compiler, self._executor
        step = replace(row, image=None, memory_images=()).step_input(compiler.n_tokens if self._soft else 0)
        asked = executor_request(step, executor)
        texts = [part.text for part in compiler_parts(compile_request(step), images=False)]
        read = self._most(compiler.encoder, [compiler.instructions, *texts, row.emission], compiler_sees)
        told = instructed(executor.instructions, asked, executor.reads.commands)
        acted = [told, executor_text(asked, " "), row.action]
        limits = compiler.context, executor.context if self._soft else None
        most = read + compiler.n_tokens, self._most(executor.encoder, acted, executor_sees)
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

    def _most(self, encoder: PromptEncoder, texts: Iterable[str], pictures: Iterable[Any]) -> int:
        """Bound the tokens of a chat with these texts and pictures of these sizes."""
        read = sum(len(text.encode("utf-8", "replace")) for text in texts)
        return read + sum(self._chat(encoder, size) for size in (None, *pictures))

    def _chat(self, encoder: PromptEncoder, size: tuple[int, int] | None) -> int:
        """Count the tokens of a chat that holds nothing, or a picture of this size alone."""
        key = id(encoder), size
        if key not in self._tokens:
            part = Part("x") if size is None else Part(image=Image.new("RGB", size))
            self._tokens[key] = len(encoder.encode([part], "x").ids)
        return self._tokens[key]

    def _size(self, png: bytes) -> tuple[int, int]:
        """Return a picture's size. Raises: what Pillow raises for a damaged one."""
        with Image.open(io.BytesIO(png)) as image:
            if hash(png) not in self._whole:
                image.verify()
                self._whole.add(hash(png))
            return image.size
