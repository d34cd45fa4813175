"""The client of `memcompiler serve compiler`, which is a `Compiler` for the agent loop, and the bodies of its requests.

Bodies are typed JSON. A tensor is `{"shape": [N, d], "data": BASE64}` with little-endian fp32 values, row by row.
Pictures are PNG files in base64. Nothing is executed or unpickled.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, get_args

import numpy as np
import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from compiler.brief_state import parse_brief_state, render_brief_state
from compiler.language import Emission, Kind, ParseError, ParseResult, parse
from compiler.records import Compilation, CompileRequest, Decoding, SoftOn
from configs.models import COMPILER_KEY
from memory.entry import MemoryEntry, Provenance
from memory.trajectory import png_bytes
from runtime.http import RemoteError, RemoteServer
from runtime.pictures import open_picture

# The compiler does not read an entry's provenance.
_NO_PROVENANCE = Provenance(task_id="", scene="", goal="", split="", success=False)


def _brief_state(text: str) -> str:
    """Validate a Brief State. Raises: ValueError, unless the text is as `render_brief_state` writes it."""
    try:
        same = render_brief_state(parse_brief_state(text)) == text
    except (ValueError, KeyError, IndexError):
        same = False
    if not same:
        raise ValueError("not a rendered Brief State (goal: ..., done:, now:, next:, note:)")
    return text


def _png(text: str) -> str:
    """Validate a picture. Raises: ValueError, unless the text is a PNG of at most MAX_PIXELS in base64."""
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error:
        raise ValueError("not base64") from None
    open_picture(data)
    return text


Picture = Annotated[str, AfterValidator(_png)]
StateText = Annotated[str, AfterValidator(_brief_state)]
TensorName = Literal["mu", "log_sigma", "z", "noise"]
TENSORS: tuple[TensorName, ...] = get_args(TensorName)


class Body(BaseModel):
    """A typed, immutable JSON object."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class TensorBody(Body):
    """A tensor in a body."""

    shape: tuple[int, ...]
    data: str  # base64

    @classmethod
    def of(cls, tensor: Tensor) -> TensorBody:
        """Encode a tensor as fp32."""
        values = tensor.detach().to("cpu", torch.float32).contiguous().numpy().astype("<f4", copy=False)
        return cls(shape=tuple(tensor.shape), data=base64.b64encode(values.tobytes()).decode("ascii"))

    def tensor(self) -> Tensor:
        """Decode as fp32 on the CPU. Raises: ValueError, if data and shape do not fit."""
        values = np.frombuffer(base64.b64decode(self.data, validate=True), dtype="<f4")
        if values.size != math.prod(self.shape):
            raise ValueError(f"a tensor of shape {list(self.shape)} cannot have {values.size} values")
        return torch.from_numpy(values.astype(np.float32)).reshape(self.shape)


class EntryBody(Body):
    """A memory entry in a body."""

    id: str
    text: str
    images: tuple[Picture, ...] = ()


class SamplingBody(Body):
    """Sampling parameters; the service's own settings replace missing ones."""

    temperature: float | None = Field(default=None, ge=0, le=2)  # 0: greedy text
    latent_temperature: float | None = Field(default=None, ge=0, le=2)  # of z; default: `temperature`
    seed: int | None = Field(default=None, ge=0, lt=1 << 63)  # default: drawn by the service, and named in the reply


