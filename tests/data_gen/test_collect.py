"""Collection: kill -9 and shards with either teacher; a growing bank, faults, budgets and nothing paid twice with an
endpoint."""

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agent.expert import ExpertTeacher
from compiler.language import parse
from configs.collect import CollectConfig
from configs.evaluation import EvalConfig
from configs.load import ConfigError, load_config
from configs.models import EXECUTOR_KEY
from configs.run_folder import RunFolder
from configs.training import GrpoConfig
from data_gen.collect import expert_actor, plan_collection, play_collection, success_filter
from data_gen.endpoint_teacher import LEVELS, WRITING
from data_gen.rows import load_rows
from envs.base import Environment, Task
from envs.household.command_reader import HouseholdReader
from envs.registry import Environments
from eval.rollouts import specs_of
from lm.answer_cache import EndpointStop
from memcompiler.cli import app
from memcompiler.collection import run_collect
from memory.bank import BankError, MemoryBank
from memory.entry import MemoryEntry, Provenance
from memory.journal import Journal
from memory.trajectory import goal_with_scene
from runtime.checksums import parse_row
from runtime.store import JsonLines
from tests import vllm_engines
from tests.commands.running import memcompiler
from tests.faulty_server import FaultyServer, hashed
from training.grpo_tasks import training_specs

ROOT = Path(__file__).parents[2]


def model(messages):
    """A deterministic model: plans once, later notes something now and then, and acts by going round."""
    if messages[0]["content"] == WRITING:
        return hashed(messages)
    text = messages[-1]["content"]
    if not messages[0]["content"].endswith(LEVELS["place"]):
        return "look"
    if "now:" not in text:
        return "> no memory says where | look around\n+ plan: find it; put it"
    return f"+ {hashed(messages)}: seen" if len(text) % 3 == 0 else "."


def settings(server: FaultyServer, *overrides: str) -> list[str]:
    return [
        "teacher=endpoint",
        f"api.base_url={server.url}",
        "api.model=faulty-1",
        "api.key_env=null",
        "api.backoff_s=0.001",
        "api.concurrency=2",
        "env.scenes={train: 2, test: 1}",
        "limit=5",
        "concurrency=2",
        "max_steps=7",
        *overrides,
    ]


def collect(out: Path, server: FaultyServer, *overrides: str) -> list[dict]:
    run_collect(load_config(CollectConfig, "collect/quickstart", settings(server, *overrides)), out)
    return records(out)


def records(out: Path, whole_lines: bool = False) -> list[dict]:
    """Without what a clock says; and without a line that was cut short, where there may be one."""
    lines = (out / "episodes.jsonl").read_text().splitlines(keepends=True)
    episodes = [parse_row(line) for line in lines if line.endswith("\n") or not whole_lines]
    for episode in episodes:
        for step in (step for attempt in (episode, *episode.get("retries", ())) for step in attempt["steps"]):
            del step["seconds"]
    return episodes


