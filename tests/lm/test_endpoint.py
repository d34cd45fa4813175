"""The client of endpoints against a server that misbehaves by script: every fault counted, nothing paid twice."""

import json
import multiprocessing
import socket
import sqlite3
import sys
import threading
import time
from urllib.parse import urlsplit

import pytest

from configs.evaluation import EvalConfig
from configs.load import ConfigError, load_config
from configs.models import EndpointConfig
from lm.answer_cache import Answer, AnswerCache, EndpointStop
from lm.endpoint import Endpoint, EndpointFailure, RateLimiter, user_message
from lm.responses import RequestFault, parse_answer
from tests.faulty_server import MODEL, FaultyServer


def ask(endpoint: Endpoint, *texts: str, role: str = "test", repeat: int = 0):
    return endpoint.run([endpoint.ask([user_message(text)], role, 32, repeat) for text in texts])


@pytest.mark.seconds
def test_every_fault_is_tried_again_and_counted_by_kind(tmp_path):
    faults = [
        "429",
        "429 retry-after",
        "500",
        "hang",
        "truncated",
        "html",
        "empty choices",
        "null content",
        "array",
        "closed",
    ]
    with FaultyServer(faults) as server:
        endpoint = Endpoint(
            server.config(retries=10, timeout_s=1.0, price_in=1.0, price_out=4.0), tmp_path / "a.sqlite"
        )
        [answer] = ask(endpoint, "hello")
        assert answer.text.startswith("echo ") and (answer.tokens_in, answer.tokens_out) == (100, 10)
        assert server.served == {**dict.fromkeys(faults, 1), "answer": 1}
    account = endpoint.account()
    assert account["faults"] == {
        "connection": 1,
        "no_choice": 3,
        "not_json": 2,
        "rate_limit": 2,
        "server_error": 1,
        "timeout": 1,
    }
    assert (account["requests"], account["answers"]) == (11, 1)
    # The empty list of choices was billed: 7 tokens. 107 * 1.0 + 10 * 4.0 per million.
    assert (account["tokens_in"], account["tokens_out"]) == (107, 10)
    assert account["price"] == pytest.approx(147e-6) and account["roles"]["test"]["price"] == pytest.approx(147e-6)


def test_an_answer_is_paid_once(tmp_path):
    with FaultyServer() as server:
        first = ask(Endpoint(server.config(), tmp_path / "a.sqlite"), "one", "two")
        again = Endpoint(server.config(), tmp_path / "a.sqlite")
        assert ask(again, "one", "two") == first and server.requests == 2
        assert again.account()["from_cache"] == 2 and again.account()["requests"] == 2
        ask(again, "one", repeat=1)  # another request on purpose
        ask(Endpoint(server.config(temperature=0.5), tmp_path / "a.sqlite"), "one")
        ask(Endpoint(server.config(temperature=None), tmp_path / "a.sqlite"), "one")
        assert server.requests == 5
    assert "temperature" not in server.bodies[-1] and server.bodies[0]["max_completion_tokens"] == 32


def test_what_is_not_worth_another_attempt_fails_alone():
    with FaultyServer(["400"]) as server:
        endpoint = Endpoint(server.config(concurrency=1))
        bad, good = ask(endpoint, "too long", "fine")
        assert isinstance(bad, EndpointFailure) and "refused" in str(bad) and isinstance(good, Answer)
        assert server.requests == 2 and endpoint.stopped is None
    assert endpoint.account()["faults"] == {"refused": 1}


def test_failures_in_a_row_mean_that_the_endpoint_is_gone():
    with FaultyServer(["500"] * 100) as server:
        endpoint = Endpoint(server.config(retries=1, concurrency=1))
        results = ask(endpoint, *"abcdefgh")
        assert [type(result) for result in results] == [EndpointFailure] * 4 + [EndpointStop] * 4
        assert server.requests == 10  # two attempts at each of five; the rest is not asked
    with pytest.raises(EndpointStop, match="run the same command again"):
        endpoint.check()


