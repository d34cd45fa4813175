"""Settings of the two training stages: SFT (paper C.3.1) and GRPO (paper C.3.2).

Defaults are the paper's (Table 7) unless a comment says otherwise.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator, model_validator

from configs.collect import LeakageConfig, MemoryConfig
from configs.models import CompilerConfig, ExecutorConfig
from envs.registry import AnyEnvSettings, default_settings
from runtime.cluster import Cluster
from runtime.settings import PathName, Seed, Settings

Backend = Literal["replicated", "fsdp", "zero2", "zero3"]  # how processes share an optimiser step (training/backend.py)
Beta = Annotated[float, Field(ge=0, lt=1)]
TrackerName = Literal["trackio", "wandb", "tensorboard"]  # training/trackers.py


class Optimizer(Settings):
    """AdamW over LoRA and projector; linear warm-up, then a cosine (paper Table 7, stage 1)."""

    lr: float = Field(default=1e-5, gt=0)
    projector_lr: float | None = Field(default=1e-3, gt=0)  # LoRA's rate is too low for it; null: lr
    min_lr: float = Field(default=0.0, ge=0)  # at the end of the cosine
    warmup: float = Field(default=0.05, ge=0, le=1)  # share of the steps
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    projector_eps: float | None = Field(default=None, gt=0)  # null: eps
    weight_decay: NonNegativeFloat = 0.0
    grad_clip: PositiveFloat = 1.0


class GrpoOptimizer(Optimizer):
    """AdamW with stage 2's values."""

    lr: float = Field(default=1e-6, gt=0)
    projector_lr: float | None = Field(default=None, gt=0)  # as in the paper
    min_lr: float = Field(default=1e-7, ge=0)
    warmup: float = Field(default=0.0, ge=0, le=1)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: PositiveFloat = 1e-5
    weight_decay: NonNegativeFloat = 0.01


class SftWeights(Settings):
    """Weights of the loss terms (paper Eq. 9)."""

    text: NonNegativeFloat = 1.0
    action: NonNegativeFloat = 1.0
    entropy: NonNegativeFloat = 0.1
    latent: NonNegativeFloat = 1.0
    orth: NonNegativeFloat = 0.1


class TrainingValidation(Settings):
    """Validation of SFT on rows of held-out tasks; its loss may choose the best checkpoint. Off by default."""

    share: float = Field(default=0.0, ge=0, lt=1)  # of the tasks, at least one; 0: no validation
    every: int = Field(default=50, ge=1)  # steps between validations; the last step is validated, too
    patience: int | None = Field(default=None, ge=1)  # stop after so many validations without a lower loss; null: never


class TrainingEvaluation(Settings):
    """Evaluation during training on held-out tasks; their success may choose the best checkpoint. Off by default. SFT
    plays tasks of `validation`, GRPO tasks held out from its split."""

    tasks: int = Field(default=0, ge=0)  # 0: no evaluation
    every: int = Field(default=50, ge=1)  # steps or updates between evaluations; the last one is evaluated, too
    delivery: Literal["compiled", "compiled_text", "compiled_no_brief", "compiled_gated"] = "compiled"
    max_steps: int = Field(default=15, ge=1)  # of an episode
    selects_best: bool = True  # success chooses the best checkpoint, not the validation loss
    patience: int | None = Field(default=None, ge=1)  # stop after so many without higher success; null: never

    @model_validator(mode="after")
    def _decides_when_to_stop(self) -> TrainingEvaluation:
        if self.patience and not (self.tasks and self.selects_best):
            raise ValueError("evaluation.patience needs evaluation.tasks above 0 and evaluation.selects_best")
        return self


