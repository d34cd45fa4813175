"""Any of our environments over HTTP and WebSocket in the OpenEnv protocol, so that other trainers can drive them.

A session (one WebSocket connection) has an environment of its own. `reset` takes `task` (an id), `index` or `seed`
(which wraps around); with none of them, sessions take the split's tasks in turn, so that n clients cover it together.
A step is `{"command": "go to fridge 1"}`. The reward is 1 for the step that succeeds and 0 otherwise; `progress` goes
along in every observation. Only the split that was named is served: nobody trains on the evaluation split by accident.

Needs the extra `openenv`. There is no authentication: bind to anything but loopback only behind something that has it.
"""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from envs.base import Environment, EnvironmentFailure, Observation, Task

if TYPE_CHECKING:
    from fastapi import FastAPI
    from PIL.Image import Image

LOOPBACK = "127.0.0.1"


def serve_openenv(
    make_env: Callable[[], Environment], split: str, host: str = LOOPBACK, port: int = 8765, max_sessions: int = 64
) -> None:
    """Serve until interrupted. Clients: `openenv.core.GenericEnvClient(base_url="http://127.0.0.1:8765")`.

    Raises:
        ModuleNotFoundError: the extra `openenv` is not installed.
        ValueError: no such split, or it has no tasks.
    """
    app = openenv_app(make_env, split, max_sessions)
    import uvicorn

    # Pings find clients that vanished, so that their sessions do not stay occupied.
    uvicorn.run(app, host=host, port=port, log_level="warning", ws_ping_interval=20, ws_ping_timeout=20)


def openenv_app(make_env: Callable[[], Environment], split: str, max_sessions: int = 64) -> FastAPI:
    """The ASGI application behind `serve_openenv`; errors are the same."""
    try:
        from openenv.core.env_server import create_fastapi_app  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ModuleNotFoundError("openenv is missing: pip install 'memcompiler[openenv]'") from error
    env = make_env()
    tasks = tuple(env.tasks(split))
    env.close()
    if not tasks:
        raise ValueError(f"split {split!r} has no tasks to serve")
    server, action, observation, state = _classes()
    turns = itertools.count()
    return create_fastapi_app(
        lambda: server(Session(make_env, split, tasks, turns)), action, observation, max_sessions,
        env_name=env.name, state_cls=state,
    )  # fmt: skip


@dataclass
class Session:
    """One client's episodes: everything but the protocol's own classes.

    The environment is made by the first reset: the protocol also makes sessions only to look at them.
    """

    make_env: Callable[[], Environment]
    split: str
    tasks: Sequence[Task]
    turns: Iterator[int]  # shared by all sessions
    env: Environment | None = None
    task: Task | None = None
    steps: int = 0
    over: bool = field(default=True)

    def choose(self, seed: int | None, task: str | None, index: int | None, split: str | None) -> Task:
        """Raises: ValueError, for a split or a task that is not served, or more than one way to choose."""
        if split not in (None, self.split):
            raise ValueError(f"this server serves the split {self.split!r}, not {split!r}")
        if sum(choice is not None for choice in (seed, task, index)) > 1:
            raise ValueError("choose a task by seed, by task or by index, not by several of them")
        if task is not None:
            found = next((t for t in self.tasks if t.id == task), None)
            if found is None:
                raise ValueError(f"no task {task!r} in the split {self.split!r}")
            return found
        if index is not None:
            if not 0 <= index < len(self.tasks):
                raise ValueError(f"no task {index}: the split {self.split!r} has {len(self.tasks)}")
            return self.tasks[index]
        return self.tasks[(next(self.turns) if seed is None else seed) % len(self.tasks)]

    def reset(self, chosen: Task) -> dict[str, Any]:
        if self.env is None:
            self.env = self.make_env()
        self.over = True  # should this reset fail, the old episode must not go on
        observation = self.env.reset(chosen)
        self.task, self.steps, self.over = chosen, 0, False
        return self._fields(observation, 0.0, False)

    def step(self, command: str) -> dict[str, Any]:
        if self.env is None or self.task is None or self.over:
            raise EnvironmentFailure("no live episode: reset first")
        transition = self.env.step(command)
        self.steps += 1
        self.over = transition.done or transition.success
        fields = self._fields(transition.observation, transition.progress, transition.success)
        return {**fields, "done": self.over, "reward": float(transition.success)}

    def close(self) -> None:
        if self.env is not None:
            self.env.close()
        self.env, self.over = None, True

    def _fields(self, observation: Observation, progress: float, success: bool) -> dict[str, Any]:
        assert self.task is not None
        return {
            "task": self.task.id, "goal": self.task.goal, "scene": self.task.scene, "text": observation.text,
            "image": None if observation.image is None else _png(observation.image),
            "admissible": None if observation.admissible is None else list(observation.admissible),
            "progress": progress, "success": success,
        }  # fmt: skip


def describe(task: Task, index: int) -> dict[str, Any]:
    """What a client may know of a task before its episode."""
    return {"id": task.id, "index": index, "goal": task.goal, "scene": task.scene, "kind": task.kind}


def _png(image: Image) -> str:
    """PNG in base64: what JSON can carry."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _classes() -> tuple[Any, Any, Any, Any]:
    """The protocol's face of a session: server side environment, action, observation, state.

    Made here because their bases come from a package that only those who serve have installed.
    """
    from openenv.core.env_server import interfaces, types  # pyright: ignore[reportMissingImports]

    class CommandAction(types.Action):
        command: str

    class TextObservation(types.Observation):
        task: str
        goal: str
        scene: str
        text: str
        image: str | None = None  # PNG, base64
        admissible: list[str] | None = None
        progress: float = 0.0
        success: bool = False

    class EpisodeState(types.State):
        task: str | None = None
        split: str = ""
        over: bool = True

    class Served(interfaces.Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True  # nothing is shared but the list of tasks and the turn

        def __init__(self, session: Session) -> None:
            super().__init__()
            self.session, self.episode_id = session, None

        def reset(
            self, seed: int | None = None, episode_id: str | None = None, task: str | None = None,
            index: int | None = None, split: str | None = None,
        ) -> TextObservation:  # fmt: skip
            fields = self.session.reset(self.session.choose(seed, task, index, split))
            self.episode_id = episode_id
            return TextObservation(**fields)

        def step(self, action: CommandAction, timeout_s: float | None = None) -> TextObservation:
            return TextObservation(**self.session.step(action.command))

        @property
        def state(self) -> EpisodeState:
            s = self.session
            return EpisodeState(
                episode_id=self.episode_id, step_count=s.steps, task=s.task.id if s.task else None, split=s.split,
                over=s.over,
            )  # fmt: skip

        def close(self) -> None:
            self.session.close()

        # OpenEnv's optional discovery of tasks -----------------------------------------------------------------------

        def list_splits(self) -> list[str]:
            return [self.session.split]

        def list_tasks(self, split: str) -> list[dict[str, Any]]:
            return self.get_task_range(split)

        def num_tasks(self, split: str) -> int:
            return len(self.get_task_range(split))

        def get_task(self, split: str, index: int) -> dict[str, Any]:
            if index < 0:
                raise IndexError(index)
            return self.get_task_range(split)[index]

        def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[dict[str, Any]]:
            if split != self.session.split:
                raise IndexError(split)  # the protocol's one error that becomes a 400
            return [describe(task, i) for i, task in enumerate(self.session.tasks)][start:stop]

    return Served, CommandAction, TextObservation, EpisodeState
