"""Embeddings by endpoint: each text once, in batches, on disk; and servers that misbehave."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from configs.collect import MemoryConfig, MemoryModels
from data_gen.memory_factory import embedder, open_memory
from lm.answer_cache import EndpointStop
from lm.endpoint import Endpoint
from lm.endpoint_embedder import ROLE, EndpointEmbedder
from memory.bank import MemoryBank
from memory.protocol import BankError
from memory.registry import RESPONSES
from tests.faulty_server import MODEL, FaultyServer
from tests.tiny_models import entry

TEXTS = [f"text {i} {'x' * i}" for i in range(7)]
WANTED = np.array([[len(text), 1.0] for text in TEXTS], np.float32)


def embed(server: FaultyServer, path: Path | None = None, **settings: object) -> EndpointEmbedder:
    return EndpointEmbedder(Endpoint(server.config(**settings), path))


def test_texts_are_embedded_in_batches_each_once_whatever_is_asked_later(tmp_path: Path) -> None:
    path = tmp_path / RESPONSES
    with FaultyServer() as server:
        first = embed(server, path, batch=3, concurrency=1)
        assert np.array_equal(first([*TEXTS, TEXTS[2]]), np.concatenate([WANTED, WANTED[2:3]]))
        assert [len(body["input"]) for body in server.bodies] == [3, 3, 1]
        account = first.endpoint.account()
        assert account["roles"][ROLE]["requests"] == 3 and account["tokens_in"] == 35 and account["tokens_out"] == 0
        again = embed(server, path, batch=3)
        assert np.array_equal(again(TEXTS[::-1]), WANTED[::-1]) and server.requests == 3
        assert again.endpoint.account()["from_cache"] == 7
        assert np.array_equal(again([TEXTS[0], "new"]), [[len(TEXTS[0]), 1], [3, 1]])
        assert server.bodies[-1]["input"] == ["new"]
        assert again([]).shape == (0, 1) and again([""]).shape == (1, 2)
    with sqlite3.connect(path) as db:
        assert not any("text 3" in str(row) for row in db.execute("SELECT * FROM vectors"))  # hashes alone


@pytest.mark.parametrize(
    "fault",
    [
        "429",
        "500",
        "hang",
        "truncated",
        "html",
        "empty choices",
        "array",
        "closed",
        "one too few",
        "one twice",
        "of other length",
        "not finite",
        "too large",
        "text",
        "empty",
    ],
)
def test_a_fault_is_tried_again(fault: str) -> None:
    with FaultyServer([fault]) as server:
        it = embed(server, timeout_s=0.5 if fault == "hang" else 10.0)
        assert np.array_equal(it(TEXTS), WANTED)
        assert server.requests == 2 and sum(it.endpoint.account()["faults"].values()) == 1


def test_what_no_attempt_mends_ends_in_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBEDDERS_KEY", "s3cret-key")
    with FaultyServer(["400"]) as server, pytest.raises(EndpointStop, match=r"no vectors for 7 texts: .*refused"):
        embed(server, retries=0)(TEXTS)
    with FaultyServer(["hang"] * 9) as server, pytest.raises(EndpointStop, match=r"no answer in 0\.2 s"):
        embed(server, timeout_s=0.2, retries=1)(TEXTS)
    with FaultyServer(["401"]) as server, pytest.raises(EndpointStop, match="EMBEDDERS_KEY") as stop:
        embed(server, key_env="EMBEDDERS_KEY")(TEXTS)
    assert "s3cret" not in str(stop.value)
    with FaultyServer() as server, pytest.raises(EndpointStop, match="budget_tokens of 0 is spent"):
        embed(server, budget_tokens=0)(TEXTS)
    long = FaultyServer(vector=lambda text: [1.0] * len(text))
    with long as server, pytest.raises(EndpointStop, match="vectors of 6 and 7 dimensions"):
        embed(server, batch=1)(["text 1", "text 10"])


def test_banks_name_the_model_that_embeds_by_endpoint(tmp_path: Path) -> None:
    with FaultyServer() as server:
        api = server.config()
        bank = open_memory(MemoryConfig(embed_api=api), tmp_path / "bank")
        assert isinstance(bank, MemoryBank)
        bank.write([entry(1, "put a mug in shelf")])
        assert MODEL in json.dumps(bank.inspect())
        with pytest.raises(BankError, match=MODEL):
            len(open_memory(MemoryConfig(embed_api=api.model_copy(update={"model": "other"})), tmp_path / "bank"))


def test_one_model_embeds_and_is_named(tmp_path: Path) -> None:
    with FaultyServer() as server:
        api = server.config()
        for wrong in ({"embed": "e", "embed_api": api}, {"embed_api": api.model_copy(update={"model": ""})}):
            with pytest.raises(ValueError, match="embeddings are of one model"):
                MemoryModels.model_validate(wrong)
        models = MemoryModels(embed_api=api)
        assert models.model_names() == {"embed": MODEL} and MemoryModels().model_names() == {}
        assert MemoryModels(embed="e").embedding_model == "e"
        cached = models.cached_in(tmp_path / "x.sqlite")
        assert cached.embed_api is not None and cached.embed_api.cache == str(tmp_path / "x.sqlite")
        assert cached.cached_in(tmp_path / "y") == cached and MemoryModels().cached_in(tmp_path) == MemoryModels()
        it = embedder(cached, tmp_path / "unused.sqlite")
        assert it is not None and it(TEXTS).shape == (7, 2) and (tmp_path / "x.sqlite").exists()
        assert not (tmp_path / "unused.sqlite").exists() and embedder(MemoryModels(), tmp_path) is None
