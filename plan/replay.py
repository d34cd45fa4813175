"""The code of training, compiling and acting, run on shapes: what it would allocate at most, and its FLOPs."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ParamSpec

import torch
from torch import nn
from transformers import DynamicCache

from compiler.records import CompileRequest, Decoding
from configs.models import CompilerConfig, ExecutorConfig
from configs.training import GrpoConfig, SftConfig
from lm.backbone import Backbone
from lm.device import dtype_of
from lm.prompt import Prompt
from lm.vision import vision_parts
from memory.entry import MemoryEntry, Provenance
from plan.budget import Lengths
from plan.models import (
    WORD,
    ShapedBackbone,
    ShapedCompiler,
    ShapedExecutor,
    model_config,
    prompt_of,
    shaped_compiler,
    shaped_executor,
)
from plan.shapes import Ledger
from training.grpo import GrpoTrainer
from training.rollout import Draw, Sample
from training.sft import Example, sft_losses

P = ParamSpec("P")
MODELS = ("hf", "vllm", "http")  # engines of executors that are models whose name is known
CHUNK = 8192  # tokens that vLLM reads at once at most, with which it measures itself when it starts


@dataclass(frozen=True, slots=True)
class Replay:
    """Bytes by kind at the fullest moment (`activations`, `logits`, and what stays: weights by role, ...), FLOPs by
    phase, and of the models what can be cut into slices."""

    held: Counter[str]
    flops: dict[str, float]
    trained: int = 0  # parameters
    layer: float = 0.0  # bytes of the largest block
    root: float = 0.0  # bytes outside of blocks and vision towers
    towers: float = 0.0  # bytes of vision towers

    @property
    def weights(self) -> float:
        return sum(size for kind, size in self.held.items() if kind.endswith(("weights", "projector")))

    @property
    def total(self) -> int:
        return self.held.total()


def remembered(function: Callable[P, Replay]) -> Callable[P, Replay]:
    """Keep what it gave, by the arguments as they read: settings hold mappings, which cannot be keys."""
    known: dict[str, Replay] = {}

    @functools.wraps(function)
    def asked(*args: P.args, **kwargs: P.kwargs) -> Replay:
        key = repr((args, kwargs))
        if key not in known:
            known[key] = function(*args, **kwargs)
        return known[key]

    return asked


@remembered
def replay_sft(config: SftConfig, lengths: Lengths, rows: int, gpu: bool = True) -> Replay:
    """Run the loss of a micro-batch of `rows` and its backward pass, gradients and moments being there already."""
    ledger = Ledger(gpu)
    executor = shaped_executor(config.executor, ledger)
    decoding = Decoding()
    compiler = shaped_compiler(config.compiler, executor.backbone.hidden_size, ledger, decoding)
    compiler.projector.requires_grad_(config.soft)
    _optimiser_state(compiler, ledger)
    examples = rows_of(config, lengths, rows)
    compiler.train()
    if config.gradient_checkpointing:
        compiler.backbone.recompute_layers()
        executor.backbone.recompute_layers()
    ledger.restart()
    losses = sft_losses(compiler, executor, examples, config)
    forward = ledger.flops
    terms = [getattr(config.weights, name) * value.sum() / rows for name, value in losses.items()]
    sum(terms, torch.tensor(0.0)).backward()
    flops = {
        "compiler forward": forward - executor.flops,
        "executor forward": executor.flops,
        "backward": ledger.flops - forward,
    }
    return _replayed(ledger, {name: f / rows for name, f in flops.items()}, compiler, executor)


@remembered
def replay_update(config: GrpoConfig, lengths: Lengths, rows: int, gpu: bool = True) -> Replay:
    """Run GRPO's update on a micro-batch of `rows` samples; with a pathwise gradient, the executor is there, too."""
    ledger, pathwise = Ledger(gpu), config.loss.latent_gradient == "pathwise"
    alone: GrpoConfig = config.model_copy(update={"backend": "replicated", "overlap": False})
    stub: Any = shaped_executor(config.executor, ledger) if pathwise else NoExecutor()
    width = stub.backbone.hidden_size if pathwise else hidden_size(config.executor)
    compiler = shaped_compiler(config.compiler, width, ledger, Decoding())
    nobody: Any = None  # plays nothing here
    trainer = GrpoTrainer(alone, compiler, stub, nobody, [nobody], Path("nowhere"))
    _optimiser_state(compiler, ledger)
    samples = samples_of(config, lengths, rows, width)
    ledger.restart()
    trainer.learn(samples)
    return _replayed(ledger, {"update": ledger.flops / rows}, compiler, stub if pathwise else None)


@remembered
def replay_compile(config: CompilerConfig, width: int, lengths: Lengths, rows: int) -> Replay:
    """Compile `rows` requests: the prompts are read, and one token and the memory tokens are. The rest of an emission
    adds to the cache alone, which is counted as `kv_cache` at its full length."""
    ledger = Ledger()
    compiler = shaped_compiler(config, width, ledger, Decoding(max_new_tokens=1, batch_size=rows))
    compiler.prompt = prompt_of(lengths.prompt)
    ledger.restart()
    compiler.compile(requests_of(rows))
    read = lengths.prompt + 1 + compiler.n_tokens
    flops = {"prefill": ledger.flops / rows}
    full = lengths.prompt + lengths.emission + compiler.n_tokens
    return _with_cache(_replayed(ledger, flops, compiler, None), compiler.backbone, rows, read, full)


