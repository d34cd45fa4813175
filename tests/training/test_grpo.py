"""GRPO: the loss is TRL's, fresh samples have ratio 1, splitting changes nothing, resume is exact."""

from __future__ import annotations

import itertools
import math
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from agent.episode import EpisodeLimits
from agent.records import Episode, StepRecord
from compiler import checkpoint
from compiler.records import Decoding
from configs.training import GrpoConfig, PolicyLoss
from executor.records import PAPER_VIEW
from runtime.errors import StopReason
from tests import tiny_models
from tests.training.grpo_trainers import (
    PATHWISE,
    Bandit,
    LuckyEnv,
    fresh_samples,
    merged,
    spec,
    trainable,
    trainer,
)
from training.losses import clipped_surrogate, group_advantages, kl_estimate
from training.metrics import mismatch_lines, rollout_means, token_means
from training.policy import token_weights
from training.rollout import Group, RolloutEngine, Sample, reward, samples_of
from training.rollouts_ahead import Rollout

# -- the arithmetic ---------------------------------------------------------------------------------------------------


def test_clip_by_hand():
    # ratios 0.5, 1, 1.5 with A = 1: min(r, clip) = 0.5, 1, 1.28; with A = -1: max(r, clip) = 0.8, 1, 1.5
    ratio = torch.tensor([[0.5, 1.0, 1.5]] * 2)
    out = clipped_surrogate(ratio.log(), torch.zeros(2, 3), torch.tensor([1.0, -1.0]))
    assert torch.allclose(out.loss, torch.tensor([[-0.5, -1.0, -1.28], [0.8, 1.0, 1.5]]))
    assert out.clipped_high.tolist() == [[False, False, True], [False] * 3]
    assert out.clipped_low.tolist() == [[False] * 3, [True, False, False]]


def test_advantages_by_hand():
    # rewards 1, 0, 0, 0: mean 1/4, sample std 1/2: (3/4) / 0.5 = 1.5 and (-1/4) / 0.5 = -0.5
    assert group_advantages([1, 0, 0, 0]) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-3)
    assert group_advantages([1, 1]) == [0, 0] and group_advantages([1]) == [0]
    # KL estimate: d = log(0.5 / 0.25) = log 2: 2 - 1 - log 2
    assert kl_estimate(torch.tensor(0.25).log(), torch.tensor(0.5).log()).item() == pytest.approx(1 - math.log(2))


def ended(success: bool, *written: int) -> Episode:
    """An episode whose emissions have so many tokens; 0: a step without one."""
    kinds = ["NOACTION" if n else "" for n in written]
    steps = [
        StepRecord(t, "see", None, None, "goal: x", emission_kind=kind, emission_ids=(1,) * n)
        for t, (n, kind) in enumerate(zip(written, kinds, strict=True))
    ]
    return Episode(
        "t", "x", "", "train", "", "", "compiled", 0, steps=steps, success=success, stop_reason=StopReason.DONE
    )


def test_tokens_cost_by_hand():
    # solved with 2 and 12 tokens a step, and a failure, which is not charged: rewards 1 - 0.02 * (2, 12), 0
    short, long, lost = ended(True, 2, 2), ended(True, 20, 4), ended(False, 2)
    assert [reward(e, 0.02) for e in (short, long, lost)] == pytest.approx([0.96, 0.76, 0.0])
    assert reward(ended(True, 2, 0), 0.02) == pytest.approx(0.96)  # a mean of the steps with an emission
    assert reward(long, 0.1) == 0.0 and reward(ended(True), 0.1) == 1.0  # 1 - 1.2: no less than a failure
    group = Group((short, long, lost), token_cost=0.02)
    # mean 0.57333, squared distances 0.14951, 0.03484, 0.32871: sample std sqrt(0.51307 / 2) = 0.50649
    assert group.advantages == pytest.approx([0.7634, 0.3686, -1.1320], abs=1e-3)
    # all solved: mean 0.86, sample std 0.1 * sqrt 2; without the charge nothing is learnt from such a group
    assert Group((short, long), token_cost=0.02).advantages == pytest.approx([0.7071, -0.7071], abs=1e-3)
    assert not Group((short, long)).has_variance and Group((short, long), token_cost=0.02).has_variance
    assert Group((short, long, lost)).rewards == [1.0, 1.0, 0.0]
    assert not Group((lost, ended(False, 40)), token_cost=0.02).has_variance  # silence earns nothing where all fail


