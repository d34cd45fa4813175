"""Targets that read what users and clients send: settings in files and on the command line, requests over HTTP."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from random import Random
from types import SimpleNamespace
from typing import Any

from PIL import Image
from pydantic import BaseModel, ValidationError

from benchmarks.fuzz.files import folder
from benchmarks.fuzz.inputs import damaged, json_text, mutated, pick, text, texts, value
from benchmarks.fuzz.target import Target, expect
from benchmarks.fuzz.texts import make_lines, make_state_text
from compiler.client import CompileBody, RemoteCompiler
from compiler.language import parse
from compiler.records import Compilation, CompileRequest, Decoding
from configs.collect import CollectConfig, QuestionsConfig
from configs.evaluation import EvalConfig, QuickstartConfig
from configs.load import CONFIGS, ConfigError, _field_paths, load_config, to_yaml
from configs.models import ServeConfig
from configs.training import GrpoConfig, SftConfig
from envs import registry as environments
from memory import registry as memories
from runtime.http import RemoteError

SCHEMAS = (SftConfig, GrpoConfig, EvalConfig, CollectConfig, QuickstartConfig, QuestionsConfig, ServeConfig)
SIGNED = {"seed", "scene_seed", "init_log_sigma"}  # settings that may be negative


@cache
def schemas() -> dict[str, type[BaseModel]]:
    others = [plugins.find(name).settings for plugins in (environments, memories) for name in plugins.BUILT_IN]
    return {schema.__name__: schema for schema in (*SCHEMAS, *others)}


@cache
def paths_of(schema: type[BaseModel]) -> list[str]:
    return _field_paths(schema)


def make_overrides(rng: Random) -> dict[str, list[str]]:
    schema = pick(rng, list(schemas().values()))
    names = [
        pick(rng, paths_of(schema) or ["name"]) if rng.random() < 0.9 else text(rng, 2)
        for _ in range(rng.randint(1, 2))
    ]
    written = lambda: pick(
        rng,
        (
            text(rng, 2),
            json.dumps(value(rng)),
            str(rng.choice((-1, 0, 1, 0.5, -0.5, 2, 1e9))),
            ".nan",
            ".inf",
            "-.inf",
            "",
            "null",
            "[]",
            "{}",
            "a: b",
            "2001-01-01",
            "1_000",
            "0o17",
            "1e3",
            "yes",
            "~",
        ),
    )
    return {schema.__name__: [f"{name}={written()}" for name in names]}


def check_overrides(given: Mapping[str, Sequence[str]]) -> None:
    [(name, overrides)] = given.items()
    check_config(load_config(schemas()[name], None, overrides))


def check_config(config: BaseModel) -> None:
    """Expect settings in their domains, which read back as they are written."""
    for path, number in numbers_of(config):
        expect(
            math.isfinite(number) and (number >= 0 or path.rpartition(".")[2] in SIGNED), f"out of its domain: {path}"
        )
    target = folder() / "written.yaml"
    target.write_text(to_yaml(config), encoding="utf-8")
    expect(load_config(type(config), target) == config, "settings read back as others")


def numbers_of(held: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of settings, but for those in dicts of others' arguments."""
    if isinstance(held, BaseModel):
        for name in type(held).model_fields:
            yield from numbers_of(getattr(held, name), f"{path}.{name}" if path else name)
    elif isinstance(held, list | tuple):
        yield from (found for each in held for found in numbers_of(each, path))
    elif isinstance(held, int | float) and not isinstance(held, bool):
        yield path, held


@cache
def shipped() -> list[tuple[type[BaseModel], str]]:
    """Shipped files with their schema."""
    by_name = {
        "sft": SftConfig,
        "grpo": GrpoConfig,
        "eval": EvalConfig,
        "collect": CollectConfig,
        "quickstart": QuickstartConfig,
        "serve": ServeConfig,
    }
    found = []
    for file in sorted(CONFIGS.rglob("*.yaml")):
        schema = by_name.get(file.relative_to(CONFIGS).parts[0].removesuffix(".yaml"))
        if schema and (written := file.read_text(encoding="utf-8")):
            found.append((schema, written))
    return found


def make_yaml(rng: Random) -> dict[str, bytes]:
    schema, written = pick(rng, shipped())
    data = written.encode(pick(rng, ("utf-8", "utf-8", "utf-8", "utf-8-sig", "utf-16")))
    if rng.random() < 0.3:
        data = json_text(
            rng, mutated(rng, {"seed": 1, "executor": {"model": "x"}, "env": {"name": "household"}})
        ).encode("utf-8", "surrogatepass")
    return {schema.__name__: damaged(rng, data)}


def check_yaml(given: Mapping[str, bytes]) -> None:
    [(name, data)] = given.items()
    path = folder() / "given.yaml"
    path.write_bytes(data)
    try:
        config = load_config(schemas()[name], path)
    except ConfigError as error:
        expect(path.name in str(error), "a message does not name the file")
        raise
    check_config(config)


# -- requests over HTTP --


