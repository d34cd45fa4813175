"""Settings of the two training stages: SFT (paper C.3.1) and GRPO (paper C.3.2).

Defaults are the paper's (Table 7) where it gives one, except SFT's `optimizer.projector_lr`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator, model_validator

from configs.collect import LeakageConfig, MemoryConfig, refuse_unread_views
from configs.models import Batching, CompilerConfig, ExecutorConfig
from envs.registry import AnyEnvSettings, default_settings
from runtime.cluster import Cluster
from runtime.settings import PathName, Seed, Settings

Backend = Literal["replicated", "fsdp", "zero2", "zero3"]  # how processes share an optimiser step (training/backend.py)
Beta = Annotated[float, Field(ge=0, lt=1)]
TrackerName = Literal["trackio", "wandb", "tensorboard"]  # training/trackers.py


class Optimizer(Settings):
    """AdamW over LoRA and projector; linear warm-up, then a cosine (paper Table 7, stage 1)."""

    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate of LoRA."""
    projector_lr: float | None = Field(default=1e-3, gt=0)
    """Peak learning rate of the projector, for which LoRA's is too low; null: `lr`."""
    min_lr: float = Field(default=0.0, ge=0)
    """LoRA's learning rate at the end of the cosine; the projector's falls by the same factor."""
    warmup: float = Field(default=0.05, ge=0, le=1)
    """Share of the steps with a linear warm-up."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's betas."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon for LoRA."""
    projector_eps: float | None = Field(default=None, gt=0)
    """AdamW's epsilon for the projector; null: `eps`."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's weight decay."""
    grad_clip: PositiveFloat = 1.0
    """Maximum norm of the gradient."""


class GrpoOptimizer(Optimizer):
    """AdamW with stage 2's values."""

    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate of LoRA."""
    projector_lr: float | None = Field(default=None, gt=0)
    """Peak learning rate of the projector; null: `lr`."""
    min_lr: float = Field(default=1e-7, ge=0)
    """LoRA's learning rate at the end of the cosine; the projector's falls by the same factor."""
    warmup: float = Field(default=0.0, ge=0, le=1)
    """Share of the steps with a linear warm-up."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's betas."""
    eps: PositiveFloat = 1e-5
    """AdamW's epsilon for LoRA."""
    weight_decay: NonNegativeFloat = 0.01
    """AdamW's weight decay."""


class SftWeights(Settings):
    """Weights of the loss terms (paper Eq. 9)."""

    text: NonNegativeFloat = 1.0
    """Weight of the emission's negative log-likelihood (Eq. 7)."""
    action: NonNegativeFloat = 1.0
    """Weight of the executor's negative log-likelihood of the action, given text and soft tokens."""
    entropy: NonNegativeFloat = 0.1
    """Weight of the negative entropy of the soft tokens."""
    latent: NonNegativeFloat = 1.0
    """Weight of the loss that aligns soft tokens with the memory's content (Eq. 6)."""
    orth: NonNegativeFloat = 0.1
    """Weight of the cosine between the mean hidden states of soft tokens and text."""


class TrainingValidation(Settings):
    """Validation of SFT on rows of held-out tasks; its loss may choose the best checkpoint. Off by default."""

    share: float = Field(default=0.0, ge=0, lt=1)
    """Share of the tasks whose rows are held out, at least one task; 0: no validation."""
    every: int = Field(default=50, ge=1)
    """Steps between validations; the last step is always validated."""
    patience: int | None = Field(default=None, ge=1)
    """Stop after this many validations without a lower loss; null: never."""


class TrainingEvaluation(Settings):
    """Evaluation during training on held-out tasks; their success may choose the best checkpoint. Off by default. SFT
    plays tasks of `validation`, GRPO tasks held out from its split."""

    tasks: int = Field(default=0, ge=0)
    """Number of held-out tasks to play; 0: no evaluation."""
    every: int = Field(default=50, ge=1)
    """SFT steps or GRPO updates between evaluations; the last one is always evaluated."""
    delivery: Literal["compiled", "compiled_text", "compiled_no_brief", "compiled_gated", "memgen", "memgen_gated"] = (
        "compiled"
    )
    """Delivery under which the tasks are played."""
    max_steps: int = Field(default=15, ge=1)
    """Maximum steps of an episode."""
    selects_best: bool = True
    """Success chooses the best checkpoint; false: SFT's validation loss does."""
    patience: int | None = Field(default=None, ge=1)
    """Stop after this many evaluations without a higher success rate; null: never."""

    @model_validator(mode="after")
    def _decides_when_to_stop(self) -> TrainingEvaluation:
        if self.patience and not (self.tasks and self.selects_best):
            raise ValueError("evaluation.patience needs evaluation.tasks above 0 and evaluation.selects_best")
        return self


