"""Targets that read settings (files and command line) and HTTP requests."""

from __future__ import annotations

import asyncio
import base64
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from random import Random
from types import SimpleNamespace
from typing import Any

from PIL import Image
from pydantic import BaseModel, ValidationError

from compiler.client import CompileBody, RemoteCompiler
from compiler.language import parse
from compiler.records import Compilation, CompileRequest, Decoding
from configs import collect, evaluation, training
from configs.load import CONFIGS, ConfigError, _field_paths, load_config, read_overrides, to_yaml
from configs.models import ServeConfig
from configs.proxy import ProxyConfig
from envs import registry as environments
from memory import registry as memories
from memory.trajectory import png_bytes
from runtime.http import RemoteError
from tests.fuzz.files import folder
from tests.fuzz.inputs import damaged, json_text, mutated, pick, text, texts, value
from tests.fuzz.target import Target, expect
from tests.fuzz.texts import make_lines, make_state_text

COMMANDS = {
    "sft": training.SftConfig,
    "grpo": training.GrpoConfig,
    "eval": evaluation.EvalConfig,
    "collect": collect.CollectConfig,
    "quickstart": evaluation.QuickstartConfig,
    "questions": collect.QuestionsConfig,
    "serve": ServeConfig,
    "proxy": ProxyConfig,
}
SIGNED = {"seed", "scene_seed", "init_log_sigma"}  # settings with negative values
VALUES = ".nan|.inf|-.inf||null|[]|{}|a: b|2001-01-01|1_000|0o17|1e3|yes|~|-1|0|1|0.5|-0.5|2|1e9".split("|")


# -- settings --


@cache
def schemas() -> dict[str, tuple[type[BaseModel], list[str]]]:
    """Return the schemas of commands, environments and memory systems by name, with their field paths."""
    plugins = [each.find(name).settings for each in (environments, memories) for name in each.BUILT_IN]
    return {schema.__name__: (schema, _field_paths(schema)) for schema in (*COMMANDS.values(), *plugins)}


@cache
def shipped() -> list[tuple[str, bytes]]:
    """Return the name of the schema and the content of each shipped configuration."""
    files = [
        (file, COMMANDS.get(file.stem) or COMMANDS.get(file.relative_to(CONFIGS).parts[0].partition(".")[0]))
        for file in CONFIGS.rglob("*.yaml")
    ]
    return [(schema.__name__, file.read_bytes()) for file, schema in sorted(files) if schema]


def make_overrides(rng: Random) -> dict[str, list[str]]:
    name = pick(rng, list(schemas()))
    keys = [
        pick(rng, schemas()[name][1] or ["name"]) if rng.random() < 0.9 else text(rng, 2)
        for _ in range(rng.randint(1, 2))
    ]
    return {name: [f"{key}={pick(rng, (*VALUES, text(rng, 2), json.dumps(value(rng))))}" for key in keys]}


def check_overrides(given: Mapping[str, Sequence[str]]) -> None:
    [(name, overrides)] = given.items()
    read_overrides(overrides)
    check_config(load_config(schemas()[name][0], None, overrides))


def make_yaml(rng: Random) -> dict[str, bytes]:
    name, data = pick(rng, shipped())
    if rng.random() < 0.3:
        tree = {"seed": 1, "executor": {"model": "x"}, "env": {"name": "household"}}
        data = json_text(rng, mutated(rng, tree)).encode("utf-8", "surrogatepass")
    return {
        name: damaged(rng, data.decode("utf-8", "replace").encode(pick(rng, ("utf-8", "utf-8", "utf-8-sig", "utf-16"))))
    }


def check_yaml(given: Mapping[str, bytes]) -> None:
    [(name, data)] = given.items()
    path = folder() / "given.yaml"
    path.write_bytes(data)
    try:
        config = load_config(schemas()[name][0], path)
    except ConfigError as error:
        expect(path.name in str(error), "a message does not name the file")
        raise
    check_config(config)


def check_config(config: BaseModel) -> None:
    """Expect settings within their domains and an equal round trip."""
    for path, number in numbers_of(config):
        expect(
            math.isfinite(number) and (number >= 0 or path.rpartition(".")[2] in SIGNED), f"out of its domain: {path}"
        )
    path = folder() / "written.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    expect(load_config(type(config), path) == config, "settings read back as others")


