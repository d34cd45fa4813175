"""From settings to objects: compiler, executor (environments: `environments.py`)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.collect import CollectConfig
from configs.compiler import CompilerConfig
from configs.engines import EndpointConfig
from configs.executor import ExecutorConfig
from configs.load import ConfigError

if TYPE_CHECKING:
    import torch

    from compiler.client import RemoteCompiler
    from compiler.hf import MemoryCompiler
    from compiler.records import Decoding
    from compiler.vllm import VllmCompiler
    from executor.api import ApiExecutor
    from executor.client import RemoteExecutor
    from executor.hf import FrozenExecutor
    from executor.records import Executor
    from executor.vllm import VllmExecutor
    from lm.endpoint import Endpoint

    AnyExecutor = FrozenExecutor | VllmExecutor | RemoteExecutor | ApiExecutor

REPOSITORY = Path(__file__).resolve().parents[1]
RESPONSES = "responses.sqlite"  # a run's file of endpoints' answers


def model_path(name: str) -> str:
    """A shipped model's folder for `zoo/...` from anywhere; any other name or path as it is."""
    shipped = REPOSITORY / name
    return str(shipped) if name.startswith("zoo/") and not Path(name).exists() else name


def quiet() -> None:
    """One progress bar is enough: ours."""
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()


def open_endpoint(config: EndpointConfig, cache: Path | None = None) -> Endpoint:
    from lm.endpoint import Endpoint

    return Endpoint(config, cache)


def load_actor(config: CollectConfig, teacher: Endpoint, cache: Path) -> tuple[Executor, dict[str, Endpoint]]:
    """Who acts while an endpoint teacher compiles, and all endpoints by role."""
    from agent.expert import ExpertExecutor
    from executor.api import ApiExecutor

    endpoints = {"teacher": teacher}
    if config.actor == "expert":
        return ExpertExecutor(config.noise, config.seed), endpoints
    if config.actor == "teacher":
        instructions, length = _rules(config.executor), config.executor.max_new_tokens
        actor: Executor = ApiExecutor(teacher, instructions, length, "actor")
    else:
        actor = load_executor(config.executor, cache)
    if isinstance(actor, ApiExecutor) and actor.endpoint is not teacher:
        endpoints["executor"] = actor.endpoint
    return actor, endpoints


def load_executor(config: ExecutorConfig, cache: Path | None = None) -> AnyExecutor:
    """`cache`: file for a closed model's answers, where the settings name none."""
    if config.engine == "api":
        from executor.api import ApiExecutor

        return ApiExecutor(open_endpoint(config.api, cache), _rules(config), config.max_new_tokens)
    quiet()
    name, common = model_path(config.model), _common(config)
    if config.engine == "vllm":
        _cpu_defaults()
        from executor.vllm import VllmExecutor

        engine = config.vllm.model_dump()
        return VllmExecutor.load(
            name, config.dtype, config.memory_token, engine, temperature=config.temperature, **common
        )
    if config.engine == "http":
        from executor.client import RemoteExecutor

        return RemoteExecutor(
            str(config.url), name, dtype_of(config.dtype), memory_token=config.memory_token, timeout=config.timeout_s,
            **common,
        )  # fmt: skip
    return load_frozen(config)


def load_frozen(config: ExecutorConfig) -> FrozenExecutor:
    """The executor in this process, whatever `engine` says: a gradient can pass through it."""
    quiet()
    from executor.hf import FrozenExecutor
    from lm.loading import load_backbone

    backbone = load_backbone(
        model_path(config.model), dtype_of(config.dtype), device_of(config.device), config.memory_token
    )
    return FrozenExecutor(backbone, batch_size=config.batch_size, temperature=config.temperature, **_common(config))


def _common(config: ExecutorConfig) -> dict[str, Any]:
    """What all executors with weights of their own take."""
    return {
        "mode": config.mode, "instructions": _rules(config), "max_new_tokens": config.max_new_tokens,
        "images": config.images,
    }  # fmt: skip


def _rules(config: ExecutorConfig) -> str:
    from executor.prompt import RULES

    return RULES if config.instructions == "full" else ""


