"""Every setting of every command, typed, with its default and its place in the paper. YAML files fill these models.

Defaults are the paper's (Table 7) unless a comment says why not. Unknown keys are errors.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Lora(Settings):
    rank: int = Field(default=16, ge=1)
    alpha: int = Field(default=32, ge=1)
    dropout: float = Field(default=0.1, ge=0, lt=1)
    targets: tuple[str, ...] = ("q_proj", "v_proj")


class Soft(Settings):
    """Soft-Mem (paper 3.2.3)."""

    n_tokens: int = Field(default=16, ge=1)
    projector: Literal["gaussian", "linear"] = "gaussian"
    emb_std: float | Literal["auto"] = 0.0261  # auto: measured on the executor's embedding table
    init_log_sigma: float = Field(default=-1.0, ge=-5, le=2)


class CompilerConfig(Settings):
    model: str = "assets/compiler-tiny"  # any HF name or folder: a Qwen2.5-VL-like VLM or a text LM
    checkpoint: str | None = None  # a checkpoint of `train sft` or `train grpo`: adapter and projector
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    device: str = "auto"
    memory_token: str = "auto"  # reserved token that marks the N memory positions
    instructions: Literal["none", "full"] = "full"  # none: for tiny models that were trained without
    lora: Lora = Lora()
    soft: Soft = Soft()
    temperature: float = Field(default=0.0, ge=0)  # 0: greedy text and the mean of the soft tokens
    max_new_tokens: int = Field(default=512, ge=1)
    batch_size: int = Field(default=64, ge=1)


class ExecutorConfig(Settings):
    model: str = "assets/executor-tiny"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    device: str = "auto"
    memory_token: str = "auto"
    instructions: Literal["none", "full"] = "full"
    mode: Literal["choice", "generate"] = "choice"  # among admissible commands by likelihood, or free text grounded
    max_new_tokens: int = Field(default=64, ge=1)
    batch_size: int = Field(default=64, ge=1)


class EnvConfig(Settings):
    """Which environment. `env: alfworld` is short for `env: {name: alfworld}`."""

    name: Literal["household", "alfworld"] = "household"
    data_root: str | None = None  # alfworld: folder that holds json_2.1.1 (default: $ALFWORLD_DATA)
    seed: int = 0  # household: another seed is another set of scenes
    scenes: dict[str, int] = {"train": 64, "valid": 48, "test": 48}  # household: number of scenes by split
    images: bool = True
    visual_share: float = Field(default=0.5, ge=0, le=1)


class MemoryConfig(Settings):
    """Where M comes from. Without `bank`, an experience bank is collected by the expert before evaluation."""

    bank: str | None = None
    version: int | None = None  # bank version to read (default: the newest)
    k: int = Field(default=4, ge=0)  # entries retrieved per task
    embed: str | None = None  # a sentence-transformers model: rank by embeddings instead of words (extra `embed`)
    experience_split: str | None = None  # split played by the expert to fill the bank (default: by environment)
    experience_limit: int | None = None


class SftWeights(Settings):
    """Paper Eq. 9."""

    text: float = 1.0
    action: float = 1.0
    entropy: float = 0.1
    latent: float = 1.0
    orth: float = 0.1


class SftConfig(Settings):
    """Stage 1 (paper C.3.1, Table 7)."""

    compiler: CompilerConfig = CompilerConfig()
    executor: ExecutorConfig = ExecutorConfig()
    rows: str = ""  # folder written by `memcompiler collect`
    epochs: float = Field(default=5.0, gt=0)
    max_steps: int | None = None  # overrides epochs
    batch_size: int = Field(default=2, ge=1)  # global
    micro_batch_size: int = Field(default=2, ge=1)
    lr: float = Field(default=1e-5, gt=0)
    projector_lr: float = Field(default=1e-3, gt=0)  # the projector hardly moves at the LoRA's rate
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup: float = Field(default=0.05, ge=0, le=1)
    grad_clip: float = 1.0
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)
    latent: Literal["gauss_nll", "soft_mse", "lm_head", "none"] = "gauss_nll"
    weights: SftWeights = SftWeights()
    soft: bool = True  # False: text channel only (no projector, no action loss)
    seed: int = 0
    save_every: int = Field(default=100, ge=1)
    keep: int = Field(default=2, ge=1)


class CollectConfig(Settings):
    """The expert teacher plays the training tasks: experience into the bank, teacher steps into SFT rows."""

    env: EnvConfig = EnvConfig()
    memory: MemoryConfig = MemoryConfig()
    split: str = "train"
    limit: int | None = None
    noise: float = Field(
        default=0.15, ge=0, le=1
    )  # share of steps on which the expert wanders off, so rows cover recovery
    keep_noaction: float = Field(default=1.0, ge=0, le=1)  # share of rows kept in which the compiler says nothing
    max_steps: int = Field(default=20, ge=1)
    seed: int = 0

    _env = field_validator("env", mode="before")(lambda value: {"name": value} if isinstance(value, str) else value)


DELIVERIES = (
    "none", "static", "compiled_text", "compiled", "compiled_no_brief",
    "expert_compiler", "expert_random_entry", "compiled_shuffled_soft",
)  # fmt: skip


class EvalConfig(Settings):
    env: EnvConfig = EnvConfig()
    compiler: CompilerConfig = CompilerConfig()
    executor: ExecutorConfig = ExecutorConfig()
    memory: MemoryConfig = MemoryConfig()
    deliveries: tuple[str, ...] = DELIVERIES[:4]
    split: str | None = None  # default: test (household), valid_seen (alfworld)
    limit: int | None = None
    max_steps: int = Field(default=15, ge=1)
    concurrency: int = Field(default=64, ge=1)
    seed: int = 0

    _env = field_validator("env", mode="before")(lambda value: {"name": value} if isinstance(value, str) else value)

    @field_validator("deliveries")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := set(value) - set(DELIVERIES):
            raise ValueError(f"unknown deliveries {sorted(unknown)}; there are {list(DELIVERIES)}")
        return value


class QuickstartConfig(Settings):
    """The main job: collect, SFT, rollouts, evaluation. One file holds all of it."""

    seed: int = 0  # scenes, SFT and evaluation take it from here (quickstart.yaml refers to it)
    collect: CollectConfig
    sft: SftConfig
    eval: EvalConfig
    rollouts: int = Field(default=8, ge=0)  # episodes sampled at T = 1.2 to show that the RL loop runs
