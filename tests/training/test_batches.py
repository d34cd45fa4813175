"""Batches of rows of like length: every row once an epoch, the same ones after a resume, and less padding."""

from dataclasses import replace

import pytest
import torch

from tests.training.sft_trainers import ROWS, row, trainable, trainer
from training.batches import PICTURE, bucketed, length
from training.trainer import permuted

LENGTHS = [37 * i % 101 for i in range(100)]


def padding(batches: list[list[int]], micro: int) -> float:
    """The share of a padded micro-batch that is padding."""
    parts = [[LENGTHS[i] for i in batch[at : at + micro]] for batch in batches for at in range(0, len(batch), micro)]
    return 1 - sum(map(sum, parts)) / sum(len(part) * max(part) for part in parts)


@pytest.mark.parametrize("window", [1, 3, 7, 100])
def test_every_row_is_in_one_batch_of_an_epoch(window):
    batches = bucketed(permuted(100, 0, 0), LENGTHS, 8, window, "0:0")
    assert sorted(i for batch in batches for i in batch) == list(range(100))
    assert sorted(map(len, batches)) == [4, *[8] * 12]


def test_another_epoch_and_another_seed_have_other_batches():
    made = lambda seed, epoch: bucketed(permuted(100, seed, epoch), LENGTHS, 8, 5, f"{seed}:{epoch}")
    assert made(0, 0) == made(0, 0)
    assert made(0, 0) != made(0, 1) != made(1, 0)


def test_short_rows_do_not_come_before_long_ones():
    batches = bucketed(permuted(100, 0, 0), LENGTHS, 8, 13, "0:0")
    longest = [max(LENGTHS[i] for i in batch) for batch in batches]
    assert longest != sorted(longest) and longest != sorted(longest, reverse=True)


def test_rows_of_like_length_share_a_micro_batch():
    plain = [permuted(100, 0, 0)[i : i + 8] for i in range(0, 100, 8)]
    assert padding(plain, 4) > 0.3 and padding(bucketed(permuted(100, 0, 0), LENGTHS, 8, 13, "0:0"), 4) < 0.1
    assert padding(bucketed(permuted(100, 0, 0), LENGTHS, 8, 1, "0:0"), 4) < padding(plain, 4)


def test_a_rows_length_counts_what_the_compiler_reads_and_writes():
    plain = replace(row(1), image=None)
    longer = replace(plain, memory_texts=("x" * 100, *plain.memory_texts[1:]))
    assert length(longer) - length(plain) == 100 - len(plain.memory_texts[0])
    assert length(replace(plain, emission=plain.emission + "!!")) - length(plain) == 2
    assert length(replace(plain, image=b"png")) - length(plain) == PICTURE


def test_a_run_that_is_cut_short_goes_on_with_the_same_batches(tmp_path):
    rows = [*ROWS, *(replace(row(i), task_id=f"u{i}") for i in range(4))]
    settings = {"batch_size": 2, "max_steps": 7, "length_buckets": 2}
    whole = trainer(tmp_path / "whole", rows, **settings)
    seen = [whole.batch_indices(step) for step in range(7)]
    assert sorted(i for batch in seen[:5] for i in batch) == list(range(9))
    plain = trainer(tmp_path / "plain", rows, **(settings | {"length_buckets": 0}))
    assert [plain.batch_indices(step) for step in range(5)] != seen[:5]
    whole.run(lambda m: None)
    part = trainer(tmp_path / "part", rows, **settings)
    for metrics in part.steps():
        if metrics["step"] == 5:
            break
    again = trainer(tmp_path / "part", rows, **settings)
    assert again.resume() and again.step == 4
    again.run(lambda m: None)
    for name, value in trainable(whole).items():
        assert torch.equal(value, trainable(again)[name]), name
