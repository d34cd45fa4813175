"""HTTP clients with parallel requests, retries and time-outs, and addresses of local services."""

from __future__ import annotations

import email.utils
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

import httpx
from tenacity import (
    RetryCallState,
    RetryError,
    Retrying,
    retry_if_exception_type,
    stop_before_delay,
    wait_exponential,
)

MAX_WAIT_S = 120.0  # maximal wait between two attempts
_BUSY = (429, 503)
_INVALID = (400, 413, 422)  # errors of one request's content, as opposed to its key or address
_CONNECT_S, _LONGEST_PAUSE_S = 5.0, 5.0
# Seconds for which servers keep an idle connection: more than clients do (httpx, openai: 5), because a request that is
# sent as the server closes its connection is lost.
KEEP_ALIVE_S = 75
_backoff = wait_exponential(multiplier=0.1)


class RemoteError(RuntimeError):
    """A server is unreachable or too slow, refuses a request, or sends an invalid answer."""


class RefusedError(RemoteError, ValueError):
    """A server refuses a request for its content; it may serve others."""


class TransientError(Exception):
    """An attempt failed but another may succeed. `wait_s`: the server's Retry-After in seconds."""

    def __init__(self, why: str, wait_s: float = 0.0) -> None:
        super().__init__(why)
        self.wait_s = wait_s


class RemoteServer:
    """A client of one server. Thread-safe.

    Args:
        url: http(s)://host:port, without a path.
        key_name: the environment variable of the server's key, if it requires one.
        start: the command that starts the server, for messages.
        timeout: seconds per request, including retries.
        parallel: maximal number of concurrent requests.
    """

    def __init__(self, url: str, key_name: str, start: str, timeout: float = 120.0, parallel: int = 64) -> None:
        key = os.environ.get(key_name)
        self.url, self.start, self.timeout, self.parallel = url.rstrip("/"), start, timeout, parallel
        self._client = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=parallel, max_keepalive_connections=parallel),
            trust_env=False,  # no proxy
        )
        self._pool = ThreadPoolExecutor(parallel, thread_name_prefix="remote")  # threads start when they are needed

    def get(self, path: str) -> Any:
        """Return the JSON at `path`. Raises: RemoteError."""
        return self._send("GET", path, None, threading.Event())

    def post_all(self, path: str, bodies: Sequence[Any]) -> list[Any]:
        """Return the JSON answers to all bodies, in their order.

        Raises:
            RefusedError: a request was refused for its content; the others are cancelled.
            RemoteError: a request has no answer; the others are cancelled.
        """
        over, failures = threading.Event(), list[BaseException]()

        def send(body: Any) -> Any:
            try:
                return self._send("POST", path, body, over)
            except BaseException as error:
                failures.append(error)
                over.set()
                raise

        futures = [self._pool.submit(send, body) for body in bodies]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
            if failures:
                raise failures[0]  # later failures are cancellations
            return [future.result() for future in futures]
        finally:
            over.set()
            for future in futures:  # do not wait for cancelled requests
                future.cancel()

    def _send(self, method: str, path: str, body: Any, over: threading.Event) -> Any:
        """Send a request until an attempt succeeds; give up once `over` is set."""
        deadline = time.monotonic() + self.timeout

        def pause(seconds: float) -> None:
            if over.wait(seconds):
                raise RemoteError("cancelled: another request of the batch failed")

        attempts = Retrying(
            retry=retry_if_exception_type(TransientError),
            wait=retry_wait(_backoff, _LONGEST_PAUSE_S),
            sleep=pause,
            stop=stop_before_delay(self.timeout),
        )
        try:
            return attempts(self._attempt, method, path, body, deadline)
        except RetryError as error:
            last = error.last_attempt
            raise RemoteError(
                f"{self.url}{path} gave no answer in {last.attempt_number} attempts ({last.exception()}): is it up? "
                f"Start it by `{self.start}`"
            ) from None

    def _attempt(self, method: str, path: str, body: Any, deadline: float) -> Any:
        left = max(0.05, deadline - time.monotonic())
        timeout = httpx.Timeout(left, connect=min(_CONNECT_S, left))
        try:
            response = self._client.request(method, path, json=body, timeout=timeout)
        except (httpx.ReadTimeout, httpx.WriteTimeout):
            raise RemoteError(f"{self.url}{path} did not answer within {self.timeout:g} s") from None
        except httpx.TransportError as error:
            raise TransientError(f"{type(error).__name__}: {error}") from None
        status = response.status_code
        if status in _BUSY:
            wait_s = retry_after(response.headers.get("retry-after"))
            raise TransientError(f"{status}: {_error_message(response)}", wait_s)
        if status != 200:
            trouble = RefusedError if status in _INVALID else RemoteError
            raise trouble(f"{self.url}{path} answered {status}: {_error_message(response)}")
        try:
            return response.json()
        except ValueError:
            raise RemoteError(f"{self.url}{path} did not answer in JSON: is it the right server?") from None


def retry_after(value: str | None) -> float:
    """Parse a Retry-After header with seconds or a date; return seconds, 0 for an invalid one."""
    if not value:
        return 0.0
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError):
            return 0.0
    return min(MAX_WAIT_S, seconds) if seconds > 0 else 0.0  # also of "nan"


def retry_wait(
    backoff: Callable[[RetryCallState], float], longest: float = MAX_WAIT_S
) -> Callable[[RetryCallState], float]:
    """Return tenacity's wait function: the longer of the server's Retry-After and `backoff`, at most `longest`."""

    def seconds(state: RetryCallState) -> float:
        failure = state.outcome.exception() if state.outcome else None
        requested = failure.wait_s if isinstance(failure, TransientError) else 0.0
        return min(longest, max(requested, backoff(state)))

    return seconds


def _error_message(response: httpx.Response) -> str:
    """Return the error message in a response of our server or vLLM's."""
    try:
        error = response.json()["error"]
        message = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError):
        message = response.text
    return str(message)[:500]


LOOPBACK = "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_loopback(host: str) -> None:
    """Raise ValueError for a host that other machines can reach."""
    if not is_loopback(host):
        raise ValueError(
            f"{host} is not loopback, and requests travel unencrypted here: serve on {LOOPBACK}, and put an SSH tunnel "
            "or a proxy with TLS and authentication in front"
        )


def http_url(host: str, port: int) -> str:
    """Return a server's URL."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def bound_socket(host: str, port: int) -> socket.socket:
    """Bind a TCP socket; port 0 selects a free one. Raises: ValueError, for a used port."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted connections inherit it. Without it, the second write of a reply waits up to 40 ms for a delayed ACK.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ValueError(f"cannot listen at {host}:{port} ({error.strerror}): choose another --port") from error
    return bound


def free_port() -> int:
    """Return a port that is free now; bind it soon."""
    with bound_socket(LOOPBACK, 0) as probe:
        return int(probe.getsockname()[1])


def responds(url: str, timeout_s: float = 5.0) -> bool:
    """Return whether a GET of `url` returns status 200, without a proxy."""
    try:
        return httpx.get(url, timeout=timeout_s, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
