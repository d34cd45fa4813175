"""Peak memory and FLOPs of training, compiling and acting: their code, run on shapes."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ParamSpec

import torch
from pydantic import BaseModel
from torch import nn
from transformers import DynamicCache

from compiler.records import CompileRequest, Decoding
from configs.models import CompilerConfig, ExecutorConfig
from configs.training import GrpoConfig, SftConfig
from lm.architecture import cache_bytes_per_token, model_config
from lm.backbone import Backbone
from lm.prompt import Prompt
from lm.shared_prefixes import Sharing, prefixes_to_share, tokens_saved
from lm.vision import vision_modules
from memory.entry import MemoryEntry, Provenance
from plan.budget import Lengths
from plan.models import (
    MEMORY,
    WORD,
    ShapedCompiler,
    ShapedExecutor,
    prompt_of,
    shaped_compiler,
    shaped_executor,
)
from plan.shapes import Ledger
from training.grpo import GrpoTrainer
from training.rollout import ActionSample, Sample
from training.sft_data import Example
from training.sft_losses import sft_losses
from training.trainer import prefix_sharing

P = ParamSpec("P")
MODELS = ("hf", "vllm", "http")  # executor engines with a named model


@dataclass(frozen=True, slots=True)
class Replay:
    """Bytes by kind at the fullest moment (`activations`, `logits`, weights by role, ...), FLOPs by phase, and sizes of
    the parts that a backend slices."""

    held: Counter[str]
    flops: dict[str, float]
    trained: int = 0  # parameters
    layer: float = 0.0  # bytes of the largest block
    root: float = 0.0  # bytes outside of blocks and vision towers
    towers: float = 0.0  # bytes of vision towers
    read: float = 0.0  # tokens that a trained compiler reads for a row, those of a shared prefix in equal parts

    @property
    def weights(self) -> float:
        return sum(size for kind, size in self.held.items() if kind.endswith(("weights", "projector")))

    @property
    def total(self) -> int:
        return self.held.total()


# Settings that no replay reads: chains and evaluations that differ in these alone share their replays.
UNREAD: Any = {
    **dict.fromkeys(("rows", "env", "memory", "leakage", "parts", "checkpoint", "backend", "max_staleness"), True),
    "compiler": {"checkpoint": True},
}


REPLAYS: dict[str, Replay] = {}
"""Results of finished replays, by function and settings."""


def cached_by_settings(function: Callable[P, Replay]) -> Callable[P, Replay]:
    """Keep results in `REPLAYS` by the arguments' repr, because settings are not hashable; without what no replay
    reads."""
    key_of = lambda given: repr(given.model_dump(exclude=UNREAD) if isinstance(given, BaseModel) else given)

    @functools.wraps(function)
    def cached(*args: P.args, **kwargs: P.kwargs) -> Replay:
        given = [key_of(value) for value in args], {name: key_of(value) for name, value in kwargs.items()}
        key = repr((function.__name__, given))
        if key not in REPLAYS:
            REPLAYS[key] = function(*args, **kwargs)
        return REPLAYS[key]

    return cached


@cached_by_settings
def replay_sft(config: SftConfig, lengths: Lengths, rows: int, gpu: bool = True) -> Replay:
    """Run loss and backward pass of a micro-batch of `rows`, with gradients and moments allocated."""
    ledger = Ledger(gpu)
    executor = shaped_executor(config.executor, ledger)
    decoding = Decoding()
    compiler = shaped_compiler(config.compiler, executor.backbone.hidden_size, ledger, decoding)
    compiler.projector.requires_grad_(config.soft)
    _optimiser_state(compiler, ledger)
    examples = episode_rows(config, lengths, rows)
    compiler.train()
    if config.gradient_checkpointing:
        compiler.backbone.enable_gradient_checkpointing()
        executor.backbone.enable_gradient_checkpointing()
    ledger.restart()
    sharing = prefix_sharing(config, compiler)
    losses = sft_losses(compiler, executor, examples, config, sharing=sharing)
    forward = ledger.flops
    terms = [getattr(config.weights, name) * value.sum() / rows for name, value in losses.items()]
    sum(terms, torch.tensor(0.0)).backward()
    flops = {
        "compiler forward": forward - executor.flops,
        "executor forward": executor.flops,
        "backward": ledger.flops - forward,
    }
    replay = _replayed(ledger, {name: f / rows for name, f in flops.items()}, compiler, executor)
    return replace(replay, read=tokens_per_row(compiler, examples, sharing))


@cached_by_settings
def replay_update(config: GrpoConfig, lengths: Lengths, rows: int, gpu: bool = True) -> Replay:
    """Run GRPO's update on a micro-batch of `rows` samples; with a pathwise gradient, through the executor."""
    ledger, pathwise = Ledger(gpu), config.loss.latent_gradient == "pathwise"
    alone: GrpoConfig = config.model_copy(update={"backend": "replicated", "max_staleness": 0})
    stub: Any = shaped_executor(config.executor, ledger) if pathwise else NoExecutor()
    width = stub.backbone.hidden_size if pathwise else hidden_size(config.executor)
    compiler = shaped_compiler(config.compiler, width, ledger, Decoding())
    engine: Any = SimpleNamespace(served=None, environment="")  # no episode is played
    trainer = GrpoTrainer(
        config=alone, compiler=compiler, executor=stub, engine=engine, specs=[engine], out=Path("nowhere")
    )
    _optimiser_state(compiler, ledger)
    samples = samples_of(config, lengths, rows, width)
    ledger.restart()
    trainer.learn(samples)
    replay = _replayed(ledger, {"update": ledger.flops / rows}, compiler, stub if pathwise else None)
    return replace(replay, read=tokens_per_row(compiler, samples, trainer.sharing))


