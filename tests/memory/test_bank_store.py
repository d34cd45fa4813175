"""A bank whose table is in object storage, on a server of it that runs here."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from typer.testing import CliRunner

from envs.base import Task
from memcompiler.data import bank_app
from memory.bank import MemoryBank
from memory.bank_store import STORE, Store, create_store, store_of
from memory.entry import MemoryEntry
from memory.protocol import BankError, Query
from tests.memory.entries import entry


def entries() -> list[MemoryEntry]:
    return [entry(n, images=1) for n in range(3)]


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    server_of = pytest.importorskip("moto.server", reason="moto, a server of object storage, is not installed")
    running = server_of.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    url = f"http://{host}:{port}"
    with urlopen(Request(f"{url}/bucket", method="PUT"), timeout=30) as answer:
        assert answer.status == 200
    yield url
    running.stop()


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")


def stored(folder: Path, url: str, name: str, **options: str) -> Path:
    create_store(folder, Store(f"s3://bucket/{name}", options_of(url) | options))
    return folder


def options_of(url: str) -> dict[str, str]:
    return {"aws_endpoint": url, "aws_region": "us-east-1", "allow_http": "true"}


def test_a_bank_in_object_storage_is_one_in_a_folder(server: str, keys: None, tmp_path: Path) -> None:
    options = [part for name, value in options_of(server).items() for part in ("--option", f"{name}={value}")]
    made = CliRunner().invoke(bank_app, ["store", str(tmp_path / "far"), "s3://bucket/banks/homes", *options])
    assert made.exit_code == 0, made.output
    far, near = MemoryBank(tmp_path / "far"), MemoryBank(tmp_path / "near")
    for bank in (far, near):
        assert bank.write(entries()[:2]).added == 2
        first = bank.snapshot()
        written = bank.write(entries())
        assert (written.added, written.ignored) == (1, 2)
        assert len(bank.at(first)) == 2 and len(bank) == 3
    again = MemoryBank(tmp_path / "far")  # what another process opens
    queries = [Query(Task("new", f"put a mug in cabinet {n}", f"home {n}", "test", ""), k=2) for n in range(3)]
    assert again.recall(queries) == near.recall(queries)
    assert list(again) == list(near) == entries()
    assert (far.export_jsonl(tmp_path / "a"), near.export_jsonl(tmp_path / "b")) == (3, 3)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert [file.name for file in (tmp_path / "far").iterdir()] == [STORE]


def test_writers_of_one_bank_in_object_storage_lose_nothing(server: str, keys: None, tmp_path: Path) -> None:
    folders = [stored(tmp_path / str(n), server, "shared") for n in range(3)]  # on three machines
    own = lambda n: replace(entries()[0], id=f"of {n}")
    with ThreadPoolExecutor(3) as pool:
        written = list(pool.map(lambda n: MemoryBank(folders[n]).write([own(n), entries()[1]]).added, range(3)))
    assert sum(written) == 4
    assert sorted(each.id for each in MemoryBank(folders[0])) == sorted([entries()[1].id, "of 0", "of 1", "of 2"])


def test_storage_that_does_not_answer_is_an_error_that_names_the_bank(keys: None, tmp_path: Path) -> None:
    patience = {"client_max_retries": "0", "client_retry_timeout": "1", "connect_timeout": "1s", "timeout": "2s"}
    bank = MemoryBank(stored(tmp_path / "far", "http://127.0.0.1:9", "gone", **patience))
    with pytest.raises(BankError, match="far: "):
        bank.write(entries())
    assert [file.name for file in (tmp_path / "far").iterdir()] == [STORE]


def test_wrong_stores_are_refused_by_name(tmp_path: Path) -> None:
    for uri in ("s3://bucket", "/tmp/bank", "http://host/bank", "s3://bucket/a b"):
        with pytest.raises(BankError, match="names no object storage"):
            Store(uri, {})
    with pytest.raises(BankError, match="aws_secret_access_key is a secret: set AWS_ACCESS_KEY_ID"):
        Store("s3://bucket/a", {"aws_secret_access_key": "x"})
    (tmp_path / "bank").mkdir()
    assert store_of(tmp_path / "bank") is None
    (tmp_path / "bank" / STORE).write_text('{"uri": "s3://bucket/a"}')
    with pytest.raises(BankError, match=r"store\.json is damaged: 'options'"):
        MemoryBank(tmp_path / "bank").write(entries())
    with pytest.raises(BankError, match="is not empty: name a new folder"):
        create_store(tmp_path / "bank", Store("s3://bucket/a", {}))