def test_the_key_comes_from_the_environment_and_goes_nowhere_else(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_KEY", "sk-very-secret")
    with FaultyServer(["answer", "400", "401"]) as server:
        endpoint = Endpoint(server.config(key_env="SOME_KEY", concurrency=1), tmp_path / "a.sqlite")
        _, refused, stop = ask(endpoint, "one", "two", "three")
        assert server.keys == {"Bearer sk-very-secret"}
    assert isinstance(stop, EndpointStop) and "SOME_KEY" in str(stop)
    assert "***" in str(refused) and "sk-very-secret" not in f"{refused} {stop} {endpoint.account()}"
    for file in tmp_path.iterdir():
        assert b"sk-very-secret" not in file.read_bytes()
    monkeypatch.delenv("SOME_KEY")
    with pytest.raises(ValueError, match="SOME_KEY"):
        Endpoint(server.config(key_env="SOME_KEY"))
    with pytest.raises(ConfigError, match="no user name or password"):
        load_config(EvalConfig, None, ["executor.api.base_url=http://me:secret@127.0.0.1/v1"])


@pytest.mark.parametrize(("name", "limit"), [("budget", 0.002), ("budget_tokens", 220)])
def test_a_budget_stops_and_a_larger_one_continues(tmp_path, name, limit):
    path = tmp_path / "a.sqlite"
    with FaultyServer() as server:  # an answer has 110 tokens and costs 0.001
        prices = {"price_in": 9.0, "price_out": 10.0, "concurrency": 1}
        results = ask(Endpoint(server.config(**prices, **{name: limit}), path), "one", "two", "three")
        assert [type(result) for result in results] == [Answer, Answer, EndpointStop] and server.requests == 2
        assert f"api.{name}" in str(results[2]) and "200 tokens read and 20 written" in str(results[2])
        results = ask(Endpoint(server.config(**prices, **{name: limit}), path), "one", "two", "three")
        assert isinstance(results[1], Answer) and isinstance(results[2], EndpointStop) and server.requests == 2
        results = ask(Endpoint(server.config(**prices, **{name: 2 * limit}), path), "one", "two", "three")
        assert isinstance(results[2], Answer) and server.requests == 3


def test_requests_in_flight_are_bounded():
    seen, now = [], []

    def answer(messages):
        now.append(1)
        seen.append(len(now))
        time.sleep(0.02)
        now.pop()
        return "ok"

    with FaultyServer(answer=answer) as server:
        ask(Endpoint(server.config(concurrency=3)), *map(str, range(12)))
    assert len(seen) == 12 and max(seen) <= 3


def test_pace():
    """120 requests a minute: one each half second. 600 tokens a minute: 50 of them take five seconds."""
    now = [0.0]
    pace = RateLimiter(120, None, lambda: now[0])
    assert [pace.delay(9) for _ in range(3)] == [0, 0.5, 1.0]
    now[0] = 10.0
    assert pace.delay(9) == 0
    pace.hold(4)
    assert pace.delay(9) == 4
    pace = RateLimiter(120, 600, lambda: now[0])
    assert pace.delay(50) == 0 and pace.delay(1) == 5
    pace.correct(10)  # the first had ten more
    assert pace.delay(1) == pytest.approx(6.5)


def test_the_longest_wait_is_the_servers():
    with FaultyServer(["429 retry-after"]) as server:
        endpoint = Endpoint(server.config(backoff_s=0.0))
        started = time.monotonic()
        ask(endpoint, "one")
    assert time.monotonic() - started >= 0.05  # a lower bound only


def test_answers_are_data():
    strange = "{0} %s ${HOME} \ud800 __import__('os')"
    answer = parse_answer('{"choices": [{"message": {"content": "{0} %s ${HOME} \\ud800 __import__(\'os\')"}}]}')
    assert answer.text == strange.replace("\ud800", "?") and answer.tokens_out > 0  # estimated, not free
    odd = (
        '\ufeff{"choices": [{"message": {"content": "x"}, "finish_reason": "length"}], "usage": {"prompt_tokens": -5}}'
    )
    assert parse_answer(odd, [user_message("abcdefgh")]) == Answer("x", 3, 1, True)


def choice(content: object = None, reason: str | None = "stop", **message: object) -> dict[str, object]:
    return {"message": {"content": content, **message}, "finish_reason": reason}


THOUGHT = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}