def test_metrics_tell_reward_success_and_tokens_apart():
    means = rollout_means([Group((ended(True, 2, 2), ended(True, 20, 4), ended(False, 2)), token_cost=0.02)])
    assert means["reward"] == pytest.approx((0.96 + 0.76) / 3) and means["success"] == pytest.approx(2 / 3)
    assert means["emission_tokens"] == pytest.approx((2 + 2 + 20 + 4 + 2) / 5) and means["emission_noaction"] == 1.0


def sample(sampled: int, episode: int, advantage: float = 1.0, n: int = 4) -> Sample:
    return Sample(None, (), torch.zeros(n, 1), torch.zeros(sampled + n), sampled, advantage, episode, 0)  # type: ignore[arg-type]


def test_token_weights_by_hand():
    # episode 0 has samples of 2 and 6 text tokens, episode 1 one of 12; each has 4 soft tokens that count half (2)
    samples = [sample(2, 0), sample(6, 0), sample(12, 1)]
    rows, first, total = token_weights(samples, PolicyLoss(latent_weight=0.5))
    assert (first, total) == (0, 3)
    assert sum(r.sum().item() for r in rows) == pytest.approx(1)
    assert [(r[0].item(), r[-1].item()) for r in rows] == [pytest.approx((1 / 26, 0.5 / 26))] * 3


@pytest.mark.parametrize("off_policy", [False, True])
def test_text_loss_and_gradients_are_trls(tmp_path, off_policy):
    from datasets import Dataset
    from trl import GRPOConfig as TrlConfig
    from trl import GRPOTrainer

    t = trainer(tmp_path, loss={"latent_weight": 0.0}, group_size=4)
    t.compiler.backbone.suppressed = []  # TRL samples from the whole vocabulary
    samples = [_cut(s, 2 + i % 7) for i, s in enumerate(fresh_samples(t))]
    assert len({s.advantage for s in samples}) > 1
    torch.manual_seed(0)
    if off_policy:  # as if older weights had sampled
        samples = [_moved(s, 0.3 * torch.randn(len(s.rollout_logprobs))) for s in samples]

    def gradients(loss: torch.Tensor) -> list[torch.Tensor]:
        t.compiler.zero_grad()
        loss.backward()
        return [p.grad.clone() for n, p in t.compiler.named_parameters() if "lora" in n and p.grad is not None]

    weights, _, _ = token_weights(samples, t.config.loss)
    old = [s.rollout_logprobs for s in samples]
    t.compiler.eval()
    loss, stats = t.policy.loss(list(zip(samples, weights, old, strict=True)))
    mine = gradients(loss)
    if off_policy:
        assert stats.sums["clip_low_text"] > 0 and stats.sums["clip_high_text"] > 0

    arguments = TrlConfig(
        str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to=[],
        per_device_train_batch_size=4,
        num_generations=4,
        loss_type="bnpo",
        temperature=t.config.sampling.temperature,
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        gradient_checkpointing=False,
    )
    reference = GRPOTrainer(
        model=t.compiler.policy,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 4}),
        processing_class=t.compiler.backbone.tokenizer,
    )
    reference.model.eval()
    reference.current_gradient_accumulation_steps = 1
    theirs_loss = reference._compute_loss(t.compiler.policy, _trl_inputs(samples))
    assert loss.item() == pytest.approx(theirs_loss.item(), abs=1e-6)
    for a, b in zip(mine, gradients(theirs_loss), strict=True):
        assert torch.allclose(a, b, atol=1e-6, rtol=1e-4)
    assert max(g.abs().max() for g in mine) > 1e-4


