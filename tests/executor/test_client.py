"""The executor behind vLLM's own HTTP server acts as the Hugging Face one does; and how that server is started."""

from __future__ import annotations

import base64
import contextlib
import http.server
import io
import json
import shlex
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from agent.deliveries import Delivery
from agent.episode import EpisodeLimits, run_episodes
from configs.evaluation import EvalConfig
from configs.load import ConfigError, load_config
from configs.models import EXECUTOR_KEY, CompilerConfig, ExecutorConfig, ServeConfig
from configs.training import GrpoConfig
from executor.client import RemoteExecutor, _nodes
from executor.hf import FrozenExecutor
from executor.prompt import ExecutorRequest, MemoryBlock
from executor.records import ExecutorView, Grounding
from lm.backbone import load_backbone
from memcompiler.cli import app
from runtime.errors import StopReason
from runtime.http import RemoteError
from tests import chats, command_sets, vllm_engines
from tests.commands.running import memcompiler
from tests.fakes import CountingEnv, Recorder, spec

ROOT = Path(__file__).parents[2]
COMMANDS = ("go to shelf 1", "go to cabinet 2", "open cabinet 2", "take mug 1 from shelf 1", "look", "go to shelf 2")


def request(i: int = 0, soft: bool = True) -> ExecutorRequest:
    tokens = torch.randn(4, 64, generator=torch.Generator().manual_seed(i)) if soft else None
    delivered = MemoryBlock(memory="in home 1: put a mug in shelf\n" * 4, guidance=f"go to shelf {i}", soft=tokens)
    return ExecutorRequest("put a mug in cabinet", delivered, ("look",) * i, "You see nothing.", COMMANDS[: 3 + i % 4])


def requests() -> list[ExecutorRequest]:
    return [request(i, soft=i != 1) for i in range(4)]


