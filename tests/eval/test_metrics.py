"""Numbers against arithmetic done by hand, and the table that shows them."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from agent.records import Episode, StepRecord, episode_from_json, read_episodes
from eval.intervals import bootstrap_mean, wilson
from eval.metrics import ordered, paired_difference, results, summarise
from eval.runs import episodes_of
from eval.table import print_results, to_markdown
from runtime.errors import StopReason

META = {"environment": "household", "split": "test", "seed": 7}


def step(t: int = 0, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {"observation": "You see a mug 1.", "image": None, "admissible": ("look",)}
    return StepRecord(**{"t": t, "brief_before": "goal: put mug", **values, **changes})


def episode(task: str = "t0", success: bool = False, **changes: Any) -> Episode:
    values = {
        "goal": "put mug",
        "scene": "home 1",
        "split": "test",
        "kind": "pick",
        "family": "",
        "delivery": "compiled",
    }
    stop = StopReason.SUCCESS if success else StopReason.STEP_LIMIT
    common: dict[str, Any] = {"seed": 0, "success": success, "progress": float(success), "stop_reason": stop}
    return Episode(task_id=task, **{**values, **common, "steps": [step()], **changes})


def played(wins: str, **changes: Any) -> list[Episode]:
    """`played("101")`: tasks t0, t1, t2 with these outcomes."""
    return [episode(f"t{i}", success=win == "1", **changes) for i, win in enumerate(wins)]


# Intervals


def test_wilson_by_hand() -> None:
    # 8 of 10, z = 1.959964, z^2 = 3.841459: the centre is (0.8 + 3.841459/20) / (1 + 0.3841459) = 0.992073 / 1.384146
    # = 0.716740; half the width is 1.959964/1.384146 * sqrt(0.8*0.2/10 + 3.841459/400) = 1.416010 * 0.160011 = 0.226577
    interval = wilson(8, 10)
    assert (interval.mean, interval.n) == (0.8, 10)
    assert interval.low == pytest.approx(0.716740 - 0.226577, abs=2e-6)
    assert interval.high == pytest.approx(0.716740 + 0.226577, abs=2e-6)


def test_wilson_at_the_ends_by_hand() -> None:
    # 0 of 10: from 0 to z^2/n / (1 + z^2/n) = 0.3841459 / 1.3841459 = 0.277533; 10 of 10 is its mirror image.
    none, all_ = wilson(0, 10), wilson(10, 10)
    assert (none.low, all_.high) == (0.0, 1.0)
    assert none.high == pytest.approx(0.277533, abs=1e-6)
    assert all_.low == pytest.approx(1 - 0.277533, abs=1e-6)


def test_wilson_level() -> None:
    # 5 of 10 is symmetric: half the width at 90 % (z = 1.644854, z^2 = 2.705543) is
    # 1.644854/1.2705543 * sqrt(0.025 + 2.705543/400) = 1.294596 * 0.178224 = 0.230728
    assert wilson(5, 10, level=0.9).high == pytest.approx(0.5 + 0.230728, abs=2e-6)


@pytest.mark.parametrize(("successes", "n", "level"), [(0, 0, 0.95), (3, 2, 0.95), (-1, 2, 0.95), (1, 2, 1.0)])
def test_wilson_refuses(successes: int, n: int, level: float) -> None:
    with pytest.raises(ValueError):
        wilson(successes, n, level)


def test_bootstrap_of_two_values() -> None:
    # Resamples of {0, 1} have mean 0 (1/4), 0.5 (1/2) and 1 (1/4), so 2.5 % and 97.5 % lie at 0 and 1.
    interval = bootstrap_mean([0.0, 1.0], seed=3)
    assert (interval.mean, interval.low, interval.high, interval.n) == (0.5, 0.0, 1.0, 2)


def test_bootstrap_agrees_with_the_normal_approximation() -> None:
    # 50 ones in 100: standard error sqrt(0.25 / 100) = 0.05, so about 0.5 -+ 1.96 * 0.05 = [0.402, 0.598]
    interval = bootstrap_mean([0.0, 1.0] * 50, seed=0)
    assert interval.low == pytest.approx(0.402, abs=0.012)
    assert interval.high == pytest.approx(0.598, abs=0.012)


def test_bootstrap_depends_on_the_seed_only() -> None:
    values = [0.0, 0.25, 1.0, 0.5, 0.75, 0.3, 0.9]
    assert bootstrap_mean(values, seed=1) == bootstrap_mean(values[::-1], seed=1)
    with pytest.raises(ValueError):
        bootstrap_mean([], seed=0)


# Pairs


def test_paired_difference_known_case() -> None:
    # Differences +1, +1, 0, 0: mean 0.5; all four resampled values equal with probability 1/16 > 2.5 % at either end.
    pair = paired_difference(played("1110"), played("0010"), seed=0)
    assert (pair.mean, pair.low, pair.high) == (0.5, 0.0, 1.0)
    assert (pair.n, pair.wins, pair.losses) == (4, 2, 0)


def test_paired_difference_pairs_by_task_and_not_by_position() -> None:
    a = played("10")
    assert paired_difference(a, a[::-1]).wins == 0
    only_shared = paired_difference(played("111"), played("0"))
    assert (only_shared.n, only_shared.mean) == (1, 1.0)


def test_paired_difference_averages_the_seeds_of_a_task() -> None:
    a = [episode("t0", success=True), episode("t0", success=False, seed=1)]
    pair = paired_difference(a, played("0"))
    assert (pair.mean, pair.n) == (0.5, 1)


def test_paired_difference_is_deterministic_and_refuses_strangers() -> None:
    a, b = played("110100111"), played("010110001")
    assert paired_difference(a, b, seed=5) == paired_difference(a, b, seed=5)
    with pytest.raises(ValueError, match="nothing to pair"):
        paired_difference(a, [episode("elsewhere")])


# One delivery


def compiled_step(kind: str, **changes: Any) -> StepRecord:
    tokens = {"compiler_in": 90, "compiler_out": 10, "executor_in": 50, "executor_out": 2}
    seconds = {"compiler": 0.03, "executor": 0.02, "environment": 0.001}
    defaults = {"grounding": "choice", "tokens": tokens, "seconds": seconds}
    return step(emission_kind=kind, **{**defaults, **changes})


def example() -> list[Episode]:
    first = [
        compiled_step("HYBRID", emission_ids=(7,) * 9),
        compiled_step("BRIEF", seconds={"compiler": 0.05, "executor": 0.02}),
    ]
    second = [compiled_step("NOACTION", parse_error="empty", grounding="failed", tokens={"executor_in": 28})]
    broken = StopReason.EXECUTOR_FAILURE
    return [
        episode("t0", success=True, family="text", kind="pick", steps=first),
        episode("t1", family="visual", kind="heat", steps=second, progress=0.5),
        # `success` as recorded before the failure must not count
        episode("t2", success=True, family="visual", kind="heat", steps=[], stop_reason=broken, progress=0.0),
    ]


def test_summary_by_hand() -> None:
    summary = summarise(example())
    assert summary["success"]["mean"] == pytest.approx(1 / 3)
    assert summary["success"]["n"] == 3
    assert summary["progress"]["mean"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert summary["executor_tokens_per_step"] == pytest.approx((52 + 52 + 28) / 3)
    assert summary["compiler_tokens_per_step"] == pytest.approx((100 + 100 + 0) / 3)
    third = pytest.approx(1 / 3)
    assert summary["emission_tokens_per_step"] == pytest.approx((9 + 0 + 0) / 3)
    assert summary["emission_mix"] == {"EXPERIENCE": 0, "BRIEF": third, "HYBRID": third, "NOACTION": third}
    assert summary["parse_error_rate"] == third
    assert summary["grounding"] == {"choice": pytest.approx(2 / 3), "exact": 0, "fuzzy": 0, "failed": third}
    assert summary["seconds_per_step"] == {
        "compiler": pytest.approx((0.03 + 0.05 + 0.03) / 3),
        "executor": pytest.approx(0.02),
        "environment": pytest.approx(0.002 / 3),
    }
    assert summary["steps"] == 1.0
    assert summary["stop_reasons"] == {"success": 1, "step_limit": 1, "executor_failure": 1}
    assert {family: entry["success"]["n"] for family, entry in summary["by_family"].items()} == {"text": 1, "visual": 2}
    assert summary["by_family"]["visual"]["progress"]["mean"] == 0.25
    assert {kind: entry["success"]["mean"] for kind, entry in summary["by_kind"].items()} == {"heat": 0.0, "pick": 1.0}


def test_usage_and_rates_by_hand() -> None:
    clocks = [{"compiler": s, "executor": 0.1, "environment": 0.0} for s in (0.1, 0.2, 0.3, 0.4)]
    four = [compiled_step("BRIEF", seconds=each) for each in clocks]
    four[0].tokens = {**four[0].tokens, "compiler_cached": 64}
    four[1].op_errors, four[2].op_errors = ("create: key exists: a", "update: no such key: b"), ("create: there is",)
    four[3].grounding, four[2].grounding = "failed", "free"
    four.append(step(4))  # broke before anybody was asked
    summary = summarise([episode(steps=four)])
    usage = summary["usage"]["compiler"]
    assert (usage["tokens_in"], usage["tokens_out"], usage["tokens_cached"], usage["calls"]) == (360, 40, 64, 4)
    assert usage["seconds"] == pytest.approx(1.0)
    # linear between 0.2 and 0.3; and 0.85 of the way from 0.3 to 0.4
    assert usage["latency"] == {"p50": pytest.approx(0.25), "p95": pytest.approx(0.385)}
    assert summary["usage"]["executor"]["tokens_cached"] is None
    assert set(summary["usage"]["environment"]) == {"calls", "seconds", "latency"}
    assert summary["op_errors"] == {"create": 2, "update": 1} and summary["op_error_rate"] == 0.5
    assert summary["grounding_failure_rate"] == pytest.approx(1 / 3)  # of choice, choice, failed
    assert (summary["steps"], summary["planner_steps"], summary["environment_steps"]) == (5, 4, 4)


def test_standard_errors() -> None:
    assert wilson(5, 10).stderr == pytest.approx((0.25 / 10) ** 0.5)
    assert bootstrap_mean([0.0, 1.0] * 50).stderr == pytest.approx(0.05, abs=0.002)


def test_summary_without_a_compiler_or_families() -> None:
    summary = summarise(played("10", delivery="none"))
    assert (summary["emission_mix"], summary["parse_error_rate"], summary["by_family"]) == ({}, None, {})
    assert summary["compiler_tokens_per_step"] == 0.0 and summary["emission_tokens_per_step"] is None


def test_episodes_that_broke_before_their_first_step_are_summarised() -> None:
    broken = episode(steps=[], stop_reason=StopReason.ENVIRONMENT_FAILURE)
    summary = summarise([broken])
    assert summary["success"]["mean"] == summary["executor_tokens_per_step"] == summary["steps"] == 0.0
    assert summary["grounding"] == {}


def test_zero_episodes_are_an_error() -> None:
    with pytest.raises(ValueError, match="zero episodes"):
        summarise([])
    with pytest.raises(ValueError, match="static"):
        results({"none": played("1"), "static": []}, META)
    with pytest.raises(ValueError, match="no delivery"):
        results({}, META)


# A run


def run() -> dict[str, Any]:
    families = ("text", "visual")
    per_delivery = {
        name: [episode(f"t{i}", win == "1", delivery=name, family=families[i % 2]) for i, win in enumerate(wins)]
        for name, wins in {"compiled": "1110", "expert_compiler": "1111", "static": "1000", "none": "0010"}.items()
    }
    per_delivery["compiled"][3].stop_reason = StopReason.ENVIRONMENT_FAILURE
    for each in per_delivery["compiled"]:
        each.steps = [compiled_step("HYBRID"), compiled_step("NOACTION", parse_error="empty")]
    return results(per_delivery, {**META, "bank_version": 3})


def test_results_schema() -> None:
    run_results = run()
    assert list(run_results) == ["results", "environment", "split", "seed", "bank_version", "paired_difference"]
    assert list(run_results["results"]) == ["none", "static", "compiled", "expert_compiler"]
    assert list(run_results["paired_difference"]) == ["compiled - none", "compiled - static"]
    pair = run_results["paired_difference"]["compiled - none"]
    assert (pair["mean"], pair["wins"], pair["losses"], pair["n"]) == (0.5, 2, 0, 4)
    assert pair["by_family"]["visual"]["n"] == 2
    assert json.loads(json.dumps(run_results, allow_nan=False)) == run_results


def test_a_named_baseline_and_the_groups_of_a_matrix() -> None:
    named = {"k=1/none": "0000", "k=1/compiled": "1100", "k=4/none": "1000", "k=4/compiled": "1110"}
    per_name = {name: played(wins, delivery=name) for name, wins in named.items()}
    pairs = [("k=4/compiled", "k=1/compiled"), ("k=4/compiled", "k=4/none"), ("k=4/compiled", "absent")]
    run_results = results(per_name, META, pairs)
    differences = run_results["paired_difference"]
    assert list(run_results["results"]) == ["k=1/none", "k=1/compiled", "k=4/none", "k=4/compiled"]
    assert set(differences) == {"k=1/compiled - k=1/none", "k=4/compiled - k=4/none", "k=4/compiled - k=1/compiled"}
    assert differences["k=4/compiled - k=1/compiled"]["mean"] == 0.25
    text = printed(run_results)
    assert "k=4/compiled, text + soft − k=1/compiled, text + soft: +25.0 points" in text


def test_results_need_their_meta_data() -> None:
    with pytest.raises(ValueError, match="split"):
        results({"none": played("1")}, {"environment": "household", "seed": 0})
    with pytest.raises(ValueError, match="results"):
        results({"none": played("1")}, {**META, "results": {}})


def test_unknown_deliveries_come_last() -> None:
    assert ordered(["zeta", "expert_compiler", "compiled", "alpha"]) == ["compiled", "expert_compiler", "alpha", "zeta"]


# JSON


def test_episodes_come_back_from_json(tmp_path: Any) -> None:
    picture = Image.new("RGB", (3, 2), (10, 200, 30))
    original = example()
    original[0].memory_ids, original[0].bank_version = ("a", "b"), 3
    original[0].steps[0].image, original[0].steps[0].op_errors = picture, ("delete: no such key",)
    path = tmp_path / "episodes.jsonl"
    path.write_text("".join(json.dumps(e.to_json(images=True)) + "\n" for e in original), encoding="utf-8")
    restored = list(read_episodes(path))
    assert summarise(restored) == summarise(original)
    back = restored[0].steps[0].image
    assert back is not None and back.tobytes() == picture.tobytes()
    original[0].steps[0].image = restored[0].steps[0].image = None  # pictures compare by identity
    assert restored == original


def test_episodes_of_a_matrix_come_under_the_names_of_its_table(tmp_path: Any) -> None:
    cells = {}
    for scene_seed in (0, 1):
        folder = tmp_path / "cells" / str(scene_seed)
        folder.mkdir(parents=True)
        (folder / "episodes.jsonl").write_text(json.dumps(episode(delivery="none").to_json()) + "\n")
        cells[str(scene_seed)] = {"path": f"cells/{scene_seed}", "group": "k=1", "scene_seed": scene_seed}
    found = [(e.delivery, e.task_id) for e in episodes_of(tmp_path, {"cells": cells})(True)]
    assert found == [("k=1/none", "0/t0"), ("k=1/none", "1/t0")]


def test_what_is_no_episode_is_refused(tmp_path: Any) -> None:
    row = episode().to_json()
    for broken in ({}, {**row, "stop_reason": "tired"}, {**row, "steps": [{}]}, {**row, "steps": None}):
        with pytest.raises(ValueError):
            episode_from_json(broken)
    row["steps"][0]["image"] = "no picture"
    with pytest.raises(ValueError, match="picture"):
        episode_from_json(row)
    path = tmp_path / "episodes.jsonl"
    path.write_text(json.dumps(episode().to_json()) + '\n{"task_id": "torn', encoding="utf-8")
    with pytest.raises(ValueError, match="line 2"):
        list(read_episodes(path))


# Table


def printed(run_results: dict[str, Any], width: int = 120) -> str:
    out = io.StringIO()
    print_results(run_results, Console(file=out, width=width))
    return out.getvalue()


def test_table_holds_the_numbers_without_colour_in_120_columns() -> None:
    text = printed(run(), width=80)  # not a terminal, so it takes the width it needs
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 120
    # compiled: 3 of 4, one of which broke; 102 tokens on average is 52; half of the emissions did not parse; in eight
    # steps 8 * 100 and 8 * 52 tokens, 0.24 and 0.16 s
    reached, a_step = [line for line in text.splitlines() if "compiled, text + soft  " in line]
    for number in ("75.0 [30.1, 95.4]", "100.0", "50.0", "0.75", "2.0 [2.0, 2.0]", "267/139", "0.08/0.05"):
        assert number in reached
    for number in ("52", "E 0 B 0 H 50 N 50", "30/20/1.0"):
        assert number in a_step
    assert "+50.0 points [+0.0, +100.0], better on 2, worse on 0 of 4 tasks, p = 0.500" in text
    assert "compiled, text + soft: 1 environment failure" in text


def test_controls_stand_below_a_rule() -> None:
    lines = printed(run()).splitlines()
    at = next(i for i, line in enumerate(lines) if "expert as compiler" in line)
    assert set(lines[at - 1].strip()) == {"─"}
    assert "compiled, text + soft" in lines[at - 2]


def test_a_narrow_terminal_gets_the_table_in_three_parts() -> None:
    out = io.StringIO()
    print_results(run(), Console(file=out, width=80, force_terminal=True, color_system=None))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("compiled, text + soft  " in line for line in lines) == 3
    assert not any("…" in line for line in lines)


def test_names_are_not_read_as_markup() -> None:
    run_results = results({"[bold]x[/bold]|y": played("1")}, {**META, "environment": "a_b"})
    assert "[bold]x[/bold]|y" in printed(run_results)
    assert r"[bold]x[/bold]\|y" in to_markdown(run_results)


def test_markdown_is_a_table_with_the_same_numbers() -> None:
    head, rule, *rows = [line for line in to_markdown(run()).splitlines() if line.startswith("|")]
    assert len(rows) == 4
    assert {line.count("|") for line in (head, rule, *rows)} == {head.count("|")}
    assert "75.0 [30.1, 95.4]" in rows[2]
    assert rows[3].startswith("| *expert as compiler* |")
