"""Living worlds evaluated: what is counted of sequences, and the directions that KARMA's tables have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs.evaluation import EvalConfig
from configs.load import load_config
from data_gen.memory_factory import open_memory
from eval.evaluate import run_eval
from eval.intervals import bootstrap_ratio
from eval.living import SubTask, columns, summarise_sequences
from eval.paper.tables import paper_table
from eval.runs import EPISODES, RESULTS
from memory.karma.system import object_of
from runtime.checksums import parse_row

SMALL = ["env.sequences={simple: 6, composite: 6, complex: 6}", "env.scenes={test: 18}"]


def evaluated(out: Path, *overrides: str, config: str = "eval/karma") -> dict[str, Any]:
    return run_eval(load_config(EvalConfig, config, [*SMALL, *overrides]), out)


def summary(results: dict[str, Any], name: str, family: str, metric: str) -> float | None:
    value = results["results"][name]["living"]["summary"][family][metric]
    return value and value["mean"]


def sequence(*stops: int, solved: bool = True, steps: int = 10) -> dict[str, Any]:
    return {"family": "simple", **columns([SubTask(solved, steps, n) for n in stops])}


# counted --------------------------------------------------------------------------------------------------------------


def test_exploration_saved_is_told_against_the_reference() -> None:
    reference = {"a": sequence(20)}
    saved = lambda of: summarise_sequences({"a": of}, reference)["all"]["re"]["mean"]
    assert saved(reference["a"]) == 0 and summarise_sequences(reference, reference)["all"]["rt"]["mean"] == 0
    assert saved(sequence(5)) == 0.75 and saved(sequence(21)) == pytest.approx(-0.05)
    assert summarise_sequences({"a": sequence(5)}, None)["all"]["re"] is None


def test_ratios_are_of_sums_and_of_tasks_that_both_solved_where_that_is_asked() -> None:
    reference = {"a": sequence(10, 30), "b": sequence(60, solved=False)}
    mine = {"a": sequence(5, 15), "b": sequence(60)}
    of = summarise_sequences(mine, reference)["all"]
    assert of["re"]["mean"] == pytest.approx(20 / 100) and of["re_solved"]["mean"] == pytest.approx(20 / 40)
    assert bootstrap_ratio([]) is None and bootstrap_ratio([(0, 0)]) is None


def test_a_sequence_succeeds_with_all_of_its_tasks_and_shares_are_of_what_was_asked() -> None:
    tasks = [
        SubTask(True, 3, 1, needed=False, recalled=False, hit=False, first=True, warm=False),
        SubTask(True, 3, 1, needed=True, recalled=True, hit=True, first=False, warm=True),
        SubTask(False, 3, 1, needed=True, recalled=False, hit=True, first=False, warm=True),
    ]
    of = summarise_sequences(
        {"a": {"family": "f", **columns(tasks)}, "b": {"family": "f", **columns(tasks[:2])}}, None
    )["f"]
    told_of = {name: value and round(value["mean"], 4) for name, value in of.items()}
    assert (told_of["sequences"], told_of["sub_tasks"], told_of["mra"]) == (0.5, 0.8, 0.6667)
    assert (told_of["mhr"], told_of["mhr_without_first"], told_of["mhr_warm"]) == (0.6, 1.0, 1.0)


# played ---------------------------------------------------------------------------------------------------------------


@pytest.mark.seconds
def test_the_tables_directions(tmp_path: Path) -> None:
    both, no_long, no_short = (
        evaluated(tmp_path / name, f"memory.settings={settings}")
        for name, settings in (("both", "{}"), ("no-long", "{long: false}"), ("no-short", "{short: false}"))
    )
    assert [summary(both, "none", "all", metric) for metric in ("re", "rt")] == [0, 0]
    assert summary(no_long, "static", "simple", "re") == pytest.approx(0, abs=0.02)
    composite = summary(no_long, "static", "composite", "re")
    assert composite is not None and composite > 0.05
    for metric in ("sequences", "re"):
        full, *others = (summary(of, "static", "composite", metric) for of in (both, no_long, no_short))
        assert full is not None and all(other is not None and full >= other for other in others)
    mra = [summary(both, "static", family, "mra") for family in ("composite", "complex")]
    assert mra[0] is not None and mra[1] is not None and mra[0] > mra[1]
    assert summary(both, "static", "simple", "mra") is None and summary(no_short, "static", "composite", "mra") is None


def test_what_is_counted_as_recalled_is_what_the_record_says(tmp_path: Path) -> None:
    made = evaluated(tmp_path, "deliveries=[static]", "env.sequences={simple: 0, composite: 4, complex: 0}")
    rows = [parse_row(line) for line in (tmp_path / EPISODES).read_text().splitlines()]
    recalled = {row["task_id"]: {object_of(id) for id in row["memory_ids"]} - {""} for row in rows}
    counted = made["results"]["static"]["living"]["by_sequence"]
    checked = 0
    for id, of in counted.items():
        for number, (needed, true) in enumerate(zip(of["needed"], of["recalled"], strict=True), start=1):
            objects = recalled[f"{id}/{number}"]
            assert not true or objects
            checked += needed
    assert checked > 5 and all(len(row["steps"]) for row in rows)


@pytest.mark.seconds
def test_a_bank_of_episodes_lives_in_each_world_by_itself(tmp_path: Path) -> None:
    settings = ["memory.system=trajectory", "env.sequences={simple: 0, composite: 5, complex: 0}"]
    made = evaluated(tmp_path, *settings)
    saved = summary(made, "static", "composite", "re")
    assert saved is not None and saved > 0
    config = load_config(EvalConfig, "eval/karma", [*SMALL, *settings])
    banks = [open_memory(config.memory, path) for path in sorted((tmp_path / "worlds" / "static").iterdir())]
    lengths = [len(of["solved"]) for of in made["results"]["static"]["living"]["by_sequence"].values()]
    assert [bank.origins().total() for bank in banks] == lengths


@pytest.mark.seconds
def test_several_seeds_are_one_row_and_papers_numbers_stand_beside_it(tmp_path: Path) -> None:
    memories = "{no-short: {memory.settings: {short: false}}, karma: {memory.settings: {}}}"
    levels = f"matrix={{memories: {memories}, seed: {{a: {{env.seed: 0}}, b: {{env.seed: 1}}}}}}"
    made = evaluated(tmp_path, "env.sequences={simple: 1, composite: 2, complex: 1}", levels)
    row = made["results"]["memories=karma/static"]["living"]["summary"]["composite"]
    cells = [json.loads((tmp_path / "cells" / f"memories=karma,seed={seed}" / RESULTS).read_text()) for seed in "ab"]
    each = [summary(cell, "static", "composite", "sequences") for cell in cells]
    assert row["sequences"]["n"] == 4 and row["sequences"]["mean"] == pytest.approx(sum(filter(None, each)) / 2)
    table = paper_table(2, [tmp_path], "karma")
    measured = {r.method: r.cells for r in table.rows if r.source == "measured"}
    names = ("KARMA", "w/o short-term", "No memory (reference)")
    assert set(measured) == {f"{name}, household test" for name in names}
    assert measured["KARMA, household test"]["Composite SR"].value == pytest.approx(100 * row["sequences"]["mean"])
    assert "Simple MRA" not in measured["KARMA, household test"]


def test_the_papers_numbers_are_as_printed() -> None:
    cells = {row.method: row.cells for row in paper_table(1, [], "karma").rows}
    assert cells["KARMA"]["Complex RT"].value == 69.0 and cells["CAPEAM"]["Simple RE"].value == -5.4
    assert "Simple MRA" not in cells["KARMA"] and cells["HELPER"]["Complex SR"].value == 9
    second = {row.method: row.cells for row in paper_table(2, [], "karma").rows}
    assert second["w/o long-term"]["Composite MRA"].value == 100 and second["KARMA"] == cells["KARMA"]


@pytest.mark.seconds
def test_a_run_that_was_cut_short_goes_on_to_the_same_result(tmp_path: Path) -> None:
    """As a kill leaves it: no results, and a record that ends within a sequence and within a line."""
    settings = ["env.sequences={simple: 0, composite: 3, complex: 0}", "deliveries=[static]", "concurrency=1"]
    living = lambda made: made["results"]["static"]["living"]
    whole = evaluated(tmp_path, *settings)
    (tmp_path / RESULTS).unlink()
    record = (tmp_path / EPISODES).read_bytes()
    lines = record.splitlines(keepends=True)
    (tmp_path / EPISODES).write_bytes(b"".join(lines[:6]) + lines[6][:50])
    config = load_config(EvalConfig, "eval/karma", [*SMALL, *settings])
    assert living(run_eval(config, tmp_path, on_exists="resume")) == living(whole)
    assert sorted(parse_row(line)["task_id"] for line in (tmp_path / EPISODES).read_bytes().splitlines()) == sorted(
        parse_row(line)["task_id"] for line in lines
    )
