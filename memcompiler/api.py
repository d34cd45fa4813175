"""The functions of the public API: models, memories and environments by name; the commands as functions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from configs.collect import CollectConfig, MemoryConfig
from configs.evaluation import EvalConfig
from configs.load import load_config
from configs.training import GrpoConfig, SftConfig
from envs.registry import Environments, settings_of

if TYPE_CHECKING:
    from pydantic import BaseModel

    from compiler.gate import CompileGate
    from compiler.records import Compiler
    from executor.records import Executor
    from memory.protocol import MemorySystem

Schema = TypeVar("Schema", bound="BaseModel")


def load(name: str | Path, *overrides: str, revision: str | None = None) -> tuple[Compiler, Executor]:
    """Load a compiler and the frozen executor that it was trained for.

    Args:
        name: a run or checkpoint folder; `zoo/alfworld` or `zoo/household`, which ship (the latter is a base: its
            adapter and projector are untrained); or a Hugging Face Hub repository, ORG/NAME.
        overrides: settings over those of the run, as `executor.device=cpu`.
        revision: commit, tag or branch of a Hub repository; default: the newest.

    Raises:
        ConfigError: the settings are missing or wrong.
        CheckpointError: there is no checkpoint, or it does not fit its model.
    """
    from compiler.build import load_compiler
    from envs.registry import compiler_instructions_for
    from eval.model_cache import ModelCache
    from memcompiler.hub import model_settings

    config, models = model_settings(name, overrides, revision), ModelCache()
    executor = models.executor(config)
    if config.compiler.checkpoint is None and config.compiler.engine == "hf":
        return load_compiler(config.compiler, executor, config.seed, compiler_instructions_for(config.env)), executor
    compiler = models.compiler(config)
    assert compiler is not None  # the default deliveries need one
    return compiler, executor


def load_gate(name: str | Path, *, revision: str | None = None) -> CompileGate:
    """Load the compile gate beside a checkpoint, for `mc.Agent(..., delivery="compiled_gated", gate=...)`; `name` as
    in `load`. Raises: CheckpointError, where there is none."""
    from compiler.gate import gate_for
    from memcompiler.hub import model_settings

    gate = gate_for(["compiled_gated"], model_settings(name, (), revision).compiler.checkpoint)
    assert gate is not None  # else it raises
    return gate


def open_memory(
    path: str | Path,
    system: str | None = None,
    *,
    env: str | None = None,
    version: int | None = None,
    **settings: Any,
) -> MemorySystem:
    """Open the memory in a folder, which is created where there is none, or a bank at s3://BUCKET/PREFIX, which the
    first write creates.

    Args:
        system: the memory system; default: the folder's, or `trajectory`, the paper's bank.
        env: the environment of the episodes, for `brainmem` and `karma`, which read its views; default: the folder's.
        version: opens a read-only view of that version.
        settings: of the memory system.

    Raises:
        BankError: the folder holds something else, or no such version.
    """
    from data_gen import memory_factory
    from memory.bank_store import place_of
    from memory.registry import DEFAULT

    place = place_of(path)
    is_new = isinstance(place, Path) and not place.exists()
    system = system or memory_factory.stored_system(place) or DEFAULT
    config = MemoryConfig(system=system, bank=str(path), version=version, settings=settings)
    memory = memory_factory.open_memory(config, Path(path), env)
    if is_new:
        memory_factory.initialise_memory(memory, env)
    return memory


def open_environment(name: str, **settings: Any) -> Environments:
    """Open a registered environment: `tasks(split)` lists tasks, `lease()` returns an `mc.Environment`. Close it after
    use (it is a context manager). Raises: ValueError, for an unknown environment or setting."""
    return Environments(settings_of({"name": name, **settings}))


def collect(config: CollectConfig | str | Path, *overrides: str, out: str | Path, on_exists: str = "resume") -> Path:
    """Play training tasks with a teacher; write a memory bank to OUT/bank and SFT rows to OUT/rows. Return OUT.

    Args:
        config: settings, a YAML file, or a name in configs/ such as `collect/quickstart`.
        overrides: settings over the file's, as `env.seed=1`.
        on_exists: for a run in OUT: `resume`, `raise` or `overwrite`.
    """
    from memcompiler.collection import run_collect

    run_collect(_settings(CollectConfig, config, overrides), Path(out), on_exists)
    return Path(out)


def train_sft(config: SftConfig | str | Path, *overrides: str, out: str | Path, on_exists: str = "resume") -> Path:
    """Train compiler and projector on SFT rows (stage 1); arguments as of `collect`. Return OUT, which `load` takes."""
    from training import sft

    sft.train_sft(_settings(SftConfig, config, overrides), Path(out), on_exists)
    return Path(out)


def train_grpo(config: GrpoConfig | str | Path, *overrides: str, out: str | Path, on_exists: str = "resume") -> Path:
    """Train an SFT checkpoint by GRPO on task success (stage 2); arguments as of `collect`. Return OUT, which `load`
    takes."""
    from training import grpo

    grpo.train_grpo(_settings(GrpoConfig, config, overrides), Path(out), on_exists)
    return Path(out)


def evaluate(
    config: EvalConfig | str | Path, *overrides: str, out: str | Path, on_exists: str = "resume"
) -> dict[str, Any]:
    """Evaluate deliveries on the same tasks; write results.json, episodes.jsonl and report.html to OUT. Return the
    results (docs/guides/results-format.md); arguments as of `collect`."""
    from eval.evaluate import run_eval

    return run_eval(_settings(EvalConfig, config, overrides), Path(out), on_exists)


def _settings(schema: type[Schema], config: Schema | str | Path, overrides: tuple[str, ...]) -> Schema:
    if not isinstance(config, str | Path):
        if overrides:
            raise ValueError(f"overrides belong to a file: change the {schema.__name__} instead")
        return config
    return load_config(schema, config, overrides)
