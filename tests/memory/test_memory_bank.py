"""The bank on disk: round trips, versions, idempotent and concurrent appends, kill -9, damage, exchange."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envs.base import Task
from memory.bank import MemoryBank
from memory.bank_table import CROWDED, BankError, make_schema
from memory.entry import MemoryEntry, Provenance, WriteResult
from memory.protocol import MemorySystem, Record, Trace
from memory.retrieval import BankRanker
from memory.trajectory import EntryText
from tests.memory.entries import entry

TASK = Task("none", "put a hot mug in cabinet", "home 1", "test", "")


def ids(entries) -> list[str]:
    return [e.id for e in entries]


@pytest.fixture
def bank(tmp_path: Path) -> MemoryBank:
    return MemoryBank(tmp_path / "bank")


# -- round trips ------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read_back_in_order(bank: MemoryBank):
    written = [entry(i, images=i % 3) for i in (3, 1, 2, 0)]
    assert bank.write(written[0]) == WriteResult(1) and bank.write(written[1:]) == WriteResult(3)
    for reader in (bank, MemoryBank(bank.path)):
        assert reader.entries() == list(reader) == written and len(reader) == 4
        assert reader["e00002"] == written[2]
    with pytest.raises(KeyError, match="e9"):
        bank["e9"]
    assert isinstance(bank, MemorySystem)


def test_iterating_reads_in_batches_and_in_order(bank: MemoryBank):
    for start in range(0, 300, 100):
        bank.write([entry(i) for i in range(start, start + 100)])
    bank.snapshot()
    assert ids(bank) == [f"e{i:05}" for i in range(300)]


anything = st.text(st.characters(blacklist_categories=()), max_size=40)  # lone surrogates included


@given(
    anything.filter(bool), anything, anything, anything, anything, anything, st.lists(anything), st.lists(st.binary())
)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_string_is_data(tmp_path_factory, id, text, task, scene, goal, split, actions, images):
    bank = MemoryBank(tmp_path_factory.getbasetemp() / "any")
    made = MemoryEntry(id, text, Provenance(task, scene, goal, split, False, tuple(actions), "x"), tuple(images))
    bank.write(made)
    clean = json.loads(json.dumps(id).encode("ascii")).encode("utf-8", "replace").decode()
    found = bank[id]
    assert found.id == clean and bank.write(made) == WriteResult(0, 1)
    if json.dumps(text).count("\\ud") == 0 and len(bank) == 1:
        assert found.text == text and found.images == tuple(images)


def test_surrogates_are_replaced_and_the_rest_is_kept(bank: MemoryBank):
    bank.write(MemoryEntry("a\ud800", "b\udcff é\0'", Provenance("t", "s", "g", "train", True)))
    assert bank["a\ud800"] == bank["a?"] and bank["a?"].text == "b? é\0'"


def test_an_entry_without_an_id_is_refused(bank: MemoryBank):
    with pytest.raises(ValueError, match="needs an id"):
        bank.write([entry(1), MemoryEntry("", "x", entry(1).provenance)])
    assert not bank.path.exists()


# -- appending --------------------------------------------------------------------------------------------------------


def test_a_known_id_is_ignored_and_counted(bank: MemoryBank):
    assert bank.write([entry(1), entry(2), entry(1)]) == WriteResult(2, 1)
    version = bank.snapshot()
    changed = MemoryEntry("e00001", "other text", entry(1).provenance)
    assert bank.write([changed, entry(2)]) == WriteResult(0, 2) and bank.snapshot() == version
    assert bank["e00001"] == entry(1)
    other = MemoryBank(bank.path)
    assert other.write([changed, entry(3)]) == WriteResult(1, 1)
    assert bank.write([entry(3), entry(4)]) == WriteResult(1, 1) and ids(bank) == [
        "e00001",
        "e00002",
        "e00003",
        "e00004",
    ]


def test_concurrent_writers_never_store_an_id_twice(bank: MemoryBank):
    bank.write([])
    counts = []

    def write() -> None:
        own = MemoryBank(bank.path)
        for i in range(15):
            counts.append(own.write([entry(j) for j in range(2 * i, 2 * i + 2)]).added)

    threads = [threading.Thread(target=write) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert sorted(ids(bank)) == [f"e{i:05}" for i in range(30)] and sum(counts) == 30


def test_reading_while_another_writes(bank: MemoryBank):
    bank.write([entry(i) for i in range(100)])
    reader = MemoryBank(bank.path)
    running = iter(reader)
    seen = [next(running).id]
    bank.write([entry(i) for i in range(100, 130)])
    bank.snapshot()
    seen += ids(running)
    assert seen == [f"e{i:05}" for i in range(100)]  # the version in which iteration began
    assert len(reader) == 130 and ids(reader.retrieve([TASK], 200)[0])  # a new read sees everything

    def write() -> None:
        for i in range(130, 150):
            bank.write(entry(i))

    thread = threading.Thread(target=write)
    thread.start()
    lengths = []
    while thread.is_alive():
        lengths.append(len(reader))
        assert len(reader.retrieve([TASK], 4)[0]) == 4
    thread.join()
    assert lengths == sorted(lengths) and len(reader) == 150


WRITER = """
import sys
from tests.memory.entries import entry
from memory.bank import MemoryBank
bank = MemoryBank(sys.argv[1])
for i in range(int(sys.argv[2]), 10**6):
    bank.write(entry(i, images=2))
    print(i, flush=True)
    if i % 5 == 0:
        bank.snapshot()
