"""Episodes that do not wait for each other: what overlaps, what is drawn, who fails, and what a killed run has left."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from agent import continuous
from agent.batching import StepBatcher
from agent.continuous import ContinuousBatcher, _Share, batcher_for
from agent.deliveries import Delivery, ShuffledSoft
from agent.episode import EpisodeLimits, EpisodeSpec, run_episodes
from agent.records import Episode
from compiler.language import Emission, render
from compiler.records import Compilation, CompileRequest
from configs.models import Batching
from lm.answer_cache import EndpointStop
from runtime.store import JsonLines
from tests.fakes import CountingEnv, Recorder, spec
from tests.waiting import in_background, lines, until


class Engine(Recorder):
    """A thread-safe compiler and executor that notes the seed of every request, and calls `before` each of them."""

    concurrent = takes_seeds = True

    def __init__(self, before: Callable[[str, Any], object] = lambda role, request: None) -> None:
        super().__init__()
        self.before, self.drawn = before, dict[tuple[str, str, int], list[int]]()

    def _note(self, role: str, requests: Sequence[Any], seeds: Sequence[int]) -> None:
        for request, seed in zip(requests, seeds, strict=True):
            self.before(role, request)
            self.drawn.setdefault((role, request.goal, len(request.history)), []).append(seed)

    def compile(self, requests: Sequence[CompileRequest], seeds: Sequence[int]) -> list[Compilation]:
        self._note("compiler", requests, seeds)
        emission = Emission("go north")
        return [Compilation(render(emission), emission) for _ in requests]

    def act(self, requests: Sequence[Any], seeds: Sequence[int]) -> list[Any]:
        self._note("executor", requests, seeds)
        return super().act(requests)


def play(
    engine: Any,
    specs: Sequence[EpisodeSpec],
    way: Batching = "continuous",
    on_episode: Callable[[Episode], None] | None = None,
    **limits: Any,
) -> list[Episode]:
    return run_episodes(
        CountingEnv,
        specs,
        Delivery("compiled", "compiled", engine),
        engine,
        EpisodeLimits(max_steps=9, batching=way, **limits),
        on_episode=on_episode,
    )


# -- overlap ----------------------------------------------------------------------------------------------------------


def test_an_episode_goes_on_to_its_end_while_another_one_waits_for_its_first_emission() -> None:
    over = threading.Event()

    def before(role: str, request: Any) -> None:
        assert role != "compiler" or "goal 2" not in request.goal or over.wait(20)

    ended = list[str]()

    def on_episode(episode: Episode) -> None:
        ended.append(episode.task_id)
        over.set()

    episodes = play(Engine(before), [spec(2), spec(5)], on_episode=on_episode)
    assert ended == ["5", "2"] and [episode.task_id for episode in episodes] == ["2", "5"]
    assert all(episode.success for episode in episodes)


def test_the_way_follows_from_the_engines_unless_it_is_chosen() -> None:
    engine, model = Engine(), Recorder()
    planner = Recorder()
    planner.batched = False  # type: ignore[attr-defined]
    assert isinstance(batcher_for("auto", (engine, engine)), ContinuousBatcher)
    assert isinstance(batcher_for("auto", (None, engine)), ContinuousBatcher)
    assert isinstance(batcher_for("auto", (engine, planner)), ContinuousBatcher)
    for owners in ((engine, model), (model, engine), (None, None), (ShuffledSoft(engine), engine)):
        assert type(batcher_for("auto", owners)) is StepBatcher
    assert isinstance(batcher_for("continuous", (model, model)), ContinuousBatcher)
    assert type(batcher_for("lockstep", (engine, engine))) is StepBatcher


def test_a_model_that_is_not_thread_safe_gets_what_waits_as_one_batch_at_a_time() -> None:
    inside, most, sizes = 0, 0, list[int]()

    class Model(Recorder):
        def _alone(self, call: Callable[[Any], Any], requests: Sequence[Any]) -> Any:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            sizes.append(len(requests))
            time.sleep(0.005)
            inside -= 1
            return call(requests)

        def compile(self, requests: Any) -> Any:
            return self._alone(super().compile, requests)

        def act(self, requests: Any) -> Any:
            return self._alone(super().act, requests)

    episodes = play(Model(), [spec(n) for n in (1, 2, 3, 4, 3, 2)])
    assert all(episode.success for episode in episodes) and most == 1
    assert max(sizes) == 6 and sum(sizes) == 2 * (1 + 2 + 3 + 4 + 3 + 2)


def test_seconds_are_divided_among_the_requests_that_are_in_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(continuous.time, "perf_counter", lambda: now[0])
    share = _Share()
    first, second = share.counted(), share.counted()
    one = first.__enter__()
    now[0] = 1.0
    other = second.__enter__()
    now[0] = 5.0
    first.__exit__(None, None, None)
    now[0] = 8.0
    second.__exit__(None, None, None)
    assert (one.seconds, other.seconds) == (3.0, 5.0)  # 1 + 4/2, and 4/2 + 3: together 8


# -- draws ------------------------------------------------------------------------------------------------------------


def drawn(specs: Sequence[EpisodeSpec], way: Batching, **limits: Any) -> dict[Any, list[int]]:
    engine = Engine()
    play(engine, specs, way, **limits)
    return {key: sorted(seeds) for key, seeds in engine.drawn.items()}


def test_the_seed_of_a_request_depends_on_neither_the_way_nor_the_episodes_beside_it() -> None:
    specs = [spec(3), spec(2), spec(4), spec(3), spec(3)]
    both = [drawn(specs, way) for way in ("lockstep", "continuous")]
    assert both[0] == both[1]
    alone = drawn([spec(4), spec(2)], "continuous")
    assert alone and all(both[0][key] == seeds for key, seeds in alone.items())
    assert all(
        len(set(both[0]["compiler", "in home 1: goal 3", step])) == 3 for step in range(3)
    )  # of one task, three episodes
    every = [seed for seeds in both[0].values() for seed in seeds]
    assert len(set(every)) == len(every)
    for changed in ({"seed": 1}, {"draw_seed": 1}):
        assert not set(every) & {seed for seeds in drawn(specs, "lockstep", **changed).values() for seed in seeds}


def test_a_model_in_pytorch_keeps_the_random_numbers_of_its_batches() -> None:
    class Model(Engine):
        concurrent = False

        def compile(self, requests: Any, seeds: Any = None) -> Any:
            assert seeds is None
            return super().compile(requests, [0] * len(requests))

        def act(self, requests: Any, seeds: Any = None) -> Any:
            assert seeds is None
            return super().act(requests, [0] * len(requests))

    assert [episode.success for episode in play(Model(), [spec(2), spec(3)], "auto")] == [True, True]


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ValueError("too long"), TimeoutError("no answer")])
@pytest.mark.parametrize("role", ["compiler", "executor"])
def test_a_failed_request_ends_its_own_episode_only(role: str, error: Exception) -> None:
    def before(asked: str, request: Any) -> None:
        if asked == role and "goal 4" in request.goal and len(request.history) == 1:
            raise error

    episodes = play(Engine(before), [spec(3), spec(4), spec(2)])
    assert [str(episode.stop_reason) for episode in episodes] == ["success", f"{role}_failure", "success"]
    assert episodes[1].error == f"{type(error).__name__}: {error}" and len(episodes[1].steps) == 2


def test_an_endpoint_that_stops_ends_the_run_and_waits_for_nobody() -> None:
    over, engine = threading.Event(), Engine()

    def before(role: str, request: Any) -> None:
        if "goal 4" in request.goal:
            raise EndpointStop("the budget is spent")
        over.wait(20)

    engine.before, started = before, time.monotonic()
    with pytest.raises(EndpointStop, match="budget"):
        play(engine, [spec(3), spec(4)])
    assert time.monotonic() - started < 15
    over.set()


# -- kill and resume --------------------------------------------------------------------------------------------------


def test_a_killed_run_and_the_rest_of_it_are_the_whole_run(tmp_path: Any) -> None:
    specs = [spec(n) for n in range(1, 9)]
    record = JsonLines(tmp_path / "episodes.jsonl")

    def keep(episode: Episode) -> None:
        actions = [step.action for step in episode.steps]
        record.append({"task": episode.task_id, "actions": actions, "success": episode.success})

    def slowly() -> None:
        play(Engine(lambda *_: time.sleep(0.02)), specs, on_episode=keep)

    child = multiprocessing.get_context("fork").Process(target=slowly)
    child.start()
    until(lambda: lines(record.path) >= 2, pause=0.002)
    os.kill(child.pid or 0, signal.SIGKILL)
    child.join()
    record.drop_torn_line()
    done = {row["task"] for row in record}
    assert 2 <= len(done) < len(specs)
    play(Engine(), [one for one in specs if one.task.id not in done], on_episode=keep)
    rows = {row["task"]: row for row in record}
    assert len(list(record)) == len(rows) == len(specs)
    assert all(row["success"] and len(row["actions"]) == int(task) for task, row in rows.items())


def test_an_interrupt_does_not_wait_for_requests() -> None:
    over, asked = threading.Event(), threading.Event()

    def before(role: str, request: Any) -> None:
        asked.set()
        over.wait(30)

    stop = in_background(lambda: asked.wait(20) and signal.raise_signal(signal.SIGINT))
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        play(Engine(before), [spec(2), spec(3)])
    assert time.monotonic() - started < 20
    over.set()
    stop()
