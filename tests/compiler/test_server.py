"""The compiler behind HTTP: every status, one format on both sides, and results equal to the compiler's own."""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from agent.deliveries import Delivery
from agent.episode import EpisodeLimits, EpisodeSpec, run_episodes
from compiler.brief_state import Belief, BriefState
from compiler.client import CompileBody, CompileReply, RemoteCompiler, SamplingBody, TensorBody, Timings
from compiler.hf import MemoryCompiler
from compiler.language import Emission, ParseError, render
from compiler.records import Compilation, CompileRequest, Decoding, StillWanted, never_cancelled
from configs.evaluation import EvalConfig
from configs.load import load_config
from configs.models import COMPILER_KEY, CompilerConfig, ServeConfig, Soft
from executor.records import FULL_VIEW
from memory.entry import MemoryEntry, Provenance
from runtime.errors import StopReason
from runtime.http import RemoteError, RemoteServer
from tests import tiny_models, vllm_engines
from tests.fakes import CountingEnv, Recorder, spec
from tests.services import listening
from tests.waiting import in_background, until

pytest.importorskip("fastapi", reason="the service needs the extra serve")
pytest.importorskip("uvicorn", reason="the service needs the extra serve")

from fastapi.testclient import TestClient

from compiler.server.app import service_app, shut_down_on_signal
from compiler.server.service import CompilerService

ROOT = Path(__file__).parents[2]
STATE = "goal: in home 1: put a mug in cabinet\nnow: find mug"
BODY = {
    "goal": "put a mug in cabinet",
    "state": STATE,
    "observation": "You see a shelf 1.",
    "memory": [{"id": "e1", "text": "in home 1: the mug was in shelf 1"}],
}
COMPARED = ("text", "emission", "parse_error", "prompt_ids", "emission_ids", "tokens_in", "tokens_out")
TENSORS = ("text_logprobs", "mu", "log_sigma", "z", "soft", "latent_logprobs")


class Fake:
    """A compiler that returns given emissions, and blocks while `gate` is closed."""

    broken: str | None = None

    def __init__(self) -> None:
        self.decoding = Decoding()
        self.projector = SimpleNamespace(config=SimpleNamespace(emb_std=0.5))
        self.gate, self.entered, self.batches = threading.Event(), threading.Event(), []
        self.gate.set()

    def compile(
        self,
        requests: Sequence[CompileRequest],
        seeds: Sequence[int] | None = None,
        wanted: StillWanted = never_cancelled,
    ) -> list[Compilation]:
        self.entered.set()
        assert self.gate.wait(20)
        if any(request.goal == "endless" for request in requests):  # as long as anybody waits
            until(lambda: not any(wanted(i) for i in range(len(requests))))
        self.batches.append([request.goal for request in requests])
        for request in requests:
            if request.goal == "too long":
                raise ValueError("the compiler's prompt leaves no room: SECRET is how it begins")
            if request.goal == "crash":
                raise RuntimeError("out of memory at SECRET")
        emission = Emission("go to shelf 1")
        return [Compilation(render(emission), emission, tokens_in=3, tokens_out=2) for _ in requests]


