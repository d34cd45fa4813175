"""Targets that read files: rows, checkpoints, run folders, journals, stores; each damaged in one place."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from pydantic import BaseModel

from agent.deliveries import Delivery
from agent.episode import EpisodeSpec, Limits, run_episodes
from agent.expert import ExpertExecutor, ExpertTeacher
from agent.records import episode_from_json
from benchmarks.fuzz.inputs import damaged, json_text, mutated, pick, text, texts
from benchmarks.fuzz.target import Target, expect
from compiler import checkpoint
from compiler.checkpoint import CheckpointError
from compiler.need import Need, need_of
from configs.collect import CollectConfig
from configs.evaluation import EvalConfig
from configs.load import load_config, to_yaml
from configs.run_folder import CONFIG, ENVIRONMENT, METRICS, RunFolder
from data_gen.cases import Case, Question, load_cases, save_cases
from data_gen.dataset import of_collection, provenance
from data_gen.experience import traces_of
from data_gen.leakage import LEAKAGE, MANIFEST, guard_rows
from data_gen.memories import MARK, system_of
from data_gen.rows import load_rows, rows_of, save_rows
from envs.alfworld.export import export_split
from envs.alfworld.games import GAME_FILE, AlfworldGames
from envs.base import EnvironmentFailure, Task
from envs.household.environment import EngineEnvironment, HouseholdEnvironment
from envs.household.trajectories import HouseholdReader
from envs.manifest import Manifest
from eval.metrics import results
from eval.plots import read_metrics
from eval.qa.files import read_cases
from eval.runs import EPISODES, RESULTS, EpisodeRecord, load_run
from eval.table import to_markdown
from lm.ledger import Answer, EndpointStop, Ledger
from memory import registry
from memory.bank import MemoryBank, _imported
from memory.entry import entry_from_json
from memory.journal import Journal, Row
from memory.linear import Head
from memory.protocol import BankError, MemorySystem, Query, Record, Trace
from memory.registry import Tools
from runtime.store import to_json
from soft_mem.projector import Projector, ProjectorConfig
from training.checkpoint import model_card

Read = Callable[[], object]
STEP = "sft/checkpoints/step-000001"


@cache
def folder() -> Path:
    """Make a folder for the files of this process, in memory where the machine has such a place."""
    held = tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None, prefix="fuzz-")
    _HELD.append(held)  # it goes with the process
    return Path(held.name)


_HELD: list[tempfile.TemporaryDirectory[str]] = []


@cache
def sample() -> Path:
    """Make small run folders as the commands leave them: collect, sft, eval, and memories."""
    root = folder() / "runs"
    env = lambda: HouseholdEnvironment(scenes={"train": 1}, images=False)
    specs = [EpisodeSpec(task) for task in env().tasks("train")[:2]]
    delivery = Delivery("compiled", "compiled", ExpertTeacher(reader=HouseholdReader()), soft=False)
    episodes = run_episodes(env, specs, delivery, ExpertExecutor(), Limits(4))
    for episode in episodes:  # every sample is the same: inputs are made of it
        for step in episode.steps:
            step.seconds = dict.fromkeys(step.seconds, 0.5)
    collect, sft, evaluated = root / "collect", root / STEP, root / "eval"
    for path, config in ((collect, CollectConfig()), (evaluated, EvalConfig()), (root / "sft", EvalConfig())):
        path.mkdir(parents=True)
        (path / CONFIG).write_text(to_yaml(config), encoding="utf-8")
        (path / ENVIRONMENT).write_text(
            to_json({"started": "now", "git": {"commit": "a"}, "resumed": [{"cpus": 1}], "packages": {"torch": "1"}})
        )
    save_rows([row for episode in episodes for row in rows_of(episode, {})], collect / "rows")
    manifest = Manifest.of("household", [spec.task for spec in specs])
    manifest.write(collect / MANIFEST)
    audit = {
        "clean": True,
        "train_sha256": manifest.sha256,
        "verdict": {"overlaps": [{"shared": 0, "dimension": "scene", "clean": True}]},
    }
    (collect / LEAKAGE).write_text(to_json(audit))
    (collect / "collect.json").write_text(
        to_json({"episodes": 2, "successes": 1, "dropped": {}, "teacher": "expert", "bank_version": 1})
    )
    record = EpisodeRecord(evaluated)
    for episode in episodes:
        record.append(episode)
    meta = {"environment": "household", "split": "test", "seed": 0, "n_tasks": 2, "complete": True, "max_steps": 4}
    (evaluated / RESULTS).write_text(to_json(results({"compiled": episodes}, meta, budgets={"compiled": [2]})))
    (root / "sft" / METRICS).write_text('{"step": 1, "loss": 0.5, "text": 0.1}\n{"step": 2, "loss": 0.25}\n')
    sft.mkdir(parents=True)
    (sft / "state.json").write_text(
        to_json({"step": 1, "seed": 0, "environment": "household", "executor_reads": {"history": 20}})
    )
    torch.manual_seed(0)
    projector = Projector(ProjectorConfig(4, 4, 2))
    checkpoint.save_projector(sft, projector.config, projector.state_dict())
    (sft / "adapter").mkdir()
    (sft / "adapter" / "adapter_config.json").write_text(
        to_json(
            {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "base_model_name_or_path": "x"}
        )
    )
    Need(Head(torch.zeros(16).numpy().astype("float64"), 0.5), 0.5, {"rows": 3}).save(root / "sft")
    for name in registry.BUILT_IN:
        if name != MemoryBank.name:
            opened(name, root / name).commit(traces_of(episodes))
            (root / name / MARK).write_text(to_json({"system": name}))
    case = Case("c", tuple(trace for [trace] in traces_of(episodes)), (Question("q", "where?", "there"),))
    save_cases([case], root / "cases.jsonl")
    turns = [{"dia_id": "D1:1", "speaker": "A", "text": "hello"}, {"dia_id": "D1:2", "speaker": "B", "text": "a mug"}]
    asked = [
        {"question": "what?", "answer": "a mug", "category": 4, "evidence": ["D1:2"]},
        {"question": "who?", "category": 5, "adversarial_answer": "B"},
    ]
    dialogue = {"session_1": turns, "session_1_date_time": "1 May 2023"}
    (root / "locomo.json").write_text(to_json([{"sample_id": "s", "conversation": dialogue, "qa": asked}]))
    log = {
        "episode_id": 1,
        "task": "win",
        "trajectory": [{"turn_idx": 0, "action": "a", "observation": "b"}],
        "qa_pairs": [{"question": "q", "answer": "a"}],
    }
    (root / "ama.jsonl").write_text(to_json(log) + "\n")
    if find_spec("alfworld") is not None:  # whose rules an exported game holds
        export_split(env(), "train", root / "alfworld", 2)
    ledger = Ledger(root / "answers.sqlite", "m")
    ledger.keep("k", "teacher", Answer("look", 1, 2))
    ledger._db.execute("PRAGMA journal_mode=DELETE")
    ledger._db.close()
    return root


def opened(name: str, path: Path) -> MemorySystem:
    spec = registry.find(name)
    return spec.open(path, spec.settings(), Tools())


def recalled(name: str, path: Path) -> list[tuple[str, str]]:
    """Open a memory and ask it."""
    memory = opened(name, path)
    task = Task("other", "put a mug in cabinet", "home 1", "test", "put")
    asked = memory.recall([Query(task), Query.question("Where is the mug?", 50)])
    memory.origins(), list(memory), memory.snapshot()
    return [(entry.id, entry.text) for recall in asked for entry in recall.entries]


def readers(name: str, root: Path) -> Iterator[tuple[Read, tuple[type[Exception], ...]]]:
    """Yield what reads a file of the sample, and the errors that it documents."""
    part = name.split("/")[0]
    if name.startswith(STEP):
        for read in (
            checkpoint.executor_reading,
            checkpoint.environment,
            checkpoint.load_projector,
            checkpoint.lora_config,
            model_card,
        ):
            yield partial(read, root / STEP), (CheckpointError,)
    elif part == "sft":
        yield partial(need_of, str(root / STEP)), (CheckpointError,)
        yield partial(read_metrics, root / "sft" / METRICS), ()
    elif part == "collect":
        rows = root / "collect" / "rows"
        yield lambda: [row.step_input() for row in load_rows(rows)], (ValueError, FileNotFoundError)
        yield lambda: guard_rows(rows, ["a"], True), (ValueError,)
        yield lambda: (provenance(rows), of_collection(rows)), (ValueError,)
    elif part == "eval":
        yield lambda: to_markdown(load_run(root / part)[0]), (ValueError, FileNotFoundError)
        yield (
            lambda: [list(load_run(root / part)[1](pictures)) for pictures in (True, False)],
            (ValueError, FileNotFoundError),
        )
        yield EpisodeRecord(root / part).played, (ValueError,)
    elif part in registry.BUILT_IN:
        yield partial(recalled, part, root / part), (ValueError, BankError)
        yield partial(system_of, root / part), (ValueError,)
    elif part == "alfworld":
        yield lambda: AlfworldGames(root / part).tasks("train"), (ValueError, FileNotFoundError)
        yield partial(played, root / part, root / name), (EnvironmentFailure,)
    elif name == "answers.sqlite":
        yield partial(ledger_read, root / name), (EndpointStop,)
    else:
        yield partial(load_cases if name == "cases.jsonl" else read_cases, root / name), (ValueError,)
    if name.endswith((CONFIG, ENVIRONMENT)):
        config = CollectConfig() if part == "collect" else EvalConfig()
        yield partial(load_config, type(config), root / part / CONFIG), (ValueError,)
        yield partial(resumed, root / part, config), (ValueError,)


def resumed(path: Path, config: BaseModel) -> None:
    """Go on with a run; what git and the driver say of this machine, which takes long, is left out."""
    with patch("configs.run_folder.describe_environment", dict):
        RunFolder.create(path, config, on_exists="resume").record(device="cpu")


def played(data: Path, path: Path) -> None:
    """Play a few steps of a game of ALFWorld's."""
    games = AlfworldGames(data)
    env = EngineEnvironment(games, False, 64)
    task = Task(
        "train/a/b",
        "",
        "",
        "train",
        "",
        data={"path": (path.parent / GAME_FILE).relative_to(data / "json_2.1.1").as_posix()},
    )
    seen = env.reset(task)
    for command in (seen.admissible or ())[:3]:
        env.step(command)