class SftConfig(Settings):
    """Stage 1 (paper C.3.1, Table 7)."""

    COMMAND: ClassVar[str] = "train sft"
    compiler: CompilerConfig = CompilerConfig()
    executor: ExecutorConfig = ExecutorConfig()
    rows: PathName | tuple[PathName, ...] = ""  # folders written by `memcompiler collect`, or glob patterns
    on_bad_rows: Literal["error", "skip"] = "error"  # for rows that cannot be trained on; skipped ones are recorded
    allow_leakage: bool = False  # allow rows that leak, or whose tasks are unknown; recorded
    epochs: float = Field(default=5.0, gt=0)
    max_steps: PositiveInt | None = None  # overrides epochs
    batch_size: int = Field(default=2, ge=1)  # global
    micro_batch_size: int = Field(default=2, ge=1)
    optimizer: Optimizer = Optimizer()
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)
    latent: Literal["gauss_nll", "soft_mse", "lm_head", "none"] = "gauss_nll"
    weights: SftWeights = SftWeights()
    soft: bool = True  # False: text channel only (no projector, no action loss)
    brief_state: bool = True  # False: rows without Brief State (compiled_no_brief)
    validation: TrainingValidation = TrainingValidation()
    evaluation: TrainingEvaluation = TrainingEvaluation()
    loader_workers: int = Field(default=0, ge=0)  # per rank; they encode rows ahead of training
    length_buckets: int = Field(default=0, ge=0)  # sort rows by length within so many batches; 0: off
    gradient_checkpointing: bool = False  # of both models: a third more time, much less memory
    backend: Backend = "replicated"
    seed: Seed = 0
    save_every: int = Field(default=100, ge=1)
    keep: int = Field(default=2, ge=1)
    trackers: tuple[TrackerName, ...] = ()  # receive the metrics (extra `trackers`)

    @model_validator(mode="after")
    def _can_checkpoint(self) -> SftConfig:
        _check_sharded_backend(self)
        return self

    @model_validator(mode="after")
    def _can_evaluate(self) -> SftConfig:
        if not self.evaluation.tasks:
            return self
        if not self.validation.share:
            raise ValueError("evaluation plays tasks of validation rows: set validation.share")
        if self.backend in ("fsdp", "zero3"):
            raise ValueError(f"evaluation plays with whole models, but backend {self.backend} has them in slices")
        if self.evaluation.selects_best and self.validation.patience:
            raise ValueError("with evaluation.selects_best, set evaluation.patience, not validation.patience")
        if self.evaluation.delivery == "compiled_gated":
            raise ValueError("the compile gate is fitted after SFT: set evaluation.delivery=compiled")
        fitting = None if self.soft and self.brief_state else "compiled_no_brief" if self.soft else "compiled_text"
        if fitting and self.evaluation.delivery != fitting:
            raise ValueError(f"with soft=false or brief_state=false, set evaluation.delivery={fitting}")
        return self


class Placement(Settings):
    """Processes of each role with `cluster: ray`, and replacement of lost ones (docs/guides/cluster.md).
    Ignored with `local`. Null: by the cluster's GPUs (training/ray_placement.py); of 8 the paper's 4, 3 and 1."""

    trainers: int | None = Field(default=None, ge=1)  # processes that share an update
    compilers: int | None = Field(default=None, ge=0)  # engines for rollouts; 0: trainers compile themselves
    executors: int | None = Field(default=None, ge=0)  # engines that act; 0: every trainer has an executor
    cpus: float | None = Field(default=None, gt=0)  # per process; null: 1, or a fraction if there are fewer
    retries: int = Field(default=3, ge=0)  # of a request whose engine was lost
    restarts: int = Field(default=3, ge=0)  # of each engine, and of the trainers
    unresponsive_s: float = Field(default=1800.0, gt=0)  # an engine without an answer for so long counts as lost


# Settings that may differ on resume: they say how and where a step is computed, not what.
MAY_CHANGE_ON_RESUME = (
    "backend",
    "micro_batch_size",
    "cluster",
    *(f"placement.{name}" for name in Placement.model_fields),
    "trackers",
    "gradient_checkpointing",
    "loader_workers",
    "on_bad_rows",
    "compiler.attention",
    "executor.attention",
)


class Sampling(Settings):
    """How rollouts sample the policy's text and soft tokens."""

    temperature: float = Field(default=1.2, ge=0)
    latent_temperature: float | None = Field(default=None, ge=0)  # default: as the text


class PolicyLoss(Settings):
    """The policy's loss (paper Eq. 8)."""

    clip_low: float = Field(default=0.2, ge=0, le=1)
    clip_high: float = Field(default=0.28, ge=0)
    text_weight: float = Field(default=1.0, ge=0)  # of a text token; 0 trains the latent channel alone
    latent_weight: float = Field(default=1.0, ge=0)  # of a soft token; 0 trains the text channel alone
    # Gradient of the soft tokens. score (the paper's Eq. 8): from their own probability ratio. pathwise: from the ratio
    # of the action that the executor sampled after them, through the frozen executor; it counts as one soft token.
    latent_gradient: Literal["score", "pathwise"] = "score"
    importance_cap: float = Field(default=0.0, ge=0)  # of the trainer/engine ratio as a weight; 0: no weights