def load_compiler(config: CompilerConfig, executor: AnyExecutor | None, seed: int = 0) -> MemoryCompiler:
    """Base model, fresh LoRA and projector for this executor; with `checkpoint`, the trained ones. Always the Hugging
    Face model, which training needs; `load_served_compiler` makes the engine that is fast."""
    import torch

    from compiler.hf import LoraSettings, MemoryCompiler
    from lm.loading import load_backbone
    from soft_mem.projector import Projector, ProjectorConfig
    from training import checkpoint

    torch.manual_seed(seed)  # the initialisation of LoRA and projector
    backbone = load_backbone(
        model_path(config.model), dtype_of(config.dtype), device_of(config.device), config.memory_token
    )
    found = checkpoint.find(Path(config.checkpoint)) if config.checkpoint else None
    if found:  # for a closed executor, too: its projector was trained against another one
        projector = checkpoint.load_projector(found)
    else:
        if executor is None or not executor.accepts_soft:
            raise ConfigError("a new compiler is made for an executor whose embeddings are known: engine hf or vllm")
        table = executor.embedding_table  # type: ignore[union-attr]
        emb_std = float(table.float().std()) if config.soft.emb_std == "auto" else config.soft.emb_std
        shape = (backbone.hidden_size, table.shape[1], config.soft.n_tokens)
        projector = Projector(ProjectorConfig(*shape, config.soft.projector, emb_std, config.soft.init_log_sigma))
    compiler = MemoryCompiler(
        backbone, projector, _decoding(config), _instructions(config),
        LoraSettings(config.lora.rank, config.lora.alpha, config.lora.dropout, config.lora.targets), seed,
    )  # fmt: skip
    if found:
        checkpoint.load(found, compiler)
    return compiler


def load_served_compiler(config: CompilerConfig, seed: int = 0) -> VllmCompiler:
    """The trained compiler in a vLLM engine.

    Raises:
        ConfigError: no checkpoint to serve.
    """
    _cpu_defaults()
    from compiler.vllm import VllmCompiler
    from training import checkpoint

    if config.checkpoint is None:
        raise ConfigError("a compiler in vLLM needs compiler.checkpoint: there is nothing trained to serve")
    found = checkpoint.find(Path(config.checkpoint))
    projector = checkpoint.load_projector(found)
    served = VllmCompiler.load(
        model_path(config.model), projector, config.dtype, config.memory_token, config.lora.rank,
        config.vllm.model_dump(), decoding=_decoding(config), instructions=_instructions(config), seed=seed,
        constrained=config.constrained, device=device_of(config.device),
    )  # fmt: skip
    served.load_adapter(found, 0, projector)
    return served


def load_remote_compiler(config: CompilerConfig, seed: int = 0, urls: Sequence[str] = ()) -> RemoteCompiler:
    """The trained compiler behind `memcompiler serve compiler`: at the settings' url, or at several."""
    from compiler.client import RemoteCompiler

    return RemoteCompiler(urls or str(config.url), config.temperature, seed=seed, timeout=config.timeout_s)


def _decoding(config: CompilerConfig) -> Decoding:
    from compiler.records import Decoding

    return Decoding(config.temperature, config.max_new_tokens, config.batch_size)


def _instructions(config: CompilerConfig) -> str:
    from compiler.prompt import INSTRUCTIONS

    return INSTRUCTIONS if config.instructions == "full" else ""


def _cpu_defaults() -> None:
    """Where there is no GPU, vLLM's engines share this process and a small cache. What the user has set stands.

    vLLM reads these when it is imported."""
    import torch

    if not torch.cuda.is_available():
        for name, value in _VLLM_ON_CPU.items():
            os.environ.setdefault(name, value)
        if shutil.which(os.environ.get("CXX", "g++")) is None:
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # torch would compile with it


_VLLM_ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",  # it warns of every thread setting
}  # fmt: skip


def dtype_of(name: str) -> torch.dtype:
    import torch

    return getattr(torch, name)


def device_of(name: str) -> str:
    import torch

    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
