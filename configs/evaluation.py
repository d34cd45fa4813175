"""Settings of an evaluation, one cell or a matrix of them, and of the main job, which ends with one."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from configs.collect import CollectConfig, MemoryConfig, refuse_budgets_on_ray
from configs.models import CompilerConfig, ExecutorConfig
from configs.training import GrpoConfig, SftConfig
from envs.registry import AnyEnvSettings, default_settings
from runtime.attempts import ATTEMPTS
from runtime.cluster import Cluster, RaySettings
from runtime.settings import Seed, Settings


class EvalMemoryConfig(MemoryConfig):
    """Frozen memory is filled before anything is evaluated, and only read. Online, it grows over the stream of the
    evaluated tasks, a memory for each delivery that recalls anything; it begins empty, or with what `bank` holds.
    Living, the split's sequences are evaluated, each in a world that is never reset, and memory lives in each anew."""

    protocol: Literal["frozen", "online", "living"] = "frozen"
    warm_start: bool = False  # online: begin with the experience that frozen memory would hold
    order_seed: Seed | None = None  # online: shuffle the stream (default: the split's own order)
    round: int = Field(default=1, ge=1)  # online: episodes that are played before memory takes them in

    @property
    def online(self) -> bool:
        return self.protocol == "online"

    @property
    def living(self) -> bool:
        return self.protocol == "living"


class EvalConfig(Settings):
    COMMAND: ClassVar[str] = "eval"
    env: AnyEnvSettings = Field(default_factory=default_settings)
    compiler: CompilerConfig = CompilerConfig()
    executor: ExecutorConfig = ExecutorConfig()
    memory: EvalMemoryConfig = EvalMemoryConfig()
    deliveries: tuple[str, ...] = Field(default=("none", "static", "compiled_text", "compiled"), min_length=1)
    # What all others are compared with, task by task: a delivery or, in a matrix, {axis: level, delivery: name}.
    baseline: str | dict[str, str] | None = None
    # Axis -> named levels, each overrides as on the command line, or a list of values for the key that the axis names.
    matrix: dict[str, dict[str, dict[str, Any]] | tuple[Any, ...]] = Field(default={})
    split: str | None = None  # default: test (household), valid_seen (alfworld)
    limit: PositiveInt | None = None
    max_steps: int = Field(default=15, ge=1)
    # Success is told within each of these numbers of steps as well; one above `max_steps` stands for `max_steps`.
    step_budgets: tuple[PositiveInt, ...] = (15, 30, 50)
    # Under `compiled_unsure`: an executor that gives its likeliest command so much probability does without compiling.
    sure: float = Field(default=0.9, gt=0, le=1)
    # Under `compiled_needed`: a step is compiled that needs it with so much probability; default: as it was fitted.
    needed: float | None = Field(default=None, ge=0, le=1)
    concurrency: int = Field(default=64, ge=1)
    episode_attempts: int = Field(default=ATTEMPTS, ge=1)  # at one that machinery breaks, over all resumes
    cluster: Cluster = "local"  # ray: workers play, on this machine or on many (docs/cluster.md)
    ray: RaySettings = RaySettings()
    seed: Seed = 0

    @property
    def budgets(self) -> tuple[int, ...]:
        """Return the numbers of steps within which success is told, in order: `step_budgets` as far as is played."""
        return tuple(sorted({min(budget, self.max_steps) for budget in self.step_budgets}))

    @field_validator("deliveries")
    @classmethod
    def _each_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        """Their names are checked where an evaluation begins (`eval.matrix.cells`), which knows the list."""
        return tuple(dict.fromkeys(value))

    @model_validator(mode="after")
    def _can_be_shared_out(self) -> EvalConfig:
        if self.cluster == "ray" and self.memory.protocol != "frozen":
            raise ValueError(
                f"memory.protocol {self.memory.protocol}: every episode waits for what the one before it left, and "
                "nothing can be shared out: cluster=local"
            )
        if self.cluster == "ray" and self.executor.engine == "api":
            raise ValueError("executor.engine api: one process keeps the endpoint's budget: cluster=local")
        refuse_budgets_on_ray(self.cluster, self.memory)
        return self

    @field_validator("matrix", mode="before")
    @classmethod
    def _level_names(cls, value: Any) -> Any:
        """YAML reads the level `0` as a number."""
        if not isinstance(value, dict):
            return value
        return {
            str(axis): {str(name): level for name, level in levels.items()} if isinstance(levels, dict) else levels
            for axis, levels in value.items()
        }


class QuickstartConfig(Settings):
    """The main job: collect, SFT, GRPO, evaluation. One file holds all of it."""

    COMMAND: ClassVar[str] = "quickstart"
    seed: Seed = 0  # scenes, SFT and evaluation take it from here (quickstart.yaml refers to it)
    collect: CollectConfig
    sft: SftConfig
    grpo: GrpoConfig | None = None  # null: SFT is evaluated, and that is all
    eval: EvalConfig
