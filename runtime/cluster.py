"""Ray: the settings that a run has of it, and one way to start or join it.

Ray is imported where a run asks for it, and nowhere else (extra `ray`). Without RAY_ADDRESS a run starts a Ray of its
own on this machine, on loopback alone and with a token of its own, which ends with the run. With it (`auto`: the one
that `ray start` started on this machine), the run joins that one, and leaves it as it was.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from runtime.settings import Settings

Cluster = Literal["local", "ray"]  # where a run's work is done: in its own process, or by workers on Ray
ADDRESS = "RAY_ADDRESS"
_LOCAL = "local"  # its value where one of our own is to be started in spite of a default
_AUTO = "auto"  # its value for the one that `ray start` started on this machine
_ANSWER_S = 5.0  # for an address to answer
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # with empty SETTINGS

# A Ray of our own. On Linux it would bind to all addresses of the machine; the switch is named for systems where it
# never does. The token is in the environment of its processes alone.
_PRIVATE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}


class RaySettings(Settings):
    """How work is shared out with `cluster: ray`; of no effect with `local`."""

    workers: int | None = Field(default=None, ge=1)  # at most so many at a time; null: as many as the resources allow
    # Episodes that are handed to a worker at a time, which plays them side by side. What is computed in one batch
    # follows from it, and not from the number of workers. Null: 8 of the expert's, of an evaluation `concurrency`.
    unit: int | None = Field(default=None, ge=1)
    cpus: float = Field(default=1.0, ge=0)  # of a worker, which holds models and environments
    gpus: float = Field(default=0.0, ge=0)  # of a worker; a part of one shares it
    retries: int = Field(default=3, ge=0)  # times that what a lost worker had begun is given to another one
    silence_s: float = Field(default=3600.0, gt=0)  # a worker that says nothing for so long is lost


# What a run may go on with otherwise: it says where and how it is played, not what.
MAY_CHANGE_ON_RESUME = ("cluster", *(f"ray.{name}" for name in RaySettings.model_fields))


class ClusterError(RuntimeError):
    """Ray is not there, or not as it should be. The message names the next step."""


def require_ray() -> None:
    """Check that Ray is installed and that a server answers at RAY_ADDRESS, without importing Ray: it keeps what it
    reads in the environment then.

    Raises:
        ModuleNotFoundError: Ray is not installed; names the extra.
        ClusterError: no server answers.
    """
    if importlib.util.find_spec("ray") is None:
        raise ModuleNotFoundError("cluster=ray needs Ray: uv sync --inexact --extra ray", name="ray")
    if (address := _address()) not in (_LOCAL, _AUTO):
        check_answers(address)


def import_ray() -> Any:
    """Import Ray. Raises: ModuleNotFoundError."""
    import ray

    return ray


def _address() -> str:
    return os.environ.get(ADDRESS) or _LOCAL


@contextmanager
def ray_cluster(cpus: int | None = None, gpus: int | None = None, dashboard: bool = False) -> Iterator[Any]:
    """Yield Ray, joined or started, and leave or end it with the block. Where this process is in one already, that is
    used and stays.

    Args:
        cpus, gpus: of a Ray of our own (default: what the machine has).
        dashboard: of a Ray of our own, on loopback.

    Raises:
        ModuleNotFoundError: Ray is not installed; names the extra.
        ClusterError: it cannot be reached or started.
    """
    require_ray()
    address = _address()
    with private_environment() if address == _LOCAL else nullcontext(), sigterm_as_before():
        ray = import_ray()
        if ray.is_initialized():
            yield ray
            return
        folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short: it holds sockets, whose paths may have 107 bytes
        try:
            _init(ray, address, {"num_cpus": cpus, "num_gpus": gpus, "include_dashboard": dashboard}, folder)
            try:
                yield ray
            finally:
                ray.shutdown()
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _init(ray: Any, address: str, own: Mapping[str, Any], folder: Path) -> None:
    quiet = {"log_to_driver": False, "logging_level": "error", "namespace": None}
    try:
        if address == _LOCAL:
            ray.init(address=_LOCAL, _temp_dir=str(folder), **own, **quiet)
        else:
            if address == _AUTO:
                check_answers(ray._private.services.canonicalize_bootstrap_address(_AUTO))
            ray.init(address=address, **quiet)
    except ClusterError:
        raise
    except Exception as error:  # Ray raises what it likes, down to Exception itself
        ray.shutdown()
        if address == _LOCAL:
            raise ClusterError(f"Ray did not start on this machine: {error}") from error
        raise _no_ray(address, error) from error


def check_answers(address: str) -> None:
    """Check that a gRPC server answers at `HOST:PORT` or `ray://HOST:PORT`; Ray itself would try for minutes.

    Raises: ClusterError.
    """
    host, _, port = address.rpartition("://")[2].rpartition(":")
    try:
        if not host or not port.isdecimal():
            raise ValueError("expected HOST:PORT, ray://HOST:PORT or auto")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0") == "0":
                connection.sendall(_HTTP2_HELLO)
                # A frame is three bytes of length and one of type; a server's first one has the type SETTINGS.
                if connection.recv(4, socket.MSG_WAITALL)[3:] != b"\x04":
                    raise ValueError("another server answers at this port")
    except (OSError, OverflowError, ValueError) as error:
        raise _no_ray(address, error) from error


def _no_ray(address: str, error: Exception) -> ClusterError:
    why = " ".join(str(error).split()).rstrip(".")
    return ClusterError(
        f"no Ray answers at {ADDRESS}={address}: {why}. Start one (`ray start --head`, docs/cluster.md), "
        f"or run `unset {ADDRESS}` to have one started on this machine"
    )


@contextmanager
def sigterm_as_before() -> Iterator[None]:
    """Put back what SIGTERM does: Ray has it end the process in order, and goes on to when it is long shut down."""
    if threading.current_thread() is not threading.main_thread():  # Ray sets nothing there either
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@cache
def _token() -> str:
    """Draw this process's token: Ray reads one once, and would not know the next one."""
    return secrets.token_hex(32)


@contextmanager
def private_environment() -> Iterator[None]:
    """Have what is started meanwhile be on loopback, with a token, where the environment does not say otherwise."""
    values = _PRIVATE | {"RAY_AUTH_TOKEN": _token()}
    ours = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def wait_for_nodes(number: int, timeout_s: float = 600.0) -> None:
    """Wait until the Ray at RAY_ADDRESS is there with so many nodes. Raises: ClusterError."""
    due = time.monotonic() + timeout_s
    while True:
        try:
            with ray_cluster() as ray:
                there = sum(node["Alive"] for node in ray.nodes())
        except ClusterError:  # it is not up yet
            there = 0
        if there >= number:
            return
        if time.monotonic() > due:
            raise ClusterError(f"{there} of {number} nodes came in {timeout_s:g} s: see what `ray start` says on them")
        time.sleep(2.0)


if __name__ == "__main__":  # for scripts: python -m runtime.cluster NODES
    wait_for_nodes(int(sys.argv[1]))
