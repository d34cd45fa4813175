"""Records of steps and episodes, shared by the loop, data generation, GRPO, evaluation and the report.

`StepInput` is what compiler and executor read at a step. The loop, SFT rows and recorded episodes create it, and
`compile_request`, `delivered` and `executor_request` are the only functions that turn it into a request.

Tensors (soft tokens, their Gaussian, log-probabilities) stay on the `StepRecord` in memory, for training.
`Episode.to_json` writes texts, numbers and a summary of the tensors; `episode_from_json` and `read_episodes` read them.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiler.brief_state import BriefState, render_brief_state
from compiler.language import Emission
from compiler.records import Compilation, CompileRequest, SoftOn, soft_is_read
from envs.registry import loaded
from executor.prompt import ExecutorRequest, MemoryBlock, Turn, executor_text, memory_text
from memory.entry import MemoryEntry, entry_from_json
from memory.protocol import EntryStore, Recall, Record
from memory.trajectory import png_bytes
from runtime.checksums import parse_row
from runtime.errors import StopReason, first_failure
from runtime.parsing import check_types
from runtime.pictures import open_picture

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from envs.base import Transition
    from executor.records import Action, Executor, ExecutorView


# What memory an episode was given: all that retrieval finds, only entries of other scenes or other kinds of tasks, or
# nothing (`data_gen.recall_mix`).
ALL_KINDS, OTHER_SCENES, OTHER_KINDS, NOTHING = "all", "other scenes", "other kinds", "nothing"
SOFT_MARK = "▪"  # replaces a soft token in recorded prompts


# ---------------------------------------------------------------------------------------------------------------------
# The input of a step


@dataclass(frozen=True, slots=True)
class StepInput:
    """Input of compiler and executor at a step: goal, M, b_t, o_t, earlier actions, and the compilation."""

    goal: str  # as memory, compiler and executor state it
    observation: str
    image: Image | None = None
    admissible: tuple[str, ...] | None = None
    past: tuple[Turn, ...] = ()  # the steps before this one
    memory: tuple[MemoryEntry, ...] = ()
    state: BriefState | None = None  # b_t; None under a delivery without Brief State
    pasted_memory: str = ""  # the text of M, where the delivery pastes it
    emission: Emission | None = None  # None before and without compilation
    soft: Tensor | None = None  # soft tokens (N, d) at the executor's scale, where they are delivered
    first: str = ""  # the episode's first observation
    environment: str = ""  # whose instructions the models read, by name; "": the run has one

    @property
    def history(self) -> tuple[str, ...]:
        """Return the actions before this step."""
        return tuple(turn.action for turn in self.past)


@dataclass(frozen=True, slots=True)
class EpisodeContext:
    """Context that the loop passes to teachers beside a request, and never to learned models."""

    plan: Sequence[str] | None = None  # the environment expert's commands from the current state to success
    task_id: str = ""
    seed: int = 0  # of the run


def compile_request(step: StepInput) -> CompileRequest:
    """Write the compiler's request: (M, b_t, o_t) -> emission (paper Eq. 3 and 4)."""
    return CompileRequest(
        goal=step.goal,
        memory=step.memory,
        state=step.state,
        observation=step.observation,
        image=step.image,
        history=step.history,
        environment=step.environment,
    )


def delivered(step: StepInput, executor: Executor) -> MemoryBlock:
    """Return the memory part of this executor's prompt: pasted M, or the parts of the compilation that it reads."""
    if step.emission is None:
        return MemoryBlock(memory=step.pasted_memory)
    reads, emission, lines = executor.reads, step.emission, []
    if reads.state and step.state is not None:
        lines = render_brief_state(step.state).split("\n")[1:]  # without the goal, which the prompt holds already
    soft = step.soft if soft_is_read(soft_read_on(executor), emission) else None
    return MemoryBlock(state="\n".join(lines), guidance=emission.guidance, reason=emission.reason, soft=soft)


def soft_read_on(executor: Executor) -> SoftOn:
    """Return beside which emissions this executor reads soft tokens."""
    return executor.reads.soft_on if executor.accepts_soft else "never"


def executor_request(step: StepInput, executor: Executor) -> ExecutorRequest:
    """Write this executor's request for one action."""
    reads = executor.reads
    return ExecutorRequest(
        goal=step.goal,
        delivered=delivered(step, executor),
        history=step.history,
        observation=step.observation,
        admissible=step.admissible,
        image=step.image if executor.sees_images else None,
        max_history=reads.history,
        first=step.first if reads.first_view and step.past else "",  # at the first step, `observation` holds it
        goal_last=reads.goal_last,
        context=reads.context,
        past=tuple(_as_read(turn, reads) for turn in step.past) if reads.context == "turns" else (),
        environment=step.environment,
    )


def _as_read(turn: Turn, reads: ExecutorView) -> Turn:
    """Leave out what past turns do not keep."""
    if not reads.past_guidance:
        return Turn(turn.observation, turn.action)
    return turn if reads.past_soft else replace(turn, compiled=replace(turn.compiled, soft=None))


