"""What machinery breaks is played again by a resume, up to a number of attempts that the record counts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agent.records import EpisodeContext
from configs.collect import CollectConfig
from configs.evaluation import EvalConfig
from configs.load import load_config
from configs.run_folder import RunFolder
from data_gen.collect import CollectionPlan, plan_collection, remaining_tasks, sort_record
from data_gen.ray_collect import CollectWorker, play_with_pool
from data_gen.rows import load_rows
from envs.household.environment import EngineEnvironment
from envs.registry import Environments
from eval.evaluate import ModelCache, evaluate, run_eval
from eval.matrix import Cell
from eval.online import FOLDER
from eval.runs import EpisodeRecord
from eval.table import to_markdown
from executor.prompt import ExecutorRequest
from executor.records import PAPER_VIEW, Action, Grounding
from memcompiler.cli import app
from memcompiler.collection import run_collect
from memory.bank import MemoryBank
from runtime.attempts import RetriedResults, failure_summary
from runtime.checksums import parse_row
from runtime.cluster import RaySettings
from runtime.store import JsonLines
from runtime.worker_pool import WorkerPool
from tests.worker_backends import InProcessBackend


@pytest.fixture(autouse=True, scope="module")
def without_plots() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eval.report.results_plots", lambda *_: [])
        yield


GAMES = ["env.scenes={train: 3, test: 2}", "env.images=false", "memory.k=0", "limit=4", "max_steps=12"]
CAUSE = "ImportError: no module named socks"


class Outage:
    """Has a method of the environment raise at some tasks, so many times each; counts the tasks that were begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str = "reset") -> None:
        self.left, self.begun = Counter[str](), Counter[str]()
        reset, broken = EngineEnvironment.reset, getattr(EngineEnvironment, method)

        def begin(env: Any, task: Any) -> Any:
            self.begun[task.id], env.current = self.begun[task.id] + 1, task.id
            return (fail if method == "reset" else reset)(env, task)

        def fail(env: Any, asked: Any) -> Any:
            if self.left[env.current] > 0:
                self.left[env.current] -= 1
                raise ImportError("no module\nnamed socks")
            return broken(env, asked)

        monkeypatch.setattr(EngineEnvironment, method, fail)
        monkeypatch.setattr(EngineEnvironment, "reset", begin)


def rows(out: Path) -> list[dict[str, Any]]:
    """Read a record without clocks."""
    found = [parse_row(line) for line in (out / "episodes.jsonl").read_text().splitlines()]
    for step in (step for row in found for each in (row, *row["retries"]) for step in each["steps"]):
        step["seconds"] = {}
    return found