def _cut(s: Sample, length: int) -> Sample:
    """Its first text tokens only: random models never end an emission by themselves."""
    logprobs = torch.cat([s.rollout_logprobs[:length], s.rollout_logprobs[s.sampled :]])
    return Sample(s.prompt, s.emission[:length], s.z, logprobs, min(length, s.sampled), s.advantage, s.episode, 0)


def _moved(s: Sample, by: torch.Tensor) -> Sample:
    return Sample(
        s.prompt, s.emission, s.z, s.rollout_logprobs + by, s.sampled, s.advantage, s.episode, s.weight_version
    )


def _trl_inputs(samples: list[Sample]) -> dict[str, torch.Tensor]:
    """The same samples as TRL pads them: prompts to the left, completions to the right."""
    p, c = max(len(s.prompt.ids) for s in samples), max(s.sampled for s in samples)
    rows = {"prompt_ids": [], "prompt_mask": [], "completion_ids": [], "completion_mask": [], "old_per_token_logps": []}
    for s in samples:
        left, right = p - len(s.prompt.ids), c - s.sampled
        rows["prompt_ids"].append([0] * left + list(s.prompt.ids))
        rows["prompt_mask"].append([0] * left + [1] * len(s.prompt.ids))
        rows["completion_ids"].append(list(s.emission[: s.sampled]) + [0] * right)
        rows["completion_mask"].append([1] * s.sampled + [0] * right)
        rows["old_per_token_logps"].append(s.rollout_logprobs[: s.sampled].tolist() + [0.0] * right)
    return {name: torch.tensor(row) for name, row in rows.items()} | {
        "advantages": torch.tensor([s.advantage for s in samples])
    }


# -- the policy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vlm", [False, True])
@pytest.mark.parametrize("latent_temperature", [None, 0.5])
def test_fresh_samples_have_ratio_one(tmp_path, vlm, latent_temperature):
    t = trainer(tmp_path)
    t.compiler = t.policy.compiler = tiny_models.memory_compiler(vlm)
    t.compiler.decoding = Decoding(1.2, 8, latent_temperature=latent_temperature)
    samples = fresh_samples(t)
    with torch.no_grad():
        rows = t._score_all(samples)
    gap = max((row - s.rollout_logprobs).abs().max().item() for row, s in zip(rows, samples, strict=True))
    assert gap < 2e-5
    banned = set(t.compiler.backbone.suppressed)
    assert not any(banned & set(s.emission) for s in samples)


@pytest.mark.parametrize(
    ("projector", "mode"), [("gaussian", "choice"), ("linear", "choice"), ("gaussian", "constrained")]
)
def test_fresh_actions_have_ratio_one(tmp_path, projector, mode):
    """Rollout and trainer agree on the executor's draws: soft tokens made again from mu, sigma and noise are the ones
    that the executor read."""
    t = trainer(tmp_path, projector=projector, **merged(PATHWISE, {"executor": {"mode": mode}}))
    samples = fresh_samples(t)
    assert {len(s.rollout_logprobs) - s.sampled for s in samples} == {1} and len({s.action.chosen for s in samples}) > 1
    with torch.no_grad():
        rows = t._score_all(samples)
    assert max((a - s.rollout_logprobs).abs().max().item() for a, s in zip(rows, samples, strict=True)) < 1e-4
    t.compiler.projector.linear.bias.data += 0.5  # other soft tokens: the action's ratio is about what was read
    with torch.no_grad():
        moved = [a[-1] - s.rollout_logprobs[-1] for a, s in zip(t._score_all(samples), samples, strict=True)]
    assert max(x.abs().item() for x in moved) > 1e-3


def test_pathwise_gradient_is_the_finite_difference(tmp_path):
    t = trainer(tmp_path, **merged(PATHWISE, {"loss": {"text_weight": 0.0}}))
    samples = fresh_samples(t)[:4]
    bias = t.compiler.projector.linear.bias
    weights, _, _ = token_weights(samples, t.config.loss)
    old = [s.rollout_logprobs for s in samples]

    def loss() -> torch.Tensor:
        return t.policy.loss(list(zip(samples, weights, old, strict=True)))[0]

    loss().backward()
    along = bias.grad / bias.grad.norm()
    ends = []
    for sign in (1, -1):
        bias.data += sign * 1e-2 * along
        ends.append(float(loss().detach()))
        bias.data -= sign * 1e-2 * along
    assert (ends[0] - ends[1]) / 2e-2 == pytest.approx(bias.grad.norm().item(), rel=2e-2)


