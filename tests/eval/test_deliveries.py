"""The list of deliveries: what an entry says is all that anything else knows of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agent.deliveries import DELIVERIES, DeliverySpec, find, recorded_step
from agent.disclosure import RuleDisclosure
from agent.records import compile_request, delivered, read_episodes
from configs.evaluation import EvalConfig
from configs.load import ConfigError, load_config
from eval.evaluate import run_eval
from eval.matrix import cells
from eval.metrics import ordered
from eval.paper.render import to_markdown
from eval.paper.tables import paper_table
from eval.plots import deliveries_plot
from eval.table import to_markdown as results_markdown
from memcompiler.cli import app
from tests.fakes import Recorder

TINY = "executor={model: zoo/household/executor, dtype: float32, instructions: none, max_new_tokens: 16}"
SMALL = [TINY, "env.scenes={train: 1, test: 1}", "limit=2", "max_steps=2", "deliveries=[none, bare_rules]"]


@pytest.fixture
def bare_rules(monkeypatch: pytest.MonkeyPatch) -> DeliverySpec:
    """A delivery that nothing but the list has heard of."""
    spec = DeliverySpec(
        "bare_rules",
        "rules without a state",
        compiler=lambda *_: RuleDisclosure(),
        soft=False,
        brief_state=False,
        control=True,
        compared_with=("none",),
    )
    monkeypatch.setitem(DELIVERIES, spec.name, spec)
    return spec


@pytest.mark.seconds
def test_one_entry_is_evaluated_labelled_and_read_again(
    bare_rules: DeliverySpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = run_eval(load_config(EvalConfig, None, SMALL), tmp_path)
    assert set(results["results"]) == {"none", "bare_rules"} and "bare_rules - none" in results["paired_difference"]
    assert f"| *{bare_rules.label}* |" in results_markdown(results)  # a control, in italics
    drawn: list[Any] = []
    monkeypatch.setattr("eval.plots.save_figure", lambda figure, path, below: drawn.append(figure))
    deliveries_plot(results, tmp_path / "plot.png")
    assert [tick.get_text() for tick in drawn[0].axes[0].get_yticklabels()] == ["no memory", bare_rules.label]
    assert bare_rules.label in (tmp_path / "report.html").read_text()
    assert bare_rules.label in to_markdown(paper_table(2, [tmp_path]))
    [episode, *_] = [e for e in read_episodes(tmp_path / "episodes.jsonl") if e.delivery == "bare_rules"]
    step = recorded_step(episode, 1)
    assert compile_request(step).state is None and compile_request(step).history == (episode.steps[0].action,)
    assert (delivered(step, Recorder()).state, delivered(step, Recorder()).guidance) == ("", episode.steps[1].guidance)


@pytest.mark.seconds
def test_one_entry_may_stand_in_a_matrix(bare_rules: DeliverySpec, tmp_path: Path) -> None:
    matrix = ["matrix={memory: {one: {memory.k: 1}, two: {memory.k: 2}}}", "baseline={delivery: bare_rules}"]
    results = run_eval(load_config(EvalConfig, None, [*SMALL, *matrix, "limit=1"]), tmp_path)
    assert f"memory=two/{bare_rules.label}" in results_markdown(results)
    assert "memory=one/none - memory=one/bare_rules" in results["paired_difference"]


def test_unknown_names_are_refused_before_anything_is_loaded_with_the_nearest_one(tmp_path: Path) -> None:
    config = load_config(EvalConfig, None, ["deliveries=[none, compild]"])
    with pytest.raises(ConfigError, match=r"deliveries: there is no delivery 'compild' \(did you mean 'compiled'\?\)"):
        run_eval(config, tmp_path / "run")
    matrix = load_config(EvalConfig, None, ["matrix={a: {b: {deliveries: [magic]}, c: {}}}"])
    with pytest.raises(ConfigError, match="matrix, cell a=b: deliveries: there is no delivery 'magic'"):
        cells(matrix)
    with pytest.raises(ConfigError, match="exists in results only"):
        cells(load_config(EvalConfig, None, ["deliveries=[compiled_grpo]"]))
    shown = CliRunner().invoke(app, ["eval", "deliveries=[magic]", "--print-config"])
    assert shown.exit_code == 2 and "there is no delivery 'magic'" in shown.output
    assert not (tmp_path / "run").exists()


def test_every_entry_makes_what_it_says() -> None:
    class Trained:
        def compile(self, requests):
            return []

    for name, spec in DELIVERIES.items():
        made = find(name).create(Trained(), 0, gate=lambda request: 1.0)
        assert (made.gate is not None) == spec.gated
        assert (made.name, made.kind, made.soft, made.brief_state) == (name, spec.kind, spec.soft, spec.brief_state)
        assert (made.compiler is not None) == (spec.kind == "compiled")
        if spec.needs_checkpoint:
            with pytest.raises(ValueError, match=r"compiler\.checkpoint"):
                spec.create(None, 0)
    assert ordered(["zebra", "compiled", "expert_compiler", "none", "a/static"]) == [
        "none",
        "compiled",
        "expert_compiler",
        "zebra",
        "a/static",
    ]