class GrpoConfig(Settings):
    """Stage 2 (paper C.3.2, Table 7)."""

    COMMAND: ClassVar[str] = "train grpo"
    compiler: CompilerConfig = CompilerConfig()  # `checkpoint` names the SFT run to continue
    executor: ExecutorConfig = ExecutorConfig()
    env: AnyEnvSettings = Field(default_factory=default_settings)
    memory: MemoryConfig = MemoryConfig()
    leakage: LeakageConfig = LeakageConfig()
    split: str = "train"
    limit: PositiveInt | None = None
    updates: int = Field(default=500, ge=1)
    tasks: int = Field(default=4, ge=1)  # per update, N of C.3.2
    group_size: int = Field(default=4, ge=2)  # episodes per task, K
    max_steps: int = Field(default=15, ge=1)
    # compiled_gated: compile, and learn from, only the steps that the compile gate selects (docs/guides/training.md).
    delivery: Literal["compiled", "compiled_gated"] = "compiled"
    # Subtracted from the reward of a successful episode per token of its mean emission, down to 0. The paper has 0.
    token_cost: float = Field(default=0.0, ge=0)
    sampling: Sampling = Sampling()
    loss: PolicyLoss = PolicyLoss()
    optimizer: GrpoOptimizer = GrpoOptimizer()
    evaluation: TrainingEvaluation = TrainingEvaluation()
    minibatches: int = Field(default=1, ge=1)  # optimiser steps per pass; 1 with one iteration leaves the clip inert
    iterations: int = Field(default=1, ge=1)  # passes over the samples of an update
    micro_batch_size: int = Field(default=16, ge=1)
    gradient_checkpointing: bool = False  # as in SFT
    backend: Backend = "replicated"  # fsdp and zero3 need a second, whole base for rollouts
    # ray: trainers and engines (for rollouts and actions) are processes on Ray.
    cluster: Cluster = "local"
    placement: Placement = Placement()
    concurrency: int = Field(default=64, ge=1)
    # Play the next update's episodes during this one, with weights that are one update old; needs loss.importance_cap.
    # Never across a checkpoint.
    overlap: bool = False
    seed: Seed = 0
    save_every: int = Field(default=10, ge=1)
    keep: int = Field(default=2, ge=1)
    trackers: tuple[TrackerName, ...] = ()  # receive the metrics (extra `trackers`)

    @field_validator("compiler")
    @classmethod
    def _trains_here(cls, value: CompilerConfig) -> CompilerConfig:
        if value.engine == "http":
            raise ValueError("GRPO trains the compiler: set engine to hf or vllm; for separate engines set cluster=ray")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> GrpoConfig:
        _check_sharded_backend(self)
        if self.executor.engine == "api" and self.loss.latent_weight > 0:
            raise ValueError("an API executor reads no soft tokens: train text only (loss.latent_weight=0)")
        here = self.executor.engine == "hf"
        if self.loss.latent_gradient == "pathwise" and not (here and self.executor.temperature > 0):
            raise ValueError(
                "loss.latent_gradient=pathwise needs the gradient of the executor's sampled action: set "
                "executor.engine=hf and executor.temperature above 0 (1.0 is usual)"
            )
        if self.overlap and not self.loss.importance_cap:
            raise ValueError("overlap trains on episodes of older weights: set loss.importance_cap (2.0 is usual)")
        return self


def _check_sharded_backend(config: SftConfig | GrpoConfig) -> None:
    """Raise ValueError for settings that backends with sliced weights do not support."""
    if config.executor.quantize and config.backend in ("fsdp", "zero3"):
        raise ValueError(
            f"backend {config.backend} cannot slice the weights of executor.quantize: use replicated or zero2"
        )
    if config.gradient_checkpointing and config.backend == "zero3":
        raise ValueError(
            "gradient_checkpointing fails with backend zero3, which frees weights after a pass: use fsdp or zero2"
        )
