"""Engines on GPUs: what one takes of a GPU, and who gets which share of a cluster (`cluster: ray`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from configs.models import CompilerConfig, ExecutorConfig, VllmEngine
from configs.training import GrpoConfig
from plan.budget import GIB, Budget, Gpu, Lengths
from plan.models import model_config
from plan.replay import cache_per_token, replay_engine
from training.on_ray import Lay, Layout, Share

ENGINE = 1.5 * GIB  # an engine's CUDA context and libraries, with its CUDA graphs
HOST = 3.0 * GIB  # RAM of a process with torch, before it has a model
HELD = ("hf", "vllm")  # engines of executors that an actor can hold
FULL = 0.9  # of a GPU, that engines may fill; the rest is for what they do not count
Engine = CompilerConfig | ExecutorConfig


@dataclass(frozen=True, slots=True)
class _Size:
    """What an engine holds on each of its GPUs, in bytes, and the tokens of its sequences."""

    weights: float
    activations: float
    logits: float
    per_token: float  # of the cache
    context: int  # tokens of its longest sequence, which has to fit
    sequence: int  # and of one as it is planned

    @property
    def taken(self) -> float:
        """Sum up what no cache can have."""
        return self.weights + self.activations + self.logits + ENGINE

    def needs(self, rows: int) -> float:
        """Sum up what it needs to have `rows` sequences in its cache at once."""
        return self.taken + self.per_token * max(self.context, rows * self.sequence)


def engine(
    process: str, device: str, settings: Engine, gpu: Gpu, lengths: Lengths, share: Share | None = None
) -> Budget:
    """Say what a vLLM engine takes: its share of a GPU, of which the cache gets what weights and a chunk leave. It does
    not start where one sequence of its longest does not fit. Engines that share a GPU are told as one process."""
    share = share or Share(1)
    own, size = share.utilization or settings.vllm.gpu_memory_utilization, _size(settings, lengths)
    beside = round(1 / share.gpus) if 0 < share.gpus < 1 else 1
    room, least = own * gpu.gib * GIB - size.taken, size.per_token * size.context
    together = f"{beside} of them on one; " if beside > 1 else ""
    return Budget(
        process,
        device,
        math.ceil(share.count / beside),
        settings.vllm.tensor_parallel_size,
        own * beside,
        weights=beside * size.weights,
        activations=beside * size.activations,
        logits=beside * size.logits,
        kv_cache=beside * max(room, least),
        overhead=beside * ENGINE,
        host=beside * 2 * HOST,
        least=beside * (size.taken + least),
        note=f"vLLM at {own:g} of a GPU: {together}a cache of {max(room, 0) / size.per_token:,.0f} tokens, "
        f"{max(room, 0) / size.per_token / size.sequence:,.0f} sequences of {size.sequence} at once; one of "
        f"{size.context:,} has to fit",
    )


def laid_out(config: GrpoConfig, lengths: Lengths, gpu: Gpu, gpus: int) -> Layout:
    """Share a cluster of so many GPUs out: as `placement` says; where it does not, half of them train, one in eight
    acts, and the rest roll out (of 8: the paper's 4, 3 and 1). Without GPUs each role has a process; with one GPU, one
    process has all roles.

    An engine gets its GPUs whole where there are enough, for what weights leave is cache. Where there are not, as many
    as fit share one: by their weights, and a cache for the episodes that are under way.
    """
    place, held = config.placement, config.executor.engine in HELD
    wide = {name: one.vllm.tensor_parallel_size * (one.engine == "vllm") or 1 for name, one in _roles(config).items()}
    trainers = place.trainers or max(1, gpus // 2)
    acting = int(gpus not in (1, 2)) * max(1, gpus // 8 // wide["executor"])
    executors = held * (acting if place.executors is None else place.executors)
    left = (gpus - trainers - executors * wide["executor"]) // wide["compiler"]
    compilers = place.compilers if place.compilers is not None else int(gpus != 1) * max(1, left)
    counts = {"compiler": compilers, "executor": executors}
    if gpus == 0:
        return Layout(Share(trainers), Share(compilers), Share(executors))
    whole = {name: _whole(one, counts[name]) for name, one in _roles(config).items()}
    layout = Layout(Share(trainers, 1.0), whole["compiler"], whole["executor"])
    if layout.gpus <= gpus:
        return layout
    episodes = config.tasks * config.group_size
    full = {"compiler": replace(lengths, emission=config.compiler.max_new_tokens), "executor": lengths}
    parts = {name: _part(one, counts[name], episodes, full[name], gpu) for name, one in _roles(config).items()}
    return Layout(Share(trainers, 1.0), parts["compiler"], parts["executor"])


def lay(config: GrpoConfig, lengths: Lengths) -> Lay:
    """Give what lays a run out over the cluster that it finds."""
    return lambda gpus, gib: laid_out(config, lengths, Gpu("", gib), gpus)


def said(layout: Layout) -> str:
    """Say a layout in a line."""
    filled = lambda share: f" (vLLM at {share.utilization:.2g} of one)" if share.utilization else ""
    of = lambda share: f"{share.count} x {share.gpus:.2g}{filled(share)}"
    return "GPUs: " + ", ".join(f"{role}s {of(share)}" for role, share in layout.shares.items())


def _roles(config: GrpoConfig) -> dict[str, Engine]:
    return {"compiler": config.compiler, "executor": config.executor}


def _whole(settings: Engine, count: int) -> Share:
    """Give each engine its GPUs to itself; an engine's own setting stands."""
    if settings.engine != "vllm":
        return Share(count, 1.0 * (count > 0))
    return Share(count, float(settings.vllm.tensor_parallel_size), _chosen(settings) or FULL)


def _part(settings: Engine, count: int, episodes: int, lengths: Lengths, gpu: Gpu) -> Share:
    """Give each engine as small a part of a GPU as it can do with, if that is half of one at most."""
    whole = _whole(settings, count)
    if settings.engine != "vllm" or settings.vllm.tensor_parallel_size > 1 or not count:
        return whole
    rows = min(settings.vllm.max_num_seqs, math.ceil(episodes / count))
    needs = _chosen(settings) or _size(settings, lengths).needs(rows) / (gpu.gib * GIB)
    beside = math.floor(FULL / needs + 1e-9)
    return Share(count, 1 / beside, _chosen(settings) or FULL / beside) if beside > 1 else whole


def _chosen(settings: Engine) -> float | None:
    """Return what the settings let the engine fill, if that is not the default, which leaves room for all else."""
    own = settings.vllm.gpu_memory_utilization
    return None if own == VllmEngine().gpu_memory_utilization else own


def _size(settings: Engine, lengths: Lengths) -> _Size:
    vllm, text = settings.vllm, model_config(settings.model).get_text_config()
    n, replay = vllm.tensor_parallel_size, replay_engine(settings.model, settings.dtype, vllm.max_num_seqs)
    compiles = isinstance(settings, CompilerConfig)
    return _Size(
        replay.weights / n,
        replay.held["activations"],
        replay.held["logits"],
        cache_per_token(text, settings.dtype) / n,
        vllm.max_model_len or text.max_position_embeddings,
        lengths.prompt + lengths.emission if compiles else lengths.acting + lengths.action,
    )