def tasks_of(episodes) -> list[str]:
    return [episode["task_id"] for episode in episodes]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run without any trouble."""
    out = tmp_path_factory.mktemp("collect") / "whole"
    with FaultyServer(answer=model) as server:
        collect(out, server)
        (out / "requests").write_text(str(server.requests))
    return out


def test_the_bank_grows_from_round_to_round(whole):
    episodes, bank = records(whole), {entry.id: entry for entry in MemoryBank(whole / "bank")}
    assert len(set(tasks_of(episodes))) == 5 and len(bank) == 5
    assert {episode["success"] for episode in episodes} == {True, False}
    for i, episode in enumerate(episodes):
        before = tasks_of(episodes)[: i // 2 * 2]  # of earlier rounds
        seen = {bank[id].provenance.task_id for id in episode["memory_ids"]}
        assert seen <= set(before) and (not before or seen)
        [entry] = [entry for entry in bank.values() if entry.provenance.task_id == episode["task_id"]]
        assert entry.text.endswith(("because " if episode["success"] else "failed: ") + episode["rationale"])
        assert episode["rationale"].startswith("echo ")
    summary = json.loads((whole / "collect.json").read_text())
    requests = int((whole / "requests").read_text())
    account = summary["endpoints"]["teacher"]
    assert account["requests"] == requests
    steps = sum(len(e["steps"]) for e in episodes)
    assert requests + account["from_cache"] == steps + 5  # equal requests are paid once
    assert (summary["malformed"], summary["misapplied"]) == (0, 0)


def test_what_failed_is_attempted_again_where_memory_asks_for_it(tmp_path):
    """BrainMem's guided retries: memory learns from all attempts, rows and success are of the first."""
    out = tmp_path / "run"
    with FaultyServer(answer=model) as server:
        episodes = collect(out, server, "memory={system: brainmem}")
        assert [len(e["retries"]) > 0 for e in episodes] == [not e["success"] for e in episodes]
        assert all([try_["success"] for try_ in e["retries"][:-1]] in ([], [False]) for e in episodes)
        learned = [[t.attempt for t in row.attempts] for row in Journal(out / "bank")]
        assert learned == [list(range(1 + len(e["retries"]))) for e in episodes]
        rows = load_rows(out / "rows")
        assert {row.task_id for row in rows} == {e["task_id"] for e in episodes if e["success"]}
        JsonLines(out / "episodes.jsonl").truncate(3)  # a kill within the second round
        (out / "collect.json").unlink()
        shutil.rmtree(out / "bank")
        assert collect(out, server, "memory={system: brainmem}") == episodes


def test_rows_hold_what_was_played(whole):
    successes = [episode for episode in records(whole) if episode["success"]]
    rows = load_rows(whole / "rows")
    assert [(row.task_id, row.t) for row in rows] == [(e["task_id"], s["t"]) for e in successes for s in e["steps"]]
    assert [row.emission for row in rows] == [s["emission_text"] for e in successes for s in e["steps"]]
    assert [row.action for row in rows] == [s["executor_text"] for e in successes for s in e["steps"]]  # the expert's
    assert all(
        row.image and row.memory_ids == tuple(e["memory_ids"])
        for e in successes
        for row in rows
        if row.task_id == e["task_id"]
    )
    assert rows[0].state.startswith("goal: in ") and rows[1].state.count("now: find it") == 1


def test_faults_change_nothing_but_the_count(whole, tmp_path):
    faults = ["429", "500", "truncated", "html", "empty choices", "429 retry-after", "null content", "closed", "array"]
    with FaultyServer(faults, model) as server:
        assert collect(tmp_path / "run", server) == records(whole)
        assert server.served["answer"] == int((whole / "requests").read_text())
    account = json.loads((tmp_path / "run" / "collect.json").read_text())["endpoints"]["teacher"]
    kinds = {"connection": 1, "no_choice": 3, "not_json": 2, "rate_limit": 2, "server_error": 1}
    assert account["faults"] == kinds and account["requests"] == server.requests


def test_malformed_emissions_give_no_row(whole, tmp_path):
    """The very first emission is the same garbage at two attempts: a third is not paid for."""
    with FaultyServer(["garbage"] * 2, model) as server:
        episodes = collect(tmp_path / "run", server, "api.concurrency=1", "concurrency=1")
    [first, *_] = episodes[0]["steps"]
    assert (first["parse_error"], first["emission_kind"], first["guidance"]) == ("unknown_line", "NOACTION", "")
    assert "{0} %s" in first["emission_text"]
    assert json.loads((tmp_path / "run" / "collect.json").read_text())["malformed"] == 1
    rows = load_rows(tmp_path / "run" / "rows")
    assert (episodes[0]["task_id"], 0) not in {(row.task_id, row.t) for row in rows}
    assert all("{0}" not in row.emission for row in rows)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.engine
