"""Settings of memory banks and of a collection: teacher, tasks, and the steps that become SFT rows (paper C.1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from configs.models import EndpointConfig, ExecutorConfig
from envs.command_reader import TeacherLevel
from envs.registry import AnyEnvSettings, default_settings, find
from memory.protocol import Isolation
from memory.registry import DEFAULT, why_unread
from memory.registry import find as find_memory
from runtime.attempts import ATTEMPTS
from runtime.cluster import Cluster, RaySettings
from runtime.settings import PathName, Seed, Settings, did_you_mean

ExperienceActor = Literal["expert", "explorer"]


class MemoryModels(Settings):
    """Models that a memory system may use; without them it works by rule and ranks by words."""

    api: EndpointConfig | None = None
    """Endpoint of a language model (BrainMem's agent, S3Mem's writer)."""
    embed: PathName | None = None
    """sentence-transformers model: rank by embeddings instead of words (extra `embed`)."""
    embed_api: EndpointConfig | None = None
    """Endpoint of an embedding model (`/embeddings`), as an alternative to `embed`; results are cached by text."""

    @model_validator(mode="after")
    def _check_embedding_model(self) -> Self:
        if self.embed_api is not None and (self.embed is not None or not self.embed_api.model):
            raise ValueError("embeddings are of one model: set embed, or embed_api.model (and embed_api.base_url)")
        return self

    @property
    def embedding_model(self) -> str | None:
        """Name of the embedding model, if any."""
        return self.embed_api.model if self.embed_api else self.embed

    def cached_in(self, path: Path) -> Self:
        """Return a copy whose endpoints cache their responses in `path`, unless they name a cache."""
        given = {name: api for name in ("api", "embed_api") if (api := getattr(self, name)) and not api.cache}
        return self.model_copy(update={n: api.model_copy(update={"cache": str(path)}) for n, api in given.items()})

    def model_names(self) -> dict[str, str]:
        """Return the models' names by role, for records."""
        named = {"api": self.api.model if self.api else None, "embed": self.embedding_model}
        return {name: model for name, model in named.items() if model}


class MemoryConfig(MemoryModels):
    """Task memory M. Without `bank`, the expert fills a bank, which all runs with equal settings share
    (docs/guides/data.md)."""

    system: str = DEFAULT
    """Memory system (`memory/registry.py`)."""
    settings: dict[str, Any] = Field(default={})
    """Settings of the memory system; null: its defaults, whatever a file sets for another system."""
    bank: PathName | None = None
    """Folder of an existing memory, or a bank at s3://BUCKET/PREFIX; null: the expert fills one."""
    version: NonNegativeInt | None = None
    """Version of the memory to read; null: the newest."""
    k: int = Field(default=4, ge=0)
    """Entries retrieved per task."""
    tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens of the entries recalled at a time; whole entries, in their order."""
    tokenizer: PathName | None = None
    """Tokenizer that counts `tokens`: a Hugging Face name or folder."""
    pictures: int = Field(default=1, ge=0)
    """Maximum views of its episode that an entry stores (`EnvSpec.views`)."""
    isolation: Isolation = "task"
    """What an episode recalls nothing from. task: episodes of the same task. scene: all episodes of its scene, so that
    seen scenes stand in for unseen ones."""
    experience_actor: ExperienceActor = "expert"
    """Who plays the episodes that fill the bank. explorer: the expert without its knowledge of where things are, which
    searches places until it sees them."""
    experience_split: str | None = None
    """Split that the expert plays to fill the bank; null: the environment's default."""
    experience_limit: int | None = Field(default=None, ge=1)
    """Maximum number of tasks of that split; null: the environment's default."""
    experience_folder: PathName | None = None
    """Folder of the shared banks; null: `experience/` beside OUT."""

    @field_validator("settings", mode="before")
    @classmethod
    def _default_settings(cls, value: Any) -> Any:
        return {} if value is None else value

    @model_validator(mode="after")
    def _check_tokenizer(self) -> MemoryConfig:
        if self.tokens is not None and self.tokenizer is None:
            raise ValueError("memory.tokens needs a tokenizer that counts them: set memory.tokenizer")
        return self

    @model_validator(mode="after")
    def _check_system_settings(self) -> MemoryConfig:
        schema = find_memory(self.system).settings
        try:
            schema.model_validate(self.settings)
        except ValidationError as error:  # the loader does not know this schema's keys
            wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {_explain(e, schema)}" for e in error.errors())
            drop = "; memory.settings=null drops those of a file" if "unknown key" in wrong else ""
            raise ValueError(f"settings of memory system {self.system}: {wrong}{drop}") from None
        return self


