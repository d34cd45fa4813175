"""What doctor says of this machine: which models fit by stage, from a table that the plan agrees with."""

from __future__ import annotations

import pytest

from configs.load import load_config
from configs.models import ServeConfig
from configs.training import GrpoConfig, SftConfig
from plan.budget import Lengths, find_gpu
from plan.capability import NEEDS, SMALL, STAGES, capability, fitting
from plan.stages import plan

ONE_ROW = ("batch_size=1", "micro_batch_size=1", "gradient_checkpointing=true")
ONE_PROCESS = ("cluster=local", "compiler.engine=hf", "executor.engine=hf", "backend=replicated")
PLANNED = {
    "SFT": (SftConfig, "sft/paper", (*ONE_ROW, "evaluation.tasks=0")),
    "GRPO": (GrpoConfig, "grpo/paper", (*ONE_ROW[1:], *ONE_PROCESS)),
    "serving": (ServeConfig, "serve/quickstart", ("batch=8",)),
}


def planned(compiler: str, executor: str, stage: str) -> float:
    """Plan a stage of `NEEDS`; returns the memory (GiB) of the smallest GPU that fits it."""
    schema, name, settings = PLANNED[stage]
    models = [f"compiler.model={compiler}", "compiler.dtype=bfloat16"]
    models += [] if stage == "serving" else [f"executor.model={executor}", "executor.dtype=bfloat16"]
    return plan(load_config(schema, name, [*models, *settings]), Lengths(), find_gpu("h100"), 1).needs()


@pytest.mark.parametrize(
    ("gib", "size", "sft", "serving"),
    [
        (1.0, 1.0, "SFT of the shipped models only", "serving of the shipped models only"),
        (3.0, 1.0, f"SFT up to {SMALL}", f"serving up to {SMALL}"),
        (24.0, 2.0, f"SFT up to {SMALL}", f"serving up to {SMALL}"),
        (24.0, 1.0, f"SFT up to {SMALL}", "serving up to Qwen2.5-VL-7B-Instruct"),
        (
            79.0,
            1.0,
            "SFT up to Qwen2.5-VL-7B-Instruct with Qwen2.5-14B-Instruct",
            "serving up to Qwen2.5-VL-32B-Instruct",
        ),
    ],
)
def test_the_largest_models_that_fit_are_named(gib: float, size: float, sft: str, serving: str) -> None:
    said = fitting(gib, size).split(", ")
    assert said[0] == sft and said[-1] == serving and len(said) == len(STAGES)


def test_doctor_names_the_device_its_memory_and_its_number_format() -> None:
    said = capability()
    assert " GiB, " in said and "bf16" in said and "SFT" in said and "\n" not in said


@pytest.mark.seconds
@pytest.mark.parametrize("stage", ["SFT", "serving"])
def test_the_table_says_what_the_plan_says(stage: str) -> None:
    assert planned(SMALL, SMALL, stage) == pytest.approx(NEEDS[SMALL, SMALL][stage], abs=0.1)