# ---------------------------------------------------------------------------------------------------------------------
# The record of an episode


@dataclass(slots=True)
class StepRecord:
    """Step t of an episode: observation, compilation, prompts, action and feedback."""

    t: int
    observation: str
    image: Image | None
    admissible: tuple[str, ...] | None
    brief_before: str
    memory_ids: tuple[str, ...] | None = None  # of the recalled entries; None: as at the first step
    brief_after: str = ""
    emission_text: str = ""  # raw compiler output, also where it does not parse; "" without a compiler
    emission_kind: str = ""  # EXPERIENCE | BRIEF | HYBRID | NOACTION; "" without a compiler
    compiler_prompt_ids: tuple[int, ...] = ()
    emission_ids: tuple[int, ...] = ()
    parse_error: str | None = None
    guidance: str = ""
    reason: str = ""
    op_errors: tuple[str, ...] = ()
    soft: Mapping[str, float] | None = None  # statistics n, mu_norm, sigma_mean, z_norm of the soft tokens
    soft_read: bool = False  # whether the executor read the soft tokens
    executor_prompt: str = ""  # the newest user turn, with SOFT_MARK for a soft token
    executor_prompt_ids: tuple[int, ...] = ()
    turns_dropped: int = 0  # past turns that the executor's prompt left out
    executor_text: str = ""  # raw executor output, before grounding
    confidence: float | None = (
        None  # probability of the likeliest command without a compilation, under `low_confidence_only`
    )
    gate_probability: float | None = None  # the compile gate's probability that the compiler guides
    action: str = ""
    grounding: str = ""  # "choice" | "exact" | "fuzzy" | "failed"
    feedback: str = ""
    progress: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)  # of compiler, executor and environment
    tokens: dict[str, int] = field(default_factory=dict)  # ROLE_in, ROLE_out and ROLE_cached
    # Tensors and token ids for training; not serialised.
    compilation: Compilation | None = None
    decision: Action | None = None

    def note_compilation(self, compilation: Compilation) -> None:
        """Record the compilation."""
        self.emission_text, self.emission_kind = compilation.text, str(compilation.emission.kind)
        self.parse_error = str(compilation.parse_error) if compilation.parse_error else None
        self.guidance, self.reason = compilation.emission.guidance, compilation.emission.reason
        self.compiler_prompt_ids, self.emission_ids = compilation.prompt_ids, compilation.emission_ids
        self._note_tokens("compiler", compilation)
        self.compilation = compilation
        if compilation.mu is not None and compilation.log_sigma is not None and compilation.z is not None:
            self.soft = {
                "n": float(len(compilation.mu)),
                "mu_norm": compilation.mu.norm(dim=-1).mean().item(),
                "sigma_mean": compilation.log_sigma.exp().mean().item(),
                "z_norm": compilation.z.norm(dim=-1).mean().item(),
            }

    def note_action(self, request: ExecutorRequest, action: Action, seconds: float) -> None:
        """Record prompt and action. A second call at one step adds its tokens and seconds to the first's."""
        self.action, self.grounding, self.executor_text = action.action, str(action.how), action.text
        self.decision = action
        self.executor_prompt, self.executor_prompt_ids = executor_text(request, SOFT_MARK), action.prompt_ids
        self.soft_read, self.turns_dropped = request.delivered.n_soft > 0, action.turns_dropped
        self._note_tokens("executor", action)
        self.seconds["executor"] = self.seconds.get("executor", 0.0) + seconds

    def note_transition(self, transition: Transition) -> None:
        """Record feedback and progress."""
        self.feedback, self.progress = transition.observation.text, transition.progress

    def to_turn(self, soft: Tensor | None = None) -> Turn:
        """Return the step as later prompts show it. `soft`: the soft tokens that the executor read."""
        return Turn(self.observation, self.action, MemoryBlock(guidance=self.guidance, reason=self.reason, soft=soft))

    def to_memory_record(self) -> Record:
        """Return the step as memory systems read it."""
        return Record(
            t=self.t,
            observation=self.observation,
            action=self.action,
            feedback=self.feedback,
            refused=refused(self),
            progress=self.progress,
        )

    def _note_tokens(self, role: str, output: Compilation | Action) -> None:
        for way, count in (("in", output.tokens_in), ("out", output.tokens_out), ("cached", output.tokens_cached)):
            if count is not None:
                self.tokens[f"{role}_{way}"] = self.tokens.get(f"{role}_{way}", 0) + count