def ledger_read(path: Path) -> None:
    ledger = Ledger(path, "m")
    try:
        ledger.answer("k"), ledger.spent()
        ledger.keep("k2", "teacher", Answer("x", 1, 1))
    finally:
        ledger._db.close()


@cache
def names_of(kind: str) -> list[str]:
    """List the sample's files of a kind: rows, stores or all others."""
    files = sorted(
        path.relative_to(sample()).as_posix()
        for path in sample().rglob("*")
        if path.is_file() and not path.name.startswith(".")
    )
    kind_of = lambda name: (
        "rows"
        if "/rows/" in name
        else "games"
        if name.startswith("alfworld")
        else "stores"
        if name.split("/")[0] in registry.BUILT_IN or name.endswith(".sqlite")
        else "runs"
    )
    return [name for name in files if kind_of(name) == kind]


@cache
def content(name: str) -> bytes:
    return (sample() / name).read_bytes()


def make_file(rng: Random, kind: str) -> dict[str, bytes]:
    name = pick(rng, names_of(kind))
    data = content(name)
    if name.endswith((".json", ".jsonl")) and rng.random() < 0.6:
        lines = data.decode().splitlines() if name.endswith(".jsonl") else [data.decode()]
        at = rng.randrange(len(lines))
        lines[at] = json_text(rng, mutated(rng, json.loads(lines[at])))
        return {name: "\n".join([*lines, ""]).encode("utf-8", "surrogatepass")}
    return {name: damaged(rng, data)}


