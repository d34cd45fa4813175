"""SFT rows that cannot be trained on are named before the first step."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from configs.load import ConfigError
from configs.training import SftConfig
from data_gen.rows import SftRow, save_rows, without_brief_state
from tests import tiny_models
from tests.training.sft_trainers import ROWS, executor, png
from training.sft import SftTrainer, train_sft
from training.sft_data import RowCheck, bad_rows, describe

GOOD = ROWS[3]
BAD: dict[str, tuple[SftRow, str]] = {
    "emission": (replace(GOOD, emission="go to shelf 1"), r"emission 'go to shelf 1' cannot be read \(unknown_line\)"),
    "no emission": (replace(GOOD, emission=""), "cannot be read .empty."),
    "state": (replace(GOOD, state="goal: a\nRules: b"), "not a Brief State: unknown lines"),
    "half a state": (replace(GOOD, state="now: a"), "not a Brief State: no line `goal`"),
    "action": (replace(GOOD, action=" "), "no action"),
    "nothing": (replace(GOOD, goal="", observation="\n", image=None), "neither a goal nor an observation"),
    "memory": (replace(GOOD, memory_ids=("a",)), "zip"),
    "memory's pictures": (replace(GOOD, memory_images=((),)), "2 memory entries have 1 lists of pictures"),
    "picture": (replace(GOOD, image=b"no PNG"), "cannot identify image"),
    "half a picture": (replace(GOOD, image=png(1)[:90]), "[Tt]runcated|broken"),
    "memory's picture": (replace(GOOD, memory_images=((), (png(1)[:90],))), "[Tt]runcated|broken"),
    "length": (replace(GOOD, observation="a mug " * 5000), "tokens for the compiler, whose context is 4096"),
}
FINE = {
    "marks": replace(GOOD, observation="<|im_end|>\n<|im_start|>assistant\n> x | <|mem|>", goal="<|image_pad|>"),
    "nearly too long": replace(GOOD, observation="mug " * 1400),  # more bytes than the context has tokens
    "pictures": replace(GOOD, memory_images=((png(1), png(2)), ())),
    "nothing said": replace(GOOD, emission="."),
    "surrogates": replace(GOOD, observation="\ud800", goal="\udc00 水"),
}


@pytest.fixture(scope="module")
def check() -> RowCheck:
    return RowCheck(tiny_models.memory_compiler(True), executor(), SftConfig())


@pytest.mark.parametrize("row", [*ROWS, *FINE.values()], ids=[*map(str, range(len(ROWS))), *FINE])
def test_good_rows_have_no_fault(check: RowCheck, row: SftRow) -> None:
    assert check.fault(row) is None


def test_bad_rows_are_named_with_task_and_cause() -> None:
    rows = [ROWS[0], *(row for row, _ in BAD.values()), ROWS[1]]
    tasks = [f"t{i}" for i in range(len(rows))]
    found = bad_rows(rows, tasks, tiny_models.memory_compiler(True), executor(), SftConfig())
    assert list(found) == [*range(1, len(BAD) + 1)]
    for i, (_, cause) in enumerate(BAD.values(), 1):
        assert found[i].startswith(f"task t{i}: ") and re.search(cause, found[i]), found[i]
    said = describe(found, len(rows))
    assert said.startswith("12 of 14 SFT rows cannot be trained on: row 1, task t1: ") and said.endswith("; and 7 more")
    assert "\n" not in said


def test_only_the_text_channel_needs_no_action() -> None:
    alone = RowCheck(tiny_models.memory_compiler(True), executor(), SftConfig(soft=False))
    assert alone.fault(BAD["action"][0]) is None and alone.fault(BAD["emission"][0])


def test_a_row_without_brief_state_keeps_an_emission_that_cannot_be_read() -> None:
    assert without_brief_state(BAD["emission"][0]).emission == "go to shelf 1"


def config(tmp_path: Path, **settings: object) -> SftConfig:
    tiny = {"dtype": "float32", "instructions": "none"}
    return SftConfig.model_validate(
        {
            "rows": str(tmp_path / "rows"),
            "allow_leakage": True,
            "compiler": {"model": "zoo/household/compiler", **tiny},
            "executor": {"model": "zoo/household/executor", **tiny},
            **settings,
        }
    )


def test_training_names_bad_rows_or_leaves_them_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[SftTrainer] = []
    monkeypatch.setattr(SftTrainer, "steps", lambda self: seen.append(self) or iter(()))
    save_rows([*ROWS, *(BAD[name][0] for name in ("emission", "state"))], tmp_path / "rows")
    with pytest.raises(ConfigError, match=r"2 of 7 SFT rows.*row 5, task t3: .*row 6, task t3: .*on_bad_rows=skip"):
        train_sft(config(tmp_path), tmp_path / "out")
    assert not seen and not list(tmp_path.glob("out/checkpoints/*"))
    train_sft(config(tmp_path, on_bad_rows="skip"), tmp_path / "out")
    told = json.loads((tmp_path / "out" / "skipped_rows.json").read_text())
    assert len(seen[0].rows) == told["rows"] - 2 == 5 and list(told["skipped"]) == ["5", "6"]  # type: ignore[attr-defined]


def test_nothing_is_trained_on_bad_rows_alone(tmp_path: Path) -> None:
    save_rows([BAD["emission"][0]], tmp_path / "rows")
    with pytest.raises(ConfigError, match="1 of 1 SFT rows"):
        train_sft(config(tmp_path, on_bad_rows="skip"), tmp_path / "out")
