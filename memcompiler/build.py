"""From settings to objects: bank, compiler, executor (environments: `environments.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from configs.schema import CompilerConfig, ExecutorConfig, MemoryConfig

if TYPE_CHECKING:
    import torch

    from compiler.model import MemoryCompiler
    from executor.frozen import FrozenExecutor
    from memory.bank import MemoryBank

REPOSITORY = Path(__file__).resolve().parents[1]


def model_path(name: str) -> str:
    """A shipped model's folder for `assets/...` from anywhere; any other name or path as it is."""
    shipped = REPOSITORY / name
    return str(shipped) if name.startswith("assets/") and not Path(name).exists() else name


def quiet() -> None:
    """One progress bar is enough: ours."""
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()


def open_bank(config: MemoryConfig, default: Path) -> MemoryBank:
    """The bank that the settings name (at its version), or the one at `default`."""
    from memory.bank import MemoryBank
    from memory.embed import SentenceEmbedder

    bank = MemoryBank(config.bank or default, SentenceEmbedder(config.embed) if config.embed else None)
    return bank.at(config.version) if config.version is not None else bank


def load_executor(config: ExecutorConfig) -> FrozenExecutor:
    from executor.frozen import FrozenExecutor
    from executor.prompt import RULES

    quiet()
    return FrozenExecutor.load(
        model_path(config.model), dtype_of(config.dtype), device_of(config.device), mode=config.mode,
        instructions=RULES if config.instructions == "full" else "", max_new_tokens=config.max_new_tokens,
        batch_size=config.batch_size, memory_token=config.memory_token,
    )  # fmt: skip


def load_compiler(config: CompilerConfig, executor: FrozenExecutor, seed: int = 0) -> MemoryCompiler:
    """Base model, fresh LoRA and projector for this executor; with `checkpoint`, the trained ones."""
    import torch

    from compiler.backbone import Backbone
    from compiler.model import Decoding, LoraSettings, MemoryCompiler
    from compiler.prompt import INSTRUCTIONS
    from soft_mem.projector import Projector, ProjectorConfig
    from training import checkpoint

    torch.manual_seed(seed)  # the initialisation of LoRA and projector
    backbone = Backbone.load(
        model_path(config.model), dtype_of(config.dtype), device_of(config.device), config.memory_token
    )
    table = executor.embedding_table
    emb_std = float(table.float().std()) if config.soft.emb_std == "auto" else config.soft.emb_std
    found = checkpoint.find(Path(config.checkpoint)) if config.checkpoint else None
    projector = checkpoint.load_projector(found) if found else Projector(
        ProjectorConfig(
            backbone.hidden_size, table.shape[1], config.soft.n_tokens, config.soft.projector, emb_std,
            config.soft.init_log_sigma,
        )
    )  # fmt: skip
    compiler = MemoryCompiler(
        backbone, projector, Decoding(config.temperature, config.max_new_tokens, config.batch_size),
        INSTRUCTIONS if config.instructions == "full" else "",
        LoraSettings(config.lora.rank, config.lora.alpha, config.lora.dropout, config.lora.targets), seed,
    )  # fmt: skip
    if found:
        checkpoint.load(found, compiler)
    return compiler


def dtype_of(name: str) -> torch.dtype:
    import torch

    return getattr(torch, name)


def device_of(name: str) -> str:
    import torch

    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
