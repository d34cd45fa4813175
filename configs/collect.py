"""Settings of memory banks and of a collection: who teaches, which tasks, which steps become rows (paper C.1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, ValidationError, model_validator
from pydantic_core import ErrorDetails

from configs.models import EndpointConfig, ExecutorConfig
from envs.registry import AnyEnvSettings, default_settings, find
from memory.registry import DEFAULT
from memory.registry import find as find_memory
from runtime.attempts import ATTEMPTS
from runtime.cluster import Cluster, RaySettings
from runtime.settings import PathName, Seed, Settings, did_you_mean


class MemoryModels(Settings):
    """Models that a memory system may use; without, it runs by rule and compares words."""

    api: EndpointConfig | None = None  # a language model that it asks (BrainMem's agent, S3Mem's writer)
    embed: PathName | None = None  # a sentence-transformers model: rank by embeddings instead of words (extra `embed`)
    embed_api: EndpointConfig | None = None  # the same by endpoint (`/embeddings`), cached by text, `batch` at a time

    @model_validator(mode="after")
    def _one_embeds(self) -> Self:
        if self.embed_api is not None and (self.embed is not None or not self.embed_api.model):
            raise ValueError("embeddings are of one model: set embed, or embed_api.model (and embed_api.base_url)")
        return self

    @property
    def embeds(self) -> str | None:
        """Name the model that embeds, if any."""
        return self.embed_api.model if self.embed_api else self.embed

    def cached_in(self, path: Path) -> Self:
        """Return them with the answers of endpoints in a file, where none is named."""
        given = {name: api for name in ("api", "embed_api") if (api := getattr(self, name)) and not api.cache}
        return self.model_copy(update={n: api.model_copy(update={"cache": str(path)}) for n, api in given.items()})

    def told(self) -> dict[str, str]:
        """Name them, for the record."""
        named = {"api": self.api.model if self.api else None, "embed": self.embeds}
        return {name: model for name, model in named.items() if model}


class MemoryConfig(MemoryModels):
    """Where M comes from. Without `bank`, the expert fills one, once for all who ask for the same (docs/data.md)."""

    system: str = DEFAULT  # `memory.registry` knows them
    settings: dict[str, Any] = Field(default={})  # the system's own
    bank: PathName | None = None
    version: NonNegativeInt | None = None  # bank version to read (default: the newest)
    k: int = Field(default=4, ge=0)  # entries retrieved per task
    tokens: int | None = Field(default=None, ge=1)  # recalled at a time, at most; whole entries, in their order
    tokenizer: PathName | None = None  # that counts them: a Hugging Face name or folder
    pictures: int = Field(default=1, ge=0)  # views of its episode that an entry keeps at most (`EnvSpec.views`)
    # What the expert plays to fill the bank: a split, and the first so many of its tasks (default: by environment).
    experience_split: str | None = None
    experience_limit: int | None = Field(default=None, ge=1)
    experience_folder: PathName | None = None  # where filled banks lie, and are found (default: experience/ beside OUT)

    @model_validator(mode="after")
    def _tokens_are_counted(self) -> MemoryConfig:
        if self.tokens is not None and self.tokenizer is None:
            raise ValueError("memory.tokens needs a tokenizer that counts them: set memory.tokenizer")
        return self

    @model_validator(mode="after")
    def _system_has_them(self) -> MemoryConfig:
        schema = find_memory(self.system).settings
        try:
            schema.model_validate(self.settings)
        except ValidationError as error:  # of its own schema, of which the loader knows no keys
            wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {_wrong(e, schema)}" for e in error.errors())
            raise ValueError(f"settings of memory system {self.system}: {wrong}") from None
        return self


def _wrong(error: ErrorDetails, schema: type[BaseModel]) -> str:
    """Say what is wrong with a setting of a memory system."""
    if error["type"] != "extra_forbidden":
        return f"{error['msg']}, received {error['input']!r}"
    return "unknown key" + (did_you_mean(error["loc"][0], schema.model_fields) if len(error["loc"]) == 1 else "")


class LeakageConfig(Settings):
    """What the tasks of a collection must not share anything with (paper C.1)."""

    held_out: tuple[str, ...] | None = None  # splits (default: the benchmark's evaluation split, where its data is)
    drop: bool = False  # leave out tasks that share what they must not, as the paper does, instead of refusing


class CollectConfig(Settings):
    """A teacher plays the training tasks: experience into the bank, teacher steps into SFT rows (docs/data.md)."""

    COMMAND: ClassVar[str] = "collect"
    teacher: Literal["expert", "endpoint"] = "expert"  # who compiles: the environment's expert, or a model behind `api`
    api: EndpointConfig = EndpointConfig()  # the endpoint teacher's
    max_new_tokens: int = Field(default=512, ge=1)  # of an endpoint teacher's emission
    attempts: int = Field(default=3, ge=1)  # at an emission, before one that cannot be read counts as NOACTION
    episode_attempts: int = Field(default=ATTEMPTS, ge=1)  # at one that machinery breaks, over all resumes
    # Who acts while an endpoint teacher compiles; default: the environment's expert, where it has none the teacher.
    actor: Literal["expert", "teacher", "executor"] | None = None
    executor: ExecutorConfig = ExecutorConfig()  # of actor executor
    # Tasks of a round, which is recorded when it is over (then an endpoint teacher's bank grows); default: 16 with an
    # endpoint, 64 with the expert.
    concurrency: int | None = Field(default=None, ge=1)
    cluster: Cluster = "local"  # ray: workers play, on this machine or on many (docs/cluster.md)
    ray: RaySettings = RaySettings()
    shard: str = Field(default="0/1", pattern=r"^\d+/\d+$")  # i/n plays tasks i, i+n, ... (i from 0)
    env: AnyEnvSettings = Field(default_factory=default_settings)
    memory: MemoryConfig = MemoryConfig()
    split: str = "train"
    limit: PositiveInt | None = None
    brief_state: bool = True  # False: teacher and rows without one, for compilers that are to do without (Table 3)
    # Share of the episodes in which an unguided step leaves the Brief State as it was, but for the first: rows for
    # compilers that are only asked where there is something to say (delivery compiled_needed), and have to catch up.
    sparing: float = Field(default=0.0, ge=0, le=1)
    noise: float = Field(default=0.15, ge=0, le=1)  # share of steps on which the expert strays: rows cover recovery
    successful_only: bool = True  # False: rows of episodes that failed, too; their labels are the expert's all the same
    deduplicate: bool = False  # one row of those with the same compiler input and emission
    keep_noaction: float = Field(default=1.0, ge=0, le=1)  # share of rows kept in which the compiler says nothing
    max_kind_ratio: float | None = Field(default=None, ge=1)  # most rows of an emission kind, over the rarest kind's
    max_steps: int = Field(default=20, ge=1)
    seed: Seed = 0
    leakage: LeakageConfig = LeakageConfig()

    @model_validator(mode="after")
    def _endpoint_teacher(self) -> CollectConfig:
        if self.teacher == "endpoint" and not self.api.model:
            raise ValueError("teacher endpoint needs api.model, the model's name at api.base_url")
        i, n = map(int, self.shard.split("/"))
        if i >= n:
            raise ValueError(f"shard {self.shard}: shards of n are numbered 0/n to n-1/n")
        if self.teacher == "expert" and self.actor not in (None, "expert"):
            raise ValueError("actor is for teacher endpoint: the expert teacher acts itself")
        return self

    @model_validator(mode="after")
    def _can_be_shared_out(self) -> CollectConfig:
        if self.cluster == "ray" and self.teacher == "endpoint":
            raise ValueError(
                "an endpoint teacher's bank grows round by round, and one process keeps its budget: cluster=local "
                "(api.concurrency says how much it is asked at a time)"
            )
        refuse_budgets_on_ray(self.cluster, self.memory)
        return self

    @property
    def acts(self) -> Literal["expert", "teacher", "executor"]:
        """Say who acts: an endpoint teacher compiles and acts where nobody else knows the way (paper C.2)."""
        knows = self.teacher == "expert" or find(self.env.name).expert
        return self.actor or ("expert" if knows else "teacher")


def refuse_budgets_on_ray(cluster: Cluster, memory: MemoryConfig) -> None:
    """Raise ValueError, where workers on Ray would each ask an endpoint that one process keeps the budget of."""
    if cluster == "ray" and (memory.api or memory.embed_api):
        raise ValueError(
            "memory asks an endpoint (memory.api, memory.embed_api), whose budget one process keeps: cluster=local"
        )


class QuestionsConfig(Settings):
    """The QA teacher of S3Mem's router: which model writes how many questions about whose histories (docs/s3mem.md)."""

    api: EndpointConfig = EndpointConfig()
    environments: tuple[Literal["household", "alfworld", "scienceworld"], ...] = ("household",)
    worlds: int = Field(default=24, ge=1)  # living worlds of each environment whose expert is asked about
    per_part: int = Field(default=8, ge=1)  # questions about a session, or 40 steps
    seed: Seed = 0  # of the worlds; the router's, for the same histories

    @model_validator(mode="after")
    def _somebody_asks(self) -> QuestionsConfig:
        if not self.api.model:
            raise ValueError("questions need api.model, the model's name at api.base_url")
        return self
