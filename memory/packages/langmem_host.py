"""LangMem's package behind the worker's calls: its memory store manager over LangGraph's store in memory.

The models are those of the parent process. It offers no tool calls, so the tools are written into the prompt and the
answer is JSON text. After every `add` the store is put back as it was: the parent loads what its journal holds, so that
the store is a function of the journal.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from langchain_core.language_models import BaseChatModel  # type: ignore[import-not-found]  # of the extra `langmem`
from langchain_core.messages import (  # type: ignore[import-not-found]
    AIMessage,
    BaseMessage,
    SystemMessage,
    ToolMessage,
    convert_to_messages,
)
from langchain_core.outputs import ChatGeneration, ChatResult  # type: ignore[import-not-found]
from langchain_core.utils.function_calling import convert_to_openai_tool  # type: ignore[import-not-found]
from langgraph.store.memory import InMemoryStore  # type: ignore[import-not-found]
from langmem import create_memory_store_manager  # type: ignore[import-not-found]
from pydantic import BaseModel, Field

from memory.packages.worker import Parent

NAMESPACE = ("bank",)
ALONE = {"max_concurrency": 1}  # threads would ask the model in any order
UNOFFERED = {"PatchDoc", "PatchFunctionErrors", "PatchFunctionName"}  # trustcall would store such calls as memories
_SESSION = re.compile(r"session_[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_INSTANCE = re.compile(r"<instance id=([0-9a-f]{32}) ")
_ANSWER = """Call tools by one JSON object and nothing else: {"calls": [{"name": NAME, "args": {...}}, ...]}, with an \
empty list if there is nothing to call. The tools, with the JSON schemas of their arguments:
"""


class Fact(BaseModel):
    """Call this tool once for each fact worth keeping: a thing's place, an appliance's use, what a place lacks."""

    content: str = Field(description="The fact as a sentence that can be read alone, with the names that commands use.")


class Episode(BaseModel):
    """Call this tool for an attempt that is worth keeping as an example."""

    observation: str = Field(description="The task and the situation.")
    thoughts: str = Field(description="What had to be known or decided.")
    action: str = Field(description="What was done, in order.")
    result: str = Field(description="How it ended, and why.")


class LangMemHost:
    """One bank in LangMem.

    Args:
        dims: length of the vectors.
        schema: "memory": LangMem's own, one text; "typed": facts and episodes.
        instructions: added to LangMem's own.
        query_limit: LangMem's; existing memories are looked for from 4 on.
    """

    def __init__(self, parent: Parent, dims: int, schema: str, instructions: str, query_limit: int) -> None:
        self.dims, self._parent = dims, parent
        index: Any = {"dims": dims, "embed": parent.embed, "fields": ["text"]}
        self._store = InMemoryStore(index=index)
        self._loaded = dict[str, dict[str, Any]]()
        self._model = _Model(ask=parent.ask)
        options: dict[str, Any] = {"schemas": [Fact, Episode]} if schema == "typed" else {}
        self._manager = create_memory_store_manager(
            self._model,
            namespace=NAMESPACE,
            store=self._store,
            query_limit=query_limit,
            enable_deletes=False,
            **options,
        )
        self._manager.memory_manager.instructions += f"\n\n{instructions}" if instructions else ""

    def load(self, vectors: np.ndarray, items: Sequence[tuple[str, str, dict[str, Any], str]], start: int) -> None:
        """Store items of the journal, (key, kind, content, text) each, with the vectors of their texts. A later one
        replaces an earlier one of its key."""
        self._parent.keep([text for *_, text in items], vectors)
        for key, kind, content, text in items:
            self._loaded[key] = {"kind": kind, "content": content, "text": text}
            self._store.put(NAMESPACE, key, self._loaded[key])

    def add(self, messages: list[dict[str, str]], repeated: bool) -> list[tuple[str, str, str, dict[str, Any]]]:
        """Let LangMem revise the memories after a conversation.

        Args:
            repeated: the same was asked before, and the answer was of no use.

        Returns: what it put, (insert or update, key, kind, content) each; new items have LangMem's keys.
        """
        self._model.begin(repeated)
        done = []
        for put in self._manager.invoke({"messages": convert_to_messages(messages)}, config=ALONE):
            key, value = put["key"], put["value"]
            done.append(("update" if key in self._loaded else "insert", key, value["kind"], value["content"]))
            self._store.delete(NAMESPACE, key)
            if key in self._loaded:
                self._store.put(NAMESPACE, key, self._loaded[key])
        return done

    def search(self, query: str, k: int) -> list[tuple[str, float]]:
        """Return (key, score) of the k nearest items by LangGraph's store."""
        return [(item.key, float(item.score or 0)) for item in self._store.search(NAMESPACE, query=query, limit=k)]