@cached_by_settings
def replay_compile(config: CompilerConfig, width: int, lengths: Lengths, rows: int) -> Replay:
    """Compile `rows` requests: prefill, one token of the emission, and the memory tokens. Further tokens add to the
    cache only, which counts as `kv_cache` at its full length."""
    ledger = Ledger()
    compiler = shaped_compiler(config, width, ledger, Decoding(max_new_tokens=1, batch_size=rows))
    compiler.prompt = prompt_of(lengths.prompt)
    ledger.restart()
    compiler.compile(requests_of(rows))
    read = lengths.prompt + 1 + compiler.n_tokens
    flops = {"prefill": ledger.flops / rows}
    full = lengths.prompt + lengths.emission + compiler.n_tokens
    return _with_cache(_replayed(ledger, flops, compiler, None), compiler.backbone, rows=rows, read=read, full=full)


@cached_by_settings
def replay_act(config: ExecutorConfig, lengths: Lengths, rows: int) -> Replay:
    """Act on `rows` prompts: score all candidates, or prefill and generate."""
    ledger = Ledger()
    executor = shaped_executor(config, ledger)
    prompts = prompts_of(lengths.acting, rows)
    ledger.restart()
    with torch.no_grad():
        if executor.mode == "choice":
            executor.candidate_logprobs(prompts, [commands(lengths)] * rows)
            return _replayed(ledger, {"act": ledger.flops / rows}, None, executor)
        backbone = executor.backbone
        batch = backbone.pad(prompts, "left")
        cache = DynamicCache(config=backbone.model.config.get_text_config())
        hidden = backbone.hidden(batch, cache, executor.embed(batch.tokens, prompts))
        backbone.logits(hidden[:, -1:])
    replay = _replayed(ledger, {"act": ledger.flops / rows}, None, executor)
    return _with_cache(replay, backbone, rows=rows, read=lengths.acting, full=lengths.acting + config.max_new_tokens)


# inputs --------------------------------------------------------------------------------------------------------------


def episode_rows(config: SftConfig, lengths: Lengths, rows: int) -> list[Example]:
    """Create a micro-batch of SFT."""
    n = config.compiler.soft.n_tokens
    prompts = prompts_with_memory(lengths, rows, lengths.steps)
    acting = prompts_of(max(lengths.acting, n), rows, n * config.soft)
    emission, action, memory = ((WORD,) * tokens for tokens in (lengths.emission, lengths.action, lengths.memory))
    return [
        Example(prompt=p, emission=emission, executor_prompt=a, action=action, memory_ids=memory, soft_read=True)
        for p, a in zip(prompts, acting, strict=True)
    ]


def samples_of(config: GrpoConfig, lengths: Lengths, rows: int, width: int) -> list[Sample]:
    """Create a micro-batch of GRPO, for an executor of this width."""
    n, pathwise = config.compiler.soft.n_tokens, config.loss.latent_gradient == "pathwise"
    acting, z = prompt_of(max(lengths.acting, n), n), torch.zeros(n, width)
    action = (
        ActionSample(prompt=acting, candidates=commands(lengths), chosen=0, noise=z, logprob=0.0) if pathwise else None
    )
    sampled = torch.zeros(lengths.emission + (1 if pathwise else n))
    return [
        Sample(
            prompt=prompt,
            emission=(WORD,) * lengths.emission,
            z=z,
            rollout_logprobs=sampled,
            sampled=lengths.emission,
            advantage=1.0,
            episode=i,
            weight_version=0,
            action=action,
        )
        for i, prompt in enumerate(prompts_with_memory(lengths, rows, lengths.steps * config.group_size))
    ]


