"""One client for every OpenAI-compatible endpoint: closed executors and endpoint teachers alike.

Faults are counted by kind. Those that pass are tried again: `rate_limit` (429), `server_error` (5xx), `timeout`,
`connection`, `not_json` (a body that is no JSON, or half of one), `no_choice` (JSON without an answer in it),
`no_vectors` (without a vector for each text). Those that would come again (`lm.answers.FINAL`) fail their request at
once, and the same request is not sent a second time. A wrong key or model, a spent budget, or several requests in a row
that failed for one cause stop the client: no request is sent after that.

Answers and what they cost are kept in a file (`lm.ledger`): the same request is paid once.
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
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt, wait_exponential, wait_random

from configs.models import EndpointConfig
from lm.answers import Fault, Message, estimate, read_answer, read_vectors
from lm.ledger import Answer, EndpointStop, Ledger, price
from runtime.http import MAX_WAIT_S, as_asked, is_loopback, retry_after

if TYPE_CHECKING:
    from openai import APIStatusError, AsyncOpenAI

T = TypeVar("T")

IN_A_ROW = 5  # requests that fail for one cause, with no answer in between, before the client stops
STOPPING = (401, 402, 403, 404)  # a key, an account or a model that no later request will find mended
RETRIED = {408: "timeout", 409: "server_error", 425: "rate_limit", 429: "rate_limit"}


class EndpointFailure(RuntimeError):
    """One request has no usable answer after all attempts."""


class Endpoint:
    """Asks one model. Requests run concurrently in a thread of their own; `run` waits for a batch of them.

    Args:
        config: where, which model, prices and limits.
        cache: the SQLite file, where the configuration names none; None keeps answers in memory.

    Raises:
        ValueError: the environment variable that should hold the key does not.
        EndpointStop: the address, a proxy or the file of answers cannot be used.
    """

    def __init__(self, config: EndpointConfig, cache: Path | None = None) -> None:
        self.config = config
        self.stopped: EndpointStop | None = None
        self.from_cache = 0  # answers of this process
        self._key = _key(config.key_env)
        named = Path(config.cache) if config.cache else cache
        self._ledger = Ledger(named, config.model)
        self._pace = Pace(config.rpm, config.tpm)
        self._slots = asyncio.Semaphore(config.concurrency)
        self._failed = Counter[str]()  # requests since the last answer, by cause
        self._hopeless = dict[str, str]()  # what was wrong, by request
        self._client = self._make_client()

    def run(self, work: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Give results in order; where a coroutine raised EndpointFailure or EndpointStop, that stands in its place."""

        async def all_of_it() -> list[Any]:
            return await asyncio.gather(*work, return_exceptions=True)

        results = asyncio.run_coroutine_threadsafe(all_of_it(), self._loop).result()
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, EndpointFailure | EndpointStop):
                raise result
        return results

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name="endpoint", daemon=True).start()
        return loop

    async def ask(self, messages: Sequence[Message], role: str, max_tokens: int, repeat: int = 0) -> Answer:
        """Get the model's answer, from the cache if the same was asked before.

        Args:
            role: whose tokens these are, in the accounts.
            repeat: another number is another request: for several answers to the same messages.

        Raises:
            EndpointFailure: no usable answer.
            EndpointStop: nothing is asked any more.
        """
        parameters = {self.config.length_key: max_tokens, **self.config.extra}
        if self.config.temperature is not None:
            parameters["temperature"] = self.config.temperature
        body = _as_text({"model": self.config.model, "messages": list(messages), **parameters})
        key = _request_key([body, repeat])
        expected = estimate(body["messages"]) + max_tokens
        self.check()
        try:
            if (known := self._ledger.answer(key)) is not None:
                self.from_cache += 1
                return known
            if key in self._hopeless:
                raise EndpointFailure(self._hopeless[key])
            async with self._slots:
                answer = await self._insist(lambda: self._chat(body), role, expected, key)
            self._pace.correct(answer.tokens_in + answer.tokens_out - expected)
            return self._ledger.keep(key, role, answer)
        except EndpointStop as stop:
            self.stopped = self.stopped or stop  # the first reason is the one that is told
            raise

    async def embed(self, texts: Sequence[str], role: str) -> list[bytes]:
        """Get the vector of each text, as float32 in bytes: from the cache where the same text was embedded before, by
        one request for all the others.

        Raises:
            EndpointFailure: no usable answer.
            EndpointStop: nothing is asked any more.
        """
        texts = _as_text(list(texts))
        keys = [_request_key([self.config.model, self.config.extra, text]) for text in texts]
        self.check()
        try:
            known = self._ledger.vectors(keys)
            self.from_cache += sum(key in known for key in keys)
            unknown = {key: text for key, text in zip(keys, texts, strict=True) if key not in known}
            if unknown:
                asked = [text or " " for text in unknown.values()]  # servers refuse empty ones
                estimate = sum(len(text) // 4 + 1 for text in asked)
                async with self._slots:
                    vectors, read = await self._insist(lambda: self._vectors(asked, estimate), role, estimate)
                self._pace.correct(read - estimate)
                known |= self._ledger.keep_vectors(dict(zip(unknown, vectors, strict=True)), role, read)
            return [known[key] for key in keys]
        except EndpointStop as stop:
            self.stopped = self.stopped or stop
            raise

    def check(self) -> None:
        """Raise EndpointStop where the client has stopped."""
        if self.stopped is not None:
            raise self.stopped

    def account(self) -> dict[str, Any]:
        """Sum up what the ledger holds for this model; `from_cache` counts the answers of this process."""
        return self._ledger.account(self.config) | {"from_cache": self.from_cache}

    async def _insist(self, send: Callable[[], Awaitable[T]], role: str, estimate: int, key: str = "") -> T:
        """Return what the first attempt that succeeds gives; `estimate`: the tokens of one; `key`: of the request."""
        backoff_s, tries = self.config.backoff_s, self.config.retries + 1
        attempts = AsyncRetrying(
            retry=retry_if_exception(lambda error: isinstance(error, Fault) and not error.final),
            wait=as_asked(wait_exponential(backoff_s, MAX_WAIT_S) + wait_random(0, backoff_s)),
            stop=stop_after_attempt(tries),
            reraise=True,
        )
        try:
            answer = await attempts(self._attempt, send, role, estimate)
        except Fault as last:
            raise self._given_up(last, tries, key) from None
        self._failed.clear()
        return answer

    def _given_up(self, last: Fault, tries: int, key: str) -> EndpointFailure | EndpointStop:
        """Say why a request has no answer; that nothing more is asked, where too many in a row failed alike."""
        why = str(last) if last.final else f"no usable answer in {tries} attempts, the last: {last}"
        why = self._scrubbed(why)
        if last.final:
            self._hopeless[key] = why
        cause = last.kind if last.final else "no answer"
        self._failed[cause] += 1
        if self._failed[cause] < IN_A_ROW:
            return EndpointFailure(why)
        mend = "See that it answers, then run the same command again"
        if last.final:
            mend = "Mend that and run it again (with other settings, into another folder)"
        return EndpointStop(
            f"{self.config.model} at {self.config.base_url} failed {self._failed[cause]} requests in a row ({why}). "
            f"{mend}"
        )

    async def _attempt(self, send: Callable[[], Awaitable[T]], role: str, estimate: int) -> T:
        """Send one request, if the budget allows it and when the pace does; a fault is counted."""
        self.check()
        self._check_budget()
        await asyncio.sleep(self._pace.delay(estimate))
        try:
            return await send()
        except Fault as fault:
            self._ledger.count(role, fault.kind, *fault.paid)
            self._pace.hold(fault.wait_s)
            raise

    async def _chat(self, body: dict[str, Any]) -> Answer:
        """One request for an answer. Raises: Fault, EndpointStop."""
        create = self._client.chat.completions.with_raw_response.create
        others = {name: value for name, value in body.items() if name not in ("model", "messages")}
        reply = await self._body(create(model=body["model"], messages=body["messages"], extra_body=others))
        return read_answer(reply, body["messages"], self.config.length_key)

    async def _vectors(self, texts: list[str], estimate: int) -> tuple[list[bytes], int]:
        """One request for vectors; also the tokens that were read. Raises: Fault, EndpointStop."""
        create = self._client.embeddings.with_raw_response.create
        asked = create(
            model=self.config.model, input=texts, encoding_format="float", extra_body=dict(self.config.extra)
        )
        return read_vectors(await self._body(asked), len(texts), estimate)

    async def _body(self, request: Awaitable[Any]) -> str:
        """Make one HTTP request; return its body. Raises: Fault, EndpointStop."""
        import openai

        try:
            async with asyncio.timeout(self.config.timeout_s):  # whole: a server may also drip bytes for ever
                raw = await request
        except (TimeoutError, openai.APITimeoutError):
            raise Fault("timeout", f"no answer in {self.config.timeout_s:g} s") from None
        except openai.APIStatusError as error:
            raise self._refusal(error) from None
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            raise Fault("connection", f"{type(cause).__name__}: {cause}{_proxies(self.config.base_url)}") from None
        return raw.text

    def _refusal(self, error: APIStatusError) -> Fault | EndpointStop:
        status, detail = error.status_code, self._scrubbed(f"{error.status_code} {error.message[:300]}")
        settings = {"max_tokens": "length_key", "max_completion_tokens": "length_key", "temperature": "temperature"}
        settings |= dict.fromkeys(self.config.extra, "extra")
        named = [f"api.{set_by}" for name, set_by in settings.items() if name in re.findall(r"\w+", error.message)]
        detail += f" (see {', '.join(dict.fromkeys(named))})" if named else ""
        if status in STOPPING:
            return EndpointStop(
                f"{self.config.base_url} refuses {self.config.model}: {detail}. Check api.base_url, api.model, "
                f"and the key in the environment variable {self.config.key_env}"
            )
        kind = RETRIED.get(status, "server_error" if status >= 500 else "refused")
        return Fault(kind, detail, retry_after(error.response.headers.get("retry-after")))

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
                    f"{tokens_out} written). What is done is kept: raise api.{name} and run the same command again"
                )

    def _make_client(self) -> AsyncOpenAI:
        """Make the connections, without a proxy to a server on this machine; retries are ours. Raises: EndpointStop."""
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
        except Exception as error:  # an address, a proxy, a certificate or a package: nothing could be asked
            raise EndpointStop(f"cannot ask {url}{_proxies(url)}: {error or type(error).__name__}") from error

    def _scrubbed(self, text: str) -> str:
        """Take out the key, which servers quote in their complaints."""
        return text.replace(self._key, "***") if self._key else text