class StandIn(http.server.BaseHTTPRequestHandler):
    """Answers in vLLM's format with the likelihoods of a Hugging Face model, so that all that is ours is tested without
    vLLM: tree, bodies, sums. The test below has the real server."""

    reference: FrozenExecutor
    misread = False
    keys: ClassVar[set[str]] = set()

    def log_message(self, *args: Any) -> None: ...

    def do_GET(self) -> None:
        self.keys.add(self.headers.get("Authorization", ""))
        self.answer({"data": [{"id": "tiny", "root": str(vllm_engines.folder(False)), "max_model_len": 512}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        theirs, soft = self.reference, None
        if "messages" in body:
            [message] = body["messages"]
            before, embeds, after = message["content"]
            soft = torch.load(io.BytesIO(base64.b64decode(embeds["data"])), weights_only=True)
            text = before["text"] + theirs.placeholder_text * len(soft) + after["text"]
            ids = theirs.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = body["prompt"]
        tokens = torch.tensor([ids])
        embeddings = theirs.model.get_input_embeddings()(tokens)
        if soft is not None:
            embeddings = torch.where((tokens == theirs.placeholder)[..., None], 0, embeddings)
            embeddings[tokens == theirs.placeholder] = soft
        assert body["max_tokens"] == 1 and body["temperature"] == 0
        logprobs = theirs.model(inputs_embeds=embeddings).logits[0, -1].log_softmax(-1)
        asked, allowed = body.get("logprob_token_ids", ()), body.get("allowed_token_ids", range(len(logprobs)))
        assert bool(asked) == bool(body.get("logprobs", False))
        found = {f"token_id:{t}": logprobs[t].item() for t in asked}
        read = [9999 if t == theirs.placeholder else t for t in ids]
        choice: dict[str, Any] = {"token_ids": [max(allowed, key=lambda t: logprobs[t].item())]}
        if soft is None:
            choice |= {"logprobs": {"top_logprobs": [found]}, "prompt_token_ids": read}
            self.answer({"choices": [choice]})
        else:
            rows = [{"token": token, "logprob": value} for token, value in found.items()]
            choice |= {"logprobs": {"content": [{"top_logprobs": rows}]}}
            self.answer({"choices": [choice], "prompt_token_ids": [*read[:-1], 3] if self.misread else read})

    def answer(self, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextlib.contextmanager
def standing_in() -> Iterator[tuple[str, type[StandIn], Callable[[], None]]]:
    reference = FrozenExecutor(load_backbone(vllm_engines.folder(False), torch.float32, "cpu"))
    handler = type("Handler", (StandIn,), {"reference": reference, "keys": set()})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def kill() -> None:
        server.shutdown()
        server.server_close()

    yield f"http://127.0.0.1:{server.server_address[1]}", handler, kill
    kill()


def remote(url: str, model: Path | None = None, **kwargs: Any) -> RemoteExecutor:
    return RemoteExecutor(url, model or vllm_engines.folder(False), torch.float32, **kwargs)


# -- without vLLM -----------------------------------------------------------------------------------------------------


@pytest.mark.seconds
def test_likelihoods_and_choices_are_those_of_the_model() -> None:
    with standing_in() as (url, handler, _):
        ours, theirs = remote(url), handler.reference
        prompts, names = [theirs.encode(r) for r in requests()], [r.admissible or () for r in requests()]
        for a, b in zip(
            ours.candidate_logprobs(prompts, names), theirs.candidate_logprobs(prompts, names), strict=True
        ):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-5)
        assert ours.act(requests()) == theirs.act(requests()) and ours.act([]) == []


@pytest.mark.seconds
def test_answers_held_to_the_commands_are_those_of_the_model() -> None:
    with standing_in() as (url, handler, _):
        ours, theirs, asked = remote(url, mode="constrained"), handler.reference, command_sets.asked(requests())
        asked.append(replace(asked[0], admissible=("look",)))  # answered without asking the server
        theirs.mode = "constrained"
        made = ours.act(asked)
        assert made == theirs.act(asked) and {action.how for action in made} == {Grounding.CHOICE}


def test_the_tree_asks_for_each_continuation_once() -> None:
    nodes = list(_nodes(0, [(1, 2, 9), (1, 3, 9), (1, 2, 4, 9)]))
    assert [(n.path, n.tokens) for n in nodes] == [
        ((), (1,)),
        ((1,), (2, 3)),
        ((1, 2), (9, 4)),
        ((1, 3), (9,)),
        ((1, 2, 4), (9,)),
    ]
    wide = list(_nodes(0, [(i,) for i in range(300)]))
    assert [len(n.tokens) for n in wide] == [128, 128, 44] and {n.path for n in wide} == {()}


def test_what_the_server_reads_as_other_tokens_is_refused() -> None:
    with standing_in() as (url, handler, _):
        handler.misread = True
        with pytest.raises(RemoteError, match="other tokens than ours: its chat template must add nothing"):
            remote(url).act([request(0)])
        assert remote(url).act([request(1, soft=False)])


@pytest.mark.seconds
def test_what_does_not_fit_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXECUTOR_KEY, "k1")
    with standing_in() as (url, handler, kill):
        ours = remote(url, timeout=5)
        assert handler.keys == {"Bearer k1"} and ours.hash() == "remote:tiny" and ours.accepts_soft
        assert not ours.sees_images
        assert torch.equal(ours.embedding_table, handler.reference.embedding_table)
        with pytest.raises(ValueError, match="larger --max-model-len"):
            ours.act([replace(request(0), observation="cabinet 1 " * 600)])
        with pytest.raises(ValueError, match=r"serves \['tiny'\], not .*zoo.*start it by"):
            RemoteExecutor(url, ROOT / "zoo" / "household" / "executor")
        kill()
        with pytest.raises(RemoteError, match="Start it by `memcompiler serve executor --model"):
            ours.act([request(0)])


@pytest.mark.seconds
def test_a_server_that_dies_costs_the_episodes_that_need_it() -> None:

    with standing_in() as (url, _, kill):
        ours = remote(url, timeout=5)  # what a live server may take on a busy machine

        class Env(CountingEnv):
            def reset(self, task: Any) -> Any:
                if task.id == "2":
                    kill()
                return super().reset(task)

        delivery = Delivery("compiled", "compiled", Recorder())
        episodes = run_episodes(Env, [spec(1), spec(2), spec(3)], delivery, ours, EpisodeLimits(), concurrency=1)
    assert [e.stop_reason for e in episodes] == [StopReason.SUCCESS, *[StopReason.EXECUTOR_FAILURE] * 2]
    assert "is it up?" in episodes[1].error or "did not answer" in episodes[1].error
    assert len(episodes[1].steps) == 1


def test_settings_say_what_is_missing() -> None:
    for config in (CompilerConfig, ExecutorConfig):
        with pytest.raises(ValueError, match="engine http needs url: run `memcompiler serve"):
            config(engine="http")
        for url in ("127.0.0.1:8000", "http://me:secret@host", "http://host/v1", "ftp://host"):
            with pytest.raises(ValueError, match="url must be http"):
                config(engine="http", url=url)
        assert config(engine="http", url="http://127.0.0.1:8000").url
    http = {"engine": "http", "url": "http://127.0.0.1:8000"}
    with pytest.raises(ValueError, match="set engine to hf or vllm"):
        GrpoConfig(compiler=http)
    assert GrpoConfig(executor=http) and EvalConfig(compiler=http, executor=http)
    assert ServeConfig(compiler={"checkpoint": "x"}).compiler.engine == "vllm"
    with pytest.raises(ValueError, match="for clients"):
        ServeConfig(compiler=http)
    with pytest.raises(ConfigError, match="engine http needs url"):
        load_config(EvalConfig, None, ["executor.engine=http"])


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_is_printed() -> None:
    port = ["--port", "8011", "--dry-run", "--", "--max-model-len", "64"]
    done = memcompiler("serve", "executor", "--model", "some/model", *port, **{EXECUTOR_KEY: "k1"})
    assert done.returncode == 0, done.stderr
    command = shlex.split(done.stdout)
    assert "some/model" in command and command[-2:] == ["--max-model-len", "64"]
    for flag in ("--enable-prompt-embeds", "--enable-prefix-caching"):
        assert flag in command
    assert command[command.index("--host") + 1] == "127.0.0.1" and "k1" not in done.stdout


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.7", "::", "example.org"])
def test_only_loopback_is_served(host: str) -> None:
    def refused(*command: str) -> str:
        answer = CliRunner().invoke(app, ["serve", *command])
        assert answer.exit_code == 1
        return answer.output

    assert "not loopback" in refused("executor", "--model", "some/model", "--host", host, "--port", "8011")
    assert "not loopback" in refused("compiler", "--checkpoint", "x", "--host", host, "--port", "8012")
    assert "--checkpoint RUN" in refused("compiler", "--port", "8012")


# -- vLLM -------------------------------------------------------------------------------------------------------------


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.engine
@vllm_engines.marks[-1]
def test_the_real_server_acts_as_hugging_face(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXECUTOR_KEY, "k1")
    theirs = FrozenExecutor(load_backbone(vllm_engines.folder(False), torch.float32, "cpu"))
    url, log = vllm_engines.shared_server()
    ours = remote(url)
    prompts, names = [theirs.encode(r) for r in requests()], [r.admissible or () for r in requests()]
    for _ in range(2):  # the second time, much of it is in the prefix cache
        for a, b in zip(
            ours.candidate_logprobs(prompts, names), theirs.candidate_logprobs(prompts, names), strict=True
        ):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-5)
    assert ours.act(requests()) == theirs.act(requests())
    for executor in (ours, theirs):
        executor.mode, executor.max_new_tokens = "generate", 12
    asked = [*requests(), replace(request(2), admissible=None)]
    assert ours.act(asked) == theirs.act(asked)
    for executor in (ours, theirs):
        executor.mode = "constrained"
    asked = [*command_sets.asked(requests()), replace(request(2), admissible=None)]
    assert ours.act(asked) == theirs.act(asked)
    for executor in (ours, theirs):
        executor.instructions, executor.reads = chats.RULES, ExecutorView(context="turns", past_soft=True)
    growing = chats.growing(ours, 5)
    assert ours.encode(growing[-1]).ids == theirs.encode(growing[-1]).ids
    before = dict[bool, ExecutorRequest]()
    for asks in growing:
        [action] = ours.act([asks])
        assert [action] == theirs.act([asks])
        last = before.get(asks.n_soft > 0)  # vLLM keys blocks by embeddings: with and without are two caches
        held = 0 if last is None else len(ours.encode(last).ids) - chats.replaced(ours.encoder, last)
        assert (action.tokens_cached or 0) >= held // vllm_engines.BLOCK * vllm_engines.BLOCK
        before[asks.n_soft > 0] = asks
    with pytest.raises(RemoteError, match="32"):
        narrow = replace(request(0).delivered, soft=torch.zeros(4, 32))
        ours.act([replace(request(0), delivered=narrow)])
    monkeypatch.setenv(EXECUTOR_KEY, "other")
    with pytest.raises(RemoteError, match="401"):
        remote(url)
    said = log.read_text()
    assert "--enable-prompt-embeds" in said and "k1" not in said.replace("k1_", "")


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.engine
@vllm_engines.marks[-1]
def test_the_real_server_sees_as_hugging_face_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With picture and soft tokens, with one of them, with none."""
    monkeypatch.setenv(EXECUTOR_KEY, "k1")
    views = [Image.new("RGB", (64, 64), (40 * i, 90, 200)) for i in range(3)]
    seeing = [replace(request(i, soft=i != 1), image=view) for i, view in enumerate(views)]
    asked, model = [*seeing, request(3), request(1, soft=False)], vllm_engines.folder(True, free_rows=8)
    theirs = FrozenExecutor(load_backbone(model, torch.float32, "cpu"))
    with vllm_engines.server(tmp_path / "log", model) as url:
        ours = remote(url, model)
        prompts, names = [theirs.encode(r) for r in asked], [r.admissible or () for r in asked]
        assert [bool(p.images) for p in prompts] == [True] * 3 + [False] * 2
        for a, b in zip(
            ours.candidate_logprobs(prompts, names), theirs.candidate_logprobs(prompts, names), strict=True
        ):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-5)
        assert ours.act(asked) == theirs.act(asked)
        for executor in (ours, theirs):
            executor.mode = "constrained"
        assert ours.act(command_sets.asked(asked)) == theirs.act(command_sets.asked(asked))
        other = [replace(prompts[0], pictures=prompts[1].pictures)]  # the picture is read
        assert not torch.allclose(
            ours.candidate_logprobs(other, names[:1])[0], theirs.candidate_logprobs(prompts[:1], names[:1])[0]
        )
        assert not remote(url, model, images=False).sees_images