class Told(Fake):
    """Remembers the environments of its requests."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def compile(self, requests: Any, seeds: Any = None, wanted: Any = None) -> Any:
        self.names += [request.environment for request in requests]
        return super().compile(requests)


@contextlib.contextmanager
def serving(
    backend: Any = None,
    key: str | None = None,
    make: Any = None,
    gather_s: float = 0.005,
    environments: tuple[str, ...] = ("household",),
    **settings: Any,
) -> Iterator[tuple[TestClient, CompilerService]]:
    about = {"environments": list(environments), "executor_reads": None}
    service = CompilerService(make or (lambda: backend), ServeConfig(**settings), about=about, gather_s=gather_s)
    service.start()
    with TestClient(service_app(service, key)) as client:
        if make is None:
            until(lambda: service.trouble is None)
        yield client, service


# -- statuses ---------------------------------------------------------------------------------------------------------


def test_a_compilation_and_what_stands_beside_it() -> None:
    with serving(Fake()) as (client, _):
        assert client.get("/health").status_code == client.get("/ready").status_code == 200
        about = {"environments": ["household"], "executor_reads": None}
        assert client.get("/ready").json() == {"status": "ready", "weights": None, **about}
        answer = client.post("/compile", json=BODY)
        assert answer.status_code == 200
        reply = CompileReply.model_validate(answer.json())
        assert (reply.text, reply.kind, reply.parse_error) == ("> go to shelf 1", "EXPERIENCE", None)
        assert (reply.tokens_in, reply.tokens_out, reply.cached_tokens, reply.seed) == (3, 2, None, None)
        assert reply.seconds.queue >= 0 and reply.emb_std == 0.5 and reply.mu is None
        assert "/compile" in client.get("/openapi.json").json()["paths"]


def test_a_request_names_the_environment_where_the_service_has_several() -> None:
    told = Told()
    asked = lambda client, **more: client.post("/compile", json=BODY | more)
    with serving(told, environments=("alfworld", "scienceworld")) as (client, _):
        assert asked(client, environment="scienceworld").status_code == 200 and told.names == ["scienceworld"]
        for wrong in ({}, {"environment": "household"}):
            answer = asked(client, **wrong)
            assert answer.status_code == 422 and "must be one of alfworld, scienceworld" in answer.json()["error"]
    with serving(Told()) as (client, _):
        assert asked(client).status_code == asked(client, environment="household").status_code == 200
        assert asked(client, environment="alfworld").status_code == 422


@pytest.mark.seconds
def test_the_client_names_its_environment_where_requests_name_none() -> None:
    told = Told()
    with listening(told) as (url, _):
        remote = RemoteCompiler(url)
        remote.compile([tiny_models.request(0)])
        remote.environment = "alfworld"
        remote.compile([replace(tiny_models.request(0), environment="scienceworld")])
        remote.compile([tiny_models.request(0)])
    assert told.names == ["", "scienceworld", "alfworld"]


def test_metrics_are_prometheus_text() -> None:
    with serving(Fake()) as (client, _):
        for goal in ("a", "b", "too long"):
            client.post("/compile", json=BODY | {"goal": goal})
        page = client.get("/metrics")
        assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = [line.rsplit(" ", 1) for line in page.text.splitlines() if not line.startswith("#")]
        values = {name: float(value) for name, value in lines}
        assert values['memcompiler_requests_total{code="200"}'] == 2
        assert values['memcompiler_requests_total{code="422"}'] == values["memcompiler_failures_total"] == 1
        assert values["memcompiler_tokens_in_total"] == 6 and values["memcompiler_ready"] == 1
        for seconds, count in (("request", 3), ("queue", 2), ("compile", values["memcompiler_batches_total"])):
            assert values[f'memcompiler_{seconds}_seconds_bucket{{le="+Inf"}}'] == count
            assert values[f"memcompiler_{seconds}_seconds_count"] == count
        assert all(
            re.fullmatch(r'memcompiler_[a-z_]+(\{[a-z]+="[^"]+"\})? [0-9.e+-]+', line)
            for line in page.text.splitlines()
            if not line.startswith("#")
        )
        families = re.findall(r"# TYPE (\S+) (\S+)", page.text)
        assert len(dict(families)) == len(families) and ("memcompiler_request_seconds", "histogram") in families


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"goal": 3}, "goal"),
        ({"unknown": 1}, "unknown"),
        ({"state": "no Brief State"}, "state"),
        ({"state": "goal: a\nmood: good"}, "state"),
        ({"image": "%%%"}, "image: Value error, not base64"),
        ({"image": base64.b64encode(b"GIF89a" + bytes(40)).decode()}, "image: Value error, not a PNG"),
        ({"sampling": {"temperature": -1}}, "sampling.temperature"),
        ({"sampling": {"seed": "x"}}, "sampling.seed"),
        ({"memory": [{"id": "e1"}]}, "memory.0.text"),
        ({"tensors": ["h"]}, "tensors.0"),
    ],
)
def test_malformed_requests_are_422_and_say_where_but_not_what(change: dict[str, Any], where: str) -> None:
    with serving(Fake()) as (client, _):
        answer = client.post("/compile", json=BODY | change)
        assert answer.status_code == 422 and where in answer.json()["error"]
        assert "no Brief State" not in answer.text and "%%%" not in answer.text


def test_broken_json_and_bombs_are_422() -> None:
    with serving(Fake()) as (client, _):
        for raw in (b"", b"{", b"[]", b"\xff\xfe", b'{"goal": ' + b"[" * 10000):
            assert client.post("/compile", content=raw).status_code == 422, raw[:20]
        png = b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR" + (60000).to_bytes(4, "big") * 2 + bytes(40)
        answer = client.post("/compile", json=BODY | {"image": base64.b64encode(png).decode()})
        assert answer.status_code == 422 and "pixels" in answer.json()["error"]


def test_503_while_starting_and_when_it_did_not_start() -> None:
    gate = threading.Event()

    def make() -> Any:
        assert gate.wait(20)
        raise MemoryError("no room")

    with serving(make=make) as (client, service):
        for answer in (client.get("/ready"), client.post("/compile", json=BODY)):
            assert answer.status_code == 503 and "starting" in answer.json()["error"]
            assert answer.headers["retry-after"] == "1"
        assert client.get("/health").status_code == 200
        gate.set()
        until(lambda: service.failure is not None)
        assert "no room" in client.get("/ready").json()["error"]
        assert client.post("/compile", json=BODY).status_code == 503


def test_503_when_the_engine_has_died() -> None:
    class Dying(Fake):
        def compile(self, requests: Any, seeds: Any = None, wanted: Any = None) -> Any:
            self.broken = "vLLM's engine process died"
            raise RuntimeError(self.broken)

    with serving(Dying()) as (client, _):
        answer = client.post("/compile", json=BODY)
        assert answer.status_code == 503 and "died" in answer.json()["error"]
        assert client.get("/ready").status_code == client.post("/compile", json=BODY).status_code == 503
        assert "memcompiler_ready 0.0" in client.get("/metrics").text


def test_a_full_queue_is_429_and_empties_again() -> None:
    fake = Fake()
    fake.gate.clear()
    with serving(fake, queue=1, gather_s=0.0) as (client, service):
        first = in_background(lambda: client.post("/compile", json=BODY))
        assert fake.entered.wait(20)  # in the compiler's hands
        second = in_background(lambda: client.post("/compile", json=BODY))
        until(lambda: len(service.queue) == 1)
        third = client.post("/compile", json=BODY)
        assert third.status_code == 429 and third.headers["retry-after"] == "1" and "wait" in third.json()["error"]
        fake.gate.set()
        assert first().status_code == second().status_code == client.post("/compile", json=BODY).status_code == 200


def test_a_slow_compiler_is_504_and_what_timed_out_is_not_compiled_later() -> None:
    fake = Fake()
    fake.gate.clear()
    with serving(fake, timeout_s=0.3, gather_s=0.0) as (client, service):
        answers = [in_background(lambda i=i: client.post("/compile", json=BODY | {"goal": str(i)})) for i in range(3)]
        assert {answer().status_code for answer in answers} == {504}
        fake.gate.set()
        until(lambda: len(service.queue) == 0 and len(fake.batches) > 0)
        assert client.post("/compile", json=BODY | {"goal": "last"}).status_code == 200
        assert len(fake.batches) == 2 and fake.batches[-1] == ["last"]


def test_what_times_out_frees_the_compiler() -> None:
    fake = Fake()
    with serving(fake, timeout_s=0.5) as (client, service):
        answers = [in_background(lambda: client.post("/compile", json=BODY | {"goal": "endless"})) for _ in range(2)]
        assert [answer().status_code for answer in answers] == [504, 504]
        assert client.post("/compile", json=BODY).status_code == 200
        assert fake.batches[-1] == [BODY["goal"]] and len(service.queue) == 0


@pytest.mark.seconds
def test_a_client_that_goes_frees_the_compiler_and_leaves_the_queue() -> None:
    fake = Fake()
    with listening(fake, gather_s=0.0) as (url, _):

        def ask_and_go(seconds: float) -> None:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{url}/compile", json=BODY | {"goal": "endless"}, timeout=seconds)

        first = in_background(lambda: ask_and_go(2))
        assert fake.entered.wait(20)
        ask_and_go(0.3)  # waits behind the first
        until(lambda: "memcompiler_waiting 0.0" in httpx.get(f"{url}/metrics").text)
        first()
        assert httpx.post(f"{url}/compile", json=BODY, timeout=15).status_code == 200
        assert fake.batches == [["endless"], [BODY["goal"]]]
        assert 'memcompiler_requests_total{code="499"} 2.0' in httpx.get(f"{url}/metrics").text


class SideBySide(Fake):
    """A thread-safe compiler: `endless` requests last until they are cancelled, others until `gate` opens. An emission
    says the request's goal, its decoding and its seed."""

    concurrent = True

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.most, self.lock = 0, 0, threading.Lock()

    def compile(self, requests: Any, seeds: Any = None, wanted: Any = never_cancelled, decoding: Any = None) -> Any:
        [request], [seed] = requests, seeds or [None]
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        self.entered.set()
        if request.goal == "endless":
            until(lambda: not wanted(0))
        elif not self.gate.wait(20) or request.goal == "crash":
            raise RuntimeError("out of memory")
        with self.lock:
            self.inside -= 1
            self.batches.append([request.goal])
        emission = Emission(f"{request.goal} {decoding.temperature:g} {seed}")
        return [Compilation(render(emission), emission)]


