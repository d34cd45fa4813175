"""Targets that read files: rows, checkpoints, run folders, journals and stores, each damaged in one place."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from agent import deliveries, episode, expert
from agent.records import episode_from_json
from compiler import checkpoint, gate
from configs import run_folder
from configs.collect import CollectConfig
from configs.evaluation import EvalConfig
from configs.load import load_config, to_yaml
from data_gen import dataset, leakage, memory_factory, rows
from data_gen.experience import episode_traces
from data_gen.questions.records import Question, QuestionSet, load_question_sets, save_question_sets
from envs.alfworld.export import export_split
from envs.alfworld.games import FOLDER, GAME_FILE, AlfworldGames
from envs.base import EnvironmentFailure, Task
from envs.household.command_reader import HouseholdReader
from envs.household.environment import EngineEnvironment, HouseholdEnvironment
from envs.manifest import Manifest
from eval import metrics, plots, runs, table
from eval.qa.benchmark_files import read_question_sets
from lm.answer_cache import Answer, AnswerCache, EndpointStop
from memory import bank, journal, registry
from memory.entry import entry_from_json
from memory.linear import Head
from memory.protocol import BankError, MemorySystem, Query, Record, Trace
from runtime.checksums import parse_row
from runtime.store import to_json
from soft_mem.projector import Projector, ProjectorConfig
from tests.fuzz.inputs import damaged, json_text, mutated, pick, text, texts
from tests.fuzz.target import Target, expect

STEP, CONFIG, ENVIRONMENT = "sft/checkpoints/step-000001", run_folder.CONFIG, run_folder.ENVIRONMENT
SETTINGS = {"collect": CollectConfig(), "eval": EvalConfig(), "sft": EvalConfig()}
SYSTEMS = [name for name in registry.BUILT_IN if name != bank.MemoryBank.name]  # systems with a journal
JSON: Mapping[str, Any] = {  # sample files
    **{f"{part}/{ENVIRONMENT}": {"git": {"commit": "a"}, "resumed": [{"cpus": 1}], "cpus": 1} for part in SETTINGS},
    f"{STEP}/state.json": {"step": 1, "seed": 0, "environment": "household", "executor_reads": {"history": 20}},
    f"{STEP}/adapter/adapter_config.json": {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]},
    "collect/collect.json": {"episodes": 2, "successes": 1, "dropped": {}, "teacher": "expert", "bank_version": 1},
    f"sft/{run_folder.METRICS}": {"step": 1, "loss": 0.5, "text": 0.25},
    **{f"{name}/{memory_factory.MARK}": {"system": name} for name in SYSTEMS},
    "locomo.json": [
        {
            "sample_id": "s",
            "conversation": {
                "session_1": [{"dia_id": "D1:1", "speaker": "A", "text": "a mug"}],
                "session_1_date_time": "1 May 2023",
            },
            "qa": [
                {"question": "what?", "answer": "a mug", "category": 4, "evidence": ["D1:1"]},
                {"question": "who?", "category": 5, "adversarial_answer": "B"},
            ],
        }
    ],
    "ama.jsonl": {
        "episode_id": 1,
        "task": "win",
        "trajectory": [{"turn_idx": 0, "action": "a", "observation": "b"}],
        "qa_pairs": [{"question": "q", "answer": "a"}],
    },
}


@cache
def temporary() -> tempfile.TemporaryDirectory[str]:
    """Create this process's folder, in shared memory if possible."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None, prefix="fuzz-")


def folder() -> Path:
    return Path(temporary().name)


