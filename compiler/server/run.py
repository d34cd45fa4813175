"""The compiler service as a process: it binds, loads, answers, and leaves when it is told to."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn

from compiler import checkpoint
from compiler.build import load_compiler, load_served_compiler
from compiler.server.app import service_app
from compiler.server.service import CompilerService, ServedCompiler, ServiceLimits
from configs.load import ConfigError
from configs.models import ServeConfig
from runtime.http import bound_socket, http_url

GRACE_S = 10.0  # beyond a request's own time-out, that a service which leaves waits for what runs


def serve_compiler(config: ServeConfig, host: str, port: int, key: str | None = None) -> None:
    """Load a trained compiler and answer until SIGTERM or SIGINT, which let what runs finish; a second one does not.

    Raises:
        ConfigError: no checkpoint.
        ValueError: the port is taken.
        Exception: what went wrong when the compiler was loaded.
    """
    if config.compiler.checkpoint is None:
        raise ConfigError("serving needs a trained compiler: --checkpoint RUN")
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    limits = ServiceLimits(config.queue, config.batch, config.timeout_s, int(config.max_body_mib * 2**20))
    weights = checkpoint.sha256(checkpoint.find(Path(config.compiler.checkpoint)))
    service = CompilerService(lambda: _load(config), limits, config.seed, reloader(config), weights)
    bound = bound_socket(host, port)
    server = uvicorn.Server(uvicorn.Config(service_app(service, key), log_level="warning", access_log=False))
    leave_gently(server, service)
    service.start()
    threading.Thread(target=_announce, args=(server, service, http_url(*bound.getsockname()[:2])), daemon=True).start()
    server.run(sockets=[bound])
    if service.failure is not None:
        raise service.failure


def reloader(config: ServeConfig) -> Callable[[Any, Path, int], str] | None:
    """Make what takes other weights and returns their SHA-256: from folders under `config.adapters`, and from nowhere
    else. None where there are none to come."""
    if config.adapters is None:
        return None
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


def _load(config: ServeConfig) -> ServedCompiler:
    if config.compiler.engine == "vllm":
        return load_served_compiler(config.compiler, config.seed)
    return load_compiler(config.compiler, None, config.seed)  # with a checkpoint it asks for no executor


def leave_gently(server: Any, service: CompilerService) -> None:
    """Have the first signal refuse what is new, wait for what runs and leave; the second leaves."""

    def wait_and_leave() -> None:
        deadline = time.monotonic() + service.limits.timeout + GRACE_S
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


def _announce(server: Any, service: CompilerService, url: str) -> None:
    """Say where the service is once it is ready; end the server if it never will be."""
    print(f"starting at {url}", flush=True)
    while service.trouble is not None and service.failure is None and not service.leaving:
        time.sleep(0.05)
    if service.failure is not None:
        server.should_exit = True
    elif not service.leaving:
        print(f"ready: compiler.engine=http compiler.url={url}", flush=True)
