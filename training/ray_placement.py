"""GPUs of each GRPO role on Ray: trainers, compiler engines (rollouts) and executor engines (actions).

By default half of the GPUs train, one in eight acts, and the rest roll out (of 8: the paper's 4, 3 and 1). An engine
gets whole GPUs if there are enough, because memory that weights leave becomes its KV cache. Otherwise as many engines
of a role as fit share one GPU, by their weights and a cache for the episodes in flight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from configs.models import CompilerConfig, ExecutorConfig, VllmEngine
from configs.training import GrpoConfig
from lm.architecture import cache_bytes_per_token, head_dim, model_config, weight_bytes
from lm.device import dtype_of

GIB = 2**30
ENGINE_OVERHEAD = 1.5 * GIB  # CUDA context, libraries and CUDA graphs of a vLLM engine
CHUNK = 8192  # tokens of vLLM's profiling prefill
MAX_UTILIZATION = 0.9  # share of a GPU for engines; the rest is for memory that vLLM does not count
COMPILER_PROMPT, EXECUTOR_SEQUENCE = 1900, 1000  # tokens, in rows of real ALFWorld games with four memory entries
EngineConfig = CompilerConfig | ExecutorConfig


@dataclass(frozen=True, slots=True)
class RoleLayout:
    """Number of processes of a role, GPUs of each (a fraction shares one), and vLLM's `gpu_memory_utilization`."""

    count: int
    gpus: float = 0.0
    utilization: float | None = None


@dataclass(frozen=True, slots=True)
class ClusterLayout:
    """Processes and GPUs of every role."""

    trainers: RoleLayout
    compilers: RoleLayout
    executors: RoleLayout

    @property
    def roles(self) -> dict[str, RoleLayout]:
        return {"trainer": self.trainers, "compiler": self.compilers, "executor": self.executors}

    @property
    def gpus(self) -> float:
        return sum(role.count * role.gpus for role in self.roles.values())


@dataclass(frozen=True, slots=True)
class EngineSize:
    """Memory of a vLLM engine on each of its GPUs, in bytes, and lengths of its sequences, in tokens."""

    weights: float
    activations: float  # of the profiling prefill
    cache_per_token: float
    max_context: int  # the cache must hold one sequence of this length
    sequence: int  # a typical sequence

    @property
    def without_cache(self) -> float:
        return self.weights + self.activations + ENGINE_OVERHEAD

    def with_cache(self, sequences: int) -> float:
        """Return the bytes that an engine with so many sequences in flight needs."""
        return self.without_cache + self.cache_per_token * max(self.max_context, sequences * self.sequence)


def engine_size(settings: EngineConfig, sequence: int) -> EngineSize:
    """Estimate a vLLM engine's memory; exact for dense decoders with a gated MLP."""
    vllm, text = settings.vllm, model_config(settings.model).get_text_config()
    n = vllm.tensor_parallel_size
    # At the fullest moment of a prefill: gate, up and product of the MLP; four hidden states; rotary cos and sin.
    values = 3 * text.intermediate_size + 4 * text.hidden_size + 2 * head_dim(text)
    return EngineSize(
        weights=weight_bytes(settings.model, settings.dtype) / n,
        activations=CHUNK * values * dtype_of(settings.dtype).itemsize,
        cache_per_token=cache_bytes_per_token(text, settings.dtype) / n,
        max_context=vllm.max_model_len or text.max_position_embeddings,
        sequence=sequence,
    )


def plan_layout(
    config: GrpoConfig, gpus: int, gpu_gib: float, sequences: Mapping[str, int] | None = None
) -> ClusterLayout:
    """Distribute a cluster's GPUs over the roles; counts in `placement` take precedence.

    Args:
        gpus: of the cluster. 0: one process per role; 1: one process has all roles.
        gpu_gib: memory of one GPU in GiB.
        sequences: tokens of a typical sequence of "compiler" and "executor".
    """
    place, engines = config.placement, {"compiler": config.compiler, "executor": config.executor}
    width = {role: one.vllm.tensor_parallel_size if one.engine == "vllm" else 1 for role, one in engines.items()}
    trainers = place.trainers or max(1, gpus // 2)
    executors = place.executors
    if executors is None:
        executors = int(gpus not in (1, 2)) * max(1, gpus // 8 // width["executor"])
    if config.executor.engine not in ("hf", "vllm"):  # an endpoint or a script needs no process of its own
        executors = 0
    compilers = place.compilers
    if compilers is None:
        left = (gpus - trainers - executors * width["executor"]) // width["compiler"]
        compilers = int(gpus != 1) * max(1, left)
    if gpus == 0:
        return ClusterLayout(RoleLayout(trainers), RoleLayout(compilers), RoleLayout(executors))
    counts = {"compiler": compilers, "executor": executors}
    whole = {role: _whole_gpus(one, counts[role]) for role, one in engines.items()}
    layout = ClusterLayout(RoleLayout(trainers, 1.0), whole["compiler"], whole["executor"])
    if layout.gpus <= gpus:
        return layout
    episodes = config.tasks * config.group_size
    lengths = sequences or {
        "compiler": COMPILER_PROMPT + config.compiler.max_new_tokens,
        "executor": EXECUTOR_SEQUENCE,
    }
    shared = {
        role: _shared_gpus(one, counts[role], episodes=episodes, sequence=lengths[role], gpu_gib=gpu_gib)
        for role, one in engines.items()
    }
    return ClusterLayout(RoleLayout(trainers, 1.0), shared["compiler"], shared["executor"])


def describe(layout: ClusterLayout) -> str:
    """Describe a layout in one line."""
    vllm = lambda role: f" (vLLM at {role.utilization:.2g} of one)" if role.utilization else ""
    of = lambda role: f"{role.count} x {role.gpus:.2g}{vllm(role)}"
    return "GPUs: " + ", ".join(f"{name}s {of(role)}" for name, role in layout.roles.items())


def _whole_gpus(settings: EngineConfig, count: int) -> RoleLayout:
    """Give each engine whole GPUs."""
    if settings.engine != "vllm":
        return RoleLayout(count, 1.0 * (count > 0))
    return RoleLayout(count, float(settings.vllm.tensor_parallel_size), _set_utilization(settings) or MAX_UTILIZATION)


def _shared_gpus(settings: EngineConfig, count: int, episodes: int, sequence: int, gpu_gib: float) -> RoleLayout:
    """Put as many engines as possible on one GPU; whole GPUs if two do not fit."""
    whole = _whole_gpus(settings, count)
    if settings.engine != "vllm" or settings.vllm.tensor_parallel_size > 1 or not count:
        return whole
    in_flight = min(settings.vllm.max_num_seqs, math.ceil(episodes / count))
    own = _set_utilization(settings)
    needed = own or engine_size(settings, sequence).with_cache(in_flight) / (gpu_gib * GIB)
    per_gpu = math.floor(MAX_UTILIZATION / needed + 1e-9)
    return RoleLayout(count, 1 / per_gpu, own or MAX_UTILIZATION / per_gpu) if per_gpu > 1 else whole


def _set_utilization(settings: EngineConfig) -> float | None:
    """Return `vllm.gpu_memory_utilization` if it differs from the default, which leaves room for other processes."""
    own = settings.vllm.gpu_memory_utilization
    return None if own == VllmEngine().gpu_memory_utilization else own