@cache
def sample() -> Path:
    """Create small run folders as the commands write them, deterministically."""
    root = folder() / "runs"
    for name, value in JSON.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(to_json(value) + "\n")
    for part, config in SETTINGS.items():
        (root / part / CONFIG).write_text(to_yaml(config), encoding="utf-8")
    env = lambda: HouseholdEnvironment(scenes={"train": 1}, images=False)
    specs = [episode.EpisodeSpec(task) for task in env().tasks("train")[:2]]
    teacher = deliveries.Delivery("compiled", "compiled", expert.ExpertTeacher(reader=HouseholdReader()), soft=False)
    played = episode.run_episodes(env, specs, teacher, expert.ExpertExecutor(), episode.EpisodeLimits(4))
    for step in (step for each in played for step in each.steps):
        step.seconds = dict.fromkeys(step.seconds, 0.5)
    for each in played:
        runs.EpisodeRecord(root / "eval").append(each)
    meta = {"environment": "household", "split": "test", "seed": 0, "n_tasks": 2, "complete": True, "max_steps": 4}
    summary = metrics.results({"compiled": played}, meta, budgets={"compiled": [2]})
    (root / "eval" / runs.RESULTS).write_text(to_json(summary))
    rows.save_rows([row for each in played for row in rows.episode_rows(each, {})], root / "collect/rows")
    manifest = Manifest.of("household", [spec.task for spec in specs])
    manifest.write(root / "collect" / leakage.MANIFEST)
    verdict = {"overlaps": [{"shared": 0, "dimension": "scene", "clean": True}]}
    audit = {"clean": True, "train_sha256": manifest.sha256, "verdict": verdict}
    (root / "collect" / leakage.LEAKAGE).write_text(to_json(audit))
    torch.manual_seed(0)
    projector = Projector(ProjectorConfig(4, 4, 2))
    checkpoint.save_projector(root / STEP, projector.config, projector.state_dict())
    gate.CompileGate(Head(np.zeros(16), 0.5), 0.5, {"rows": 3}).save(root / "sft")
    for name in SYSTEMS:
        opened(name, root / name).commit(episode_traces(played))
    question = Question("q", "where?", "there")
    save_question_sets(
        [QuestionSet("c", tuple(t for [t] in episode_traces(played)), (question,))], root / "cases.jsonl"
    )
    ledger_used(root / "answers.sqlite")
    if find_spec("alfworld") is not None:  # whose rules an exported game holds
        export_split(env(), "train", root / "alfworld", 2)
    return root


# -- readers --


def opened(name: str, path: Path) -> MemorySystem:
    spec = registry.find(name)
    return spec.open(path, spec.settings(), registry.MemoryTools(reader=HouseholdReader()))


def recalled(memory: MemorySystem, task: Task) -> list[tuple[str, str]]:
    """Recall entries for a task and for a question."""
    recalls = memory.recall([Query(task), Query.question(task.goal, 50, scene=task.scene)])
    return [(entry.id, entry.text) for recall in recalls for entry in recall.entries]


def ledger_used(path: Path) -> None:
    with closing(AnswerCache(path, "m")._db) as db:
        db.execute("PRAGMA journal_mode=DELETE")
    ledger = AnswerCache(path, "m")
    with closing(ledger._db):
        ledger.keep("k", "teacher", Answer("look", 1, ledger.spent()[0]))


def resumed(run: Path) -> None:
    """Resume a run, without the slow description of this machine."""
    load_config(type(SETTINGS[run.name]), run / CONFIG)
    with patch("configs.run_folder.describe_environment", dict):
        run_folder.RunFolder.create(run, SETTINGS[run.name], on_exists="resume").record(device="cpu")


def game_played(data: Path, game: Path) -> None:
    env = EngineEnvironment(AlfworldGames(data), False, 64)
    where = (game.parent / GAME_FILE).relative_to(data / FOLDER).as_posix()
    for command in (env.reset(Task("a/b/c", "", "", "train", "", data={"path": where})).admissible or ())[:3]:
        env.step(command)


def episodes_read(run: Path, path: Path) -> None:
    table.to_markdown(runs.load_run(run)[0])
    for pictures in (True, False):
        list(runs.load_run(run)[1](pictures))
    runs.EpisodeRecord(run).played()


