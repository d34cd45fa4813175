"""Part `machine`: hardware, software, and the device's rates of matrix products and copies.

This module imports torch alone, so that it runs where other packages are missing.
"""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import time
from collections.abc import Callable, Iterator

import torch
import torch.cuda.nccl
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.measuring import seconds_of
from benchmarks.gpu.parts import Row, Setup

PACKAGES = ("transformers", "peft", "accelerate", "trl", "deepspeed", "vllm", "flash-attn")
SIDE = {"paper": 8192, "tiny": 128}  # of square matrices
TIMES = 10
CUDNN, OTHERS = [SDPBackend.CUDNN_ATTENTION], [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
KEYS = 192  # cuDNN's gradients are reported to be NaN here, with a mask and a logsumexp below -88.7
NEW_LENGTHS = range(1001, 1021)  # numbers of keys; cuDNN plans each length anew


def measure(setup: Setup) -> Iterator[Row]:
    """Yield a row per fact and per rate."""
    for what, value in (*_software(), *(_gpus() if setup.device == "cuda" else [])):
        yield {"what": what, "value": value}
    for dtype in (torch.bfloat16, torch.float32):
        yield {"what": f"products in {str(dtype)[6:]} (TFLOP/s)", "value": products(setup, dtype)}
    yield {"what": "copies (TB/s read and written)", "value": copies(setup)}
    for name, kernels in (("cuDNN", CUDNN), ("flash or efficient", OTHERS)) if setup.device == "cuda" else ():
        yield {"what": f"attention by {name}: gradients are finite", "value": _with_kernels(kernels, finite_gradients)}
        yield {
            "what": f"attention by {name}: ms for a new length of keys",
            "value": _with_kernels(kernels, new_length_ms),
        }


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


def finite_gradients() -> bool:
    """Check that masked attention with very negative scores has finite gradients in bf16."""
    query, key, value = (torch.randn(1, 8, KEYS, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    query, key = (query.abs() + 4).requires_grad_(), (-key.abs() - 4).requires_grad_()
    mask = torch.ones(1, 1, KEYS, KEYS, dtype=torch.bool, device="cuda").tril()
    scaled_dot_product_attention(query, key, value, attn_mask=mask).float().sum().backward()
    return all(bool(leaf.grad.isfinite().all()) for leaf in (query, key) if leaf.grad is not None)


def new_length_ms() -> float:
    """Return the milliseconds of decoding a token with a new number of keys."""
    query = torch.randn(1, 8, 1, 64, device="cuda", dtype=torch.bfloat16)
    keys = torch.randn(1, 8, NEW_LENGTHS.stop, 64, device="cuda", dtype=torch.bfloat16)
    attend = lambda n: scaled_dot_product_attention(query, keys[:, :, :n], keys[:, :, :n])
    attend(1000)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for n in NEW_LENGTHS:
        attend(n)
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - started) / len(NEW_LENGTHS)


def _with_kernels(kernels: list[SDPBackend], measure: Callable[[], object]) -> object:
    """Measure with these attention kernels only; return the reason if there are none."""
    try:
        with sdpa_kernel(kernels):
            return measure()
    except RuntimeError as error:
        return f"not measured: {str(error).splitlines()[0][:80]}"


def _seconds(setup: Setup, run: Callable[[], object]) -> float:
    """Return the mean seconds of back-to-back runs."""
    run()
    return seconds_of(setup, lambda: [run() for _ in range(TIMES)]) / TIMES
