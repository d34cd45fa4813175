"""Axes multiplied out: names, order, merged settings, and every mistake before anything is played."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs.evaluation import EvalConfig
from configs.load import CONFIGS, ConfigError, load_config, to_yaml
from eval.matrix import axes, baseline_of, cells, check_baseline, varying

SHIPPED = sorted((CONFIGS / "eval").glob("*.yaml"))


def config(**settings: Any) -> EvalConfig:
    return EvalConfig.model_validate({"deliveries": ["none", "static"], **settings})


SPLITS = {"split": ["train", "test"]}
MEMORY = {"memory": {"one": {"memory.k": 1}, "four": {"memory": {"k": 4, "bank": "b"}}}}


def test_no_matrix_is_one_cell_with_the_very_settings() -> None:
    plain = config(limit=3)
    [cell] = cells(plain)
    assert cell.config is plain and cell.name == cell.group == ""


def test_axes_are_multiplied_out_and_merged_into_the_settings() -> None:
    made = cells(config(matrix={**MEMORY, **SPLITS}, limit=3, memory={"k": 9, "embed": "e"}))
    assert [cell.name for cell in made] == [
        "memory=one,split=train",
        "memory=one,split=test",
        "memory=four,split=train",
        "memory=four,split=test",
    ]
    assert [(c.config.memory.k, c.config.memory.bank, c.config.split) for c in made] == [
        (1, None, "train"),
        (1, None, "test"),
        (4, "b", "train"),
        (4, "b", "test"),
    ]
    assert all(c.config.memory.embed == "e" and c.config.limit == 3 and not c.config.matrix for c in made)


def test_an_environment_as_a_level_replaces_the_other_s_settings() -> None:
    levels = {"home": {}, "alfworld": {"env": "alfworld", "env.data_root": "games", "split": "valid_unseen"}}
    made = cells(config(env={"name": "household", "scenes": {"test": 2}}, matrix={"environment": levels}))
    assert made[0].config.env.scenes == {"test": 2}
    assert (made[1].config.env.name, made[1].config.env.data_root) == ("alfworld", "games")


def test_seeds_are_one_group() -> None:
    made = cells(config(matrix={"seed": {0: {"seed": 0}, 1: {"seed": 1, "env.seed": 1}}, **SPLITS}))
    assert len({cell.group for cell in made}) == 2 and len({cell.name for cell in made}) == 4
    assert {cell.config.env.seed for cell in made} == {0, 1}
    assert {cell.group for cell in cells(config(matrix={"seed": [0, 1]}))} == {""}


def test_models_change_as_seldom_as_possible() -> None:
    made = cells(config(matrix={**SPLITS, "executor": {"a": {"executor.model": "a"}, "b": {"executor.model": "b"}}}))
    assert [cell.config.executor.model for cell in made] == ["a", "a", "b", "b"]
    assert made[0].name == "split=train,executor=a"


def test_literal_references_in_settings_stay_literal() -> None:
    [cell, _] = cells(config(executor={"model": "a${b}"}, matrix=SPLITS))
    assert cell.config.executor.model == "a${b}"


def test_names_are_fit_for_folders_and_stay_apart() -> None:
    made = cells(config(matrix={"executor.model": ["org/a", "../b"]}))
    assert [cell.name for cell in made] == ["executor.model=org-a", "executor.model=-b"]
    with pytest.raises(ConfigError, match="unique names"):
        cells(config(matrix={"executor.model": ["a/b", "a-b"]}))
    with pytest.raises(ConfigError, match="at least one level"):
        cells(config(matrix={"memory": {}}))


def test_all_wrong_cells_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        cells(config(matrix={"memory": {"a": {"memory.kk": 1}, "b": {"memory.k": -1}, "c": {"memory.k": 1}}}))
    text = str(caught.value)
    assert "memory=a" in text and "did you mean" in text and "memory=b" in text and "memory=c" not in text


def test_baseline_within_a_group_or_across() -> None:
    inside = config(matrix=MEMORY, baseline="none")
    across = config(matrix=MEMORY, baseline={"memory": "one", "delivery": "none"})
    same = config(matrix=MEMORY, baseline={"memory": "one"})
    one, four = cells(inside)
    assert baseline_of(inside, four, "static") == "memory=four/none"
    assert baseline_of(across, four, "static") == "memory=one/none"
    assert baseline_of(same, four, "static") == "memory=one/static"
    assert baseline_of(across, one, "none") is None and baseline_of(config(), one, "none") is None
    alone = config(deliveries=["none"], baseline="none")
    assert baseline_of(alone, cells(alone)[0], "none") is None
    for good in (inside, across, same, alone):
        check_baseline(good, cells(good))
    for bad in ("compiled", {"memory": "two"}, {"memori": "one"}):
        wrong = config(matrix=MEMORY, baseline=bad)
        with pytest.raises(ConfigError, match="is not evaluated here"):
            check_baseline(wrong, cells(wrong))


def test_a_matrix_round_trips_through_yaml(tmp_path: Path) -> None:
    asked = config(matrix={"seed": {0: {"seed": 0}}, **SPLITS})
    (tmp_path / "again.yaml").write_text(to_yaml(asked))
    assert load_config(EvalConfig, tmp_path / "again.yaml") == asked
    assert axes(asked)["seed"] == {"0": {"seed": 0}}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_matrix_expands(path: Path) -> None:
    asked = load_config(EvalConfig, path)
    made = cells(asked)
    assert len({cell.name for cell in made}) == len(made) >= 1
    check_baseline(asked, made)
    assert bool(asked.matrix) == (len(made) > 1)


def test_a_level_may_refer_to_its_cells_settings(tmp_path: Path) -> None:
    text = """
    compiler: {checkpoint: 'a/\\${seed}'}
    matrix:
      variant: {n4: {compiler.checkpoint: 'runs/\\${seed}/n4'}, own: {}}
      seed: {1: {seed: 1}, 2: {seed: 2}}
    """
    (tmp_path / "matrix.yaml").write_text(text)
    made = cells(load_config(EvalConfig, tmp_path / "matrix.yaml"))
    assert [cell.config.compiler.checkpoint for cell in made if cell.levels["variant"] == "n4"] == [
        "runs/1/n4",
        "runs/2/n4",
    ]
    assert {c.config.compiler.checkpoint for c in made if c.levels["variant"] == "own"} == {"a/${seed}"}  # no reference


def test_varying() -> None:
    assert varying(["a", "a"]) == "a" and varying([0, 1, 0]) == "0+1" and varying([0]) == 0
