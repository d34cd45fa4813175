"""The server of `memcompiler play`: one page, and an API that its script calls. Loopback only, one request at a time.

    GET  /                    the page
    GET  /api/state           tasks, deliveries, recorded episodes, number of rows
    GET  /api/episodes/N      a recorded episode
    POST /api/games           open a game: a task under a delivery, or a step of a recorded episode
    GET  /api/games/ID        a line of a game
    POST /api/games/ID/decide edit memory or emission of a step
    POST /api/games/ID/step   take the executor's command, or the visitor's
    POST /api/export          games and episodes as one HTML file

Errors are `{"error": message}`: 403 a request of another site, 404 unknown, 411 and 413 no length or too large, 422 not
possible, 429 too many requests wait. Other sites cannot reach it: requests need our own Host, and JSON as content type.
"""

from __future__ import annotations

import threading
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from compiler.language import Emission, parse
from eval.player import episode_view, player_page
from play.game import Game, Line, PlayError
from play.record import PlayRecord
from play.stage import FAVOURITES, Stage
from runtime.http import is_loopback

MAX_BODY = 256 * 1024  # bytes of a request
MAX_GAMES = 8  # open at a time; a further one closes the one that was used longest ago
MAX_WAITING = 8  # requests that wait for their turn
MAX_EXPORT = 4  # episodes in an exported file

Name = Annotated[str, StringConstraints(max_length=1_000)]
Short = Annotated[str, StringConstraints(max_length=2_000)]
Long = Annotated[str, StringConstraints(max_length=20_000)]
Step = Annotated[int, Field(ge=0, le=10_000)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Open(Body):
    """Opens a game. `episode`: number of a recorded episode, which is played on from step t."""

    task: Name
    delivery: Name
    episode: Step | None = None
    t: Step = 0


class Written(Body):
    """An emission as the visitor writes it: guidance, its reason, and the operations on the Brief State, one a line."""

    guidance: Short = ""
    reason: Short = ""
    operations: Long = ""

    def emission(self) -> Emission:
        """Return the emission. Raises: PlayError, where an operation is none."""
        operations = parse(self.operations) if self.operations.strip() else None
        if operations is not None and (operations.error or operations.emission.guidance):
            why = operations.error or "it holds guidance"
            raise PlayError(f"the operations cannot be read ({why}): one of + ~ - ^ a line, as `+ key: value`")
        try:
            return Emission(self.guidance, self.reason, operations.emission.ops if operations else ())
        except ValueError as error:
            raise PlayError(str(error)) from None


class Decide(Body):
    """Edits step t of a line. `memory`: entry id -> text, null to leave it out."""

    line: Step
    t: Step
    memory: Annotated[dict[Name, Long | None], Field(max_length=64)] | None = None
    emission: Written | None = None


class Take(Body):
    """Takes step t of a line: the executor's command, or `command`."""

    line: Step
    t: Step
    command: Short | None = None


class Shown(Body):
    """An episode to export: a line of a game, or a recorded episode."""

    game: Name | None = None
    line: Step = 0
    episode: Step | None = None


class Export(Body):
    lanes: Annotated[list[Shown], Field(min_length=1, max_length=MAX_EXPORT)]


class Games:
    """The open games of a server. `turn` lets one request work at a time."""

    def __init__(self, stage: Stage, record: PlayRecord | None) -> None:
        self.stage, self.record = stage, record
        self._games: OrderedDict[str, Game] = OrderedDict()
        self._lock, self._waiting = threading.Lock(), threading.Semaphore(MAX_WAITING)
        most = stage.envs.capacity if stage.envs is not None else MAX_GAMES
        self._most = min(MAX_GAMES, most)

    @property
    def number_of_rows(self) -> int:
        """The number of recorded rows."""
        return self.record.number_of_rows if self.record is not None else 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for this request's turn. Raises: TooBusy, if too many wait."""
        if not self._waiting.acquire(blocking=False):
            raise TooBusy("too many requests wait: try again")
        try:
            with self._lock:
                yield
        finally:
            self._waiting.release()

    def open(self, asked: Open) -> tuple[str, Game]:
        """Open a game; close the one that was used longest ago if there are too many."""
        recorded = self.stage.library.open(asked.episode) if asked.episode is not None else None
        while len(self._games) >= self._most:
            self._games.popitem(last=False)[1].close()
        task = recorded.task_id if recorded is not None else asked.task
        game = self.stage.open_game(task, asked.delivery, recorded, asked.t)
        self._games[id := uuid.uuid4().hex] = game
        return id, game

    def find(self, id: str) -> Game:
        """Return an open game. Raises: LookupError."""
        if id not in self._games:
            raise LookupError("this game was closed: begin it again")
        self._games.move_to_end(id)
        return self._games[id]

    def keep(self, id: str, game: Game, line: Line) -> None:
        """Record a line if the visitor decided a step of it; at the line's end, publish the record."""
        own = line.own_steps()
        if self.record is None or not own or line.episode is None:
            return
        taken = replace(line.episode, steps=line.episode.steps[: len(line.answers)])
        self.record.add(f"{id}/{line.id}", game.spec.task, taken, own)
        if line.over:
            self.record.publish()

    def warm_up(self) -> None:
        """Load models and memory before the first game asks for them. What fails is said when a game needs it."""
        with self._lock, suppress(PlayError):
            self.stage.warm_up()

    def close(self) -> None:
        """Close all games."""
        for game in self._games.values():
            game.close()
        self._games.clear()


class TooBusy(Exception):
    """Too many requests wait."""


def line_view(id: str, game: Game, line: Line, rows: int) -> dict[str, Any]:
    """Return a line of a game as the page shows it."""
    assert line.episode is not None  # it has been played
    return {
        "view": episode_view(line.episode, game.extras(line)),
        "game": id,
        "line": line.id,
        "lines": [{"id": one.id, "parent": one.parent, "fork": one.fork} for one in game.lines],
        "over": line.over,
        "compiles": game.delivery.compiler is not None,
        "recalls": game.delivery.kind != "none",
        "rows": rows,
    }


def play_app(stage: Stage, record: PlayRecord | None = None) -> FastAPI:
    """Create the application. Without a record, nothing is recorded."""
    app = FastAPI(title="MemCompiler play", docs_url=None, redoc_url=None, openapi_url=None)
    games = Games(stage, record)
    app.state.games = games
    app.add_middleware(Guard)

    @app.exception_handler(PlayError)
    async def impossible(request: Request, error: PlayError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 422)

    @app.exception_handler(LookupError)
    async def unknown(request: Request, error: LookupError) -> JSONResponse:
        return JSONResponse({"error": str(error.args[0] if error.args else error)}, 404)

    @app.exception_handler(TooBusy)
    async def busy(request: Request, error: TooBusy) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 429)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        found = [f"{'.'.join(map(str, one['loc'][1:])) or 'body'}: {one['msg']}" for one in error.errors()[:5]]
        return JSONResponse({"error": "; ".join(found)}, 422)

    @app.get("/")
    def page() -> HTMLResponse:
        return HTMLResponse(player_page())

    @app.get("/api/state")
    def state() -> dict[str, Any]:
        return _state(stage, games)  # needs no turn: tasks and episodes do not change

    @app.get("/api/episodes/{number}")
    def episode(number: int) -> dict[str, Any]:
        with games.turn():
            return episode_view(stage.library.open(number))

    @app.post("/api/games")
    def open_game(asked: Open) -> dict[str, Any]:
        with games.turn():
            id, game = games.open(asked)
            return line_view(id, game, game.line(0), games.number_of_rows)

    @app.get("/api/games/{id}")
    def show(id: str, line: int = 0) -> dict[str, Any]:
        with games.turn():
            game = games.find(id)
            return line_view(id, game, game.line(line), games.number_of_rows)

    @app.post("/api/games/{id}/decide")
    def decide(id: str, asked: Decide) -> dict[str, Any]:
        with games.turn():
            game = games.find(id)
            emission = asked.emission.emission() if asked.emission is not None else None
            line = game.decide(asked.line, asked.t, memory=asked.memory, emission=emission)
            return line_view(id, game, line, games.number_of_rows)

    @app.post("/api/games/{id}/step")
    def step(id: str, asked: Take) -> dict[str, Any]:
        with games.turn():
            game = games.find(id)
            line = game.step(asked.line, asked.t, asked.command)
            games.keep(id, game, line)
            return line_view(id, game, line, games.number_of_rows)

    @app.post("/api/export")
    def export(asked: Export) -> HTMLResponse:
        with games.turn():
            return HTMLResponse(player_page([_exported(stage, games, one) for one in asked.lanes]))

    return app