@pytest.mark.seconds
@pytest.mark.parametrize("projector", ["gaussian", "linear"])
def test_soft_tokens_learn_by_the_path_what_wins(tmp_path, projector):
    settings = {
        "loss": {"text_weight": 0.0, "latent_gradient": "pathwise"},
        "executor": {"temperature": 0.3},
        "updates": 12,
        "optimizer": {"lr": 5e-2, "min_lr": 5e-2},
        "tasks": 3,
        "group_size": 8,
        "save_every": 100,
    }
    t = trainer(tmp_path, make_env=Bandit, projector=projector, **settings)
    frozen = t.executor.hash()
    rewards = [metrics["reward"] for metrics, _ in t.steps()]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2
    assert t.executor.hash() == frozen


def test_pathwise_wants_an_executor_that_draws():
    with pytest.raises(ValueError, match=r"executor\.temperature above 0"):
        GrpoConfig(loss={"latent_gradient": "pathwise"})
    with pytest.raises(ValueError, match="draws among admissible commands"):
        GrpoConfig(executor={"temperature": 1.0, "mode": "generate"})


@pytest.mark.parametrize("settings", [{}, PATHWISE])
def test_soft_tokens_that_nobody_read_are_no_part_of_the_policy(tmp_path, settings):
    t = trainer(tmp_path, **settings)
    whole = fresh_samples(t)
    t.engine.executor.reads = PAPER_VIEW  # random models give no guidance
    silent = fresh_samples(t)
    assert not any(s.soft_read or s.action for s in silent) and all(s.soft_read for s in whole)
    mixed = [a if i % 2 else b for i, (a, b) in enumerate(zip(whole, silent, strict=True))]
    with torch.no_grad():
        rows, scores = t._score_all(mixed), t.policy.score(mixed)
    assert all(len(row) == len(s.rollout_logprobs) for row, s in zip(rows, mixed, strict=True))
    assert max((row - s.rollout_logprobs).abs().max().item() for row, s in zip(rows, mixed, strict=True)) < 1e-4
    assert scores.mask[:, -t.policy.n_latent :].any(1).tolist() == [s.soft_read for s in mixed]
    weights, _, _ = token_weights(mixed, t.config.loss)
    tokens = sum(s.sampled for s in mixed) + t.policy.n_latent * len(mixed) // 2
    assert [w[0].item() for w in weights] == pytest.approx([1 / tokens] * len(mixed))
    nothing = [None] * len(silent)
    t.policy.loss(list(zip(silent, token_weights(silent, t.config.loss)[0], nothing, strict=True)))[0].backward()
    grads = {name: p.grad is not None and bool(p.grad.any()) for name, p in t.compiler.named_parameters()}
    assert any(grads[name] for name in grads if "lora" in name)
    assert not any(grads[name] for name in grads if name.startswith("projector"))
    assert t.learn(silent)["ratio_latent"] == 0


def test_a_cut_emissions_forced_end_is_not_trained_on(tmp_path):
    t = trainer(tmp_path)
    t.compiler.decoding = Decoding(1.2, 3)
    cut = [s for s in fresh_samples(t) if s.sampled == 3 and len(s.emission) == 4]
    assert cut
    assert t.policy.score(cut).mask[:, :-4].sum(1).tolist() == [3] * len(cut)


def test_an_update_moves_lora_and_projector_but_not_the_executor(tmp_path):
    t = trainer(tmp_path)
    before, frozen = trainable(t), t.executor.hash()
    metrics, groups = next(t.steps())
    assert metrics["reward"] == 0.5 and metrics["zero_variance_fraction"] == 0 and metrics["samples"] == 16
    assert metrics["ratio_text"] == pytest.approx(1, abs=1e-5) and metrics["mismatch_kl"] < 1e-8
    assert metrics["clip_low"] == metrics["clip_high"] == 0 and metrics["entropy_text"] > 0
    after = trainable(t)
    moved = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert {"projector", "policy"} <= moved or {"projector", "backbone"} <= moved
    assert t.executor.hash() == frozen
    assert all(s.compilation.weight_version == 0 for g in groups for e in g.episodes for s in e.steps)


