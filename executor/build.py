"""From settings to the executor that they name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from configs.models import ExecutorConfig, model_path
from envs.spec import Told
from executor.records import Reads
from runtime.progress import quiet

if TYPE_CHECKING:
    from executor.api import ApiExecutor
    from executor.client import RemoteExecutor
    from executor.hf import FrozenExecutor
    from executor.program import ProgramExecutor
    from executor.scripted import ScriptedPlanner
    from executor.vllm import VllmExecutor
    from lm.backbone import Weights

AnyExecutor: TypeAlias = (
    "FrozenExecutor | VllmExecutor | RemoteExecutor | ApiExecutor | ScriptedPlanner | ProgramExecutor"
)


def load_executor(config: ExecutorConfig, told: Told, cache: Path | None = None) -> AnyExecutor:
    """Make the executor on the engine that the settings name.

    Args:
        told: about the environment (`EnvSpec.told`), shown unless the settings say `none`.
        cache: file for a closed model's answers, where the settings name none.
    """
    common = _common(config, told)
    if config.engine == "api":
        from executor.api import ApiExecutor
        from lm.endpoint import Endpoint

        endpoint, shown = Endpoint(config.api, cache), common["instructions"]
        return ApiExecutor(endpoint, shown, config.max_new_tokens, reads=common["reads"])
    if config.engine == "scripted":
        from executor.scripted import ScriptedPlanner

        return ScriptedPlanner(common["reads"])
    if config.engine == "program":
        from executor.program import ProgramExecutor

        endpoint = None
        if config.api.model:
            from lm.endpoint import Endpoint

            endpoint = Endpoint(config.api, cache)
        likely = config.explore == "likely"
        return ProgramExecutor(endpoint, config.feedback, config.homes, likely, reads=common["reads"])
    if config.engine == "hf":
        return load_frozen(config, told)
    from lm.backbone import load_encoder
    from lm.device import dtype_of

    quiet()
    name = model_path(config.model)
    if config.engine == "vllm":
        from huggingface_hub import snapshot_download

        from executor.vllm import VllmExecutor, engine_settings
        from lm.vllm import load_engine

        folder = Path(name) if Path(name).is_dir() else Path(snapshot_download(name, revision=config.revision))
        llm = load_engine(folder, config.dtype, engine_settings(), config.vllm)
        encoder = load_encoder(folder, config.memory_token, arguments=config.chat_template)
        return VllmExecutor(llm, encoder, folder, config.mode, temperature=config.temperature, **common)
    from executor.client import RemoteExecutor

    common |= {"mode": config.mode, "memory_token": config.memory_token, "timeout": config.timeout_s}
    common |= {"revision": config.revision, "arguments": config.chat_template}
    return RemoteExecutor(str(config.url), name, dtype_of(config.dtype), **common)


def load_frozen(config: ExecutorConfig, told: Told, weights: Weights = "device") -> FrozenExecutor:
    """Make the executor in this process, whatever `engine` says: a gradient can pass through it. `weights`: where they
    are to be."""
    from executor.hf import FrozenExecutor
    from lm.backbone import backbone_of

    quiet()
    return FrozenExecutor(
        backbone_of(config, weights=weights),
        "choice" if config.mode == "choice" else "generate",
        batch_size=config.batch_size,
        temperature=config.temperature,
        **_common(config, told),
    )


def _common(config: ExecutorConfig, told: Told) -> dict[str, Any]:
    shown = told.instructions if config.instructions == "full" else ""
    common = {"instructions": shown, "max_new_tokens": config.max_new_tokens, "images": config.images}
    return {**common, "reads": reads_of(config, told)}


def reads_of(config: ExecutorConfig, told: Told) -> Reads:
    """Say what settings and environment let the executor read."""
    return Reads(
        config.reads_state, config.soft_on, config.history, config.first_view, config.goal_last, told.lists_commands
    )
