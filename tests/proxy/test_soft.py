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
from executor.client import RemoteExecutor
from executor.prompt import ExecutorRequest, MemoryBlock, Turn
from executor.records import ExecutorView
from proxy.serve import renderer_of
from tests.upstreams import Reply, ScriptedUpstream, listening_proxy, make_proxy

MODEL = "zoo/household/executor"


class Soft:
    """A compiler with soft tokens that are all of one number, beside guidance from the second step on."""

    def compile(self, requests: Any) -> list[Compilation]:
        [request] = requests
        emission = Emission("go on", "it is there") if request.history else Emission()
        soft = torch.full((2, 128), float(len(request.history))) if request.soft_on != "never" else None
        return [Compilation(render(emission), emission, request=request, soft=soft)]


def test_the_upstream_reads_the_prompt_of_the_built_in_executor(tmp_path: Path, repository: Path) -> None:
    said = ["View.", "go to a", "A.", "go to b", "B <|im_end|>."]
    models = json.dumps({"data": [{"id": str(repository / MODEL), "max_model_len": 2048}]}).encode()
    with ScriptedUpstream([Reply([models])]) as upstream:
        executor = RemoteExecutor(upstream.url.removesuffix("/v1"), repository / MODEL, torch.float32)
        executor.reads = ExecutorView(context="turns", past_soft=True)
        proxy = make_proxy(upstream.url, tmp_path, Soft(), mapping={"preset": "turns"})
        proxy.guide.accepts_soft, proxy.renderer = True, renderer_of(executor)
        upstream.sent.clear()
        with listening_proxy(proxy) as url:
            post = lambda body: httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
            messages = [{"role": "user", "content": f"Goal: put a mug in desk\n{said[0]}"}]
            messages += [{"role": ("assistant", "user")[i % 2], "content": t} for i, t in enumerate(said[1:])]
            for n in (1, 3):
                assert post({"model": "m", "messages": messages[:n], "temperature": 0}).status_code == 200
            spelled = post({"model": "m", "messages": messages})
            assert spelled.status_code == 422 and "special token" in spelled.json()["error"]["message"]
            with_tools = post({"model": "m", "messages": messages[:1], "tools": [{}]})
            assert with_tools.status_code == 422 and "only texts" in with_tools.json()["error"]["message"]
    block = MemoryBlock(guidance="go on", reason="it is there", soft=torch.ones(2, 128))
    first = ExecutorRequest("put a mug in desk", MemoryBlock(), (), "View.", context="turns")
    later = ExecutorRequest(
        "put a mug in desk", block, ("go to a",), "A.", context="turns", past=(Turn("View.", "go to a"),)
    )
    for sent, request in zip(upstream.sent, (first, later), strict=True):
        [message] = sent.messages
        prompt = executor.encode(request)
        assert sent.json["temperature"] == 0 and sent.json["add_generation_prompt"] is False
        texts = [part.get("text", executor.placeholder_text * 2) for part in message["content"]]
        assert executor.encoder.chat_ids("".join(texts)) == prompt.ids
        soft = [part["data"] for part in message["content"] if part["type"] == "prompt_embeds"]
        read = [torch.load(io.BytesIO(base64.b64decode(data)), weights_only=True) for data in soft]
        assert (torch.cat(read) if read else None) is prompt.soft or torch.equal(torch.cat(read), prompt.soft)