def _explain(error: ErrorDetails, schema: type[BaseModel]) -> str:
    """Describe what is wrong with a setting of a memory system."""
    if error["type"] != "extra_forbidden":
        return f"{error['msg']}, received {error['input']!r}"
    return "unknown key" + (did_you_mean(error["loc"][0], schema.model_fields) if len(error["loc"]) == 1 else "")


class LeakageConfig(Settings):
    """What the tasks of a collection must not overlap with (paper C.1)."""

    held_out: tuple[str, ...] | None = None
    """Splits to compare with; null: the environment's evaluation split, where its data is installed."""
    drop: bool = False
    """Drop overlapping tasks, as the paper does, instead of refusing to run."""


class CollectConfig(Settings):
    """A teacher plays the training tasks: experience goes into the bank, steps into SFT rows (docs/guides/data.md)."""

    COMMAND: ClassVar[str] = "collect"
    teacher: Literal["expert", "endpoint"] = "expert"
    """Who compiles: the environment's expert, or the model at `api`."""
    api: EndpointConfig = EndpointConfig()
    """Endpoint of the endpoint teacher."""
    teacher_level: TeacherLevel = "place"
    """What the guidance says: the place where something is, what to do now (subgoal), or the next command."""
    teacher_silence: float = Field(default=0.3, ge=0, le=1)
    """Expert teacher, levels subgoal and command: share of the steps at which the executor is on its way already where
    nothing is said."""
    max_new_tokens: int = Field(default=512, ge=1)
    """Maximum tokens of an endpoint teacher's emission."""
    attempts: int = Field(default=3, ge=1)
    """Attempts at an emission before one that does not parse counts as NOACTION."""
    episode_attempts: int = Field(default=ATTEMPTS, ge=1)
    """Attempts at an episode that fails for technical reasons, over all resumes."""
    actor: Literal["expert", "teacher", "executor"] | None = None
    """Who acts while an endpoint teacher compiles; null: the environment's expert, else the teacher."""
    executor: ExecutorConfig = ExecutorConfig()
    """Executor of `actor: executor`."""
    concurrency: int | None = Field(default=None, ge=1)
    """Tasks per round, which is recorded at its end (an endpoint teacher's bank then grows); null: 16 with an endpoint,
    64 with the expert."""
    cluster: Cluster = "local"
    """ray: workers play the episodes, on this machine or on several (docs/guides/cluster.md)."""
    ray: RaySettings = RaySettings()
    """Ray workers of `cluster: ray`."""
    shard: str = Field(default="0/1", pattern=r"^\d+/\d+$")
    """i/n plays tasks i, i+n, i+2n, ... (i from 0)."""
    env: AnyEnvSettings = Field(default_factory=default_settings)
    """Environment and its settings; `env=NAME` is short for `env.name=NAME`."""
    memory: MemoryConfig = MemoryConfig()
    """Memory that the teacher recalls from."""
    split: str = "train"
    """Split of the environment."""
    limit: PositiveInt | None = None
    """Maximum number of tasks."""
    own_scene: float = Field(default=0.5, ge=0, le=1)
    """Share of the episodes that may recall entries of their own scene; the others learn to guide in unseen scenes. No
    effect where tasks have no scene."""
    empty_memory: float = Field(default=0.05, ge=0, le=1)
    """Share of the episodes that recall nothing, in which the teacher has nothing to say."""
    other_kinds: float = Field(default=0.05, ge=0, le=1)
    """Share of the episodes that recall entries of other kinds of tasks only."""
    history: Literal[0, 1, "all"] = 1
    """Past commands that an endpoint teacher reads beside the Brief State; set `compiler.history` to the same."""
    brief_state: bool = True
    """False: teacher and rows have no Brief State, for compilers without one (Table 3)."""
    gated_teacher: float = Field(default=0.0, ge=0, le=1)
    """Share of episodes in which unguided steps, except the first, leave the Brief State unchanged: rows for compilers
    that are called at some steps only (delivery compiled_gated)."""
    noise: float = Field(default=0.15, ge=0, le=1)
    """Share of steps at which the expert takes another action, so that rows cover recovery."""
    successful_only: bool = True
    """False: also write rows of failed episodes; their labels are the expert's as well."""
    first_states: int = Field(default=0, ge=0)
    """Expert teacher, levels subgoal and command: rows that ask each episode's memory for the first states of this many
    other tasks."""
    keep_noaction: float = Field(default=1.0, ge=0, le=1)
    """Share of the NOACTION rows to write."""
    max_steps: int = Field(default=20, ge=1)
    """Maximum steps of an episode."""
    seed: Seed = 0
    """Seed of the teacher's noise and of row sampling; scenes have `env.seed`."""
    leakage: LeakageConfig = LeakageConfig()
    """Check for overlap with held-out tasks."""

    @model_validator(mode="after")
    def _check_teacher(self) -> CollectConfig:
        if self.teacher == "endpoint" and not self.api.model:
            raise ValueError("teacher endpoint needs api.model, the model's name at api.base_url")
        i, n = map(int, self.shard.split("/"))
        if i >= n:
            raise ValueError(f"shard {self.shard}: shards of n are numbered 0/n to n-1/n")
        if self.teacher == "expert" and self.actor not in (None, "expert"):
            raise ValueError("actor is for teacher endpoint: the expert teacher acts itself")
        if self.empty_memory + self.other_kinds > 1:
            raise ValueError("empty_memory and other_kinds are shares of the same episodes: their sum is above 1")
        if self.teacher == "expert":
            require_teacher_level(self.env.name, self.teacher_level)
        if self.first_states and (self.teacher != "expert" or self.teacher_level == "place"):
            raise ValueError("first_states needs the expert teacher of level subgoal or command, which reads M alone")
        if self.teacher_level != "place" and self.gated_teacher:
            raise ValueError("gated_teacher is for teacher_level place: other levels need the notes of every step")
        return self

    @model_validator(mode="after")
    def _check_ray(self) -> CollectConfig:
        if self.cluster == "ray" and self.teacher == "endpoint":
            raise ValueError(
                "an endpoint teacher's bank grows round by round, and only one process can enforce its budget: use "
                "cluster=local (api.concurrency sets the number of parallel requests)"
            )
        refuse_budgets_on_ray(self.cluster, self.memory)
        return self

    @model_validator(mode="after")
    def _check_memory(self) -> CollectConfig:
        refuse_unread_views(self.env.name, self.memory)
        return self

    @property
    def acting_role(self) -> Literal["expert", "teacher", "executor"]:
        """Role that acts: `actor`, or an endpoint teacher where the environment has no expert (paper C.2)."""
        knows = self.teacher == "expert" or find(self.env.name).expert
        return self.actor or ("expert" if knows else "teacher")


