"""Batches of rows of like length: every row once an epoch, the same ones after a resume, and less padding."""

from dataclasses import replace

import pytest
import torch

from data_gen.rows import SftRowDataset, save_rows, without_brief_state
from tests.training.sft_trainers import ROWS, row, trainable, trainer
from training.sft_data import PICTURE, bucketed, row_length
from training.trainer import permutation

LENGTHS = [37 * i % 101 for i in range(100)]


def padding(batches: list[list[int]], micro: int) -> float:
    """The share of a padded micro-batch that is padding."""
    parts = [[LENGTHS[i] for i in batch[at : at + micro]] for batch in batches for at in range(0, len(batch), micro)]
    return 1 - sum(map(sum, parts)) / sum(len(part) * max(part) for part in parts)


@pytest.mark.parametrize("window", [1, 3, 7, 100])
def test_every_row_is_in_one_batch_of_an_epoch(window):
    batches = bucketed(permutation(100, 0, 0), LENGTHS, 8, window, "0:0")
    assert sorted(i for batch in batches for i in batch) == list(range(100))
    assert sorted(map(len, batches)) == [4, *[8] * 12]


def test_another_epoch_and_another_seed_have_other_batches():
    made = lambda seed, epoch: bucketed(permutation(100, seed, epoch), LENGTHS, 8, 5, f"{seed}:{epoch}")
    assert made(0, 0) == made(0, 0)
    assert made(0, 0) != made(0, 1) != made(1, 0)


def test_short_rows_do_not_come_before_long_ones():
    batches = bucketed(permutation(100, 0, 0), LENGTHS, 8, 13, "0:0")
    longest = [max(LENGTHS[i] for i in batch) for batch in batches]
    assert longest != sorted(longest) and longest != sorted(longest, reverse=True)


def test_rows_of_like_length_share_a_micro_batch():
    plain = [permutation(100, 0, 0)[i : i + 8] for i in range(0, 100, 8)]
    assert padding(plain, 4) > 0.3 and padding(bucketed(permutation(100, 0, 0), LENGTHS, 8, 13, "0:0"), 4) < 0.1
    assert padding(bucketed(permutation(100, 0, 0), LENGTHS, 8, 1, "0:0"), 4) < padding(plain, 4)


def test_a_rows_length_counts_what_the_compiler_reads_and_writes():
    plain = replace(row(1), image=None)
    longer = replace(plain, memory_texts=("x" * 100, *plain.memory_texts[1:]))
    assert row_length(longer) - row_length(plain) == 100 - len(plain.memory_texts[0])
    assert row_length(replace(plain, emission=plain.emission + "!!")) - row_length(plain) == 2
    assert row_length(replace(plain, image=b"png")) - row_length(plain) == PICTURE


def test_a_run_that_is_cut_short_goes_on_with_the_same_batches(tmp_path):
    rows = [*ROWS, *(replace(row(i), task_id=f"u{i}") for i in range(4))]
    settings = {"batch_size": 2, "max_steps": 7, "length_buckets": 2}
    whole = trainer(tmp_path / "whole", rows, **settings)
    seen = [whole.batch_indices(step) for step in range(7)]
    assert sorted(i for batch in seen[:5] for i in batch) == list(range(9))
    plain = trainer(tmp_path / "plain", rows, **(settings | {"length_buckets": 0}))
    assert [plain.batch_indices(step) for step in range(5)] != seen[:5]
    list(whole.steps())
    part = trainer(tmp_path / "part", rows, **settings)
    for metrics in part.steps():
        if metrics["step"] == 5:
            break
    again = trainer(tmp_path / "part", rows, **settings)
    assert again.resume() and again.step == 4
    list(again.steps())
    for name, value in trainable(whole).items():
        assert torch.equal(value, trainable(again)[name]), name


@pytest.mark.slow
def test_rows_that_workers_read_from_disk_teach_the_same_also_after_a_kill(tmp_path):
    rows = [*ROWS, *(replace(row(i), task_id=f"u{i}") for i in range(4))]
    save_rows(rows, tmp_path / "rows")
    settings = {"batch_size": 2, "max_steps": 6}
    whole = trainer(tmp_path / "whole", rows, **settings)
    losses = [metrics["loss"] for metrics in whole.steps()]
    part = trainer(tmp_path / "part", SftRowDataset(tmp_path / "rows"), loader_workers=2, **settings)
    steps = part.steps()
    read = [next(steps)["loss"] for _ in range(5)]
    again = trainer(tmp_path / "part", SftRowDataset(tmp_path / "rows"), loader_workers=1, **settings)
    assert again.resume() and again.step == 4
    read[4:] = [metrics["loss"] for metrics in again.steps()]
    assert read == losses
    assert not len(part.examples)  # it encoded none of its rows itself
    for name, value in trainable(whole).items():
        assert torch.equal(value, trainable(again)[name]), name


def test_what_a_worker_raises_is_raised_and_not_waited_for(tmp_path):
    broken = trainer(tmp_path, [replace(row, emission="not an emission", state="?") for row in ROWS], loader_workers=1)
    with pytest.raises(Exception, match="worker process"):
        next(broken.steps())


@pytest.mark.seconds
def test_stored_rows_are_those_that_were_saved_one_by_one_and_edited(tmp_path):
    save_rows(ROWS, tmp_path / "rows")
    stored = SftRowDataset(tmp_path / "rows")
    assert len(stored) == len(ROWS) and stored.tasks == [row.task_id for row in ROWS]
    assert [stored[i] for i in range(len(stored))] == list(stored) == ROWS
    assert SftRowDataset(tmp_path / "rows", without_brief_state)[1] == without_brief_state(ROWS[1])
    blind = SftRowDataset(tmp_path / "rows", pictures=False)
    assert list(blind) == [replace(row, image=None, memory_images=()) for row in ROWS]
    with pytest.raises(IndexError):
        stored[len(ROWS)]
