"""Serves an ASGI application from a thread of this process."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from runtime.http import LOOPBACK, bound_socket, http_url

START_S, END_S = 60.0, 20.0  # in which a server starts and ends


@contextlib.contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serve an application on a free port of loopback; yield its URL, and stop it at the end."""
    import uvicorn

    server, bound = uvicorn.Server(uvicorn.Config(app, log_level="error")), bound_socket(LOOPBACK, 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + START_S
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.02)
    try:
        yield http_url(LOOPBACK, bound.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(END_S)
        bound.close()