class CompileBody(Body):
    """The body of POST /compile."""

    goal: str
    memory: tuple[EntryBody, ...] = ()
    state: StateText | None = None  # the Brief State, rendered; null in the ablation without it
    observation: str
    image: Picture | None = None
    history: tuple[str, ...] = ()
    sampling: SamplingBody = SamplingBody()
    soft_on: SoftOn = "always"  # the emissions beside which soft tokens are read; others may get none
    environment: str = ""  # whose instructions are read, where the service has those of several
    tensors: tuple[TensorName, ...] = ("mu", "log_sigma")  # tensors to return

    @classmethod
    def of(cls, request: CompileRequest, sampling: SamplingBody, tensors: tuple[TensorName, ...]) -> dict[str, Any]:
        """Write a request as JSON, which the service validates."""
        return {
            "goal": request.goal,
            "memory": [
                {"id": entry.id, "text": entry.text, "images": [_base64(png) for png in entry.images]}
                for entry in request.memory
            ],
            "state": None if request.state is None else render_brief_state(request.state),
            "observation": request.observation,
            "image": None if request.image is None else _base64(png_bytes(request.image)),
            "history": list(request.history),
            "soft_on": request.soft_on,
            **({"environment": request.environment} if request.environment else {}),
            "sampling": sampling.model_dump(),
            "tensors": list(tensors),
        }

    def request(self) -> CompileRequest:
        """Decode the request."""
        memory = tuple(
            MemoryEntry(entry.id, entry.text, _NO_PROVENANCE, tuple(base64.b64decode(png) for png in entry.images))
            for entry in self.memory
        )
        state = None if self.state is None else parse_brief_state(self.state)
        image = None if self.image is None else open_picture(base64.b64decode(self.image))
        return CompileRequest(
            goal=self.goal,
            memory=memory,
            state=state,
            observation=self.observation,
            image=image,
            history=self.history,
            soft_on=self.soft_on,
            environment=self.environment,
        )


class Timings(Body):
    """Seconds of a request."""

    queue: float
    compile: float  # of its batch


class CompileReply(Body):
    """The reply of POST /compile. mu, log_sigma, z and noise are null if not requested, or without soft tokens."""

    text: str
    kind: Kind
    parse_error: ParseError | None
    prompt_ids: tuple[int, ...]
    # ends with the end-of-turn token, sampled or (if truncated) forced; empty from a compiler without text
    emission_ids: tuple[int, ...]
    text_logprobs: tuple[float, ...] | None
    latent_logprobs: tuple[float, ...] | None  # of z, also where z is not returned
    emb_std: float | None  # soft tokens at the executor's scale are z * emb_std
    mu: TensorBody | None
    log_sigma: TensorBody | None
    z: TensorBody | None
    noise: TensorBody | None  # z is mu + T sigma noise; null where z is the mean
    seed: int | None  # null if nothing was sampled at random
    tokens_in: int
    tokens_out: int
    cached_tokens: int | None  # of tokens_in, from the prefix cache; null without one
    weight_version: int
    seconds: Timings

    @classmethod
    def of(
        cls,
        compilation: Compilation,
        tensors: tuple[TensorName, ...],
        emb_std: float | None,
        seed: int | None,
        seconds: Timings,
    ) -> CompileReply:
        """Write a compilation as a reply with these tensors."""
        sent: dict[str, Tensor | None] = {
            name: getattr(compilation, name) if name in tensors else None for name in TENSORS
        }
        bodies = {name: None if tensor is None else TensorBody.of(tensor) for name, tensor in sent.items()}
        return cls(
            text=compilation.text,
            kind=compilation.emission.kind,
            parse_error=compilation.parse_error,
            prompt_ids=compilation.prompt_ids,
            emission_ids=compilation.emission_ids,
            text_logprobs=_floats(compilation.text_logprobs),
            latent_logprobs=_floats(compilation.latent_logprobs),
            emb_std=emb_std,
            seed=seed,
            tokens_in=compilation.tokens_in,
            tokens_out=compilation.tokens_out,
            cached_tokens=compilation.tokens_cached,
            weight_version=compilation.weight_version,
            seconds=seconds,
            **bodies,
        )

    def compilation(self, request: CompileRequest) -> Compilation:
        """Decode the compilation; a missing z is the mean. Raises: ValueError, if client and service parse the emission
        differently, or a tensor is damaged."""
        error = self.parse_error
        none = error is ParseError.TRUNCATED or not (self.text or self.emission_ids)
        parsed = ParseResult(Emission(), error) if none else parse(self.text)
        if (parsed.emission.kind, parsed.error) != (self.kind, error):
            raise ValueError(f"the service parses its emission as {self.kind}, this client as {parsed.emission.kind}")
        sent: list[TensorBody | None] = [getattr(self, name) for name in TENSORS]
        mu, log_sigma, z, noise = (None if body is None else body.tensor() for body in sent)
        z = mu if z is None else z
        return Compilation(
            text=self.text,
            emission=parsed.emission,
            parse_error=error,
            prompt_ids=self.prompt_ids,
            emission_ids=self.emission_ids,
            text_logprobs=_tensor(self.text_logprobs),
            z=z,
            noise=noise,
            mu=mu,
            log_sigma=log_sigma,
            soft=None if z is None or self.emb_std is None else z * self.emb_std,
            latent_logprobs=_tensor(self.latent_logprobs),
            request=request,
            tokens_in=self.tokens_in,
            tokens_out=self.tokens_out,
            tokens_cached=self.cached_tokens,
            weight_version=self.weight_version,
        )


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _floats(tensor: Tensor | None) -> tuple[float, ...] | None:
    return None if tensor is None else tuple(tensor.float().tolist())


