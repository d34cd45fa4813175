"""The Memory Compiler behind HTTP: a client of `memcompiler serve compiler` that the agent loop takes for a compiler.

`RemoteServer` is how clients of ours call a server: in parallel, again where it is only busy or starting, and never for
longer than they were told.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch
from pydantic import ValidationError

from compiler.records import Compilation, CompileRequest, Decoding
from compiler.server.wire import AdapterBody, CompileBody, CompileReply, SamplingBody, TensorName
from configs.compiler import COMPILER_KEY
from soft_mem.projector import Projector

_BUSY = (429, 503)
_UNFIT = (400, 413, 422)  # what a request holds cannot be served; a wrong key or address is the matter of all
_CONNECT, _LONGEST_PAUSE = 5.0, 5.0  # seconds


class RemoteError(RuntimeError):
    """A server that cannot be reached, is too slow, refuses a request, or answers what it should not."""


class RefusedError(RemoteError, ValueError):
    """A request that is not served for what it holds; others may be."""


class RemoteServer:
    """One server.

    Args:
        url: http(s)://host:port, without a path.
        key_name: the environment variable with its key, if it wants one. The key is kept nowhere else.
        start: the command that starts it, for messages.
        timeout: seconds that a batch of requests may take, retries included.
        parallel: requests under way at a time.
    """

    def __init__(self, url: str, key_name: str, start: str, timeout: float = 120.0, parallel: int = 64) -> None:
        key = os.environ.get(key_name)
        self.url, self.start, self.timeout, self.parallel = url.rstrip("/"), start, timeout, parallel
        self._client = httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=parallel, max_keepalive_connections=parallel),
            trust_env=False,  # no proxy between us and a server that we name by its address
        )  # fmt: skip

    def get(self, path: str) -> Any:
        """The JSON at `path`. Raises: RemoteError."""
        return self._send("GET", path, None, time.monotonic() + self.timeout, threading.Event())

    def post_all(self, path: str, bodies: Sequence[Any]) -> list[Any]:
        """The JSON answers to all bodies, in their order.

        Raises:
            RemoteError: one of them got none; the others are given up.
        """
        deadline, stop = time.monotonic() + self.timeout, threading.Event()

        def send(body: Any) -> Any:
            try:
                return self._send("POST", path, body, deadline, stop)
            except BaseException:
                stop.set()
                raise

        if len(bodies) == 1:
            return [send(bodies[0])]
        with ThreadPoolExecutor(max(1, min(self.parallel, len(bodies))), thread_name_prefix="remote") as pool:
            futures = [pool.submit(send, body) for body in bodies]
            try:
                return [future.result() for future in futures]
            finally:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)

    def _send(self, method: str, path: str, body: Any, deadline: float, stop: threading.Event) -> Any:
        pause, attempts = 0.1, 0
        while True:
            attempts += 1
            wait, why = 0.0, ""
            left = max(0.05, deadline - time.monotonic())
            try:
                response = self._client.request(
                    method, path, json=body, timeout=httpx.Timeout(left, connect=min(_CONNECT, left))
                )
            except (httpx.ReadTimeout, httpx.WriteTimeout):
                raise RemoteError(f"{self.url}{path} did not answer within {self.timeout:g} s") from None
            except httpx.TransportError as error:
                why = f"{type(error).__name__}: {error}"
            else:
                if response.status_code == 200:
                    return self._json(response, path)
                why = f"{response.status_code}: {_said(response)}"
                if response.status_code not in _BUSY:
                    trouble = RefusedError if response.status_code in _UNFIT else RemoteError
                    raise trouble(f"{self.url}{path} answered {why}")
                wait = _seconds(response.headers.get("retry-after", ""))
            wait = min(max(wait, pause), _LONGEST_PAUSE)
            if time.monotonic() + wait > deadline or stop.wait(wait):
                raise RemoteError(
                    f"{self.url}{path} gave no answer in {attempts} attempts ({why}): is it up? Start it by "
                    f"`{self.start}`"
                )
            pause *= 2

    def _json(self, response: httpx.Response, path: str) -> Any:
        try:
            return response.json()
        except ValueError:
            raise RemoteError(f"{self.url}{path} did not answer in JSON: is it the right server?") from None


class RemoteCompiler:
    """A backend of the protocol `compiler.records.Compiler`, and one that GRPO can roll out with.

    Where something is drawn at random, each request has a seed of its own, so that a run does not depend on which
    requests a service happens to compile together, or which service compiles it.

    Args:
        urls: of the service, such as http://127.0.0.1:8100, or of several that share the requests.
        temperature: of the text; `latent_temperature` of the soft tokens, by default the same.
        timeout: seconds that one call of `compile` may take, retries included.
    """

    def __init__(
        self, urls: str | Sequence[str], temperature: float = 0.0, latent_temperature: float | None = None,
        seed: int = 0, timeout: float = 120.0, parallel: int = 64,
    ) -> None:  # fmt: skip
        start = "memcompiler serve compiler --checkpoint RUN"
        names = [urls] if isinstance(urls, str) else urls
        self.servers = [RemoteServer(url, COMPILER_KEY, start, timeout, parallel) for url in names]
        self.decoding = Decoding(temperature, latent_temperature=latent_temperature)
        self.generator = torch.Generator().manual_seed(seed)

    def load_adapter(self, folder: Path, version: int, projector: Projector) -> None:
        """Have every service compile with the weights in `folder` from now on (see `compiler.server.wire.AdapterBody`).

        Raises:
            RemoteError: one of them cannot load them.
        """
        order = AdapterBody(folder=str(folder.resolve()), version=version).model_dump()
        self._each("/adapter", [[order] for _ in self.servers])

    def hash(self) -> str | None:
        """SHA-256 of what the services' checkpoint adds to its base; None where they do not say.

        Raises:
            RemoteError: a service cannot be reached, or they compile with different weights.
        """
        weights = {server.url: server.get("/ready").get("weights") for server in self.servers}
        if len(set(weights.values())) > 1:
            raise RemoteError(f"the compiler services have different weights: {weights}")
        return next(iter(weights.values()))

    def compile(self, requests: Sequence[CompileRequest]) -> list[Compilation]:
        """One compilation for each request, in their order.

        Raises:
            RemoteError: a service cannot be reached, refuses one of them, or is of another version.
            ValueError: `decoding` truncates the distribution, which services do not.
        """
        if not requests:
            return []
        if self.decoding.top_k or self.decoding.top_p < 1:
            raise ValueError("a compiler service samples without truncation: set top_k=0 and top_p=1")
        seeds = torch.randint(2**62, (len(requests),), generator=self.generator).tolist()
        temperature, latent = self.decoding.temperature, self.decoding.soft_temperature
        # At temperature 0, z is the mean, and need not be sent a second time.
        tensors: tuple[TensorName, ...] = ("mu", "log_sigma", "z", "noise") if latent else ("mu", "log_sigma")
        bodies = [
            CompileBody.of(
                request, SamplingBody(temperature=temperature, latent_temperature=latent, seed=seed), tensors
            )
            for request, seed in zip(requests, seeds, strict=True)
        ]
        n = len(self.servers)
        shares = self._each("/compile", [bodies[i::n] for i in range(n)])
        return [self._read(shares[i % n][i // n], request) for i, request in enumerate(requests)]

    def _each(self, path: str, bodies: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Every server's answers to its share of the bodies."""
        with ThreadPoolExecutor(len(self.servers), thread_name_prefix="services") as pool:
            asked = [
                pool.submit(server.post_all, path, share) if share else None
                for server, share in zip(self.servers, bodies, strict=True)
            ]
            return [[] if future is None else future.result() for future in asked]

    def _read(self, reply: Any, request: CompileRequest) -> Compilation:
        try:
            return CompileReply.model_validate(reply).compilation(request)
        except ValidationError as error:
            fields = ", ".join(sorted({".".join(map(str, e["loc"])) for e in error.errors(include_input=False)}))
            raise RemoteError(f"a compiler service answers in another version's format ({fields})") from None
        except ValueError as error:
            raise RemoteError(f"a compiler service: {error}: do both sides run the same version?") from None


def _said(response: httpx.Response) -> str:
    """A server's own words on an error, ours or vLLM's."""
    try:
        error = response.json()["error"]
        said = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError):
        said = response.text
    return str(said)[:500]


def _seconds(retry_after: str) -> float:
    try:
        return float(retry_after)
    except ValueError:  # a date, or nothing
        return 0.0