@vllm_engines.marks[-1]
def test_a_served_model_that_cannot_write_emissions_poisons_no_row(tmp_path, monkeypatch):
    """A tiny model with random weights behind vLLM's own server, as teacher of two tasks."""
    monkeypatch.setenv(EXECUTOR_KEY, "k1")
    model = vllm_engines.folder(False)
    url, _ = vllm_engines.shared_server()
    chosen = [
        "teacher=endpoint",
        f"api.base_url={url}/v1",
        f"api.model={model}",
        f"api.key_env={EXECUTOR_KEY}",
        "api.concurrency=2",
        "env.scenes={train: 2, test: 1}",
        "limit=2",
        "max_steps=2",
        "max_new_tokens=16",
        "actor=expert",
    ]
    with pytest.raises(ValueError, match="there are no rows to save"):
        run_collect(load_config(CollectConfig, "collect/quickstart", chosen), tmp_path / "run")
    episodes = records(tmp_path / "run")
    # What it writes is malformed, or, where it is white space up to the limit, no answer.
    refused = lambda episode: "finish_reason length" in episode["error"]
    steps = [step for episode in episodes for step in episode["steps"][: -1 if refused(episode) else None]]
    assert len(episodes) == 2 and steps and all(step["parse_error"] and step["action"] for step in steps)
    account = json.loads((tmp_path / "run" / "endpoints.json").read_text())["teacher"]
    assert account["requests"] <= 4 * 3 + 2  # three attempts a step, and two rationales
    assert account["faults"].keys() == {"length" for episode in episodes if refused(episode)}
    assert sum(role["tokens_out"] for role in account["roles"].values()) > 4 * 3


def test_the_cache_makes_a_second_run_free(whole, tmp_path):
    with FaultyServer(answer=model) as server:
        again = collect(tmp_path / "run", server, f"api.cache={whole / 'responses.sqlite'}")
        assert again == records(whole) and server.requests == 0
        run_collect(
            load_config(
                CollectConfig, "collect/quickstart", settings(server, f"api.cache={whole / 'responses.sqlite'}")
            ),
            tmp_path / "run",
        )
        assert server.requests == 0  # complete already


def test_a_budget_stops_cleanly_and_a_larger_one_continues(whole, tmp_path):
    """An answer has 110 tokens: 2200 buy twenty, which end in the middle of a round."""
    out = tmp_path / "run"
    with FaultyServer(answer=model) as server:
        small = settings(server, "api.budget_tokens=2200", "api.concurrency=1")
        result = CliRunner().invoke(app, ["collect", "-c", "collect/quickstart", *small, "--out", str(out)])
        assert result.exit_code == 1 and "raise api.budget_tokens" in result.output, result.output
        assert server.requests == 20 and not (out / "collect.json").exists()
        kept = records(out)
        assert kept and kept == records(whole)[: len(kept)]
        large = settings(server, "api.budget_tokens=100000", "api.concurrency=1")
        result = CliRunner().invoke(app, ["collect", "-c", "collect/quickstart", *large, "--out", str(out)])
        assert result.exit_code == 0, result.output
        assert server.requests == int((whole / "requests").read_text())  # none was paid twice
    assert records(out) == records(whole) and len(load_rows(out / "rows")) == len(load_rows(whole / "rows"))


@pytest.mark.parametrize("left", ["torn line", "half a round", "bank behind", "rows missing"])
def test_resume_from_what_a_kill_may_leave(whole, tmp_path, left):
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    (out / "collect.json").unlink()
    lines = (out / "episodes.jsonl").read_bytes().splitlines(keepends=True)
    if left == "torn line":  # the last round's record was cut short: its episode is not in the bank yet
        (out / "episodes.jsonl").write_bytes(b"".join(lines[:4]) + lines[4][:100])
    elif left == "half a round":
        (out / "episodes.jsonl").write_bytes(b"".join(lines[:3]))
    if left in ("torn line", "half a round", "bank behind"):
        shutil.rmtree(out / "bank")
    shutil.rmtree(out / "rows")
    with FaultyServer(answer=model) as server:
        # The configuration on disk names another port: where the server is may change.
        again = collect(out, server)
        assert server.requests == 0
    strip = lambda episodes: [{k: v for k, v in e.items() if k != "bank_version"} for e in episodes]
    assert strip(again) == strip(records(whole))
    assert {e.id: e.text for e in MemoryBank(out / "bank")} == {e.id: e.text for e in MemoryBank(whole / "bank")}


