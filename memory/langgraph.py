"""LangGraph's stores and our memory systems, each as the other (packages `langgraph`, of the extra `langmem`).

`MemoryStore` lets a LangGraph agent search and write any memory system as a `BaseStore`. `store_memory` makes a
`BaseStore` that an application already fills a memory system, whose entries every delivery can show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

from langgraph.store.base import (  # type: ignore[import-not-found]
    BaseStore,
    GetOp,
    Item,
    ListNamespacesOp,
    PutOp,
    SearchItem,
    SearchOp,
)

from envs.base import Task
from memory.entry import MemoryEntry, Provenance, WriteResult
from memory.journal import JournalMemory
from memory.protocol import MemorySystem, Query, Recall, Record, Trace
from memory.registry import MemorySpec
from memory.trajectory import EntryText, entry_of_trace, goal_with_scene
from runtime.settings import Settings

NAMESPACE = ("memcompiler",)
BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)  # time of items: memory systems keep none
EPISODE_KEYS = frozenset({"goal", "steps", "success", "scene", "task_id", "kind", "rationale"})
MARK = "memcompiler"  # key of a value that holds an entry of ours


class MemoryStore(BaseStore):
    """A memory system as a LangGraph store in one namespace.

    `search(namespace, query=goal, filter={"scene": ..., "task_id": ...}, limit=k)` recalls for a task; `put` commits an
    episode: {"goal", "steps": [{"action", "feedback"}, ...], "success"}, optionally "scene", "task_id", "kind" and
    "rationale". Episodes are never deleted or replaced.
    """

    supports_ttl = False

    def __init__(self, memory: MemorySystem, namespace: tuple[str, ...] = NAMESPACE) -> None:
        self.memory, self.namespace = memory, namespace

    def batch(self, ops: Iterable[Any]) -> list[Any]:
        """Execute operations in order. Raises: ValueError, for a put that is no episode, or a deletion."""
        return [self._run(op) for op in ops]

    async def abatch(self, ops: Iterable[Any]) -> list[Any]:
        return self.batch(ops)

    def _run(self, op: Any) -> Any:
        match op:
            case GetOp():
                return self._get(op.namespace, op.key)
            case SearchOp():
                return self._search(op)
            case PutOp():
                return self._put(op)
            case ListNamespacesOp():
                return self._namespaces(op)
        raise ValueError(f"unknown operation {type(op).__name__}")

    def _get(self, namespace: tuple[str, ...], key: str) -> Item | None:
        try:
            entry = self.memory[key] if namespace == self.namespace else None
        except KeyError:
            entry = None
        return None if entry is None else self._item(entry)

    def _search(self, op: SearchOp) -> list[SearchItem]:
        if self.namespace[: len(op.namespace_prefix)] != tuple(op.namespace_prefix):
            return []
        wanted = dict(op.filter or {})
        task_id, scene = str(wanted.pop("task_id", "")), str(wanted.pop("scene", ""))
        if unknown := [name for name, value in wanted.items() if isinstance(value, Mapping)]:
            raise ValueError(f"filters compare by equality here: {', '.join(unknown)}")
        if op.query:
            task = Task(task_id, op.query, scene, "", "")
            entries: Iterable[MemoryEntry] = self.memory.recall([Query(task, k=op.offset + op.limit)])[0].entries
        else:
            entries = (entry for entry in self.memory if not task_id or entry.provenance.task_id != task_id)
        values = ((entry, self._value(entry)) for entry in entries)
        fitting = [entry for entry, value in values if wanted.items() <= value.items()]
        return [self._item(entry, SearchItem) for entry in fitting[op.offset : op.offset + op.limit]]

    def _put(self, op: PutOp) -> None:
        if op.value is None:
            raise ValueError("a memory of episodes deletes none")
        if tuple(op.namespace) != self.namespace:
            raise ValueError(f"this memory is in namespace {self.namespace}, not {tuple(op.namespace)}")
        self.memory.commit([[trace_from_value(op.value, op.key)]])

    def _namespaces(self, op: ListNamespacesOp) -> list[tuple[str, ...]]:
        fits = lambda condition: _matches(self.namespace, condition.path, condition.match_type == "prefix")
        listed = [self.namespace] if all(map(fits, op.match_conditions or ())) else []
        return [name[: op.max_depth] for name in listed][op.offset : op.offset + op.limit]

    def _item(self, entry: MemoryEntry, kind: Any = Item) -> Any:
        return kind(
            namespace=self.namespace,
            key=entry.id,
            value=self._value(entry),
            created_at=BEGINNING,
            updated_at=BEGINNING,
        )

    @staticmethod
    def _value(entry: MemoryEntry) -> dict[str, Any]:
        origin = entry.provenance
        return {
            "text": entry.text,
            "goal": origin.goal,
            "scene": origin.scene,
            "task_id": origin.task_id,
            "success": origin.success,
            "actions": list(origin.actions),
        }


def _matches(namespace: tuple[str, ...], path: Sequence[str], prefix: bool) -> bool:
    part = namespace[: len(path)] if prefix else namespace[len(namespace) - len(path) :]
    return len(part) == len(path) and all(want in ("*", name) for want, name in zip(path, part, strict=True))


def trace_from_value(value: Mapping[str, Any], key: str) -> Trace:
    """Read an episode from a store's value. Raises: ValueError, for another value; it says what is wrong."""
    if unknown := sorted(set(value) - EPISODE_KEYS):
        raise ValueError(f"an episode has no {', '.join(unknown)}; known: {', '.join(sorted(EPISODE_KEYS))}")
    if not isinstance(value.get("goal"), str) or not isinstance(value.get("steps"), list):
        raise ValueError('an episode is {"goal": text, "steps": [{"action": text, "feedback": text}, ...], ...}')
    if not isinstance(success := value.get("success", True), bool):
        raise ValueError(f"success is true or false, not {success!r}")
    texts = {name: str(value.get(name, "")) for name in ("scene", "kind", "rationale")}
    task = Task(str(value.get("task_id") or key), value["goal"], texts["scene"], "", texts["kind"])
    records, seen = list[Record](), ""
    for t, step in enumerate(value["steps"]):
        if not isinstance(step, Mapping) or not isinstance(step.get("action"), str):
            raise ValueError(f"step {t} has no action: {step!r}")
        feedback = str(step.get("feedback", ""))
        records.append(Record(t, str(step.get("observation", seen)), step["action"], feedback))
        seen = feedback
    return Trace(task, tuple(records), success, rationale=texts["rationale"])


