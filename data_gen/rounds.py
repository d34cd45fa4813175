"""Rounds of episodes for memories that learn: each task is scored by its first attempt; failed tasks are retried as
long as the memory wants more attempts to learn from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from agent.deliveries import Delivery
from agent.episode import EpisodeLimits, EpisodeSpec, run_episodes
from agent.records import Episode
from data_gen.experience import episode_traces
from envs.base import Environment
from executor.records import Executor
from memory.protocol import Session
from runtime.errors import is_failure


def play_round(
    make_env: Callable[[], Environment],
    specs: Sequence[EpisodeSpec],
    delivery: Delivery,
    executor: Executor,
    limits: EpisodeLimits,
    concurrency: int = 64,
    on_episode: Callable[[Episode], None] | None = None,
) -> list[Episode]:
    """Play `specs`, at most `concurrency` at a time, then retry failed ones until the memory wants no further attempt.

    Retries are appended to `Episode.retries`; `on_episode` receives first attempts only.
    """
    episodes = run_episodes(
        make_env,
        specs,
        delivery=delivery,
        executor=executor,
        limits=limits,
        concurrency=concurrency,
        on_episode=on_episode,
    )
    left = list(zip(specs, episodes, strict=True))
    while left := [
        (replace(spec, open_session=lambda session=session: session), episode)
        for spec, episode in left
        if (session := _retry_session(spec, episode)) is not None
    ]:
        retries = run_episodes(
            make_env,
            [spec for spec, _ in left],
            delivery=delivery,
            executor=executor,
            limits=limits,
            concurrency=concurrency,
        )
        for (_, episode), retry in zip(left, retries, strict=True):
            episode.retries.append(retry)
    return episodes


def _retry_session(spec: EpisodeSpec, episode: Episode) -> Session | None:
    """Return the session of another attempt; None if the last one succeeded or broke, or the memory wants no more."""
    last = episode.retries[-1] if episode.retries else episode
    if last.success or is_failure(last.stop_reason):
        return None
    [attempts] = episode_traces([episode])
    return spec.next_attempt(attempts)
