"""A client of OpenAI-compatible endpoints, for executors, teachers and memories.

Faults are counted by kind. Transient faults are retried: `rate_limit` (429), `server_error` (5xx), `timeout`,
`connection`, `not_json` (an invalid or truncated body), `no_choice` (JSON without an answer), `no_vectors` (not one
vector per text). Permanent faults (`lm.responses.PERMANENT_FAULTS`) fail their request at once, and an equal request is
not sent again. A wrong key or model, a spent budget, or several failures in a row for one cause stop the client.

Answers and costs are cached in a file (`lm.answer_cache`): an equal request is paid once.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_exponential, wait_random

from configs.models import EndpointConfig
from lm.answer_cache import Answer, AnswerCache, EndpointStop, price
from lm.responses import Message, RequestFault, estimate_tokens, parse_answer, parse_vectors
from runtime.http import MAX_WAIT_S, is_loopback, retry_after, retry_wait

if TYPE_CHECKING:
    from openai import APIStatusError, AsyncOpenAI

T = TypeVar("T")

MAX_FAILURES_IN_A_ROW = 5  # of one cause, before the client stops
STOPPING = (401, 402, 403, 404)  # a wrong key, account or model
RETRIED = {408: "timeout", 409: "server_error", 425: "rate_limit", 429: "rate_limit"}


class EndpointFailure(RuntimeError):
    """A request has no usable answer after all attempts."""


class Endpoint:
    """A client of one model. Requests run concurrently in a background thread; `run` waits for a batch of them.

    Args:
        config: address, model, prices and limits.
        cache: the SQLite file unless the configuration names one; None caches in memory.

    Raises:
        ValueError: the environment variable of the key is empty.
        EndpointStop: the address, a proxy or the cache file is unusable.
    """

    def __init__(self, config: EndpointConfig, cache: Path | None = None) -> None:
        self.config = config
        self.stopped: EndpointStop | None = None
        self.from_cache = 0  # number of cached answers used by this process
        self._key = _key(config.key_env)
        named = Path(config.cache) if config.cache else cache
        self._ledger = AnswerCache(named, config.model)
        self._limiter = RateLimiter(config.rpm, config.tpm)
        self._slots = asyncio.Semaphore(config.concurrency)
        self._failed = Counter[str]()  # failures since the last answer, by cause
        self._permanent = dict[str, str]()  # messages of permanent failures, by request key
        self._client = self._make_client()
        self._starting, self._started = threading.Lock(), None

    def run(self, work: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Run coroutines concurrently; return results in order, with EndpointFailure and EndpointStop as values."""

        async def gather() -> list[Any]:
            return await asyncio.gather(*work, return_exceptions=True)

        results = asyncio.run_coroutine_threadsafe(gather(), self._loop).result()
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, EndpointFailure | EndpointStop):
                raise result
        return results

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of the background thread, and start it the first time."""
        with self._starting:
            if self._started is None:
                self._started = asyncio.new_event_loop()
                threading.Thread(target=self._started.run_forever, name="endpoint", daemon=True).start()
        return self._started

    async def ask(self, messages: Sequence[Message], role: str, max_tokens: int, repeat: int = 0) -> Answer:
        """Return the model's answer, cached if an equal request was answered before.

        Args:
            role: whose tokens these are in the cost account.
            repeat: part of the request's key, to sample several answers to the same messages.

        Raises:
            EndpointFailure: no usable answer.
            EndpointStop: the client has stopped.
        """
        parameters = {self.config.length_key: max_tokens, **self.config.extra}
        if self.config.temperature is not None:
            parameters["temperature"] = self.config.temperature
        body = _encodable({"model": self.config.model, "messages": list(messages), **parameters})
        key = _request_key([body, repeat])
        expected = estimate_tokens(body["messages"]) + max_tokens
        with self._running():
            if (known := self._ledger.answer(key)) is not None:
                self.from_cache += 1
                return known
            if key in self._permanent:
                raise EndpointFailure(self._permanent[key])
            async with self._slots:
                answer = await self._with_retries(lambda: self._chat(body), role, expected, key)
            self._limiter.correct(answer.tokens_in + answer.tokens_out - expected)
            return self._ledger.keep(key, role, answer)

    async def embed(self, texts: Sequence[str], role: str) -> list[bytes]:
        """Return the vector of each text as float32 bytes, cached ones from the cache and all others by one request.

        Raises:
            EndpointFailure: no usable answer.
            EndpointStop: the client has stopped.
        """
        texts = _encodable(list(texts))
        keys = [_request_key([self.config.model, self.config.extra, text]) for text in texts]
        with self._running():
            known = self._ledger.vectors(keys)
            self.from_cache += sum(key in known for key in keys)
            unknown = {key: text for key, text in zip(keys, texts, strict=True) if key not in known}
            if unknown:
                sent = [text or " " for text in unknown.values()]  # servers refuse empty texts
                estimate = sum(len(text) // 4 + 1 for text in sent)
                async with self._slots:
                    vectors, read = await self._with_retries(lambda: self._vectors(sent, estimate), role, estimate)
                self._limiter.correct(read - estimate)
                known |= self._ledger.keep_vectors(dict(zip(unknown, vectors, strict=True)), role, read)
            return [known[key] for key in keys]

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Check that the client runs, and stop it for good after the first EndpointStop."""
        self.check()
        try:
            yield
        except EndpointStop as stop:
            self.stopped = self.stopped or stop
            raise

    def check(self) -> None:
        """Raise EndpointStop if the client has stopped."""
        if self.stopped is not None:
            raise self.stopped

    def account(self) -> dict[str, Any]:
        """Return the cost account of this model; `from_cache` counts this process's cached answers."""
        return self._ledger.account(self.config) | {"from_cache": self.from_cache}

    async def _with_retries(self, send: Callable[[], Awaitable[T]], role: str, estimate: int, key: str = "") -> T:
        """Send a request until an attempt succeeds. `estimate`: tokens of an attempt; `key`: the request's."""
        backoff_s, tries = self.config.backoff_s, self.config.retries + 1
        attempts = AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, RequestFault) and not error.final),
            wait=retry_wait(wait_exponential(backoff_s, MAX_WAIT_S) + wait_random(0, backoff_s)),
            stop=stop_after_attempt(tries),
            reraise=True,
        )
        try:
            answer = await attempts(self._attempt, send, role, estimate)
        except RequestFault as last:
            raise self._given_up(last, tries, key) from None
        self._failed.clear()
        return answer

    def _given_up(self, last: RequestFault, tries: int, key: str) -> EndpointFailure | EndpointStop:
        """Return the failure of a request, or EndpointStop after too many in a row of one cause."""
        why = str(last) if last.final else f"no usable answer in {tries} attempts, the last: {last}"
        why = self._scrubbed(why)
        if last.final:
            self._permanent[key] = why
        cause = last.kind if last.final else "no answer"
        self._failed[cause] += 1
        if self._failed[cause] < MAX_FAILURES_IN_A_ROW:
            return EndpointFailure(why)
        advice = "Check that it answers, then run the same command again"
        if last.final:
            advice = "Fix that and run it again (with other settings, into another folder)"
        return EndpointStop(
            f"{self.config.model} at {self.config.base_url} failed {self._failed[cause]} requests in a row ({why}). "
            f"{advice}"
        )

    async def _attempt(self, send: Callable[[], Awaitable[T]], role: str, estimate: int) -> T:
        """Send one request within budget and rate limits; count a fault."""
        self.check()
        self._check_budget()
        await asyncio.sleep(self._limiter.delay(estimate))
        try:
            return await send()
        except RequestFault as fault:
            self._ledger.count(role, fault.kind, *fault.paid)
            self._limiter.hold(fault.wait_s)
            raise

    async def _chat(self, body: dict[str, Any]) -> Answer:
        """Send a chat request. Raises: Fault, EndpointStop."""
        create = self._client.chat.completions.with_raw_response.create
        others = {name: value for name, value in body.items() if name not in ("model", "messages")}
        reply = await self._body(create(model=body["model"], messages=body["messages"], extra_body=others))
        return parse_answer(reply, body["messages"], self.config.length_key)

    async def _vectors(self, texts: list[str], estimate: int) -> tuple[list[bytes], int]:
        """Send an embedding request; return vectors and input tokens. Raises: Fault, EndpointStop."""
        create = self._client.embeddings.with_raw_response.create
        request = create(
            model=self.config.model, input=texts, encoding_format="float", extra_body=dict(self.config.extra)
        )
        return parse_vectors(await self._body(request), len(texts), estimate)

    async def _body(self, request: Awaitable[Any]) -> str:
        """Await an HTTP request and return its body. Raises: Fault, EndpointStop."""
        import openai

        try:
            async with asyncio.timeout(self.config.timeout_s):  # in all: a server may send bytes forever
                raw = await request
        except (TimeoutError, openai.APITimeoutError):
            raise RequestFault("timeout", f"no answer in {self.config.timeout_s:g} s") from None
        except openai.APIStatusError as error:
            raise self._refusal(error) from None
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            raise RequestFault(
                "connection", f"{type(cause).__name__}: {cause}{_proxies(self.config.base_url)}"
            ) from None
        return raw.text

    def _refusal(self, error: APIStatusError) -> RequestFault | EndpointStop:
        status, detail = error.status_code, self._scrubbed(f"{error.status_code} {error.message[:300]}")
        settings = {"max_tokens": "length_key", "max_completion_tokens": "length_key", "temperature": "temperature"}
        settings |= dict.fromkeys(self.config.extra, "extra")
        involved = [f"api.{set_by}" for name, set_by in settings.items() if name in re.findall(r"\w+", error.message)]
        detail += f" (see {', '.join(dict.fromkeys(involved))})" if involved else ""
        if status in STOPPING:
            return EndpointStop(
                f"{self.config.base_url} refuses {self.config.model}: {detail}. Check api.base_url, api.model, "
                f"and the key in the environment variable {self.config.key_env}"
            )
        kind = RETRIED.get(status, "server_error" if status >= 500 else "refused")
        return RequestFault(kind, detail, retry_after(error.response.headers.get("retry-after")))

    def _check_budget(self) -> None:
        limits = self.config
        if limits.budget is None and limits.budget_tokens is None:
            return
        tokens_in, tokens_out = self._ledger.spent()
        money, tokens = price(limits, tokens_in, tokens_out), tokens_in + tokens_out
        for name, limit, spent in (("budget", limits.budget, money), ("budget_tokens", limits.budget_tokens, tokens)):
            if limit is not None and spent >= limit:
                raise EndpointStop(
                    f"{limits.model}: the {name} of {limit:g} is spent ({money:.4f} for {tokens_in} tokens read and "
                    f"{tokens_out} written). Finished work is saved: raise api.{name} and run the same command again"
                )

    def _make_client(self) -> AsyncOpenAI:
        """Create the HTTP client, without proxies to this machine and without its own retries. Raises: EndpointStop."""
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        url = self.config.base_url
        try:
            http = DefaultAsyncHttpxClient(trust_env=not is_loopback(urlsplit(url).hostname or ""))
            return AsyncOpenAI(
                base_url=url,
                api_key=self._key or "none",
                timeout=self.config.timeout_s,
                max_retries=0,
                http_client=http,
            )
        except Exception as error:  # an invalid address, proxy or certificate, or a missing package
            raise EndpointStop(f"cannot connect to {url}{_proxies(url)}: {error or type(error).__name__}") from error

    def _scrubbed(self, text: str) -> str:
        """Remove the key, which servers quote in error messages."""
        return text.replace(self._key, "***") if self._key else text


