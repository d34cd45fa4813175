"""A round of episodes from which memory learns: each is scored by its first attempt, and those that failed are
attempted again as often as memory asks for it, so that there is more to learn from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from agent.deliveries import Delivery
from agent.episode import EpisodeSpec, Limits, run_episodes
from agent.records import Episode
from data_gen.experience import traces_of
from envs.base import Environment
from executor.records import Executor
from memory.protocol import Session
from runtime.errors import is_failure


def play_round(
    make_env: Callable[[], Environment],
    specs: Sequence[EpisodeSpec],
    delivery: Delivery,
    executor: Executor,
    limits: Limits,
    size: int,
    on_episode: Callable[[Episode], None] | None = None,
) -> list[Episode]:
    """Play `specs`, at most `size` side by side; then again those that failed and that memory wants another attempt at,
    until it wants none. Further attempts are the episodes' `retries`; `on_episode` hears of first ones."""
    episodes = run_episodes(make_env, specs, delivery, executor, limits, size, on_episode)
    left = list(zip(specs, episodes, strict=True))
    while left := [(_again(spec, session), e) for spec, e in left if (session := _wanted(spec, e)) is not None]:
        further = run_episodes(make_env, [spec for spec, _ in left], delivery, executor, limits, size)
        for (_, episode), attempt in zip(left, further, strict=True):
            episode.retries.append(attempt)
    return episodes


def _wanted(spec: EpisodeSpec, episode: Episode) -> Session | None:
    """Return the session of another attempt; None where one succeeded or broke, or memory wants no more."""
    last = episode.retries[-1] if episode.retries else episode
    if last.success or is_failure(last.stop_reason):
        return None
    [attempts] = traces_of([episode])
    return spec.again(attempts)


def _again(spec: EpisodeSpec, session: Session) -> EpisodeSpec:
    return replace(spec, session=lambda: session)
