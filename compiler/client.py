"""The Memory Compiler behind HTTP: a client of `memcompiler serve compiler`, which the agent loop takes for a
compiler."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from compiler.records import Compilation, CompileRequest, Decoding
from compiler.server.wire import TENSORS, AdapterBody, CompileBody, CompileReply, SamplingBody
from configs.models import COMPILER_KEY
from runtime.http import RemoteError, RemoteServer
from soft_mem.projector import Projector


class RemoteCompiler:
    """A backend of the protocol `compiler.records.Compiler`, and one that GRPO can roll out with.

    Where something is drawn at random, each request has a seed of its own, so that a run does not depend on which
    requests a service happens to compile together, or which service compiles it.

    Args:
        urls: of the service, such as http://127.0.0.1:8100, or of several that share the requests.
        temperature: of the text; `latent_temperature` of the soft tokens, by default the same.
        timeout: seconds that a request may take from when it is sent, retries included.
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
        Raises: RemoteError, where one of them cannot load them."""
        order = AdapterBody(folder=str(folder.resolve()), version=version).model_dump()
        self._each("/adapter", [[order] for _ in self.servers])

    def hash(self) -> str | None:
        """Ask for the SHA-256 of what the services' checkpoint adds to its base; None where they do not say. Raises:
        RemoteError, where a service cannot be reached, or they compile with different weights."""
        weights = {server.url: server.get("/ready").get("weights") for server in self.servers}
        if len(set(weights.values())) > 1:
            raise RemoteError(f"the compiler services have different weights: {weights}")
        return next(iter(weights.values()))

    def compile(self, requests: Sequence[CompileRequest]) -> list[Compilation]:
        """Get one compilation for each request, in their order.

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
        drawn = [SamplingBody(temperature=temperature, latent_temperature=latent, seed=seed) for seed in seeds]
        tensors = TENSORS if latent else TENSORS[:2]  # at temperature 0, z is the mean, and need not be sent again
        bodies = [CompileBody.of(*each, tensors) for each in zip(requests, drawn, strict=True)]
        n = len(self.servers)
        shares = self._each("/compile", [bodies[i::n] for i in range(n)])
        return [self._read(shares[i % n][i // n], request) for i, request in enumerate(requests)]

    def _each(self, path: str, bodies: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Get every server's answers to its share of the bodies."""
        with ThreadPoolExecutor(len(self.servers), thread_name_prefix="services") as pool:
            return list(pool.map(lambda server, share: server.post_all(path, share), self.servers, bodies))

    def _read(self, reply: Any, request: CompileRequest) -> Compilation:
        try:
            return CompileReply.model_validate(reply).compilation(request)
        except ValidationError as error:
            fields = ", ".join(sorted({".".join(map(str, e["loc"])) for e in error.errors(include_input=False)}))
            raise RemoteError(f"a compiler service answers in another version's format ({fields})") from None
        except ValueError as error:
            raise RemoteError(f"a compiler service: {error}: do both sides run the same version?") from None
