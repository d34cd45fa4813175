"""Sessions of the proxy: one per conversation, bounded, and on disk, so that a restarted proxy continues them.

    OUT/sessions/HASH.jsonl    a line for the session, then one for each step and for each answer to a step

A line is written before the request is sent to the upstream. It survives kill -9, but is not flushed to disk: a power
loss may lose the newest steps of open sessions (never a committed episode). The steps form a tree, because an agent may
go back to a turn and answer it differently. The key of a step is a hash of the conversation up to its user turn.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.records import is_refusal
from compiler.client import TensorBody
from configs.proxy import SessionsConfig
from envs.base import Task
from memory.protocol import Recall, Record, Session
from proxy.additions import Parts
from runtime.store import JsonLines, RecordError

SPLIT = "proxy"  # of the tasks that sessions play


@dataclass(slots=True)
class ProxyStep:
    """A user turn of a conversation, and what was added to it.

    Attributes:
        action: the action that the agent took before this turn.
        state: the Brief State after it, as text.
        added: texts and soft tokens that are inserted at `offset` of the message's text (`proxy.additions`).
        tokens: estimated tokens of the added texts.
        pasted: whether this step added pasted memory.
        kind: kind of the emission; "" where nothing was compiled.
        text_length, text_hash: of the message's own text, under a prompt that grows.
        reply: the action in the upstream's answer; "" before it is known.
    """

    key: str
    parent: str | None
    observation: str
    action: str = ""
    state: str = ""
    added: Parts = ()
    offset: int = 0
    tokens: float = 0.0
    pasted: bool = False
    kind: str = ""
    text_length: int = 0
    text_hash: str = ""
    reply: str = ""

    @property
    def nbytes(self) -> int:
        """Estimate the bytes that the step holds."""
        parts = sum(len(part) if isinstance(part, str) else part.nbytes for part in self.added)
        return 512 + len(self.observation) + len(self.action) + len(self.state) + parts

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        row = {name: getattr(self, name) for name in self.__slots__}  # type: ignore[attr-defined]
        added = [part if isinstance(part, str) else TensorBody.of(part).model_dump() for part in self.added]
        return {**row, "added": added}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> ProxyStep:
        """Rebuild a step."""
        added = tuple(part if isinstance(part, str) else TensorBody(**part).tensor() for part in row["added"])
        return cls(**{**row, "added": added})


@dataclass(slots=True, eq=False)
class ProxySession:
    """One conversation.

    Attributes:
        newest: key of the step that the last request was about.
        memory, recalled_at: the session of the memory system, and the step for which it recalled last.
        first: what memory recalled for the task as a whole.
        busy: requests that are being answered; such a session does not time out.
    """

    id: str
    task: Task
    steps: dict[str, ProxyStep] = field(default_factory=dict)
    newest: str | None = None
    memory: Session | None = None
    recalled_at: str | None = None
    first: Recall | None = None
    used: float = field(default_factory=time.monotonic)
    nbytes: int = 0
    busy: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def path(self, key: str | None) -> list[ProxyStep]:
        """Return the steps from the first one to `key`."""
        steps = list[ProxyStep]()
        while key is not None:
            steps.append(self.steps[key])
            key = steps[-1].parent
        return steps[::-1]

    def records(self, steps: Sequence[ProxyStep], action: str = "", answer: str = "") -> tuple[Record, ...]:
        """Return a path of steps as memory systems read it.

        Args:
            action, answer: the last action and what the environment answered to it; default: the reply that is known.
        """
        actions = [step.action for step in steps[1:]] + [action or steps[-1].reply]
        answers = [step.observation for step in steps[1:]] + [answer]
        return tuple(
            Record(t=t, observation=step.observation, action=did, feedback=said, refused=is_refusal(said))
            for t, (step, did, said) in enumerate(zip(steps, actions, answers, strict=True))
        )


class SessionStore:
    """All open sessions, in memory and in a folder.

    Args:
        folder: created where it is missing; the sessions in it are opened.
        on_end: called with "idle", "evicted" or "replaced" for each session that the proxy
            ends by itself.

    Raises:
        RecordError: a session's file is damaged.
    """

    def __init__(
        self, folder: Path, config: SessionsConfig, on_end: Callable[[str], object] = lambda how: None
    ) -> None:
        self.folder, self.config, self.on_end = folder, config, on_end
        self._open: OrderedDict[str, ProxySession] = OrderedDict()  # least recently used first
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime):
            if (session := _read(path)) is None:
                path.unlink()
            else:
                self._open[session.id] = session

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self):
        return iter(list(self._open.values()))

    def get(self, id: str) -> ProxySession | None:
        """Return an open session without renewing its time-out."""
        return self._open.get(id)

    def use(self, id: str, goal: str, scene: str, task_id: str = "") -> ProxySession:
        """Return the session of this id. A new one is created if there is none, or if its goal or scene is another."""
        self.expire()
        task = Task(task_id or f"{SPLIT}/{uuid.uuid4().hex}", goal, scene, SPLIT, kind="")
        session = self._open.get(id)
        if session is not None and (session.task.goal, session.task.scene) != (task.goal, task.scene):
            self.end(session, "replaced")
            session = None
        if session is None:
            while len(self._open) >= self.config.most:
                self.end(next(iter(self._open.values())), "evicted")
            session = self._open[id] = ProxySession(id, task)
            head = {"id": id, "task": [task.id, goal, scene]}
            self._write(session, {"session": head})
        session.used = time.monotonic()
        self._open.move_to_end(id)
        return session

    def add(self, session: ProxySession, step: ProxyStep) -> None:
        """Record a step."""
        session.steps[step.key] = step
        session.nbytes += step.nbytes
        self._write(session, {"step": step.to_json()})

    def note_reply(self, session: ProxySession, key: str, action: str) -> None:
        """Record the action in the upstream's answer to a step."""
        step = session.steps.get(key)
        if step is not None and action and step.reply != action:
            step.reply = action
            self._write(session, {"reply": [key, action]})

    def is_full(self, session: ProxySession) -> bool:
        """Return whether a session reached its bounds."""
        bounds = self.config
        return len(session.steps) >= bounds.max_steps or session.nbytes >= bounds.max_mib * 2**20

    def end(self, session: ProxySession, how: str = "") -> None:
        """Drop a session and its file."""
        if self._open.get(session.id) is session:
            del self._open[session.id]
            self._path(session.id).unlink(missing_ok=True)
            if how:
                self.on_end(how)

    def expire(self) -> None:
        """End the sessions without a request for `idle_s` seconds."""
        oldest = time.monotonic() - self.config.idle_s
        for session in list(self._open.values()):
            if session.used > oldest:
                break
            if not session.busy:
                self.end(session, "idle")

    def _write(self, session: ProxySession, row: dict[str, Any]) -> None:
        if self._open.get(session.id) is session:  # not for one that ended while a request was on its way
            JsonLines(self._path(session.id)).append_unflushed(row)

    def _path(self, id: str) -> Path:
        return self.folder / f"{hashlib.sha256(id.encode()).hexdigest()[:32]}.jsonl"


def _read(path: Path) -> ProxySession | None:
    """Read a session's file; None for one that a kill cut off before its first line ended. Raises: RecordError."""
    session = None
    for number, row in enumerate(JsonLines(path), 1):
        try:
            if session is None:
                id, goal, scene = row["session"]["task"]
                session = ProxySession(row["session"]["id"], Task(id, goal, scene, SPLIT, kind=""))
            elif "step" in row:
                step = ProxyStep.from_json(row["step"])
                session.steps[step.key], session.newest = step, step.key
                session.nbytes += step.nbytes
            else:
                key, action = row["reply"]
                session.steps[key].reply = action
        except (LookupError, TypeError, ValueError) as error:
            problem = f"line {number} is damaged ({type(error).__name__})"
            raise RecordError(f"{path}, {problem}: delete the file, which ends its session") from error
    return session
