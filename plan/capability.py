"""Device and largest models of this machine, for `memcompiler doctor`."""

from __future__ import annotations

import os
from collections.abc import Mapping

from plan.budget import GIB

SMALL, READS_7B, READS_14B = "SmolLM2-135M-Instruct", "Qwen2.5-7B-Instruct", "Qwen2.5-14B-Instruct"
SEES_7B, SEES_32B, READS_32B = "Qwen2.5-VL-7B-Instruct", "Qwen2.5-VL-32B-Instruct", "Qwen2.5-32B-Instruct"

# GiB of one GPU by stage, from `memcompiler plan` (tests/plan/test_capability.py), for pairs of compiler and executor
# in bfloat16, smallest first. One row at a time, gradient checkpointing, GRPO in one process, 8 requests at once.
NEEDS: Mapping[tuple[str, str], Mapping[str, float]] = {
    (SMALL, SMALL): {"SFT": 1.8, "GRPO": 2.9, "serving": 1.9},
    (READS_7B, READS_7B): {"SFT": 30.9, "GRPO": 36.3, "serving": 18.3},
    (SEES_7B, READS_14B): {"SFT": 45.9, "GRPO": 51.0, "serving": 19.6},
    (SEES_32B, READS_32B): {"SFT": 128.0, "GRPO": 141.5, "serving": 70.7},
}
STAGES = ("SFT", "GRPO", "serving")


def capability() -> str:
    """Describe the device of `device: auto`, its memory and number format, and the largest models that fit."""
    import torch

    from lm.device import device_of, dtype_of

    device = device_of("auto")
    dtype = dtype_of("auto", device)
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    name = f"cpu, {os.cpu_count()} cores"
    if device != "cpu":
        gpu = torch.cuda.get_device_properties(device)
        name, gib = f"{device} {gpu.name}", gpu.total_memory / GIB
    narrow = "bf16" if dtype is torch.bfloat16 else "no bf16: float32"
    return f"{name}, {gib:.0f} GiB, {narrow}; {fitting(gib, dtype.itemsize / 2)}"


def fitting(gib: float, size: float = 1.0) -> str:
    """Name the largest models of `NEEDS` for each stage that fit into `gib` GiB, with parameters `size` times as
    large as in bfloat16."""
    found = []
    for stage in STAGES:
        pairs = [pair for pair, needs in NEEDS.items() if needs[stage] * size <= gib]
        compiler, executor = pairs[-1] if pairs else ("", "")
        models = compiler if stage == "serving" or compiler == executor else f"{compiler} with {executor}"
        found.append(f"{stage} up to {models}" if pairs else f"{stage} of the shipped models only")
    return ", ".join(found)
