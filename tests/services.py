"""The compiler service on a free port, for tests of the service and its clients."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from compiler.server.app import service_app
from compiler.server.service import CompilerService
from configs.models import ServeConfig
from runtime.http import bound_socket
from tests.waiting import until


@contextlib.contextmanager
def listening(backend: Any, gather_s: float = 0.005, **settings: Any) -> Iterator[tuple[str, Callable[[], None]]]:
    """Start the service on a free loopback port; yield its URL and a function that kills it."""
    service = CompilerService(lambda: backend, ServeConfig(**settings), gather_s=gather_s)
    server = uvicorn.Server(uvicorn.Config(service_app(service), log_level="error"))
    bound = bound_socket("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    service.start()
    thread.start()

    def kill() -> None:
        server.should_exit = server.force_exit = True
        thread.join(20)
        bound.close()

    until(lambda: server.started)
    yield f"http://127.0.0.1:{bound.getsockname()[1]}", kill
    kill()
