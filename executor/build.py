"""Loads the executor that the settings describe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from configs.load import ConfigError
from configs.models import ExecutorConfig, model_path
from envs.spec import ExecutorInstructions
from executor.prompt import Rules
from executor.records import ExecutorView
from runtime.progress import disable_library_progress_bars

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

# The instructions of a run's environment, or of each of several by name, where requests name theirs.
Told: TypeAlias = ExecutorInstructions | Mapping[str, ExecutorInstructions]


def load_executor(config: ExecutorConfig, environment: Told, cache: Path | None = None) -> AnyExecutor:
    """Load the executor on the engine of the settings.

    Args:
        environment: the environment's instructions, shown unless `executor.instructions` is none.
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

        return ScriptedPlanner(replace(common["reads"], context="rebuilt"))  # it parses that prompt
    if config.engine == "program":
        from executor.program import ProgramExecutor

        endpoint = None
        if config.api.model:
            from lm.endpoint import Endpoint

            endpoint = Endpoint(config.api, cache)
        return ProgramExecutor(
            endpoint=endpoint,
            feedback=config.feedback,
            homes=config.placement_prior,
            likely=config.explore == "likely",
            reads=common["reads"],
        )
    if config.engine == "hf":
        return load_frozen(config, environment)
    from lm.backbone import load_encoder
    from lm.device import dtype_of

    disable_library_progress_bars()
    name = model_path(config.model)
    if config.engine == "vllm":
        from huggingface_hub import snapshot_download

        from executor.vllm import VllmExecutor, engine_settings
        from lm.vllm import load_engine

        folder = Path(name) if Path(name).is_dir() else Path(snapshot_download(name, revision=config.revision))
        llm = load_engine(folder, config.dtype, engine_settings(config.temperature > 0), config.vllm)
        encoder = load_encoder(folder, config.memory_token, arguments=config.chat_template)
        return VllmExecutor(llm, encoder, folder, config.mode, temperature=config.temperature, **common)
    from executor.client import RemoteExecutor

    common |= {"mode": config.mode, "memory_token": config.memory_token, "timeout": config.timeout_s}
    common |= {"revision": config.revision, "arguments": config.chat_template}
    return RemoteExecutor(str(config.url), name, dtype_of(config.dtype), **common)


def load_frozen(config: ExecutorConfig, environment: Told, weights: Weights = "device") -> FrozenExecutor:
    """Load the executor in transformers, regardless of `engine`: training backpropagates through it. `weights`: their
    device."""
    from executor.hf import FrozenExecutor
    from lm.backbone import load_configured_backbone

    disable_library_progress_bars()
    return FrozenExecutor(
        load_configured_backbone(config, weights=weights),
        config.mode,
        batch_size=config.batch_size,
        prefix_mib=config.prefix_mib,
        temperature=config.temperature,
        **_common(config, environment),
    )


def _common(config: ExecutorConfig, environment: Told) -> dict[str, Any]:
    """Return the arguments that all backends with a language model take."""
    return {
        "instructions": executor_rules(config, environment),
        "max_new_tokens": config.max_new_tokens,
        "images": config.images,
        "reads": executor_view(config, environment),
    }


def executor_rules(config: ExecutorConfig, environment: Told) -> Rules:
    """Return what the system turn says: the instructions, unless `executor.instructions` is none, and the examples.

    Raises:
        ConfigError: examples for several environments.
    """
    if isinstance(environment, ExecutorInstructions):
        shown = [environment.instructions] if config.instructions == "full" else []
        if config.examples is not None:
            shown.append(Path(config.examples).read_text(encoding="utf-8").strip())
        return "\n\n".join(filter(None, shown))
    if config.examples is not None:
        raise ConfigError(f"executor.examples are of one environment, and this run has {' and '.join(environment)}")
    told = environment if config.instructions == "full" else {name: ExecutorInstructions("") for name in environment}
    return dict(told)


def executor_view(config: ExecutorConfig, environment: Told) -> ExecutorView:
    """Return what the executor reads under these settings in this environment, or in several."""
    return ExecutorView(
        context=config.context,
        past_guidance=config.past_guidance == "kept",
        past_soft=config.past_soft == "kept",
        context_tokens=config.context_tokens,
        state=config.reads_state,
        soft_on=config.soft_on,
        history=config.history,
        first_view=config.first_view,
        goal_last=config.goal_last,
        commands=isinstance(environment, ExecutorInstructions) and environment.lists_commands,
    )