def test_an_emission_is_not_held_back_by_a_longer_one_and_a_freed_place_is_taken() -> None:
    compiler = SideBySide()
    with serving(compiler, batch=2) as (client, service):
        long = service.submit(replace(tiny_models.request(0, image=False), goal="endless"), SamplingBody())
        until(lambda: compiler.inside == 1)
        assert client.post("/compile", json=BODY).status_code == 200 and compiler.inside == 1  # beside the long one
        assert client.post("/compile", json=BODY | {"goal": "crash"}).status_code == 500
        compiler.gate.clear()
        waiting = [in_background(lambda: client.post("/compile", json=BODY)) for _ in range(2)]
        until(lambda: len(service.queue) == 1 and compiler.inside == 3)  # the failed one never left `inside`
        service.give_up(long)
        until(lambda: not service.queue)
        compiler.gate.set()
        assert [answer().status_code for answer in waiting] == [200, 200]
        until(lambda: compiler.inside == 1)
        assert long.result.cancelled() and ["endless"] in compiler.batches


def test_at_ten_times_what_fits_every_request_gets_its_own_answer() -> None:
    compiler = SideBySide()
    with serving(compiler, batch=4, queue=8) as (client, _):

        def ask(number: int) -> str:
            body = BODY | {"goal": f"goal {number}", "sampling": {"temperature": number % 3 / 2, "seed": number}}
            while (answer := client.post("/compile", json=body)).status_code == 429:
                time.sleep(0.005)
            assert answer.status_code == 200
            return answer.json()["text"]

        with ThreadPoolExecutor(40) as clients:
            texts = list(clients.map(ask, range(80)))
    seed = lambda number: number if number % 3 else None  # at temperature 0 nothing is drawn
    assert texts == [f"> goal {n} {n % 3 / 2:g} {seed(n)}" for n in range(80)] and compiler.most <= 4


