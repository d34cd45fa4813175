"""From settings to the compiler that they name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiler.prompt import compiler_instructions
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
    config: CompilerConfig, executor: object, seed: int = 0, told: str = "", weights: Weights = "device"
) -> MemoryCompiler:
    """Make base model, fresh LoRA and projector for this executor; with `checkpoint`, the trained ones (of a merged one
    model and projector, with a fresh LoRA, which changes nothing). Always the Hugging Face model, which training needs;
    `load_served_compiler` makes the engine that is fast.

    Args:
        executor: whose soft tokens a new projector makes, known by its `embedding_table`; a checkpoint asks for none.
        told: about the environment (`EnvSpec.compiling`), shown unless the settings say `none`.
        weights: where the base's are to be; LoRA's go with them.

    Raises:
        ConfigError: a new compiler for an executor whose embeddings nobody knows.
        CheckpointError: a checkpoint that is missing, or does not fit the model.
    """
    import torch

    from compiler import checkpoint
    from compiler.hf import MemoryCompiler
    from lm.backbone import backbone_of
    from soft_mem.projector import Projector, ProjectorConfig

    found = checkpoint.find(Path(config.checkpoint)) if config.checkpoint else None
    merged = found is not None and checkpoint.is_merged(found)
    torch.manual_seed(seed)  # the initialisation of LoRA and projector
    backbone = backbone_of(config, found if merged else None, weights)
    if found:  # for a closed executor, too: its projector was trained against another one
        lora = config.lora if merged else _adapter(config, found)
        projector = checkpoint.load_projector(found)
    else:
        table: Tensor | None = getattr(executor, "embedding_table", None)
        if table is None:
            raise ConfigError("a new compiler is made for an executor whose embeddings are known: engine hf or vllm")
        lora = config.lora
        emb_std = measured_std(table) if config.soft.emb_std == "auto" else config.soft.emb_std
        shape = (backbone.hidden_size, table.shape[1], config.soft.n_tokens)
        soft = config.soft
        projector = Projector(ProjectorConfig(*shape, soft.projector, emb_std, soft.init_log_sigma, soft.normalise))
    compiler = MemoryCompiler(backbone, projector, *_how(config, told), lora, seed, config.speed)
    if found and not merged:
        checkpoint.load(found, compiler)
    return compiler


def measured_std(table: Tensor) -> float:
    """Measure the standard deviation of embeddings (V, d): the scale of soft tokens."""
    return float(table.float().std())


def load_served_compiler(config: CompilerConfig, seed: int = 0, told: str = "") -> VllmCompiler:
    """Make the trained compiler in a vLLM engine; `told` as in `load_compiler`. Raises: ConfigError or
    CheckpointError, where there is none."""
    from compiler import checkpoint
    from compiler.vllm import VllmCompiler, engine_settings
    from lm.backbone import load_encoder
    from lm.device import device_of
    from lm.vllm import load_engine, pinned

    if config.checkpoint is None:
        raise ConfigError("a compiler in vLLM needs compiler.checkpoint: there is nothing trained to serve")
    found = checkpoint.find(Path(config.checkpoint))
    merged, projector = checkpoint.is_merged(found), checkpoint.load_projector(found)
    lora = None if merged else _adapter(config, found)
    name, revision = (str(found), None) if merged else (model_path(config.model), config.revision)
    rank = max([lora.r, *(lora.rank_pattern or {}).values()]) if lora else config.lora.rank  # that GRPO may send later
    llm = load_engine(name, config.dtype, engine_settings(rank, config.speed.ngram) | pinned(revision), config.vllm)
    encoder = load_encoder(name, config.memory_token, revision, config.chat_template)
    device = device_of(config.device)  # with its number: worker threads have another current GPU
    how = *_how(config, told), seed, device, config.speed
    served = VllmCompiler(llm, encoder, projector, *how)
    if not merged:
        served.load_adapter(found, 0, projector)
    return served


def load_remote_compiler(config: CompilerConfig, seed: int = 0) -> RemoteCompiler:
    """Make the client of `memcompiler serve compiler` at the settings' url."""
    from compiler.client import RemoteCompiler

    return RemoteCompiler(str(config.url), config.temperature, seed=seed, timeout=config.timeout_s)


def report_reading(trained: Mapping[str, Any] | None, executor: ExecutorConfig, compiler: str) -> None:
    """Warn where the executor reads something else than the compiler was trained for."""
    if trained is not None:
        trained = {**ExecutorConfig().reading, **trained}  # old ones do not say all of it
    if trained == executor.reading:
        return
    told = lambda reading: " ".join(f"executor.{name}={str(value).lower()}" for name, value in reading.items())
    was = f"was trained with {told(trained)}" if trained else "does not say what its executor read in training"
    log.warning("the compiler of %s %s; this run has %s", compiler, was, told(executor.reading))


def _adapter(config: CompilerConfig, found: Path) -> LoraConfig:
    """Read what a checkpoint's adapter is; warn where the settings say another one: the checkpoint's counts."""
    from compiler import checkpoint

    lora = checkpoint.lora_config(found)
    targets = lora.target_modules
    names = {name.rsplit(".", 1)[-1] for name in targets} if isinstance(targets, set | list) else set()
    theirs = {"rank": lora.r, "alpha": lora.lora_alpha, "dropout": lora.lora_dropout, "targets": names}
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


def _how(config: CompilerConfig, told: str) -> tuple[Decoding, str]:
    """Say how emissions are drawn, and after which instructions."""
    decoding = Decoding(config.temperature, config.max_new_tokens, config.batch_size)
    return decoding, compiler_instructions(told) if config.instructions == "full" else ""