@pytest.mark.parametrize("channel", ["text", "latent"])
def test_one_channel_alone(tmp_path, channel):
    other = {"text": "latent", "latent": "text"}[channel]
    t = trainer(tmp_path, loss={f"{other}_weight": 0.0})
    before = trainable(t)
    t.learn(fresh_samples(t))
    after = trainable(t)
    assert any(not torch.equal(before[n], after[n]) for n in after if "lora" in n)
    projector_moved = not torch.equal(
        t.compiler.projector.linear.weight, tiny_models.memory_compiler(False).projector.linear.weight
    )
    assert projector_moved == (channel == "latent")


@pytest.mark.parametrize("settings", [{}, PATHWISE])
def test_splitting_changes_nothing(tmp_path, settings):
    results = []
    for micro in (1, 5, 64):
        t = trainer(tmp_path, micro_batch_size=micro, **settings)
        metrics = t.learn(fresh_samples(t))
        results.append((metrics["grad_norm"], metrics["loss"], trainable(t)))
    for norm, loss, weights in results[1:]:
        assert norm == pytest.approx(results[0][0], rel=1e-4) and loss == pytest.approx(results[0][1], abs=1e-6)
        assert all(torch.allclose(weights[n], results[0][2][n], atol=2e-5) for n in weights)


def test_minibatches_and_iterations_make_the_clip_active(tmp_path):
    t = trainer(tmp_path, minibatches=2, iterations=3, optimizer={"lr": 2e-2, "projector_lr": 2e-2})
    metrics = t.learn(fresh_samples(t))
    assert metrics["clip_low"] + metrics["clip_high"] > 0 and metrics["mismatch_kl"] < 1e-8


# -- groups -----------------------------------------------------------------------------------------------------------


def test_flat_groups_are_dropped_and_counted(tmp_path):
    t = trainer(tmp_path)
    numbers = itertools.count(step=2)  # every episode succeeds
    t.engine = RolloutEngine(lambda: LuckyEnv(next(numbers)), t.executor, EpisodeLimits(3))
    before = trainable(t)
    metrics, _ = t.take_step()
    assert metrics["zero_variance_fraction"] == 1 and metrics["skipped"] == 1 and metrics["reward"] == 1
    assert all(torch.equal(before[n], w) for n, w in trainable(t).items())


def test_a_dead_environment_costs_its_episode_only(tmp_path):
    t = trainer(tmp_path, specs=[spec(0, "fragile"), spec(1, "fragile")])
    metrics, groups = t.take_step()
    assert metrics["failures"] == 2 and metrics["samples"] == (8 - 2) * 2
    for group in groups:
        reasons = [episode.stop_reason for episode in group.episodes]
        assert reasons.count(StopReason.ENVIRONMENT_FAILURE) == 1 and len(group.valid) == 3
        assert "simulator is gone" in next(e.error for e in group.episodes if e.error)


@pytest.mark.parametrize(("likely", "compiled"), [(0.1, 1), (0.9, 2)])
def test_where_need_is_asked_only_what_was_compiled_is_learnt_from(tmp_path, likely, compiled):
    class Guess:
        threshold = 0.5

        def __call__(self, request):
            return likely

    t = trainer(tmp_path, delivery="compiled_gated")
    with pytest.raises(ValueError, match="compiled_gated needs a compile gate"):
        t.take_step()
    t.engine = replace(t.engine, gate=Guess())
    metrics, groups = t.take_step()
    assert metrics["steps"] == 8 * 2 and metrics["samples"] == 8 * compiled
    made = [step.compilation is not None for group in groups for e in group.episodes for step in e.steps]
    assert made == [True, compiled == 2] * 8


