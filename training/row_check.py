"""Find SFT rows that cannot be trained on, before the first step.

Ranks share the rows. A row is tokenised only if its bytes exceed a model's context (a token has at least one byte);
otherwise a check takes a fraction of a millisecond.
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

MAX_SHOWN = 5  # bad rows in an error message
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, OSError, SyntaxError)  # Pillow raises SyntaxError


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
        if error := parse(row.emission).error:
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
        texts = [part.text for part in compiler_parts(compile_request(step), images=False)]
        compiled = [compiler.instructions, *texts, row.emission]
        instructions = instructed(executor.instructions, request, executor.reads.commands)
        acted = [instructions, executor_text(request, " "), row.action]
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
            part = Part("x") if size is None else Part(image=Image.new("RGB", size))
            self._tokens[key] = len(encoder.encode([part], "x").ids)
        return self._tokens[key]

    def _size(self, png: bytes) -> tuple[int, int]:
        """Return a picture's size. Raises: Pillow's errors, for a damaged one."""
        with Image.open(io.BytesIO(png)) as image:
            if hash(png) not in self._valid_pictures:
                image.verify()
                self._valid_pictures.add(hash(png))
            return image.size