def user_message(*parts: str | bytes) -> Message:
    """Create a user message of texts and PNG pictures in order."""
    if all(isinstance(part, str) for part in parts):
        return {"role": "user", "content": "".join(map(str, parts))}
    return {"role": "user", "content": [content_part(part) for part in parts]}


def content_part(part: str | bytes) -> dict[str, Any]:
    """Convert a text or a PNG picture to a message part."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(part).decode()}}


def _request_key(request: Any) -> str:
    """Hash a request without its address."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


def _encodable(value: T) -> T:
    """Replace lone surrogates, which UTF-8 cannot encode, in a JSON value."""
    return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def _proxies(base_url: str) -> str:
    """Name the proxy variables that apply to an address, without their values, which may contain passwords."""
    proxies = {} if is_loopback(urlsplit(base_url).hostname or "") else getproxies()
    names = [f"{scheme.upper()}_PROXY" for scheme in proxies if scheme in ("all", "http", "https")]
    return f" (through the proxy of {' or '.join(names)})" if names else ""


def _key(name: str | None) -> str:
    if name is None:
        return ""
    if not (key := os.environ.get(name, "")):
        raise ValueError(
            f"the environment variable {name} (api.key_env) holds no key: set it, or set api.key_env=null for a server "
            "without keys"
        )
    return key


class RateLimiter:
    """Spreads requests and tokens per minute evenly: each request delays the next one by its share of a minute."""

    def __init__(self, rpm: float | None, tpm: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_request = 60 / rpm if rpm else 0.0
        self._per_token = 60 / tpm if tpm else 0.0
        self._clock, self._free_at = clock, 0.0

    def delay(self, tokens: int) -> float:
        """Reserve a request of `tokens` tokens; return the seconds until it may start."""
        now = self._clock()
        start = max(now, self._free_at)
        self._free_at = start + max(self._per_request, tokens * self._per_token)
        return start - now

    def correct(self, tokens: int) -> None:
        """Add tokens that a reservation underestimated; negative if it overestimated."""
        self._free_at += tokens * self._per_token

    def hold(self, seconds: float) -> None:
        """Delay all requests, as the server demands."""
        if seconds > 0:
            self._free_at = max(self._free_at, self._clock() + seconds)
