"""Part `machine`: hardware, software, and the device's rates of matrix products and copies.

This module imports torch alone, so that it runs where other packages are missing.
"""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from collections.abc import Callable, Iterator

import torch
import torch.cuda.nccl

from benchmarks.gpu.measuring import seconds_of
from benchmarks.gpu.parts import Row, Setup

PACKAGES = ("transformers", "peft", "accelerate", "trl", "deepspeed", "vllm", "flash-attn")
SIDE = {"paper": 8192, "tiny": 128}  # of square matrices
TIMES = 10


def measure(setup: Setup) -> Iterator[Row]:
    """Yield a row per fact and per rate."""
    for what, value in (*_software(), *(_gpus() if setup.device == "cuda" else [])):
        yield {"what": what, "value": value}
    for dtype in (torch.bfloat16, torch.float32):
        yield {"what": f"products in {str(dtype)[6:]} (TFLOP/s)", "value": products(setup, dtype)}
    yield {"what": "copies (TB/s read and written)", "value": copies(setup)}


def _software() -> list[tuple[str, object]]:
    facts: list[tuple[str, object]] = [
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("CUDA of torch", torch.version.cuda),
        ("cuDNN", torch.backends.cudnn.version()),
    ]
    return [*facts, *((name, _version(name)) for name in PACKAGES)]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> list[tuple[str, object]]:
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
    facts: list[tuple[str, object]] = [
        ("driver", _driver()),
        ("NCCL", ".".join(map(str, nccl)) if isinstance(nccl, tuple) else nccl),
        ("bf16", torch.cuda.is_bf16_supported(including_emulation=False)),
        ("GPUs", torch.cuda.device_count()),
    ]
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        free = torch.cuda.mem_get_info(i)[0]
        facts.append((f"GPU {i}", f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}"))
        facts.append((f"GPU {i}, GiB free of all", f"{free / 2**30:.1f} of {gpu.total_memory / 2**30:.1f}"))
    return facts


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def products(setup: Setup, dtype: torch.dtype) -> float:
    """Return the TFLOP/s of a product of square matrices; fp32 without TF32."""
    side = SIDE[setup.size]
    a, b = (torch.randn(side, side, device=setup.device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / _seconds(setup, lambda: a @ b) / 1e12


def copies(setup: Setup) -> float:
    """Return the TB/s, read plus written, of copying 1 GiB (tiny: 1 MiB) within the device's memory."""
    source = torch.zeros(2 ** (30 if setup.size == "paper" else 20), dtype=torch.uint8, device=setup.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _seconds(setup, lambda: target.copy_(source)) / 1e12


def _seconds(setup: Setup, run: Callable[[], object]) -> float:
    """Return the mean seconds of back-to-back runs."""
    run()
    return seconds_of(setup, lambda: [run() for _ in range(TIMES)]) / TIMES
