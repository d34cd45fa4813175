"""The compiler service as a process: it binds, loads, answers, and leaves when it is told to."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import uvicorn

from compiler.server.app import service_app
from compiler.server.service import CompilerService
from runtime.network import bound_socket, http_url

GRACE_S = 10.0  # beyond a request's own time-out, that a service which leaves waits for what runs


def serve(service: CompilerService, host: str, port: int, key: str | None = None) -> None:
    """Answer until SIGTERM or SIGINT, which let what runs finish; a second one does not.

    Raises:
        ValueError: the port is taken.
        Exception: what went wrong when the compiler was loaded.
    """
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    bound = bound_socket(host, port)
    server = uvicorn.Server(uvicorn.Config(service_app(service, key), log_level="warning", access_log=False))
    leave_gently(server, service)
    service.start()
    threading.Thread(target=_announce, args=(server, service, http_url(*bound.getsockname()[:2])), daemon=True).start()
    server.run(sockets=[bound])
    if service.failure is not None:
        raise service.failure


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