def test_a_large_request_is_413_by_its_header_and_in_fact() -> None:
    with serving(Fake(), max_body_mib=1000 / 2**20) as (client, _):
        large = json.dumps(BODY | {"observation": "x" * 2000}).encode()
        assert client.post("/compile", content=large).status_code == 413
        chunks = (large[i : i + 100] for i in range(0, len(large), 100))  # sent without a length
        assert client.post("/compile", content=chunks).status_code == 413
        assert client.post("/compile", json=BODY).status_code == 200


def test_a_prompt_beyond_the_context_is_422_and_the_one_beside_it_is_answered() -> None:
    with listening(tiny_models.memory_compiler(False).eval(), gather_s=0.5) as (url, _):

        def ask(observation: str) -> httpx.Response:
            return httpx.post(f"{url}/compile", json=BODY | {"observation": observation}, timeout=60)

        long, short = (in_background(lambda text=text: ask(text)) for text in ("cabinet 1 " * 80_000, "a shelf 1"))
        assert short().status_code == 200
        assert long().status_code == 422 and "in a context of 4096" in long().json()["error"]


def test_a_key_is_asked_for_where_there_is_one() -> None:
    with serving(Fake(), key="k1") as (client, _):
        assert client.post("/compile", json=BODY).status_code == 401
        assert client.post("/compile", json=BODY, headers={"Authorization": "Bearer k2"}).status_code == 401
        assert client.post("/compile", json=BODY, headers={"Authorization": "Bearer k1"}).status_code == 200


