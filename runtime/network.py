"""Addresses of services on this machine: loopback only, ports, and whether somebody answers."""

from __future__ import annotations

import ipaddress
import socket

LOOPBACK = "127.0.0.1"


def check_loopback(host: str) -> None:
    """Raises: ValueError, unless `host` is an address of this machine that no other can reach."""
    try:
        loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ValueError(
            f"{host} is not loopback, and requests travel unencrypted here: serve on {LOOPBACK}, and put an SSH tunnel "
            "or a proxy with TLS and authentication in front"
        )


def http_url(host: str, port: int) -> str:
    """Write the URL of a server."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def bound_socket(host: str, port: int) -> socket.socket:
    """Bind a TCP socket; port 0 takes a free one. Raises: ValueError, where the port is taken."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ValueError(f"cannot listen at {host}:{port} ({error.strerror}): choose another --port") from error
    return bound


def free_port() -> int:
    """Find a port that nobody listens at now; whoever is told it should bind it soon."""
    with bound_socket(LOOPBACK, 0) as probe:
        return int(probe.getsockname()[1])


def answers(url: str, timeout_s: float = 5.0) -> bool:
    """Tell whether a GET of `url` is answered with 200. No proxy is asked for a server on this machine."""
    import httpx  # late: what serves needs no client

    try:
        return httpx.get(url, timeout=timeout_s, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
