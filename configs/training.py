"""Settings of the two training stages: SFT (paper C.3.1) and GRPO (paper C.3.2).

Defaults are the paper's (Table 7) unless a comment says why not.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator, model_validator

from configs.collect import LeakageConfig, MemoryConfig
from configs.models import CompilerConfig, ExecutorConfig
from envs.registry import AnyEnvSettings, default_settings
from runtime.cluster import Cluster
from runtime.settings import PathName, Seed, Settings

Backend = Literal["replicated", "fsdp", "zero2", "zero3"]  # how processes share a step: training/backend.py
Beta = Annotated[float, Field(ge=0, lt=1)]
TrackerName = Literal["trackio", "wandb", "tensorboard"]  # training/trackers.py


class Optimizer(Settings):
    """AdamW over LoRA and projector; linear warm-up, then a cosine (paper Table 7, stage 1)."""

    lr: float = Field(default=1e-5, gt=0)
    projector_lr: float | None = Field(default=1e-3, gt=0)  # it hardly moves at the LoRA's rate; null: lr
    min_lr: float = Field(default=0.0, ge=0)  # where the cosine ends
    warmup: float = Field(default=0.05, ge=0, le=1)  # share of the steps
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    projector_eps: float | None = Field(default=None, gt=0)  # null: eps
    weight_decay: NonNegativeFloat = 0.0
    grad_clip: PositiveFloat = 1.0


class GrpoOptimizer(Optimizer):
    """The same with stage 2's values."""

    lr: float = Field(default=1e-6, gt=0)
    projector_lr: float | None = Field(default=None, gt=0)  # as in the paper
    min_lr: float = Field(default=1e-7, ge=0)
    warmup: float = Field(default=0.0, ge=0, le=1)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: PositiveFloat = 1e-5
    weight_decay: NonNegativeFloat = 0.01


class SftWeights(Settings):
    """Paper Eq. 9."""

    text: NonNegativeFloat = 1.0
    action: NonNegativeFloat = 1.0
    entropy: NonNegativeFloat = 0.1
    latent: NonNegativeFloat = 1.0
    orth: NonNegativeFloat = 0.1


class Validation(Settings):
    """Rows that SFT holds out, all rows of a task or none, and what their loss decides. Off by default."""

    share: float = Field(default=0.0, ge=0, lt=1)  # of the tasks, at least one; 0: all rows train
    every: int = Field(default=50, ge=1)  # steps from one validation to the next; there is one at the end, too
    patience: int | None = Field(default=None, ge=1)  # stop after so many in a row without a lower loss; null: never


class Evaluation(Settings):
    """Tasks that training goes without and that are played now and then, and what their success decides. Off by
    default. SFT plays tasks whose rows `validation` holds out, GRPO such of its own split."""

    tasks: int = Field(default=0, ge=0)  # 0: none, and no step is other than without the setting
    every: int = Field(default=50, ge=1)  # steps or updates from one to the next; there is one at the end, too
    delivery: Literal["compiled", "compiled_text", "compiled_no_brief", "compiled_needed"] = "compiled"
    max_steps: int = Field(default=15, ge=1)  # of an episode
    decides: bool = True  # success, instead of the validation loss, says which checkpoint is the best one
    patience: int | None = Field(default=None, ge=1)  # stop after so many in a row without more success; null: never

    @model_validator(mode="after")
    def _decides_when_to_stop(self) -> Evaluation:
        if self.patience and not (self.tasks and self.decides):
            raise ValueError("evaluation.patience needs evaluation.tasks above 0 and evaluation.decides")
        return self