def user_message(*parts: str | bytes) -> Message:
    """Write a user turn of texts and pictures (PNG), in order."""
    if all(isinstance(part, str) for part in parts):
        return {"role": "user", "content": "".join(map(str, parts))}
    return {"role": "user", "content": [content_part(part) for part in parts]}


def content_part(part: str | bytes) -> dict[str, Any]:
    """Write a text, or a picture (PNG), as a part of a message."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(part).decode()}}


def _request_key(told: Any) -> str:
    """Name a request by all that is asked, whatever the address."""
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _as_text(value: T) -> T:
    """Replace what UTF-8 cannot encode in a JSON value: half a surrogate pair."""
    return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def _proxies(base_url: str) -> str:
    """Name the variables whose proxies an address may be asked through; their values may hold passwords."""
    proxies = {} if is_loopback(urlsplit(base_url).hostname or "") else getproxies()
    names = [f"{scheme.upper()}_PROXY" for scheme in proxies if scheme in ("all", "http", "https")]
    return f" (through the proxy of {' or '.join(names)})" if names else ""


def _key(name: str | None) -> str:
    if name is None:
        return ""
    if not (key := os.environ.get(name, "")):
        raise ValueError(
            f"the environment variable {name} (api.key_env) holds no key: set it, or say api.key_env=null for a server "
            "that wants none"
        )
    return key


class Pace:
    """Requests and tokens per minute, spread evenly: each start moves the next one back by its share of the minute."""

    def __init__(self, rpm: float | None, tpm: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_request = 60 / rpm if rpm else 0.0
        self._per_token = 60 / tpm if tpm else 0.0
        self._clock, self._free_at = clock, 0.0

    def delay(self, tokens: int) -> float:
        """Give the seconds until a request of so many tokens may start; its share of the minute is taken."""
        now = self._clock()
        start = max(now, self._free_at)
        self._free_at = start + max(self._per_request, tokens * self._per_token)
        return start - now

    def correct(self, tokens: int) -> None:
        """Count so many tokens more (or fewer) than a request was taken for."""
        self._free_at += tokens * self._per_token

    def hold(self, seconds: float) -> None:
        """Start nothing before: the server has said so."""
        if seconds > 0:
            self._free_at = max(self._free_at, self._clock() + seconds)
