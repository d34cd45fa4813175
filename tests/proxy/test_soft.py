"""Soft tokens through the proxy, for an upstream that is `memcompiler serve executor`: the same prompt, with the same
embeddings, as the built-in executor reads."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

pytest.importorskip("fastapi", reason="the proxy needs the extra serve")
pytest.importorskip("uvicorn", reason="the proxy needs the extra serve")

from compiler.language import Emission, render
from compiler.records import Compilation
from configs.models import EXECUTOR_KEY
from executor.client import RemoteExecutor
from executor.prompt import ExecutorRequest, MemoryBlock, Turn
from executor.records import ExecutorView
from proxy.serve import renderer_of
from proxy.upstream import Upstream
from tests import vllm_engines
from tests.upstreams import Reply, ScriptedUpstream, listening_proxy, make_proxy

MODEL = "zoo/household/executor"
GOAL, SAID = "put a mug in desk", ["View.", "go to a", "A.", "go to b", "B <|im_end|>."]
MESSAGES = [{"role": "user", "content": f"Goal: {GOAL}\n{SAID[0]}"}]
MESSAGES += [{"role": ("assistant", "user")[i % 2], "content": text} for i, text in enumerate(SAID[1:])]
SOFT_PAST = ExecutorView(context="turns", past_soft=True)


def requests(width: int) -> list[ExecutorRequest]:
    """What the built-in executor is asked at the first two steps."""
    block = MemoryBlock(guidance="go on", reason="it is there", soft=torch.ones(2, width))
    past = (Turn("View.", "go to a"),)
    return [
        ExecutorRequest(GOAL, MemoryBlock(), (), "View.", context="turns"),
        ExecutorRequest(GOAL, block, ("go to a",), "A.", context="turns", past=past),
    ]


class Soft:
    """A compiler with soft tokens that are all of one number, beside guidance from the second step on."""

    def __init__(self, width: int) -> None:
        self.width = width

    def compile(self, requests: Any) -> list[Compilation]:
        [request] = requests
        emission = Emission("go on", "it is there") if request.history else Emission()
        soft = torch.full((2, self.width), float(len(request.history))) if request.soft_on != "never" else None
        return [Compilation(render(emission), emission, request=request, soft=soft)]


def test_the_upstream_reads_the_prompt_of_the_built_in_executor(tmp_path: Path, repository: Path) -> None:
    models = json.dumps({"data": [{"id": str(repository / MODEL), "max_model_len": 2048}]}).encode()
    with ScriptedUpstream([Reply([models])]) as upstream:
        executor = RemoteExecutor(upstream.url.removesuffix("/v1"), repository / MODEL, torch.float32, reads=SOFT_PAST)
        proxy = make_proxy(upstream.url, tmp_path, Soft(128), mapping={"preset": "turns"})
        proxy.guide.accepts_soft, proxy.renderer = True, renderer_of(executor)
        upstream.sent.clear()
        with listening_proxy(proxy) as url:
            post = lambda body: httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
            for n in (1, 3):
                assert post({"model": "m", "messages": MESSAGES[:n], "temperature": 0}).status_code == 200
            spelled = post({"model": "m", "messages": MESSAGES})
            assert spelled.status_code == 422 and "special token" in spelled.json()["error"]["message"]
            with_tools = post({"model": "m", "messages": MESSAGES[:1], "tools": [{}]})
            assert with_tools.status_code == 422 and "only texts" in with_tools.json()["error"]["message"]
    for sent, request in zip(upstream.sent, requests(128), strict=True):
        [message] = sent.messages
        prompt = executor.encode(request)
        assert sent.json["temperature"] == 0 and sent.json["add_generation_prompt"] is False
        texts = [part.get("text", executor.placeholder_text * 2) for part in message["content"]]
        assert executor.encoder.chat_ids("".join(texts)) == prompt.ids
        soft = [part["data"] for part in message["content"] if part["type"] == "prompt_embeds"]
        read = [torch.load(io.BytesIO(base64.b64decode(data)), weights_only=True) for data in soft]
        assert (torch.cat(read) if read else None) is prompt.soft or torch.equal(torch.cat(read), prompt.soft)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.engine
@vllm_engines.marks[-1]
def test_a_vllm_server_answers_the_proxy_as_it_answers_the_built_in_executor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EXECUTOR_KEY, "k1")
    server, _ = vllm_engines.shared_server()
    model = vllm_engines.folder(False)
    executor = RemoteExecutor(server, model, torch.float32, "generate", max_new_tokens=8, reads=SOFT_PAST)
    width = executor.embedding_table.shape[1]
    proxy = make_proxy(f"{server}/v1", tmp_path, Soft(width), mapping={"preset": "turns"})
    proxy.upstream = Upstream(proxy.config.upstream, key="k1")
    proxy.guide.accepts_soft, proxy.renderer = True, renderer_of(executor)
    asked = {"model": executor.served_name, "temperature": 0, "max_tokens": 8, "return_token_ids": True}
    asked |= {"ignore_eos": True, "stop_token_ids": [executor.end_id]}
    with listening_proxy(proxy) as url:
        for n, request in zip((1, 3), requests(width), strict=True):
            body = asked | {"messages": MESSAGES[:n]}
            answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            [(ids, *_)] = executor.generate([executor.encode(request)], [None])
            assert ids and answer.json()["choices"][0]["token_ids"] == ids
