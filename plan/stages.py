"""Memory plan of each stage's processes from its settings, and settings that would make it fit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agent.deliveries import find
from configs.collect import CollectConfig
from configs.evaluation import EvalConfig, QuickstartConfig
from configs.load import ConfigError
from configs.models import CompilerConfig, ExecutorConfig, ServeConfig
from configs.proxy import ProxyConfig
from configs.training import GrpoConfig, Placement, SftConfig
from eval.matrix import cells
from lm.architecture import model_config, weight_bytes
from plan.budget import GIB, Budget, Gpu, Lengths, Plan
from plan.replay import (
    MODELS,
    Replay,
    hidden_size,
    replay_act,
    replay_compile,
    replay_sft,
    replay_update,
)
from training.ray_placement import ENGINE_OVERHEAD, EngineConfig, RoleLayout, describe, engine_size, plan_layout

HOST = 3.0 * GIB  # RAM of a process with torch, without a model
CONTEXT = 1.0 * GIB  # a process's CUDA context and libraries
SLACK = 0.05  # of temporary memory, lost to fragmentation
PIXELS = 1.0 * GIB  # RAM for encoded rows (training.sft_data.MAX_CACHED_VALUES)
ZERO3_LIVE = 2e9  # bytes of gathered weights in ZeRO-3 (its default of 1e9 parameters, in bf16)
BUSY, READING = 0.4, 0.6  # achieved shares of a GPU's FLOP/s and bandwidth

Settings = SftConfig | GrpoConfig | EvalConfig | CollectConfig | ServeConfig | ProxyConfig


def plans(settings: Settings | QuickstartConfig, lengths: Lengths, gpu: Gpu, gpus: int) -> list[tuple[Any, Plan]]:
    """Plan every part of a run, and every cell of a matrix with different models: settings with their plan."""
    if isinstance(settings, QuickstartConfig):
        parts = (settings.collect, settings.sft, settings.grpo, settings.eval)
        return [pair for part in parts if part is not None for pair in plans(part, lengths, gpu, gpus)]
    parts = _distinct_cells(settings) if isinstance(settings, EvalConfig) else [settings]
    return [(part, plan(part, lengths, gpu, gpus)) for part in parts]


def plan(settings: Settings, lengths: Lengths, gpu: Gpu, gpus: int) -> Plan:
    """Plan one stage. Raises: ConfigError, for a proxy that loads no model."""
    stages: dict[type, Callable[..., Plan]] = {
        SftConfig: plan_sft,
        GrpoConfig: plan_grpo,
        EvalConfig: plan_eval,
        CollectConfig: plan_collect,
        ServeConfig: plan_serve,
        ProxyConfig: plan_proxy,
    }
    return stages[type(settings)](settings, lengths, gpu, gpus)


def plan_sft(config: SftConfig, lengths: Lengths, gpu: Gpu, gpus: int) -> Plan:
    """Plan stage 1: every process holds both models, or a slice of them."""
    mine = math.ceil(config.batch_size / gpus)
    trained = replay = replay_sft(config, lengths, min(config.micro_batch_size, mine))
    if played := min(config.evaluation.tasks, config.compiler.batch_size):  # by the same models
        longest = replace(lengths, emission=config.compiler.max_new_tokens)
        compiling = replay_compile(config.compiler, hidden_size(config.executor), longest, played)
        acting = replay_act(config.executor, lengths, min(config.evaluation.tasks, config.executor.batch_size))
        replay = _fullest([replay, compiling, acting])
    models = _sizes(config.compiler, config.executor)
    # With slices, one process first loads both models into RAM; counted in equal parts.
    read = replay.weights / gpus if config.backend in ("fsdp", "zero3") else 0.0
    host = HOST + read + (PIXELS if _sees(config.compiler.model) else 0)
    budget = _trainer("trainer", replay, backend=config.backend, n=gpus, host=host)
    return Plan(
        stage="sft",
        name=f"SFT, {_models(config)}, micro-batches of {min(config.micro_batch_size, mine)}, backend {config.backend}",
        budgets=(budget,),
        disk=_disk(models, replay.trained, config.keep),
        tokens={
            "compiler": round(config.batch_size * trained.read),
            "executor": config.batch_size * (lengths.acting + lengths.action) * config.soft,
        },
        episodes=0,
        seconds={name: mine * flops / _products(gpu) for name, flops in replay.flops.items()},
    )


def plan_grpo(config: GrpoConfig, lengths: Lengths, gpu: Gpu, gpus: int) -> Plan:
    """Plan stage 2: one process on one GPU, else the layout of `cluster: ray` (`training.ray_placement`)."""
    sequences = {
        "compiler": lengths.prompt + config.compiler.max_new_tokens,
        "executor": lengths.acting + lengths.action,
    }
    layout = plan_layout(config, gpus, gpu.gib, sequences)
    trainers, rolls, acts = layout.trainers.count, layout.compilers, layout.executors
    episodes = config.tasks * config.group_size
    mine = min(config.concurrency, math.ceil(episodes / trainers))
    lengths_kv = replace(lengths, emission=config.compiler.max_new_tokens)
    samples = math.ceil(episodes * config.max_steps / trainers)
    update = replay_update(config, lengths, min(config.micro_batch_size, samples))
    runs, width = config.executor.engine in MODELS, hidden_size(config.executor)
    compiling = replay_compile(config.compiler, width, lengths_kv, min(mine, config.compiler.batch_size))
    acting = replay_act(config.executor, lengths, min(mine, config.executor.batch_size)) if runs else None
    models = _sizes(config.compiler, config.executor)
    held, budgets = [update], []
    if rolls.count and config.compiler.engine == "vllm":
        budgets.append(
            engine_budget(
                "rollout engine",
                "rollouts",
                settings=config.compiler,
                gpu=gpu,
                sequence=sequences["compiler"],
                role=rolls,
            )
        )
    elif rolls.count:
        budgets.append(_alone("rollout engine", compiling, rolls.count))
    elif config.compiler.engine == "vllm":
        budgets.append(
            engine_budget(
                "rollout engine",
                "actors",
                settings=config.compiler,
                gpu=gpu,
                sequence=sequences["compiler"],
                role=RoleLayout(trainers),
            )
        )
    else:
        held.append(compiling)
    if acts.count and config.executor.engine == "vllm":
        budgets.append(
            engine_budget(
                "executor", "executors", settings=config.executor, gpu=gpu, sequence=sequences["executor"], role=acts
            )
        )
    elif acts.count and acting is not None:
        budgets.append(_alone("executor", acting, acts.count))
    elif config.executor.engine == "vllm":
        budgets.append(
            engine_budget(
                "executor",
                "actors",
                settings=config.executor,
                gpu=gpu,
                sequence=sequences["executor"],
                role=RoleLayout(trainers),
            )
        )
    elif config.executor.engine == "hf" and acting is not None:
        held.append(acting)
    fullest = _fullest(held)
    whole = fullest.held.pop("executor weights", 0)  # is not sliced
    sliced, served = config.backend in ("fsdp", "zero3"), bool(rolls.count) or config.compiler.engine == "vllm"
    if not served:  # a whole copy of the compiler rolls out
        whole += update.held["compiler weights"] * (sliced or config.overlap)
    read = update.held["compiler weights"] / trainers if served and sliced else 0.0  # as in SFT
    actor = _trainer("actor", fullest, backend=config.backend, n=trainers, host=HOST + read)
    # A compiler that rolls out itself is loaded whole, and sliced then.
    loading = fullest.weights + CONTEXT if sliced and not served else 0.0
    actor = replace(actor, device="actors", weights=actor.weights + whole, loading=loading)
    steps, compilers = episodes * config.max_steps, rolls.count or trainers
    seconds = {
        "compile: prefill": steps / compilers * compiling.flops["prefill"] / _products(gpu),
        "compile: decode": config.max_steps * lengths.emission * compiling.weights / _reads(gpu),
        "act": steps / (acts.count or trainers) * acting.flops["act"] / _products(gpu) if acting else 0.0,
        "update": samples * config.iterations * update.flops["update"] / _products(gpu),
    }
    return Plan(
        stage="grpo",
        name=f"GRPO, {_models(config)}, placement {trainers} + {rolls.count} + {acts.count}",
        budgets=(actor, *budgets),
        disk=_disk(models, update.trained, config.keep),
        tokens={
            "compiler, reading": steps * lengths.prompt,
            "compiler, writing": steps * lengths.emission,
            "executor": steps * lengths.acting,
            "update": round(steps * update.read),
        },
        episodes=min(episodes, config.concurrency * trainers),
        seconds=seconds,
        notes=(describe(layout), f"an update of {episodes} episodes with the maximum of {config.max_steps} steps"),
    )


def plan_eval(config: EvalConfig, lengths: Lengths, gpu: Gpu, gpus: int) -> Plan:
    """Plan an evaluation: one process with the executor and, if a delivery needs it, the trained compiler."""
    specs = [find(name) for name in config.deliveries]
    compiles = any(spec.needs_checkpoint for spec in specs)
    if any(spec.kind == "static" for spec in specs):  # the longest prompt
        lengths = replace(lengths, acting=lengths.acting + lengths.memory)
    compiler = config.compiler if compiles else None
    return _playing(
        "eval",
        "evaluation",
        compiler=compiler,
        executor=config.executor,
        concurrency=config.concurrency,
        lengths=lengths,
        gpu=gpu,
        gpus=gpus,
    )


def plan_collect(config: CollectConfig, lengths: Lengths, gpu: Gpu, gpus: int) -> Plan:
    """Plan a collection: a model runs only if the executor acts while an endpoint teaches."""
    executor = config.executor if config.acting_role == "executor" else None
    return _playing(
        "collect",
        "collection",
        compiler=None,
        executor=executor,
        concurrency=config.concurrency or 16,
        lengths=lengths,
        gpu=gpu,
        gpus=gpus,
    )


def plan_serve(config: ServeConfig, lengths: Lengths, gpu: Gpu, gpus: int) -> Plan:
    """Plan a compiler service."""
    return _serving("serve", "service", config, lengths, gpu=gpu, gpus=gpus)


def plan_proxy(config: ProxyConfig, lengths: Lengths, gpu: Gpu, gpus: int) -> Plan:
    """Plan the compiler in a proxy's process; memory and sessions take little. The upstream is another process.

    Raises:
        ConfigError: the proxy loads no compiler.
    """
    if config.compiler.engine == "http":
        raise ConfigError("compiler.engine=http: this proxy loads no model; plan the compiler service that it asks")
    if config.compiler.checkpoint is None:
        raise ConfigError("compiler.checkpoint=null: this proxy loads no model, so there is nothing to plan")
    return _serving("proxy", "proxy", config, lengths, gpu=gpu, gpus=gpus)


def _serving(
    stage: str, process: str, config: ServeConfig | ProxyConfig, lengths: Lengths, gpu: Gpu, gpus: int
) -> Plan:
    """Plan a process that compiles and does not act."""
    return _playing(
        stage,
        process,
        compiler=config.compiler,
        executor=None,
        concurrency=config.batch,
        lengths=lengths,
        gpu=gpu,
        gpus=gpus,
    )


# remedies -------------------------------------------------------------------------------------------------------------


def remedy(settings: Settings, lengths: Lengths, gpu: Gpu, gpus: int) -> list[str] | None:
    """Find settings with which the stage fits: one change if that is enough, else the first n of them."""
    tried = [*_remedies(settings, lengths, gpus), *_quantised(settings)]
    sets = [*([one] for one in tried), *(tried[:n] for n in range(2, len(tried) + 1))]
    for changes in sets:
        try:
            changed = _with(settings, changes)
        except ValueError:  # incompatible settings
            continue
        if plan(changed, lengths, gpu, gpus).fits(gpu, gpus):
            return [f"{key}={value}" for key, value in changes]
    return None


def _remedies(settings: Settings, lengths: Lengths, gpus: int) -> list[tuple[str, Any]]:
    """List changes that save memory without another model, in the order in which they are tried."""
    room = 1024 * math.ceil((lengths.prompt + lengths.memory + 1024) / 1024)
    wide = {role: getattr(settings, role) for role in ("compiler", "executor") if hasattr(settings, role)}
    narrow = [(f"{role}.dtype", "bfloat16") for role, own in wide.items() if own.dtype == "float32"]
    short = [(f"{role}.vllm.max_model_len", room) for role, own in wide.items() if own.vllm.max_model_len is None]
    small = [(f"{role}.batch_size", n) for n in (16, 4, 1) for role, own in wide.items() if own.batch_size > n]
    trains = isinstance(settings, SftConfig | GrpoConfig)
    again = [("gradient_checkpointing", True)] if trains and not settings.gradient_checkpointing else []
    if isinstance(settings, SftConfig):
        micro = [("micro_batch_size", n) for n in (8, 4, 2, 1) if n < settings.micro_batch_size]
        return [*micro, *again, *([("backend", "fsdp")] if gpus > 1 else []), *narrow]
    if isinstance(settings, GrpoConfig):
        micro = [("micro_batch_size", n) for n in (8, 4, 2, 1) if n < settings.micro_batch_size]
        sliced = [("backend", "fsdp")] if gpus > 1 and settings.compiler.engine == "vllm" else []
        return [*micro, *again, *short, *small, *sliced, *narrow, *_fewer(settings.placement, gpus)]
    spread = [("executor.device_map", "auto")] if gpus > 1 and "executor" in wide else []
    parallel = [(f"{role}.vllm.tensor_parallel_size", gpus) for role in wide if gpus > 1]
    share = [(f"{role}.vllm.gpu_memory_utilization", 0.9) for role in wide]
    return [*small, *spread, *short, *(share if len(wide) == 1 else []), *parallel, *narrow]


def _quantised(settings: Settings) -> list[tuple[str, Any]]:
    """List quantisations of the executor, the last resort because they change its outputs."""
    executor = getattr(settings, "executor", None)
    can_quantise = executor is not None and executor.engine == "hf" and executor.quantize is None
    return [("executor.quantize", bits) for bits in ("8bit", "4bit") if can_quantise]


def _fewer(place: Placement, gpus: int) -> list[tuple[str, Any]]:
    """Replace set counts of processes by the default placement."""
    if gpus < 2 or {place.trainers, place.compilers, place.executors} == {None}:
        return []
    return [("placement", {**place.model_dump(), "trainers": None, "compilers": None, "executors": None})]


def _with(settings: Settings, changes: Sequence[tuple[str, Any]]) -> Any:
    """Change settings by dotted keys. Raises: ValueError, if they are incompatible."""
    tree = settings.model_dump()
    for key, value in changes:
        *way, last = key.split(".")
        node = tree
        for part in way:
            node = node[part]
        node[last] = value
    return type(settings).model_validate(tree)


# parts ----------------------------------------------------------------------------------------------------------------


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


def _trainer(process: str, replay: Replay, backend: str, n: int, host: float) -> Budget:
    """Distribute weights, gradients and moments over `n` processes as the backend does."""
    held, trained = replay.held, 4.0 * replay.trained
    weights, gradients, moments = replay.weights, trained, 2 * trained
    passing = held["activations"] + held["logits"] + held["kv_cache"]
    overhead = CONTEXT + SLACK * passing
    if backend == "zero2":
        gradients, moments = trained + trained / n, 3 * trained / n  # with fp32 master weights
    elif backend in ("fsdp", "zero3"):
        cut = weights - replay.towers
        gathered = replay.root + 2 * replay.layer if backend == "fsdp" else min(cut, ZERO3_LIVE)
        weights, gradients = cut / n + replay.towers + gathered, trained / n
        moments = (3 if backend == "zero3" else 2) * trained / n
    return Budget(
        process,
        process,
        n,
        weights=weights,
        gradients=gradients,
        moments=moments,
        activations=held["activations"],
        logits=held["logits"],
        kv_cache=held["kv_cache"],
        overhead=overhead,
        host=host,
    )


def _alone(process: str, replay: Replay, count: int) -> Budget:
    """Plan engines in PyTorch, each on its own GPU."""
    own = _trainer(process, replay, backend="replicated", n=1, host=HOST)
    return replace(own, count=count, gradients=0.0, moments=0.0)


def _fullest(held: Sequence[Replay]) -> Replay:
    """Combine phases of one process: all weights, and the temporary memory of the fullest phase."""
    passing = ("activations", "logits", "kv_cache")
    at = max((replay.held for replay in held), key=lambda kinds: sum(kinds[kind] for kind in passing))
    together = Counter({kind: size for replay in reversed(held) for kind, size in replay.held.items()})
    together.update({kind: at[kind] - together[kind] for kind in passing})
    return replace(held[0], held=together)


def _playing(
    stage: str,
    process: str,
    compiler: CompilerConfig | None,
    executor: ExecutorConfig | None,
    concurrency: int,
    lengths: Lengths,
    gpu: Gpu,
    gpus: int,
) -> Plan:
    """Plan a process that plays episodes without training, with vLLM engines or models in PyTorch."""
    budgets: list[Budget] = []
    held: list[Replay] = []
    seconds: dict[str, float] = {}
    tokens: dict[str, int] = {}
    spread = 1  # GPUs of the executor's weights
    kv = replace(lengths, emission=compiler.max_new_tokens) if compiler else lengths
    if compiler is not None and compiler.engine != "http":
        width = hidden_size(executor or ExecutorConfig(model=compiler.model))
        rows = min(concurrency, compiler.batch_size)
        replay = replay_compile(compiler, width, kv, rows)
        if compiler.engine == "vllm":
            budgets.append(
                engine_budget("compiler engine", process, settings=compiler, gpu=gpu, sequence=kv.prompt + kv.emission)
            )
        else:
            held.append(replay)
        seconds["compile: prefill"] = concurrency * replay.flops["prefill"] / _products(gpu)
        batches = 1 if compiler.engine == "vllm" else math.ceil(concurrency / compiler.batch_size)
        seconds["compile: decode"] = batches * lengths.emission * replay.weights / _reads(gpu)
        tokens["compiler, reading"] = concurrency * lengths.prompt
        tokens["compiler, writing"] = concurrency * lengths.emission
    if executor is not None and executor.engine in ("hf", "vllm"):
        replay = replay_act(executor, lengths, min(concurrency, executor.batch_size))
        if executor.engine == "vllm":
            sequence = lengths.acting + lengths.action
            budgets.append(engine_budget("executor engine", process, settings=executor, gpu=gpu, sequence=sequence))
        else:
            held.append(replay)
            spread = gpus if executor.device_map else 1
        seconds["act"] = concurrency * replay.flops["act"] / _products(gpu)
        tokens["executor"] = concurrency * lengths.acting
    models = _sizes(compiler, executor)
    if held:
        whole = _fullest(held)
        whole.held["executor weights"] = round(whole.held["executor weights"] / spread)
        own = _trainer(process, whole, backend="replicated", n=1, host=HOST)
        budgets.insert(0, replace(own, gpus=spread, gradients=0.0, moments=0.0))
    roles = [("compiler", compiler), ("executor", executor)]
    who = " and ".join(f"{role} {own.model} ({own.engine})" for role, own in roles if own is not None)
    return Plan(
        stage=stage,
        name=f"{process}: {who or 'no model'}",
        budgets=tuple(budgets),
        disk=_disk(models, 0, 0),
        tokens=tokens,
        episodes=concurrency,
        seconds=seconds,
    )


def _sizes(compiler: CompilerConfig | None, executor: ExecutorConfig | None) -> dict[str, float]:
    """Return the bytes of each local model."""
    local = [one for one in (compiler, executor) if one is not None and one.engine in ("hf", "vllm")]
    return {one.model: weight_bytes(one.model, one.dtype) for one in local}


def _disk(models: Mapping[str, float], trained: int, keep: int) -> dict[str, float]:
    checkpoints = {"checkpoints": 12.0 * trained * (keep + 1)} if trained else {}  # one more during saving
    return {f"model {name}": size for name, size in models.items() if size} | checkpoints


def _products(gpu: Gpu) -> float:
    """Return FLOP/s."""
    return BUSY * gpu.tflops * 1e12


def _reads(gpu: Gpu) -> float:
    """Return bytes/s; they bound decoding, which reads all weights for every token."""
    return READING * gpu.bandwidth * 1e12


def _sees(name: str) -> bool:
    return hasattr(model_config(name), "vision_config")


def _models(config: SftConfig | GrpoConfig) -> str:
    return f"compiler {config.compiler.model}, executor {config.executor.model}"


def _distinct_cells(config: EvalConfig) -> list[EvalConfig]:
    """Return one cell per combination of models, deliveries and concurrency; tasks and seeds need no plan."""
    chosen = {}
    for cell in cells(config):
        own = cell.config
        compiler = own.compiler.model_copy(update={"checkpoint": None})
        chosen.setdefault((repr(compiler), repr(own.executor), own.deliveries, own.concurrency), own)
    return list(chosen.values())