def whole(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop the history of attempts, and what a bank that was grown again counts otherwise."""
    return [{**row, "broken": [], "bank_version": None} for row in found]


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


# collect --------------------------------------------------------------------------------------------------------------


def collect(out: Path, *settings: str) -> list[dict[str, Any]]:
    run_collect(load_config(CollectConfig, "collect/quickstart", [*GAMES, *settings]), out)
    return rows(out)


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return collect(tmp_path_factory.mktemp("collected") / "run")


@pytest.mark.parametrize(("method", "times"), [("reset", 1), ("step", 2)])
def test_a_collection_plays_what_broke_again_and_nothing_else(
    method: str,
    times: int,
    collected: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    outage, ids = Outage(monkeypatch, method), [row["task_id"] for row in collected]
    outage.left.update({ids[1]: times, ids[3]: 1})
    collect(tmp_path)
    summary = read(tmp_path / "collect.json")
    assert summary["broken"] == {"n": 2, "played_again": 0, "first": f"{ids[1]}: environment_failure: {CAUSE}"}
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("  2 of 4 episodes broke, the first ")
    assert "2 have attempts left (episode_attempts=3): run the same command again" in last
    for again in range(times):
        found = collect(tmp_path)
        assert outage.begun == {ids[0]: 1, ids[1]: 2 + again, ids[2]: 1, ids[3]: 2}
    assert whole(found) == whole(collected)  # in the order of the tasks, too
    assert [len(row["broken"]) for row in found] == [0, times, 0, 1] and CAUSE in " ".join(
        found[3]["broken"][0].split()
    )
    assert read(tmp_path / "collect.json")["broken"] == {"n": 0, "played_again": 2, "first": None}
    assert "complete already" in "".join((collect(tmp_path), capsys.readouterr().out)[1])


@pytest.mark.parametrize("most", [1, 2])
def test_attempts_are_limited_and_a_larger_number_allows_more(
    most: int, collected: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    outage, id = Outage(monkeypatch), collected[2]["task_id"]
    outage.left[id] = most
    for _ in range(most + 2):
        collect(tmp_path, f"episode_attempts={most}")
    assert outage.begun[id] == most and "complete already" in capsys.readouterr().out
    broken = read(tmp_path / "collect.json")["broken"]
    assert (broken["n"], broken["played_again"]) == (1, int(most > 1))
    assert id not in {row.task_id for row in load_rows(tmp_path / "rows")}
    assert whole(collect(tmp_path, f"episode_attempts={most + 1}")) == whole(collected)


def test_where_every_episode_broke_one_line_names_the_cause_and_the_same_command_mends_it(
    tmp_path: Path, collected: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    outage = Outage(monkeypatch)
    outage.left.update({row["task_id"]: 1 for row in collected})
    command = ["collect", "-c", "collect/quickstart", *GAMES, "--out", str(tmp_path / "run")]
    told = CliRunner().invoke(app, command)
    [line] = [line for line in told.output.splitlines() if line.startswith("error: ")]
    assert told.exit_code == 1 and "4 of 4 episodes broke" in line and CAUSE in line
    assert not (tmp_path / "run/rows").exists()
    told = CliRunner().invoke(app, command)
    assert told.exit_code == 0 and "4 broken ones are played again" in told.output
    assert whole(rows(tmp_path / "run")) == whole(collected)


def test_a_broken_episode_gives_no_row_where_failures_do(
    tmp_path: Path, collected: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It breaks at its second step."""
    outage, id = Outage(monkeypatch, "step"), collected[0]["task_id"]
    step = EngineEnvironment.step

    def second(env: Any, action: str) -> Any:
        env.taken = getattr(env, "taken", 0) + 1
        outage.left[id] = int(env.current == id and env.taken == 2)
        return step(env, action)

    monkeypatch.setattr(EngineEnvironment, "step", second)
    found = collect(tmp_path, "successful_only=false", "concurrency=1")
    assert len(found[0]["steps"]) == 2 and found[0]["stop_reason"] == "environment_failure"
    assert {row.task_id for row in load_rows(tmp_path / "rows")} == {row["task_id"] for row in found[1:]}


def test_workers_of_a_cluster_follow_the_same_rules(tmp_path: Path, collected: list[dict[str, Any]]) -> None:
    config = load_config(CollectConfig, "collect/quickstart", GAMES)
    run = RunFolder.create(tmp_path / "run", config)

    def play(of: CollectionPlan, fleet: InProcessBackend) -> None:
        todo = remaining_tasks(of)
        with WorkerPool(fleet, RaySettings(retries=0)) as pool:
            play_with_pool(pool, of, todo, 1)
        sort_record(todo[0], of)

    with Environments(config.env) as envs:
        of = plan_collection(config, envs, run)
        make = partial(CollectWorker, config, of.bank.path, of.bank.snapshot())
        play(of, InProcessBackend(make, (1,), deaths={0: 0}))
        lost = [row["stop_reason"] for row in rows(run.path)]
        assert lost.count("worker_failure") == 1
        play(of, fleet := InProcessBackend(make, (1,)))
    assert len(fleet.begun) == 1 and whole(rows(run.path)) == whole(collected)
    assert sorted(len(row["broken"]) for row in rows(run.path)) == [0, 0, 0, 1]


# eval -----------------------------------------------------------------------------------------------------------------


class Shaky:
    """Acts as the expert would, but for the requests that it fails at."""

    needs_expert, batched, accepts_soft, sees_images, reads = True, False, False, False, PAPER_VIEW

    def __init__(self, *fails: int) -> None:
        self.fails, self.asked = fails, 0

    def act(self, requests: Sequence[ExecutorRequest], contexts: Sequence[EpisodeContext] = ()) -> list[Action]:
        [context], self.asked = contexts, self.asked + 1
        if self.asked in self.fails:
            raise ConnectionError("the server is gone")
        action = (context.plan or ["look"])[0]
        return [Action(action, Grounding.CHOICE, action, (), 10, 1)]

    def hash(self) -> str:
        return "shaky"


def config(protocol: str, **settings: Any) -> EvalConfig:
    memory = {"system": "trajectory", "protocol": protocol, "pictures": 0, "k": 4 if protocol == "online" else 0}
    return EvalConfig.model_validate(
        {
            "env": {"name": "household", "scenes": {"train": 3, "test": 2}, "images": False},
            "limit": 5,
            "max_steps": 12,
            "deliveries": ["none", "static"],
            "split": "test",
            "memory": memory,
            **settings,
        }
    )


def played(of: EvalConfig, out: Path, executor: Any = None) -> dict[str, Any]:
    with ModelCache.preloaded(of, executor or Shaky(), None) as loaded:
        return evaluate(Cell({}, of), out, loaded, "resume")


def known(results: dict[str, Any]) -> dict[str, Any]:
    """Keep what no clock and no count of attempts is in."""
    names = ("success", "stop_reasons", "steps", "stream", "grounding")
    return {name: {key: of.get(key) for key in names} for name, of in results["results"].items()}


@pytest.mark.parametrize(
    ("protocol", "breaks"),
    [("frozen", "environment"), ("online", "executor"), ("online", "memory")],
)
def test_an_evaluation_that_was_mended_is_the_one_without_an_outage(
    protocol: str, breaks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    of = config(protocol)
    right = played(of, tmp_path / "right")
    tasks = [row["task_id"] for row in rows(tmp_path / "right")][:5]
    outage, executor = Outage(monkeypatch), Shaky(3) if breaks == "executor" else Shaky()
    if breaks == "environment":
        outage.left[tasks[2]] = 1
    with monkeypatch.context() as patch:
        if breaks == "memory":
            fails_once(patch, at=3 if protocol == "frozen" else 8)
        first = played(of, tmp_path / "run", executor)
    assert first["broken_due"] == 1 and "have attempts left" in capsys.readouterr().out
    assert (
        f"{breaks} failure" in to_markdown(first) and f"{breaks} failure" in (tmp_path / "run/report.html").read_text()
    )
    before = Counter(outage.begun)
    again = played(of, tmp_path / "run")
    assert known(again) == known(right) and again["broken_due"] == 0
    assert whole(sorted(rows(tmp_path / "run"), key=str)) == whole(sorted(rows(tmp_path / "right"), key=str))
    assert sum(summary["broken"]["played_again"] for summary in again["results"].values()) == 1
    assert "played again" in to_markdown(again)
    if protocol == "frozen":
        assert (outage.begun - before).total() == 1
    else:
        banks = [MemoryBank(tmp_path / name / FOLDER / "static").entries() for name in ("run", "right")]
        assert [entry.text for entry in banks[0]] == [entry.text for entry in banks[1]]
    assert "complete already" in (played(of, tmp_path / "run"), capsys.readouterr().out)[1]


def fails_once(patch: pytest.MonkeyPatch, at: int) -> None:
    """Have the at-th recall of any session fail."""
    from memory.protocol import FixedSession

    recall, asked = FixedSession.recall, iter(range(1, 1_000))

    def failing(session: Any, observation: str) -> Any:
        if next(asked) == at:
            raise OSError("the memory's disk is gone")
        return recall(session, observation)

    patch.setattr(FixedSession, "recall", failing)


def test_a_stream_is_played_again_from_what_broke_on_and_a_kill_meanwhile_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = config("online", deliveries=["static"])
    right = played(of, tmp_path / "right")
    tasks = [row["task_id"] for row in rows(tmp_path / "right")]
    outage = Outage(monkeypatch)
    outage.left.update({tasks[1]: 1, tasks[3]: 2})
    played(of, tmp_path / "run")
    outage.begun.clear()
    with monkeypatch.context() as patch:
        append = EpisodeRecord.append
        patch.setattr(EpisodeRecord, "append", lambda record, e: (append(record, e), killed(e.task_id == tasks[2])))
        with pytest.raises(KeyboardInterrupt):
            played(of, tmp_path / "run")
    assert list(outage.begun) == tasks[1:3] and not (tmp_path / "run/results.json").exists()
    played(of, tmp_path / "run")
    assert outage.begun == {tasks[1]: 1, tasks[2]: 1, tasks[3]: 1, tasks[4]: 1}
    again = played(of, tmp_path / "run")
    assert known(again) == known(right) and whole(rows(tmp_path / "run")) == whole(rows(tmp_path / "right"))
    assert [len(row["broken"]) for row in rows(tmp_path / "run")] == [0, 1, 0, 2, 0]


def killed(now: bool) -> None:
    if now:
        raise KeyboardInterrupt


def test_a_sequence_in_which_an_episode_broke_is_lived_again_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ["env.sequences={simple: 0, composite: 2, complex: 0}", "env.scenes={test: 2}", "deliveries=[static]"]
    of = load_config(EvalConfig, "eval/karma", small)
    right = run_eval(of, tmp_path / "right")
    sequences = {row["task_id"].rpartition("/")[0]: row["task_id"] for row in rows(tmp_path / "right")}
    outage = Outage(monkeypatch, "step")
    outage.left[next(iter(sequences)) + "/1"] = 1
    first = run_eval(of, tmp_path / "run")
    assert 1 < first["broken_due"] < len(rows(tmp_path / "run"))  # its later tasks had no world
    begun = outage.begun.copy()
    again = run_eval(of, tmp_path / "run", "resume")
    assert (outage.begun - begun).total() == 1 and again["broken_due"] == 0
    assert again["results"]["static"]["living"] == right["results"]["static"]["living"]


def test_where_every_episode_broke_there_are_no_results_and_the_command_fails_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outage, of = Outage(monkeypatch), config("frozen", episode_attempts=2)
    with Environments(of.env) as envs:
        tasks = [task.id for task in envs.tasks("test")[:5]]
    outage.left.update(dict.fromkeys(tasks, 4))  # under two deliveries
    for says in ("10 have attempts left .*: run the same command", "raise episode_attempts=2"):
        with pytest.raises(ValueError, match=f"10 of 10 episodes broke, the first .*{CAUSE}.*{says}") as told:
            played(of, tmp_path)
        assert "\n" not in str(told.value) and not (tmp_path / "results.json").exists()
    assert played(config("frozen"), tmp_path)["broken_due"] == 0  # three attempts are the default


def test_results_and_tables_say_how_many_stayed_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as failed; a failure of the model's own is a result, and is not played again."""
    outage, of = Outage(monkeypatch), config("frozen", episode_attempts=2, max_steps=1)
    with Environments(of.env) as envs:
        task = envs.tasks("test")[0].id
    outage.left[task] = 9
    for _ in range(3):
        made = played(of, tmp_path)
    assert outage.begun[task] == 2 * 2 and outage.begun.total() == 2 * 2 + 2 * 4 and made["broken_due"] == 0
    of_none = made["results"]["none"]
    assert of_none["stop_reasons"] == {"step_limit": 4, "environment_failure": 1} and of_none["success"]["n"] == 5
    assert of_none["broken"] == {"n": 1, "played_again": 1, "first": f"{task}: environment_failure: {CAUSE}"}
    for text in (to_markdown(made), (tmp_path / "report.html").read_text()):
        assert "1 environment failure" in text and "2 episodes were played again" in text and "named socks" in text


# the record -----------------------------------------------------------------------------------------------------------


def record(path: Path, *made: tuple[str, str, int], most: int = 3) -> RetriedResults[str]:
    """Write rows: name, cause, number of earlier attempts."""
    lines = JsonLines(path / "rows.jsonl")
    lines.append(*({"id": id, "cause": cause, "broken": ["x"] * earlier} for id, cause, earlier in made))
    return RetriedResults(lines, lambda row: row["id"], most, lambda row: row["cause"])


def test_a_broken_row_is_missing_while_attempts_are_left_and_stays_until_it_is_replaced(tmp_path: Path) -> None:
    rows = record(tmp_path, ("a", "", 0), ("b", "x", 0), ("c", "x", 2), ("d", "x", 1))
    assert rows.load() == ["a", "c"] and rows.due == {"b", "d"}
    rows.add([("d", '{"id": "d", "cause": "", "steps": 1}')])  # a kill comes behind it
    assert rows.load() == ["a", "c", "d"] and rows.due == {"b"}
    assert [(row["id"], len(row["broken"])) for row in rows.lines] == [("a", 0), ("b", 0), ("c", 2), ("d", 2)]
    rows.keep(lambda id: id == "a")  # what came after is made again, too; its history is not lost
    assert [row["id"] for row in rows.lines] == ["a", "b"]
    rows.add([(id, json.dumps({"id": id, "cause": "x"})) for id in "bcd"])
    rows.load()
    assert {row["id"]: len(row.get("broken", ())) for row in rows.lines} == {"a": 0, "b": 1, "c": 3, "d": 2}
    rows.most = 2
    assert rows.load() == ["a", "b", "c", "d"] and not rows.due


def test_rows_that_are_there_twice_without_having_broken_are_not_hidden(tmp_path: Path) -> None:
    assert record(tmp_path, ("a", "", 0), ("a", "", 0)).load() == ["a", "a"]


@pytest.mark.parametrize("cause", ["OSError: a\nb\tc", "E: " + "word " * 500])
def test_a_cause_is_one_short_line(cause: str) -> None:
    line = failure_summary([("t", cause, ()), ("u", "", ())], 3, "episode_attempts")
    assert line.startswith("1 of 2 episodes broke") and "\n" not in line and len(line) < 600
    assert failure_summary([("u", "", ("x",))], 3, "episode_attempts") == ""