def requests_of(rows: int) -> list[CompileRequest]:
    """Create requests without common memory entries, so that no prefix is shared."""
    entries = [
        MemoryEntry(f"{i}", "", Provenance(task_id="", scene="", goal="", split="", success=True)) for i in range(rows)
    ]
    return [CompileRequest("", (entry,), None, "") for entry in entries]


def commands(lengths: Lengths) -> tuple[str, ...]:
    """Create admissible commands without common tokens."""
    return tuple(f"{i}:{lengths.action}" for i in range(lengths.candidates))


def prompts_of(tokens: int, rows: int, soft: int = 0) -> list[Prompt]:
    """Create a batch of prompts; of several rows one is shorter, so that there is a mask."""
    return [prompt_of(max(tokens - (i == 0 and rows > 1), soft), soft) for i in range(rows)]


def prompts_with_memory(lengths: Lengths, rows: int, together: int) -> list[Prompt]:
    """Create the compiler's prompts of a batch, of which `together` in sequence begin with the same memory."""
    memory = min(lengths.memory, lengths.prompt - 2)
    sizes = [len(prompt.ids) - memory for prompt in prompts_of(lengths.prompt, rows)]
    return [Prompt((WORD + i // together,) * memory + (WORD + rows + i,) * own) for i, own in enumerate(sizes)]


def tokens_per_row(compiler: ShapedCompiler, rows: Sequence[Example] | Sequence[Sample], sharing: Sharing) -> float:
    """Count the tokens that the compiler reads in a micro-batch, by row."""
    prompts = [row.prompt for row in rows]
    whole = [row.prompt.extended((*row.emission, *(MEMORY,) * compiler.n_tokens)) for row in rows]
    saved = tokens_saved(prefixes_to_share(compiler.backbone, prompts, whole, sharing))
    return (sum(len(row.ids) for row in whole) - saved) / len(rows)


# models --------------------------------------------------------------------------------------------------------------


def hidden_size(config: ExecutorConfig) -> int:
    """Return the width of an executor's embeddings; 1 for an executor without a named model."""
    return model_config(config.model).get_text_config().hidden_size if config.engine in MODELS else 1


class NoExecutor:
    """Executor of an update that does not run it."""

    accepts_soft = True

    def hash(self) -> str:
        return ""


def _optimiser_state(compiler: ShapedCompiler, ledger: Ledger) -> None:
    """Allocate gradients and AdamW's two moments of every trained parameter."""
    trained = [p for p in compiler.parameters() if p.requires_grad]
    for parameter in trained:
        with ledger.named("gradients"):
            parameter.grad = torch.zeros_like(parameter)
        with ledger.named("moments"):
            parameter._moments = [torch.zeros_like(parameter) for _ in range(2)]  # type: ignore[attr-defined]


def _with_cache(replay: Replay, backbone: Backbone, rows: int, read: int, full: int) -> Replay:
    """Move keys and values of the `read` tokens from activations to `kv_cache`, at the `full` length."""
    per_token = rows * cache_bytes_per_token(backbone.model.config.get_text_config(), str(backbone.model.dtype)[6:])
    held = replay.held.copy()
    held["activations"] = max(0, held["activations"] - per_token * read)
    held["kv_cache"] = per_token * full
    return replace(replay, held=held)


def _replayed(
    ledger: Ledger, flops: dict[str, float], compiler: ShapedCompiler | None, executor: ShapedExecutor | None
) -> Replay:
    models = [part.backbone for part in (compiler, executor) if part is not None]
    size: Callable[[nn.Module], int] = lambda m: sum(p.nbytes for p in m.parameters())
    blocks = [_blocks(backbone) for backbone in models]
    towers = [size(part) for backbone in models for part in vision_modules(backbone.model).values()]
    inside = sum(size(block) for found in blocks for block in found) + sum(towers)
    trained = sum(p.numel() for p in compiler.parameters() if p.requires_grad) if compiler is not None else 0
    whole = sum(size(backbone.model) for backbone in models)
    layer = max((size(block) for found in blocks for block in found), default=0)
    return Replay(
        held=ledger.peak.copy(), flops=flops, trained=trained, layer=layer, root=whole - inside, towers=sum(towers)
    )


def _blocks(backbone: Backbone) -> list[nn.Module]:
    return list(getattr(backbone.model.get_decoder(), "layers", ()))