def test_leaving_finishes_what_runs_and_refuses_what_is_new() -> None:
    fake, server = Fake(), SimpleNamespace(should_exit=False, force_exit=False, handle_exit=None)
    fake.gate.clear()
    with serving(fake) as (client, service):
        shut_down_on_signal(server, service)
        running = in_background(lambda: client.post("/compile", json=BODY))
        assert fake.entered.wait(20)
        server.handle_exit(15, None)
        assert client.post("/compile", json=BODY).status_code == client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200 and not server.should_exit
        fake.gate.set()
        assert running().status_code == 200
        until(lambda: server.should_exit)
        assert not server.force_exit
        server.handle_exit(15, None)
        assert server.force_exit


def test_what_waits_is_compiled_together_and_a_bad_one_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    fake = Fake()
    fake.gate.clear()
    goals = ["first", "a", "too long", "b", "crash"]
    with serving(fake) as (client, service), caplog.at_level(logging.DEBUG):
        answers = {}
        for goal in goals:
            answers[goal] = in_background(lambda goal=goal: client.post("/compile", json=BODY | {"goal": goal}))
            assert fake.entered.wait(20)  # the first is in the compiler's hands; the others wait
            until(lambda: len(service.queue) == len(answers) - 1)
        fake.gate.set()
        codes = {goal: answer().status_code for goal, answer in answers.items()}
        assert codes == {"first": 200, "a": 200, "too long": 422, "b": 200, "crash": 500}
        assert fake.batches[1] == ["a", "too long", "b", "crash"]  # and then each of them alone
        assert client.get("/ready").status_code == 200
    ours = "".join(record.getMessage() for record in caplog.records if record.name.startswith("memcompiler"))
    assert "RuntimeError at compile" in ours and "SECRET" not in caplog.text and "put a mug" not in caplog.text


# -- one format on both sides -----------------------------------------------------------------------------------------


def test_every_request_arrives_as_it_was_sent() -> None:
    state = BriefState("a; b", ("x = 1",), "now; then", ("p",), (Belief("k=1", "v;2"), Belief("n", "m")))
    png = base64.b64decode(CompileBody.of(tiny_models.request(0), SamplingBody(), ())["image"])
    entry = MemoryEntry("e1", "text\nof two lines", Provenance("t", "s", "g", "train", True), (png,))
    for request in (
        tiny_models.request(0),
        tiny_models.request(1, image=False),
        CompileRequest("goal", (entry,), state, "see\nthis", None, ("look", "go")),
        CompileRequest("goal", (), None, "see", None, ("look",)),
    ):
        sent = json.dumps(CompileBody.of(request, SamplingBody(temperature=0.5, seed=2**62), ("z",)))
        body = CompileBody.model_validate_json(sent)
        got = body.request()
        assert replace(got, memory=(), image=None) == replace(request, memory=(), image=None)
        assert [(e.id, e.text, e.images) for e in got.memory] == [(e.id, e.text, e.images) for e in request.memory]
        assert (got.image is None) == (request.image is None)
        if got.image is not None:
            assert got.image.tobytes() == request.image.tobytes() and got.image.mode == request.image.mode
        assert body.sampling.seed == 2**62 and body.tensors == ("z",)


def test_tensors_keep_every_bit() -> None:
    tensor = torch.tensor([[1e-45, -0.0, torch.inf], [torch.pi, 3.4e38, torch.finfo(torch.float32).eps]])
    again = TensorBody.model_validate_json(TensorBody.of(tensor).model_dump_json()).tensor()
    assert torch.equal(again.view(torch.int32), tensor.view(torch.int32))
    with pytest.raises(ValueError, match="cannot have 6 values"):
        TensorBody(shape=(2, 2), data=TensorBody.of(tensor).data).tensor()


