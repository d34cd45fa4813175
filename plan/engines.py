"""Memory budget of a vLLM engine."""

from __future__ import annotations

import math

from plan.budget import GIB, Budget, Gpu
from training.ray_placement import ENGINE_OVERHEAD, EngineConfig, RoleLayout, engine_size

HOST = 3.0 * GIB  # RAM of a process with torch, without a model


def engine_budget(
    process: str, device: str, settings: EngineConfig, gpu: Gpu, sequence: int, role: RoleLayout | None = None
) -> Budget:
    """Compute what a vLLM engine needs: its share of a GPU, whose cache gets what weights and activations leave. It
    does not start unless the cache holds one sequence of maximum length. Engines on one GPU count as one process.

    Args:
        sequence: Tokens of a typical sequence.
        role: Number and GPUs of the role's engines (default: one engine).
    """
    role = role or RoleLayout(1)
    size, share = engine_size(settings, sequence), role.utilization or settings.vllm.gpu_memory_utilization
    per_gpu = round(1 / role.gpus) if 0 < role.gpus < 1 else 1
    cache, smallest = share * gpu.gib * GIB - size.without_cache, size.cache_per_token * size.max_context
    tokens = max(cache, 0) / size.cache_per_token
    several = f"{per_gpu} of them on one; " if per_gpu > 1 else ""
    return Budget(
        process,
        device,
        count=math.ceil(role.count / per_gpu),
        gpus=settings.vllm.tensor_parallel_size,
        share=share * per_gpu,
        weights=per_gpu * size.weights,
        activations=per_gpu * size.activations,
        kv_cache=per_gpu * max(cache, smallest),
        overhead=per_gpu * ENGINE_OVERHEAD,
        host=per_gpu * 2 * HOST,
        least=per_gpu * (size.without_cache + smallest),
        note=f"vLLM at {share:g} of a GPU: {several}a cache of {tokens:,.0f} tokens, {tokens / size.sequence:,.0f} "
        f"sequences of {size.sequence} at once; one of {size.max_context:,} must fit",
    )
