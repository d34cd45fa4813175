"""Mem0 and LangMem through their own packages, in the interpreter that has them (`make mem0`).

Both packages run in a worker; a scripted language model and hand-made vectors stand behind it.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.collect import MemoryConfig
from data_gen.memory_factory import open_memory
from envs.spec import NotInstalled
from lm.answer_cache import EndpointStop
from memory.langmem.settings import LangMemSettings
from memory.langmem.system import LangMem
from memory.mem0.settings import Mem0Settings
from memory.mem0.system import Mem0
from memory.packages.process import interpreter
from memory.packages.system import PackageMemory
from memory.protocol import BankError, Query
from memory.registry import MemoryTools
from tests.faulty_server import FaultyServer
from tests.memory.worked_examples import E1, E2, READER, T3, like

try:
    interpreter("mem0"), interpreter("langmem")
except NotInstalled as missing:
    pytest.skip(str(missing), allow_module_level=True)

pytestmark = pytest.mark.slow  # the packages' imports alone take seconds on a busy machine
PLACE = "In FloorPlan1 the mug was on countertop 2"


def embed(texts: Sequence[str]) -> np.ndarray:
    """Return vectors of words, the same in every process."""
    vectors = np.full((len(texts), 32), 0.01, dtype=np.float32)
    for n, text in enumerate(texts):
        for word in text.lower().split():
            vectors[n, hashlib.md5(word.encode()).digest()[0] % 32] += 1
    return vectors


class Script:
    """A language model that gives answers in order, and remembers what it was asked."""

    def __init__(self, *answers: object) -> None:
        self.answers, self.asked = list(answers), list[Any]()

    def __call__(self, messages: Sequence[dict[str, Any]], role: str, max_tokens: int) -> str | None:
        self.asked.append([dict(message) for message in messages])
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, str) or answer is None else json.dumps(answer)


def mem0(path: Path, script: Script | None, embedded: bool = True, **settings: Any) -> Mem0:
    tools = MemoryTools(embed=embed if embedded else None, ask=script, reader=READER)
    return Mem0(path, Mem0Settings(**settings), tools=tools)


def langmem(path: Path, script: Script | None, **settings: Any) -> LangMem:
    tools = MemoryTools(embed=embed, ask=script, reader=READER)
    return LangMem(path, LangMemSettings(**settings), tools=tools)


def facts(*texts: str) -> dict[str, Any]:
    return {"memory": [{"id": str(n), "text": text, "attributed_to": "assistant"} for n, text in enumerate(texts)]}


def calls(*named: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    return {"calls": [{"name": name, "args": args} for name, args in named]}


def patch(key: str, text: str) -> dict[str, Any]:
    change = {"op": "replace", "path": "/content", "value": text}
    return calls(("PatchDoc", {"json_doc_id": key, "planned_edits": "new place", "patches": [change]}))


def test_mem0_stores_what_its_model_extracts_and_its_provenance_is_what_the_text_states(tmp_path: Path) -> None:
    script = Script(facts(PLACE), facts("In FloorPlan1 the mug was on a countertop", PLACE, PLACE))
    memory = mem0(tmp_path, script)
    memory.commit([[E1], [E2]])
    stated, vague = memory
    assert (stated.text, stated.provenance.actions) == (PLACE, ("take mug 1 from countertop 2",))
    assert vague.provenance.actions == () and vague.provenance.task_id == "t2"
    system, user = script.asked[1]
    assert len(system["content"]) == 33_653 and f'"text": "{PLACE}"' in user["content"]  # Mem0's own prompt
    assert "## Current Date\n2026-01-01" in user["content"] and "put a hot mug in cabinet" in user["content"]
    [row, _] = memory._journal
    assert row.answers["added"] == [{"text": PLACE, "attributed_to": "assistant"}] and not memory.failures
    again = mem0(tmp_path, None)  # from the journal alone
    assert again.recall([Query(T3)]) == memory.recall([Query(T3)]) and again.snapshot() == 2
    [own] = again.recall([Query(E2.task)])
    assert [entry.text for entry in own.entries] == [PLACE]


def test_what_mem0_is_asked_is_a_function_of_the_journal(tmp_path: Path) -> None:
    """In one process, and resumed after every commit; so that cached answers are found again."""
    told = [[like(E1, f"a{n}")] for n in range(3)]
    answers = [facts(f"the pan {n} was in shelf {n}", "the pan was clean") for n in range(3)]
    one, parts = Script(*answers), list[Any]()
    mem0(tmp_path / "one", one).commit(told)
    for n, each in enumerate(told):
        script = Script(answers[n])
        mem0(tmp_path / "many", script).commit([each])
        parts += script.asked
    assert one.asked == parts and len(parts) == 3
    assert (tmp_path / "one/journal.jsonl").read_bytes() == (tmp_path / "many/journal.jsonl").read_bytes()


def test_recall_is_mem0_s_own_search(tmp_path: Path) -> None:
    texts = [f"in FloorPlan{n % 7} the {thing} was in shelf {n}" for n in range(50) for thing in ("mug", "pan")]
    memory = mem0(tmp_path, Script(facts(*texts)))
    memory.commit([[E1]])
    worker = memory.worker(memory.state)
    for query in (T3, E2.task):
        [found] = memory.recall([Query(query, k=12)])
        text = memory.query_text(Query(query), "")
        theirs = worker.call("search", query=text, k=12, threshold=0.1)
        scores = dict(worker.call("search", query=text, k=200, threshold=0.1))
        assert [scores[entry.text] for entry in found.entries] == pytest.approx(
            [score for _, score in theirs], abs=1e-5
        )
    assert worker.call("attempts") == []


def test_garbage_is_asked_for_again_then_the_rules_speak(tmp_path: Path) -> None:
    garbage = [
        "no",
        "[]",
        "",
        '{"memory": "x"}',
        '{"memory": ["x"]}',
        '{"memory": [null]}',
        '{"memory": [{"text": 1}]}',
    ]
    by_rule = mem0(tmp_path / "rule", None)
    by_rule.commit([[E1]])
    memory = mem0(tmp_path / "bank", script := Script())
    for n, answer in enumerate(garbage):
        script.answers = [answer, answer]
        memory.commit([[like(E1, f"t{n}")]])
    script.answers = [None]  # an endpoint that failed is not asked again
    memory.commit([[like(E1, "t9")]])
    assert {entry.text for entry in memory} == {entry.text for entry in by_rule}
    assert memory.failures == {"memory_extraction": len(garbage) + 1} and not script.answers
    script.answers = ["no", f"```json\n{json.dumps(facts(PLACE))}\n```"]
    memory.commit([[E2]])
    assert PLACE in {entry.text for entry in memory} and memory.failures["memory_extraction"] == len(garbage) + 1


def test_quotations_of_the_prompt_and_lone_surrogates(tmp_path: Path) -> None:
    script = Script(facts("which appliance or lamp did what", "a mug\n\ud800 in shelf 1"))
    memory = mem0(tmp_path, script)
    memory.commit([[like(E1, "\ud800")]])
    assert [entry.text for entry in memory] == ["a mug ? in shelf 1"] and memory.failures == {"junk": 1}


def test_a_stopped_endpoint_leaves_the_journal_untouched(tmp_path: Path) -> None:
    for memory in (
        mem0(tmp_path / "m", Script(EndpointStop("spent"))),
        langmem(tmp_path / "l", Script(EndpointStop(""))),
    ):
        with pytest.raises(EndpointStop):
            memory.commit([[E1]])
        assert memory.snapshot() == 0 and not memory.origins()
    memory = mem0(tmp_path / "mem0", Script(facts(PLACE)))
    memory.commit([[E1]])
    assert len(memory) == 1


def test_without_an_embedding_model_the_packages_search_by_words(tmp_path: Path) -> None:
    script = Script(facts(PLACE, "the pan was in shelf 1"), facts())
    memory = mem0(tmp_path, script, embedded=False)
    memory.commit([[E1], [E2]])
    existing = script.asked[1][1]["content"].partition("## Existing Memories")[2]
    assert existing.index("the pan was in shelf 1") < existing.index("the mug was")  # the second began at shelf 1
    assert [entry.text for entry in memory.recall([Query(T3, k=1)])[0].entries] == [PLACE]


def test_langmem_revises_an_item_and_its_first_version_stays(tmp_path: Path) -> None:
    first, second = "In FloorPlan1 the mug was in countertop 2", "In FloorPlan1 the mug was in shelf 1"
    script = Script(calls(("Memory", {"content": first})), patch("m0", second))
    memory = langmem(tmp_path, script)
    memory.commit([[E1], [E2]])
    [entry] = memory
    assert (entry.text, entry.provenance.actions) == (second, ("take mug 1 from shelf 1",))
    assert entry.id.endswith(".2") and memory[entry.id.removesuffix("2") + "1"].text == first
    seen = lambda task: [entry.text for entry in memory.recall([Query(task)])[0].entries]
    assert seen(T3) == [second] and seen(E2.task) == [first] and seen(E1.task) == []
    assert langmem(tmp_path, None).recall([Query(T3)]) == memory.recall([Query(T3)])
    assert (
        "You are a memory subroutine" in script.asked[1][0]["content"] and "PatchDoc" in script.asked[1][0]["content"]
    )


def test_what_langmem_is_asked_is_a_function_of_the_journal(tmp_path: Path) -> None:
    told = [[like(E1, f"a{n}")] for n in range(3)]
    answers = [calls(("Memory", {"content": "the mug was in shelf 0"})), patch("m0", "the mug was in shelf 1"), calls()]
    one, parts = Script(*answers), list[Any]()
    langmem(tmp_path / "one", one).commit(told)
    for n, each in enumerate(told):
        script = Script(answers[n])
        langmem(tmp_path / "many", script).commit([each])
        parts += script.asked
    assert one.asked == parts and len(parts) == 3
    assert (tmp_path / "one/journal.jsonl").read_bytes() == (tmp_path / "many/journal.jsonl").read_bytes()


def test_below_a_query_limit_of_four_langmem_updates_nothing(tmp_path: Path) -> None:
    for limit, texts in ((3, {"old"}), (4, {"new"})):
        script = Script(calls(("Memory", {"content": "old"})), patch("m0", "new"))
        memory = langmem(tmp_path / str(limit), script, query_limit=limit)
        memory.commit([[E1], [E2]])
        assert {entry.text for entry in memory} == texts


def test_calls_that_langmem_cannot_use(tmp_path: Path) -> None:
    by_rule = langmem(tmp_path / "rule", None)
    by_rule.commit([[E1]])
    rules = [entry.text for entry in by_rule]
    wrong, repaired = calls(("Memory", {"text": "x"})), [{"op": "add", "path": "/content", "value": "repaired"}]
    repair = calls(("PatchFunctionErrors", {"json_doc_id": "call_0", "planned_edits": "", "patches": repaired}))
    cases = {
        "unknown key": ([calls(("PatchDoc", {"json_doc_id": "m7", "planned_edits": "", "patches": []}))], [], {}),
        "no calls": ([calls()], [], {}),
        "repaired": ([wrong, repair], ["repaired"], {}),
        "no JSON": (["no", "no"], rules, {"memory_write": 1}),
        "other JSON": ([{"calls": [3]}, {"calls": "x"}], rules, {"memory_write": 1}),
    }
    for name, (answers, texts, failures) in cases.items():
        memory = langmem(tmp_path / name, script := Script(*answers))
        memory.commit([[E1]])
        assert [entry.text for entry in memory] == texts, name
        assert memory.failures == failures and not script.answers, name
    memory = langmem(tmp_path / "malformed", script := Script(calls(("Memory", {"content": "old"}))))
    memory.commit([[E2]])
    script.answers = 2 * [wrong, calls(), calls()]  # LangMem raises where two repairs call nothing
    memory.commit([[E1]])
    assert [entry.text for entry in memory] == ["old", *rules] and memory.failures == {"package": 1}


def test_recall_is_the_search_of_langgraph_s_store(tmp_path: Path) -> None:
    texts = [f"in FloorPlan{n % 5} the {thing} was in shelf {n}" for n in range(25) for thing in ("mug", "pan")]
    memory = langmem(tmp_path, Script(calls(*(("Memory", {"content": text}) for text in texts))))
    memory.commit([[E1]])
    worker = memory.worker(memory.state)
    [found] = memory.recall([Query(T3, k=10)])
    theirs = dict(worker.call("search", query=memory.query_text(Query(T3), ""), k=50))
    ours = [theirs[entry.id.removeprefix("langmem/").removesuffix(".1")] for entry in found.entries]
    assert ours == pytest.approx(sorted(theirs.values(), reverse=True)[:10], abs=1e-5)
    assert worker.call("attempts") == []


def test_typed_memories_are_facts_and_episodes(tmp_path: Path) -> None:
    episode = {"observation": "a hot mug", "thoughts": "heat it", "action": "go, take, heat", "result": "done"}
    script = Script(calls(("Fact", {"content": PLACE}), ("Episode", episode)))
    memory = langmem(tmp_path, script, schemas="typed")
    memory.commit([[E1]])
    assert [entry.text for entry in memory] == [PLACE, "a hot mug heat it go, take, heat done"]
    assert '"name": "Episode"' in script.asked[0][0]["content"]


def test_no_other_address_than_loopback_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From settings, with an endpoint for the language model and one for vectors; in this process and in the worker."""
    asked, connect = list[Any](), socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        asked.append(address)
        assert address[0] == "127.0.0.1"
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)
    answers = {"mem0": facts(PLACE), "langmem": calls(("Memory", {"content": PLACE}))}
    for name, answer in answers.items():
        vector = lambda text: embed([text])[0].tolist()
        with FaultyServer(answer=lambda messages, answer=answer: json.dumps(answer), vector=vector) as server:
            config = MemoryConfig(system=name, api=server.config(), embed_api=server.config())
            memory = open_memory(config, tmp_path / name, "alfworld")
            memory.commit([[E1], [E2]])
            assert memory.recall([Query(T3)])[0].entries[0].text == PLACE
            requests = server.requests
            assert requests > 2 and isinstance(memory, PackageMemory) and memory._worker is not None
            assert memory._worker.call("attempts") == []
    assert {address[0] for address in asked} == {"127.0.0.1"}