def test_a_compiler_without_brief_state_or_soft_tokens_is_continued_without_them(tmp_path):
    bare = trainer(tmp_path / "bare", delivery="compiled_no_brief")
    metrics, groups = bare.take_step()
    requests = [s.compilation.request for g in groups for e in g.episodes for s in e.steps if s.compilation]
    assert metrics["samples"] == len(requests) and all(request.state is None for request in requests)
    text = trainer(tmp_path / "text", delivery="compiled_text", loss={"latent_weight": 0.0})
    before = {name: weight.clone() for name, weight in trainable(text).items()}
    _, groups = text.take_step()
    assert not any(s.soft_read for g in groups for e in g.episodes for s in e.steps)
    moved = {name for name, weight in trainable(text).items() if not torch.equal(before[name], weight)}
    assert moved and not any("projector" in name for name in moved)
    with pytest.raises(ValueError, match=r"set loss\.latent_weight=0"):
        trainer(tmp_path / "wrong", delivery="compiled_text")


def test_when_everything_fails_the_run_stops(tmp_path):
    numbers = itertools.count(step=4)
    t = trainer(tmp_path, specs=[spec(0, "fragile")])
    t.engine = RolloutEngine(lambda: LuckyEnv(next(numbers)), t.executor, EpisodeLimits(3))
    with pytest.raises(ValueError, match=r"every episode of the update broke.*simulator is gone"):
        t.take_step()


def test_rewards_are_binary_and_at_the_end():
    class Done:
        def __init__(self, success):
            self.success, self.stop_reason, self.steps = success, StopReason.DONE, ()

    group = Group(tuple(Done(s) for s in (True, False, False, False)))  # type: ignore[arg-type]
    assert group.rewards == [1, 0, 0, 0] and group.has_variance
    assert not Group(tuple(Done(True) for _ in range(3))).has_variance  # type: ignore[arg-type]


# -- order and resume -------------------------------------------------------------------------------------------------


def test_tasks_come_in_permutations(tmp_path):
    t = trainer(tmp_path, specs=[spec(i) for i in range(5)])
    seen = [j.task.id for u in range(5) for j in t.specs_of(u)]
    assert sorted(seen[:5]) == sorted(seen[5:]) == [f"t{i}" for i in range(5)] and seen[:5] != seen[5:]


@pytest.mark.parametrize("settings", [{}, PATHWISE])
def test_resume_is_exact(tmp_path, settings):
    whole = trainer(tmp_path / "whole", updates=4, **settings)
    list(whole.steps())
    first = trainer(tmp_path / "cut", updates=4, **settings)
    for metrics, _ in first.steps():
        if metrics["update"] == 3:  # killed after the third: the checkpoint holds two
            break
    second = trainer(tmp_path / "cut", updates=4, **settings)
    assert second.resume() and second.step == 2
    list(second.steps())
    expected = trainable(whole)
    assert all(torch.equal(expected[n], w) for n, w in trainable(second).items())
    with pytest.raises(checkpoint.CheckpointError, match="3 tasks with seed 0"):
        trainer(tmp_path / "cut", seed=1).resume()


@pytest.mark.seconds
@pytest.mark.parametrize(("most", "staleness"), [(1, [0, 1, 1, 0, 1, 1]), (2, [0, 1, 2, 0, 1, 2])])
def test_rollouts_ahead_use_weights_of_a_fixed_age_and_resume_exactly(tmp_path, most, staleness):
    settings = {"updates": 6, "save_every": 3, "max_staleness": most}
    settings |= {"loss": {"importance_cap": 2.0}, "optimizer": {"projector_lr": 1e-2}}
    whole = trainer(tmp_path / "whole", **settings)
    rows = [(metrics, samples_of(groups, whole.compiler)) for metrics, groups in whole.steps()]
    assert [metrics["staleness"] for metrics, _ in rows] == staleness  # a checkpoint is a synchronous point
    for u, (metrics, samples) in enumerate(rows):
        assert {s.weight_version for s in samples} == {u - metrics["staleness"]}
        assert (metrics["mismatch_kl"] > 1e-6) == bool(metrics["staleness"])
    first = trainer(tmp_path / "cut", **settings)
    for metrics, _ in first.steps():
        if metrics["update"] == 5:  # killed after the fifth, the sixth under way: the checkpoint holds three
            break
    second = trainer(tmp_path / "cut", **settings)
    assert second.resume() and second.step == 3
    list(second.steps())
    expected = trainable(whole)
    assert all(torch.equal(expected[n], w) for n, w in trainable(second).items())


