"""Loads the compiler that the settings describe."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiler.prompt import Instructions, system_turns
from compiler.records import Decoding
from configs.load import ConfigError
from configs.models import CompilerConfig, ExecutorConfig, model_path

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch import Tensor

    from compiler.client import RemoteCompiler
    from compiler.hf import MemoryCompiler
    from compiler.vllm import VllmCompiler
    from lm.backbone import Weights

log = logging.getLogger("memcompiler.compiler")


def load_compiler(
    config: CompilerConfig,
    executor: object,
    seed: int = 0,
    instructions: Instructions = "",
    weights: Weights = "device",
) -> MemoryCompiler:
    """Load the compiler in transformers, regardless of `engine`, for training.

    Without `checkpoint`, LoRA and projector are new. A merged checkpoint gets a new LoRA, which changes nothing.

    Args:
        executor: a new projector is created for its `embedding_table`; unused with a checkpoint.
        instructions: `EnvSpec.compiler_instructions`, shown unless `compiler.instructions` is none; of several
            environments by name, where requests name theirs.
        weights: device of the base model's weights and LoRA.

    Raises:
        ConfigError: a new compiler for an executor with unknown embeddings.
        CheckpointError: the checkpoint is missing, or does not fit the model.
    """
    import torch

    from compiler import checkpoint
    from compiler.hf import MemoryCompiler
    from lm.backbone import load_configured_backbone
    from soft_mem.projector import Projector, ProjectorConfig

    found = checkpoint.find(Path(config.checkpoint)) if config.checkpoint else None
    merged = found is not None and checkpoint.is_merged(found)
    if found is not None and merged:
        checkpoint.check_files(found)  # the others are checked where they are read
    torch.manual_seed(seed)  # for the initialisation of LoRA and projector
    backbone = load_configured_backbone(config, found if merged else None, weights)
    if found:
        lora = config.lora if merged else _adapter(config, found)
        projector = checkpoint.load_projector(found)
    else:
        table: Tensor | None = getattr(executor, "embedding_table", None)
        if table is None:
            raise ConfigError("a new compiler needs an executor whose embeddings are known: executor.engine=hf or vllm")
        lora, soft = config.lora, config.soft
        projector = Projector(
            ProjectorConfig(
                d_compiler=backbone.hidden_size,
                d_executor=table.shape[1],
                n_tokens=soft.n_tokens,
                kind=soft.projector,
                emb_std=measured_std(table) if soft.emb_std == "auto" else soft.emb_std,
                init_log_sigma=soft.init_log_sigma,
                normalise=soft.normalise,
            )
        )
    compiler = MemoryCompiler(backbone, projector, lora=lora, seed=seed, **_common(config, instructions))
    compiler.writes_text = found is None or checkpoint.writes_text(found)
    if found and not merged:
        checkpoint.load(found, compiler)
    return compiler


def measured_std(table: Tensor) -> float:
    """Return the standard deviation of embeddings (V, d): the scale of soft tokens."""
    return float(table.float().std())


def load_served_compiler(config: CompilerConfig, seed: int = 0, instructions: Instructions = "") -> VllmCompiler:
    """Load the trained compiler in a vLLM engine; `instructions` as in `load_compiler`. Raises: ConfigError or
    CheckpointError, without a checkpoint."""
    from compiler import checkpoint
    from compiler.vllm import VllmCompiler, engine_settings
    from lm.backbone import load_encoder
    from lm.device import device_of
    from lm.vllm import load_engine, revision_arguments

    if config.checkpoint is None:
        raise ConfigError("a compiler in vLLM must be trained: set compiler.checkpoint")
    found = checkpoint.find(Path(config.checkpoint))
    checkpoint.check_files(found)
    merged, projector = checkpoint.is_merged(found), checkpoint.load_projector(found)
    lora = None if merged else _adapter(config, found)
    name, revision = (str(found), None) if merged else (model_path(config.model), config.revision)
    # Without an adapter, GRPO may load one of the settings' rank later.
    rank = max([lora.r, *(lora.rank_pattern or {}).values()]) if lora else config.lora.rank
    llm = load_engine(
        name, config.dtype, engine_settings(rank, config.speed.ngram) | revision_arguments(revision), config.vllm
    )
    encoder = load_encoder(name, config.memory_token, revision, config.chat_template)
    device = device_of(config.device)  # with its number, since worker threads have another current GPU
    common = _common(config, instructions)
    served = VllmCompiler(llm, encoder, projector, seed=seed, device=device, **common)
    served.writes_text = checkpoint.writes_text(found)
    if not merged:
        served.load_adapter(found, 0, projector)
    return served


def load_remote_compiler(config: CompilerConfig, seed: int = 0) -> RemoteCompiler:
    """Create the client of the compiler service at `compiler.url`."""
    from compiler.client import RemoteCompiler

    return RemoteCompiler(str(config.url), config.temperature, seed=seed, timeout=config.timeout_s)


def warn_about_executor_inputs(trained: Mapping[str, Any] | None, executor: ExecutorConfig, compiler: str) -> None:
    """Warn if the executor reads other inputs than the compiler was trained for."""
    if trained is not None:
        trained = {**ExecutorConfig(context="rebuilt").reading, **trained}  # old checkpoints lack newer settings
    if trained == executor.reading:
        return
    shown = lambda reading: " ".join(f"executor.{name}={str(value).lower()}" for name, value in reading.items())
    was = f"was trained with {shown(trained)}" if trained else "does not say what its executor read in training"
    log.warning("the compiler of %s %s; this run has %s", compiler, was, shown(executor.reading))


def warn_about_compiler_inputs(trained: Mapping[str, Any] | None, config: CompilerConfig, compiler: str) -> None:
    """Warn if the compiler reads other inputs than in training."""
    before = {"history": 0, "entries": "whole"}  # of checkpoints that do not record it
    if (trained := {**before, **(trained or {})}) != config.reading:
        shown = lambda reading: " ".join(f"compiler.{name}={value}" for name, value in reading.items())
        log.warning(
            "the compiler of %s was trained with %s; this run has %s", compiler, shown(trained), shown(config.reading)
        )


def _adapter(config: CompilerConfig, found: Path) -> LoraConfig:
    """Read the configuration of a checkpoint's adapter, and warn where the settings differ from it."""
    from compiler import checkpoint
    from compiler.hf import layer_of

    lora = checkpoint.lora_config(found)
    targets = lora.target_modules
    named = targets if isinstance(targets, set | list) else ()
    theirs = {
        "rank": lora.r,
        "alpha": lora.lora_alpha,
        "dropout": lora.lora_dropout,
        "targets": {name.rsplit(".", 1)[-1] for name in named},
        "first_layer": min(map(layer_of, named), default=0),
    }
    ours = {**config.lora.model_dump(), "targets": set(config.lora.targets)}
    for name in sorted(config.lora.model_fields_set):
        if ours[name] != theirs[name]:
            log.warning(
                "compiler.lora.%s is %s in the settings, but %s in the adapter of %s, which counts: leave it out",
                name,
                ours[name],
                theirs[name],
                config.checkpoint,
            )
    return lora


def _common(config: CompilerConfig, instructions: Instructions) -> dict[str, Any]:
    """Return the arguments that both backends take."""
    return {
        "decoding": Decoding(config.temperature, config.max_new_tokens, config.batch_size),
        "instructions": system_turns(instructions) if config.instructions == "full" else "",
        "speed": config.speed,
        **config.reading,
    }
