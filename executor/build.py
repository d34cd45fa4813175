"""Loads the executor that the settings describe."""

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


def load_executor(config: ExecutorConfig, environment: Told, cache: Path | None = None) -> AnyExecutor:
    """Load the executor on the engine of the settings.

    Args:
        environment: instructions of the environment (`EnvSpec.told`), shown unless `executor.instructions` is none.
        cache: file for a closed model's answers, if the settings name none.
    """
    common = _common(config, environment)
    if config.engine == "api":
        from executor.api import ApiExecutor
        from lm.endpoint import Endpoint

        del common["images"]  # the endpoint's setting
        return ApiExecutor(Endpoint(config.api, cache), **common)
    if config.engine == "scripted":
        from executor.scripted import ScriptedPlanner

        return ScriptedPlanner(common["reads"])
    if config.engine == "program":
        from executor.program import ProgramExecutor

        endpoint = None
        if config.api.model:
            from lm.endpoint import Endpoint

            endpoint = Endpoint(config.api, cache)
        return ProgramExecutor(
            endpoint=endpoint,
            feedback=config.feedback,
            homes=config.homes,
            likely=config.explore == "likely",
            reads=common["reads"],
        )
    if config.engine == "hf":
        return load_frozen(config, environment)
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


def load_frozen(config: ExecutorConfig, environment: Told, weights: Weights = "device") -> FrozenExecutor:
    """Load the executor in transformers, whatever `engine` says: training backpropagates through it. `weights`: their
    device."""
    from executor.hf import FrozenExecutor
    from lm.backbone import backbone_of

    quiet()
    return FrozenExecutor(
        backbone_of(config, weights=weights),
        "choice" if config.mode == "choice" else "generate",
        batch_size=config.batch_size,
        temperature=config.temperature,
        **_common(config, environment),
    )


def _common(config: ExecutorConfig, environment: Told) -> dict[str, Any]:
    """Return the arguments that all backends with a language model take."""
    shown = environment.instructions if config.instructions == "full" else ""
    return {
        "instructions": shown,
        "max_new_tokens": config.max_new_tokens,
        "images": config.images,
        "reads": reads_of(config, environment),
    }


def reads_of(config: ExecutorConfig, environment: Told) -> Reads:
    """Return what the executor reads under these settings in this environment."""
    return Reads(
        state=config.reads_state,
        soft_on=config.soft_on,
        history=config.history,
        first_view=config.first_view,
        goal_last=config.goal_last,
        commands=environment.lists_commands,
    )
