"""Settings of the memory compiler and of its Soft-Mem channel (paper 3.2, Table 7)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from configs.engines import ServerSettings, VllmEngine
from runtime.settings import Settings

# The environment variable with a compiler server's key: never in settings, which run folders keep.
COMPILER_KEY = "MEMCOMPILER_COMPILER_KEY"


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


class CompilerConfig(ServerSettings):
    start: ClassVar[str] = "memcompiler serve compiler --checkpoint RUN"
    model: str = "zoo/household/compiler"  # any HF name or folder: a Qwen2.5-VL-like VLM or a text LM
    checkpoint: str | None = None  # a checkpoint of `train sft` or `train grpo`: adapter and projector
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    device: str = "auto"
    # What evaluation and rollouts run on; training scores with hf. http: `memcompiler serve compiler` at `url`.
    engine: Literal["hf", "vllm", "http"] = "hf"  # pyright: ignore[reportIncompatibleVariableOverride]
    vllm: VllmEngine = VllmEngine()
    memory_token: str = "auto"  # reserved token that marks the N memory positions
    instructions: Literal["none", "full"] = "full"  # none: for tiny models that were trained without
    lora: Lora = Lora()
    soft: Soft = Soft()
    temperature: float = Field(default=0.0, ge=0)  # 0: greedy text and the mean of the soft tokens
    max_new_tokens: int = Field(default=512, ge=1)
    batch_size: int = Field(default=64, ge=1)
    constrained: bool = False  # emissions held to the emission language's grammar (vllm; not for training by GRPO)

    @model_validator(mode="after")
    def _grammar_by_vllm(self) -> CompilerConfig:
        if self.constrained and self.engine != "vllm":
            raise ValueError("constrained emissions need engine vllm")
        return self
