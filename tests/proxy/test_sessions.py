"""Sessions of the proxy: what stays, what is committed, what ends them, and what a restart finds."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi", reason="the proxy needs the extra serve")
pytest.importorskip("uvicorn", reason="the proxy needs the extra serve")

from memory.bank import MemoryBank
from memory.entry import MemoryEntry, Provenance
from tests.upstreams import Numbering, Reply, ScriptedUpstream, completion, listening_proxy, make_proxy, proxied
from tests.waiting import in_background, until

TURNS = {"mapping": {"preset": "turns"}}
GOAL = "Goal: in home 1: put a mug in cabinet\n"


def conversation(*said: str) -> dict[str, Any]:
    """A chat of first view, action, view, action, ..."""
    messages = [{"role": "system", "content": "You act."}, {"role": "user", "content": GOAL + said[0]}]
    messages += [{"role": ("assistant", "user")[i % 2], "content": text} for i, text in enumerate(said[1:])]
    return {"model": "m", "messages": messages}


def post(url: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    named = {f"X-Memcompiler-{name}": value for name, value in headers.items()}
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=named, timeout=60)


def told(n: int) -> str:
    return f"\nMemory: it is there. Do now: go to shelf {n}"


def mug_bank(folder: Path) -> None:
    entries = [
        MemoryEntry(
            f"e{i}",
            f"in home 1: put a mug in {place}\ntake mug 1 from {place} 2",
            Provenance(f"t{i}", "home 1", f"put a mug in {place}", "train", True),
        )
        for i, place in enumerate(("shelf", "desk"))
    ]
    MemoryBank(folder / "bank").write(entries)


def test_history_stays_what_the_upstream_saw_and_guidance_ends_the_newest_turn(tmp_path: Path) -> None:
    said = ["You see a shelf 1.", "go to shelf 1", "Nothing.", "go to desk 1", "A mug 1."]
    compiler = Numbering()
    with proxied(tmp_path, compiler, **TURNS) as (upstream, url):
        for n in (1, 3, 5):
            assert post(url, conversation(*said[:n])).headers["x-memcompiler-emission"] == "EXPERIENCE"
        sent = [sent.messages for sent in upstream.sent]
    plain = conversation(*said)["messages"]
    assert sent[1][: len(sent[0])] == sent[0] and sent[2][: len(sent[1])] == sent[1]
    added = {1: told(1), 3: told(2), 5: told(3)}
    assert sent[2] == [m | {"content": m["content"] + added.get(i, "")} for i, m in enumerate(plain)]
    assert [(r.goal, r.observation, r.history) for r in compiler.requests] == [
        ("in home 1: put a mug in cabinet", "You see a shelf 1.", ()),
        ("in home 1: put a mug in cabinet", "Nothing.", ("go to shelf 1",)),
        ("in home 1: put a mug in cabinet", "A mug 1.", ("go to shelf 1", "go to desk 1")),
    ]


def test_two_episodes_that_begin_alike_do_not_disturb_each_other(tmp_path: Path) -> None:
    a, b = ["View.", "go to a", "A.", "go on", "AA."], ["View.", "go to b", "B."]
    with proxied(tmp_path, **TURNS) as (upstream, url):
        for said in (a[:1], a[:3], b[:1], b[:3], a[:5]):
            post(url, conversation(*said))
        last = [message["content"] for message in upstream.sent[-1].messages]
        assert [text.endswith(told(n)) for text, n in zip(last[1::2], (1, 2, 3), strict=True)] == [True] * 3
        with ThreadPoolExecutor(4) as pool:  # the same turn at the same time is one step
            list(pool.map(lambda _: post(url, conversation("other view")), range(4)))
        assert len({sent.body for sent in upstream.sent[-4:]}) == 1


def test_the_delivery_the_budget_and_the_gate_are_a_header_each(tmp_path: Path) -> None:
    mug_bank(tmp_path)
    gate = lambda request: 0.4
    compiler = Numbering()
    with proxied(tmp_path, compiler, gate=gate, **TURNS) as (upstream, url):
        first, later = conversation("View."), conversation("View.", "look", "Again.")

        def newest(body: dict[str, Any], **headers: str) -> str:
            assert post(url, body, **headers).status_code == 200
            return upstream.sent[-1].messages[-1]["content"]

        assert newest(first, Deliver="none") == GOAL + "View." and not compiler.requests
        pasted = newest(first, Deliver="static")
        assert pasted.count("take mug 1 from") == 2 and "\nMemory of past episodes:\n\n" in pasted
        assert newest(later, Deliver="static") == "Again."  # it is pasted once
        assert newest(first, Deliver="static", Budget="30", Session="s").count("take mug 1 from") == 1
        assert newest(first, Deliver="compiled", Budget="5") == GOAL + "View."
        assert newest(first, Session="a") == GOAL + "View." + told(1)
        assert len(compiler.requests[-1].memory) == 2
        assert newest(later, Session="a", Gate="0.5") == "Again."  # the gate says 0.4
        assert newest(later, Session="b", Gate="0.3").endswith(told(2))
        for wrong in ({"Deliver": "live"}, {"Deliver": "x"}, {"Gate": "2"}, {"Budget": "-1"}, {"Session": "a b"}):
            answer = post(url, first, **wrong)
            assert answer.status_code == 422 and next(iter(wrong)) in answer.json()["error"]["message"]


def test_an_ended_session_is_an_episode_in_memory(tmp_path: Path) -> None:
    answers = [completion("go to shelf 1"), completion("take mug 1 from shelf 1")]
    with proxied(tmp_path, script=[Reply([a]) for a in answers], **TURNS) as (_, url):
        post(url, conversation("View."), Session="s1", Deliver="none")
        post(url, conversation("View.", "go to shelf 1", "A mug 1."), Session="s1", Deliver="none")
        assert [each["id"] for each in httpx.get(f"{url}/sessions", timeout=60).json()] == ["s1"]
        end = lambda body: httpx.post(f"{url}/sessions/s1/end", json=body)
        assert end({"rationale": "x"}).status_code == 422
        result = end({"success": True, "rationale": "the mug was in shelf 1", "observation": "Taken."})
        assert result.json() == end({"success": True}).json()  # asked again
        assert (result.json()["added"], result.json()["steps"]) == (1, 2)
        assert httpx.post(f"{url}/sessions/s2/end", json={"success": True}, timeout=60).status_code == 404
        post(url, conversation("View."), Session="s3")
        assert (
            httpx.post(f"{url}/sessions/s3/end", json={"success": False, "commit": False}, timeout=60).json()["added"]
            == 0
        )
    [entry] = MemoryBank(tmp_path / "bank").entries()
    assert entry.text.split("\n") == [
        "in home 1: put a mug in cabinet",
        "go to shelf 1 ; take mug 1 from shelf 1",
        "because the mug was in shelf 1",
    ]
    assert (entry.provenance.goal, entry.provenance.scene, entry.provenance.success) == (
        "put a mug in cabinet",
        "home 1",
        True,
    )
    assert not list((tmp_path / "sessions").glob("*.jsonl"))


def test_what_one_episode_leaves_the_next_recalls(tmp_path: Path) -> None:
    compiler = Numbering()
    with proxied(tmp_path, compiler, **TURNS) as (_, url):
        for _ in range(2):
            id = post(url, conversation("View.")).headers["x-memcompiler-session"]
            assert httpx.post(f"{url}/sessions/{id}/end", json={"success": True}, timeout=60).status_code == 200
    assert [len(request.memory) for request in compiler.requests] == [0, 1]


def test_a_restarted_proxy_goes_on_with_its_sessions(tmp_path: Path) -> None:
    said = ["View.", "go to a", "A.", "go to b", "B."]
    with ScriptedUpstream(answer=lambda sent: completion("go to a")) as upstream:
        for until_turn in (1, 3, 3, 5):  # each in a process of its own, as after a kill
            with listening_proxy(make_proxy(upstream.url, tmp_path, Numbering(), **TURNS)) as url:
                post(url, conversation(*said[:until_turn]))
        sent = [each.messages for each in upstream.sent]
        assert sent[1] == sent[2] and sent[3][:4] == sent[2] and sent[3][-1]["content"].endswith(told(3))
        [path] = (tmp_path / "sessions").iterdir()
        whole = path.read_bytes()
        path.write_bytes(whole + b'{"step": {"key": ')  # torn by a kill
        with listening_proxy(make_proxy(upstream.url, tmp_path, Numbering(), **TURNS)) as url:
            post(url, conversation(*said))
        assert upstream.sent[-1].body == upstream.sent[-2].body
        path.write_bytes(whole.replace(b'"parent"', b'"other"'))
        with pytest.raises(ValueError, match="damaged"):
            make_proxy(upstream.url, tmp_path, Numbering())


def test_sessions_are_bounded_in_number_time_and_size(tmp_path: Path) -> None:
    bounds = {"sessions": {"most": 2, "idle_s": 60, "max_steps": 2}}
    with ScriptedUpstream() as upstream:
        proxy = make_proxy(upstream.url, tmp_path, Numbering(), **TURNS, **bounds)
        with listening_proxy(proxy) as url:
            for id in "abc":
                post(url, conversation("View."), Session=id)
            assert [session.id for session in proxy.store] == ["b", "c"]
            said = ["View.", "go", "A.", "go", "B.", "go", "C."]
            for n in (3, 5, 7):
                post(url, conversation(*said[:n]), Session="c")
            assert [m["content"].endswith(told(i)) for i, m in enumerate(upstream.sent[-1].messages[1::2], 1)] == [
                True,
                True,
                False,
                False,
            ]
            assert len(next(s for s in proxy.store if s.id == "c").steps) == 2
            for session in proxy.store:
                session.used -= 61
            post(url, conversation("View."), Session="d")
            assert [session.id for session in proxy.store] == ["d"] and len(
                list((tmp_path / "sessions").iterdir())
            ) == 1
            text = httpx.get(f"{url}/metrics", timeout=60).text
            assert 'sessions_ended_total{how="evicted"} 1.0' in text and 'sessions_ended_total{how="idle"} 2.0' in text


def test_a_failing_compiler_is_named_and_its_words_stay_out_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    compiler = Numbering(fails=lambda request: request.observation == "bad")
    with proxied(tmp_path, compiler, **TURNS) as (upstream, url):
        answer = post(url, conversation("bad"), Session="s")
        assert (
            answer.status_code == 200 and answer.headers["x-memcompiler-failure"] == "the compiler failed: RuntimeError"
        )
        assert upstream.sent[-1].messages == conversation("bad")["messages"]
        assert post(url, conversation("bad", "look", "good"), Session="s").status_code == 200
        assert upstream.sent[-1].messages[-1]["content"] == "good" + told(2)
        assert "memcompiler_proxy_failures_total 1.0" in httpx.get(f"{url}/metrics", timeout=60).text
    strict = make_proxy(upstream.url, tmp_path / "strict", compiler, on_failure="refuse", **TURNS)
    with listening_proxy(strict) as url:
        assert post(url, conversation("bad")).status_code == 502
    written = caplog.text + "".join(capfd.readouterr())
    assert "the compiler failed: RuntimeError" in written
    assert not [word for word in ("SECRET", "put a mug", "View.", "good", "it is there") if word in written]


@pytest.mark.parametrize(("on_failure", "status"), [("refuse", 429), ("forward", 200)])
def test_more_requests_than_may_wait_are_not_guided(tmp_path: Path, on_failure: str, status: int) -> None:
    free = threading.Event()
    compiler = Numbering(fails=lambda request: not free.wait(20))
    with proxied(tmp_path, compiler, queue=1, batch=1, on_failure=on_failure, **TURNS) as (upstream, url):
        waiting = [in_background(lambda n=n: post(url, conversation(f"shelf {n}"))) for n in range(2)]
        until(lambda: len(compiler.requests) == 2)
        late = post(url, conversation("a shelf"))
        free.set()
        assert late.status_code == status and len(compiler.requests) == 2
        if status == 429:
            assert late.headers["retry-after"] == "1"
        else:
            assert late.headers["x-memcompiler-failure"] == "too many requests wait for guidance"
        assert all(answer().headers["x-memcompiler-emission"] == "EXPERIENCE" for answer in waiting)
        assert post(url, conversation("a desk")).status_code == 200


def test_the_compilation_of_a_client_that_leaves_is_cancelled(tmp_path: Path) -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def compile(request: Any) -> Any:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    with ScriptedUpstream() as upstream:
        proxy = make_proxy(upstream.url, tmp_path, Numbering(), **TURNS)
        usual, proxy.guide.compile = proxy.guide.compile, compile
        with listening_proxy(proxy) as url:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{url}/v1/chat/completions", json=conversation("a shelf"), timeout=1)
            assert begun.is_set() and cancelled.wait(20) and not upstream.sent
            proxy.guide.compile = usual
            assert post(url, conversation("a shelf")).headers["x-memcompiler-emission"] == "EXPERIENCE"
            assert 'requests_total{code="499"} 1.0' in httpx.get(f"{url}/metrics", timeout=60).text


def test_prompts_written_anew_or_longer_at_every_step_have_sessions_too(tmp_path: Path) -> None:
    rebuilt = lambda did, see: {"messages": [{"role": "user", "content": f"goal: put a mug in desk\n{did}see: {see}"}]}
    with ScriptedUpstream(answer=lambda sent: completion("go to a")) as upstream:
        settings = {"mapping": {"preset": "rebuilt"}, "format": "rebuilt", "reads_state": True}
        compiler = Numbering()
        with listening_proxy(make_proxy(upstream.url, tmp_path / "rebuilt", compiler, **settings)) as url:
            for did, see in (
                ("", "View."),
                ("", "View."),
                ("did: go to a\n", "A."),
                ("did: go to a ; go to a\n", "A."),
            ):
                post(url, rebuilt(did, see), Session="s")
        texts = [sent.messages[0]["content"] for sent in upstream.sent]
        guide = lambda n: f"guide: it is there | go to shelf {n}\n"
        assert texts[0] == texts[1] == f"goal: put a mug in desk\n{guide(1)}see: View."
        assert texts[2:] == [
            f"goal: put a mug in desk\n{guide(2)}did: go to a\nsee: A.",
            f"goal: put a mug in desk\n{guide(3)}did: go to a ; go to a\nsee: A.",
        ]
        assert [request.history for request in compiler.requests] == [(), ("go to a",), ("go to a", "go to a")]
        upstream.sent.clear()
        head = "Your task is to: put a mug in desk.\n"
        growing = [f"{head}View.\n>", f"{head}View.\n> go to a\nA.\n>"]
        react = {"mapping": {"preset": "react_prompt"}}
        with listening_proxy(make_proxy(upstream.url, tmp_path / "react", compiler, **react)) as url:
            for text in growing:
                post(url, {"messages": [{"role": "user", "content": text}]})
        assert [sent.messages[0]["content"] for sent in upstream.sent] == [
            f"{head}View.{told(1)}\n>",
            f"{head}View.{told(1)}\n> go to a\nA.{told(2)}\n>",
        ]
        assert [request.observation for request in compiler.requests[3:]] == [f"{head}View.", "A."]


def test_fields_that_are_not_memorys_have_their_values(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "do", "arguments": '{"command": "look"}'}}
    picture = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
    body = {
        "model": "m",
        "temperature": 0.1,
        "seed": 12345678901234567890,
        "x_unknown": {"a": [1, 2.5, None, "\U0001f600é"]},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "find it"}, picture]},
            {"role": "assistant", "content": None, "tool_calls": [call], "x": 1},
            {"role": "tool", "tool_call_id": "c", "content": "nothing", "name": "do"},
        ],
    }
    compiler = Numbering()
    with proxied(tmp_path, compiler, mapping={"preset": "tools"}) as (upstream, url):
        post(url, {**body, "messages": body["messages"][:1]})
        post(url, body)
    first, second = (sent.json for sent in upstream.sent)
    assert compiler.requests[1].history == ("look",) and compiler.requests[1].observation == "nothing"
    assert second["messages"][0]["content"] == [{"type": "text", "text": "find it" + told(1)}, picture]
    assert first["messages"][0] == second["messages"][0] and second["messages"][1] == body["messages"][1]
    assert second["messages"][2] == body["messages"][2] | {"content": "nothing" + told(2)}
    rest = lambda value: {name: each for name, each in value.items() if name != "messages"}
    assert rest(second) == rest(body) and json.dumps(rest(second)) == json.dumps(rest(body))


def test_a_session_times_out_only_between_requests(tmp_path: Path) -> None:
    asked, go = threading.Event(), threading.Event()
    reply = Reply([completion("go")], before=lambda: (asked.set(), go.wait(20)))
    with ScriptedUpstream([reply]) as upstream:
        proxy = make_proxy(upstream.url, tmp_path, Numbering(), **TURNS, sessions={"idle_s": 0.01})
        with listening_proxy(proxy) as url:
            answer = in_background(lambda: post(url, conversation("View.")))
            assert asked.wait(20)
            [session] = proxy.store
            session.used -= 60
            proxy.store.expire()
            assert len(proxy.store) == 1
            go.set()
            assert answer().status_code == 200
            until(lambda: proxy.store.expire() or not len(proxy.store))
            assert post(url, conversation("View.")).status_code == 200
