"""What is kept of a collection, counted, described and published."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import huggingface_hub
import pytest
import yaml
from datasets import load_dataset
from typer.testing import CliRunner

from configs.collect import CollectConfig
from configs.load import ConfigError
from configs.run_folder import RunFolder
from configs.training import SftConfig
from data_gen import dataset, leakage
from data_gen.rows import SftRow, load_rows, save_rows
from envs.base import Task
from envs.manifest import Manifest
from memcompiler.cli import app
from memcompiler.collection import run_collect
from tests.data_gen.made_rows import row

NOTHING, GUIDE, NOTE, BOTH = ".", "> go to shelf 1", "+ shelf 1: empty", "> go to shelf 1\n+ shelf 1: empty"


def of_kinds(*counts: int) -> list[SftRow]:
    emissions = [e for e, n in zip((NOTHING, GUIDE, NOTE, BOTH), counts, strict=True) for _ in range(n)]
    return [row(i, emission=emission, image=None, history=()) for i, emission in enumerate(emissions)]


# -- filters ----------------------------------------------------------------------------------------------------------


def test_rows_with_nothing_to_say_are_thinned() -> None:
    kept = dataset.thin_noaction(of_kinds(400, 5, 5, 5), 0.25, seed=0)
    counts = dataset.statistics(kept)["emissions"]
    assert counts["EXPERIENCE"] == counts["BRIEF"] == counts["HYBRID"] == 5 and 70 < counts["NOACTION"] < 130


def test_settings_choose_filters_and_what_they_drop_is_counted() -> None:
    rows = [*of_kinds(6, 2, 2, 0), *of_kinds(0, 1, 0, 0), replace(row(7), success=False)]
    kept, dropped = dataset.filter_rows(rows, CollectConfig())
    assert (kept, dropped) == (rows[:-1], {"unsuccessful": 1})
    everything = CollectConfig(successful_only=False)
    assert dataset.filter_rows(rows, everything) == (rows, {})
    kept, dropped = dataset.filter_rows(rows, CollectConfig(keep_noaction=0.0))
    assert dropped == {"unsuccessful": 1, "noaction": 6} and len(kept) == 5


# -- statistics -------------------------------------------------------------------------------------------------------


def test_statistics_by_hand() -> None:
    first = [row(0, t=t, steps=3, emission=e, action=a) for t, e, a in ((0, GUIDE, "go to x"), (2, ".", "take x"))]
    again = [
        row(0, t=0, steps=1, success=False, memory_ids=("a",), memory_texts=("x",), image=None)
    ]  # the same task, played once more
    found = dataset.statistics([*first, *again])
    assert (found["rows"], found["episodes"], found["tasks"], found["with_picture"]) == (3, 2, 1, 2)
    assert found["success_rate"] == 0.5 and found["verbs"] == {"go": 2, "take": 1}
    assert found["emissions"] == {"NOACTION": 2, "EXPERIENCE": 1}
    assert found["steps_per_episode"] == {"mean": 2, "min": 1, "median": 3, "p95": 3, "max": 3}
    assert found["memory_entries"]["mean"] == pytest.approx(1 / 3, abs=0.01)
    assert found["characters"]["emission"] == {"mean": 5.67, "min": 1, "median": 1, "p95": 15, "max": 15}
    read = dataset.compiler_text(first[0])
    assert first[0].observation in read and found["characters"]["compiler input"]["min"] <= len(read)
    assert "tokens" not in found
    by_word = lambda text, add_special_tokens: {"input_ids": text.split()}
    assert dataset.statistics(first, by_word)["tokens"]["emission"]["max"] == 5  # > go to shelf 1
    assert dataset.statistics([row(0, steps=0)])["steps_per_episode"] is None  # rows of an older version


# -- a collection -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("collect") / "run"
    scenes = {"train": 2, "test": 1}
    run_collect(CollectConfig(env={"scenes": scenes}, limit=8, max_steps=7), out, "raise")  # type: ignore[arg-type]
    return out


def test_a_collection_counts_plots_and_describes_itself(collected: Path) -> None:
    summary = json.loads((collected / "collect.json").read_text())
    found = json.loads((collected / "statistics.json").read_text())
    rows = load_rows(collected / "rows")
    assert 0 < summary["successes"] < summary["episodes"] == 8  # 7 steps are too few for some
    assert summary["dropped"]["unsuccessful"] > 0 and found["dropped"] == summary["dropped"]
    assert found["rows"] == summary["rows"] == len(rows) and all(r.success for r in rows)
    assert found["played"] == {"episodes": 8, "successes": summary["successes"]}
    assert found["episodes"] == summary["successes"]
    card = (collected / "rows" / "README.md").read_text()
    _, front, text = card.split("---\n", 2)
    assert yaml.safe_load(front)["license"] == "apache-2.0" and yaml.safe_load(front)["size_categories"] == ["n<1K"]
    manifest = Manifest.read(collected / "manifest.json")
    for fact in (
        f"| {manifest.sha256} |",
        "| leakage | isolated",
        "| teacher | the environment's expert |",
        f"unsuccessful {summary['dropped']['unsuccessful']}",
        "| split | train |",
    ):
        assert fact in text, fact
    assert {name for names in dataset.FIELDS for name in names.split(", ")} == set(SftRow.__dataclass_fields__)
    assert str(collected) not in card


def test_a_card_without_records_says_so(tmp_path: Path) -> None:
    made = dataset.provenance(tmp_path / "rows")
    assert made["environment"] == made["teacher"] == made["split"] == "unknown" and made["leakage"] == "not checked"
    card = dataset.dataset_card(made | {"environment": "scienceworld"}, dataset.statistics([row(0)]))
    assert "license: other" in card and "come from scienceworld and stay under its terms" in card
    (tmp_path / "leakage.json").write_text(json.dumps({"clean": False}))
    assert "LEAKS" in dataset.provenance(tmp_path / "rows")["leakage"]
    (tmp_path / "leakage.json").write_text("{")
    with pytest.raises(ValueError, match=r"leakage\.json is damaged"):
        dataset.provenance(tmp_path / "rows")


def test_inspect_prints_what_rows_hold(collected: Path, repository: Path) -> None:
    tokenizer = str(repository / "zoo" / "household" / "compiler")
    result = CliRunner().invoke(app, ["data", "inspect", str(collected / "r*"), "--tokenizer", tokenizer])
    assert result.exit_code == 0, result.output
    for said in ("steps per episode", "compiler input, tokens", "played: 8 episodes", "NOACTION", "take"):
        assert said in result.output
    twice = CliRunner().invoke(app, ["data", "inspect", *[str(collected / "rows")] * 2])
    assert f"{len(load_rows(collected / 'rows'))} rows" in twice.output
    nothing = CliRunner().invoke(app, ["data", "inspect", str(collected / "nothing")])
    assert nothing.exit_code == 1 and "memcompiler collect" in nothing.output and "Traceback" not in nothing.output


# -- the hub ----------------------------------------------------------------------------------------------------------


class FakeHub:
    calls: ClassVar[list] = []
    folder: ClassVar[Path]

    def create_repo(self, repo: str, **kwargs: object) -> None:
        self.calls.append((repo, kwargs))

    def upload_folder(self, repo_id: str, repo_type: str, folder_path: str) -> None:
        self.calls.append((repo_id, repo_type))
        shutil.copytree(folder_path, self.folder)


def test_push_uploads_rows_that_load_dataset_gives_back(
    collected: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub)
    FakeHub.calls, FakeHub.folder = [], tmp_path / "hub"
    monkeypatch.setattr(dataset, "SHARD_BYTES", 20_000)
    result = CliRunner().invoke(app, ["data", "push", str(collected / "rows"), "someone/rows"])
    assert result.exit_code == 0 and "hub:datasets/someone/rows" in result.output, result.output
    assert FakeHub.calls == [
        ("someone/rows", {"repo_type": "dataset", "private": True, "exist_ok": True}),
        ("someone/rows", "dataset"),
    ]
    assert (FakeHub.folder / "README.md").read_text() == (collected / "rows" / "README.md").read_text()
    assert len(list((FakeHub.folder / "data").glob("*.parquet"))) > 1
    rows = load_rows(collected / "rows")
    found = load_dataset(str(FakeHub.folder), cache_dir=str(tmp_path / "cache"))["train"]
    assert [(r["task_id"], r["t"], r["emission"]) for r in found] == [(r.task_id, r.t, r.emission) for r in rows]
    assert found[0]["image"].size == (64, 64)
    found.save_to_disk(str(tmp_path / "back"))
    assert load_rows(tmp_path / "back") == rows


def test_push_of_nothing_or_of_several_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="memcompiler collect"):
        dataset.push_rows(tmp_path / "none", "someone/rows")
    for name in ("a", "b"):
        save_rows([row(0)], tmp_path / name)
    with pytest.raises(ValueError, match="2 folders"):
        dataset.push_rows(tmp_path / "*", "someone/rows")


# -- several collections in one training ------------------------------------------------------------------------------


def shard(folder: Path, benchmark: str, *ids: str, clean: bool | None = True) -> Path:
    tasks = [Task(name, "put a mug", "home 1", "train", "", isolation={"scene": (name,)}) for name in ids]
    save_rows([row(0, task_id=name) for name in ids], folder / "rows")
    manifest = Manifest.of(benchmark, tasks)
    manifest.write(folder / "manifest.json")
    audit = {"clean": clean, "train_sha256": manifest.sha256, "verdict": None}
    (folder / "leakage.json").write_text(json.dumps(audit))
    return folder / "rows"


def test_tasks_and_verdicts_of_several_collections_go_along_together(tmp_path: Path) -> None:
    folders = [shard(tmp_path / "1", "household", "a", "b"), shard(tmp_path / "2", "household", "b", "c")]
    run = RunFolder.create(tmp_path / "sft", SftConfig(rows=("x", "y")), on_exists="raise")
    leakage.copy_rows_manifest(run, folders, [])
    manifest = Manifest.read(run.path / "manifest.json")
    assert [task.id for task in manifest.tasks] == ["a", "b", "c"]
    audit = json.loads((run.path / "leakage.json").read_text())
    assert audit["clean"] is True and audit["train_sha256"] == manifest.sha256 and len(audit["rows"]) == 2
    leakage.copy_rows_manifest(run, [*folders, shard(tmp_path / "3", "household", "d", clean=None)], [])
    assert json.loads((run.path / "leakage.json").read_text())["clean"] is None


def test_tasks_and_verdicts_of_several_benchmarks_are_recorded_apart(tmp_path: Path) -> None:
    folders = [shard(tmp_path / "1", "household", "a"), shard(tmp_path / "2", "scienceworld", "a", clean=False)]
    folders.append(shard(tmp_path / "3", "household", "b"))
    run = RunFolder.create(tmp_path / "sft", SftConfig(rows=("x", "y")), on_exists="raise")
    leakage.copy_rows_manifest(run, folders, ["they leak"])
    assert not (run.path / "manifest.json").exists() and not (run.path / "leakage.json").exists()
    homes = Manifest.read(run.path / "manifest-household.json")
    assert (homes.benchmark, sorted(homes.ids)) == ("household", ["a", "b"])
    assert Manifest.read(run.path / "manifest-scienceworld.json").ids == {"a"}
    verdict = lambda name: json.loads((run.path / f"leakage-{name}.json").read_text())["clean"]
    assert verdict("household") is True and verdict("scienceworld") is False


def test_training_checks_every_folder(tmp_path: Path) -> None:
    from training.sft import train_sft

    shard(tmp_path / "1", "household", "a")
    (shard(tmp_path / "2", "household", "b").parent / "manifest.json").unlink()
    with pytest.raises(ConfigError, match=r"2/rows: no manifest"):
        train_sft(SftConfig(rows=str(tmp_path / "*" / "rows")), tmp_path / "sft")
    assert not (tmp_path / "sft").exists()
