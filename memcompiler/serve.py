"""`memcompiler serve compiler` and `memcompiler serve executor` (docs/serving.md)."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from compiler.build import load_compiler, load_served_compiler
from configs.compiler import COMPILER_KEY
from configs.load import ConfigError
from configs.serving import ServeConfig
from runtime.network import check_loopback, http_url

if TYPE_CHECKING:
    from compiler.server.service import ServedCompiler


def run_serve_compiler(config: ServeConfig, host: str, port: int) -> None:
    """Until SIGTERM or SIGINT, which let what runs finish; a second one does not.

    Raises:
        ConfigError: no checkpoint.
        ValueError: an address that is not loopback, or a port that is taken.
        ModuleNotFoundError: nothing to serve with.
        Exception: what went wrong when the compiler was loaded.
    """
    check_loopback(host)
    if config.compiler.checkpoint is None:
        raise ConfigError("serving needs a trained compiler: --checkpoint RUN")
    try:
        from compiler.server.run import serve
        from compiler.server.service import CompilerService, ServiceLimits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"serving needs {error.name}: uv sync --inexact --extra serve") from error
    from compiler import checkpoint

    limits = ServiceLimits(config.queue, config.batch, config.timeout_s, int(config.max_body_mib * 2**20))
    weights = checkpoint.sha256(checkpoint.find(Path(config.compiler.checkpoint)))
    service = CompilerService(lambda: _load(config), limits, config.seed, reloader(config), weights)
    serve(service, host, port, os.environ.get(COMPILER_KEY))


def run_serve_executor(model: str, host: str, port: int, extra: Sequence[str], dry_run: bool = False) -> None:
    """Print the command and run it; its exit status is ours.

    Raises:
        ValueError: an address that is not loopback.
        ModuleNotFoundError: vLLM is not installed.
    """
    from executor.server import serve, server_command
    from lm.loading import model_path

    check_loopback(host)
    command = server_command(model_path(model), host, port, extra)
    typer.echo(shlex.join(command))
    if dry_run:
        return
    typer.echo(f"executor.engine=http executor.model={model} executor.url={http_url(host, port)}")
    if status := serve(command):
        raise typer.Exit(status)


def _load(config: ServeConfig) -> ServedCompiler:
    if config.compiler.engine == "vllm":
        return load_served_compiler(config.compiler, config.seed)
    return load_compiler(config.compiler, None, config.seed)  # with a checkpoint it asks for no executor


def reloader(config: ServeConfig) -> Callable[[Any, Path, int], str] | None:
    """How the service takes other weights (their SHA-256 is returned): from folders under `config.adapters`, and from
    nowhere else."""
    if config.adapters is None:
        return None
    from compiler import checkpoint

    root = Path(config.adapters).resolve()

    def reload(compiler: Any, folder: Path, version: int) -> str:
        if not folder.resolve().is_relative_to(root):
            raise ValueError(f"weights are taken from {root} only")
        if config.compiler.engine == "vllm":
            compiler.load_adapter(folder, version, checkpoint.load_projector(folder))
        else:
            checkpoint.load(folder, compiler)
            compiler.weight_version = version
        return checkpoint.sha256(folder)

    return reload
