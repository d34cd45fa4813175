"""What each stage's processes need, by its settings: one function per stage, and what would make it fit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agent.deliveries import find
from configs.collect import CollectConfig
from configs.evaluation import EvalConfig, QuickstartConfig
from configs.models import CompilerConfig, ExecutorConfig, ServeConfig
from configs.training import GrpoConfig, Placement, SftConfig
from eval.matrix import cells
from plan.budget import GIB, Budget, Gpu, Lengths, Plan
from plan.engines import HOST, engine, laid_out, said
from plan.models import model_config
from plan.replay import (
    MODELS,
    Replay,
    hidden_size,
    replay_act,
    replay_compile,
    replay_engine,
    replay_sft,
    replay_update,
)
from training.on_ray import Share

CONTEXT = 1.0 * GIB  # a process's CUDA context and libraries
SLACK = 0.05  # of what comes and goes, that the allocator cannot use again
PIXELS = 1.0 * GIB  # RAM for pictures of rows (training.sft.MOST_PIXELS)
ZERO3_LIVE = 2e9  # bytes of gathered weights that ZeRO-3 keeps (its default of 1e9 parameters, in bf16)
BUSY, READING = 0.4, 0.6  # shares of a GPU's products and bandwidth that are reached

Settings = SftConfig | GrpoConfig | EvalConfig | CollectConfig | ServeConfig


def plans(settings: Settings | QuickstartConfig, lengths: Lengths, gpu: Gpu, gpus: int) -> list[tuple[Any, Plan]]:
    """Plan a run: its settings with their plan, several where it has several parts or cells of different models."""
    if isinstance(settings, QuickstartConfig):
        parts = (settings.collect, settings.sft, settings.grpo, settings.eval)
        return [pair for part in parts if part is not None for pair in plans(part, lengths, gpu, gpus)]
    parts = _unlike(settings) if isinstance(settings, EvalConfig) else [settings]
    return [(part, plan(part, lengths, gpu, gpus)) for part in parts]


def plan(settings: Settings, lengths: Lengths, gpu: Gpu, gpus: int) -> Plan:
    """Plan one stage."""
    stages: dict[type, Callable[..., Plan]] = {
        SftConfig: plan_sft,
        GrpoConfig: plan_grpo,
        EvalConfig: plan_eval,
        CollectConfig: plan_collect,
        ServeConfig: plan_serve,
    }
    return stages[type(settings)](settings, lengths, gpu, gpus)


def plan_sft(config: SftConfig, lengths: Lengths, gpu: Gpu, gpus: int) -> Plan:
    """Stage 1: every process holds both models, or a slice of them."""
    mine = math.ceil(config.batch_size / gpus)
    replay = replay_sft(config, lengths, min(config.micro_batch_size, mine))
    if played := min(config.evaluation.tasks, config.compiler.batch_size):  # now and then, by the same models
        longest = replace(lengths, emission=config.compiler.max_new_tokens)
        compiling = replay_compile(config.compiler, hidden_size(config.executor), longest, played)
        acting = replay_act(config.executor, lengths, min(config.evaluation.tasks, config.executor.batch_size))
        replay = _fullest([replay, compiling, acting])
    models = _sizes(config.compiler, config.executor)
    # Models are read where they stay; where slices are given out, one process has both at first: each its part of them.
    read = replay.weights / gpus if config.backend in ("fsdp", "zero3") else 0.0
    host = HOST + read + (PIXELS if _sees(config.compiler.model) else 0)
    budget = _trainer("trainer", replay, config.backend, gpus, host)
    n = config.compiler.soft.n_tokens if config.soft else 0
    return Plan(
        "sft",
        f"SFT, {_who(config)}, micro-batches of {min(config.micro_batch_size, mine)}, backend {config.backend}",
        (budget,),
        _disk(models, replay.trained, config.keep),
        {
            "compiler": config.batch_size * (lengths.prompt + lengths.emission + n),
            "executor": config.batch_size * (lengths.acting + lengths.action) * config.soft,
        },
        0,
        {name: mine * flops / _products(gpu) for name, flops in replay.flops.items()},
    )


def plan_grpo(config: GrpoConfig, lengths: Lengths, gpu: Gpu, gpus: int) -> Plan:
    """Stage 2: on one GPU as in one process, on several as `cluster: ray` lays it out (`plan.engines`)."""
    place = laid_out(config, lengths, gpu, gpus)
    trainers, rolls, acts = place.trainers.count, place.compilers, place.executors
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
        budgets.append(engine("rollout engine", "rollouts", config.compiler, gpu, lengths_kv, rolls))
    elif rolls.count:
        budgets.append(_alone("rollout engine", compiling, rolls.count))
    elif config.compiler.engine == "vllm":
        budgets.append(engine("rollout engine", "actors", config.compiler, gpu, lengths_kv, Share(trainers)))
    else:
        held.append(compiling)
    if acts.count and config.executor.engine == "vllm":
        budgets.append(engine("executor", "executors", config.executor, gpu, lengths, acts))
    elif acts.count and acting is not None:
        budgets.append(_alone("executor", acting, acts.count))
    elif config.executor.engine == "vllm":
        budgets.append(engine("executor", "actors", config.executor, gpu, lengths, Share(trainers)))
    elif config.executor.engine == "hf" and acting is not None:
        held.append(acting)
    fullest = _fullest(held)
    whole = fullest.held.pop("executor weights", 0)  # it is not cut into slices
    sliced, served = config.backend in ("fsdp", "zero3"), bool(rolls.count) or config.compiler.engine == "vllm"
    if not served:  # a whole copy of the compiler rolls out
        whole += update.held["compiler weights"] * (sliced or config.overlap)
    read = update.held["compiler weights"] / trainers if served and sliced else 0.0  # as in SFT
    actor = _trainer("actor", fullest, config.backend, trainers, HOST + read)
    # A compiler of which a whole copy rolls out is loaded whole, and cut then.
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
        "grpo",
        f"GRPO, {_who(config)}, placement {trainers} + {rolls.count} + {acts.count}",
        (actor, *budgets),
        _disk(models, update.trained, config.keep),
        {
            "compiler, reading": steps * lengths.prompt,
            "compiler, writing": steps * lengths.emission,
            "executor": steps * lengths.acting,
            "update": steps * (lengths.prompt + lengths.emission + config.compiler.soft.n_tokens),
        },
        min(episodes, config.concurrency * trainers),
        seconds,
        (said(place), f"an update of {episodes} episodes of {config.max_steps} steps, the most that there are"),
    )


def plan_eval(config: EvalConfig, lengths: Lengths, gpu: Gpu, gpus: int) -> Plan:
    """Evaluate: one process with the executor and, where a delivery asks for it, the trained compiler."""
    specs = [find(name) for name in config.deliveries]
    compiles = any(spec.needs_checkpoint for spec in specs)
    if any(spec.kind == "static" for spec in specs):  # the longest prompt counts
        lengths = replace(lengths, acting=lengths.acting + lengths.memory)
    compiler = config.compiler if compiles else None
    return _playing("eval", "evaluation", compiler, config.executor, config.concurrency, lengths, gpu, gpus)


def plan_collect(config: CollectConfig, lengths: Lengths, gpu: Gpu, gpus: int) -> Plan:
    """Collect: a model runs here only where the executor acts while an endpoint teaches."""
    executor = config.executor if config.acts == "executor" else None
    return _playing("collect", "collection", None, executor, config.concurrency or 16, lengths, gpu, gpus)


def plan_serve(config: ServeConfig, lengths: Lengths, gpu: Gpu, gpus: int) -> Plan:
    """Serve the compiler."""
    return _playing("serve", "service", config.compiler, None, config.batch, lengths, gpu, gpus)


# remedies -------------------------------------------------------------------------------------------------------------


def remedy(settings: Settings, lengths: Lengths, gpu: Gpu, gpus: int) -> list[str] | None:
    """Find settings with which it would fit: one where one is enough, else as many as it takes, in this order."""
    tried = [*_remedies(settings, lengths, gpus), *_coarser(settings)]
    sets = [*([one] for one in tried), *(tried[:n] for n in range(2, len(tried) + 1))]
    for changes in sets:
        try:
            changed = _with(settings, changes)
        except ValueError:  # settings that do not go together
            continue
        if plan(changed, lengths, gpu, gpus).fits(gpu, gpus):
            return [f"{key}={value}" for key, value in changes]
    return None


def _remedies(settings: Settings, lengths: Lengths, gpus: int) -> list[tuple[str, Any]]:
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


def _coarser(settings: Settings) -> list[tuple[str, Any]]:
    """Quantise the frozen executor, at last: it is another one then."""
    executor = getattr(settings, "executor", None)
    apt = executor is not None and executor.engine == "hf" and executor.quantize is None
    return [("executor.quantize", bits) for bits in ("8bit", "4bit") if apt]


def _fewer(place: Placement, gpus: int) -> list[tuple[str, Any]]:
    """Have the GPUs that there are shared out, whatever was asked for."""
    if gpus < 2 or {place.trainers, place.compilers, place.executors} == {None}:
        return []
    return [("placement", {**place.model_dump(), "trainers": None, "compilers": None, "executors": None})]


def _with(settings: Settings, changes: Sequence[tuple[str, Any]]) -> Any:
    """Change settings by dotted keys. Raises: ValueError, where they do not go together."""
    tree = settings.model_dump()
    for key, value in changes:
        *way, last = key.split(".")
        node = tree
        for part in way:
            node = node[part]
        node[last] = value
    return type(settings).model_validate(tree)


# parts ----------------------------------------------------------------------------------------------------------------


def _trainer(process: str, replay: Replay, backend: str, n: int, host: float) -> Budget:
    """Share weights, gradients and moments out over `n` processes, as the backend does."""
    held, trained = replay.held, 4.0 * replay.trained
    weights, gradients, moments = replay.weights, trained, 2 * trained
    passing = held["activations"] + held["logits"] + held["kv_cache"]
    overhead = CONTEXT + SLACK * passing
    if backend == "zero2":
        gradients, moments = trained + trained / n, 3 * trained / n  # with fp32 masters
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
    """Say what an engine in PyTorch takes, each on a GPU of its own."""
    own = _trainer(process, replay, "replicated", 1, HOST)
    return replace(own, count=count, gradients=0.0, moments=0.0)


def _fullest(held: Sequence[Replay]) -> Replay:
    """Put what runs in one process, one after another, together: all weights, and what the fullest of them holds."""
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
    """Plan a process that plays episodes without learning: engines of its own, or models in PyTorch."""
    budgets: list[Budget] = []
    held: list[Replay] = []
    seconds: dict[str, float] = {}
    tokens: dict[str, int] = {}
    spread = 1  # GPUs that the executor's weights lie on
    kv = replace(lengths, emission=compiler.max_new_tokens) if compiler else lengths
    if compiler is not None and compiler.engine != "http":
        width = hidden_size(executor or ExecutorConfig(model=compiler.model))
        rows = min(concurrency, compiler.batch_size)
        replay = replay_compile(compiler, width, kv, rows)
        if compiler.engine == "vllm":
            budgets.append(engine("compiler engine", process, compiler, gpu, kv))
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
            budgets.append(engine("executor engine", process, executor, gpu, lengths))
        else:
            held.append(replay)
            spread = gpus if executor.device_map else 1
        seconds["act"] = concurrency * replay.flops["act"] / _products(gpu)
        tokens["executor"] = concurrency * lengths.acting
    models = _sizes(compiler, executor)
    if held:
        whole = _fullest(held)
        whole.held["executor weights"] = round(whole.held["executor weights"] / spread)
        own = _trainer(process, whole, "replicated", 1, HOST)
        budgets.insert(0, replace(own, gpus=spread, gradients=0.0, moments=0.0))
    roles = [("compiler", compiler), ("executor", executor)]
    who = " and ".join(f"{role} {own.model} ({own.engine})" for role, own in roles if own is not None)
    return Plan(
        stage, f"{process}: {who or 'no model'}", tuple(budgets), _disk(models, 0, 0), tokens, concurrency, seconds
    )


def _sizes(compiler: CompilerConfig | None, executor: ExecutorConfig | None) -> dict[str, float]:
    """Give the bytes of each model that lies here."""
    sizes = {}
    for settings in (compiler, executor):
        if settings is not None and settings.engine in ("hf", "vllm"):
            sizes[settings.model] = replay_engine(settings.model, settings.dtype, 1).weights
    return sizes or {"": 0.0}


def _disk(models: Mapping[str, float], trained: int, keep: int) -> dict[str, float]:
    checkpoints = {"checkpoints": 12.0 * trained * (keep + 1)} if trained else {}  # one more while it is written
    return {f"model {name}": size for name, size in models.items() if size} | checkpoints


def _products(gpu: Gpu) -> float:
    """FLOPs in a second."""
    return BUSY * gpu.tflops * 1e12


def _reads(gpu: Gpu) -> float:
    """Bytes in a second, that decoding is bound by: every token reads all weights."""
    return READING * gpu.bandwidth * 1e12


def _sees(name: str) -> bool:
    return hasattr(model_config(name), "vision_config")


def _who(config: SftConfig | GrpoConfig) -> str:
    return f"compiler {config.compiler.model}, executor {config.executor.model}"


def _unlike(config: EvalConfig) -> list[EvalConfig]:
    """Choose a cell of each set of models and of how they run; deliveries, tasks and seeds need no more."""
    chosen = {}
    for cell in cells(config):
        own = cell.config
        compiler = own.compiler.model_copy(update={"checkpoint": None})
        chosen.setdefault((repr(compiler), repr(own.executor), own.deliveries, own.concurrency), own)
    return list(chosen.values())