def check_file(given: Mapping[str, bytes]) -> None:
    """Write one damaged file; whoever reads it gives what it documents, and names the file."""
    [(name, data)] = given.items()
    path, root = sample() / name, sample()
    environment = root / name.split("/")[0] / ENVIRONMENT
    try:
        path.write_bytes(data)
        for read, documented in readers(name, root):
            try:
                read()
            except documented as error:
                known = path.name in str(error) or path.parent.name in str(error)
                expect(known, f"a message does not name {path.name}: {type(error).__name__}: {str(error)[:150]}")
    finally:
        path.write_bytes(content(name))
        for left in root.rglob("*.sqlite-*"):
            left.unlink()
        if environment.exists():
            environment.write_bytes(content(f"{name.split('/')[0]}/{ENVIRONMENT}"))


# -- what is written and read back --


def make_traces(rng: Random) -> list[dict[str, Any]]:
    """Make episodes of one attempt: fields of their tasks and of their records."""
    step = lambda: [text(rng, 3), pick(rng, ("look", text(rng, 2), "take mug 1 from shelf 1")), text(rng, 5)]
    return [
        {
            "id": text(rng, 1),
            "goal": text(rng, 3),
            "scene": pick(rng, ("home 1", text(rng, 1))),
            "kind": pick(rng, ("put", text(rng, 1))),
            "steps": [step() for _ in range(rng.randint(0, 3))],
            "success": rng.random() < 0.5,
            "rationale": text(rng, 2),
        }
        for _ in range(rng.randint(1, 3))
    ]