Read = Callable[[Path, Path], object]  # reads the run folder, given also the damaged file
OTHER = Task("other", "put a mug in cabinet", "home 1", "test", "put")
CHECKPOINT_READERS = (
    checkpoint.executor_inputs,
    checkpoint.environments,
    checkpoint.load_projector,
    checkpoint.lora_config,
)
READERS: Mapping[str, Sequence[Read]] = {
    "sft": [
        *((lambda run, path, read=read: read(run.parent / STEP)) for read in CHECKPOINT_READERS),
        lambda run, path: gate.load_gate(str(run.parent / STEP)),
        lambda run, path: plots.read_metrics(run / run_folder.METRICS),
    ],
    "collect": [
        lambda run, path: [row.step_input() for row in rows.load_rows(run / "rows")],
        lambda run, path: leakage.check_rows(run / "rows", ["a"], True),
        lambda run, path: (dataset.provenance(run / "rows"), dataset.collection_counts(run / "rows")),
    ],
    "eval": [episodes_read],
    "alfworld": [lambda run, path: AlfworldGames(run).tasks("train"), game_played],
    "answers.sqlite": [lambda run, path: ledger_used(path)],
    "cases.jsonl": [lambda run, path: load_question_sets(path)],
    **{name: [lambda run, path: read_question_sets(path)] for name in ("locomo.json", "ama.jsonl")},
    **{
        name: [lambda run, path: (recalled(opened(run.name, run), OTHER), memory_factory.stored_system(run))]
        for name in SYSTEMS
    },
}
# Errors that a command reports in one line.
KNOWN_ERRORS = (ValueError, FileNotFoundError, checkpoint.CheckpointError, BankError, EndpointStop, EnvironmentFailure)


@cache
def names_of(kind: str) -> list[str]:
    """List the sample files of a kind: runs, rows, games or stores."""
    files = sorted(path for path in sample().rglob("*") if path.is_file() and not path.name.startswith("."))
    names = [path.relative_to(sample()).as_posix() for path in files]
    kinds = {"collect/rows": "rows", "alfworld": "games", "answers": "stores", **dict.fromkeys(SYSTEMS, "stores")}
    return [name for name in names if kind == next((k for head, k in kinds.items() if name.startswith(head)), "runs")]


@cache
def content(name: str) -> bytes:
    return (sample() / name).read_bytes()


def make_file(rng: Random, kind: str) -> dict[str, bytes]:
    name = pick(rng, names_of(kind))
    data = content(name)
    if not name.endswith((".json", ".jsonl")) or rng.random() < 0.4:
        return {name: damaged(rng, data)}
    lines = data.decode().splitlines() if name.endswith(".jsonl") else [data.decode()]
    at = rng.randrange(len(lines))
    lines[at] = json_text(rng, mutated(rng, parse_row(lines[at].encode())))
    return {name: "\n".join([*lines, ""]).encode("utf-8", "surrogatepass")}


def check_file(given: Mapping[str, bytes]) -> None:
    """Write one damaged file; every reader must accept it or raise a known error that names the file."""
    [(name, data)] = given.items()
    part, path = name.partition("/")[0], sample() / name
    reads = [*READERS[part], lambda run, path: resumed(run)] if name.endswith((CONFIG, ENVIRONMENT)) else READERS[part]
    try:
        path.write_bytes(data)
        for read in reads:
            try:
                read(sample() / part, path)
            except KNOWN_ERRORS as error:
                named = path.name in str(error) or path.parent.name in str(error)
                expect(named, f"a message does not name {path.name}: {type(error).__name__}: {error}")
    finally:
        for changed in (name, f"{part}/{ENVIRONMENT}") if part in SETTINGS else (name,):
            (sample() / changed).write_bytes(content(changed))


# -- round trips --


def make_traces(rng: Random) -> list[dict[str, Any]]:
    """Draw episodes: fields of their tasks and of their records."""
    step = lambda: [text(rng, 3), pick(rng, ("look", text(rng, 2), "take mug 1 from shelf 1")), text(rng, 5)]
    names = lambda: {"id": text(rng, 1), "goal": text(rng, 3), "scene": pick(rng, ("home 1", text(rng, 1)))}
    steps = lambda: [step() for _ in range(rng.randint(0, 3))]
    return [{**names(), "kind": text(rng, 1), "steps": steps(), "why": text(rng, 2)} for _ in range(rng.randint(1, 3))]