@pytest.mark.parametrize(
    "shape",
    [
        choice("look"),
        choice("<think>\nWait.\n</think>\n\nlook"),
        choice("Wait.\n</think>\r\n\r\nlook\r\n"),
        choice("look", reasoning_content="Wait."),
        choice([{"type": "text", "text": "look"}]),
        choice("\ufeff look"),
        choice([THOUGHT, {"type": "output_text", "text": "lo"}, {"type": "text", "text": "ok"}]),
        choice({"type": "text", "text": "look"}),
        choice("```text\nlook\n```"),
        choice("look", tool_calls=[{"function": {"name": "f"}}]),
        choice("look", refusal=None),
    ],
)
def test_every_shape_of_an_answer_is_read(shape):
    body = {"choices": [choice(None, "length"), shape], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    assert parse_answer(json.dumps(body)) == Answer("look", 3, 2)  # of several choices, the first that holds one


CALL = {"id": "c", "type": "function", "function": {"name": "go", "arguments": "{}"}}
NO_ANSWERS = [
    (choice(None, "length"), "length", "max_completion_tokens"),
    (choice("", "MAX_TOKENS", reasoning="Wait"), "length", "all of it is in reasoning"),
    (choice("<think>\nOkay, the user", "length"), "length", "all of it was reasoning"),
    (choice(" \n", "stop", reasoning_content="Wait"), "empty", "reasoning_content"),
    (choice([THOUGHT]), "empty", "thinking"),
    (choice(None, "content_filter"), "content_filter", "finish_reason content_filter"),
    (choice("Half an ans", "content_filter"), "content_filter", "finish_reason content_filter"),
    (choice(None, "SAFETY"), "content_filter", "finish_reason safety"),
    (choice(None, "stop", refusal="I cannot help."), "refusal", "refusal I cannot help."),
    (choice([{"type": "refusal", "refusal": "Never."}]), "refusal", "refusal Never."),
    (choice(None, "tool_calls", tool_calls=[CALL]), "tool_call", "tool call go"),
    (choice(None, "function_call", function_call={"name": "walk"}), "tool_call", "tool call walk"),
]


@pytest.mark.parametrize(("shape", "kind", "named"), NO_ANSWERS)
def test_what_would_come_again_is_named_and_paid_for_once(shape, kind, named):
    with FaultyServer(answer=lambda messages: shape) as server:
        endpoint = Endpoint(server.config(concurrency=1))
        [first], [again] = ask(endpoint, "one"), ask(endpoint, "one")
        assert server.requests == 1 and isinstance(first, EndpointFailure) and str(again) == str(first)
        assert str(first).startswith(f"{kind}: ") and named in str(first)
    account = endpoint.account()
    assert account["faults"] == {kind: 1} and (account["tokens_in"], account["tokens_out"]) == (100, 10)


def test_failures_of_one_cause_in_a_row_stop_the_run_and_an_answer_between_them_does_not():
    shapes = [choice("fine") if n == 4 else choice(None, "content_filter") for n in range(9)]
    with FaultyServer(answer=lambda messages: shapes[server.requests - 1]) as server:
        results = ask(Endpoint(server.config(concurrency=1)), *"abcdefghi")
    assert [type(each) for each in results] == [EndpointFailure] * 4 + [Answer] + [EndpointFailure] * 4
    with FaultyServer(answer=lambda messages: choice(None, "length")) as server:
        results = ask(Endpoint(server.config(concurrency=1)), *"abcdefgh")
        assert server.requests == 5 and [type(each) for each in results[4:]] == [EndpointStop] * 4
    assert "5 requests in a row" in str(results[-1]) and "finish_reason length" in str(results[-1])


@pytest.mark.parametrize("shape", [choice(None, None), choice(None, "error"), {"message": None}, {"text": "x"}])
def test_a_body_without_a_reason_may_pass(shape):
    with pytest.raises(RequestFault) as fault:
        parse_answer(json.dumps({"choices": [shape]}))
    assert fault.value.kind == "no_choice" and not fault.value.final


def test_reasoning_tokens_are_named():
    usage = {"completion_tokens": 50, "completion_tokens_details": {"reasoning_tokens": 49}}
    with pytest.raises(RequestFault, match="finish_reason length, 49 of 50 tokens were reasoning") as fault:
        parse_answer(json.dumps({"choices": [choice(None, "length")], "usage": usage}))
    assert fault.value.paid == (0, 50)


def test_a_refused_parameter_names_its_setting(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "temperature and max_tokens")  # what the server quotes
    with FaultyServer(["400"]) as server:
        [refused] = ask(Endpoint(server.config(key_env="SOME_KEY")), "one")
    assert "(see api.length_key, api.temperature)" in str(refused)


@pytest.mark.parametrize("half", ["\ud800", "\udfff"])
def test_half_a_surrogate_pair_in_a_request_is_replaced(half):
    with FaultyServer() as server:
        endpoint = Endpoint(server.config())
        [answer] = ask(endpoint, f"a mug {half}!")
        [[vector]] = endpoint.run([endpoint.embed([f"mug {half}"], "test")])
    assert isinstance(answer, Answer) and vector
    assert server.bodies[0]["messages"][0]["content"] == "a mug ?!" and server.bodies[1]["input"] == ["mug ?"]


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:9", "ftp://me:secret@proxy:1", "http://[::1"])
def test_a_proxy_that_cannot_be_used_is_one_line_before_anything_is_asked(monkeypatch, proxy):
    Endpoint(EndpointConfig(model=MODEL, key_env=None))  # what it imports is imported as it is
    monkeypatch.setitem(sys.modules, "socksio", None)  # as where httpx came without its extra
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(
        EndpointStop, match=r"cannot connect to http://x\.invalid/v1 \(through the proxy of ALL_PROXY\)"
    ) as stop:
        Endpoint(EndpointConfig(base_url="http://x.invalid/v1", model=MODEL, key_env=None))
    assert "\n" not in str(stop.value) and "secret" not in str(stop.value)
    with FaultyServer() as server:  # on this machine, no proxy is asked
        assert isinstance(ask(Endpoint(server.config()), "one")[0], Answer)


def relay_socks(listener, port):
    """Serve one SOCKS5 client: whatever host it names, it is connected to this port of this machine."""
    client, _ = listener.accept()
    with client, socket.create_connection(("127.0.0.1", port)) as server:
        client.recv(99)
        client.sendall(b"\x05\x00")
        client.recv(999)
        client.sendall(b"\x05\x00\x00\x01" + bytes(6))
        request = client.recv(99_999)
        while not request.endswith(b"}"):
            request += client.recv(99_999)
        server.sendall(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        while reply := server.recv(99_999):
            client.sendall(reply)


@pytest.mark.parametrize("scheme", ["socks5", "http"])
def test_other_hosts_are_asked_through_a_proxy(monkeypatch, scheme):
    if scheme == "socks5":
        pytest.importorskip("socksio")
    with FaultyServer() as server, socket.create_server(("127.0.0.1", 0)) as listener:
        port = urlsplit(server.url).port
        threading.Thread(target=relay_socks, args=(listener, port), daemon=True).start()
        proxy = (
            listener.getsockname()[1] if scheme == "socks5" else port
        )  # over HTTP, the server is asked as if the proxy
        monkeypatch.setenv("ALL_PROXY", f"{scheme}://127.0.0.1:{proxy}")
        config = server.config(retries=0).model_copy(update={"base_url": "http://models.invalid/v1"})
        [answer] = ask(Endpoint(config), "one")
    assert isinstance(answer, Answer) and server.requests == 1


@pytest.mark.parametrize("url", ["127.0.0.1:8000/v1", "localhost", "ftp://host/v1", "https://", "http:///v1"])
def test_an_address_is_checked_with_the_settings(url):
    with pytest.raises(ConfigError, match=r"http\(s\)://host"):
        load_config(EvalConfig, None, [f"executor.api.base_url={url}"])


def _write(path, start, n):
    ledger = AnswerCache(path, MODEL)
    for i in range(start, start + n):
        ledger.keep(f"key {i}", "test", Answer(f"text {i}", 3, 2))


def test_processes_share_a_ledger(tmp_path):
    path, context = tmp_path / "a.sqlite", multiprocessing.get_context("spawn")
    workers = [context.Process(target=_write, args=(path, 50 * i, 100)) for i in range(2)]  # 50 keys in common
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    ledger = AnswerCache(path, MODEL)
    assert ledger.spent() == (600, 400) and ledger.answer("key 149") == Answer("text 149", 3, 2)
    assert sqlite3.connect(path).execute("SELECT COUNT(*) FROM answers").fetchone() == (150,)
    assert AnswerCache(path, "another model").spent() == (0, 0)


def _open_together(folder, n, barrier, said):
    failures = []
    for i in range(n):
        barrier.wait(60)
        try:
            AnswerCache(folder / f"{i}.sqlite", MODEL)
        except EndpointStop as stop:
            failures.append(str(stop))
    said.put(failures)


def test_processes_that_open_one_new_ledger_at_the_same_moment_all_get_it(tmp_path):
    """Four processes, 75 files: of so many openings, three or so failed when a switch to WAL was not tried again."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    barrier, said = context.Barrier(4), context.Queue()
    workers = [context.Process(target=_open_together, args=(tmp_path, 75, barrier, said)) for _ in range(4)]
    for worker in workers:
        worker.start()
    assert [said.get(timeout=120) for _ in workers] == [[]] * 4
    for worker in workers:
        worker.join(60)


def test_a_new_ledger_that_another_process_is_making_is_waited_for(tmp_path):
    """SQLite's time-out does not apply here: the switch to WAL fails at once."""
    other = sqlite3.connect(tmp_path / "a.sqlite", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.3, other.rollback)
    release.start()
    assert AnswerCache(tmp_path / "a.sqlite", MODEL).spent() == (0, 0)
    release.join()
    other.close()


def test_a_file_that_is_no_ledger(tmp_path):
    (tmp_path / "a.sqlite").write_text("something else, and long enough not to be taken for an empty file" * 20)
    with pytest.raises(EndpointStop, match="name another file"):
        Endpoint(EndpointConfig(model=MODEL, key_env=None), tmp_path / "a.sqlite")
