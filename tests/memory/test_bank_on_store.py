"""A bank on an object store: same entries and recalls as in a folder, concurrent appends, kill -9, copies, refusals."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import memcompiler as mc
from configs.collect import MemoryConfig
from configs.evaluation import EvalConfig
from configs.load import load_config
from data_gen.memory_factory import initialise_memory, open_memory
from envs.base import Task
from eval.evaluate import run_eval
from memcompiler.cli import app
from memory.bank import MemoryBank
from memory.bank_store import place_of
from memory.entry import WriteResult
from memory.protocol import BankError
from tests.memory.entries import entry
from tests.object_store import BUCKET, ObjectStore, object_store

pytest.importorskip("moto", reason="the store of these tests is in the group dev")
TASKS = [Task(f"q{i}", f"put a mug in cabinet {i}", f"home {i % 3}", "valid", "") for i in range(6)]
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store() as started:
        yield started


@pytest.fixture
def address(store: ObjectStore) -> str:
    return f"s3://{BUCKET}/tests/{next(NUMBERS)}"


def test_a_bank_on_a_store_holds_and_recalls_what_one_in_a_folder_does(address: str, tmp_path: Path):
    bank, local = MemoryBank(address), MemoryBank(tmp_path / "bank")
    for start in (0, 10, 10):
        some = [entry(i, images=i % 3) for i in range(start, start + 10)]
        assert bank.write(some) == local.write(some)
    reader = MemoryBank(address)
    assert reader.snapshot() == local.snapshot() == 3 and reader.entries() == local.entries()
    assert reader.retrieve(TASKS, 4) == local.retrieve(TASKS, 4) and reader["e00007"] == entry(7, images=1)
    earlier = reader.at(2)
    assert len(earlier) == 10 and earlier.retrieve(TASKS, 4) == local.at(2).retrieve(TASKS, 4)
    with pytest.raises(BankError, match="no version 9"):
        reader.at(9)


def test_a_reader_sees_what_another_process_appends(address: str):
    writer, reader = MemoryBank(address), MemoryBank(address)
    writer.write(entry(0))
    assert len(reader) == 1
    writer.write(entry(1))
    assert len(reader) == 2 and reader.write(entry(1)) == WriteResult(0, 1)


def test_a_recall_of_an_unchanged_bank_asks_for_its_version_and_the_recalled_rows_only(
    address: str, store: ObjectStore
):
    MemoryBank(address).write([entry(i, images=2) for i in range(50)])
    bank = MemoryBank(address)
    bank.retrieve(TASKS[:1])
    store.requests.clear()
    bank.retrieve(TASKS[:1])
    assert 0 < len(store.requests) <= 8, store.requests
    assert not [asked for asked in store.requests if asked.startswith("PUT")]


WRITER = """
import sys
from memory.bank import MemoryBank
from tests.memory.entries import entry
bank, start, stop = MemoryBank(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
for i in range(start, stop):
    bank.write([entry(i, images=2), entry(9_999)])
    print(i, flush=True)
"""


def writer(address: str, start: int, stop: int) -> subprocess.Popen[str]:
    """Start a process that appends entries, one a commit, after a line on its standard input."""
    root = Path(__file__).resolve().parents[2]
    paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, address, str(start), str(stop)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        cwd=root,
    )


@pytest.mark.slow
def test_processes_that_create_and_append_to_one_bank_at_once_lose_nothing(address: str):
    writers = [writer(address, start, start + 4) for start in (0, 10, 20)]
    for process in writers:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    outputs = [process.communicate("go\n", timeout=240)[0] for process in writers]
    assert [process.returncode for process in writers] == [0] * 3, outputs
    written = [start + i for start in (0, 10, 20) for i in range(4)]
    assert sorted(found.id for found in MemoryBank(address)) == [f"e{i:05}" for i in [*written, 9_999]]


@pytest.mark.slow
def test_kill_9_within_appends_leaves_a_readable_bank(address: str):
    start = 0
    for appends in (1, 4):
        process = writer(address, start, start + 1_000)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        said = [process.stdout.readline() for _ in range(1 + appends)]
        process.send_signal(signal.SIGKILL)
        confirmed = [int(line) for line in [*said[1:], *process.stdout.read().splitlines()]]
        process.wait(20)
        numbers = sorted(int(found.id[1:]) for found in MemoryBank(address))[:-1]
        assert numbers == list(range(len(numbers))) and len(numbers) >= confirmed[-1] + 1
        start = len(numbers)
    assert MemoryBank(address).write(entry(start)) == WriteResult(1)


# -- copies and commands ----------------------------------------------------------------------------------------------


class Named:
    """An `Embed` with a name."""

    name = "three numbers"

    def __call__(self, texts: list[str]) -> np.ndarray:
        return np.array([[len(text), text.count("a"), 1] for text in texts], dtype=np.float32)


def test_a_copy_keeps_entries_order_and_embeddings(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("memory.bank.IMPORT_BATCH", 64)
    bank = MemoryBank(tmp_path / "bank", Named())
    bank.write([entry(i, images=i % 2) for i in range(150)])
    assert MemoryBank(address).copy_from(bank) == WriteResult(150)
    copied = MemoryBank(address, Named())
    assert copied.snapshot() == 4 and copied.entries() == bank.entries()  # three commits after the empty table
    assert copied.retrieve(TASKS, 4) == bank.retrieve(TASKS, 4)
    bank.write(entry(150))
    assert MemoryBank(address).copy_from(bank) == WriteResult(1, 150)
    MemoryBank(tmp_path / "words").write(entry(1))
    with pytest.raises(BankError, match="differ in texts or embeddings"):
        MemoryBank(address).copy_from(MemoryBank(tmp_path / "words"))
    with pytest.raises(BankError, match="read-only view"):
        MemoryBank(address).at(1).copy_from(bank)


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.output


def test_commands_on_a_store(address: str, tmp_path: Path):
    MemoryBank(tmp_path / "bank").write([entry(i) for i in range(9)])
    assert "9 entries added, 0 known" in run("bank", "copy", tmp_path / "bank", address)
    assert "0 entries added, 9 known" in run("bank", "copy", tmp_path / "bank", address)
    assert json.loads(run("bank", "inspect", address))["entries"] == 9
    assert "trajectory" in run("bank", "show", address)
    run("bank", "export", address, tmp_path / "bank.jsonl")
    run("bank", "import", f"{address}-again", tmp_path / "bank.jsonl")
    assert "9 entries added" in run("bank", "copy", f"{address}-again", tmp_path / "back")
    assert MemoryBank(tmp_path / "back").entries() == MemoryBank(tmp_path / "bank").entries()


def test_settings_and_the_api_open_a_bank_on_a_store(address: str, tmp_path: Path):
    with pytest.raises(BankError, match="no memory bank at s3://"):
        len(mc.open_memory(address))
    MemoryBank(address).write([entry(i) for i in range(9)])
    assert len(mc.open_memory(address, version=2)) == len(open_memory(MemoryConfig(bank=address), tmp_path)) == 9
    with pytest.raises(BankError, match=r"on an object store.*memcompiler bank copy s3://.* FOLDER"):
        initialise_memory(mc.open_memory(address))
    with pytest.raises(BankError, match="amem keeps its episodes in a file: name a folder"):
        mc.open_memory(address, "amem")
    embeds = {"model": "m", "base_url": "http://127.0.0.1:1"}
    with pytest.raises(BankError, match="name a file for them"):
        open_memory(MemoryConfig.model_validate({"bank": address, "embed_api": embeds}), tmp_path)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["s3://", "s3://bucket", "s3://Bucket/x", "s3://b/x", "s3://bucket/a//b", "gs://bucket/x"]
)
def test_an_address_of_another_form_is_refused(text: str):
    with pytest.raises(BankError, match="s3://BUCKET/PREFIX"):
        MemoryBank(text)


def test_an_address_that_became_a_path_is_refused():
    with pytest.raises(BankError, match="as text"):
        MemoryBank(Path("s3://bucket/x"))
    assert place_of("s3") == Path("s3") and str(place_of("s3://bucket/a/b/")) == "s3://bucket/a/b"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("AWS_SECRET_ACCESS_KEY", "", "set AWS_SECRET_ACCESS_KEY in the environment"),
        ("AWS_ENDPOINT_URL", "localhost:9000", "AWS_ENDPOINT_URL is 'localhost:9000', and must be a URL"),
        pytest.param(
            "AWS_ENDPOINT_URL",
            "http://127.0.0.1:9",
            "[0-9]: Connection refused. If the store refuses or is not",
            marks=pytest.mark.seconds,
        ),
    ],
)
def test_an_environment_that_does_not_lead_to_a_store(
    address: str, monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
):
    monkeypatch.setenv(name, value)
    with pytest.raises(BankError, match=said):
        len(MemoryBank(address))


@pytest.mark.seconds
def test_a_bucket_that_is_missing(store: ObjectStore):
    with pytest.raises(BankError, match=r"s3://nobody/x: The specified bucket does not exist. If the store refuses"):
        MemoryBank("s3://nobody/x").write(entry(1))


@pytest.mark.slow
def test_an_evaluation_recalls_from_a_bank_on_a_store(address: str, tmp_path: Path):
    bank = MemoryBank(address)
    bank.write([entry(i) for i in range(9)])
    executor = "executor={model: zoo/household/executor, dtype: float32, instructions: none, max_new_tokens: 4}"
    settings = [f"memory.bank={address}", executor, "deliveries=[none, static]", "limit=1", "max_steps=1"]
    run_eval(load_config(EvalConfig, None, settings), tmp_path / "run")
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["bank"] == address and results["bank_version"] == bank.snapshot() == 2
    assert results["results"]["static"]["writing"]["entries"] == results["bank_entries"] == 9