def _exported(stage: Stage, games: Games, shown: Shown) -> dict[str, Any]:
    if shown.game is None:
        return episode_view(stage.library.open(-1 if shown.episode is None else shown.episode))
    game = games.find(shown.game)
    line = game.line(shown.line)
    assert line.episode is not None
    view = episode_view(line.episode, game.extras(line))
    if not line.over:
        view["outcome"], view["stop_reason"] = "open", "not ended"
    return view


def _state(stage: Stage, games: Games) -> dict[str, Any]:
    recorded: dict[str, list[dict[str, Any]]] = {}
    heads: dict[str, dict[str, Any]] = {}
    for number, one in enumerate(stage.library.episodes):
        recorded.setdefault(one.task_id, []).append({"number": number, **one.head})
        heads.setdefault(one.task_id, one.head)
    listed = {id: {"goal": t.goal, "scene": t.scene, "kind": t.kind} for id, t in stage.tasks.items()} | heads
    deliveries = stage.labels()
    names = [one["name"] for one in deliveries]
    return {
        "tasks": [
            {
                "task": {"id": id, **{key: about[key] for key in ("goal", "scene", "kind")}},
                "recorded": recorded.get(id, []),
                "playable": id in stage.tasks,
            }
            for id, about in listed.items()
        ],
        "deliveries": deliveries,
        "lanes": [name for name in FAVOURITES if name in names],
        "rows": games.number_of_rows,
        "out": str(games.record.out / "rows") if games.record is not None else "",
    }


class Guard:
    """Refuses requests of other sites and too large bodies, and adds the headers of a page that loads nothing."""

    HEADERS = (
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
        (b"cross-origin-resource-policy", b"same-origin"),
        (b"cache-control", b"no-store"),
        (b"content-security-policy", b"frame-ancestors 'none'"),
    )

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if refusal := self._refusal(scope):
            status, message = refusal
            return await JSONResponse({"error": message}, status)(scope, receive, send)

        async def answer(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *self.HEADERS]}
            await send(message)

        await self.app(scope, receive, answer)

    def _refusal(self, scope: MutableMapping[str, Any]) -> tuple[int, str] | None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        if not is_loopback(_name_of(host)):
            return 403, "this server answers on loopback only"
        origin = headers.get("origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return 403, "a request of another site"
        if scope["method"] in ("GET", "HEAD"):
            return None
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return 403, "requests are JSON (content type application/json)"
        length = headers.get("content-length", "")
        if not length.isdecimal() or "transfer-encoding" in headers:  # which would count instead of the length
            return 411, "a request needs its length"
        return (413, f"a request may have {MAX_BODY:,} bytes at most") if float(length) > MAX_BODY else None


def _name_of(host: str) -> str:
    """Return the host of `host:port`."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host
