"""Ray: settings of a run, and how it starts or joins a cluster.

Ray is imported only by runs with `cluster: ray` (extra `ray`). Without RAY_ADDRESS a run starts a private Ray on this
machine, on loopback and with a token, and stops it at the end. With RAY_ADDRESS (`auto`: the one that `ray start`
started on this machine) it joins that cluster and leaves it running.
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

Cluster = Literal["local", "ray"]  # run in this process, or by workers on Ray
ADDRESS = "RAY_ADDRESS"
_LOCAL = "local"  # value that starts a private Ray even if a default address exists
_AUTO = "auto"  # value for the one that `ray start` started on this machine
_ANSWER_S = 5.0  # time-out for an address to answer
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # with empty SETTINGS

# Environment of a private Ray. On Linux Ray binds to all addresses of the machine; the switch, which is named for
# systems where it never does, keeps it on loopback. Only its own processes have the token.
_PRIVATE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}


class RaySettings(Settings):
    """Workers with `cluster: ray`; ignored with `local`."""

    workers: int | None = Field(default=None, ge=1)
    """Maximum number of workers at a time; null: as many as the resources allow."""
    batch_size: int | None = Field(default=None, ge=1)
    """Episodes that a worker receives at a time and plays side by side; null: 8 for `collect`, `concurrency` for an
    evaluation."""
    cpus: float = Field(default=1.0, ge=0)
    """CPUs per worker, which holds models and environments."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs per worker; a fraction shares one."""
    retries: int = Field(default=3, ge=0)
    """Retries of items whose worker was lost."""
    unresponsive_s: float = Field(default=3600.0, gt=0)
    """Seconds without output after which a worker counts as lost."""


# Settings that may differ on resume: they say where episodes are played, not which.
MAY_CHANGE_ON_RESUME = ("cluster", *(f"ray.{name}" for name in RaySettings.model_fields))


class ClusterError(RuntimeError):
    """Ray is missing, unreachable, or has too few resources. The message names the next step."""


def require_ray() -> None:
    """Check that Ray is installed and that a server answers at RAY_ADDRESS. Does not import Ray, which would read the
    environment too early.

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
    """Join or start Ray and yield the module; leave or stop it at the end. A cluster that this process has already
    joined is used and stays.

    Args:
        cpus, gpus: Of a private Ray (default: those of the machine).
        dashboard: Start the dashboard of a private Ray, on loopback.

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
        folder = Path(tempfile.mkdtemp(prefix="ray-"))  # a short path: socket paths are limited to 107 bytes
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
    except Exception as error:  # Ray raises errors of many types, even plain Exception
        ray.shutdown()
        if address == _LOCAL:
            raise ClusterError(f"Ray did not start on this machine: {error}") from error
        raise _no_ray(address, error) from error


def check_answers(address: str) -> None:
    """Check that a gRPC server answers at `HOST:PORT` or `ray://HOST:PORT`; Ray itself would retry for minutes.

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
        f"no Ray answers at {ADDRESS}={address}: {why}. Start one (`ray start --head`, docs/guides/cluster.md), "
        f"or run `unset {ADDRESS}` to have one started on this machine"
    )


@contextmanager
def sigterm_as_before() -> Iterator[None]:
    """Restore the handler of SIGTERM afterwards: Ray replaces it, and leaves its own after a shutdown."""
    if threading.current_thread() is not threading.main_thread():  # Ray sets handlers in the main thread only
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@cache
def _token() -> str:
    """Create this process's token, once: Ray reads it once per process."""
    return secrets.token_hex(32)


@contextmanager
def private_environment() -> Iterator[None]:
    """Set variables that keep a Ray started meanwhile on loopback and give it a token, unless they are set already.

    Raises:
        ClusterError: Ray has been imported without a token.
    """
    _check_token()
    values = _PRIVATE | {"RAY_AUTH_TOKEN": _token()}
    ours = {name: value for name, value in values.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def _check_token() -> None:
    """Check that Ray, if it is imported already, uses tokens: it reads its environment once, when it is imported, and
    servers with a token refuse a process without one (`InvalidAuthToken`, after minutes). Raises: ClusterError."""
    ray: Any = sys.modules.get("ray")
    if ray is None or ray.is_initialized() or "RAY_AUTH_MODE" in os.environ:
        return
    raylet: Any = importlib.import_module("ray._raylet")
    if raylet.get_authentication_mode() != raylet.AuthenticationMode.TOKEN:
        raise ClusterError(
            "this process imported Ray before it had a token, and Ray reads none later: import it afterwards, or "
            "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN before the process starts"
        )


def wait_for_nodes(number: int, timeout_s: float = 600.0) -> None:
    """Wait until the Ray at RAY_ADDRESS has so many nodes. Raises: ClusterError (time-out)."""
    due = time.monotonic() + timeout_s
    while True:
        try:
            with ray_cluster() as ray:
                alive = sum(node["Alive"] for node in ray.nodes())
        except ClusterError:  # not started yet
            alive = 0
        if alive >= number:
            return
        if time.monotonic() > due:
            raise ClusterError(f"{alive} of {number} nodes joined in {timeout_s:g} s: check `ray start` on them")
        time.sleep(2.0)


if __name__ == "__main__":  # for scripts: python -m runtime.cluster NODES
    wait_for_nodes(int(sys.argv[1]))
