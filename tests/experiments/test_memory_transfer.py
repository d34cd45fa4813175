"""The study of compilers trained on one memory and evaluated on others: its matrix, its commands and its table."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from configs.evaluation import EvalConfig
from configs.load import load_config
from eval.intervals import PairedDifference, wilson
from eval.matrix import cells, check_baseline
from experiments.memory_transfer import run
from experiments.stages import PIPELINES

SYSTEMS, MEMORIES = ("trajectory", "s3mem"), ("trajectory", "karma")
HOMES = PIPELINES["household"]


def test_every_compiler_meets_every_memory_and_the_pasted_memory_is_played_once(tmp_path: Path) -> None:
    own = run.settings_of(tmp_path, [1, 2], SYSTEMS, MEMORIES, HOMES, limit=7)
    config = load_config(EvalConfig, "eval/quickstart", own)
    found = cells(config)
    check_baseline(config, found)
    assert len(found) == 4 * 2 * 2 and {cell.config.limit for cell in found} == {7}
    met = {(cell.levels["trained_with"], cell.config.memory.system, cell.config.env.seed) for cell in found}
    assert len(met) == 16
    for cell in found:
        level, seed = cell.levels["trained_with"], cell.levels["seed"]
        where = None if level == "pasted" else f"{tmp_path}/{seed}/sft-{level}"
        assert cell.config.compiler.checkpoint == where
        assert cell.config.deliveries == (("static",) if where is None else ("compiled",))


def test_the_mixture_is_trained_on_the_rows_of_all_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = dict[str, Sequence[str]]()
    note = lambda out, name, *command: started.update({name: command})
    monkeypatch.setattr(run, "run_once", note)
    monkeypatch.setattr("experiments.stages.run_once", note)
    run.train(tmp_path, 3, SYSTEMS, HOMES, ["limit=40"], ["max_steps=2"])
    assert list(started) == ["trajectory", "s3mem", "sft-trajectory", "sft-s3mem", "sft-mixture"]
    assert "memory.system=s3mem" in started["s3mem"] and "limit=40" in started["s3mem"]
    assert f"rows=[{tmp_path}/3/s3mem/rows]" in started["sft-s3mem"] and "max_steps=2" in started["sft-s3mem"]
    assert f"rows=[{tmp_path}/3/trajectory/rows,{tmp_path}/3/s3mem/rows]" in started["sft-mixture"]


def test_the_table_has_a_row_for_each_memory_and_compiler() -> None:
    names = [
        f"trained_with={level},memory={memory}/{'static' if level == 'pasted' else 'compiled'}"
        for memory in MEMORIES
        for level in ("pasted", *SYSTEMS, "mixture")
    ]
    gain = PairedDifference(0.5, 0.25, high=0.75, n=4, stderr=0.1, wins=2, losses=0, p=0.5)
    pairs = {f"{name} - {pasted_of(name)}": asdict(gain) for name in names if "pasted" not in name}
    results = {"results": {name: {"success": asdict(wilson(2, 4))} for name in names}, "paired_difference": pairs}
    lines = run.table(results, SYSTEMS, MEMORIES)
    assert len(lines) == 2 + 8 and lines[2].startswith("| trajectory | (pasted) | 50.0 [")
    assert lines[9].startswith("| karma | mixture | 50.0 [") and "+50.0 points [+25.0, +75.0]" in lines[9]


def pasted_of(name: str) -> str:
    return f"trained_with=pasted,{name.split(',')[1].replace('compiled', 'static')}"
