"""`memcompiler serve compiler` and `memcompiler serve executor` (docs/serving.md)."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

import typer

from configs.models import COMPILER_KEY, ServeConfig
from runtime.http import check_loopback, http_url


def run_serve_compiler(config: ServeConfig, host: str, port: int) -> None:
    """Serve a trained compiler until a signal ends it.

    Raises:
        ConfigError: no checkpoint.
        ValueError: an address that is not loopback, or a port that is taken.
        ModuleNotFoundError: nothing to serve with.
        Exception: what went wrong when the compiler was loaded.
    """
    check_loopback(host)
    try:
        from compiler.server.run import serve_compiler
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"serving needs {error.name}: uv sync --inexact --extra serve") from error
    serve_compiler(config, host, port, os.environ.get(COMPILER_KEY))


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
