"""Evaluation over a lifetime: memory grows over the stream, scored are first attempts, a kill costs nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.records import Episode, EpisodeContext, read_episodes
from configs.evaluation import EvalConfig
from configs.load import ConfigError
from data_gen.memory_factory import open_memory
from envs.base import Task
from eval.evaluate import ModelCache, evaluate
from eval.matrix import Cell, cells
from eval.online import count_leaks, order_tasks, pool_streams, summarise_stream
from eval.table import spread, to_markdown
from executor.prompt import ExecutorRequest
from executor.records import PAPER_VIEW, Action, Grounding
from memory.entry import MemoryEntry
from memory.protocol import BankError
from runtime.checksums import parse_row
from runtime.errors import StopReason
from runtime.store import to_json
from tests.fakes import one_step_episode
from tests.tiny_models import entry

ENV = {"name": "household", "scenes": {"train": 3, "test": 2}}
STEPS = 12


class Hopeless:
    """Fails, unless it is told that it failed before: then it does what the expert would."""

    needs_expert, batched, accepts_soft, sees_images, reads = True, False, False, False, PAPER_VIEW

    def __init__(self, interrupted_at: int | None = None) -> None:
        self.left = interrupted_at

    def act(self, requests: Sequence[ExecutorRequest], contexts: Sequence[EpisodeContext] = ()) -> list[Action]:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
        ([request], [context]) = requests, contexts
        told = "Retry Guidance" in request.delivered.memory
        action = (context.plan or ["look"])[0] if told else "look"
        return [Action(action, Grounding.CHOICE, action, (), 10, 1)]

    def hash(self) -> str:
        return "hopeless"


def config(system: str = "brainmem", deliveries: Sequence[str] = ("none", "live"), **memory: Any) -> EvalConfig:
    return EvalConfig.model_validate(
        {
            "env": ENV,
            "deliveries": deliveries,
            "limit": 6,
            "max_steps": STEPS,
            "split": "test",
            "memory": {"system": system, "protocol": "online", "pictures": 0, **memory},
        }
    )


def run(of: EvalConfig, out: Path, executor: Any = None, on_exists: str = "overwrite") -> dict[str, Any]:
    with ModelCache.preloaded(of, executor or Hopeless(), None) as loaded:
        return evaluate(Cell({}, of), out, loaded, on_exists)


def episodes(out: Path, delivery: str = "live") -> list[Episode]:
    return [e for e in read_episodes(out / "episodes.jsonl") if e.delivery == delivery]


def told(out: Path) -> list[Any]:
    """Return what was played, without times."""
    rows = [parse_row(line) for line in (out / "episodes.jsonl").read_text().splitlines()]
    for row in rows:
        for step in (s for e in (row, *row["retries"]) for s in e["steps"]):
            del step["seconds"]
    return rows


def test_first_attempts_count_and_memory_learns_from_all(tmp_path: Path) -> None:
    results = run(config(), tmp_path / "run")["results"]
    played = episodes(tmp_path / "run")
    assert len(played) == 6 and all(not e.success and [r.success for r in e.retries] == [True] for e in played)
    assert results["live"]["success"]["mean"] == 0 == results["none"]["success"]["mean"]
    stream = results["live"]["stream"]
    assert stream["retries"]["attempts"] == stream["retries"]["solved"] == 6 and stream["leaked"] == 0
    steps = stream["retries"]["steps"]
    assert stream["retries"]["tokens"] == {"compiler": 0, "executor": 11 * steps} and steps > 6
    assert results["live"]["usage"]["executor"]["tokens_in"] == 10 * 6 * STEPS  # of first attempts alone
    assert [quarter["n"] for quarter in stream["quarters"]] == [1, 2, 1, 2]
    memory: Any = open_memory(config().memory, tmp_path / "run/memory/live")
    assert len(memory.knowledge.experiences) == 6 and not any(e.success for e in memory.knowledge.experiences)
    assert [e.bank_version for e in played] == list(range(6))


@pytest.mark.seconds
def test_further_attempts_change_nothing_of_the_first_episode(tmp_path: Path) -> None:
    run(config(), tmp_path / "two")
    run(config(settings={"evolve": {"retries": 0}}), tmp_path / "none")
    with_them, without = episodes(tmp_path / "two")[0], episodes(tmp_path / "none")[0]
    assert with_them.retries and not without.retries
    assert [s.executor_prompt for s in with_them.steps] == [s.executor_prompt for s in without.steps]


@pytest.mark.parametrize("system", ["trajectory", "brainmem"])
def test_a_run_that_was_cut_short_goes_on_to_the_same_end(system: str, tmp_path: Path) -> None:
    whole = run(config(system), tmp_path / "whole")
    of = config(system)
    with pytest.raises(KeyboardInterrupt):  # in the middle of `live`, after all of `none`
        run(of, tmp_path / "cut", Hopeless(interrupted_at=9 * STEPS + 5))
    before = len(episodes(tmp_path / "cut"))
    assert 0 < before < 6
    went_on = run(of, tmp_path / "cut", on_exists="resume")
    assert to_json(told(tmp_path / "cut")) == to_json(told(tmp_path / "whole"))
    assert went_on["results"]["live"]["stream"] == whole["results"]["live"]["stream"]


@pytest.mark.seconds
def test_what_a_kill_kept_from_memory_is_committed_when_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(config(), tmp_path / "whole")
    from memory.brainmem.system import BrainMem

    commit, made = BrainMem.commit, list[int]()

    def killed(self: BrainMem, traces: Any) -> Any:
        made.append(len(traces))
        if sum(made) == 3:
            raise KeyboardInterrupt
        return commit(self, traces)

    monkeypatch.setattr(BrainMem, "commit", killed)
    with pytest.raises(KeyboardInterrupt):  # its episode is on record, memory does not hold it
        run(config(), tmp_path / "cut")
    monkeypatch.setattr(BrainMem, "commit", commit)
    run(config(), tmp_path / "cut", on_exists="resume")
    assert to_json(told(tmp_path / "cut")) == to_json(told(tmp_path / "whole"))


def test_memory_that_somebody_else_wrote_to_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(config(), tmp_path / "run", Hopeless(interrupted_at=9 * STEPS))
    memory: Any = open_memory(config().memory, tmp_path / "run/memory/live")
    [trace] = next(iter(memory._journal)).attempts[:1]
    memory.commit([[replace(trace, task=Task("stranger", "put a mug in desk", "home 9", "test", "put"))]])
    with pytest.raises(BankError, match="something else wrote"):
        run(config(), tmp_path / "run", on_exists="resume")


def test_rounds_freeze_memory_within_them(tmp_path: Path) -> None:
    run(config("trajectory", round=4), tmp_path / "run")
    versions = [e.bank_version for e in episodes(tmp_path / "run")]
    assert len(set(versions[:4])) == 1 and len(set(versions[4:])) == 1 and versions[3] != versions[4]
    assert not any(e.memory_ids for e in episodes(tmp_path / "run")[:4])


@pytest.mark.seconds
def test_memory_may_begin_with_what_frozen_memory_would_hold(tmp_path: Path) -> None:
    warm = run(config("trajectory", warm_start=True, experience_limit=6), tmp_path / "warm")
    assert episodes(tmp_path / "warm")[0].memory_ids and warm["bank_entries"] == 6
    cold = run(config("trajectory"), tmp_path / "cold")
    assert not episodes(tmp_path / "cold")[0].memory_ids and cold["bank_entries"] == 0


def test_orders_are_shuffles_of_the_same_tasks() -> None:
    tasks = [Task(f"t{i}", "g", "s", "test", "put") for i in range(20)]
    one, other = (order_tasks(tasks, config(order_seed=seed)) for seed in (1, 2))
    assert one != other != tasks and sorted(one, key=str) == sorted(other, key=str) == sorted(tasks, key=str)
    assert order_tasks(tasks, config()) == tasks == order_tasks(tasks, config(protocol="frozen", order_seed=1))


def test_several_orders_are_one_column_with_their_spread(tmp_path: Path) -> None:
    from eval.evaluate import _of_column

    of = config().model_copy(
        update={"matrix": {"order": {"0": {"memory.order_seed": 0}, "1": {"memory.order_seed": 1}}}}
    )
    made = cells(of)
    assert [cell.group for cell in made] == ["", ""] and [c.config.memory.order_seed for c in made] == [0, 1]
    stream = summarise_stream([one_step_episode(str(i)) for i in range(8)])
    summary = {"success": {"mean": 0.8}, "stream": stream}
    column = _of_column([(made[0], summary), (made[1], {**summary, "success": {"mean": 0.84}})])
    assert column["success_by_order"] == {"0": 0.8, "1": 0.84} and column["stream"]["quarters"][0]["n"] == 2
    assert spread([0.80, 0.82, 0.82, 0.80, 0.84]) == "81.6 ± 1.7"  # BrainMem's Table 14


def won(task: str, scene: str, goal: str, success: bool) -> Episode:
    episode = replace(one_step_episode(task), scene=scene, goal=goal, success=success)
    return replace(episode, stop_reason=StopReason.SUCCESS if success else StopReason.STEP_LIMIT)


def test_what_comes_again_is_told_apart() -> None:
    stream = summarise_stream(
        [
            won("a", "1", "g", False),
            won("b", "1", "g", True),
            won("c", "2", "g", False),
            won("d", "1", "h", True),
        ]
    )
    assert [quarter["mean"] for quarter in stream["quarters"]] == [0, 1, 0, 1]
    assert (stream["first"]["n"], stream["repeats"]["n"], stream["repeats"]["mean"]) == (3, 1, 1.0)
    assert summarise_stream([won("a", "1", "g", True)])["repeats"] is None
    both = pool_streams([stream, {**stream, "quarters": stream["quarters"][::-1]}])
    assert [quarter["mean"] for quarter in both["quarters"]] == [0.5] * 4


@pytest.mark.seconds
def test_tables_say_that_memory_grew(tmp_path: Path) -> None:
    results = run(config("trajectory", ("static",)), tmp_path / "run")
    table = to_markdown(results)
    assert "Online memory" in table and "by quarter" in table and results["memory_protocol"] == "online"
    assert "Online memory" not in to_markdown(
        run(config("trajectory", ("none",), protocol="frozen", k=0), tmp_path / "f")
    )


def test_a_delivery_that_needs_episodes_side_by_side_is_refused() -> None:
    with pytest.raises(ConfigError, match="side by side"):
        cells(config(deliveries=("compiled_shuffled_soft",)))


class Rewritten:
    """A memory whose entry of task 1 was rewritten: it is read by its id, and no longer listed."""

    def __init__(self) -> None:
        self.entries = {each.id: each for each in (entry(n, f"of task {n}") for n in range(3))}

    def __iter__(self) -> Iterator[MemoryEntry]:
        return iter([*self.entries.values()][::2])

    def __getitem__(self, id: str) -> MemoryEntry:
        return self.entries[id]


def test_recalls_of_this_task_or_a_later_one_are_counted() -> None:
    tasks = [Task(f"task-{i}", "g", "s", "test", "put") for i in range(3)]
    memory: Any = Rewritten()
    ids = tuple(memory.entries)
    clean = replace(one_step_episode("task-2"), memory_ids=ids[:2])
    early = replace(one_step_episode("task-1"), memory_ids=ids)
    assert count_leaks([clean], tasks, memory) == 0 and count_leaks([clean, early], tasks, memory) == 2
