"""One compiler for several environments: every row, request and episode has the instructions of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agent.deliveries import find
from agent.episode import EpisodeLimits, run_episodes
from agent.records import executor_request
from compiler import checkpoint
from compiler.hf import MemoryCompiler
from compiler.prompt import compiler_instructions
from configs.load import ConfigError
from configs.models import ExecutorConfig
from configs.training import GrpoConfig, SftConfig
from data_gen.held_out import shares
from data_gen.rows import SftRow, save_rows
from envs.base import Task
from envs.manifest import Manifest
from envs.registry import find as find_environment
from envs.spec import ExecutorInstructions
from executor.build import executor_rules
from executor.hf import FrozenExecutor
from executor.records import FULL_VIEW
from runtime.checksums import parse_row
from tests import tiny_models
from tests.fakes import CountingEnv, Recorder, spec
from tests.training.grpo_trainers import trainer
from tests.training.sft_trainers import ROWS
from training.grpo import GrpoTrainer, train_grpo
from training.grpo_tasks import hold_out_of_each
from training.sft import SftTrainer, train_sft
from training.sft_data import SftData, encode_row
from training.sft_losses import sft_losses

COMMANDS = ("go to shelf 1", "look")
TOLD = {"household": "You keep house.", "scienceworld": "You experiment."}
RULES = {
    "household": ExecutorInstructions("You keep house.", lists_commands=True),
    "scienceworld": ExecutorInstructions("You experiment."),
}
HOME, LABORATORY = (
    [replace(ROWS[i], environment=name, commands=COMMANDS) for i in numbers]
    for name, numbers in (("household", (0, 1)), ("scienceworld", (2, 3)))
)


def models(told: Any, rules: Any, commands: bool = False) -> tuple[MemoryCompiler, FrozenExecutor]:
    """Create models of equal weights with these instructions."""
    compiler = tiny_models.memory_compiler(True, instructions=told).eval()
    reads = replace(FULL_VIEW, commands=commands)
    return compiler, FrozenExecutor(tiny_models.lm_backbone(seed=1), instructions=rules, reads=reads)


def of_one(name: str) -> tuple[MemoryCompiler, FrozenExecutor]:
    """Create models that were loaded for one environment."""
    return models(compiler_instructions(TOLD[name]), RULES[name].instructions, RULES[name].lists_commands)


def of_both() -> tuple[MemoryCompiler, FrozenExecutor]:
    return models({name: compiler_instructions(text) for name, text in TOLD.items()}, RULES)


def losses(compiler: MemoryCompiler, executor: FrozenExecutor, rows: list[SftRow]) -> dict[str, torch.Tensor]:
    examples = [encode_row(row, compiler, executor, soft=True) for row in rows]
    with torch.no_grad():
        return sft_losses(compiler, executor, examples, SftConfig(), temperature=0.0)


class Killed(Exception):
    """Ends a run in the middle."""


def killed() -> Any:
    raise Killed


# -- prompts and losses ------------------------------------------------------------------------------------------------


def test_each_row_s_prompts_are_those_of_models_for_its_environment_alone() -> None:
    compiler, executor = of_both()
    for row in (*HOME, *LABORATORY):
        ours = encode_row(row, compiler, executor, soft=True)
        alone = encode_row(row, *of_one(row.environment), soft=True)
        assert (ours.prompt.ids, ours.executor_prompt.ids) == (alone.prompt.ids, alone.executor_prompt.ids)
        [other] = TOLD.keys() - {row.environment}
        for prompt, encoder in ((ours.prompt, compiler.encoder), (ours.executor_prompt, executor.encoder)):
            text = encoder.tokenizer.decode(prompt.ids)
            assert TOLD[row.environment] in text and TOLD[other] not in text
        listed = "The commands:" in executor.tokenizer.decode(ours.executor_prompt.ids)
        assert listed == (row.environment == "household")


def test_losses_of_a_mixed_batch_are_those_of_the_batches_of_one_environment() -> None:
    mixed = losses(*of_both(), [HOME[0], LABORATORY[0], HOME[1], LABORATORY[1]])
    homes, laboratories = losses(*of_one("household"), HOME), losses(*of_one("scienceworld"), LABORATORY)
    assert mixed.keys() == homes.keys() == laboratories.keys() and {"text", "action", "latent"} <= mixed.keys()
    for name, values in mixed.items():
        torch.testing.assert_close(values[0::2], homes[name], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(values[1::2], laboratories[name], atol=1e-4, rtol=1e-4)


def test_models_of_several_environments_refuse_a_step_of_no_or_another_one() -> None:
    compiler, executor = of_both()
    with pytest.raises(ValueError, match="compiler of household and scienceworld got a step of alfworld"):
        encode_row(replace(HOME[0], environment="alfworld"), compiler, executor, soft=True)
    with pytest.raises(ValueError, match="executor of household and scienceworld got a step of an environment without"):
        executor.encode(executor_request(replace(HOME[0], environment="").step_input(4), executor))
    examples = ExecutorConfig(examples="few.txt")
    with pytest.raises(ConfigError, match=r"executor\.examples are of one environment"):
        executor_rules(examples, RULES)
    plain = executor_rules(ExecutorConfig(instructions="none"), RULES)
    assert isinstance(plain, dict) and {rules for rules in plain.values()} == {ExecutorInstructions("")}


def test_an_episode_is_played_in_its_environment_and_its_requests_name_it() -> None:
    class Other(CountingEnv):
        def reset(self, task: Task) -> Any:
            return replace(super().reset(task), text="elsewhere")

    specs = [replace(spec(2), environment=name) for name in ("one", "other", "one")]
    models = Recorder()
    delivery = find("compiled").create(models, 0)
    played = run_episodes({"one": CountingEnv, "other": Other}, specs, delivery, models, EpisodeLimits(3))
    assert [episode.steps[0].observation for episode in played] == ["start", "elsewhere", "start"]
    assert [request.environment for request in models.seen[:3]] == ["one", "other", "one"]
    assert [episode.environment for episode in played] == ["one", "other", "one"]


# -- rows of several collections ---------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[list[Path]]:
    """Collections of two benchmarks whose tasks have the same ids, twelve rows of six tasks and two of two."""

    def write(name: str, benchmark: str, rows: list[SftRow], clean: bool = True) -> Path:
        folder = tmp_path / name
        save_rows(rows, folder / "rows")
        tasks = [Task(row.task_id, row.goal, "", "train", "", isolation={"scene": (row.task_id,)}) for row in rows]
        manifest = Manifest.of(benchmark, tasks)
        manifest.write(folder / "manifest.json")
        audit = {"clean": clean, "train_sha256": manifest.sha256, "verdict": None}
        (folder / "leakage.json").write_text(json.dumps(audit))
        return folder / "rows"

    many = [replace(ROWS[1], task_id=f"t{i // 2}", t=i % 2) for i in range(12)]
    yield [write("1", "household", many), write("2", "scienceworld", [ROWS[1], ROWS[3]])]


def test_rows_have_the_name_of_their_collection_s_environment_and_are_held_out_of_each(folders: list[Path]) -> None:
    data = SftData.load(SftConfig(rows=tuple(map(str, folders)), validation={"share": 0.5}))  # type: ignore[arg-type]
    assert [row.environment for row in data.rows] == ["household"] * 12 + ["scienceworld"] * 2
    held = data.validation_tasks()
    assert (len(held[folders[0]]), len(held[folders[1]])) == (3, 1) and len(data.training) == 7
    alone = SftData.load(SftConfig(rows=str(folders[0]), validation={"share": 0.5}))  # type: ignore[arg-type]
    assert alone.validation_tasks()[folders[0]] == held[folders[0]]


def test_held_out_tasks_are_shared_equally() -> None:
    assert shares(5, 2) == [3, 2] and shares(4, 1) == [4]
    with pytest.raises(ConfigError, match=r"evaluation\.tasks=1 of 2 environments: set it to at least 2"):
        shares(1, 2)


@pytest.mark.seconds
def test_sft_on_two_benchmarks_resumes_and_says_what_it_was_trained_on(folders: list[Path], tmp_path: Path) -> None:
    settings = {
        "compiler": {
            "model": "zoo/household/compiler",
            "dtype": "float32",
            "max_new_tokens": 8,
            "soft": {"n_tokens": 2, "emb_std": "auto"},
        },
        "executor": {"model": "zoo/household/executor", "dtype": "float32", "context": "rebuilt"},
        "rows": tuple(map(str, folders)),
        "latent": "none",
        "batch_size": 4,
        "save_every": 1,
    }
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    compiler = train_sft(SftConfig.model_validate(settings | {"max_steps": 3}), whole)
    assert isinstance(compiler.instructions, dict) and compiler.instructions.keys() == {"household", "scienceworld"}
    assert compiler.instructions["scienceworld"] == compiler_instructions(
        find_environment("scienceworld").compiler_instructions
    )
    found = checkpoint.find(whole)
    assert checkpoint.environments(found) == ("household", "scienceworld")
    assert "environment" not in checkpoint.read_state(found)
    assert {path.name for path in whole.glob("manifest*")} == {"manifest-household.json", "manifest-scienceworld.json"}

    taken = SftTrainer.take_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SftTrainer, "take_step", lambda self: taken(self) if self.step < 2 else killed())
        with pytest.raises(Killed):
            train_sft(SftConfig.model_validate(settings | {"max_steps": 3}), cut)
    train_sft(SftConfig.model_validate(settings | {"max_steps": 3}), cut)
    assert checkpoint.sha256(checkpoint.find(cut)) == checkpoint.sha256(found)


# -- GRPO --------------------------------------------------------------------------------------------------------------


def test_tasks_of_an_update_come_from_each_environment_by_turns(tmp_path: Path) -> None:
    specs = [replace(spec(i), environment=name) for name, n in (("one", 4), ("other", 2)) for i in range(1, n + 1)]
    t = trainer(tmp_path, specs=specs, make_env={"one": CountingEnv, "other": CountingEnv}, tasks=3)
    chosen = [(s.environment, s.task.id) for update in range(4) for s in t.specs_of(update)]
    assert [name for name, _ in chosen] == ["one", "other"] * 6
    first, second = ([task for name, task in chosen if name == own] for own in ("one", "other"))
    assert sorted(first[:4]) == ["1", "2", "3", "4"] and all(sorted(second[i : i + 2]) == ["1", "2"] for i in (0, 2, 4))
    alone = trainer(tmp_path / "alone", specs=[replace(s, environment="") for s in specs[:4]], tasks=3)
    assert [s.task.id for update in range(2) for s in alone.specs_of(update)] == first


def test_held_out_tasks_are_of_each_environment() -> None:
    specs = [replace(spec(i), environment=name) for name in ("one", "other") for i in range(1, 6)]
    training, held = hold_out_of_each(specs, 3, seed=0)
    assert [s.environment for s in held] == ["one", "one", "other"] and len(training) == 7
    with pytest.raises(ConfigError, match="leave none to train on"):
        hold_out_of_each(specs, 10, seed=0)


def test_further_environments_are_named_by_their_key_and_have_settings_of_their_own() -> None:
    config = GrpoConfig.model_validate({"limit": 9, "split": "train", "also": {"alfworld": {"env": {"seed": 3}}}})
    home, games = config.parts
    assert (home.env.name, games.env.name, games.env.seed, games.limit) == ("household", "alfworld", 3, 9)
    assert not home.also and not games.also and games.memory.bank is None
    with pytest.raises(ValueError, match="household is the environment of `env` already"):
        GrpoConfig.model_validate({"also": {"household": None}})
    with pytest.raises(ValueError, match=r"executor\.examples are of one environment"):
        GrpoConfig.model_validate({"also": {"alfworld": None}, "executor": {"examples": "few.txt"}})


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of ALFWorld games made from generated homes: 6 of train."""
    pytest.importorskip("alfworld")
    from envs.alfworld.export import export_split
    from envs.household.environment import HouseholdEnvironment

    folder = tmp_path_factory.mktemp("games")
    export_split(HouseholdEnvironment(scenes={"train": 2}, images=False), "train", folder, 6)
    return folder