class SftConfig(Settings):
    """Stage 1 (paper C.3.1, Table 7)."""

    COMMAND: ClassVar[str] = "train sft"
    compiler: CompilerConfig = CompilerConfig()
    """Memory compiler to train."""
    executor: ExecutorConfig = ExecutorConfig()
    """Frozen executor that the gradient passes through; needs engine hf."""
    rows: PathName | tuple[PathName, ...] = ""
    """Row folders written by `memcompiler collect`, or glob patterns of them."""
    on_bad_rows: Literal["error", "skip"] = "error"
    """error: refuse rows that cannot be trained on; skip: leave them out and record them."""
    allow_leakage: bool = False
    """Allow rows that leak, or whose tasks are unknown; the run folder records it."""
    epochs: float = Field(default=5.0, gt=0)
    """Passes over the training rows."""
    max_steps: PositiveInt | None = None
    """Number of optimiser steps; overrides `epochs`."""
    batch_size: int = Field(default=2, ge=1)
    """Rows per optimiser step, over all processes."""
    micro_batch_size: int = Field(default=2, ge=1)
    """Rows per forward pass of a process, which bounds its memory."""
    optimizer: Optimizer = Optimizer()
    """AdamW and its learning-rate schedule."""
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)
    """Label smoothing of emission and action tokens."""
    latent: Literal["gauss_nll", "soft_mse", "lm_head", "none"] = "gauss_nll"
    """Loss that aligns soft tokens with the memory's content: likelihood of its embeddings, squared distance from them,
    its text as the executor decodes it, or none."""
    weights: SftWeights = SftWeights()
    """Weights of the loss terms."""
    soft: bool = True
    """False: train the text channel only, without projector and action loss."""
    brief_state: bool = True
    """False: train on rows without Brief State, for delivery compiled_no_brief."""
    text: bool = True
    """False: train soft tokens made from goal, past commands and view alone, without memory and text, for delivery
    memgen."""
    validation: TrainingValidation = TrainingValidation()
    """Validation on rows of held-out tasks."""
    evaluation: TrainingEvaluation = TrainingEvaluation()
    """Evaluation on the held-out tasks of `validation`."""
    loader_workers: int = Field(default=0, ge=0)
    """Worker processes per rank that encode rows ahead of training; 0: none."""
    share_prefix: bool = True
    """Read what rows of a micro-batch begin with in common (instructions, task memory) once. Rows of an episode lie
    together, and episodes are shuffled; false: rows are shuffled."""
    length_buckets: int = Field(default=0, ge=0)
    """Batch rows of similar length, sorted within windows of this many batches; 0: off."""
    gradient_checkpointing: bool = False
    """Recompute activations of both models: a third more time, much less memory."""
    backend: Backend = "replicated"
    """How processes share an optimiser step (`training/backend.py`)."""
    seed: Seed = 0
    """Seed of the row order, dropout, soft-token noise and held-out tasks."""
    save_every: int = Field(default=100, ge=1)
    """Steps between checkpoints."""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep, besides the best."""
    trackers: tuple[TrackerName, ...] = ()
    """Experiment trackers that receive the metrics (extra `trackers`)."""

    @model_validator(mode="after")
    def _can_checkpoint(self) -> SftConfig:
        _check_sharded_backend(self)
        return self

    @model_validator(mode="after")
    def _without_text(self) -> SftConfig:
        if self.text:
            return self
        needed = {
            "soft": ("true", self.soft),
            "brief_state": ("false", not self.brief_state),
            "executor.soft_on": ("always", self.executor.soft_on == "always"),
            "latent": ("none", self.latent == "none"),
        }
        if missing := [f"{name}={value}" for name, (value, holds) in needed.items() if not holds]:
            raise ValueError(f"text=false trains soft tokens without memory and guidance: set {', '.join(missing)}")
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
        if self.evaluation.delivery.endswith("_gated"):
            raise ValueError("the compile gate is fitted after SFT: set evaluation.delivery=compiled (or memgen)")
        fitting = None if self.soft and self.brief_state else "compiled_no_brief" if self.soft else "compiled_text"
        fitting = fitting if self.text else "memgen"
        if fitting and self.evaluation.delivery != fitting:
            raise ValueError(f"with soft=false, brief_state=false or text=false, set evaluation.delivery={fitting}")
        if self.text and self.evaluation.delivery == "memgen":
            raise ValueError("evaluation.delivery=memgen plays a compiler that is trained with text=false")
        return self


class Placement(Settings):
    """Processes of each role with `cluster: ray`, and replacement of lost ones (docs/guides/cluster.md).
    Ignored with `local`. Null: by the cluster's GPUs (training/ray_placement.py); of 8 the paper's 4, 3 and 1."""

    trainers: int | None = Field(default=None, ge=1)
    """Processes that share an update; null: half of the GPUs."""
    compilers: int | None = Field(default=None, ge=0)
    """Compiler engines for rollouts; 0: trainers compile themselves; null: as the remaining GPUs allow."""
    executors: int | None = Field(default=None, ge=0)
    """Executor engines; 0: every trainer has an executor; null: one per eight GPUs."""
    cpus: float | None = Field(default=None, gt=0)
    """CPUs per process; null: 1, or a fraction if the cluster has fewer."""
    retries: int = Field(default=3, ge=0)
    """Retries of a request whose engine was lost."""
    restarts: int = Field(default=3, ge=0)
    """Restarts of each engine, and of the trainers."""
    unresponsive_s: float = Field(default=1800.0, gt=0)
    """Seconds without an answer after which an engine counts as lost."""


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
    """Temperature of the text."""
    latent_temperature: float | None = Field(default=None, ge=0)
    """Temperature of the soft tokens; null: `temperature`."""


class PolicyLoss(Settings):
    """The policy's loss (paper Eq. 8)."""

    clip_low: float = Field(default=0.2, ge=0, le=1)
    """Clip the probability ratio at 1 - `clip_low` where the advantage is negative."""
    clip_high: float = Field(default=0.28, ge=0)
    """Clip the probability ratio at 1 + `clip_high` where the advantage is positive."""
    text_weight: float = Field(default=1.0, ge=0)
    """Weight of a text token; 0 trains the latent channel alone."""
    latent_weight: float = Field(default=1.0, ge=0)
    """Weight of a soft token; 0 trains the text channel alone."""
    latent_gradient: Literal["density_root", "pathwise"] = "density_root"
    """Gradient of the soft tokens. density_root: from the d-th root of each soft token's density ratio (d dimensions)
    as Eq. 8's ratio. pathwise: through the frozen executor, from the ratio of the action that it sampled, which counts
    as one soft token."""
    importance_cap: float = Field(default=0.0, ge=0)
    """Cap of the importance weight of each token: its probability under the weights before the update over that under
    the engine, or the older weights, that sampled it (truncated importance sampling); 0: no importance weights."""