def test_a_reply_that_this_version_reads_differently_is_refused() -> None:
    made = Compilation("> go", Emission("go"))
    reply = CompileReply.of(made, (), None, None, Timings(queue=0, compile=0))
    assert reply.compilation(tiny_models.request(0)).emission == made.emission
    with pytest.raises(ValueError, match="parses its emission as BRIEF, this client as EXPERIENCE"):
        reply.model_copy(update={"kind": "BRIEF"}).compilation(tiny_models.request(0))


def assert_same(ours: list[Compilation], theirs: list[Compilation], atol: float = 0.0) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        for name in COMPARED:
            assert getattr(mine, name) == getattr(other, name), name
        for name in TENSORS:
            torch.testing.assert_close(getattr(mine, name), getattr(other, name), atol=atol, rtol=atol, msg=name)


@pytest.mark.parametrize("vlm", [True, False])
def test_what_comes_back_is_the_compilation_itself(vlm: bool) -> None:
    compiler = tiny_models.memory_compiler(vlm).eval()
    compiler.weight_version = 7
    asked = [tiny_models.request(i, image=i != 1) for i in range(4)]
    with listening(compiler, gather_s=0.0, batch=1) as (url, _):
        made = RemoteCompiler(url).compile(asked)
        assert_same(made, [c for request in asked for c in compiler.compile([request])])
        assert all(c.request is request and c.weight_version == 7 for c, request in zip(made, asked, strict=True))
        assert any(c.parse_error is ParseError.TRUNCATED for c in made)
        assert all(c.soft.dtype == torch.float32 and c.soft.shape == (4, 64) for c in made)
    with listening(compiler, gather_s=0.2) as (url, _):  # together: sums in another order
        assert_same(RemoteCompiler(url).compile(asked), compiler.compile(asked), atol=1e-5)


@pytest.mark.seconds
def test_a_seed_is_drawn_as_by_the_compiler_itself() -> None:
    compiler = tiny_models.memory_compiler(False).eval()
    asked = [tiny_models.request(i, image=False) for i in range(3)]

    def alone(seeds: Sequence[int], decoding: Decoding) -> list[Compilation]:
        compiler.decoding, before = decoding, compiler.decoding
        made = []
        for request, seed in zip(asked, seeds, strict=True):
            compiler.generator.manual_seed(seed)
            made += compiler.compile([request])
        compiler.decoding = before
        return made

    for text, latent in ((1.2, None), (1.0, 0.5), (0.0, 1.0), (1.0, 0.0)):
        seeds = torch.randint(2**62, (3,), generator=torch.Generator().manual_seed(5)).tolist()
        theirs = alone(seeds, replace(compiler.decoding, temperature=text, latent_temperature=latent))
        with listening(compiler, gather_s=30, batch=3) as (url, _):  # together: sums in another order
            assert_same(RemoteCompiler(url, text, latent, seed=5).compile(asked), theirs, atol=1e-5)
            assert "memcompiler_batches_total 1.0" in httpx.get(f"{url}/metrics").text
        with listening(compiler, batch=1) as (url, _):
            remote = RemoteCompiler(url, text, latent, seed=5)
            assert_same(remote.compile(asked), theirs)
            again = remote.compile(asked)  # continues with other seeds
            assert not all(torch.equal(a.z, b.z) and a.text == b.text for a, b in zip(again, theirs, strict=True))


def test_a_seed_of_the_services_own_is_named_and_can_be_used_again() -> None:
    with serving(tiny_models.memory_compiler(False).eval()) as (client, service):
        asked = BODY | {"sampling": {"temperature": 1.0}, "tensors": ["z"]}
        first = client.post("/compile", json=asked).json()
        assert first["mu"] is None and first["z"]["shape"] == [4, 64]
        again = client.post("/compile", json=asked | {"sampling": {"temperature": 1.0, "seed": first["seed"]}}).json()
        other = client.post("/compile", json=asked).json()
        assert {**again, "seconds": 0} == {**first, "seconds": 0} and other["z"] != first["z"]
        assert service.compiler.decoding.temperature == 0.0  # a request's settings do not outlive it


