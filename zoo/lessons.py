"""A lesson: questions with their answers behind a compiler's prompt, as tokens with labels on the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compiler.prompt import compiler_parts
from compiler.records import CompileRequest
from lm.backbone import Backbone
from lm.prompt import Part, Prompt
from zoo.curriculum import IGNORE, Batch, pad

Talk = Sequence[tuple[str, str]]  # questions with their answers


@dataclass(frozen=True)
class Lesson:
    """A conversation as token ids, with labels on the answers."""

    prompt: Prompt
    labels: tuple[int, ...]


def asked(request: CompileRequest, question: str, images: bool = True) -> list[Part]:
    """Write the compiler's own prompt with a question behind it, or as it is where that is empty."""
    return [*compiler_parts(request, images), *_ask(question)]


def _ask(question: str) -> list[Part]:
    return [Part(text=f"\nask: {question}")] if question else []


def questions(backbone: Backbone, request: CompileRequest, talk: Talk) -> Lesson:
    """Put questions behind the compile prompt; their answers are to be predicted. An empty first one asks nothing: what
    is to be predicted follows the prompt as it is."""
    return questions_about(backbone, compiler_parts(request, backbone.is_vlm), talk)


def questions_about(backbone: Backbone, parts: Sequence[Part], talk: Talk) -> Lesson:
    """Put questions behind any prompt; their answers are to be predicted."""
    encoded = backbone.encode([*parts, *_ask(talk[0][0])])
    ids, labels = list[int](), [IGNORE] * len(encoded.ids)
    for i, (ask, answer) in enumerate(talk):
        turn = backbone.chat_ids(f"\n<|im_start|>user\nask: {ask}<|im_end|>\n<|im_start|>assistant\n") if i else ()
        said = [*backbone.ids(answer), backbone.end_id]
        ids, labels = [*ids, *turn, *said], [*labels, *[IGNORE] * len(turn), *said]
    return Lesson(encoded.extended(ids), tuple(labels))


def collate(backbone: Backbone, lessons: Sequence[Lesson]) -> Batch:
    """Pad lessons on the right to a batch, with the arguments of the model's forward as names."""
    batch = backbone.pad([lesson.prompt for lesson in lessons], "right")
    labels = pad([list(lesson.labels) for lesson in lessons], IGNORE)
    return {"input_ids": batch.tokens, "position_ids": batch.positions, "labels": labels, **batch.vision}
