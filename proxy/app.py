"""The HTTP application of the proxy.

    POST /v1/chat/completions            add guidance from memory to the request, and pass the upstream's reply on
    GET  /v1/models, /v1/models/NAME     the upstream's
    POST /v1/embeddings                  the upstream's
    GET  /sessions, /sessions/ID         open sessions; one with its steps and what was added
    POST /sessions/ID/end                end a session and commit its episode to memory
    GET  /health, /ready, /metrics

Errors of the proxy itself have the format of OpenAI's: 400 a header that is not UTF-8, 401 wrong key, 404 no such
session, 408 the request did not arrive in time, 413 it is too large, 422 a wrong header, 502 and 504 the upstream does
not answer (or, with on_failure=refuse, memory or compiler failed), 429 with on_failure=refuse: too many requests wait
for memory and compiler (Retry-After). Errors of the upstream are passed on.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import ValidationError

from compiler.client import Body
from compiler.server.app import check_key, problems, read_body, unless_gone
from compiler.server.service import Refusal, described
from configs.proxy import PROXY_KEY
from proxy.additions import Insertion, text_slot, with_texts
from proxy.guide import Guide, GuideError, Wishes
from proxy.mapping import Conversation, action_of, read_conversation
from proxy.sessions import ProxySession, ProxyStep
from proxy.upstream import PassedReply, Upstream, answer_in

log = logging.getLogger("memcompiler.proxy")
READ_S = 60.0  # seconds in which a request has to arrive
ENDED = 1024  # results of ended sessions that are kept for repeated requests
SWEEP_S = 5.0  # seconds between two looks for idle sessions
_ID = re.compile(r"[\w.:/-]{1,200}", re.ASCII)
_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)  # seconds
SESSION, DELIVER, GATE, BUDGET, TASK, EMISSION, FAILURE = (
    f"X-Memcompiler-{name}" for name in ("Session", "Deliver", "Gate", "Budget", "Task", "Emission", "Failure")
)


class EndBody(Body):
    """The body of POST /sessions/ID/end."""

    success: bool  # whether the goal was reached
    rationale: str = ""  # why; stored in the memory entry
    action: str = ""  # the last action; default: the one in the upstream's last reply
    observation: str = ""  # what the environment answered to it
    commit: bool = True  # false: leave memory as it is


class ProxyMetrics:
    """The Prometheus metrics of one proxy, in their own registry."""

    def __init__(self, sessions: Any) -> None:
        self.registry = CollectorRegistry()
        here: Any = {"namespace": "memcompiler_proxy", "registry": self.registry}
        counter, seconds = partial(Counter, **here), partial(Histogram, buckets=_BUCKETS, **here)
        self.requests = counter("requests", "Replies to /v1/chat/completions by status.", ("code",))
        self.deliveries = counter("deliveries", "Requests by delivery.", ("delivery",))
        self.emissions = counter("emissions", "Compiled steps by kind of emission.", ("kind",))
        self.failures = counter("failures", "Requests for which memory or compiler failed.")
        self.unread = counter("unread", "Requests without goal or user turn, which are passed on unchanged.")
        self.committed = counter("committed", "Episodes committed to memory.")
        self.ended = counter("sessions_ended", "Sessions that the proxy ended by itself.", ("how",))
        self.guiding = seconds("guiding_seconds", "Seconds until a request is sent to the upstream.")
        self.compiling = seconds("compiling_seconds", "Seconds of that in which the compiler worked.")
        Gauge("sessions", "Open sessions.", **here).set_function(sessions)


class Proxy:
    """The proxy's parts.

    Args:
        renderer: writes messages for an upstream that reads soft tokens; None: texts are added to the messages.
    """

    def __init__(self, guide: Guide, upstream: Upstream, renderer: Any = None, images: bool = False) -> None:
        self.guide, self.upstream, self.renderer, self.images = guide, upstream, renderer, images
        self.store, self.config = guide.store, guide.config
        self.metrics = ProxyMetrics(lambda: len(self.store))
        self.store.on_end = lambda how: self.metrics.ended.labels(how).inc()
        self.ended: OrderedDict[str, dict[str, Any]] = OrderedDict()

    # -- chat ---------------------------------------------------------------------------------------------------------

    async def chat(self, request: Request, raw: bytes) -> Response:
        """Answer a chat request."""
        started, compiled = time.perf_counter(), self.guide.compile_seconds
        wishes = self._wishes(request)
        self.metrics.deliveries.labels(wishes.deliver).inc()
        body = _json_object(raw)
        conversation = (
            None if body is None else read_conversation(body.get("messages"), self.guide.mapping, self.images)
        )
        if body is None or conversation is None:
            self.metrics.unread.inc()
            return await self._pass(request, raw, wishes, None, None, "")
        session = self.store.use(
            _session_id(request, body, conversation, wishes),
            conversation.goal,
            conversation.scene,
            request.headers.get(TASK, ""),
        )
        with _busy(session):
            try:
                guided = self._guided(session, body, raw, conversation, wishes)
                sent, step, failure = await unless_gone(request, guided)
            except Refusal:
                raise
            except Exception as error:  # its message might quote memory, so the server must not log it
                log.error("a request failed: %s", described(error))
                raise Refusal(500, f"{type(error).__name__}: see the log") from None
            self.metrics.guiding.observe(time.perf_counter() - started)
            self.metrics.compiling.observe(self.guide.compile_seconds - compiled)
            return await self._pass(request, sent, wishes, session, step, failure)

    async def _guided(
        self, session: ProxySession, body: dict[str, Any], raw: bytes, conversation: Conversation, wishes: Wishes
    ) -> tuple[bytes, ProxyStep | None, str]:
        """Return the body for the upstream, the step, and why memory or compiler failed ("" if they did not)."""
        message, step, failure = body["messages"][conversation.turns[-1].message], None, ""
        async with session.lock:
            try:
                known = len(session.steps)
                step = await self.guide.visit(session, conversation, message, wishes)
                if step.kind and len(session.steps) > known:
                    self.metrics.emissions.labels(step.kind).inc()
            except GuideError as error:
                self.metrics.failures.inc()
                log.warning("session %s: %s", hashlib.sha256(session.id.encode()).hexdigest()[:12], error)
                if self.config.on_failure == "refuse":
                    raise Refusal(429 if error.queue_is_full else 502, str(error)) from None
                failure = str(error)
            insertions = {}
            if wishes.deliver != "none":
                insertions = self.guide.insertions(session, conversation, text_slot(message))
        return self._body(body, raw, insertions), step, failure

    def _body(self, body: dict[str, Any], raw: bytes, insertions: dict[int, list[Insertion]]) -> bytes:
        """Write the body with insertions; without any, return the client's bytes."""
        if self.renderer is not None:
            try:
                return json.dumps(self.renderer(body, insertions)).encode()
            except ValueError as error:
                raise Refusal(422, str(error)) from None
        if not insertions:
            return raw
        messages = [
            with_texts(message, insertions[i]) if i in insertions else message
            for i, message in enumerate(body["messages"])
        ]
        return json.dumps({**body, "messages": messages}).encode()

    async def _pass(
        self,
        request: Request,
        sent: bytes,
        wishes: Wishes,
        session: ProxySession | None,
        step: ProxyStep | None,
        failure: str,
    ) -> Response:
        """Send the body to the upstream and pass its reply on."""
        reply = await self.upstream.send(request, "/chat/completions", sent)
        extra = []
        if session is not None and wishes.deliver != "none":
            extra.append((SESSION.lower(), session.id))
            extra += [(EMISSION.lower(), step.kind)] if step is not None and step.kind else []
        extra += [(FAILURE.lower(), failure)] if failure else []

        def note(content: bytes) -> None:
            answer = answer_in(content) if reply.status == 200 else None
            if session is not None and step is not None and answer is not None:
                answer = {**answer, "role": "assistant"}
                self.store.note_reply(session, step.key, action_of([answer], self.guide.mapping))

        return PassedReply(reply, extra, note)

    def _wishes(self, request: Request) -> Wishes:
        """Read the headers of this proxy. Raises: Refusal, 422."""
        deliver, gate, budget = (request.headers.get(name) for name in (DELIVER, GATE, BUDGET))
        deliver = deliver or self.config.deliver
        try:
            self.guide.delivery(deliver)
        except ValueError as error:
            raise Refusal(422, f"{DELIVER}: {error}") from None
        if gate is not None and self.guide.gate is None:
            raise Refusal(422, f"{GATE}: there is no compile gate beside the compiler's checkpoint")
        if gate is not None and not re.fullmatch(r"0(\.\d+)?|1(\.0+)?", gate):
            raise Refusal(422, f"{GATE}: expected a probability from 0 to 1")
        if budget is not None and not re.fullmatch(r"\d{1,9}", budget):
            raise Refusal(422, f"{BUDGET}: expected a number of tokens")
        threshold = None if gate is None else float(gate)
        return Wishes(deliver, threshold, self.config.budget if budget is None else int(budget))

    # -- sessions -----------------------------------------------------------------------------------------------------

    async def end(self, id: str, body: EndBody) -> dict[str, Any]:
        """End a session; a repeated request gets the same result. Raises: Refusal, 404 or 502."""
        session = self.store.get(id)
        if session is None:
            if id in self.ended:
                return self.ended[id]
            raise Refusal(404, "there is no such session; it may have ended or timed out")
        async with session.lock:
            written = {"added": 0, "ignored": 0}
            if body.commit:
                try:
                    result = await self.guide.commit(
                        session, body.success, body.rationale, body.action, body.observation
                    )
                except GuideError as error:
                    log.warning("a commit failed: %s", error)
                    raise Refusal(502, f"{error}: the session is still open") from None
                written = {"added": result.added, "ignored": result.ignored}
                self.metrics.committed.inc(result.added)
            steps = len(session.path(session.newest))
            self.store.end(session)
        self.ended[id] = {"id": id, "task": session.task.id, "steps": steps, **written}
        if len(self.ended) > ENDED:
            self.ended.popitem(last=False)
        return self.ended[id]

    def listed(self) -> list[dict[str, Any]]:
        """List the open sessions."""
        now = time.monotonic()
        return [
            {"id": each.id, "steps": len(each.steps), "idle_s": round(now - each.used, 1), "bytes": each.nbytes}
            for each in self.store
        ]

    def described(self, id: str) -> dict[str, Any]:
        """Describe a session with its steps. Raises: Refusal, 404."""
        session = self.store.get(id)
        if session is None:
            raise Refusal(404, "there is no such session; it may have ended or timed out")
        steps = session.path(session.newest)
        shown = [
            {
                "observation": step.observation,
                "added": "".join(part for part in step.added if isinstance(part, str)),
                "soft_tokens": sum(len(part) for part in step.added if not isinstance(part, str)),
                "emission": step.kind,
                "state": step.state,
                "action": record.action,
            }
            for step, record in zip(steps, session.records(steps) if steps else (), strict=True)
        ]
        return {"id": id, "goal": session.task.goal, "scene": session.task.scene, "steps": shown}