# -- the client -------------------------------------------------------------------------------------------------------


@pytest.mark.seconds
def test_busy_and_starting_servers_are_asked_again() -> None:
    fake = Fake()
    fake.gate.clear()
    with listening(fake, queue=1, batch=1, gather_s=0.0) as (url, _):
        threading.Timer(0.5, fake.gate.set).start()
        assert len(RemoteCompiler(url, timeout=20).compile([tiny_models.request(0)] * 6)) == 6


def test_failures_come_back_in_words_and_in_time() -> None:
    fake = Fake()
    with listening(fake) as (url, kill):
        bad = replace(tiny_models.request(0), goal="too long")
        with pytest.raises(RemoteError, match="422: the compiler's prompt leaves no room"):
            RemoteCompiler(url).compile([tiny_models.request(0), bad])
        fake.gate.clear()
        with pytest.raises(RemoteError, match=r"did not answer within 0\.5 s"):
            RemoteCompiler(url, timeout=0.5).compile([tiny_models.request(0)])
        fake.gate.set()
        with pytest.raises(RemoteError, match="404"):
            RemoteServer(url, COMPILER_KEY, "it").post_all("/nowhere", [{}])
        assert RemoteCompiler(url).compile([]) == []
        kill()
        with pytest.raises(RemoteError, match="is it up\\? Start it by `memcompiler serve compiler"):
            RemoteCompiler(url, timeout=1).compile([tiny_models.request(0)] * 3)


@pytest.mark.seconds
def test_the_time_limit_is_a_requests_not_the_batchs() -> None:
    class Slow(Fake):
        def compile(self, requests: Any, seeds: Any = None, wanted: Any = None) -> Any:
            time.sleep(0.5)
            return super().compile(requests)

    with listening(Slow(), batch=1, gather_s=0.0) as (url, _):
        assert len(RemoteCompiler(url, timeout=3, parallel=1).compile([tiny_models.request(0)] * 8)) == 8


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMPILER_KEY, "k1")
    server = RemoteServer("http://127.0.0.1:1", COMPILER_KEY, "it", timeout=0.1)
    assert server._client.headers["authorization"] == "Bearer k1"
    with pytest.raises(RemoteError) as raised:
        server.get("/")
    assert "k1" not in str(raised.value)


@pytest.mark.seconds
def test_a_service_that_dies_costs_the_episodes_that_need_it_and_no_others() -> None:

    fake = Fake()
    with listening(fake) as (url, kill):
        remote = RemoteCompiler(url, timeout=5)  # what a live service may take on a busy machine

        class DyingLater(Recorder):
            def act(self, requests: Any) -> Any:
                if len(fake.batches) == 2:
                    kill()
                return super().act(requests)

        def play(specs: list[EpisodeSpec], delivery: Delivery) -> list[Any]:
            return run_episodes(CountingEnv, specs, delivery, DyingLater(), EpisodeLimits(max_steps=5), concurrency=1)

        compiled = Delivery("compiled", "compiled", remote)
        first, second, third = play([spec(1), spec(3), spec(2)], compiled)
    assert first.success and first.steps[0].guidance == "go to shelf 1"
    for episode in (second, third):
        assert episode.stop_reason is StopReason.COMPILER_FAILURE
        assert "is it up?" in episode.error or "did not answer" in episode.error
    [bare] = play([spec(2)], Delivery("none", "none"))
    assert bare.success


# -- vLLM -------------------------------------------------------------------------------------------------------------


def using_vllm(test: Any) -> Any:
    for mark in vllm_engines.marks:
        test = mark(test)
    return test