class _Model(BaseChatModel):
    """A chat model whose tool calls are JSON texts of the parent's language model."""

    ask: Any
    tools: list[dict[str, Any]] = Field(default_factory=list)
    state: dict[str, Any] = Field(default_factory=dict)  # shared by all bound copies

    @property
    def _llm_type(self) -> str:
        return "parent"

    def begin(self, repeated: bool) -> None:
        """Begin a write: calls are numbered from 0, so that equal requests are equal."""
        self.state.update(calls=0, repeated=repeated)

    def bind_tools(self, tools: Sequence[Any], **_: Any) -> _Model:
        return self.model_copy(update={"tools": [convert_to_openai_tool(tool)["function"] for tool in tools]})

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        told, ids = self._chat(messages)
        calls = []
        offered = {tool["name"] for tool in self.tools}
        for call in json.loads(self.ask(told))["calls"]:
            if call["name"] in UNOFFERED - offered:
                continue
            args = dict(call["args"])
            if (named := args.get("json_doc_id")) in ids:
                args["json_doc_id"] = ids[named]
            calls.append({"name": call["name"], "args": args, "id": f"call_{self.state['calls']}"})
            self.state["calls"] += 1
        return ChatResult(generations=[ChatGeneration(message=AIMessage(content="", tool_calls=calls))])

    def _chat(self, messages: Sequence[BaseMessage]) -> tuple[list[dict[str, str]], dict[str, str]]:
        """Write messages as texts, with short names m0, m1, ... for stored items; return them and the names' ids."""
        tools = _ANSWER + "\n".join(json.dumps(tool, sort_keys=True) for tool in self.tools)
        if self.state["repeated"]:
            tools += "\nAn earlier answer could not be used: keep to the schemas."
        texts = [(_role(message), _SESSION.sub("session", _text(message))) for message in messages]
        stored = dict.fromkeys(id for _, text in texts for id in _INSTANCE.findall(text))
        names = {id: f"m{n}" for n, id in enumerate(stored)}
        for id, name in names.items():
            texts = [(role, text.replace(id, name)) for role, text in texts]
        chat = [{"role": role, "content": text} for role, text in texts]
        if chat and chat[0]["role"] == "system":
            chat[0]["content"] += f"\n\n{tools}"
        else:
            chat.insert(0, {"role": "system", "content": tools})
        return chat, {name: id for id, name in names.items()}


def _role(message: BaseMessage) -> str:
    if isinstance(message, SystemMessage):
        return "system"
    return "assistant" if isinstance(message, AIMessage) else "user"


def _text(message: BaseMessage) -> str:
    if isinstance(message, AIMessage) and message.tool_calls:
        calls = [{"name": call["name"], "args": call["args"], "id": call["id"]} for call in message.tool_calls]
        return json.dumps({"calls": calls})
    text = message.content if isinstance(message.content, str) else json.dumps(message.content)
    return f"Result of {message.tool_call_id}:\n{text}" if isinstance(message, ToolMessage) else text
