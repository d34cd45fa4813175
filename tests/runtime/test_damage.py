"""Damaged disks: a flipped bit, a missing or cut file in whatever is read back is named and never read as data."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
from pydantic import BaseModel

from agent.records import read_episodes
from compiler import checkpoint
from configs.load import ConfigError, read_yaml
from configs.proxy import SessionsConfig
from configs.run_folder import CONFIG, ENVIRONMENT, RunFolder
from data_gen.rows import load_rows, save_rows
from envs.base import Task
from envs.manifest import Manifest
from eval.runs import EpisodeRecord
from lm.answer_cache import Answer, AnswerCache, EndpointStop
from memory.bank import MemoryBank
from memory.entry import MemoryEntry, Provenance
from memory.journal import Journal, Row
from memory.protocol import BankError, Record, Trace
from memory.similarity import CachedEmbed
from proxy.sessions import ProxyStep, SessionStore
from runtime.checksums import SUMS, check_folder, parse_row, record_files, record_folder, row_line, sums
from runtime.store import JsonLines, RecordError, atomic_file, read_json, write_recorded
from tests.fakes import one_step_episode
from tests.training.sft_trainers import ROWS, trainer

NAMED = (ValueError, BankError, ConfigError, RecordError, checkpoint.CheckpointError, EndpointStop)
TASKS = [Task(f"t{i}", "put a mug in cabinet", "home 1", "train", "put") for i in range(3)]


class Settings(BaseModel):
    steps: int = 1


# -- what is on disk, made as the commands make it: each maker returns the reader of its files ------------------------

Reader = Callable[[], Any]


def episodes(folder: Path) -> Reader:
    record = EpisodeRecord(folder)
    for task in TASKS:
        record.append(one_step_episode(task.id))
    return lambda: [each.to_json() for each in read_episodes(record.lines.path)]


def journal(folder: Path) -> Reader:
    traces = [Trace(task, (Record(0, "a", "look", "b"),), True) for task in TASKS]
    Journal(folder).append([Row((trace,), {}) for trace in traces])
    return lambda: list(Journal(folder))


def sessions(folder: Path) -> Reader:
    store = SessionStore(folder, SessionsConfig())
    store.add(store.use("s", "a goal", "home 1"), ProxyStep("k", None, "a view"))
    return lambda: [step.to_json() for each in SessionStore(folder, SessionsConfig()) for step in each.steps.values()]


def vectors(folder: Path) -> Reader:
    embed: Any = lambda texts: np.array([[len(text), 1.0] for text in texts], dtype=np.float32)
    CachedEmbed(embed, folder)(["a", "bc"])
    return lambda: CachedEmbed(embed, folder)(["a", "bc"]).tolist()


def bank(folder: Path) -> Reader:
    for task in TASKS:
        origin = Provenance(task_id=task.id, scene="home 1", goal=task.goal, split="train", success=True)
        MemoryBank(folder).write(MemoryEntry(task.id, f"{task.id} was done", origin))
    return lambda: MemoryBank(folder).entries()


def rows(folder: Path) -> Reader:
    save_rows(ROWS, folder)
    return lambda: load_rows(folder)


def manifest(folder: Path) -> Reader:
    Manifest.of("household", TASKS).write(folder / "manifest.json")
    return lambda: Manifest.read(folder / "manifest.json")


def run(folder: Path) -> Reader:
    opened = RunFolder.create(folder, Settings())
    opened.write_json("results.json", {"success": 0.5})
    opened.record(device="cpu")
    opened.metrics.append({"step": 1, "loss": 0.25})
    return lambda: (
        read_yaml(folder / CONFIG),
        *(read_json(folder / name) for name in (ENVIRONMENT, "results.json")),
        list(JsonLines(folder / "metrics.jsonl")),
    )


MAKERS = {make.__name__: make for make in (episodes, journal, sessions, vectors, bank, rows, manifest, run)}
UNREAD = (".lock", "hint.json", ".txn")  # holds no data


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(UNREAD))


def flips(path: Path, n: int) -> Iterable[bytes]:
    """Contents of the file with one bit flipped each."""
    raw, rng = path.read_bytes(), Random(path.suffix)
    for at in sorted(rng.sample(range(len(raw)), min(n, len(raw)))):
        yield raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :]


def cuts(path: Path) -> Iterable[bytes]:
    """Contents of the file cut at its beginning, middle and last byte."""
    raw = path.read_bytes()
    return [raw[:size] for size in (0, len(raw) // 2, len(raw) - 1)]


class Damage(NamedTuple):
    """What is read of a file with other contents."""

    path: Path
    before: bytes
    damaged: bytes
    found: Any


def damaging(read: Reader, folder: Path, contents: Callable[[Path], Iterable[bytes]]) -> Iterator[Damage]:
    """Give each file other contents, one after the other; yield what is read then, and restore the file."""
    for path in files_in(folder):
        before = path.read_bytes()
        for damaged in contents(path):
            path.write_bytes(damaged)
            yield Damage(path, before, damaged, reading(read, path))
        path.write_bytes(before)


def reading(read: Reader, path: Path) -> Any:
    """Read; None where that fails with one line that names the file, or what it is part of."""
    try:
        return read()
    except NAMED as error:
        said = str(error)
        assert path.name in said or path.parent.name in said, said
        assert "\n" not in said
        return None


@pytest.mark.parametrize("kind", MAKERS)
def test_a_flipped_bit_is_named_and_never_read_as_data(kind: str, tmp_path: Path) -> None:
    read = MAKERS[kind](tmp_path)
    whole = read()
    for path, before, damaged, found in damaging(read, tmp_path, lambda path: flips(path, 12)):
        # A flipped last line break makes the last row a torn one, which is not read; nothing is made up.
        torn = isinstance(found, list) and found == whole[: len(found)] and before[-1:] != damaged[-1:]
        assert found is None or found == whole or torn, f"{path.name}: {found}"
    assert read() == whole


@pytest.mark.parametrize("kind", MAKERS)
def test_a_cut_file_is_named_or_costs_its_last_row(kind: str, tmp_path: Path) -> None:
    read = MAKERS[kind](tmp_path)
    whole = read()
    for path, _, damaged, found in damaging(read, tmp_path, cuts):
        if kind not in ("run", "vectors"):  # fewer rows of metrics; vectors are computed again
            rest = isinstance(found, list) and found == whole[: len(found)]
            assert found is None or found == whole or rest, f"{path.name} of {len(damaged)} bytes: {found}"


@pytest.mark.seconds
def test_every_flipped_bit_of_a_checkpoint_is_named(tmp_path: Path) -> None:
    trained = trainer(tmp_path, max_steps=2, vlm=False)
    list(trained.steps())
    found = checkpoint.find(tmp_path)
    assert {"state.json", "projector.json", "optimizer.safetensors"} <= sums(found).keys()
    for path in [path for path in files_in(found) if path.suffix in (".json", ".safetensors") or path.name == SUMS]:
        before = path.read_bytes()
        for damaged in flips(path, 4):
            path.write_bytes(damaged)
            with pytest.raises(checkpoint.CheckpointError, match=path.name.replace(".", r"\.")):
                trainer(tmp_path, max_steps=2, vlm=False).resume()
        path.write_bytes(before)
    assert trainer(tmp_path, max_steps=2, vlm=False).resume()


def test_every_single_bit_of_a_row_is_covered() -> None:
    row = {"task": "put a mug", "n": [1, 2.5, None], "ok": True}
    line = row_line(json.dumps(row))
    assert parse_row(line) == row == parse_row(json.dumps(row).encode())  # a row without a checksum is read
    for at in range(len(line) - 1):
        for bit in range(8):
            flipped = line[:at] + bytes([line[at] ^ 1 << bit]) + line[at + 1 :]
            with pytest.raises(ValueError):
                parse_row(flipped)


def test_a_flipped_bit_of_a_cached_answer_is_named(tmp_path: Path) -> None:
    cache = AnswerCache(tmp_path / "answers.sqlite", "m")
    cache.keep("k", "teacher", Answer("go to shelf 1", 7, 3))
    cache.keep_vectors({"v": b"12345678"}, "embed", 2)
    assert cache.answer("k") == Answer("go to shelf 1", 7, 3) and cache.vectors(["v", "w"]) == {"v": b"12345678"}
    for statement in ("UPDATE answers SET text = 'go to shelf 3'", "UPDATE vectors SET vector = x'0102030405060708'"):
        cache._db.execute(statement)
    for read in (lambda: cache.answer("k"), lambda: cache.vectors(["v"])):
        with pytest.raises(EndpointStop, match=r"answers\.sqlite is damaged .*delete the file"):
            read()
    cache._db.execute("DELETE FROM checksums")  # as a file of an earlier version
    assert cache.answer("k") == Answer("go to shelf 3", 7, 3)


# -- checksums --------------------------------------------------------------------------------------------------------


def test_sha256sum_checks_the_same_files(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for name in ("a/x.json", "y.json"):
        (tmp_path / name).write_text("{}")
    record_folder(tmp_path)
    checked = subprocess.run(["sha256sum", "--check", SUMS], cwd=tmp_path, capture_output=True, text=True)
    assert checked.returncode == 0 and checked.stdout.splitlines() == ["a/x.json: OK", "y.json: OK"]
    (tmp_path / "y.json").unlink()
    with pytest.raises(RecordError, match=r"y\.json is missing"):
        check_folder(tmp_path)
    check_folder(tmp_path, "a/x.json")


def test_a_kill_at_any_time_of_a_replacement_leaves_a_valid_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.json"
    path.write_text('{"n": 1}')  # of an earlier version, without a checksum
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(OSError, match="full"):
            write_recorded(path, '{"n": 2}')
    assert read_json(path) == {"n": 1}
    write_recorded(path, '{"n": 2}')
    assert read_json(path) == {"n": 2} and len(sums(tmp_path)["state.json"]) == 2
    listed = (tmp_path / SUMS).read_bytes()
    (tmp_path / SUMS).write_bytes(listed + b"0123")  # torn by a kill
    assert read_json(path) == {"n": 2}
    (tmp_path / "x").write_text("")
    record_files(tmp_path, ["x"])
    assert sums(tmp_path).keys() == {"state.json", "x"}


def test_a_bank_that_a_kill_left_without_checksums_gets_them_with_the_next_write(tmp_path: Path) -> None:
    read = bank(tmp_path)
    listed = (tmp_path / SUMS).read_bytes()
    (tmp_path / SUMS).write_bytes(listed[: listed.rfind(b"\n", 0, -1) + 1])
    assert len(read()) == 3
    other = MemoryBank(tmp_path)
    other.write(MemoryEntry("more", "more", Provenance(task_id="x", scene="", goal="", split="train", success=True)))
    data = [name for name in sums(tmp_path) if name.endswith(".lance")]
    assert len(data) == 4 == len(list((tmp_path / "entries.lance" / "data").iterdir()))


# -- full and read-only disks -----------------------------------------------------------------------------------------


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("kind", ["episodes", "journal", "run", "bank"])
def test_a_full_disk_is_named_and_costs_no_earlier_row(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = MAKERS[kind](tmp_path)
    whole = read()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left on device") as caught:
            JsonLines(tmp_path / "other.jsonl").append({"n": 1})
        assert caught.value.filename == str(tmp_path / "other.jsonl")
        with pytest.raises(OSError, match=r"No space.*whole\.json"), atomic_file(tmp_path / "whole.json") as file:
            file.write(b"{}")
        if kind != "run":
            with pytest.raises((OSError, BankError), match="No space left on device"):
                (tmp_path / "new").mkdir()
                MAKERS[kind](tmp_path / "new")
    assert not (tmp_path / "whole.json").exists() and read() == whole


def test_a_read_only_folder_is_read_and_refuses_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write anywhere, so opening for writing fails as on a disk that is mounted read-only."""
    readers = {name: MAKERS[name](tmp_path / name) for name in ("journal", "bank", "rows")}
    wanted = {name: read() for name, read in readers.items()}
    opened = Path.open

    def read_only(path: Path, mode: str = "r", *rest: Any, **named: Any) -> Any:
        if set(mode) & set("wax+"):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return opened(path, mode, *rest, **named)

    monkeypatch.setattr(Path, "open", read_only)
    assert {name: read() for name, read in readers.items()} == wanted
    for write in (lambda: journal(tmp_path / "journal2"), lambda: write_recorded(tmp_path / "a.json", "{}")):
        with pytest.raises(OSError, match=r"Read-only file system: '.*(journal2|a\.json|SHA256SUMS)"):
            write()