def numbers_of(held: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of settings by path, except in dicts, which hold arguments of other libraries."""
    if isinstance(held, BaseModel):
        for name in type(held).model_fields:
            yield from numbers_of(getattr(held, name), f"{path}.{name}")
    elif isinstance(held, list | tuple):
        yield from (found for each in held for found in numbers_of(each, path))
    elif isinstance(held, int | float) and not isinstance(held, bool):
        yield path, held


# -- HTTP --


@cache
def picture() -> bytes:
    return png_bytes(Image.new("RGB", (4, 4), (9, 9, 9)))


def make_body(rng: Random) -> bytes:
    image = base64.b64encode(pick(rng, (picture(), damaged(rng, picture())))).decode()
    body = {
        "goal": text(rng),
        "memory": [{"id": "e1", "text": text(rng), "images": [image] if rng.random() < 0.3 else []}],
        "state": pick(rng, (None, f"goal: {text(rng)}", "goal: a\nnow: b\nnote: c = d", make_state_text(rng))),
        "observation": text(rng),
        "image": pick(rng, (None, None, image)),
        "history": list(texts(rng)),
        "soft_on": pick(rng, ("guidance", "always", "never")),
        "sampling": {"temperature": 0.5, "latent_temperature": None, "seed": 3},
        "tensors": ["mu", "z"],
    }
    return json_text(rng, mutated(rng, body)).encode("utf-8", pick(rng, ("replace", "surrogatepass")))


def check_body(given: bytes) -> None:
    sent = CompileBody.model_validate_json(given)
    again = CompileBody.model_validate(CompileBody.of(sent.request(), sent.sampling, sent.tensors))
    for name in ("goal", "observation", "history", "state", "sampling", "tensors"):
        expect(getattr(again, name) == getattr(sent, name), f"a request reads back as another: {name}")


class Silent:
    """A compiler that emits NOACTION."""

    broken, decoding, projector = None, Decoding(), SimpleNamespace(config=SimpleNamespace(emb_std=0.5))

    def compile(self, requests: Sequence[CompileRequest], seeds: Any = None, wanted: Any = None) -> list[Compilation]:
        return [Compilation(".", parse(".").emission) for _ in requests]


@cache
def application() -> tuple[Any, asyncio.AbstractEventLoop]:
    """Start a service with the API key "key"."""
    from compiler.server.app import service_app
    from compiler.server.service import CompilerService

    service: Any = CompilerService(Silent, ServeConfig(max_body_mib=1), gather_s=0.0)  # pyright: ignore[reportArgumentType]
    service.start()
    while service.trouble is not None:
        pass
    return service_app(service, "key"), asyncio.new_event_loop()


def make_http(rng: Random) -> dict[str, Any]:
    application()
    headers = {
        "authorization": pick(rng, ("Bearer key",) * 6 + ("Bearer é", text(rng, 1))),
        "content-length": pick(rng, ("", "3", "-1", "²", "9" * 30, "9" * 5000)),
        "content-type": pick(rng, ("application/json", text(rng, 1))),
    }
    path = pick(rng, ("/compile",) * 9 + ("/ready", "/metrics", "/health", f"/{text(rng, 1)}"))
    return {
        "method": pick(rng, ("POST",) * 9 + ("GET", "PUT", "HEAD")),
        "path": path,
        "headers": headers,
        "body": make_body(rng),
    }


def check_http(given: Mapping[str, Any]) -> None:
    """Call the application through ASGI."""
    app, loop = application()
    sent, replies = [{"type": "http.request", "body": given["body"]}], list[Any]()

    async def receive() -> Any:
        return sent.pop() if sent else await asyncio.sleep(5, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        replies.append(message)

    headers = [(name.encode(), held.encode("latin-1", "replace")) for name, held in given["headers"].items()]
    where = {"method": given["method"], "path": given["path"], "raw_path": b"/", "query_string": b"", "root_path": ""}
    client = {"scheme": "http", "http_version": "1.1", "server": ("a", 1), "client": ("b", 2), "headers": headers}
    loop.run_until_complete(app({"type": "http", **where, **client}, receive, send))
    status, body = replies[0]["status"], b"".join(message.get("body", b"") for message in replies[1:])
    expect(status in (200, 401, 404, 405, 413, 422), f"status {status}")
    if given["path"] == "/compile" and given["method"] == "POST":
        expect("error" in json.loads(body) or status == 200, "a refusal gives no reason")


def make_reply(rng: Random) -> Any:
    emission = pick(rng, (make_lines(rng), "> go | to", ".", text(rng)))
    tensor = {"shape": [1, 2], "data": base64.b64encode(bytes(8)).decode()}
    numbers = {
        "seed": None,
        "tokens_in": 2,
        "tokens_out": 1,
        "cached_tokens": None,
        "weight_version": 0,
        "emb_std": 0.5,
    }
    tensors = {"mu": tensor, "log_sigma": tensor, "z": pick(rng, (None, tensor)), "noise": None}
    reply = {
        "text": emission,
        "kind": str(parse(emission).emission.kind),
        "parse_error": parse(emission).error,
        "prompt_ids": [1, 2],
    }
    lists = {
        "emission_ids": [3],
        "text_logprobs": [-0.5],
        "latent_logprobs": None,
        "seconds": {"queue": 0.0, "compile": 0.1},
    }
    return mutated(rng, {**reply, **numbers, **tensors, **lists})


@cache
def client() -> RemoteCompiler:
    return RemoteCompiler("http://127.0.0.1:1")


def check_reply(given: Any) -> None:
    reply = client()._read(given, CompileRequest("g", (), None, "o"))
    expect(reply.parse_error or reply.emission == parse(reply.text).emission, "a reply reads back as another emission")


TARGETS = (
    Target("settings.overrides", make_overrides, check_overrides, (ConfigError,), 0.3),
    Target("settings.yaml", make_yaml, check_yaml, (ConfigError,), 0.1),
    Target("http.body", make_body, check_body, (ValidationError,), 2),
    *([Target("http.service", make_http, check_http, (), 0.2)] * bool(find_spec("fastapi"))),
    Target("http.reply", make_reply, check_reply, (RemoteError,)),
)