@pytest.mark.slow
@pytest.mark.alfworld
def test_grpo_plays_both_environments_and_resumes_exactly(games: Path, tmp_path: Path) -> None:
    settings = {
        "compiler": {
            "model": "zoo/household/compiler",
            "dtype": "float32",
            "max_new_tokens": 8,
            "soft": {"n_tokens": 2, "emb_std": "auto"},
        },
        "executor": {"model": "zoo/household/executor", "dtype": "float32", "context": "rebuilt", "mode": "choice"},
        "env": {"name": "household", "scenes": {"train": 2}, "images": False},
        "also": {"alfworld": {"env": {"data_root": str(games)}, "limit": 3}},
        "memory": {"k": 1, "experience_limit": 2, "experience_folder": str(tmp_path / "experience")},
        "limit": 4,
        "updates": 3,
        "tasks": 2,
        "group_size": 2,
        "max_steps": 2,
        "save_every": 1,
        "evaluation": {"tasks": 2, "every": 3, "max_steps": 2},
    }
    config, whole, cut = GrpoConfig.model_validate(settings), tmp_path / "whole", tmp_path / "cut"
    train_grpo(config, whole)
    played = [parse_row(line) for line in (whole / "rollouts.jsonl").read_text().splitlines()]
    assert [row["environment"] for row in played] == ["household", "household", "alfworld", "alfworld"] * 3
    tasks = {name: Manifest.read(whole / f"manifest-{name}.json") for name in ("household", "alfworld")}
    assert all(row["task"] in tasks[row["environment"]].ids for row in played)
    metrics = [parse_row(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    for n, metric in enumerate(metrics):
        for name in tasks:
            won = [row["success"] for row in played[4 * n : 4 * n + 4] if row["environment"] == name]
            assert metric[f"success_{name}"] == sum(won) / 2
    assert {"eval_success_household", "eval_success_alfworld"} < metrics[-1].keys()
    found = checkpoint.find(whole)
    state = checkpoint.read_state(found)
    assert checkpoint.environments(found) == ("household", "alfworld") and state["tasks"] == 4 + 3 - 2
    assert {name: bank["bank_entries"] for name, bank in state["banks"].items()} == {"household": 2, "alfworld": 2}
    assert (whole / "bank-household").is_symlink() and (whole / "bank-alfworld").is_symlink()

    taken = GrpoTrainer.take_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrpoTrainer, "take_step", lambda self: taken(self) if self.step < 1 else killed())
        with pytest.raises(Killed):
            train_grpo(config, cut)
    train_grpo(config, cut)
    assert checkpoint.sha256(checkpoint.find(cut)) == checkpoint.sha256(found)
    rows = [parse_row(line) for line in (cut / "rollouts.jsonl").read_text().splitlines()]
    assert rows == played