@cache
def png() -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), (9, 9, 9)).save(buffer, format="PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def make_body(rng: Random) -> bytes:
    image = pick(rng, (None, png(), base64.b64encode(damaged(rng, base64.b64decode(png()))).decode()))
    body = {
        "goal": text(rng),
        "memory": [{"id": "e1", "text": text(rng), "images": [image] if image else []}],
        "state": pick(rng, (None, f"goal: {text(rng)}", "goal: a\nnow: b\nnote: c = d", make_state_text(rng))),
        "observation": text(rng),
        "image": image,
        "history": list(texts(rng)),
        "soft_on": pick(rng, ("guidance", "always", "never")),
        "sampling": {"temperature": 0.5, "latent_temperature": None, "seed": 3},
        "tensors": ["mu", "z"],
    }
    return json_text(rng, mutated(rng, body)).encode("utf-8", pick(rng, ("replace", "surrogatepass")))


def check_body(given: bytes) -> None:
    sent = CompileBody.model_validate_json(given)
    request = sent.request()
    again = CompileBody.model_validate(CompileBody.of(request, sent.sampling, sent.tensors))
    expect(
        again.request().state == request.state
        and (again.goal, again.observation, again.history) == (sent.goal, sent.observation, sent.history),
        "a request reads back as another",
    )
    expect(sent.sampling.temperature is None or math.isfinite(sent.sampling.temperature), "a temperature is no number")


class Silent:
    """A compiler that says nothing."""

    broken, decoding, projector = None, Decoding(), SimpleNamespace(config=SimpleNamespace(emb_std=0.5))

    def compile(self, requests: Sequence[CompileRequest], seeds: Any = None, wanted: Any = None) -> list[Compilation]:
        return [Compilation(".", parse(".").emission) for _ in requests]


@cache
def service() -> tuple[Any, asyncio.AbstractEventLoop]:
    from compiler.server.app import service_app
    from compiler.server.service import CompilerService

    made = CompilerService(Silent, ServeConfig(max_body_mib=1), gather_s=0.0)  # pyright: ignore[reportArgumentType]
    made.start()
    while made.trouble is not None:
        time.sleep(0.01)
    return service_app(made, "key"), asyncio.new_event_loop()


def make_http(rng: Random) -> dict[str, Any]:
    service()
    headers = {
        "authorization": pick(rng, ("Bearer key", "Bearer key", "Bearer key", "Bearer é", text(rng, 1))),
        "content-length": pick(rng, ("", "3", "-1", "²", "9" * 30)),
        "content-type": pick(rng, ("application/json", text(rng, 1))),
    }
    target = pick(rng, ("/compile",) * 9 + ("/ready", "/metrics", "/health", f"/{text(rng, 1)}"))
    return {
        "method": pick(rng, ("POST",) * 9 + ("GET", "PUT", "HEAD")),
        "path": target,
        "headers": headers,
        "body": make_body(rng),
    }


def check_http(given: Mapping[str, Any]) -> None:
    app, loop = service()
    told: list[dict[str, Any]] = []
    bodies = [{"type": "http.request", "body": given["body"], "more_body": False}]

    async def receive() -> dict[str, Any]:
        if bodies:
            return bodies.pop()
        return await asyncio.sleep(5, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        told.append(message)

    headers = [(name.encode(), held.encode("latin-1", "replace")) for name, held in given["headers"].items()]
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": given["method"],
        "path": given["path"],
        "raw_path": b"/",
        "query_string": b"",
        "headers": headers,
        "scheme": "http",
        "server": ("a", 1),
        "client": ("b", 2),
        "root_path": "",
    }
    loop.run_until_complete(app(scope, receive, send))
    status, body = told[0]["status"], b"".join(message.get("body", b"") for message in told[1:])
    expect(status in (200, 401, 404, 405, 413, 422), f"status {status}")
    if given["path"] == "/compile" and given["method"] == "POST":
        expect("error" in json.loads(body) or status == 200, "a refusal says no reason")


def make_reply(rng: Random) -> str:
    said = pick(rng, (make_lines(rng), "> go | to", ".", text(rng)))
    tensor = {"shape": [1, 2], "data": base64.b64encode(bytes(8)).decode()}
    body = {
        "text": said,
        "kind": str(parse(said).emission.kind),
        "parse_error": parse(said).error,
        "prompt_ids": [1, 2],
        "emission_ids": [3],
        "text_logprobs": [-0.5],
        "latent_logprobs": None,
        "emb_std": 0.5,
        "mu": tensor,
        "log_sigma": tensor,
        "z": pick(rng, (None, tensor)),
        "noise": None,
        "seed": None,
        "tokens_in": 2,
        "tokens_out": 1,
        "cached_tokens": None,
        "weight_version": 0,
        "seconds": {"queue": 0.0, "compile": 0.1},
    }
    return json_text(rng, mutated(rng, body))


@cache
def client() -> RemoteCompiler:
    return RemoteCompiler("http://127.0.0.1:1")


def check_reply(given: str) -> None:
    try:
        body = json.loads(given)
    except (ValueError, RecursionError):
        return  # `RemoteServer` reads the body
    made = client()._read(body, CompileRequest("g", (), None, "o"))
    expect(made.parse_error or made.emission == parse(made.text).emission, "a reply says something else")


TARGETS = (
    Target("settings.overrides", make_overrides, check_overrides, (ConfigError,), 0.3),
    Target("settings.yaml", make_yaml, check_yaml, (ConfigError,), 0.1),
    Target("http.body", make_body, check_body, (ValidationError,), 2),
    Target("http.service", make_http, check_http, (), 0.2),
    Target("http.reply", make_reply, check_reply, (RemoteError,), 1),
)