class SftConfig(Settings):
    """Stage 1 (paper C.3.1, Table 7)."""

    COMMAND: ClassVar[str] = "train sft"
    compiler: CompilerConfig = CompilerConfig()
    executor: ExecutorConfig = ExecutorConfig()
    rows: PathName | tuple[PathName, ...] = ""  # folders written by `memcompiler collect`, or patterns of such
    on_bad_rows: Literal["error", "skip"] = "error"  # of rows that cannot be trained on; skipped ones are recorded
    allow_leakage: bool = False  # train on rows that leak, or whose tasks are unknown; the run folder says so
    epochs: float = Field(default=5.0, gt=0)
    max_steps: PositiveInt | None = None  # overrides epochs
    batch_size: int = Field(default=2, ge=1)  # global
    micro_batch_size: int = Field(default=2, ge=1)
    optimizer: Optimizer = Optimizer()
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)
    latent: Literal["gauss_nll", "soft_mse", "lm_head", "none"] = "gauss_nll"
    weights: SftWeights = SftWeights()
    soft: bool = True  # False: text channel only (no projector, no action loss)
    brief_state: bool = True  # False: rows as a compiler without one reads and answers them (compiled_no_brief)
    validation: Validation = Validation()
    evaluation: Evaluation = Evaluation()
    loader_workers: int = Field(default=0, ge=0)  # processes of each rank that read and encode rows ahead of training
    length_buckets: int = Field(default=0, ge=0)  # sort rows by length within so many batches; 0: not
    gradient_checkpointing: bool = False  # of both models' layers: a third more time for a fraction of the memory
    backend: Backend = "replicated"
    seed: Seed = 0
    save_every: int = Field(default=100, ge=1)
    keep: int = Field(default=2, ge=1)
    trackers: tuple[TrackerName, ...] = ()  # that get what metrics.jsonl gets (extra `trackers`)

    @model_validator(mode="after")
    def _can_checkpoint(self) -> SftConfig:
        _refuse_for_slices(self)
        return self

    @model_validator(mode="after")
    def _can_evaluate(self) -> SftConfig:
        if not self.evaluation.tasks:
            return self
        if not self.validation.share:
            raise ValueError("evaluation plays tasks whose rows are held out: set validation.share")
        if self.backend in ("fsdp", "zero3"):
            raise ValueError(f"evaluation plays with whole models, which backend {self.backend} has in slices")
        if self.evaluation.decides and self.validation.patience:
            raise ValueError("success decides (evaluation.decides): set evaluation.patience, not validation.patience")
        if self.evaluation.delivery == "compiled_needed":
            raise ValueError("which steps need compiling is fitted when SFT is over: evaluation.delivery=compiled")
        fitting = None if self.soft and self.brief_state else "compiled_no_brief" if self.soft else "compiled_text"
        if fitting and self.evaluation.delivery != fitting:
            raise ValueError(f"what is trained without is evaluated without: evaluation.delivery={fitting}")
        return self


class Placement(Settings):
    """Processes of each role with `cluster: ray`, and who is replaced how often (docs/cluster.md); of no effect with
    `local`. Null: by what the cluster has (`plan.engines`); of 8 GPUs the paper's 4, 3 and 1."""

    trainers: int | None = Field(default=None, ge=1)  # the processes that share an update
    compilers: int | None = Field(default=None, ge=0)  # engines that roll out; 0: every trainer does so itself
    executors: int | None = Field(default=None, ge=0)  # engines that act; 0: every trainer has one
    cpus: float | None = Field(default=None, gt=0)  # of each process; null: 1, or less where there are fewer
    retries: int = Field(default=3, ge=0)  # times that a request whose engine was lost is given again
    restarts: int = Field(default=3, ge=0)  # times that each engine is replaced, and that trainers begin again
    silence_s: float = Field(default=1800.0, gt=0)  # an engine that says nothing for so long is lost


# What a run may go on with otherwise: it says how and where a step is computed, not what.
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
    """How the policy's text and soft tokens are drawn in rollouts."""

    temperature: float = Field(default=1.2, ge=0)
    latent_temperature: float | None = Field(default=None, ge=0)  # default: as the text


