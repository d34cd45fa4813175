"""Settings of a compiler service."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from configs.compiler import CompilerConfig
from runtime.settings import Settings


class ServeConfig(Settings):
    """`memcompiler serve compiler`: the trained compiler and the queue in front of it (docs/serving.md)."""

    compiler: CompilerConfig = CompilerConfig(engine="vllm")
    queue: int = Field(default=256, ge=1)  # requests that may wait; more are told to come back (429)
    batch: int = Field(default=64, ge=1)  # requests that are compiled together
    timeout_s: float = Field(default=120.0, gt=0)  # of one request, from its first byte to its answer (504)
    max_body_mib: float = Field(default=32.0, gt=0)  # of one request (413)
    seed: int = 0  # of the seeds that the service itself gives to requests without one
    # Where GRPO may have it load other weights from (POST /adapter): `memcompiler launch` sets it.
    adapters: str | None = None

    @field_validator("compiler", mode="before")
    @classmethod
    def _vllm_unless_said(cls, value: Any) -> Any:
        return {"engine": "vllm", **value} if isinstance(value, dict) else value

    @field_validator("compiler")
    @classmethod
    def _serves_itself(cls, value: CompilerConfig) -> CompilerConfig:
        if value.engine == "http":
            raise ValueError("engine http is for clients: serve with engine vllm or hf")
        return value