def _tensor(values: tuple[float, ...] | None) -> Tensor | None:
    return None if values is None else torch.tensor(values, dtype=torch.float32)


class RemoteCompiler:
    """A `Compiler` over HTTP. Thread-safe.

    Each sampled request has its own seed, so that a run does not depend on how the service batches requests.

    Args:
        url: of the service, such as http://127.0.0.1:8100.
        temperature: of the text; `latent_temperature`: of the soft tokens, by default the same.
        timeout: seconds for a request, including retries.
        parallel: requests in flight at most.

    Attributes:
        environment: named in requests that name none; for a service that compiles for several environments.
        writes_text: False for a compiler that was trained to make soft tokens only.
    """

    concurrent = takes_seeds = True
    writes_text = True

    def __init__(
        self,
        url: str,
        temperature: float = 0.0,
        latent_temperature: float | None = None,
        seed: int = 0,
        timeout: float = 120.0,
        parallel: int = 64,
    ) -> None:
        start = "memcompiler serve compiler --checkpoint RUN"
        self.server = RemoteServer(url, COMPILER_KEY, start, timeout=timeout, parallel=parallel)
        self.decoding = Decoding(temperature, latent_temperature=latent_temperature)
        self.generator = torch.Generator().manual_seed(seed)
        self.environment = ""

    def about(self) -> dict[str, Any]:
        """Return the service's hash of weights, what the executor read in training, and its environments."""
        return self.server.get("/ready")

    def hash(self) -> str | None:
        """Return the SHA-256 of the service's adapter and projector; None if it does not report one. Raises:
        RemoteError, if the service cannot be reached."""
        return self.about().get("weights")

    def compile(self, requests: Sequence[CompileRequest], seeds: Sequence[int] | None = None) -> list[Compilation]:
        """Return one compilation for each request, in order, drawn by these seeds (default: by new ones).

        Raises:
            RemoteError: the service cannot be reached, refuses a request, or is of another version.
        """
        if not requests:
            return []
        seeds = seeds or torch.randint(2**62, (len(requests),), generator=self.generator).tolist()
        temperature, latent = self.decoding.temperature, self.decoding.soft_temperature
        drawn = [SamplingBody(temperature=temperature, latent_temperature=latent, seed=seed) for seed in seeds]
        tensors = TENSORS if latent else TENSORS[:2]  # at temperature 0, z equals mu
        named = [replace(request, environment=request.environment or self.environment) for request in requests]
        bodies = [CompileBody.of(*each, tensors) for each in zip(named, drawn, strict=True)]
        replies = self.server.post_all("/compile", bodies)
        return [self._read(reply, request) for reply, request in zip(replies, requests, strict=True)]

    def _read(self, reply: Any, request: CompileRequest) -> Compilation:
        try:
            return CompileReply.model_validate(reply).compilation(request)
        except ValidationError as error:
            fields = ", ".join(sorted({".".join(map(str, e["loc"])) for e in error.errors(include_input=False)}))
            raise RemoteError(f"the compiler service's reply is of another version: {fields}") from None
        except ValueError as error:
            raise RemoteError(f"the compiler service: {error}: run the same version on both sides") from None
