"""Fake Ray in one process, for pools of engines: actors answer at once and die at scripted requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class RayError(Exception):
    pass


class RayTaskError(RayError):
    pass


class ActorDiedError(RayError):
    pass


class ActorUnavailableError(RayError):
    pass


@dataclass(eq=False)
class Ref:
    """A reference to a result: a value, an error, or pending forever."""

    value: Any = None
    error: Exception | None = None
    pending: bool = False


@dataclass(eq=False)
class FakeActor:
    """An actor (`runtime.ray_actors.ObjectActor`) that dies at some of its requests.

    Attributes:
        make: creates the held object at every start.
        dies_at: numbers of the requests at which it dies, counted over all restarts.
        hangs_at: numbers of the requests that it never answers.
        restarts: maximum number of restarts.
        late: number of failing `about` calls before a restart is complete.
        requested: number of requests so far.
    """

    make: Callable[[], Any]
    dies_at: Sequence[int] = ()
    hangs_at: Sequence[int] = ()
    restarts: int = 3
    late: int = 2
    requested: int = 0
    seen: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.held, self._left, self._absent = self.make(), self.restarts, 0
        self.call, self.about = SimpleNamespace(remote=self._call), SimpleNamespace(remote=self._about)

    def die(self) -> None:
        self._left -= 1
        self._absent = self.late if self._left >= 0 else -1
        self.held = self.make() if self._left >= 0 else None

    def _gone(self) -> Exception:
        return (
            ActorDiedError("The actor is dead because it was killed") if self._left < 0 else ActorUnavailableError("x")
        )

    def _call(self, name: str, *arguments: Any) -> Ref:
        self.requested += 1
        self.seen.append(name)
        if self.requested in self.hangs_at:
            return Ref(pending=True)
        if self.requested in self.dies_at:
            self.die()
            return Ref(error=self._gone())
        if self._absent:
            return Ref(error=self._gone())
        try:
            return Ref(getattr(self.held, name)(*arguments))
        except Exception as error:
            return Ref(error=type("Caused", (RayTaskError, type(error)), {})(str(error)))

    def _about(self) -> Ref:
        if self._left < 0:
            return Ref(error=self._gone())
        if self._absent:
            self._absent -= 1
            return Ref(error=self._gone())
        return Ref({"pid": 1, "context": 512})


class FakeRay:
    """Replacement of the module `ray`."""

    exceptions = SimpleNamespace(
        RayError=RayError,
        RayTaskError=RayTaskError,
        ActorDiedError=ActorDiedError,
        ActorUnavailableError=ActorUnavailableError,
    )

    def wait(self, refs: list[Ref], num_returns: int = 1, timeout: float | None = None) -> tuple[list[Ref], list[Ref]]:
        ready = [ref for ref in refs if not ref.pending]
        return ready, [ref for ref in refs if ref.pending]

    def get(self, ref: Ref, timeout: float | None = None) -> Any:
        if ref.error:
            raise ref.error
        return ref.value

    def kill(self, actor: FakeActor, no_restart: bool = True) -> None:
        assert not no_restart
        actor.die()