class FurtherEnvironment(Settings):
    """An environment that GRPO trains on beside `env`, and settings of its own."""

    env: AnyEnvSettings
    """Its settings, without the name, which is its key in `also`."""
    split: str | None = None
    """Split of the environment; null: `split` of the run."""
    limit: PositiveInt | None = None
    """Maximum number of tasks of the split; null: `limit` of the run."""
    bank: PathName | None = None
    """Bank that its tasks recall from; null: the expert fills one."""
    leakage: LeakageConfig | None = None
    """Check for overlap with held-out tasks; null: its evaluation split, with `leakage.drop` of the run."""


class GrpoConfig(Settings):
    """Stage 2 (paper C.3.2, Table 7)."""

    COMMAND: ClassVar[str] = "train grpo"
    compiler: CompilerConfig = CompilerConfig()
    """Memory compiler to train; `checkpoint` names the SFT run to continue."""
    executor: ExecutorConfig = ExecutorConfig()
    """Frozen executor."""
    env: AnyEnvSettings = Field(default_factory=default_settings)
    """Environment and its settings; `env=NAME` is short for `env.name=NAME`."""
    also: dict[str, FurtherEnvironment] = Field(default={})
    """Further environments by name, as in {scienceworld: {limit: 500}}. Their tasks take turns with those of `env`, so
    that each environment has an equal share of the episodes."""
    memory: MemoryConfig = MemoryConfig()
    """Memory that the compiler recalls from."""
    leakage: LeakageConfig = LeakageConfig()
    """Check for overlap with held-out tasks."""
    split: str = "train"
    """Split of the environment."""
    limit: PositiveInt | None = None
    """Maximum number of tasks of the split."""
    own_scene: float = Field(default=0.5, ge=0, le=1)
    """Share of the tasks that may recall entries of their own scene; the others stand in for unseen scenes. No effect
    where tasks have no scene."""
    updates: int = Field(default=500, ge=1)
    """Number of updates."""
    tasks: int = Field(default=4, ge=1)
    """Tasks per update (N of C.3.2)."""
    group_size: int = Field(default=4, ge=2)
    """Episodes per task (K of C.3.2)."""
    max_steps: int = Field(default=15, ge=1)
    """Maximum steps of an episode."""
    delivery: Literal["compiled", "compiled_gated", "compiled_text", "compiled_no_brief", "memgen", "memgen_gated"] = (
        "compiled"
    )
    """compiled_gated: compile, and learn from, only the steps that the compile gate selects
    (docs/guides/training.md). compiled_text, compiled_no_brief, memgen: continue a checkpoint of `soft=false`,
    `brief_state=false` or `text=false`. memgen_gated: as memgen, at the steps that the gate selects."""
    token_cost: float = Field(default=0.0, ge=0)
    """Cost per token of an episode's mean emission, subtracted from the reward of success, down to 0; the paper has
    none."""
    sampling: Sampling = Sampling()
    """Sampling of the policy's text and soft tokens."""
    loss: PolicyLoss = PolicyLoss()
    """Policy loss."""
    optimizer: GrpoOptimizer = GrpoOptimizer()
    """AdamW and its learning-rate schedule."""
    evaluation: TrainingEvaluation = TrainingEvaluation()
    """Evaluation on tasks held out from the split."""
    minibatches: int = Field(default=1, ge=1)
    """Optimiser steps per pass; with one step and one iteration nothing is clipped."""
    iterations: int = Field(default=1, ge=1)
    """Passes over the samples of an update."""
    micro_batch_size: int = Field(default=16, ge=1)
    """Samples per forward pass of a process, which bounds its memory."""
    share_prefix: bool = True
    """Read what samples of a micro-batch begin with in common (instructions, task memory) once."""
    gradient_checkpointing: bool = False
    """Recompute activations: a third more time, much less memory."""
    backend: Backend = "replicated"
    """How processes share an optimiser step (`training/backend.py`); fsdp and zero3 need a second, whole base for
    rollouts."""
    cluster: Cluster = "local"
    """ray: trainers and engines are processes on Ray."""
    placement: Placement = Placement()
    """Processes of `cluster: ray`."""
    concurrency: int = Field(default=64, ge=1)
    """Episodes played side by side by a process, which share batches."""
    batching: Batching = "auto"
    """lockstep: episodes wait for each other at every step, so that their batches, and the last digits, do not depend
    on timing. continuous: none waits. auto: continuous where every engine in use is vLLM or is reached over HTTP."""
    max_staleness: int = Field(default=0, ge=0)
    """Play episodes up to this number of updates before they are learned from, except across a checkpoint. 0: rollouts
    and updates take turns. Above 0 it needs loss.importance_cap."""
    seed: Seed = 0
    """Seed of sampling and of the order of tasks; scenes have `env.seed`."""
    save_every: int = Field(default=10, ge=1)
    """Updates between checkpoints."""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep, besides the best."""
    trackers: tuple[TrackerName, ...] = ()
    """Experiment trackers that receive the metrics (extra `trackers`)."""

    @field_validator("also", mode="before")
    @classmethod
    def _named_by_key(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        own = {name: {} if block is None else block for name, block in value.items()}
        return {
            name: {**block, "env": {**(block.get("env") or {}), "name": name}} if isinstance(block, Mapping) else block
            for name, block in own.items()
        }

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
        if self.delivery == "compiled_text" and self.loss.latent_weight > 0:
            raise ValueError("delivery compiled_text has no soft tokens to train: set loss.latent_weight=0")
        if self.delivery.startswith("memgen") and not (self.loss.latent_weight and self.executor.soft_on == "always"):
            raise ValueError(
                "delivery memgen has soft tokens only, which are read without guidance: set executor.soft_on=always "
                "and loss.latent_weight above 0"
            )
        local = self.executor.engine in ("hf", "vllm")
        if self.loss.latent_gradient == "pathwise" and not (local and self.executor.temperature > 0):
            raise ValueError(
                "loss.latent_gradient=pathwise needs the gradient of the executor's sampled action: set "
                "executor.engine=hf or vllm and executor.temperature above 0 (1.0 is usual)"
            )
        if self.loss.latent_gradient == "pathwise" and self.executor.past_soft == "kept":
            raise ValueError("loss.latent_gradient=pathwise trains the newest soft tokens: executor.past_soft=dropped")
        if self.max_staleness and not self.loss.importance_cap:
            raise ValueError("max_staleness trains on episodes of older weights: set loss.importance_cap (2 is usual)")
        self._check_environments()
        return self

    def _check_environments(self) -> None:
        named = [part.env.name for part in self.parts]
        for name in named:
            refuse_unread_views(name, self.memory)
        if self.env.name in self.also:
            raise ValueError(f"also: {self.env.name} is the environment of `env` already")
        if self.also and self.executor.examples is not None:
            raise ValueError(f"executor.examples are of one environment, and this run has {' and '.join(named)}")

    @property
    def parts(self) -> list[GrpoConfig]:
        """Return the settings of each environment alone, `env`'s first."""
        alone = self.model_copy(update={"also": {}})
        return [alone, *(alone.model_copy(update=self._changes(further)) for further in self.also.values())]

    def _changes(self, further: FurtherEnvironment) -> dict[str, Any]:
        return {
            "env": further.env,
            "split": further.split or self.split,
            "limit": further.limit or self.limit,
            "memory": self.memory.model_copy(update={"bank": further.bank, "version": None}),
            "leakage": further.leakage or LeakageConfig(drop=self.leakage.drop),
        }


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
