"""Settings of the frozen executor."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from configs.engines import EndpointConfig, ServerSettings, VllmEngine

# The environment variable with an executor server's key: never in settings, which run folders keep.
EXECUTOR_KEY = "MEMCOMPILER_EXECUTOR_KEY"


class ExecutorConfig(ServerSettings):
    start: ClassVar[str] = "memcompiler serve executor --model NAME"
    model: str = "zoo/household/executor"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    device: str = "auto"
    # Of engine hf: accelerate spreads a model too large for one device over all of them and the host's memory.
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | None = None
    # What evaluation and rollouts run on; SFT needs hf, for the gradient. http: `memcompiler serve executor` at `url`.
    # api: a closed model, which reads text only.
    engine: Literal["hf", "vllm", "http", "api"] = "hf"  # pyright: ignore[reportIncompatibleVariableOverride]
    vllm: VllmEngine = VllmEngine()
    api: EndpointConfig = EndpointConfig()  # of engine api; model, dtype, device and mode are not asked then
    memory_token: str = "auto"
    instructions: Literal["none", "full"] = "full"
    # Among admissible commands by likelihood; free text, grounded afterwards; guided (vLLM): text held to the commands.
    mode: Literal["choice", "generate", "guided"] = "choice"
    temperature: float = Field(default=0.0, ge=0)  # of the choice among admissible commands; 0 takes the likeliest
    images: bool = True  # False keeps the view from an executor that could see it
    max_new_tokens: int = Field(default=64, ge=1)
    batch_size: int = Field(default=64, ge=1)

    @model_validator(mode="after")
    def _draws_by_choice(self) -> ExecutorConfig:
        if self.temperature and (self.mode != "choice" or self.engine not in ("hf", "vllm")):
            raise ValueError("executor.temperature draws among admissible commands: mode choice and engine hf or vllm")
        return self

    @model_validator(mode="after")
    def _guided_by_vllm(self) -> ExecutorConfig:
        if self.mode == "guided" and self.engine not in ("vllm", "http"):
            raise ValueError("mode guided needs engine vllm or http")
        return self

    @model_validator(mode="after")
    def _api_has_a_model(self) -> ExecutorConfig:
        if self.engine == "api" and not self.api.model:
            raise ValueError("engine api needs api.model, the model's name at api.base_url")
        return self