class PolicyLoss(Settings):
    """The policy's loss (paper Eq. 8)."""

    clip_low: float = Field(default=0.2, ge=0, le=1)
    clip_high: float = Field(default=0.28, ge=0)
    kl: float = Field(default=0.0, ge=0)  # weight of KL(policy || the checkpoint that training started from)
    aggregation: Literal["episode", "step", "token"] = "token"  # what counts alike in the loss
    text_weight: float = Field(default=1.0, ge=0)  # of a text token; 0 trains the latent channel alone
    latent_weight: float = Field(default=1.0, ge=0)  # of a soft token; 0 trains the text channel alone
    # How reward reaches the soft tokens. score (the paper's Eq. 8): by their own probability ratio. pathwise: by the
    # ratio of the action that the executor drew after reading them, through the frozen executor; the action counts as
    # one soft token.
    latent_gradient: Literal["score", "pathwise"] = "score"
    importance_cap: float = Field(default=0.0, ge=0)  # cap of the trainer/engine ratio as a weight; 0: not weighted


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
    # compiled_needed: only steps of which the guess beside the checkpoint says so are compiled (docs/training.md), and
    # learnt from.
    delivery: Literal["compiled", "compiled_needed"] = "compiled"
    # Taken from the reward of a solved episode for every token that its emissions have at a step on average, down to 0
    # at most; a failed one has nothing to lose. The paper's reward is 0: success alone.
    token_cost: float = Field(default=0.0, ge=0)
    sampling: Sampling = Sampling()
    loss: PolicyLoss = PolicyLoss()
    optimizer: GrpoOptimizer = GrpoOptimizer()
    evaluation: Evaluation = Evaluation()
    minibatches: int = Field(default=1, ge=1)  # optimiser steps per pass; 1 with one iteration leaves the clip inert
    iterations: int = Field(default=1, ge=1)  # passes over the samples of an update
    micro_batch_size: int = Field(default=16, ge=1)
    gradient_checkpointing: bool = False  # in the update, as in SFT
    backend: Backend = "replicated"  # fsdp and zero3 hold the base a second time, whole: to roll out with
    # ray: trainers, and engines that roll out and act, are processes on Ray, on this machine or on many.
    cluster: Cluster = "local"
    placement: Placement = Placement()
    concurrency: int = Field(default=64, ge=1)
    # Play the next update's episodes while this one is learnt: they come from weights that are one step old, which
    # loss.importance_cap has to make up for. Checkpoints are synchronous points.
    overlap: bool = False
    seed: Seed = 0
    save_every: int = Field(default=10, ge=1)
    keep: int = Field(default=2, ge=1)
    trackers: tuple[TrackerName, ...] = ()  # that get what metrics.jsonl gets (extra `trackers`)

    @field_validator("compiler")
    @classmethod
    def _trains_here(cls, value: CompilerConfig) -> CompilerConfig:
        if value.engine == "http":
            raise ValueError("GRPO trains the compiler itself: engine hf or vllm; engines beside it: cluster=ray")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> GrpoConfig:
        _refuse_for_slices(self)
        if self.executor.engine == "api" and self.loss.latent_weight > 0:
            raise ValueError("a closed executor reads no soft tokens: train text alone (loss.latent_weight=0)")
        here = self.executor.engine == "hf"
        if self.loss.latent_gradient == "pathwise" and not (here and self.executor.temperature > 0):
            raise ValueError(
                "loss.latent_gradient=pathwise follows the gradient through the executor's own draw: "
                "executor.engine=hf and executor.temperature above 0 (1.0 is usual)"
            )
        if self.overlap and not self.loss.importance_cap:
            raise ValueError("overlap learns from episodes of older weights: set loss.importance_cap (2.0 is usual)")
        return self


def _refuse_for_slices(config: SftConfig | GrpoConfig) -> None:
    if config.executor.quantize and config.backend in ("fsdp", "zero3"):
        raise ValueError(
            f"executor.quantize: backend {config.backend} cannot cut quantised weights into slices: replicated or zero2"
        )
    if config.gradient_checkpointing and config.backend == "zero3":
        raise ValueError(
            "gradient_checkpointing finds weights gone that ZeRO-3 gathers for one pass only: backend fsdp or zero2"
        )