@remembered
def replay_act(config: ExecutorConfig, lengths: Lengths, rows: int) -> Replay:
    """Act on `rows` prompts: score all candidates, or read the prompt and write from a cache."""
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
    return _with_cache(replay, backbone, rows, lengths.acting, lengths.acting + config.max_new_tokens)


@remembered
def replay_engine(name: str, dtype: str, rows: int) -> Replay:
    """Read a chunk of tokens as an engine does when it starts, with logits for `rows` of them."""
    ledger = Ledger()
    backbone = ShapedBackbone(name, dtype_of(dtype), ledger, "weights")
    ledger.restart()
    with torch.no_grad():
        hidden = backbone.hidden(backbone.pad([prompt_of(CHUNK)], "right"))
        backbone.logits(hidden[0, :rows]).float().log_softmax(-1)
    return _replayed(ledger, {"prefill": ledger.flops / CHUNK}, None, None)


# what is replayed ----------------------------------------------------------------------------------------------------


def rows_of(config: SftConfig, lengths: Lengths, rows: int) -> list[Example]:
    """Make a micro-batch of SFT."""
    n = config.compiler.soft.n_tokens
    prompts, acting = prompts_of(lengths.prompt, rows), prompts_of(max(lengths.acting, n), rows, n * config.soft)
    emission, action, memory = ((WORD,) * tokens for tokens in (lengths.emission, lengths.action, lengths.memory))
    return [Example(p, emission, a, action, memory, True) for p, a in zip(prompts, acting, strict=True)]


def samples_of(config: GrpoConfig, lengths: Lengths, rows: int, width: int) -> list[Sample]:
    """Make a micro-batch of GRPO, for an executor of this width."""
    n, pathwise = config.compiler.soft.n_tokens, config.loss.latent_gradient == "pathwise"
    acting, z = prompt_of(max(lengths.acting, n), n), torch.zeros(n, width)
    draw = Draw(acting, commands(lengths), 0, z, 0.0) if pathwise else None
    sampled = torch.zeros(lengths.emission + (1 if pathwise else n))
    return [
        Sample(prompt, (WORD,) * lengths.emission, z, sampled, lengths.emission, 1.0, i, 0, draw)
        for i, prompt in enumerate(prompts_of(lengths.prompt, rows))
    ]


def requests_of(rows: int) -> list[CompileRequest]:
    """Make requests without a memory in common, so that each is read whole."""
    entries = [MemoryEntry(f"{i}", "", Provenance("", "", "", "", True)) for i in range(rows)]
    return [CompileRequest("", (entry,), None, "") for entry in entries]


def commands(lengths: Lengths) -> tuple[str, ...]:
    """Name the admissible commands, which have no tokens in common."""
    return tuple(f"{i}:{lengths.action}" for i in range(lengths.candidates))


def prompts_of(tokens: int, rows: int, soft: int = 0) -> list[Prompt]:
    """Make a batch of prompts. Rows never are equally long: one is shorter, so that there is a mask."""
    return [prompt_of(max(tokens - (i == 0 and rows > 1), soft), soft) for i in range(rows)]


# what is asked of models ---------------------------------------------------------------------------------------------


def hidden_size(config: ExecutorConfig) -> int:
    """Say the width of an executor's embeddings; of one without a model of its own, some."""
    return model_config(config.model).get_text_config().hidden_size if config.engine in MODELS else 1


def cache_per_token(text: Any, dtype: str) -> int:
    """Count the bytes of keys and values of a token, over all layers that attend to all tokens."""
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    heads = text.num_key_value_heads or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * sum(kind != "linear_attention" for kind in kinds) * heads * width * dtype_of(dtype).itemsize


class NoExecutor:
    """Stands where an update asks for an executor and never runs it."""

    accepts_soft = True

    def hash(self) -> str:
        return ""


def _optimiser_state(compiler: ShapedCompiler, ledger: Ledger) -> None:
    """Give every trained parameter its gradient and AdamW's two moments."""
    trained = [p for p in compiler.parameters() if p.requires_grad]
    for parameter in trained:
        with ledger.named("gradients"):
            parameter.grad = torch.zeros_like(parameter)
        with ledger.named("moments"):
            parameter._moments = [torch.zeros_like(parameter) for _ in range(2)]  # type: ignore[attr-defined]


def _with_cache(replay: Replay, backbone: Backbone, rows: int, read: int, full: int) -> Replay:
    """Take the keys and values of what was `read` out of the activations; count them at the `full` length."""
    per_token = rows * cache_per_token(backbone.model.config.get_text_config(), str(backbone.model.dtype)[6:])
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
    towers = [size(part) for backbone in models for part in vision_parts(backbone.model).values()]
    inside = sum(size(block) for found in blocks for block in found) + sum(towers)
    trained = sum(p.numel() for p in compiler.parameters() if p.requires_grad) if compiler is not None else 0
    whole = sum(size(backbone.model) for backbone in models)
    layer = max((size(block) for found in blocks for block in found), default=0)
    return Replay(ledger.peak.copy(), flops, trained, layer, whole - inside, sum(towers))


def _blocks(backbone: Backbone) -> list[nn.Module]:
    return list(getattr(backbone.model.get_decoder(), "layers", ()))
