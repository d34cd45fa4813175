"""SFT and GRPO with `share_prefix`: steps whose rows share a prefix learn what whole rows do, in episodes' order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lm.backbone import Backbone
from tests.training import grpo_trainers, sft_trainers
from tests.training.sft_trainers import row, trainable
from training.sft_data import bucketed, episodes_of
from training.sft_losses import sft_losses
from training.trainer import permutation

SEEN = "in home 2: the mug is in shelf 2, and the egg is in cabinet 1. " * 4
ROWS = [
    replace(row(i), task_id=f"t{episode}", t=t, memory_ids=("a",), memory_texts=(f"home {episode}. {SEEN}",))
    for episode in range(3)
    for t, i in enumerate((2 * episode, 1, 3)[: 3 - episode % 2])
]  # three episodes of 3, 2 and 3 rows


def trainer(out, **settings):
    return sft_trainers.trainer(out, ROWS, **({"batch_size": 5, "micro_batch_size": 5} | settings))


def test_rows_in_sequence_of_one_task_whose_steps_increase_are_an_episode():
    assert episodes_of(ROWS) == [[0, 1, 2], [3, 4], [5, 6, 7]]
    again = [*ROWS[:3], *ROWS[1:3], replace(ROWS[2], t=5), replace(ROWS[2], t=6, environment="other")]
    assert episodes_of(again) == [[0, 1, 2], [3, 4, 5], [6]]


def test_first_states_of_other_tasks_lie_with_the_memory_that_they_ask():
    first = replace(ROWS[0], t=0)
    asked = [replace(first, task_id=f"t{i}", memory_of="t0" if i < 3 else "t9") for i in range(5)]
    assert episodes_of([first, replace(first, t=1), *asked]) == [[0, 1], [2, 3, 4], [5, 6]]


def test_every_epoch_has_each_row_once_with_the_rows_of_an_episode_together(tmp_path):
    t = trainer(tmp_path, length_buckets=0)
    for epoch in range(3):
        order = [i for step in range(2) for i in t.batch_indices(2 * epoch + step)]
        assert sorted(order) == list(range(8))
        at = [[order.index(i) for i in episode] for episode in episodes_of(ROWS)]
        assert all(places == list(range(places[0], places[0] + len(places))) for places in at)
    assert t._order(0) != t._order(1)
    assert trainer(tmp_path / "rows", share_prefix=False)._order(0) == permutation(8, 0, 0)


def test_buckets_of_similar_length_keep_episodes_together(tmp_path):
    t = trainer(tmp_path, length_buckets=2)
    assert all(len({t._lengths[i] for i in episode}) == 1 for episode in episodes_of(ROWS))
    (whole,) = bucketed(t._order(0), t._lengths, 8, 1, "0:0")
    assert all(sorted(episode) == sorted(whole[whole.index(min(episode)) :][: len(episode)]) for episode in t._episodes)


def passes(backbone: Backbone) -> list[int]:
    """Record the tokens of the forward passes that follow, padding included."""
    read, hidden = list[int](), backbone.hidden
    backbone.hidden = lambda batch, *rest: (read.append(batch.tokens.numel()), hidden(batch, *rest))[1]
    return read


@pytest.mark.parametrize("recompute", [False, True])
def test_an_sft_step_has_the_gradients_of_whole_rows(tmp_path, recompute):
    gradients, tokens = [], []
    for sharing in ("never", "if_shorter", "always"):
        t = trainer(tmp_path / sharing, gradient_checkpointing=recompute)
        t.compiler.eval()
        t.compiler.projector.draw = lambda g, *_: g.mu
        read = passes(t.compiler.backbone)
        losses = sft_losses(t.compiler, t.executor, [t.examples[i] for i in range(5)], t.config, sharing=sharing)
        sum(value.sum() for value in losses.values()).backward()
        gradients.append({n: p.grad for n, p in t.compiler.named_parameters() if p.grad is not None})
        tokens.append(read)
    assert list(map(len, tokens)) == [1, 2, 2] and sum(tokens[1]) == sum(tokens[2]) < 0.7 * sum(tokens[0])
    for others in gradients[1:]:
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(others[name], gradient, atol=2e-5, rtol=1e-4, msg=name)


def test_a_run_that_shares_goes_on_after_a_kill_with_the_same_weights(tmp_path):
    whole = trainer(tmp_path / "whole", length_buckets=1)
    losses = [metrics["loss"] for metrics in whole.steps()]
    part = trainer(tmp_path / "part", length_buckets=1)
    steps = part.steps()
    for _ in range(3):  # killed after step 3: the checkpoint is that of step 2
        next(steps)
    again = trainer(tmp_path / "part", length_buckets=1)
    assert again.resume() and again.step == 2
    assert [metrics["loss"] for metrics in again.steps()] == losses[2:]
    for name, value in trainable(whole).items():
        assert torch.equal(value, trainable(again)[name]), name


@pytest.mark.parametrize("channel", [{}, grpo_trainers.PATHWISE])
def test_an_update_of_grpo_moves_the_weights_as_whole_rows_do(tmp_path, channel):
    weights, read = [], []
    for share in (False, True):
        settings = {"share_prefix": share, "micro_batch_size": 16, "minibatches": 2, "optimizer": {"eps": 1.0}}
        t = grpo_trainers.trainer(tmp_path / str(share), **grpo_trainers.merged(settings, channel))
        before = grpo_trainers.trainable(t)
        samples, tokens = grpo_trainers.fresh_samples(t), passes(t.compiler.backbone)
        t.learn(samples)
        weights.append({name: value - before[name] for name, value in grpo_trainers.trainable(t).items()})
        read.append(sum(tokens))
    assert read[1] < 0.75 * read[0]
    for name, moved in weights[0].items():
        apart = (weights[1][name] - moved).abs().max() / moved.abs().max().clamp(min=1e-9)
        assert apart < 1e-4, (name, float(apart))


def test_a_model_that_cannot_share_says_so_once(tmp_path, capsys):
    t = trainer(tmp_path / "can")
    assert t.sharing == "if_shorter" and "share_prefix" not in capsys.readouterr().out
    t.compiler.backbone.__dict__["attends_fully"] = False
    assert sft_trainers.SftTrainer(t.config, t.compiler, t.executor, ROWS, tmp_path / "cannot").sharing == "never"
    assert capsys.readouterr().out.count("share_prefix: Qwen2_5_VLForConditionalGeneration with this attention") == 1
