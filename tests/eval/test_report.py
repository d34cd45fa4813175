"""The report is complete in itself, honest about what it leaves out, and never runs what a model wrote."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from agent.records import Episode
from eval.metrics import results
from eval.player import cited, diff_state, outcome
from eval.plots import deliveries_plot, read_metrics, results_plots, training_plot
from eval.replays import select
from eval.report import write_report, write_run_report
from runtime.errors import StopReason
from tests.eval.pages import HOSTILE, Page, episode, hostile_episode, step

META = {"environment": "household", "split": "test", "seed": 7}


def make_run(tasks: int = 4) -> dict[str, list[Episode]]:
    return {
        "none": [episode(f"t{i}", "none", success=i % 4 == 1) for i in range(tasks)],
        "compiled": [episode(f"t{i}", "compiled", success=i % 2 == 0) for i in range(tasks)],
    }


def write(per_delivery: dict[str, list[Episode]], path: Path, **options: Any) -> str:
    episodes = [each for of_delivery in per_delivery.values() for each in of_delivery]
    written = write_report(results(per_delivery, META), episodes, path, **options)
    return written.read_text(encoding="utf-8")


# What a reader finds


def test_the_report_shows_results_and_replays(tmp_path: Path) -> None:
    page = Page(write(make_run(), tmp_path / "report.html"))
    for text in ("household", "compiled, text + soft", "50.0"):
        assert text in page.text
    assert [view["delivery"] for view in page.episodes] == ["none", "compiled"] * 4
    first = page.episodes[0]
    assert first["task"]["goal"].startswith("goal of t") and first["memory"] == {"m1": "the mug was in cabinet 2"}
    assert first["steps"][1]["prompt"] == "prompt 1"
    assert first["steps"][0]["state"][1] == ["now", [["added", "find mug"]]]
    assert all(step["picture"]["width"] == 8 for view in page.episodes for step in view["steps"])
    assert json.loads(page.inside["script"][0])["split"] == "test"


def test_a_run_folder_becomes_a_report(tmp_path: Path) -> None:
    per_delivery = make_run()
    with pytest.raises(ValueError, match=r"results\.json does not exist: evaluate first"):
        write_run_report(tmp_path)
    (tmp_path / "results.json").write_text(json.dumps(results(per_delivery, META)), encoding="utf-8")
    with pytest.raises(FileNotFoundError, match=r"episodes\.jsonl is missing"):
        write_run_report(tmp_path)
    rows = [json.dumps(each.to_json(images=True)) for episodes in per_delivery.values() for each in episodes]
    (tmp_path / "episodes.jsonl").write_text("\n".join(rows), encoding="utf-8")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n', encoding="utf-8")
    page = Page(write_run_report(tmp_path).read_text(encoding="utf-8"))
    assert len({view["task"]["goal"] for view in page.episodes}) == 4
    assert {"Success by delivery", "Success against steps", "Training losses"} <= set(page.attributes("alt"))


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    assert write(make_run(), tmp_path / "a.html") == write(make_run(), tmp_path / "b.html")


def test_a_broken_episode_says_so(tmp_path: Path) -> None:
    broken = episode("t0", "none", True, steps=[], stop_reason=StopReason.EXECUTOR_FAILURE, error="out of memory")
    assert outcome(broken) == "broken"
    page = Page(write({"none": [broken]}, tmp_path / "report.html"))
    assert page.episodes[0]["error"] == "out of memory" and "1 executor failure" in page.text


def test_a_step_shows_everything_that_happened(tmp_path: Path) -> None:
    soft = {"n": 4.0, "mu_norm": 71.5, "sigma_mean": 1.25}
    said = {"reason": "the mug was there", "op_errors": ("create: key exists",), "executor_text": "look!"}
    told = step(0, soft=soft, confidence=0.5, **said)
    page = Page(write({"compiled": [episode("t0", "compiled", True, steps=[told])]}, tmp_path / "report.html"))
    [shown] = page.episodes[0]["steps"]
    expected = {
        "soft": soft,
        "confidence": 0.5,
        "reason": "the mug was there",
        "op_errors": ["create: key exists"],
        "prompt": "prompt 0",
        "action": "look",
        "wrote": "look!",
        "feedback": "observation 1",
    }
    assert {name: shown[name] for name in expected} == expected


def test_guidance_cites_the_entry_that_holds_its_reason() -> None:
    texts = {"a": "in home 1 the mug was in cabinet 2", "b": "in home 2 the mug was in cabinet 2.", "c": "clean a cup"}
    said = step(0, guidance="go to cabinet 2", reason="In home 2 the mug was in cabinet 2")
    assert cited(said, list(texts), texts) == ["b"]
    close = step(0, guidance="go to cabinet 2", reason="in the mug was in cabinet 2")  # no entry says just this
    assert cited(close, list(texts), texts) == ["a", "b"]
    assert cited(step(0, guidance="clean it"), list(texts), texts) == cited(step(0), list(texts), texts) == []


# Nothing from outside, nothing from inside


def test_nothing_is_loaded(tmp_path: Path) -> None:
    plot = deliveries_plot(results(make_run(), META), tmp_path / "deliveries.png")
    page = Page(write(make_run(), tmp_path / "report.html", plots=[plot]))
    for name in ("src", "href", "srcset", "action", "data", "poster", "xlink:href", "background"):
        assert all(value.startswith(("data:", "#")) for value in page.attributes(name)), name
    assert not {"iframe", "object", "embed", "base", "form"} & {tag for tag, _ in page.tags}
    for text in (*page.inside["style"], page.inside["script"][-1]):
        assert not any(word in text for word in ("http:", "https:", "//cdn", "url(", "@import", "fetch(", "import("))


def test_the_policy_allows_exactly_our_script_and_style(tmp_path: Path) -> None:
    page = Page(write(make_run(), tmp_path / "report.html"))
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    for text in (page.inside["style"][0], page.inside["script"][-1]):
        assert base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() in str(policy)
    assert "default-src 'none'" in str(policy) and "unsafe" not in str(policy)
    assert not page.attributes("style") and not [name for _, attrs in page.tags for name in attrs if name[:2] == "on"]


def test_hostile_strings_stay_text(tmp_path: Path) -> None:
    per_delivery = {name: [hostile_episode(name, name != "none")] for name in ("none", "compiled", HOSTILE)}
    harmless = {name: [episode("t0", name, name != "none")] for name in ("none", "compiled", "other")}
    meta = {**META, "environment": HOSTILE, "note": HOSTILE, "nested": {HOSTILE: [HOSTILE]}}
    run_results = results(per_delivery, meta)
    plot = deliveries_plot(run_results, tmp_path / "plot.png")
    episodes = [each for of_delivery in per_delivery.values() for each in of_delivery]
    html = write_report(run_results, episodes, tmp_path / "bad.html", [plot]).read_text(encoding="utf-8")
    page, clean = Page(html), Page(write(harmless, tmp_path / "good.html"))
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in clean.tags} | {"figure", "figcaption", "img"}
    assert len(page.inside["script"]) == 3
    assert page.inside["script"][2] == clean.inside["script"][2]
    assert not {"onerror"} & {name for _, attrs in page.tags for name in attrs}
    assert json.loads(page.inside["script"][0])["note"] == HOSTILE
    assert json.dumps(page.episodes).count(json.dumps(HOSTILE)[1:-1]) > 20
    assert "49" not in page.text.replace("0.49", "")  # {{ 7 * 7 }} was not evaluated


# How much is shown


def test_the_page_keeps_to_its_size_and_says_what_is_missing(tmp_path: Path) -> None:
    whole = write(make_run(12), tmp_path / "whole.html")
    assert "would have been shown" not in whole
    limit = len(whole.encode()) * 2 // 3
    small = write(make_run(12), tmp_path / "small.html", max_bytes=limit)
    assert len(small.encode()) <= limit
    shown = len(Page(small).episodes) // 2
    assert 0 < shown < 12
    assert f"{12 - shown} more do not fit" in small
    assert "No replay fits" in write(make_run(12), tmp_path / "tiny.html", max_bytes=1)


def head(delivery: str, task: str, success: bool, seed: int = 0) -> Episode:
    return episode(task, delivery, success, seed=seed, family="", steps=[])


def chosen_of(heads: list[Episode], tasks: int) -> list[list[Episode]]:
    return select(heads, tasks, ("none", "compiled"), ("compiled", "none"))


def test_replays_are_chosen_by_rule() -> None:
    heads = [head("none", f"t{i}", i % 2 == 0) for i in range(40)]
    heads += [head("compiled", f"t{i}", i % 4 < 2, seed) for i in range(40) for seed in (0, 1)]
    chosen = chosen_of(heads, tasks=8)
    assert chosen == chosen_of(heads[::-1], tasks=8)
    assert [[head.delivery for head in task] for task in chosen] == [["none", "compiled"]] * 8
    assert {head.seed for task in chosen for head in task} == {0}
    # wins, losses, both failed, both succeeded, and again
    ended = [(compiled.success, none.success) for none, compiled in chosen]
    assert ended == [(True, False), (False, True), (False, False), (True, True)] * 2


def test_tasks_that_every_delivery_played_are_shown_first() -> None:
    heads = [head("compiled", f"t{i}", True) for i in range(9)] + [head("none", "t7", False)]
    heads += [head("none", "t8", False)]
    assert {task[0].task_id for task in chosen_of(heads, tasks=2)} == {"t7", "t8"}
    assert chosen_of([], tasks=2) == []


# What changed in the Brief State


def pieces(before: str, after: str) -> list[tuple[str, list[tuple[str, str]]]]:
    return [(line.label, [(piece.change, piece.text) for piece in line.pieces]) for line in diff_state(before, after)]


def test_state_changes_are_found_item_by_item() -> None:
    before = "goal: put mug\nnote: a = 1 ; b = 2 ; c = 3"
    after = "goal: put mug\nnow: find mug\nnote: a = 1 ; c = 4"
    assert pieces(before, after) == [
        ("goal", [("same", "put mug")]),
        ("now", [("added", "find mug")]),
        ("note", [("same", "a = 1"), ("removed", "b = 2 ; c = 3"), ("added", "c = 4")]),
    ]


def test_states_of_any_form_are_compared() -> None:
    assert pieces("", "") == []
    assert pieces("goal: x\ndone: y", "goal: x") == [("goal", [("same", "x")]), ("done", [("removed", "y")])]
    assert pieces("free text", "free words") == [("", [("removed", "free text"), ("added", "free words")])]


def test_a_step_that_broke_does_not_look_like_an_emptied_state(tmp_path: Path) -> None:
    steps = [step(0, brief_after="goal: put mug"), step(1, brief_after="", emission_kind="", emission_text="")]
    stopped = episode("t0", "compiled", False, steps=steps, stop_reason=StopReason.COMPILER_FAILURE)
    page = Page(write({"compiled": [stopped]}, tmp_path / "report.html"))
    assert [step["changed"] for view in page.episodes for step in view["steps"]] == [False, False]


def test_deliveries_without_a_compiler_show_no_state(tmp_path: Path) -> None:
    steps = [step(0, brief_after="goal: put mug", emission_kind="", emission_text="")]
    page = Page(write({"none": [episode("t0", "none", True, steps=steps)]}, tmp_path / "report.html"))
    assert page.episodes[0]["steps"][0]["state"] == []


# Figures


def test_figures_are_png_and_reproducible(tmp_path: Path) -> None:
    run_results = results(make_run(), META)
    first, second = (results_plots(run_results, tmp_path / name) for name in "ab")
    assert [path.name for path in first] == ["deliveries.png", "steps.png"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert all(Image.open(path).format == "PNG" for path in first)


def test_training_plot_of_updates(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    rows = [{"update": u, "reward": u / 9, "zero_variance_fraction": 0.5, "sigma": 0.1} for u in range(1, 9)]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_metrics(metrics)[8]["reward"] == pytest.approx(8 / 9)
    assert training_plot(metrics, tmp_path / "training.png").stat().st_size > 0


def test_training_plot_reads_what_a_killed_run_left(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    lines = ['{"step": 1, "loss": 3.0}', '{"step": 2, "loss": 2.5, "loss_te', '{"step": 2, "loss": 2.0}']
    metrics.write_text("\n".join([*lines, '{"step": 1, "loss": 9.0}', '{"note": "evaluation"}', "7"]), encoding="utf-8")
    assert {step: row["loss"] for step, row in read_metrics(metrics).items()} == {1: 9.0, 2: 2.0}
    assert training_plot(metrics, tmp_path / "training.png").stat().st_size > 0
    metrics.write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="holds none of"):
        training_plot(metrics, tmp_path / "training.png")
