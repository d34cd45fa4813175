"""Lessons of both worlds: questions and answers after a compiler's prompt, as tokens with labels on the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agent.deliveries import Delivery
from agent.expert import ExpertTeacher
from compiler.prompt import compiler_parts
from compiler.records import CompileRequest
from lm.backbone import Backbone
from lm.prompt import Prompt, PromptPart
from zoo.curriculum import IGNORE, Batch, pad

Dialogue = Sequence[tuple[str, str]]  # questions with their answers


@dataclass(frozen=True)
class Lesson:
    """A dialogue as token ids, with labels on the answers."""

    prompt: Prompt
    labels: tuple[int, ...]


def question_prompt(request: CompileRequest, question: str, images: bool = True) -> list[PromptPart]:
    """Append a question to the compiler's prompt; an empty question leaves the prompt unchanged."""
    return [*compiler_parts(request, images, history=0), *_question_part(question)]


def _question_part(question: str) -> list[PromptPart]:
    return [PromptPart(text=f"\nask: {question}")] if question else []


def request_lesson(backbone: Backbone, request: CompileRequest, dialogue: Dialogue) -> Lesson:
    """Append a dialogue to a compile request's prompt; after an empty first question, the answer follows directly."""
    return dialogue_lesson(backbone, compiler_parts(request, backbone.is_vlm, history=0), dialogue)


def dialogue_lesson(backbone: Backbone, parts: Sequence[PromptPart], dialogue: Dialogue) -> Lesson:
    """Append a dialogue to a prompt, with labels on its answers."""
    encoded = backbone.encode([*parts, *_question_part(dialogue[0][0])])
    ids, labels = list[int](), [IGNORE] * len(encoded.ids)
    for i, (question, answer) in enumerate(dialogue):
        turn = backbone.chat_ids(f"\n<|im_start|>user\nask: {question}<|im_end|>\n<|im_start|>assistant\n") if i else ()
        reply = [*backbone.ids(answer), backbone.end_id]
        ids, labels = [*ids, *turn, *reply], [*labels, *[IGNORE] * len(turn), *reply]
    return Lesson(encoded.extended(ids), tuple(labels))


def collate(backbone: Backbone, lessons: Sequence[Lesson]) -> Batch:
    """Pad lessons on the right to a batch of the model's keyword arguments."""
    batch = backbone.pad([lesson.prompt for lesson in lessons], "right")
    labels = pad([list(lesson.labels) for lesson in lessons], IGNORE)
    return {"input_ids": batch.tokens, "position_ids": batch.positions, "labels": labels, **batch.vision}


def text_deliveries(teacher: ExpertTeacher, seed: int) -> tuple[Delivery, ...]:
    """Return the text deliveries for cloning executors; "misguided": the teacher cites a wrong entry."""
    return (
        Delivery("none", "none"),
        Delivery("static", "static"),
        Delivery("guided", "compiled", teacher, soft=False),
        Delivery("misguided", "compiled", ExpertTeacher("random", seed, teacher.reader), soft=False),
    )
