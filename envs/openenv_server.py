"""Server of any environment over HTTP and WebSocket in the OpenEnv protocol, for other trainers (extra `openenv`).

Every session (one WebSocket connection) has an environment. `reset` takes `task` (an id), `index` or `seed` (modulo the
number of tasks); without any, sessions take the split's tasks in turn. A step is `{"command": "go to fridge 1"}`, whose
reward is 1 if it succeeds and 0 otherwise. The server serves one split, so that no client trains on another by
accident. There is no authentication: bind to a non-loopback address only behind a proxy that has it.
"""

import base64
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from envs.base import Environment, EnvironmentFailure, Observation, Task
from envs.worker import png

try:
    from openenv.core.env_server import create_fastapi_app, interfaces, types  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ModuleNotFoundError("openenv is missing: pip install 'memcompiler[openenv]'") from error

if TYPE_CHECKING:
    from fastapi import FastAPI

LOOPBACK = "127.0.0.1"


def serve_openenv(
    make_env: Callable[[], Environment], split: str, host: str = LOOPBACK, port: int = 8765, max_sessions: int = 64
) -> None:
    """Serve until interrupted; a client is `openenv.core.GenericEnvClient(base_url="http://127.0.0.1:8765")`.

    Raises:
        ValueError: the split is unknown or has no tasks.
    """
    app = openenv_app(make_env, split, max_sessions)
    import uvicorn

    # Pings detect lost clients and free their sessions.
    uvicorn.run(app, host=host, port=port, log_level="warning", ws_ping_interval=20, ws_ping_timeout=20)


def openenv_app(make_env: Callable[[], Environment], split: str, max_sessions: int = 64) -> "FastAPI":
    """Create the ASGI application of `serve_openenv`. Raises: ValueError, as that does."""
    env = make_env()
    tasks = tuple(env.tasks(split))
    env.close()
    if not tasks:
        raise ValueError(f"split {split!r} has no tasks to serve")
    turns = itertools.count()
    return create_fastapi_app(
        lambda: Session(make_env, split, tasks, turns),
        CommandAction,
        TextObservation,
        max_sessions,
        env_name=env.name,
        state_cls=EpisodeState,
    )


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


class Session(interfaces.Environment):
    """One client's episodes.

    Args:
        turns: counter of the resets without a chosen task, which all sessions share.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True  # sessions share the task list and the turn counter

    def __init__(
        self, make_env: Callable[[], Environment], split: str, tasks: Sequence[Task], turns: Iterator[int]
    ) -> None:
        super().__init__()
        self._make_env, self._split, self._tasks, self._turns = make_env, split, tasks, turns
        self._env: Environment | None = None
        self._task: Task | None = None
        self._steps, self._over, self._episode_id = 0, True, None

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        task: str | None = None,
        index: int | None = None,
        split: str | None = None,
    ) -> TextObservation:
        """Start an episode. Raises: ValueError, if the choice of a task is invalid or ambiguous."""
        chosen = self._choose(seed, task, index, split)
        self._env = self._env or self._make_env()  # not earlier: the protocol creates sessions for inspection, too
        self._over = True  # the old episode must not continue if this reset fails
        observation = self._env.reset(chosen)
        self._task, self._steps, self._over, self._episode_id = chosen, 0, False, episode_id
        return self._shown(observation)

    def step(self, action: CommandAction, timeout_s: float | None = None) -> TextObservation:
        if self._env is None or self._task is None or self._over:
            raise EnvironmentFailure("no live episode: reset first")
        transition = self._env.step(action.command)
        self._steps += 1
        self._over = transition.done or transition.success
        return self._shown(
            transition.observation,
            progress=transition.progress,
            success=transition.success,
            done=self._over,
            reward=float(transition.success),
        )

    @property
    def state(self) -> EpisodeState:
        return EpisodeState(
            episode_id=self._episode_id,
            step_count=self._steps,
            task=self._task.id if self._task else None,
            split=self._split,
            over=self._over,
        )

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
        self._env, self._over = None, True

    # OpenEnv's optional discovery of tasks ---------------------------------------------------------------------------

    def list_splits(self) -> list[str]:
        return [self._split]

    def list_tasks(self, split: str) -> list[dict[str, Any]]:
        return self.get_task_range(split)

    def num_tasks(self, split: str) -> int:
        return len(self.get_task_range(split))

    def get_task(self, split: str, index: int) -> dict[str, Any]:
        if index < 0:
            raise IndexError(index)
        return self.get_task_range(split)[index]

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[dict[str, Any]]:
        """List tasks by the fields that a client may see before their episodes."""
        if split != self._split:
            raise IndexError(split)  # the protocol's one error that becomes a 400
        return [
            {"id": task.id, "index": index, "goal": task.goal, "scene": task.scene, "kind": task.kind}
            for index, task in enumerate(self._tasks)
        ][start:stop]

    def _choose(self, seed: int | None, task: str | None, index: int | None, split: str | None) -> Task:
        if split not in (None, self._split):
            raise ValueError(f"this server serves the split {self._split!r}, not {split!r}")
        if sum(choice is not None for choice in (seed, task, index)) > 1:
            raise ValueError("set only one of seed, task and index")
        if task is not None:
            index = next((i for i, known in enumerate(self._tasks) if known.id == task), None)
            if index is None:
                raise ValueError(f"no task {task!r} in the split {self._split!r}")
        if index is None:
            index = (next(self._turns) if seed is None else seed) % len(self._tasks)
        if not 0 <= index < len(self._tasks):
            raise ValueError(f"no task {index}: the split {self._split!r} has {len(self._tasks)}")
        return self._tasks[index]

    def _shown(self, observation: Observation, **fields: Any) -> TextObservation:
        assert self._task is not None
        return TextObservation(
            task=self._task.id,
            goal=self._task.goal,
            scene=self._task.scene,
            text=observation.text,
            image=None if observation.image is None else base64.b64encode(png(observation.image)).decode("ascii"),
            admissible=None if observation.admissible is None else list(observation.admissible),
            **fields,
        )