def _session_id(request: Request, body: dict[str, Any], conversation: Conversation, wishes: Wishes) -> str:
    """Return the id of the session: the header's, else a hash of what stays the same. Raises: Refusal, 422."""
    if (named := request.headers.get(SESSION)) is not None:
        if not _ID.fullmatch(named):
            raise Refusal(422, f"{SESSION}: at most 200 letters, digits and _ . : / -")
        return named
    same = [conversation.identity, body.get("model"), wishes.deliver, request.headers.get("authorization")]
    return hashlib.sha256(json.dumps(same).encode()).hexdigest()[:32]


def _json_object(raw: bytes) -> dict[str, Any] | None:
    """Parse a body; None for anything but an object, which the upstream may refuse itself."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


@contextmanager
def _busy(session: ProxySession):
    session.busy += 1
    try:
        yield
    finally:
        session.busy -= 1
        session.used = time.monotonic()


def proxy_app(proxy: Proxy, key: str | None = None) -> FastAPI:
    """Create the ASGI application. With a key, everything but /health and /ready requires it as a bearer token."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async def sweep() -> None:
            while True:
                await asyncio.sleep(SWEEP_S)
                proxy.store.expire()

        sweeping = asyncio.create_task(sweep())
        yield
        sweeping.cancel()
        await proxy.upstream.close()

    app = FastAPI(title="MemCompiler proxy", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)

    @app.exception_handler(Refusal)
    async def refused(request: Request, refusal: Refusal) -> JSONResponse:
        error = {"message": f"memcompiler proxy: {refusal.message}", "type": "memcompiler_proxy", "code": None}
        return JSONResponse({"error": {**error, "param": None}}, refusal.status, refusal.headers)

    async def body_of(request: Request) -> bytes:
        check_key(request, key, PROXY_KEY)
        return await read_body(request, proxy.config.max_body_mib, asyncio.get_running_loop().time() + READ_S)

    async def chat(request: Request) -> Response:
        status = "500"
        try:
            reply = await proxy.chat(request, await body_of(request))
            status = str(reply.status_code)
            return reply
        except Refusal as refusal:
            status = str(refusal.status)
            raise
        finally:
            proxy.metrics.requests.labels(status).inc()

    async def passed(request: Request) -> Response:
        if ".." in request.url.path.split("/"):
            raise Refusal(404, "no such path")
        path = request.scope["raw_path"].decode("ascii").removeprefix("/v1")
        return PassedReply(await proxy.upstream.send(request, path, await body_of(request)))

    app.add_route("/v1/chat/completions", chat, methods=["POST"])
    app.add_route("/v1/models", passed, methods=["GET"])
    app.add_route("/v1/models/{name:path}", passed, methods=["GET"])
    app.add_route("/v1/embeddings", passed, methods=["POST"])

    @app.get("/sessions")
    async def sessions(request: Request) -> list[dict[str, Any]]:
        check_key(request, key, PROXY_KEY)
        return proxy.listed()

    @app.post("/sessions/{id:path}/end")
    async def end(request: Request, id: str) -> dict[str, Any]:
        raw = await body_of(request)
        try:
            return await proxy.end(id, EndBody.model_validate_json(raw))
        except ValidationError as error:
            raise Refusal(422, problems(error)) from None

    @app.get("/sessions/{id:path}")
    async def session(request: Request, id: str) -> dict[str, Any]:
        check_key(request, key, PROXY_KEY)
        return proxy.described(id)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "live"}

    @app.get("/ready")
    async def ready() -> dict[str, Any]:
        return {"status": "ready", "upstream": proxy.upstream.url, "memory": proxy.guide.memory.snapshot()}

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        check_key(request, key, PROXY_KEY)
        return Response(generate_latest(proxy.metrics.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return app
