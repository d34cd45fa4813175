"""Passes requests on to the upstream, and its replies back byte for byte, as they arrive."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import httpx
from multidict import CIMultiDict
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from yarl import URL

from compiler.server.app import unless_gone
from compiler.server.service import Refusal
from configs.proxy import UpstreamConfig
from runtime.http import is_loopback

CONNECT_S = 5.0
# Seconds for which an idle connection is used again: less than upstreams keep it (uvicorn, vLLM: 5), because a request
# that is sent as the upstream closes its connection is lost.
KEEP_ALIVE_S = 3.0
MOST_READ = 4 * 2**20  # bytes of a reply that are kept to read the action in it
OWN = b"x-memcompiler-"  # prefix of the headers of this proxy, which are not passed on
_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
Headers = list[tuple[bytes, bytes]]


class Upstream:
    """A client of the upstream.

    Args:
        key: replaces the Authorization header of requests; None: the client's own is passed on.
        drops_key: the client's Authorization header is for this proxy, and not passed on.

    Raises:
        ValueError: the environment names a proxy that is not an HTTP proxy.
    """

    def __init__(self, config: UpstreamConfig, key: str | None = None, drops_key: bool = False) -> None:
        self.url, self.timeout_s, self._key, self._drops_key = config.url, config.timeout_s, key, drops_key
        self._connections, self._proxy = config.connections, _proxy_for(config.url)
        self._client: aiohttp.ClientSession | None = None  # opened by the first request, in its event loop

    async def send(self, request: Request, path: str, body: bytes) -> aiohttp.ClientResponse:
        """Send a request with this body; return the reply once its headers are there, its content unread.

        Raises:
            Refusal: 502 or 504 without a reply, 499 if the client disconnects before, 400 for a header that cannot be
                passed on.
        """
        query = f"?{request.url.query}" if request.url.query else ""
        client = self._client = self._client or self._opened()
        sent = client.request(
            request.method,
            URL(f"{self.url}{path}{query}", encoded=True),
            headers=self._headers(request),
            data=body or None,
            allow_redirects=False,
            proxy=self._proxy,
        )
        try:
            return await unless_gone(request, sent)
        except TimeoutError:
            raise Refusal(504, f"the upstream {self.url} did not answer within {self.timeout_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Refusal(502, f"the upstream {self.url} cannot be reached ({type(error).__name__})") from None

    def _opened(self) -> aiohttp.ClientSession:
        """Open a client that adds no headers of its own, keeps no cookies, and leaves contents packed."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=self._connections, ssl=httpx.create_ssl_context(), keepalive_timeout=KEEP_ALIVE_S
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=self.timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
            auto_decompress=False,
        )

    def _headers(self, request: Request) -> CIMultiDict[str]:
        left_out = _HOP_BY_HOP | {b"host", b"content-length"}
        if self._drops_key or self._key is not None:
            left_out |= {b"authorization"}
        headers = CIMultiDict[str]()
        for name, value in request.headers.raw:
            if name not in left_out and not name.startswith(OWN):
                headers.add(name.decode("latin-1"), _as_utf8(name, value))
        if self._key is not None:
            headers.add("authorization", f"Bearer {self._key}")
        return headers

    async def close(self) -> None:
        """Close all connections."""
        if self._client is not None:
            await self._client.close()


def _as_utf8(name: bytes, value: bytes) -> str:
    """Decode a header's value, which the client encodes again. Raises: Refusal, 400."""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        raise Refusal(400, f"header {name.decode('latin-1')}: its value is not UTF-8") from None


def _proxy_for(url: str) -> str | None:
    """Return the HTTP proxy of the environment for an address; None for this machine's own. Raises: ValueError."""
    parts = urlsplit(url)
    if is_loopback(parts.hostname or "") or proxy_bypass(parts.hostname or ""):
        return None
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy and urlsplit(proxy).scheme not in ("http", "https"):
        raise ValueError(
            f"the environment sets a {urlsplit(proxy).scheme} proxy for {parts.hostname}, but the upstream can be "
            "reached through HTTP proxies only: set no_proxy to this host, or another proxy"
        )
    return proxy


class PassedReply(Response):
    """The upstream's reply, unchanged: status, headers, and bytes as soon as they arrive.

    If the upstream closes the connection before the end of its reply, the client's connection is closed as well.

    Args:
        extra: headers to add.
        on_end: called with the beginning of the content (`MOST_READ`) if the reply was complete.
    """

    def __init__(
        self,
        reply: aiohttp.ClientResponse,
        extra: Iterable[tuple[str, str]] = (),
        on_end: Callable[[bytes], object] = lambda content: None,
    ) -> None:
        self.reply, self.on_end = reply, on_end
        passed = [(name.lower(), value) for name, value in reply.raw_headers]
        self.status_code = reply.status
        self.raw_headers = [pair for pair in passed if pair[0] not in _HOP_BY_HOP]
        self.raw_headers += [(name.encode("ascii"), value.encode("latin-1", "replace")) for name, value in extra]
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        passing, leaving = asyncio.ensure_future(self._pass(send)), asyncio.ensure_future(gone())
        try:
            await asyncio.wait({passing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if passing.done():
                passing.result()
        finally:
            leaving.cancel()
            passing.cancel()
            await asyncio.gather(passing, leaving, return_exceptions=True)
            self.reply.close()

    async def _pass(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        content = bytearray()
        try:
            async for chunk in self.reply.content.iter_any():
                if len(content) < MOST_READ:
                    content += chunk
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except (aiohttp.ClientError, OSError):
            return  # without a last message the server closes the connection
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        self.on_end(_decoded(bytes(content), self.reply.headers.get("content-encoding", "")))


def _decoded(content: bytes, encoding: str) -> bytes:
    """Undo a content encoding of the standard library; b"" for others and broken content."""
    if encoding in ("", "identity"):
        return content
    try:
        return zlib.decompressobj(wbits=47).decompress(content, MOST_READ) if encoding in ("gzip", "deflate") else b""
    except zlib.error:
        return b""


def answer_in(content: bytes) -> dict[str, Any] | None:
    """Return the assistant's message in a reply, streamed or not; None where there is none."""
    try:
        if content.lstrip()[:1] == b"{":
            message = json.loads(content)["choices"][0]["message"]
            return message if isinstance(message, dict) else None
        lines = [line[5:].strip() for line in content.splitlines() if line.startswith(b"data:")]
        return _merged([json.loads(line) for line in lines if line not in (b"", b"[DONE]")])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _merged(chunks: list[Any]) -> dict[str, Any] | None:
    """Merge the first choice's deltas of a stream."""
    text, calls = "", dict[int, dict[str, Any]]()
    for chunk in chunks:
        for choice in chunk.get("choices", ())[:1]:
            delta = choice.get("delta") or {}
            text += delta.get("content") or ""
            for part in delta.get("tool_calls") or ():
                call = calls.setdefault(part["index"], {"function": {"name": "", "arguments": ""}})
                for name in ("name", "arguments"):
                    call["function"][name] += (part.get("function") or {}).get(name) or ""
    if not text and not calls:
        return None
    return {"role": "assistant", "content": text, "tool_calls": [calls[i] for i in sorted(calls)]}