def lancedb_traces(rng: Random) -> list[dict[str, Any]]:
    """Draw episodes after importing lancedb, which takes longer than the time limit."""
    import_module("lancedb")
    return make_traces(rng)


def trace(given: Mapping[str, Any]) -> Trace:
    scene = given["scene"]
    task = Task(given["id"], given["goal"], scene, "train", given["kind"], isolation={"scene": (scene,)})
    steps = tuple(Record(t, *step) for t, step in enumerate(given["steps"]))
    return Trace(task, steps, bool(steps), rationale=given["why"], views=(b"\x89PNG",), shown=(given["id"],))


def emptied(name: str) -> Path:
    shutil.rmtree(folder() / name, ignore_errors=True)
    return folder() / name


def check_journal(given: Sequence[Mapping[str, Any]]) -> None:
    entries, path = [journal.Row((trace(each),), {"a": each["goal"]}) for each in given], emptied("journal")
    journal.Journal(path).append(entries)
    last = {row.key: row for row in entries}
    expect(list(journal.Journal(path)) == list(last.values()), "a journal reads back as another")
    question = lambda each: Question(each["id"], each["goal"], each["why"])
    written = [QuestionSet(each["id"], (trace(each),), (question(each),)) for each in given]
    save_question_sets(written, path / "cases.jsonl")
    expect(load_question_sets(path / "cases.jsonl") == written, "questions read back as others")


def check_memory(given: Sequence[Mapping[str, Any]], name: str) -> None:
    memory = opened(name, emptied(name))
    memory.commit([[trace(each)] for each in given])
    task = replace(trace(given[0]).task, id="other")
    session = memory.session(Query(task), memory.recall([Query(task)])[0])
    for record in trace(given[0]).records:
        session.recall(record.observation)
        session.observe(record)
    again = recalled(opened(name, folder() / name), task)
    expect(recalled(memory, task) == again, f"{name} recalls something else once it is opened again")


def make_entry(rng: Random) -> str:
    names = {"task_id": text(rng, 1), "scene": text(rng, 1), "goal": text(rng, 2), "split": "train", "source": "x"}
    origin = {**names, "success": True, "actions": list(texts(rng))}
    entry = {"id": text(rng, 1), "text": text(rng), "provenance": origin, "images": ["iVBORw0KGgo="]}
    return json_text(rng, mutated(rng, entry))


def check_entry(given: str) -> None:
    entry, _ = bank.read_exported(given, "FILE:1")
    expect(entry_from_json(json.loads(json.dumps(entry.to_json()))) == entry, "an entry reads back as another")


def make_episode(rng: Random) -> Any:
    return mutated(rng, parse_row(pick(rng, content(f"eval/{runs.EPISODES}").splitlines())))


def check_episode(given: Any) -> None:
    record = episode_from_json(json.loads(to_json(given))).to_json()  # as on disk: finite numbers only
    expect(episode_from_json(json.loads(to_json(record))).to_json() == record, "an episode reads back as another")


TARGETS = (
    Target("files.runs", partial(make_file, kind="runs"), check_file, (), 0.1),
    Target("files.rows", partial(make_file, kind="rows"), check_file, (), 0.02),
    Target("files.stores", partial(make_file, kind="stores"), check_file, (), 0.1),
    *([Target("files.games", partial(make_file, kind="games"), check_file, (), 0.05)] * bool(find_spec("alfworld"))),
    Target("memory.journal", make_traces, check_journal, (), 0.3),
    *(Target(f"memory.{name}", make_traces, partial(check_memory, name=name), (), 0.1) for name in SYSTEMS),
    Target("memory.trajectory", lancedb_traces, partial(check_memory, name="trajectory"), (), 0.002),
    Target("memory.entry", make_entry, check_entry, (BankError,), 2),
    Target("episode.json", make_episode, check_episode, (ValueError,), 0.5),
)
