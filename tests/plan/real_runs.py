"""Real steps on a CPU beside `memcompiler plan`'s prediction of their peak memory.

Measured are torch's allocations beyond weights and moments, which are added on both sides for the total.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.gpu.models import ModelPair
from benchmarks.measurement import peak_bytes, resident_bytes
from compiler.build import load_compiler
from compiler.hf import MemoryCompiler
from configs.load import load_config
from configs.training import GrpoConfig, SftConfig
from envs.spec import ExecutorInstructions
from executor.build import load_frozen
from executor.hf import FrozenExecutor
from plan import replay
from plan.budget import Lengths
from plan.models import END, MEMORY, PAD, ShapedBackbone, prompt_of
from plan.replay import Replay
from training.backend import Replicated
from training.grpo import GrpoTrainer
from training.sft import sft_losses
from zoo.models import save

TRANSIENT = ("activations", "logits", "kv_cache", "gradients")


@dataclass(frozen=True, slots=True)
class Check:
    """Predicted and measured peak bytes: in total, and transient ones only."""

    total: tuple[float, float]
    transient: tuple[float, float]


def check_sft(pair: ModelPair, lengths: Lengths) -> Check:
    """Take an SFT step of two micro-batches, after one that allocates AdamW's moments."""
    config = load_config(SftConfig, "sft/paper", pair.settings("batch_size=1000"))
    compiler, executor = _models(config)
    backend = Replicated(compiler, executor.model, config.optimizer, with_projector=True)
    compiler.train()
    examples = replay.episode_rows(config, lengths, pair.rows)
    if config.gradient_checkpointing:
        compiler.backbone.enable_gradient_checkpointing()
        executor.backbone.enable_gradient_checkpointing()

    def step() -> None:
        for _ in range(2):
            losses = sft_losses(compiler, executor, examples, config)
            loss = sum((getattr(config.weights, n) * v.sum() / 100 for n, v in losses.items()), torch.tensor(0.0))
            backend.backward(loss)
            del losses, loss
        backend.step()

    step()
    predicted = replay.replay_sft(config, lengths, pair.rows, gpu=False)
    return _check(predicted, peak_bytes(step), compiler, executor, backend.optimizer)


def check_update(pair: ModelPair, lengths: Lengths) -> Check:
    """Make a GRPO update of two micro-batches."""
    config = load_config(GrpoConfig, "grpo/paper", pair.settings("compiler.engine=hf", "compiler.checkpoint=null"))
    compiler, executor = _models(config)
    unused: Any = SimpleNamespace(served=None, environment="")
    with tempfile.TemporaryDirectory() as folder:
        trainer = GrpoTrainer(config, compiler, executor, unused, [unused], Path(folder))
    samples = 2 * replay.samples_of(config, lengths, pair.rows, executor.backbone.hidden_size)
    trainer.learn(samples)
    predicted = replay.replay_update(config, lengths, pair.rows, gpu=False)
    taken = peak_bytes(lambda: trainer.learn(samples))
    return _check(predicted, taken, compiler, None, trainer.backend.optimizer)


def check_compile(pair: ModelPair, lengths: Lengths) -> Check:
    """Compile emissions of the maximum length."""
    config = load_config(SftConfig, "sft/paper", pair.settings(f"compiler.max_new_tokens={lengths.emission}"))
    compiler, executor = _models(config)
    compiler.backbone.suppressed = [MEMORY, END]
    compiler.encode = lambda request: prompt_of(lengths.prompt)
    requests = replay.requests_of(pair.rows)
    predicted = replay.replay_compile(config.compiler, executor.backbone.hidden_size, lengths, pair.rows)
    return _check(predicted, peak_bytes(lambda: compiler.compile(requests)), compiler, None)


def check_act(pair: ModelPair, lengths: Lengths) -> Check:
    """Score admissible commands."""
    config = load_config(SftConfig, "sft/paper", pair.settings())
    _, executor = _models(config)
    prompts, names = replay.prompts_of(lengths.acting, pair.rows), [replay.commands(lengths)] * pair.rows
    score = torch.no_grad()(lambda: executor.candidate_logprobs(prompts, names))
    return _check(replay.replay_act(config.executor, lengths, pair.rows), peak_bytes(score), None, executor)


def _check(
    predicted: Replay,
    transient: int,
    compiler: MemoryCompiler | None,
    executor: FrozenExecutor | None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Check:
    """Add the resident bytes of the real models to the measurement."""
    models = [model for model in (compiler, executor and executor.model) if model is not None]
    resident = resident_bytes(models, optimizer)
    expected = sum(predicted.held[kind] for kind in TRANSIENT)
    return Check((predicted.total, resident + transient), (expected, transient))


def _models(config: SftConfig | GrpoConfig) -> tuple[MemoryCompiler, FrozenExecutor]:
    """Load both models as a run does, with the plan's token ids."""
    executor = load_frozen(config.executor, ExecutorInstructions(""))
    compiler = load_compiler(config.compiler, executor)
    for backbone in (compiler.backbone, executor.backbone):
        backbone.pad_id, backbone.memory_id, backbone.end_id = PAD, MEMORY, END
        backbone.suppressed = [MEMORY]  # its ids may be special tokens of the model
        backbone.ids = ShapedBackbone.ids.__get__(backbone)  # type: ignore[method-assign]
    executor.placeholder, executor.end_id = MEMORY, END
    return compiler, executor


def make_llama(
    folder: Path, tokenizer: Any, hidden: int, layers: int, heads: int, grouped: int, inner: int, words: int = 0
) -> None:
    """Save a Llama with random weights and grouped queries."""
    config = LlamaConfig(
        vocab_size=max(words, len(tokenizer)),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=grouped,
        intermediate_size=inner,
        tie_word_embeddings=False,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    save(folder, LlamaForCausalLM(config), tokenizer)