@using_vllm
def test_vllm_behind_the_service(tmp_path: Path) -> None:
    reference: MemoryCompiler = vllm_engines.trained(True)
    ours = vllm_engines.served(reference, tmp_path / "a")
    asked = [tiny_models.request(i, image=i != 1) for i in range(4)]
    with listening(ours, gather_s=0.2) as (url, _):
        assert_same(RemoteCompiler(url).compile(asked), reference.compile(asked), atol=1e-4)
        remote = RemoteCompiler(url, 1.2, seed=3)
        made = remote.compile(asked)
        server = RemoteServer(url, COMPILER_KEY, "it")
        raw = server.post_all("/compile", [CompileBody.of(asked[0], SamplingBody(), ("mu",))])[0]
        assert raw["cached_tokens"] > 0 and raw["weight_version"] == 1
    seeds = torch.randint(2**62, (4,), generator=torch.Generator().manual_seed(3)).tolist()
    ours.decoding = replace(ours.decoding, temperature=1.2)
    for request, seed, together in zip(asked, seeds, made, strict=True):  # a batch of four drew as four alone do
        ours.generator.manual_seed(seed)
        assert_same([together], ours.compile([request]), atol=1e-4)


# -- the command and its page -----------------------------------------------------------------------------------------


def test_the_page_shows_what_the_service_takes(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "guides" / "serving.md").read_text()
    [sent] = re.findall(r"-d '(\{.*?\n\})'", page, re.S)
    with serving(Fake()) as (client, _):
        answer = client.post("/compile", content=sent)
        assert answer.status_code == 200
        named = re.search(r"The reply: (.*?)\. A tensor", page, re.S)
        assert named and set(answer.json()) <= set(re.findall(r"`(\w+)`", named[1]))
    for field in CompileBody.model_fields:
        assert f'"{field}"' in sent
    [settings] = re.findall(r"```yaml\n(.*?)```", page, re.S)
    (tmp_path / "eval.yaml").write_text(settings)
    config = load_config(EvalConfig, tmp_path / "eval.yaml")
    assert config.compiler.engine == config.executor.engine == "http"


@pytest.mark.slow
def test_the_command_serves_a_checkpoint_and_leaves_on_sigterm(tmp_path: Path) -> None:
    from compiler import checkpoint
    from compiler.build import load_compiler
    from training.checkpoint import TrainingTensors, save_checkpoint

    settings = CompilerConfig(dtype="float32", device="cpu", instructions="none", max_new_tokens=8)
    made = load_compiler(settings.model_copy(update={"soft": Soft(emb_std=0.02)}), Tabled(), seed=3)
    weights = {name: p.detach() for name, p in checkpoint.trained_parameters(made).items()}
    save_checkpoint(tmp_path / "checkpoints", made, TrainingTensors(weights, {}), {"step": 1})
    command = [sys.executable, "-m", "memcompiler", "serve", "compiler", "--checkpoint", str(tmp_path), "--port", "0"]
    overrides = [
        "compiler.engine=hf",
        "compiler.dtype=float32",
        "compiler.instructions=none",
        "compiler.device=cpu",
        "compiler.max_new_tokens=8",
    ]
    with subprocess.Popen([*command, *overrides], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            said = [process.stdout.readline(), process.stdout.readline()]
            assert said[1].startswith("ready: compiler.engine=http compiler.url=http://127.0.0.1:"), said
            request = tiny_models.request(0)
            remote = RemoteCompiler(said[1].rsplit("=", 1)[1].strip())
            assert_same(remote.compile([request]), made.eval().compile([request]))
            assert remote.hash() == checkpoint.sha256(checkpoint.find(tmp_path))  # what an evaluation of it records
        finally:
            process.terminate()
        assert process.wait(60) == 0


class Tabled:
    """What a new projector wants to know of an executor."""

    accepts_soft, sees_images, reads, embedding_table = True, False, FULL_VIEW, torch.zeros(8, 64)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Bearer \xe9"}, 401),
        ({"authorization": "Bearer k\xe9y"}, 401),
        ({"content-length": "\xb2"}, 200),
        ({"content-length": "9" * 5000}, 413),
    ],
)
def test_headers_of_any_bytes_get_an_answer(headers: dict[str, str], status: int) -> None:
    given = {"authorization": "Bearer key", **headers}
    with serving(Fake(), key="key") as (client, _):
        sent = [(name.encode(), value.encode("latin-1")) for name, value in given.items()]
        assert client.post("/compile", content=json.dumps(BODY), headers=sent).status_code == status
