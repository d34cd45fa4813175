"""Held-out tasks played during training: what is played, what its success decides, and that training is as without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from agent.deliveries import find
from agent.episode import EpisodeLimits, run_episodes
from compiler import checkpoint
from configs.collect import CollectConfig
from configs.load import ConfigError, load_config
from configs.training import GrpoConfig, SftConfig, TrainingEvaluation
from data_gen.held_out import rows_environment_settings, select_held_out_specs, split_held_out_specs
from data_gen.rows import SftRowDataset
from envs.registry import Environments, executor_instructions_for
from executor.build import load_frozen
from memcompiler.collection import run_collect
from runtime.checksums import parse_row
from tests.training import sft_trainers
from tests.training.backend_cases import FATES, FatedEnv, evaluated
from tests.training.grpo_trainers import PATHWISE, Bandit, spec, trainable, trainer
from training.evaluation import BestCheckpoint, HeldOutTasks
from training.sft import train_sft


class Scripted:
    """Finds these rates of success, one evaluation after another."""

    def __init__(self, rates: list[float], every: int = 1) -> None:
        self.rates, self.every = rates, every

    def is_due(self, step: int, total: int) -> bool:
        return step % self.every == 0

    def play(self, compiler) -> dict[str, float]:
        return {"eval_success": self.rates.pop(0)}


def test_success_is_of_the_episodes_that_did_not_break(tmp_path):
    evaluated(tmp_path, "replicated")


def test_it_plays_as_evaluation_does_and_leaves_rollouts_as_they_were(tmp_path):
    """Greedily, by the weights after the step, under the delivery that settings name."""
    t = trainer(tmp_path, make_env=FatedEnv, held_out=FATES, evaluation={"tasks": 5, "delivery": "compiled_text"})
    seen, compile_, drawn = [], t.compiler.compile, t.compiler.decoding
    t.compiler.compile = lambda *args: (seen.append((t.compiler.decoding, t.compiler.weight_version)), compile_(*args))[
        1
    ]
    episodes, run = [], t.held_out_tasks.engine.executor.act
    t.held_out_tasks.engine.executor.act = lambda requests: (episodes.extend(requests), run(requests))[1]
    t.step = 7
    t._set_sampler(t._snapshot(), t.step)
    t.held_out_tasks.play(t.sampler)
    assert {decoding.temperature for decoding, _ in seen} == {0.0} and {version for _, version in seen} == {7}
    assert t.compiler.decoding == drawn and drawn.temperature == 1.2
    assert episodes and all(request.delivered.soft is None for request in episodes)  # text only


def test_training_is_as_without(tmp_path):
    """The same draws of compiler and executor, the same steps."""
    plain = trainer(tmp_path / "plain", make_env=Bandit, **PATHWISE)
    evaluation = {"tasks": 5, "every": 2}
    ours = trainer(tmp_path / "ours", make_env=Bandit, held_out=FATES, **PATHWISE, evaluation=evaluation)
    theirs, mine = ([metrics for metrics, _ in t.steps()] for t in (plain, ours))
    assert [m["update"] for m in mine if "eval_success" in m] == [2, 4] and not any("eval_success" in m for m in theirs)
    drop = lambda m: {k: v for k, v in m.items() if not k.startswith(("eval_", "seconds"))}
    assert [drop(m) for m in mine] == [drop(m) for m in theirs] and any(m["samples"] for m in theirs)
    expected = trainable(plain)
    assert all(torch.equal(expected[name], value) for name, value in trainable(ours).items())


def test_success_says_which_checkpoint_is_the_best_and_when_to_stop(tmp_path):
    t = trainer(tmp_path, held_out=FATES, updates=9, save_every=3, keep=1, evaluation={"tasks": 5, "patience": 3})
    t.held_out_tasks = Scripted([0.2, 0.6, 0.6, float("nan"), 0.5, 0.9])  # as much is not more, and no number is none
    list(t.steps())
    assert t.step == 5 and t.is_done and t.best == BestCheckpoint(0.6, 2, 3, "success")
    assert [p.name for p in checkpoint.checkpoints(t.folder)] == ["step-000002", "step-000005"]
    assert checkpoint.find(tmp_path).name == "step-000002"
    assert checkpoint.read_state(checkpoint.latest(t.folder))["best"] == {"success": 0.6, "step": 2, "since": 3}
    again = trainer(tmp_path, held_out=FATES, updates=9, save_every=3, keep=1, evaluation={"tasks": 5, "patience": 3})
    assert again.resume() and again.is_done and again.best == t.best


@pytest.mark.seconds
def test_a_run_with_rollouts_ahead_that_is_cut_short_goes_on_to_the_same_best(tmp_path):
    settings = {"max_staleness": 1, "loss": {"importance_cap": 2.0}, "updates": 6, "save_every": 4}
    made = [trainer(tmp_path / run, held_out=FATES, evaluation={"tasks": 5}, **settings) for run in ("whole", "cut")]
    rates = [0.1, 0.4, 0.2]
    for t in made:
        t.held_out_tasks = Scripted([*rates], every=2)
    list(made[0].steps())
    for metrics, _ in made[1].steps():
        if metrics["update"] == 3:
            break
    again = trainer(tmp_path / "cut", held_out=FATES, evaluation={"tasks": 5}, **settings)
    again.held_out_tasks = Scripted(rates[1:], every=2)
    assert again.resume() and again.step == 2  # the best so far was saved at once
    list(again.steps())
    assert again.best == made[0].best == BestCheckpoint(0.4, 4, 1, "success")
    expected = trainable(made[0])
    assert all(torch.equal(expected[name], value) for name, value in trainable(again).items())


def test_beside_a_validation_loss_success_may_be_for_the_record_alone(tmp_path):
    """Which of the two decides is a setting."""
    for decides, best in ((True, BestCheckpoint(0.5, 2, 1, "success")), (False, BestCheckpoint(1.0, 4, 0, "loss"))):
        t = sft_trainers.trainer(
            tmp_path / str(decides),
            held_out=[sft_trainers.row(3)],
            max_steps=4,
            validation={"share": 0.3, "every": 2},
            evaluation={"tasks": 1, "selects_best": decides},
        )
        t.best = BestCheckpoint(by="success" if decides else "loss")
        t.held_out_tasks, losses = Scripted([0.5, 0.4], every=2), [2.0, 1.0]
        t.validate = lambda losses=losses: {"loss": losses.pop(0)}
        seen = list(t.steps())
        assert [m["eval_success"] for m in seen if "eval_success" in m] == [0.5, 0.4]
        assert t.best == best


def test_tasks_that_are_played_do_not_train_and_follow_from_seed_and_names():
    specs = [spec(i) for i in range(8)]
    names = lambda part: [s.task.id for s in part]
    training, held = split_held_out_specs(specs, 3, 0)
    assert len(held) == 3 and sorted(names(training) + names(held)) == names(specs)
    assert (
        set(names(split_held_out_specs(specs[::-1], 3, 0)[1]))
        == set(names(held))
        != set(names(split_held_out_specs(specs, 3, 1)[1]))
    )
    with pytest.raises(ConfigError, match=r"evaluation\.tasks=8 of 8 tasks leave none to train on"):
        split_held_out_specs(specs, 8, 0)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"validation": {}}, "set validation.share"),
        ({"backend": "fsdp"}, "backend fsdp has them in slices"),
        ({"validation": {"share": 0.2, "patience": 3}}, "set evaluation.patience"),
        ({"soft": False}, "evaluation.delivery=compiled_text"),
        ({"brief_state": False}, "evaluation.delivery=compiled_no_brief"),
        ({"evaluation": {"tasks": 2, "delivery": "static"}}, "delivery"),  # it does not change with the compiler
        ({"evaluation": {"patience": 2}}, "needs evaluation.tasks above 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, why):
    with pytest.raises(ValueError, match=why):
        SftConfig(**({"validation": {"share": 0.2}, "evaluation": {"tasks": 2}} | settings))


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """Rows of eight tasks in two homes."""
    out = tmp_path_factory.mktemp("collect")
    run_collect(load_config(CollectConfig, "collect/quickstart", ["env.scenes={train: 2, test: 1}", "limit=8"]), out)
    return out / "rows"


@pytest.mark.slow
def test_sft_plays_tasks_of_held_out_rows_in_their_environment_with_their_bank(rows, tmp_path):
    overrides = [
        f"rows={rows}",
        "max_steps=3",
        "batch_size=4",
        "validation={share: 0.4, every: 2}",
        "evaluation={tasks: 2, every: 2, max_steps: 4}",
    ]
    config = load_config(SftConfig, "sft/quickstart", overrides)
    compiler = train_sft(config, tmp_path / "run")
    told = json.loads((tmp_path / "run" / "held_out.json").read_text())
    assert len(told["tasks"]) == 3 and len(told["played"]) == 2 and set(told["played"]) < set(told["tasks"])
    metrics = [parse_row(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics if "eval_success" in m] == [2, 3]
    with Environments(rows_environment_settings([rows])) as envs:
        specs = select_held_out_specs({rows: told["tasks"]}, 2, config.seed, envs)
        assert sorted(s.task.id for s in specs) == told["played"] and all(s.memory for s in specs)
        assert all(e.provenance.task_id != s.task.id for s in specs for e in s.memory)
        executor = load_frozen(config.executor, executor_instructions_for(envs.settings))
        played = run_episodes(envs.lease, specs, find("compiled").create(compiler, 0), executor, EpisodeLimits(4))
    assert metrics[-1]["eval_success"] == sum(e.success for e in played) / 2
    assert metrics[-1]["eval_episode_steps"] == sum(len(e.steps) for e in played) / 2


def test_rows_that_do_not_say_where_they_were_played_are_refused(rows, tmp_path):
    with pytest.raises(ConfigError, match=r"no config.resolved.yaml beside it names the environment"):
        rows_environment_settings([tmp_path / "rows"])
    with (
        Environments(rows_environment_settings([rows])) as envs,
        pytest.raises(ConfigError, match="rows of 1 tasks are held out"),
    ):
        select_held_out_specs({rows: SftRowDataset(rows).tasks[:1]}, 2, 0, envs)


def test_off_is_the_default():
    for kind in (SftConfig, GrpoConfig):
        assert kind().evaluation == TrainingEvaluation() and kind().evaluation.tasks == 0
    assert HeldOutTasks(TrainingEvaluation(tasks=1, every=3), None, (), None).is_due(6, 8)
    assert [
        s for s in range(1, 9) if HeldOutTasks(TrainingEvaluation(tasks=1, every=3), None, (), None).is_due(s, 8)
    ] == [
        3,
        6,
        8,
    ]
