"""Settings of `memcompiler serve proxy`: how conversations are read, the upstream, memory, compiler, and bounds."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from configs.collect import MemoryConfig
from configs.models import CompilerConfig, Dtype
from runtime.settings import PathName, Seed, Settings

PROXY_KEY = "MEMCOMPILER_PROXY_KEY"  # environment variable of the key that clients must send, if it is set
_PATH = re.compile(r"\$(\.[A-Za-z_]\w*|\.\*|\[(-?\d+|\*)\])*")

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
Preset = Literal["turns", "rebuilt", "chat", "react", "react_prompt", "tools", "langgraph", "smolagents"]


def _json_path(text: str) -> str:
    if not _PATH.fullmatch(text):
        raise ValueError(f"{text!r} is no path of the form $.name[0].*: names, indices and * after a $")
    return text


def _regex(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from None
    return text


JsonPath = Annotated[str, AfterValidator(_json_path)]
Regex = Annotated[str, AfterValidator(_regex)]


class Reading(Settings):
    """Where a text is found in the messages of a conversation."""

    roles: tuple[Role, ...] = ("user",)
    """Roles of the messages that hold it."""
    path: JsonPath = "$.content"
    """JSON path of the text in a message: `$`, `.name`, `[0]`, `[-1]`, `[*]`, `.*`. A string that holds JSON is parsed
    where the path continues inside it. Content parts count as their texts, an object as the texts of its values."""
    match: Regex | None = None
    """Regular expression. What is read is its last match in the text: the group `value` if there is one, else the first
    group, else the whole match. null: the whole text."""


class MappingConfig(Settings):
    """How goal, observations and actions are read from a conversation: a preset, and readings that replace its own."""

    preset: Preset = "chat"
    """chat: the first user message is the goal, later messages are observations, answers are actions. turns, rebuilt:
    the executor's own prompts. react: ReAct as a chat; react_prompt: as one growing prompt. tools, langgraph: calls of
    OpenAI tools. smolagents: its two agents."""
    goal: Reading | None = None
    """The goal, in the first message that has it."""
    scene: Reading | None = None
    """The scene, a place whose layout stays the same from episode to episode; without one, episodes have none."""
    observation: Reading | None = None
    """The observation, in the messages after the model's last answer, joined by line breaks."""
    action: Reading | None = None
    """The action, in the model's answers. Where nothing is found, it is the answer's text, or its tool calls."""
    place: Regex | None = None
    """Regular expression. Additions are inserted before its last match in the newest user turn; null: at the end."""
    grows: Literal["messages", "prompt"] | None = None
    """messages: the agent appends messages to the conversation. prompt: one user message holds the whole conversation,
    and is rewritten or extended at every step. null: as the preset says."""


class UpstreamConfig(Settings):
    """The server that answers."""

    url: str = "http://127.0.0.1:8000/v1"
    """Address of its OpenAI API."""
    key_env: str | None = None
    """Environment variable with its key; null: the client's own Authorization header is passed on."""
    executor: PathName | None = None
    """Name or folder of the model, if the upstream is `memcompiler serve executor`: prompts are then written here by
    the model's chat template, and soft tokens are sent beside them. null: any other server, which gets text only."""
    dtype: Dtype = "bfloat16"
    """With `executor`: the dtype with which the model is served."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Seconds without a byte from the upstream, else 504."""
    connections: int = Field(default=256, ge=1)
    """Maximum concurrent connections."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str) -> str:
        if not re.fullmatch(r"https?://[^/@?#\s]+(/[^@?#\s]*)?", value):
            raise ValueError("url must be http(s)://host[:port][/path], without user name, password or query")
        return value.rstrip("/")


class SessionsConfig(Settings):
    """Bounds of the sessions, one per conversation."""

    most: int = Field(default=1024, ge=1)
    """Maximum number of sessions; a further one ends the session that was used least recently."""
    idle_s: float = Field(default=3600.0, gt=0)
    """Seconds without a request after which a session ends. Its episode is not committed, because it is not known
    whether it succeeded."""
    max_steps: int = Field(default=500, ge=1)
    """Maximum steps of a session. Nothing is added to later turns; the additions to earlier turns are kept."""
    max_mib: float = Field(default=16.0, gt=0)
    """Maximum MiB of a session's texts and soft tokens. A session beyond it is treated as one beyond `max_steps`."""


class ProxyConfig(Settings):
    """`memcompiler serve proxy`: an OpenAI API that adds compiled memory (docs/guides/proxy.md)."""

    upstream: UpstreamConfig = UpstreamConfig()
    """The server that answers."""
    mapping: MappingConfig = MappingConfig()
    """How conversations are read."""
    deliver: str = "compiled"
    """Delivery of requests that name none (`X-Memcompiler-Deliver`)."""
    budget: int | None = Field(default=None, ge=0)
    """Maximum tokens (estimated from the words) that are added to a conversation, all turns together
    (`X-Memcompiler-Budget`); what does not fit is left out whole. null: no limit."""
    format: Literal["turns", "rebuilt"] = "turns"
    """How the additions are written, as in the executor's prompts: `Memory: ... Do now: ...` or `guide: ...`."""
    reads_state: bool = False
    """Add the Brief State, too."""
    soft_on: Literal["guidance", "always"] = "guidance"
    """With upstream.executor: the emissions with which soft tokens are sent."""
    compiler: CompilerConfig = CompilerConfig()
    """The memory compiler, in this process or (engine http) in a service."""
    memory: MemoryConfig = MemoryConfig()
    """The memory that sessions recall from and are committed to; `memory.bank` null: OUT/bank."""
    env: str | None = None
    """Environment whose instructions the compiler reads, and whose views the memory reads; null: none."""
    sessions: SessionsConfig = SessionsConfig()
    """Bounds of the sessions."""
    queue: int = Field(default=256, ge=1)
    """Maximum requests that wait for memory and compiler, beside `batch` that are answered."""
    batch: int = Field(default=64, ge=1)
    """Maximum requests compiled in one batch."""
    compile_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds that compiling may take."""
    on_failure: Literal["forward", "refuse"] = "forward"
    """What happens when memory or compiler fail. forward: the request is sent without guidance, and a header of the
    reply, a counter and the log say so. refuse: the client gets the status 502, or 429 with Retry-After if `queue`
    requests wait."""
    max_body_mib: float = Field(default=32.0, gt=0)
    """Maximum MiB of a request, else 413."""
    seed: Seed = 0
    """Seed of sampled emissions."""

    @model_validator(mode="after")
    def _check_memory(self) -> ProxyConfig:
        if self.memory.version is not None:
            raise ValueError("memory.version: the proxy writes to its memory, and a version is read-only")
        return self