"""


@pytest.mark.slow
def test_kill_9_between_and_within_appends(tmp_path: Path):
    path, start = tmp_path / "bank", 0
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(Path(__file__).parent)])}
    for appends in (1, 13, 14):
        command = [sys.executable, "-c", WRITER, str(path), str(start)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=root) as writer:
            assert writer.stdout is not None
            confirmed = [int(writer.stdout.readline()) for _ in range(appends)][-1]
            writer.send_signal(signal.SIGKILL)
            confirmed = max([confirmed, *map(int, writer.stdout.read().split())])
        bank = MemoryBank(path)
        n = len(bank)
        assert n >= confirmed + 1 and bank.entries() == [entry(i, images=2) for i in range(n)]
        assert len(bank.retrieve([TASK])[0]) == 4 or n < 4
        start = n
    assert MemoryBank(path).write([entry(0), entry(start)]) == WriteResult(1, 1)


def open_and_write(folder: Path, number: int, rounds: int, together: Any, said: Any) -> None:
    """One of several processes, each of which begins every bank at the same moment as the others."""
    for round in range(rounds):
        bank = MemoryBank(folder / str(round))
        together.wait()
        try:
            bank.write([] if number == 0 else entry(99))
            bank.write([entry(2 * number), entry(2 * number + 1), entry(99)])
            bank.snapshot()
            said.put("")
        except Exception as error:  # whatever it is, the test tells it
            said.put(f"round {round}, process {number}: {error!r}")


@pytest.mark.slow
def test_processes_that_begin_one_bank_at_the_same_moment_all_get_it(tmp_path: Path):
    processes, rounds = 3, 8
    context = multiprocessing.get_context("spawn")
    together, said = context.Barrier(processes), context.Queue()
    shared = (rounds, together, said)
    started = [context.Process(target=open_and_write, args=(tmp_path, i, *shared)) for i in range(processes)]
    for process in started:
        process.start()
    assert [said.get(timeout=120) for _ in range(processes * rounds)] == [""] * processes * rounds
    for process in started:
        process.join(30)
    for round in range(rounds):
        assert sorted(ids(MemoryBank(tmp_path / str(round)))) == [f"e{i:05}" for i in (*range(2 * processes), 99)]


# -- versions ---------------------------------------------------------------------------------------------------------


def test_a_view_never_sees_later_rows(bank: MemoryBank):
    versions = {}
    for i in range(6):
        bank.write([entry(2 * i), entry(2 * i + 1)])
        versions[i] = bank.snapshot()
        assert bank.snapshot() == versions[i]  # nothing written, nothing new
    for i, version in versions.items():
        for view in (bank.at(version), MemoryBank(bank.path).at(version), bank.at(versions[5]).at(version)):
            assert len(view) == 2 * i + 2 and view.snapshot() == version == view.inspect()["version"]
            assert max(ids(view.retrieve([TASK], 100)[0])) == max(ids(view)) == f"e{2 * i + 1:05}"
            with pytest.raises(KeyError):
                view[f"e{2 * i + 2:05}"]
    view = bank.at(versions[2])
    before = view.entries()
    bank.write(entry(99))
    bank.snapshot()
    assert view.entries() == before and len(view) == 6


def test_a_view_refuses_to_be_written(bank: MemoryBank, tmp_path: Path):
    bank.write(entry(1))
    view = bank.at(bank.snapshot())
    bank.export_jsonl(tmp_path / "x.jsonl")
    for write in (
        lambda: view.write(entry(2)),
        lambda: view.write([]),
        lambda: view.import_jsonl(tmp_path / "x.jsonl"),
    ):
        with pytest.raises(BankError, match="read-only view: write to MemoryBank"):
            write()
    assert len(bank) == 1


@pytest.mark.parametrize("version", [0, -1, 999])
def test_a_version_that_does_not_exist(bank: MemoryBank, version: int):
    bank.write(entry(1))
    newest = bank.snapshot()
    with pytest.raises(BankError, match=f"no version {version}: choose one from 1 to {newest}"):
        bank.at(version)


@pytest.mark.slow
def test_many_small_writes_are_merged_and_no_version_is_lost(bank: MemoryBank):
    versions = []
    for i in range(CROWDED + 3):
        bank.write(entry(i, images=1))
        versions.append(bank.snapshot())
    fragments = bank._open().stats()["fragment_stats"]["num_fragments"]
    assert fragments < 8
    assert [len(bank.at(v)) for v in versions] == list(range(1, CROWDED + 4))
    assert bank.entries() == [entry(i, images=1) for i in range(CROWDED + 3)]


# -- missing, damaged, of another kind --------------------------------------------------------------------------------


READS = {
    "len": len,
    "entries": MemoryBank.entries,
    "snapshot": MemoryBank.snapshot,
    "inspect": MemoryBank.inspect,
    "at": lambda b: b.at(1),
    "get": lambda b: b["x"],
    "retrieve": lambda b: b.retrieve([TASK])[0],
}


@pytest.mark.parametrize("read", READS)
def test_reading_a_missing_bank(bank: MemoryBank, read: str):
    with pytest.raises(BankError, match=r"no memory bank at .*memcompiler collect.*memcompiler bank import"):
        READS[read](bank)
    assert not bank.path.exists()
    bank.path.mkdir()  # as good as missing
    with pytest.raises(BankError, match="no memory bank at"):
        READS[read](bank)


def test_an_empty_bank_is_a_bank(tmp_path: Path):
    for bank in (MemoryBank(tmp_path / "a"), MemoryBank(tmp_path / "b")):
        assert bank.write([]) == WriteResult(0, 0)
        assert len(bank) == 0 and bank.entries() == [] and bank.snapshot() == bank.snapshot() >= 1
        assert bank.retrieve([TASK])[0] == [] and bank.retrieve([TASK, TASK]) == [[], []]
        assert bank.inspect()["entries"] == 0 and bank.export_jsonl(tmp_path / "x.jsonl") == 0
        assert len(MemoryBank(bank.path)) == 0


def test_a_process_killed_while_making_the_bank(bank: MemoryBank):
    (bank.path / "entries.lance" / "data").mkdir(parents=True)
    with pytest.raises(BankError, match="no memory bank at"):
        len(bank)
    assert bank.write(entry(1)) == WriteResult(1) and bank.entries() == [entry(1)]


def test_a_file_and_a_folder_of_something_else(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    for use in (len, lambda b: b.write(entry(1))):
        with pytest.raises(BankError, match="is a file, not a memory bank"):
            use(MemoryBank(tmp_path / "file"))
        with pytest.raises(BankError, match="not a memory bank and not empty"):
            use(MemoryBank(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_a_table_of_something_else(tmp_path: Path):
    import lancedb

    lancedb.connect(tmp_path / "other").create_table("entries", [{"id": "1", "x": 1}])
    with pytest.raises(BankError, match="not a memory bank of this version of MemCompiler: no column 'actions'"):
        MemoryBank(tmp_path / "other").write(entry(1))


@pytest.mark.parametrize("part", ["_versions", "data"])
def test_damaged_files(bank: MemoryBank, part: str):
    bank.write([entry(i) for i in range(5)])
    bank.snapshot()
    for file in (bank.path / "entries.lance" / part).iterdir():
        file.write_bytes(b"junk")
    with pytest.raises(BankError, match=r"missing or damaged.*import an export"):
        MemoryBank(bank.path).entries()


def test_a_bank_that_disappears(bank: MemoryBank):
    bank.write([entry(i) for i in range(5)])
    assert len(bank) == 5
    shutil.rmtree(bank.path / "entries.lance" / "data")
    with pytest.raises(BankError):
        bank.entries()
    shutil.rmtree(bank.path)
    for use in (len, MemoryBank.snapshot, lambda b: b.retrieve([TASK])[0], lambda b: b.write(entry(9))):
        with pytest.raises(BankError):
            use(bank)


# -- exchange and inspection ------------------------------------------------------------------------------------------


def test_export_and_import(bank: MemoryBank, tmp_path: Path):
    written = [entry(i, images=i % 4, success=i % 2 == 0, split=["train", "dév"][i % 2]) for i in range(150)]
    bank.write(written)
    file = tmp_path / "bank.jsonl"
    assert bank.export_jsonl(file) == 150 and [p.name for p in tmp_path.glob("bank.*")] == ["bank.jsonl"]
    other = MemoryBank(tmp_path / "other")
    other.write(entry(0))
    assert other.import_jsonl(file) == WriteResult(149, 1) and other.entries() == written
    version = other.snapshot()
    assert other.import_jsonl(file) == WriteResult(0, 150) and other.snapshot() == version
    again = tmp_path / "again.jsonl"
    other.export_jsonl(again)
    assert again.read_bytes() == file.read_bytes()
    assert ids(other.retrieve([TASK], 10)[0]) == ids(bank.retrieve([TASK], 10)[0])


@pytest.mark.parametrize("limit", ["IMPORT_BATCH", "IMPORT_BYTES"])
def test_an_import_in_several_commits(bank: MemoryBank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str):
    monkeypatch.setattr(f"memory.bank.{limit}", 20)
    written = [entry(i, images=2) for i in range(50)]
    bank.write(written)
    bank.export_jsonl(tmp_path / "x.jsonl")
    other = MemoryBank(tmp_path / "other")
    assert other.import_jsonl(tmp_path / "x.jsonl") == WriteResult(50) and other.entries() == written
    assert len(other.at(2)) in (20, 2)  # version 1 is the empty table


def test_an_empty_export_makes_an_empty_bank(bank: MemoryBank, tmp_path: Path):
    (tmp_path / "x.jsonl").write_text("\n")
    assert bank.import_jsonl(tmp_path / "x.jsonl") == WriteResult(0) and len(bank) == 0


GOOD = (
    '{"id": "a", "text": "b", "provenance": {"task_id": "t", "scene": "s", "goal": "g", "split": "p", "success": true}}'
)


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        "[]",
        "1",
        "{}",
        GOOD.replace('"b"', "1"),
        GOOD.replace("true", '"yes"'),
        GOOD.replace('"id"', '"di"'),
        GOOD.replace('"split"', '"splat"'),
        GOOD[:-1] + ', "images": ["%%%"]}',
        GOOD.replace('"g"', "null"),
    ],
)
def test_a_line_that_is_no_entry_is_named(bank: MemoryBank, tmp_path: Path, bad: str):
    file = tmp_path / "x.jsonl"
    file.write_text(f"{GOOD}\n\n{bad}\n")
    with pytest.raises(BankError, match=r"x\.jsonl:3: not a memory entry"):
        bank.import_jsonl(file)


def test_importing_a_missing_file_makes_no_bank(bank: MemoryBank, tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        bank.import_jsonl(tmp_path / "none.jsonl")
    assert not bank.path.exists()


def test_inspect(bank: MemoryBank):
    bank.write([entry(i, images=2 * (i == 0), success=i != 1, split="dev" if i == 2 else "train") for i in range(4)])
    version = bank.snapshot()
    assert json.loads(json.dumps(bank.inspect())) == {
        "path": str(bank.path),
        "version": version,
        "entries": 4,
        "successes": 3,
        "failures": 1,
        "scenes": 3,
        "images": 2,
        "text": "commands",
        "embedding": None,
        "by_split": {"dev": 1, "train": 3},
        "by_source": {"trajectory": 4},
        "by_scene": {"home 0": 2, "home 1": 1, "home 2": 1},
    }


# -- the form of the texts --------------------------------------------------------------------------------------------


def told(i: int, success: bool = True) -> Trace:
    where, thing = f"shelf {i % 4}", ("mug", "pen", "mug on a tray")[i % 3]
    task = Task(f"t{i}", f"put a {thing} in desk {i % 2}", f"home {i % 5}", "train", "")
    answer = f"You arrive at {where}. On the {where}, you see a mug 1, a pen 2, a desk 1 and a tray {i}."
    records = (Record(0, f"a desk 1, a shelf {i}, a mug", f"go to {where}", answer), Record(1, answer, "look", answer))
    return Trace(task, records, success, rationale=f"the {thing} was in {where}")


def test_raw_and_compact_entries_are_found_by_the_same_words(tmp_path: Path):
    banks = {form: MemoryBank(tmp_path / form, text=form) for form in get_args(EntryText)}
    for bank in banks.values():
        bank.commit([[told(i, i % 7 > 0)] for i in range(40)])
    tasks = [told(i).task for i in range(40)]
    raw, compact = ([[e.id for e in m] for m in banks[form].retrieve(tasks, 6)] for form in ("raw", "commands"))
    assert raw == compact
    entry = banks["raw"][raw[0][0]]
    assert "> look\n(as before)" in entry.text and "(as before)" not in banks["commands"][entry.id].text


def test_a_bank_keeps_the_form_of_its_texts(tmp_path: Path):
    raw, compact = MemoryBank(tmp_path / "raw", text="raw"), MemoryBank(tmp_path / "compact")
    for bank in (raw, compact):
        bank.commit([[told(1)]])
    assert MemoryBank(tmp_path / "raw").text == "raw" and MemoryBank(tmp_path / "compact", text="commands").text
    with pytest.raises(BankError, match=r"raw holds entries of text raw, not commands: set memory.settings.text=raw"):
        len(MemoryBank(tmp_path / "raw", text="commands"))
    with pytest.raises(BankError, match=r"raw holds entries of text raw, .*compact of text commands"):
        compact.merge_from(raw)
    raw.export_jsonl(tmp_path / "raw.jsonl")
    with pytest.raises(BankError, match=r"raw\.jsonl:1 holds entries of text raw"):
        compact.import_jsonl(tmp_path / "raw.jsonl")
    read = MemoryBank(tmp_path / "read")
    assert read.import_jsonl(tmp_path / "raw.jsonl").added == 1 and read.text == "raw"
    assert read.entries() == raw.entries() and raw.at(raw.snapshot()).text == "raw"


def test_a_bank_of_an_earlier_version_holds_commands(tmp_path: Path):
    import lancedb

    schema = make_schema(None, "").remove_metadata()
    lancedb.connect(tmp_path / "old").create_table("entries", schema=schema)
    assert MemoryBank(tmp_path / "old", text="commands").text == "commands"
    with pytest.raises(BankError, match="holds entries of text commands, not raw"):
        len(MemoryBank(tmp_path / "old", text="raw"))


def test_failed_episodes_are_stored_and_counted_but_not_recalled_where_outcomes_is_success(tmp_path: Path):
    every = MemoryBank(tmp_path / "bank")
    every.commit([[told(i, i % 2 > 0)] for i in range(20)])
    won = MemoryBank(tmp_path / "bank", successes_only=True)
    assert won.commit([[told(0, success=False)]]) == WriteResult(0, 1) and len(won.origins()) == len(won) == 20
    tasks = [told(i).task for i in range(20)]
    recalled = [entry.provenance.success for found in won.retrieve(tasks, 4) for entry in found]
    assert all(recalled) and len(recalled) == 80
    assert not all(entry.provenance.success for found in every.retrieve(tasks, 4) for entry in found)
    assert all(e.provenance.success for found in won.at(1).retrieve(tasks, 4) for e in found)


def test_reading_writes_nothing(bank: MemoryBank):
    bank.write([entry(i) for i in range(9)])
    files = {path: path.stat().st_mtime_ns for path in bank.path.rglob("*")}
    reader = MemoryBank(bank.path)
    assert reader.snapshot() == reader.snapshot() and len(reader.retrieve([TASK])[0]) == 4
    assert {path: path.stat().st_mtime_ns for path in bank.path.rglob("*")} == files


def test_recall_reads_what_was_added_since_the_last_one(bank: MemoryBank, monkeypatch: pytest.MonkeyPatch):
    read, add, own = [], BankRanker.add, bank._retriever

    def adding(self: BankRanker, rows: Any) -> None:
        if self is own:
            read.append(rows.num_rows)
        add(self, rows)

    monkeypatch.setattr(BankRanker, "add", adding)
    for entries in ([entry(i) for i in range(50)], [entry(50)], [entry(51), entry(52)]):
        bank.write(entries)
        assert bank.retrieve([TASK], 99) == bank.retrieve([TASK], 99) == MemoryBank(bank.path).retrieve([TASK], 99)
    assert read == [50, 1, 2]
