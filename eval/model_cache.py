"""Models, environments and Ray workers that the cells of an evaluation share."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from agent.deliveries import find
from compiler import checkpoint
from compiler.build import (
    load_compiler,
    load_remote_compiler,
    load_served_compiler,
    warn_about_compiler_inputs,
    warn_about_executor_inputs,
)
from compiler.records import Compiler
from configs.evaluation import EvalConfig
from envs.registry import Environments, compiler_instructions_for, executor_instructions_for
from executor.build import load_executor
from runtime.worker_pool import WorkerPool, ray_worker_pool

log = logging.getLogger("memcompiler.eval")


class ModelCache:
    """Executor, compiler, environments and Ray workers, each loaded on first use and reused while the settings that it
    depends on stay the same. A context manager, which closes environments and workers."""

    def __init__(self) -> None:
        self._cached: dict[str, tuple[object, Any]] = {}  # role -> settings, object
        self._workers = ExitStack()

    @classmethod
    def preloaded(cls, config: EvalConfig, executor: Any, compiler: Compiler | None) -> ModelCache:
        """Create a cache that holds models which are loaded already."""
        models = cls()
        models._cached = {"executor": (_executor_key(config), executor), "compiler": (_compiler_key(config), compiler)}
        return models

    def __enter__(self) -> ModelCache:
        return self

    def __exit__(self, *_: object) -> None:
        self._release("environments")
        self._workers.close()

    def executor(self, config: EvalConfig) -> Any:
        instructions = executor_instructions_for(config.env)
        return self._get("executor", _executor_key(config), lambda: load_executor(config.executor, instructions))

    def compiler(self, config: EvalConfig) -> Compiler | None:
        """Return the trained compiler, which samples by the configuration's seed; None if no delivery needs it."""
        if not needs_checkpoint(config):
            return None
        compiler = self._get("compiler", _compiler_key(config), lambda: self._load_compiler(config))
        if config.compiler.temperature and compiler.generator.initial_seed() != config.seed:
            compiler.generator.manual_seed(config.seed)
        return compiler

    def environments(self, config: EvalConfig) -> Environments:
        return self._get("environments", config.env, lambda: Environments(config.env))

    def workers(self, config: EvalConfig, worker: type) -> WorkerPool:
        """Return Ray workers of a class; each loads its own models."""
        return self._get(
            "workers", config.ray, lambda: self._workers.enter_context(ray_worker_pool(config.ray, worker))
        )

    def _load_compiler(self, config: EvalConfig) -> Compiler:
        """Load the compiler; warn if it was trained for an executor that reads other parts of a compilation."""
        if config.compiler.engine == "http":
            remote = load_remote_compiler(config.compiler, config.seed)
            trained = remote.about()
            warn_about_executor_inputs(trained.get("executor_reads"), config.executor, str(config.compiler.url))
            warn_about_compiler_inputs(trained.get("compiler_reads"), config.compiler, str(config.compiler.url))
            remote.writes_text = trained.get("text", True)
            served = trained.get("environments") or ()
            if len(served) > 1:
                remote.environment = config.env.name
            if config.env.name not in served:
                log.warning(
                    "the service at %s has the instructions of %s, this run plays %s: serve with env=%s",
                    config.compiler.url,
                    " and ".join(served) or "no environment",
                    config.env.name,
                    config.env.name,
                )
            return remote
        folder, instructions = (
            checkpoint.find(Path(str(config.compiler.checkpoint))),
            compiler_instructions_for(config.env),
        )
        warn_about_executor_inputs(checkpoint.executor_inputs(folder), config.executor, str(folder))
        warn_about_compiler_inputs(checkpoint.compiler_inputs(folder), config.compiler, str(folder))
        if config.compiler.engine == "hf":
            return load_compiler(config.compiler, self.executor(config), config.seed, instructions)
        return load_served_compiler(config.compiler, config.seed, instructions)

    def _get(self, role: str, key: object, load: Callable[[], Any]) -> Any:
        if role not in self._cached or self._cached[role][0] != key:
            self._release(role)
            gc.collect()
            self._cached[role] = (key, load())
        return self._cached[role][1]

    def _release(self, role: str) -> None:
        """Drop an object before its successor is loaded: two models may not fit into memory."""
        _, held = self._cached.pop(role, (None, None))
        if role == "environments" and held is not None:
            held.close()
        if role == "workers":
            self._workers.close()
        if role == "executor":
            self._cached.pop("compiler", None)  # its projector belongs to the executor


def _executor_key(config: EvalConfig) -> object:
    return config.executor, executor_instructions_for(config.env)


def _compiler_key(config: EvalConfig) -> object:
    named = config.env.name if config.compiler.engine == "http" else ""  # in requests, if the service has several
    return config.compiler, config.executor, compiler_instructions_for(config.env), named


def needs_checkpoint(config: EvalConfig) -> list[str]:
    """Return the deliveries that need a trained compiler."""
    return [name for name in config.deliveries if find(name).needs_checkpoint]
