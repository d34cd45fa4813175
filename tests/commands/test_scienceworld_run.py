"""ScienceWorld end to end with tiny models: a collection, some SFT steps, an evaluation with success and score."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compiler.language import Kind
from configs.collect import CollectConfig
from configs.evaluation import EvalConfig
from configs.load import load_config
from configs.training import SftConfig
from data_gen.rows import load_rows

pytestmark = [pytest.mark.slow, pytest.mark.scienceworld]

ENV = {"name": "scienceworld", "kinds": ["find-animal", "lifespan-shortest-lived"], "workers": 1}
COMPILER = {
    "model": "zoo/household/compiler",
    "dtype": "float32",
    "instructions": "none",
    "max_new_tokens": 8,
    "soft": {"n_tokens": 2, "emb_std": "auto"},
}
EXECUTOR = {"model": "zoo/household/executor", "dtype": "float32", "mode": "generate", "max_new_tokens": 8}


def test_it_is_collected_trained_on_and_evaluated_with_success_and_score(tmp_path: Path) -> None:
    pytest.importorskip("scienceworld", reason="needs the extra scienceworld")
    from eval.evaluate import run_eval
    from memcompiler.collection import run_collect
    from training.sft import train_sft

    memory = {"k": 1, "experience_limit": 4}
    asked: dict[str, Any] = {"env": ENV, "memory": memory, "limit": 2, "max_steps": 30, "leakage": {"drop": True}}
    run_collect(CollectConfig.model_validate(asked), tmp_path / "collect")
    collected = json.loads((tmp_path / "collect" / "collect.json").read_text())
    assert collected["successes"] == collected["episodes"] == 2 and collected["bank_entries"] == 4
    rows = load_rows(tmp_path / "collect" / "rows")
    assert {row.kind for row in rows} >= {Kind.EXPERIENCE, Kind.HYBRID, Kind.NOACTION}

    models: dict[str, Any] = {"compiler": COMPILER, "executor": EXECUTOR}
    sft = {**models, "rows": str(tmp_path / "collect" / "rows"), "max_steps": 2, "latent": "none"}
    train_sft(SftConfig.model_validate(sft), tmp_path / "sft")

    models["compiler"] = {**COMPILER, "checkpoint": str(tmp_path / "sft")}
    asked = {"env": ENV, "memory": memory, **models, "limit": 1, "max_steps": 2, "split": "test"}
    asked["deliveries"] = ["none", "expert_compiler", "compiled"]
    results = run_eval(EvalConfig.model_validate(asked), tmp_path / "eval")["results"]
    assert set(results) == {"none", "expert_compiler", "compiled"}
    assert all("success" in of and "progress" in of for of in results.values())


def test_agentsquare_s_variations_are_evaluated_with_nothing_by_hand(tmp_path: Path) -> None:
    """The shipped settings with tiny models in the place of the paper's: the bank fills itself from train."""
    pytest.importorskip("scienceworld", reason="needs the extra scienceworld")
    from eval.evaluate import run_eval

    small = {
        "compiler.checkpoint": "null",
        "compiler.model": COMPILER["model"],
        "executor.model": EXECUTOR["model"],
        "compiler.dtype": "float32",
        "executor.dtype": "float32",
        "executor.max_new_tokens": 8,
    }
    asked = ["deliveries=[none, expert_compiler]", "limit=1", "max_steps=2", "memory.experience_limit=1"]
    asked += ["env.kinds=[find-animal]", "env.workers=1"]  # the first type, boil, takes long to plan
    overrides = [f"{key}={value}" for key, value in small.items()]
    made = run_eval(load_config(EvalConfig, "eval/scienceworld-agentsquare", [*overrides, *asked]), tmp_path / "eval")
    assert set(made["results"]) == {"none", "expert_compiler"} and (tmp_path / "eval" / "bank").is_symlink()
