"""The process of the proxy: loads compiler and memory, and serves until a signal."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import uvicorn

from compiler.build import load_remote_compiler
from compiler.client import SamplingBody
from compiler.gate import load_gate
from compiler.records import Compilation, Compiler, CompileRequest
from compiler.server.app import service_of
from compiler.server.service import CompilerService
from configs.load import ConfigError
from configs.models import ServeConfig, model_path
from configs.proxy import PROXY_KEY, ProxyConfig
from data_gen.memory_factory import initialise_memory, open_memory
from executor.client import RemoteExecutor
from lm.device import dtype_of
from proxy.additions import Insertion, chat_of_messages
from proxy.app import Proxy, proxy_app
from proxy.guide import Compile, Guide, usable_delivery
from proxy.mapping import mapped
from proxy.sessions import SessionStore
from proxy.upstream import Upstream
from runtime.http import KEEP_ALIVE_S, bound_socket, http_url
from runtime.lock import FolderLock

Renderer = Callable[[dict[str, Any], Mapping[int, Sequence[Insertion]]], dict[str, Any]]
GRACE_S = 30  # seconds that a shutdown waits for running requests


def serve_proxy(config: ProxyConfig, out: Path, host: str, port: int) -> None:
    """Serve a proxy until SIGTERM or SIGINT, which let running requests finish.

    Args:
        out: folder of the sessions, and of the memory unless the settings name one.

    Raises:
        ConfigError: the settings do not fit each other, or lack a checkpoint or a key.
        BankError: the memory cannot be opened.
        ValueError: the port is taken, or another process uses the folder.
    """
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    bound = bound_socket(host, port)
    url = http_url(*bound.getsockname()[:2])
    with FolderLock(out, "memcompiler serve proxy"):
        print(f"starting at {url}", flush=True)
        app = proxy_app(load_proxy(config, out), os.environ.get(PROXY_KEY))
        print(f"ready: base_url={url}/v1 in front of {config.upstream.url}", flush=True)
        # Its own log would show tracebacks, whose messages may quote memory; the proxy names its failures itself.
        settings = uvicorn.Config(
            app,
            log_level="critical",
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_graceful_shutdown=GRACE_S,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        server: Any = uvicorn.Server(settings)

        def leave(number: int, frame: object) -> None:
            server.should_exit, server.force_exit = True, server.should_exit

        server.handle_exit = leave  # uvicorn's own ends the process by the signal
        server.run(sockets=[bound])


def load_proxy(config: ProxyConfig, out: Path) -> Proxy:
    """Load what a proxy needs. Raises: as `serve_proxy`."""
    try:
        usable_delivery(config.deliver)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    mapping, upstream = mapped(config.mapping), _upstream(config)
    if config.memory.isolation == "scene" and mapping.scene is None:
        raise ConfigError("memory.isolation=scene: the mapping reads no scene; set mapping.scene or isolation=task")
    compiler, compile = load_compile(config)
    executor = _remote_executor(config)
    memory = open_memory(config.memory, out / "bank", config.env)
    initialise_memory(memory, config.env)
    guide = Guide(
        config=config,
        mapping=mapping,
        store=SessionStore(out / "sessions", config.sessions),
        memory=memory,
        compile=compile,
        compiler=compiler,
        accepts_soft=executor is not None,
        gate=load_gate(config.compiler.checkpoint),
    )
    try:
        guide.delivery(config.deliver)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    sees = bool(getattr(getattr(compiler, "encoder", None), "is_vlm", False)) or config.compiler.engine == "http"
    return Proxy(guide, upstream, executor and renderer_of(executor), images=sees)


def _upstream(config: ProxyConfig) -> Upstream:
    name = config.upstream.key_env
    key = os.environ.get(name) if name is not None else None
    if name is not None and not key:
        raise ConfigError(f"upstream.key_env: the environment variable {name} is not set")
    return Upstream(config.upstream, key, drops_key=bool(os.environ.get(PROXY_KEY)))


def load_compile(config: ProxyConfig) -> tuple[Compiler | None, Compile]:
    """Load the compiler, in this process or as the client of a service; and the function that compiles by it.

    Without a checkpoint there is none, which is an error only where the default delivery needs one.
    """
    settings = config.compiler
    if settings.engine == "http":
        remote = load_remote_compiler(settings, config.seed)
        remote.environment = config.env or ""

        async def compile_there(request: CompileRequest) -> Compilation:
            [compilation] = await asyncio.to_thread(remote.compile, [request])
            return compilation

        return remote, compile_there
    if settings.checkpoint is None:
        if usable_delivery(config.deliver).needs_checkpoint:
            raise ConfigError(f"deliver {config.deliver} needs a trained compiler: set compiler.checkpoint")

        async def compile_nothing(request: CompileRequest) -> Compilation:
            raise RuntimeError("there is no compiler")

        return None, compile_nothing
    served = ServeConfig(
        compiler=settings,
        queue=config.queue,
        batch=config.batch,
        timeout_s=config.compile_timeout_s,
        env=config.env,
        seed=config.seed,
    )
    service = service_of(served, gather_s=0.0)  # an agent waits for its turn alone
    service.start()
    while service.trouble is not None and service.failure is None:
        time.sleep(0.02)
    if service.failure is not None:
        raise service.failure
    return service.compiler, compile_in(service)


def compile_in(service: CompilerService) -> Compile:
    """Return the function that compiles by a service of this process, in batches."""

    async def compile_here(request: CompileRequest) -> Compilation:
        job = service.submit(request, SamplingBody())
        try:
            return await asyncio.wrap_future(job.result)
        finally:
            service.give_up(job)

    return compile_here


def _remote_executor(config: ProxyConfig) -> RemoteExecutor | None:
    if config.upstream.executor is None:
        return None
    url = config.upstream.url.removesuffix("/v1")
    name = model_path(config.upstream.executor)
    return RemoteExecutor(url, name, dtype_of(config.upstream.dtype), timeout=config.upstream.timeout_s)


def renderer_of(executor: RemoteExecutor) -> Renderer:
    """Return the function that writes a request for `memcompiler serve executor`, whose chat template adds nothing: one
    message with the whole prompt, texts and soft tokens in turn."""

    def render(body: dict[str, Any], insertions: Mapping[int, Sequence[Insertion]]) -> dict[str, Any]:
        if body.get("tools") or body.get("functions"):
            raise ValueError("tools: this upstream reads only texts of system, user and assistant")
        chat, soft = chat_of_messages(body.get("messages") or [], insertions)
        prompt = executor.encoder.encode_chat(chat)
        if prompt.ids.count(executor.placeholder) != sum(map(len, soft)):
            raise ValueError(f"ordinary text contains the memory token {executor.placeholder_text}")
        prompt = replace(prompt, soft=torch.cat(soft) if soft else None)
        content = executor.message_parts(prompt)
        return {**body, "messages": [{"role": "user", "content": content}], "add_generation_prompt": False}

    return render