# a store as a memory system -------------------------------------------------------------------------------------------


class StoreSettings(Settings):
    """Settings of a memory system that is a LangGraph store."""

    text: EntryText = "commands"
    """What an entry shows of its episode."""


class StoreMemory(JournalMemory):
    """A LangGraph store as a `MemorySystem`: what the application put there, and the entries of committed episodes.

    A journal beside it names versions and fills a store that has lost entries, or never kept them. An item of the
    application is an entry if its value has a text under "text", "content" or, as LangMem writes it, "content.content";
    no scene and no task are known of it, so isolation by scene leaves it out.

    Args:
        store: needs an index, or its search ignores the query.
        namespace: of the entries; items of namespaces below it are recalled, too.
    """

    name: ClassVar[str] = "store"

    def __init__(
        self,
        path: str | Path,
        store: BaseStore,
        namespace: tuple[str, ...] = NAMESPACE,
        settings: StoreSettings | None = None,
        until: int | None = None,
    ) -> None:
        super().__init__(path, until)
        self.store, self.namespace, self.settings = store, namespace, settings or StoreSettings()
        self._put_rows = 0  # rows of the journal whose entries the store holds

    def _fill(self) -> None:
        """Put entries of rows that the store may lack."""
        fresh = self._journal.since(self._put_rows)
        for row, episode in enumerate(fresh, self._put_rows):
            for trace in episode.attempts:
                entry = entry_of_trace(replace(trace, views=()), self.settings.text)
                value = {"text": entry.text, MARK: {"row": row, **entry.to_json()["provenance"]}}
                if self.store.get(self.namespace, entry.id) is None:
                    self.store.put(self.namespace, entry.id, value)
        self._put_rows += len(fresh)

    def commit(self, episodes: Sequence[Sequence[Trace]]) -> WriteResult:
        written = super().commit(episodes)
        self._fill()
        return written

    def recall(self, queries: Sequence[Query]) -> list[Recall]:
        self._fill()
        return [Recall(tuple(self._recalled(query))) for query in queries]

    def _recalled(self, query: Query) -> list[MemoryEntry]:
        """Return the k best entries that a task may see; more items are fetched until there are enough."""
        task, limit = query.task, max(16, 4 * query.k)
        text = query.text or goal_with_scene(task.goal, task.scene)
        while True:
            found = self.store.search(self.namespace, query=text, limit=limit)
            entries = [entry for item in found if (entry := self._entry(item)) and entry.provenance.task_id != task.id]
            if query.isolation == "scene":
                entries = [entry for entry in entries if entry.provenance.scene not in ("", task.scene)]
            if len(entries) >= query.k or len(found) < limit:
                return entries[: query.k]
            limit *= 4

    def _entry(self, item: Item) -> MemoryEntry | None:
        """Return an item as an entry; None without a text, or if it is of a later version."""
        value = item.value
        if (ours := value.get(MARK)) is not None:
            if ours["row"] >= len(self._journal):
                return None
            origin = Provenance(**{**{k: v for k, v in ours.items() if k != "row"}, "actions": tuple(ours["actions"])})
            return MemoryEntry(item.key, value["text"], origin)
        content = value.get("text", value.get("content"))
        content = content.get("content") if isinstance(content, Mapping) else content
        if not isinstance(content, str) or not content.strip():
            return None
        nowhere = Provenance("", "", "", "", True, source="/".join(item.namespace))
        return MemoryEntry("/".join((*item.namespace, item.key)), " ".join(content.split()), nowhere)

    def at(self, version: int) -> StoreMemory:
        """Open a read-only view of the episodes up to a version. What the application put has no versions."""
        return type(self)(self.path, self.store, self.namespace, self.settings, version)

    def __iter__(self) -> Iterator[MemoryEntry]:
        self._fill()
        offset, size = 0, 500
        while items := self.store.search(self.namespace, limit=size, offset=offset):
            yield from (entry for item in items if (entry := self._entry(item)))
            offset += size


def store_memory(name: str, open_store: Callable[[], BaseStore], namespace: tuple[str, ...] = NAMESPACE) -> MemorySpec:
    """Describe a LangGraph store as a memory system, for `mc.register_memory`.

    Args:
        name: of the system, as in `memory.system=NAME`.
        open_store: called once for each memory that is opened.
        namespace: of the store.
    """
    system = type("NamedStoreMemory", (StoreMemory,), {"name": name})
    open_memory = lambda path, settings, tools: system(path, open_store(), namespace, settings)
    return MemorySpec(name, StoreSettings, open_memory)