def test_a_bank_that_something_else_wrote_to_is_refused(whole, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    (out / "collect.json").unlink()
    MemoryBank(out / "bank").write(MemoryEntry("x", "x", Provenance("x", "x", "x", "train", True)))
    with FaultyServer(answer=model) as server, pytest.raises(BankError, match="something else wrote to the bank"):
        collect(out, server)


def test_shards_are_disjoint_and_complete(whole, tmp_path):
    played = []
    with FaultyServer(answer=model) as server:
        for i in range(2):
            played.append(tasks_of(collect(tmp_path / f"shard-{i}", server, f"shard={i}/2", "noise=0")))
        with pytest.raises(ValueError, match="empty"):
            collect(tmp_path / "empty", server, "shard=5/6")
    assert not set(played[0]) & set(played[1]) and set(played[0]) | set(played[1]) == set(tasks_of(records(whole)))
    both = load_rows([tmp_path / f"shard-{i}" / "rows" for i in range(2)])
    assert {row.task_id for row in both} <= {*played[0], *played[1]} and both
    with pytest.raises(ConfigError, match="numbered 0/n"):
        load_config(CollectConfig, None, ["shard=2/2", "teacher=endpoint", "api.model=m"])


@pytest.mark.parametrize("answered", [0, 15, 29])
def test_an_episode_that_an_endpoint_broke_is_played_again_with_all_that_learned_without_it(whole, tmp_path, answered):
    with FaultyServer([*["answer"] * answered, "400"], model) as server:
        out, settings = tmp_path / "run", ["api.concurrency=1"]
        first = collect(out, server, *settings)
        [lost] = [n for n, episode in enumerate(first) if episode["stop_reason"] == "compiler_failure"]
        assert json.loads((out / "collect.json").read_text())["broken"]["n"] == 1
        again, asked = collect(out, server, *settings), server.requests
        assert collect(out, server, *settings) == again and server.requests == asked  # complete now
    strip = lambda episodes: [{k: v for k, v in e.items() if k not in ("bank_version", "broken")} for e in episodes]
    assert strip(again) == strip(records(whole)) and [len(e["broken"]) for e in again] == [n == lost for n in range(5)]
    banks = [{e.id: e.text for e in MemoryBank(folder / "bank")} for folder in (out, whole)]
    assert banks[0] == banks[1]


def test_an_endpoint_that_is_not_there_is_named_and_the_same_command_goes_on_when_it_is(whole, tmp_path):
    with FaultyServer(answer=model) as server:
        gone = server.url
    command = lambda url: CliRunner().invoke(
        app,
        [
            "collect",
            "-c",
            "collect/quickstart",
            *settings(server, f"api.base_url={url}", "api.retries=0", "limit=2"),
            "--out",
            str(tmp_path / "run"),
        ],
    )
    told = command(gone)
    [line] = [line for line in told.output.splitlines() if line.startswith("error: ")]
    assert told.exit_code == 1 and "2 of 2 episodes broke" in line and "onnection" in line, told.output
    with FaultyServer(answer=model) as server:
        told = command(server.url)
    assert told.exit_code == 0, told.output
    assert [e["stop_reason"] for e in records(tmp_path / "run")] == [e["stop_reason"] for e in records(whole)[:2]]


def test_one_lost_request_costs_one_episode(tmp_path):
    with FaultyServer(["400"], model) as server:
        episodes = collect(tmp_path / "run", server, "api.concurrency=1")
    assert [episode["stop_reason"] for episode in episodes].count("compiler_failure") == 1
    lost = episodes[0]
    assert lost["stop_reason"] == "compiler_failure" and "refused" in lost["error"]
    assert lost["task_id"] not in {e.provenance.task_id for e in MemoryBank(tmp_path / "run" / "bank")}
    assert json.loads((tmp_path / "run" / "collect.json").read_text())["stop_reasons"]["compiler_failure"] == 1


def test_an_endpoint_that_is_gone_uses_up_no_tasks(whole, tmp_path):
    out = tmp_path / "run"
    with FaultyServer(["answer"] * 10 + ["500"] * 100, model) as server:
        with pytest.raises(EndpointStop, match="in a row"):
            collect(out, server, "api.retries=0", "concurrency=5", "api.concurrency=1")
        assert not (out / "episodes.jsonl").exists() or not records(out)
        server.faults.clear()
        assert len(collect(out, server, "api.retries=0", "concurrency=5", "api.concurrency=1")) == 5


def test_another_models_actions_are_the_labels(tmp_path):
    """The teacher's model acts, and so does a closed executor; neither gets anywhere by looking."""
    with FaultyServer(answer=model) as server:
        with pytest.raises(ValueError, match="no rows to save"):
            collect(tmp_path / "teacher", server, "actor=teacher", "limit=2")
        api = f"executor={{engine: api, api: {{base_url: '{server.url}', model: other, key_env: null}}}}"
        with pytest.raises(ValueError, match="no rows to save"):
            collect(tmp_path / "executor", server, "actor=executor", api, "limit=2")
    for name in ("teacher", "executor"):
        assert {step["action"] for e in records(tmp_path / name) for step in e["steps"]} == {"look"}
    accounts = json.loads((tmp_path / "executor" / "endpoints.json").read_text())
    assert accounts["executor"]["roles"]["executor"]["answers"] == 14 and accounts["executor"]["model"] == "other"
    assert set(accounts["teacher"]["roles"]) == {"teacher", "rationale"}


@pytest.mark.parametrize("kept", [True, False])
def test_the_filter_keeps_the_rows_of_successes(kept: bool, tmp_path: Path) -> None:
    """Where the teacher's model acts, it can fail: it solves two of four tasks, and looks around in the others."""
    asked = ("actor=teacher", "limit=4", "max_steps=40", f"successful_only={str(kept).lower()}")
    with FaultyServer() as server:
        config = load_config(CollectConfig, "collect/quickstart", settings(server, *asked))
        with Environments(config.env) as envs:
            tasks, env = envs.tasks(config.split)[:4], envs.lease()
            plans = {goal_with_scene(task.goal, task.scene): plan_of(env, task) for task in tasks[::2]}
        assert len(plans) == 2

        def acts(messages):
            if messages[0]["content"] == WRITING or messages[0]["content"].endswith(LEVELS["place"]):
                return model(messages)
            told = " ".join(message["content"] for message in messages)
            return next((next(plan) for goal, plan in plans.items() if goal in told), "look")

        server.answer = acts
        episodes = collect(tmp_path / "run", server, *asked)
    solved, rows = {task.id for task in tasks[::2]}, load_rows(tmp_path / "run" / "rows")
    assert {episode["task_id"] for episode in episodes if episode["success"]} == solved
    assert {row.task_id for row in rows} == (solved if kept else {task.id for task in tasks})
    assert all(row.success == (row.task_id in solved) for row in rows)
    summary = json.loads((tmp_path / "run" / "collect.json").read_text())
    assert (summary["successes"], summary["episodes"]) == (2, 4)
    assert summary["success_filter"].endswith("these episodes only" if kept else "rows are of all episodes")


def plan_of(env: Environment, task: Task) -> Iterator[str]:
    env.reset(task)
    return iter(env.expert() or [])


def test_it_may_start_from_another_bank(whole, tmp_path):
    with FaultyServer(answer=model) as server:
        first = collect(tmp_path / "run", server, f"memory.bank={whole / 'bank'}", "limit=2")[0]
    assert first["memory_ids"] and len(MemoryBank(whole / "bank")) == 5  # read only
    assert {e.id for e in MemoryBank(whole / "bank")} <= {e.id for e in MemoryBank(tmp_path / "run" / "bank")}


@pytest.mark.slow
def test_kill_9_at_a_random_moment_and_resume(whole, tmp_path):
    """The same command again: each task once, the same records as without a kill, and only requests that were in flight
    are asked a second time."""
    total, out = int((whole / "requests").read_text()), tmp_path / "run"
    moment, reached = random.Random().randrange(1, total), threading.Event()
    print("killed at request", moment, "of", total)
    with FaultyServer(["429", "500"], model, lambda n: reached.set() if n >= moment else None) as server:
        command = [sys.executable, "-m", "memcompiler", "collect", "-c", "collect/quickstart", "--out", str(out)]
        command, env = [*command, *settings(server)], {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL)
        assert reached.wait(200), "the server was not asked so often"
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        done = memcompiler(*command[3:])
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        asked = server.requests
    assert records(out) == records(whole)
    assert total <= asked <= total + 2 + 2  # two faults (which the kill may swallow), and at most two in flight
    assert len(load_rows(out / "rows")) == len(load_rows(whole / "rows"))


# -- the expert teaches -----------------------------------------------------------------------------------------------

EXPERT = ["env.scenes={train: 24, test: 1}", "limit=48", "concurrency=4"]


@pytest.mark.slow
def test_kill_9_of_the_expert_teacher_and_resume(tmp_path):
    """The same command again: the same records, rows and bank as without a kill, and no recorded task played again."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_collect(load_config(CollectConfig, "collect/quickstart", EXPERT), whole)
    command = [sys.executable, "-m", "memcompiler", "collect", "-c", "collect/quickstart", "--out", str(killed)]
    command += EXPERT
    env, record = {**os.environ, "OMP_NUM_THREADS": "1"}, killed / "episodes.jsonl"
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not record.exists() or record.read_bytes().count(b"\n") < 8:
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    before = records(killed, whole_lines=True)
    print("killed after", len(before), "episodes")
    assert 8 <= len(before) < 48 and not (killed / "collect.json").exists()
    done = memcompiler(*command[3:])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "resumed at task" in done.stdout
    assert records(killed) == records(whole) and records(killed)[: len(before)] == before
    assert load_rows(killed / "rows") == load_rows(whole / "rows")
    assert MemoryBank(killed / "bank").entries() == MemoryBank(whole / "bank").entries()


def test_shards_of_the_expert_play_each_task_once(tmp_path):
    settings = ["env.scenes={train: 4, test: 1}", "limit=7"]
    for i in range(2):
        chosen = load_config(CollectConfig, "collect/quickstart", [*settings, f"shard={i}/2"])
        run_collect(chosen, tmp_path / f"shard-{i}")
    run_collect(load_config(CollectConfig, "collect/quickstart", settings), tmp_path / "whole")
    shards = [tasks_of(records(tmp_path / f"shard-{i}")) for i in range(2)]
    assert sorted(shards[0] + shards[1]) == sorted(tasks_of(records(tmp_path / "whole"))) and len(shards[0]) == 4
    parts, together = (load_rows(sorted(tmp_path.glob(name))) for name in ("shard-*/rows", "whole/rows"))
    assert sorted(parts, key=lambda row: (row.task_id, row.t)) == sorted(together, key=lambda row: (row.task_id, row.t))
    pairs = itertools.pairwise(together)
    assert any(a.action != b.history[-1] for a, b in pairs if b.t > a.t)  # chance had a part in it
    banks = [{e.id for e in MemoryBank(tmp_path / name / "bank")} for name in ("shard-0", "shard-1", "whole")]
    assert banks[0] == banks[1] == banks[2]  # each shard reads the experience of all scenes


@pytest.mark.seconds
def test_without_a_brief_state_neither_the_teacher_nor_its_rows_have_one(tmp_path):
    rows = {}
    for has_one in (True, False):
        settings = ["env.scenes={train: 4, test: 1}", f"brief_state={has_one}", "keep_noaction=1"]
        run_collect(load_config(CollectConfig, "collect/quickstart", settings), tmp_path / str(has_one))
        rows[has_one] = load_rows(tmp_path / str(has_one) / "rows")
    assert [(row.task_id, row.t, row.action) for row in rows[False]] == [(r.task_id, r.t, r.action) for r in rows[True]]
    assert all(row.step_input().state is not None for row in rows[True])
    assert all(row.step_input().state is None and not parse(row.emission).emission.ops for row in rows[False])
    assert any(parse(row.emission).emission.ops for row in rows[True])
    assert {row.emission for row in rows[False]} > {"."}  # and yet something is said


def test_experience_that_was_cut_short_goes_on_where_it_stopped(tmp_path):
    from data_gen import experience
    from envs.household.environment import HouseholdEnvironment

    homes = ExpertTeacher(reader=HouseholdReader())

    def make_env():
        return HouseholdEnvironment(scenes={"train": 3})

    def stop(episode):
        if len(bank) >= 4:
            raise RuntimeError("stop")

    tasks = make_env().tasks("train_experience")[:7]
    whole, bank = MemoryBank(tmp_path / "whole"), MemoryBank(tmp_path / "cut")
    assert not whole.write([]).added and not bank.write([]).added  # empty banks
    assert experience.tasks_without_episode(tasks, whole) == tasks
    experience.collect_experience(make_env, tasks, whole, homes, round_size=2)
    with pytest.raises(RuntimeError, match="stop"):
        experience.collect_experience(make_env, tasks, bank, homes, on_episode=stop, round_size=2)
    assert experience.tasks_without_episode(tasks, bank) == tasks[4:]
    experience.collect_experience(make_env, tasks[4:], bank, homes, round_size=2)
    assert bank.entries() == whole.entries() and bank.snapshot() == whole.snapshot()
    assert experience.tasks_without_episode(tasks, bank) == []


@pytest.mark.parametrize(
    ("asked", "acts", "says"),
    [
        ({}, "expert", "says little of the teacher"),
        ({"teacher": "endpoint"}, "expert", "says nothing of the teacher"),
        ({"teacher": "endpoint", "env": "eb_habitat"}, "teacher", "the teacher's model acted on what was compiled"),
        (
            {"teacher": "endpoint", "actor": "executor", "successful_only": False},
            "executor",
            "rows are of all episodes",
        ),
    ],
)
def test_who_acts_follows_from_who_knows_the_way_and_says_what_success_means(asked, acts: str, says: str) -> None:
    config = CollectConfig.model_validate({"api": {"model": "any"}, **asked})
    assert config.acting_role == acts and says in success_filter(config)


def test_success_says_nothing_where_the_expert_acts_and_the_record_says_so(whole) -> None:
    assert json.loads((whole / "collect.json").read_text())["success_filter"].startswith("says nothing of the teacher")


# -- homes that are left out ------------------------------------------------------------------------------------------


@pytest.mark.seconds
def test_isolated_by_scene_collection_grpo_and_evaluation_recall_nothing_of_the_own_home(tmp_path: Path) -> None:
    settings = {"env": {"name": "household", "scenes": {"train": 4}, "images": False}, "limit": 6}
    given = {**settings, "memory": {"isolation": "scene", "experience_limit": 12}}
    collection = CollectConfig.model_validate({**given, "empty_memory": 0, "other_kinds": 0})
    training = GrpoConfig.model_validate(given)
    evaluation = EvalConfig.model_validate({**given, "split": "train"})
    with Environments(collection.env) as envs:
        run = RunFolder.create(tmp_path / "collect", collection)
        plan = plan_collection(collection, envs, run)
        play_collection(plan, envs.lease, ExpertTeacher(reader=HouseholdReader()), expert_actor(collection))
        folder = RunFolder.create(tmp_path / "grpo", training)
        grpo, about = training_specs(training, {"household": envs}, folder, folder.path)
        tasks = {task.id: task for task in plan.tasks}
        found = specs_of(evaluation, plan.tasks, plan.bank, ["static_top1"])
    assert about["memory_isolation"] == "scene"
    recalled = {id: episode["memory_ids"] for id, episode in zip(tasks, records(tmp_path / "collect"), strict=True)}
    assert [len(ids) for ids in recalled.values()] == [4] * 6
    specs = [*grpo, *found[0], *found[1]]
    pairs = [(tasks[spec.task.id], entry) for spec in specs for entry in spec.memory]
    pairs += [(tasks[id], plan.bank[entry]) for id, ids in recalled.items() for entry in ids]
    assert len(pairs) == 6 * (4 + 4 + 1 + 4) and not any(task.scene == e.provenance.scene for task, e in pairs)
