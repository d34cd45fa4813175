"""LangGraph's stores and our memory systems as each other; `test_memory_packages.py` runs these tests where both are
installed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from langgraph.graph import END, START, StateGraph
from langgraph.store.base import BaseStore
from langgraph.store.memory import InMemoryStore
from langmem import create_search_memory_tool
from typing_extensions import TypedDict

from examples import my_memory
from memory.langgraph import NAMESPACE, MemoryStore, StoreMemory, StoreSettings, store_memory
from memory.protocol import BankError, MemorySystem, Query
from memory.registry import MemoryTools
from tests.memory.worked_examples import E1, T3, like

STEPS = [
    {"action": "go to shelf 1", "feedback": "On the shelf 1, you see a mug 1."},
    {"action": "take mug 1 from shelf 1"},
]
EPISODE = {"goal": "put a mug in desk", "steps": STEPS, "success": True, "scene": "home 1", "rationale": "it was there"}


def embed(texts: list[str]) -> list[list[float]]:
    vectors = [[0.01] * 64 for _ in texts]
    for vector, text in zip(vectors, texts, strict=True):
        for word in text.lower().split():
            vector[hashlib.md5(word.encode()).digest()[0] % 64] += 1
    return vectors


def in_memory() -> BaseStore:
    return InMemoryStore(index={"dims": 64, "embed": embed, "fields": ["text", "content", "content.content"]})


@pytest.fixture
def store(tmp_path: Path) -> MemoryStore:
    return MemoryStore(my_memory.SPEC.open(tmp_path, my_memory.DiarySettings(failures=True), MemoryTools()))


def test_a_graph_searches_and_writes_our_memory(store: MemoryStore) -> None:
    class State(TypedDict):
        goal: str
        told: list[str]

    def act(state: State, *, store: BaseStore) -> dict[str, Any]:
        found = store.search(NAMESPACE, query=state["goal"], filter={"scene": "home 1"}, limit=2)
        store.put(NAMESPACE, f"task {state['goal']}", {**EPISODE, "goal": state["goal"]})
        return {"told": [item.value["text"] for item in found]}

    builder = StateGraph(State)
    builder.add_node("act", act)
    builder.add_edge(START, "act")
    builder.add_edge("act", END)
    graph = builder.compile(store=store)
    assert graph.invoke({"goal": "put a mug in desk", "told": []})["told"] == []
    assert graph.invoke({"goal": "put a mug in sofa", "told": []})["told"] == [
        "in home 1: put a mug in desk: go to shelf 1 ; take mug 1 from shelf 1"
    ]
    assert len(store.memory) == 2 and store.memory.origins() == {
        ("task put a mug in desk", ""): 1,
        ("task put a mug in sofa", ""): 1,
    }


def test_items_by_key_by_filter_and_by_page(store: MemoryStore) -> None:
    for n in range(5):
        store.put(NAMESPACE, f"t{n}", {**EPISODE, "success": n % 2 == 0})
    here = {"scene": "home 1"}
    found = store.search(NAMESPACE, query="put a mug in desk", filter=here, limit=9)
    assert len(found) == 5 and store.get(NAMESPACE, found[0].key).value == found[0].value
    assert store.get(NAMESPACE, "no such") is None and store.get(("other",), found[0].key) is None
    assert store.search(("other",), query="mug") == []
    assert len(store.search((), query="mug", filter=here, limit=9)) == 5
    assert len(store.search(NAMESPACE, filter={"success": False}, limit=9)) == 2
    assert len(store.search(NAMESPACE, query="put a mug in desk", filter={**here, "task_id": "t0"}, limit=9)) == 4
    pages = [item.key for n in range(3) for item in store.search(NAMESPACE, limit=2, offset=2 * n)]
    assert len(set(pages)) == len(pages) == 5
    assert store.list_namespaces() == [NAMESPACE] and store.list_namespaces(prefix=("other",)) == []
    tool = create_search_memory_tool(NAMESPACE, store=store)  # LangMem's, in an agent
    assert "take mug 1 from shelf 1" in str(tool.invoke({"query": "mug", "filter": here}))


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"text": "a note"}, "an episode has no text"),
        ({"goal": "x"}, "an episode is"),
        ({**EPISODE, "steps": [{}]}, "step 0 has no action"),
        ({**EPISODE, "success": "yes"}, "success is true or false"),
        (None, "deletes none"),
    ],
)
def test_what_is_no_episode_is_refused(store: MemoryStore, value: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        store.delete(NAMESPACE, "x") if value is None else store.put(NAMESPACE, "x", value)
    assert len(store.memory) == 0


def test_a_store_is_a_memory_system(tmp_path: Path) -> None:
    theirs = in_memory()
    theirs.put((*NAMESPACE, "user"), "note", {"kind": "Memory", "content": {"content": "mugs belong in the desk"}})
    memory = store_memory("shop", lambda: theirs).open(tmp_path, StoreSettings(), MemoryTools())
    assert isinstance(memory, MemorySystem) and memory.name == "shop"
    memory.commit([[E1], [like(E1, "t2", scene="FloorPlan2")]])
    tasks = lambda memory, **query: {e.provenance.task_id for e in memory.recall([Query(T3, k=9, **query)])[0].entries}
    assert tasks(memory) == {"t1", "t2", ""} and tasks(memory, isolation="scene") == {"t2"}
    version = memory.snapshot()
    memory.commit([[like(E1, "t4")]])
    assert tasks(memory) == {"t1", "t2", "t4", ""} and len(memory) == 4
    assert tasks(memory.at(version)) == {"t1", "t2", ""}
    with pytest.raises(BankError):
        memory.at(version).commit([[like(E1, "t5")]])
    [own] = memory.recall([Query(E1.task, k=9)])
    assert "t1" not in {entry.provenance.task_id for entry in own.entries}
    assert all(memory[entry.id] == entry for entry in memory)


def test_a_store_that_forgot_is_filled_from_the_journal(tmp_path: Path) -> None:
    StoreMemory(tmp_path, in_memory()).commit([[like(E1, f"e{n}")] for n in range(40)])
    again = StoreMemory(tmp_path, in_memory())  # another process, whose store is empty
    assert len(again.recall([Query(like(E1, "e9").task, k=50)])[0].entries) == 39 and len(again) == 40
    assert len(again.recall([Query(T3, k=3)])[0].entries) == 3