def test_the_worker_refuses_what_it_is_not_asked_to_reach() -> None:
    code = """if True:
        import urllib.request
        from memory.packages.worker import Network
        network = Network()
        for url in ("http://127.0.0.1:9/", "http://example.invalid/"):
            try:
                urllib.request.urlopen(url, timeout=5)
            except OSError as error:
                assert "no network" in str(error), error
        print(len(network.attempts))
    """
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60) == "2\n"


def test_a_worker_that_dies_is_named_and_the_next_commit_starts_another(tmp_path: Path) -> None:
    memory = mem0(tmp_path, Script(facts(PLACE)))

    def die(messages: Sequence[dict[str, Any]], role: str, max_tokens: int) -> str:
        assert memory._worker is not None
        os.kill(memory._worker._worker._child.pid, signal.SIGKILL)
        return "{}"

    memory._tools = replace(memory._tools, ask=die)
    with pytest.raises(BankError, match="worker of memory system mem0 failed in add"):
        memory.commit([[E1]])
    assert memory.snapshot() == 0
    memory._tools = replace(memory._tools, ask=Script(facts(PLACE)))
    memory.commit([[E1]])
    assert [entry.text for entry in memory] == [PLACE]


def test_two_writers_of_one_fact_make_one_item(tmp_path: Path) -> None:
    one, other = (mem0(tmp_path, Script(facts(PLACE), facts(PLACE, "the pan was clean"))) for _ in range(2))
    one.commit([[E1]])
    other.commit([[like(E1, "t2")]])
    one.commit([[like(E1, "t3")]])
    for memory in (one, other, mem0(tmp_path, None)):
        assert [entry.text for entry in memory] == [PLACE, "the pan was clean"] and memory.snapshot() == 3


def test_langgraph_stores_and_memory_systems_are_each_other() -> None:
    python, cases = interpreter("langmem"), Path(__file__).with_name("langgraph_cases.py")
    if subprocess.run([python, "-c", "import pytest"], capture_output=True, timeout=120).returncode:
        pytest.skip(f"{python} has no pytest")
    outer = ("PYTEST_", "VIRTUAL_ENV", "PYTHONPATH")
    ran = subprocess.run(
        [python, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", str(cases)],
        cwd=cases.parents[2],
        capture_output=True,
        text=True,
        timeout=400,
        env={name: value for name, value in os.environ.items() if not name.startswith(outer)},
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
