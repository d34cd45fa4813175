"""What happened in an episode: the one record that data generation, GRPO, evaluation and the report read.

Tensors (soft tokens, their Gaussian, log-probabilities) live on the step while the process lives, for training;
`Episode.to_json` keeps everything that is text or number, and a summary of the tensors.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memory.trajectory import png_bytes
from runtime.errors import StopReason

if TYPE_CHECKING:
    from PIL.Image import Image

    from compiler.records import Compilation
    from executor.records import Action


@dataclass(slots=True)
class StepRecord:
    """Step t of an episode: what was seen, compiled, prompted, done and answered."""

    t: int
    observation: str
    image: Image | None
    admissible: tuple[str, ...] | None
    brief_before: str
    brief_after: str = ""
    emission_text: str = ""  # raw compiler output, kept even when it does not parse; "" without a compiler
    emission_kind: str = ""  # EXPERIENCE | BRIEF | HYBRID | NOACTION; "" without a compiler
    parse_error: str | None = None
    guidance: str = ""
    reason: str = ""
    op_errors: tuple[str, ...] = ()
    soft: Mapping[str, float] | None = None  # {"n", "mu_norm", "sigma_mean", "z_norm"} of the soft tokens, if any
    executor_prompt: str = ""  # decoded, with soft tokens shown as placeholders
    executor_prompt_ids: tuple[int, ...] = ()
    executor_text: str = ""  # what the executor produced, before grounding
    action: str = ""
    grounding: str = ""  # "choice" | "exact" | "fuzzy" | "failed"
    feedback: str = ""
    progress: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)  # {"compiler", "executor", "environment"}
    tokens: dict[str, int] = field(
        default_factory=dict
    )  # {"compiler_in", "compiler_out", "executor_in", "executor_out"}
    # Tensors and token ids for training; not serialised.
    compilation: Compilation | None = None
    decision: Action | None = None


@dataclass(slots=True)
class Episode:
    task_id: str
    goal: str
    scene: str
    split: str
    kind: str
    family: str
    delivery: str
    seed: int
    memory_ids: tuple[str, ...] = ()
    memory_text: str = ""
    bank_version: int | None = None
    steps: list[StepRecord] = field(default_factory=list)
    success: bool = False
    progress: float = 0.0
    stop_reason: StopReason = StopReason.STEP_LIMIT
    error: str = ""

    def to_json(self, images: bool = False) -> dict[str, Any]:
        """A JSON-ready dict: tensors left out, images as base64 PNG only when asked for."""
        head = {k: getattr(self, k) for k in self.__slots__ if k != "steps"}  # type: ignore[attr-defined]
        return {**head, "stop_reason": str(self.stop_reason), "steps": [_step_json(s, images) for s in self.steps]}


_LIVE = ("compilation", "decision", "image")


def _step_json(step: StepRecord, images: bool) -> dict[str, Any]:
    row = {k: getattr(step, k) for k in step.__slots__ if k not in _LIVE}  # type: ignore[attr-defined]
    row["image"] = png_base64(step.image) if images and step.image is not None else None
    if step.compilation is not None:
        row["compiler_prompt_ids"] = list(step.compilation.prompt_ids)
        row["emission_ids"] = list(step.compilation.emission_ids)
    return row


def png_base64(image: Image) -> str:
    return base64.b64encode(png_bytes(image)).decode("ascii")