def test_what_an_engine_is_told_is_no_copy_of_the_base(tmp_path):
    """An engine that compiles in the trainer's place gives the same run; what is kept for it beside the policy, which
    changes meanwhile, is LoRA and projector."""
    settings = {"max_staleness": 1, "loss": {"importance_cap": 2.0}, "optimizer": {"projector_lr": 1e-2}}
    runs = [trainer(tmp_path / str(served), served=served, **settings) for served in (False, True)]
    made = [[{k: v for k, v in metrics.items() if "seconds" not in k} for metrics, _ in run.steps()] for run in runs]
    assert made[0] == made[1] and made[0][-1]["staleness"] == 1
    own, engines = (dict(run.sampler.named_parameters()) for run in runs)
    told = checkpoint.trained_parameters(runs[1].sampler)
    assert {name for name, p in engines.items() if not p.is_meta} == set(told)
    assert not any(p.is_meta for p in own.values())
    assert sum(p.nbytes for p in told.values()) < 0.5 * sum(p.nbytes for p in own.values())


def test_samples_that_are_too_old_are_never_trained_on(tmp_path):
    """An update refuses them before its weights change, whatever the thread that played them says of itself."""
    t = trainer(tmp_path, max_staleness=1, loss={"importance_cap": 2.0}, save_every=10)
    first, second = t.take_step()[1], t.take_step()[1]
    assert {s.weight_version for groups in (first, second) for s in samples_of(groups, t.compiler)} == {0}
    t._ahead.take(2, t._snapshot)
    episodes = [episode for group in second for episode in group.episodes]
    old = Rollout([0] * 4 + [1] * 4, episodes, weight_version=1, seconds=0.0)  # it claims to be one update old
    t._ahead._rollouts[2] = Future()
    t._ahead._rollouts[2].set_result(old)
    before = trainable(t)
    with pytest.raises(RuntimeError, match="update 2 has a sample of weights of version 0, older than max_staleness 1"):
        t.take_step()
    assert t.step == 2 and all(torch.equal(before[name], weight) for name, weight in trainable(t).items())


def test_the_gradient_of_stale_samples_is_the_importance_weighted_one(tmp_path):
    """By hand: the sum over tokens of -w A min(pi / pi_rollout, cap) grad log pi, at weights two updates later."""
    cap = 1.01
    t = trainer(tmp_path, loss={"importance_cap": cap}, optimizer={"lr": 3e-3, "projector_lr": 1e-2})
    samples = fresh_samples(t)
    for update in (0, 1):
        t.learn(samples, update)
    weights, _, _ = token_weights(samples, t.config.loss)
    policy = [p for p in t.compiler.parameters() if p.requires_grad]
    loss, totals = t.policy.loss(list(zip(samples, weights, [None] * len(samples), strict=True)))
    found = torch.autograd.grad(loss, policy)
    expected, ratios = torch.zeros(()), []
    for sample, weight in zip(samples, weights, strict=True):
        scores = t.policy.score([sample])
        logprobs = scores.logprobs[scores.mask]
        ratios.append((logprobs.detach() - sample.rollout_logprobs).exp())
        expected = expected - (weight * sample.advantage * ratios[-1].clamp(max=cap) * logprobs).sum()
    for mine, by_hand in zip(found, torch.autograd.grad(expected, policy), strict=True):
        torch.testing.assert_close(mine, by_hand, rtol=1e-4, atol=1e-7)
    ratio, metrics = torch.cat(ratios), token_means(totals)
    assert 0.05 < metrics["importance_capped"] < 0.95 and ratio.max() > 1.05  # there is something to cap
    assert metrics["importance_capped"] == pytest.approx((ratio > cap).float().mean().item())
    assert metrics["importance"] == pytest.approx(ratio.mean().item(), rel=1e-5)
    peaks = [metrics[f"importance_{name}_max"] for name in ("text", "latent")]
    assert max(peaks) == pytest.approx(ratio.max().item(), rel=1e-5)