def require_teacher_level(environment: str, level: TeacherLevel) -> None:
    """Raise ValueError if the environment's command reader does not support a level of guidance."""
    levels = find(environment).reader.levels
    if level not in levels:
        raise ValueError(f"teacher_level {level}: environment {environment} supports {', '.join(levels)}")


def refuse_unread_views(env: str, memory: MemoryConfig) -> None:
    """Raise ValueError if the memory system follows episodes, and the environment has no reader of its views."""
    if why := why_unread(memory.system, env, find(env).reader):
        raise ValueError(why)


def refuse_budgets_on_ray(cluster: Cluster, memory: MemoryConfig) -> None:
    """Raise ValueError if Ray workers would share an endpoint budget, which only one process can enforce."""
    if cluster == "ray" and (memory.api or memory.embed_api):
        raise ValueError(
            "only one process can enforce the budget of memory's endpoint (memory.api, memory.embed_api): cluster=local"
        )


class QuestionsConfig(Settings):
    """Questions that a language model writes about histories, to train S3Mem's router (docs/guides/questions.md)."""

    api: EndpointConfig = EndpointConfig()
    """Endpoint of the model."""
    environments: tuple[Literal["household", "alfworld", "scienceworld"], ...] = ("household",)
    """Environments whose expert episodes are the histories."""
    worlds: int = Field(default=24, ge=1)
    """Living worlds of each environment."""
    per_part: int = Field(default=8, ge=1)
    """Questions about a session, or about 40 steps."""
    seed: Seed = 0
    """Seed of the worlds; the router's seed gives the same histories."""

    @model_validator(mode="after")
    def _check_model(self) -> QuestionsConfig:
        if not self.api.model:
            raise ValueError("questions need api.model, the model's name at api.base_url")
        return self
