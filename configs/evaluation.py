"""Settings of an evaluation (one cell or a matrix of cells) and of the quickstart, which ends with an evaluation."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from configs.collect import (
    CollectConfig,
    MemoryConfig,
    refuse_budgets_on_ray,
    refuse_unread_views,
    require_teacher_level,
)
from configs.models import Batching, CompilerConfig, ExecutorConfig
from configs.training import GrpoConfig, SftConfig
from envs.command_reader import TeacherLevel
from envs.registry import AnyEnvSettings, default_settings
from runtime.attempts import ATTEMPTS
from runtime.cluster import Cluster, RaySettings
from runtime.settings import Seed, Settings


class EvalMemoryConfig(MemoryConfig):
    """Memory of an evaluation: frozen, online (grows over the evaluated tasks) or living (grows inside one world)."""

    protocol: Literal["frozen", "online", "living"] = "frozen"
    """frozen: filled before the evaluation, then read-only. online: each delivery that recalls entries has its own
    memory, which starts empty (or as a copy of `bank`) and grows over the tasks. living: the split's task sequences are
    played in worlds that are never reset, each with a new memory."""
    warm_start: bool = False
    """online: start with the experience that frozen memory would hold."""
    order_seed: Seed | None = None
    """online: shuffle the tasks with this seed; null: the split's order."""
    round: int = Field(default=1, ge=1)
    """online: episodes per round; memory is updated after each round."""

    @model_validator(mode="after")
    def _check_isolation(self) -> EvalMemoryConfig:
        if self.living and self.isolation == "scene":
            raise ValueError("memory.protocol living: its memory is of one world's scene; set memory.isolation=task")
        return self

    @property
    def online(self) -> bool:
        return self.protocol == "online"

    @property
    def living(self) -> bool:
        return self.protocol == "living"


class EvalConfig(Settings):
    """Deliveries compared on the same tasks, memory and executor."""

    COMMAND: ClassVar[str] = "eval"
    env: AnyEnvSettings = Field(default_factory=default_settings)
    """Environment and its settings; `env=NAME` is short for `env.name=NAME`."""
    compiler: CompilerConfig = CompilerConfig()
    """Memory compiler, for deliveries that compile with a trained one."""
    executor: ExecutorConfig = ExecutorConfig()
    """Frozen executor."""
    memory: EvalMemoryConfig = EvalMemoryConfig()
    """Memory that the deliveries recall from."""
    deliveries: tuple[str, ...] = Field(default=("none", "static", "compiled_text", "compiled"), min_length=1)
    """Names of the deliveries to compare (`agent/deliveries.py`)."""
    baseline: str | dict[str, str] | None = None
    """What every delivery is compared with, task by task: a delivery or, in a matrix, {axis: level, delivery: name}."""
    matrix: dict[str, dict[str, dict[str, Any]] | tuple[Any, ...]] = Field(default={})
    """Axis -> named levels, each a mapping of overrides; or a list of values of the setting that the axis names.
    Axes of a `base` configuration stay beside those of the one on top; `select` chooses among their levels."""
    select: dict[str, tuple[str, ...]] = Field(default={})
    """Axis -> names of the levels to play, in this order; of axes that it does not name, all levels are played."""
    split: str | None = None
    """Split of the environment; null: its evaluation split (household: test, alfworld: valid_seen)."""
    limit: PositiveInt | None = None
    """Maximum number of tasks; in living worlds, of sequences."""
    max_steps: int = Field(default=15, ge=1)
    """Maximum steps of an episode."""
    step_budgets: tuple[PositiveInt, ...] = (15, 30, 50)
    """Step counts within which success is also reported; values above `max_steps` count as `max_steps`."""
    min_confidence: float = Field(default=0.9, gt=0, le=1)
    """compiled_low_confidence: compile only where the executor's likeliest command is less probable than this."""
    gate_threshold: float | None = Field(default=None, ge=0, le=1)
    """compiled_gated: compile only where the gate's probability is at least this; null: the fitted threshold."""
    teacher_level: TeacherLevel = "place"
    """What the teacher without a model says (deliveries expert_compiler, expert_random_entry): the place where
    something is, what to do now (subgoal), or the next command."""
    teacher_silence: float = Field(default=0.0, ge=0, le=1)
    """Levels subgoal and command: share of the steps at which the executor is on its way already where nothing is
    said."""
    concurrency: int = Field(default=64, ge=1)
    """Episodes played side by side, which share batches."""
    batching: Batching = "auto"
    """lockstep: episodes wait for each other at every step, so that their batches, and the last digits, do not depend
    on timing. continuous: none waits. auto: continuous where every engine in use is vLLM or is reached over HTTP."""
    episode_attempts: int = Field(default=ATTEMPTS, ge=1)
    """Attempts at an episode that fails for technical reasons, over all resumes."""
    cluster: Cluster = "local"
    """ray: workers play the episodes, on this machine or on several (docs/guides/cluster.md)."""
    ray: RaySettings = RaySettings()
    """Ray workers of `cluster: ray`."""
    seed: Seed = 0
    """Seed of sampling; scenes have `env.seed`."""

    @property
    def budgets(self) -> tuple[int, ...]:
        """Return `step_budgets` in ascending order, cut to `max_steps`."""
        return tuple(sorted({min(budget, self.max_steps) for budget in self.step_budgets}))

    @field_validator("deliveries")
    @classmethod
    def _drop_duplicates(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """Drop repeated deliveries; `eval.matrix.check_deliveries` checks the names."""
        return tuple(dict.fromkeys(value))

    @model_validator(mode="after")
    def _check_teacher_level(self) -> EvalConfig:
        require_teacher_level(self.env.name, self.teacher_level)
        return self

    @model_validator(mode="after")
    def _check_ray(self) -> EvalConfig:
        if self.cluster == "ray" and self.memory.protocol != "frozen":
            raise ValueError(
                f"memory.protocol {self.memory.protocol}: every episode depends on the memory that the one before it "
                "wrote, so workers cannot share them: use cluster=local"
            )
        if self.cluster == "ray" and self.executor.engine == "api":
            raise ValueError("executor.engine api: only one process can enforce the endpoint's budget: cluster=local")
        refuse_budgets_on_ray(self.cluster, self.memory)
        return self

    @model_validator(mode="after")
    def _check_memory(self) -> EvalConfig:
        refuse_unread_views(self.env.name, self.memory)
        return self

    @field_validator("matrix", mode="before")
    @classmethod
    def _names_as_strings(cls, value: Any) -> Any:
        """Convert names to strings: YAML reads the level `0` as a number."""
        if not isinstance(value, dict):
            return value
        return {
            str(axis): {str(name): level for name, level in levels.items()} if isinstance(levels, dict) else levels
            for axis, levels in value.items()
        }

    @field_validator("select", mode="before")
    @classmethod
    def _levels_as_strings(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {axis: [str(one) for one in some] if isinstance(some, list) else some for axis, some in value.items()}


class QuickstartConfig(Settings):
    """Collect, SFT, GRPO and evaluation in one file."""

    COMMAND: ClassVar[str] = "quickstart"
    seed: Seed = 0
    """Seed of scenes, SFT and evaluation (quickstart.yaml refers to it)."""
    collect: CollectConfig
    """Collection of experience and SFT rows."""
    sft: SftConfig
    """Stage 1."""
    grpo: GrpoConfig | None = None
    """Stage 2; null: evaluate the SFT checkpoint only."""
    eval: EvalConfig
    """Evaluation of the trained compiler."""