def trace(given: Mapping[str, Any]) -> Trace:
    task = Task(
        given["id"], given["goal"], given["scene"], "train", given["kind"], isolation={"scene": (given["scene"],)}
    )
    records = tuple(Record(t, *step) for t, step in enumerate(given["steps"]))
    return Trace(
        task, records, given["success"], rationale=given["rationale"], views=(b"\x89PNG",), shown=(given["id"],)
    )


def emptied(name: str) -> Path:
    path = folder() / name
    shutil.rmtree(path, ignore_errors=True)
    return path


def check_journal(given: Sequence[Mapping[str, Any]]) -> None:
    rows, path = [Row((trace(each),), {"a": each["goal"]}) for each in given], emptied("journal")
    written = Journal(path).append(rows)
    again = list(Journal(path))
    expect(
        again == list({row.key: row for row in rows}.values())[: len(again)] and len(again) == written.added,
        "a journal reads back as another",
    )
    cases = [
        Case(each["id"], (trace(each),), (Question(each["id"], each["goal"], each["rationale"]),)) for each in given
    ]
    save_cases(cases, folder() / "cases.jsonl")
    expect(load_cases(folder() / "cases.jsonl") == cases, "cases of questions read back as others")


def check_memory(given: Sequence[Mapping[str, Any]], name: str) -> None:
    memory, path = opened(name, emptied(f"memory-{name}")), folder() / f"memory-{name}"
    memory.commit([[trace(each)] for each in given])
    task = trace(given[0]).task
    query = Query(replace(task, id=f"other {task.id}"))
    [recall] = memory.recall([query])
    session = memory.session(query, recall)
    for record in trace(given[0]).records:
        session.recall(record.observation)
        session.observe(record)
    asked = [query, Query.question(task.goal, 30, scene=task.scene)]
    told = [[(entry.id, entry.text) for entry in found.entries] for found in memory.recall(asked)]
    again = [[(entry.id, entry.text) for entry in found.entries] for found in opened(name, path).recall(asked)]
    expect(told == again, f"{name} recalls something else once it is opened again")


def make_entry(rng: Random) -> str:
    origin = {
        "task_id": text(rng, 1),
        "scene": text(rng, 1),
        "goal": text(rng, 2),
        "split": "train",
        "success": True,
        "actions": list(texts(rng)),
        "source": "x",
    }
    return json_text(
        rng, mutated(rng, {"id": text(rng, 1), "text": text(rng), "provenance": origin, "images": ["iVBORw0KGgo="]})
    )


def check_entry(given: str) -> None:
    entry = _imported(given, "FILE:1")
    expect(entry_from_json(json.loads(json.dumps(entry.to_json()))) == entry, "an entry reads back as another")
    expect(isinstance(entry.text, str) and isinstance(entry.provenance.actions, tuple), "an entry is of no known form")


def make_episode(rng: Random) -> Any:
    lines = content(f"eval/{EPISODES}").splitlines()
    return mutated(rng, json.loads(pick(rng, lines)))


def check_episode(given: Any) -> None:
    episode = episode_from_json(given)
    expect(
        episode_from_json(json.loads(to_json(episode.to_json()))).to_json() == episode.to_json(),
        "an episode reads back as another",
    )


TARGETS = (
    Target("files.runs", partial(make_file, kind="runs"), check_file, (), 0.1),
    Target("files.rows", partial(make_file, kind="rows"), check_file, (), 0.02),
    Target("files.stores", partial(make_file, kind="stores"), check_file, (), 0.1),
    *([Target("files.games", partial(make_file, kind="games"), check_file, (), 0.05)] * bool(find_spec("alfworld"))),
    Target("memory.journal", make_traces, check_journal, (), 0.3),
    *(
        Target(
            f"memory.{name}", make_traces, partial(check_memory, name=name), (), 0.002 if name == "trajectory" else 0.1
        )
        for name in registry.BUILT_IN
    ),
    Target("memory.entry", make_entry, check_entry, (BankError,), 2),
    Target("episode.json", make_episode, check_episode, (ValueError,), 0.5),
)