@pytest.mark.parametrize(("gap", "weight"), [(0.25, math.exp(0.25)), (2.0, 1.5), (-1.0, math.exp(-1.0))])
def test_importance_weights_by_hand(tmp_path, gap, weight):
    """Stale samples count by min(pi / pi_rollout, cap), token by token."""
    losses = []
    for cap in (0.0, 1.5):
        t = trainer(tmp_path, loss={"importance_cap": cap})
        lucky = [s for s in fresh_samples(t) if s.advantage > 0]
        samples = [_moved(s, torch.full_like(s.rollout_logprobs, -gap)) for s in lucky]
        weights, _, _ = token_weights(samples, t.config.loss)
        nothing = [None] * len(samples)
        losses.append(float(t.policy.loss(list(zip(samples, weights, nothing, strict=True)))[0].detach()))
    assert losses[0] < -0.1 and losses[1] == pytest.approx(losses[0] * weight, rel=1e-3)


@pytest.mark.parametrize(
    "settings", [{"micro_batch_size": 2}, {"minibatches": 2}], ids=["scored on the way", "scored before"]
)
def test_how_far_engine_and_trainer_are_apart_by_hand(tmp_path, settings):
    """An engine that says 0.25 more of every text token, 0.5 less of one, and 0.01 more of soft tokens."""
    t = trainer(tmp_path, **settings)
    gaps = []
    for i, sample in enumerate(samples := fresh_samples(t)):
        gap = torch.full_like(sample.rollout_logprobs, 0.01)
        gap[: sample.sampled] = 0.25
        if i == 1:
            gap[0] = -0.5
        gaps.append(gap)
    metrics = t.learn([_moved(s, gap) for s, gap in zip(samples, gaps, strict=True)])
    text = torch.cat([gap[: s.sampled] for s, gap in zip(samples, gaps, strict=True)]).abs()
    assert metrics["apart_text"] == pytest.approx(text.mean().item(), abs=1e-4) != pytest.approx(0.25, abs=1e-4)
    assert metrics["apart_text_max"] == pytest.approx(0.5, abs=1e-4)
    assert (
        metrics["apart_latent"] == pytest.approx(0.01, abs=1e-4) == pytest.approx(metrics["apart_latent_max"], abs=1e-4)
    )
    first, warning = mismatch_lines(metrics | {"update": 1.0, "staleness": 0.0}, is_first=True)
    assert "text 0.25 (at most 0.5), latent 0.01 (at most 0.01) on average" in first
    assert "warning: update 1" in warning and "more than 0.05" in warning
    later = metrics | {"update": 2.0}
    assert mismatch_lines(later | {"staleness": 0.0}, is_first=False) == [warning.replace("update 1", "update 2")]
    assert mismatch_lines(later | {"staleness": 1.0}, is_first=False) == []  # by other weights, they would


def test_a_run_says_once_how_far_engine_and_trainer_are_apart(tmp_path):
    t = trainer(tmp_path)
    metrics = t.learn(fresh_samples(t)) | {"update": 1.0, "staleness": 0.0}
    assert 0 < metrics["apart_text_max"] < 1e-3 and metrics["apart_text"] <= metrics["apart_text_max"]
    assert len(mismatch_lines(metrics, is_first=True)) == 1 and mismatch_lines(metrics, is_first=False) == []
    assert mismatch_lines({"update": 1.0, "skipped": 1.0}, is_first=True) == []  # nothing was scored
    (warning,) = mismatch_lines(metrics | {"apart_latent": math.nan}, is_first=False)
    assert "latent nan" in warning


def test_rollouts_ahead_want_a_correction():
    with pytest.raises(ValueError, match=r"set loss\.importance_cap"):
        GrpoConfig(max_staleness=1)
