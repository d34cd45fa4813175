"""Who gets which share of a cluster's GPUs: as the settings say, whole ones where there are enough, else by size."""

from __future__ import annotations

from typing import Any

import pytest

from configs.load import load_config
from configs.training import GrpoConfig
from plan.budget import GIB, Gpu, Lengths, find_gpu
from plan.stages import plan
from training.ray_placement import MAX_UTILIZATION, describe, plan_layout

H100 = find_gpu("h100")
SHORT = ["compiler.vllm.max_model_len=4096", "executor.vllm.max_model_len=4096"]


def layout(gpus: int, *settings: str, gpu: Gpu = H100) -> dict[str, tuple[int, float]]:
    made = plan_layout(load_config(GrpoConfig, "grpo/paper", list(settings)), gpus, gpu.gib)
    return {role: (share.count, round(share.gpus, 2)) for role, share in made.roles.items()}


@pytest.mark.parametrize(
    ("gpus", "counts"), [(8, (4, 3, 1)), (64, (32, 24, 8)), (4, (2, 1, 1)), (2, (1, 1, 0)), (1, (1, 0, 0))]
)
def test_gpus_are_shared_out_as_in_the_paper(gpus: int, counts: tuple[int, int, int]):
    assert tuple(count for count, _ in layout(gpus).values()) == counts
    assert all(own == 1 for count, own in layout(gpus).values() if count)


def test_without_gpus_each_role_has_a_process():
    made = layout(0)
    assert made == {"trainer": (1, 0), "compiler": (1, 0), "executor": (1, 0)}
    assert layout(0, "executor.engine=scripted")["executor"] == (0, 0)  # nothing that an engine could hold
    named = ["placement.trainers=2", "placement.compilers=3", "placement.executors=0"]
    assert layout(0, *named) == {"trainer": (2, 0), "compiler": (3, 0), "executor": (0, 0)}


def test_tensor_parallel_engines_take_as_many_gpus_each():
    made = layout(16, "compiler.vllm.tensor_parallel_size=2", "executor.vllm.tensor_parallel_size=4")
    assert made == {"trainer": (8, 1), "compiler": (2, 2), "executor": (1, 4)}


def test_engines_for_which_there_are_too_few_gpus_share_one_by_their_size():
    """7B and 14B: 15.5 and 27.5 GiB of weights, and caches for the episodes of an update."""
    named = ["placement.trainers=1", "placement.compilers=2", "placement.executors=1", *SHORT]
    assert layout(4, *named) == {"trainer": (1, 1), "compiler": (2, 1), "executor": (1, 1)}  # there are enough
    made = plan_layout(load_config(GrpoConfig, "grpo/paper", named), 3, H100.gib)
    for share, weights in ((made.compilers, 15.5), (made.executors, 27.5)):
        assert 0 < share.gpus <= 0.5 and share.utilization == pytest.approx(MAX_UTILIZATION * share.gpus)
        assert share.utilization * H100.gib > weights + 1.5
    assert made.gpus <= 3
    assert layout(3, *named, gpu=Gpu("", 40.0))["executor"] == (1, 1)  # two do not fit on one of these


def test_what_the_settings_let_an_engine_fill_stands():
    config = load_config(GrpoConfig, "grpo/paper", ["compiler.vllm.gpu_memory_utilization=0.6"])
    made = plan_layout(config, 8, H100.gib)
    assert (made.compilers.utilization, made.executors.utilization) == (0.6, MAX_UTILIZATION)


def test_the_cluster_that_is_there_is_laid_out_and_said():
    made = plan_layout(load_config(GrpoConfig, "grpo/paper", []), 8, 79.2)
    engines = "compilers 3 x 1 (vLLM at 0.9 of one), executors 1 x 1 (vLLM at 0.9 of one)"
    assert describe(made) == f"GPUs: trainers 4 x 1, {engines}"


@pytest.mark.seconds
def test_the_plan_is_that_of_the_layout():
    named = ["placement.trainers=1", "placement.compilers=2", "placement.executors=1", *SHORT]
    config: Any = load_config(GrpoConfig, "grpo/paper", named)
    made = plan(config, Lengths(), H100, 3)
    budgets = {budget.process: budget for budget in made.budgets}
    assert made.gpus <= 3 and made.fits(H100, 3), made.needs()
    shared = budgets["rollout engine"]
    assert (shared.count, shared.gpus) == (1, 1) and shared.weights > 2 * 15 * GIB  # two on one
    assert "of them on one" in shared.note and any("GPUs: trainers 1 x 1" in note for note in made.notes)