@dataclass(slots=True)
class Episode:
    """Record of one episode."""

    task_id: str
    goal: str
    scene: str
    split: str
    kind: str
    family: str
    delivery: str
    seed: int
    memory_ids: tuple[str, ...] = ()  # of the entries recalled at the first step
    memory_text: str = ""
    bank_version: int | None = None
    recall: str = ALL_KINDS  # what memory it was given
    environment: str = ""  # name, in a run of several environments
    made: dict[str, MemoryEntry] = field(default_factory=dict)  # recalled entries that the memory generated, by id
    steps: list[StepRecord] = field(default_factory=list)
    success: bool = False
    progress: float = 0.0
    stop_reason: StopReason = StopReason.STEP_LIMIT
    error: str = ""
    rationale: str = ""  # a teacher's explanation of success or failure
    retries: list[Episode] = field(default_factory=list)  # memory learns from them, metrics ignore them
    broken: tuple[str, ...] = ()  # errors of broken attempts that this one replaces (`runtime.attempts`)

    def to_json(self, images: bool = False) -> dict[str, Any]:
        """Return a JSON-ready dict without tensors; with `images`, pictures as base64 PNG."""
        head = {k: getattr(self, k) for k in self.__slots__ if k not in ("steps", "retries")}  # type: ignore[attr-defined]
        made = [entry.to_json() for entry in self.made.values()]
        steps = [_step_json(step, images) for step in self.steps]
        retries = [retry.to_json(images) for retry in self.retries]
        return {**head, "made": made, "stop_reason": str(self.stop_reason), "steps": steps, "retries": retries}

    @property
    def failure(self) -> str:
        """Return the first failure of this episode or its retries; "" without one."""
        return first_failure((e.stop_reason, e.error) for e in (self, *self.retries))

    def note_recall(self, recalled: Recall, step: StepRecord) -> None:
        """Record what memory recalled for a step."""
        ids = tuple(entry.id for entry in recalled.entries)
        if step.t == 0:
            self.memory_ids, self.memory_text = ids, memory_text([entry.text for entry in recalled.entries])
        elif ids != self.memory_ids:
            step.memory_ids = ids
        if recalled.generated:
            self.made |= {entry.id: entry for entry in recalled.entries}

    def memory_at(self, t: int, bank: EntryStore) -> tuple[MemoryEntry, ...]:
        """Return the entries recalled for step t. Raises: KeyError, if neither bank nor record holds one."""
        ids = self.steps[t].memory_ids
        return tuple(self.made.get(id) or bank[id] for id in (self.memory_ids if ids is None else ids))


def refused(step: StepRecord) -> bool:
    """Return whether the action was no command, or the environment refused it."""
    return step.grounding == "failed" or is_refusal(step.feedback)


def is_refusal(answer: str) -> bool:
    """Return whether an environment's answer refuses an action."""
    return answer.startswith(tuple(words for spec in loaded() for words in spec.refusals))


def _step_json(step: StepRecord, images: bool) -> dict[str, Any]:
    live = ("compilation", "decision", "image")
    row = {k: getattr(step, k) for k in step.__slots__ if k not in live}  # type: ignore[attr-defined]
    return {**row, "image": png_base64(step.image) if images and step.image is not None else None}


def png_base64(image: Image) -> str:
    """Encode a picture as base64 PNG."""
    return base64.b64encode(png_bytes(image)).decode("ascii")


# ---------------------------------------------------------------------------------------------------------------------
# Back from JSON

_TUPLES = ("admissible", "memory_ids", "op_errors", "compiler_prompt_ids", "emission_ids", "executor_prompt_ids")
_STEP_FIELDS = frozenset(field.name for field in fields(StepRecord)) - {"compilation", "image"}
_EPISODE_FIELDS = frozenset(field.name for field in fields(Episode)) - {"steps"}


def episode_from_json(row: Mapping[str, Any], images: bool = True) -> Episode:
    """Read an episode that `to_json` wrote, without tensors and (unless `images`) pictures. Ignores unknown keys.

    Raises:
        ValueError: a required key is missing, or a value has the wrong type.
    """
    try:
        head = {key: value for key, value in row.items() if key in _EPISODE_FIELDS}
        head["memory_ids"] = tuple(head.get("memory_ids", ()))
        head["made"] = {entry["id"]: entry_from_json(entry) for entry in head.get("made", ())}
        head["stop_reason"] = StopReason(head["stop_reason"])
        head["broken"] = tuple(head.get("broken", ()))
        head["retries"] = [episode_from_json(retry, images) for retry in head.get("retries", ())]
        return check_types(Episode(**head, steps=[_step_from_json(step, images) for step in row["steps"]]))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not an episode: {error}") from error


def read_episodes(path: Path, images: bool = True) -> Iterator[Episode]:
    """Read the episodes of a JSONL file one at a time. Raises: ValueError, with the number of the bad line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield episode_from_json(parse_row(line), images)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error


def _step_from_json(row: Mapping[str, Any], images: bool) -> StepRecord:
    step = {key: value for key, value in row.items() if key in _STEP_FIELDS}
    step |= {key: tuple(step[key]) for key in _TUPLES if step.get(key) is not None}
    return check_types(StepRecord(**step, image=_picture(row.get("image")) if images else None))


def _picture(data: str | None) -> Image | None:
    if data is None:
        return None
    try:
        return open_picture(base64.b64decode(data, validate=True))
    except ValueError as error:  # binascii.Error is one
        raise ValueError(f"a picture is not base64 PNG: {error}") from error
