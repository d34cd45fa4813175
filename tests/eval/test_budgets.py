"""Success within so many steps, how many it took and what it cost: against arithmetic done by hand."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from fractions import Fraction
from math import comb
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from agent.records import Episode, StepRecord
from configs.evaluation import EvalConfig
from configs.load import ConfigError, load_config
from eval.compare import write_comparison
from eval.intervals import sign_flip_p, wilson
from eval.metrics import budgets_of, difference, results, success_curve, summarise
from eval.plots import results_plots
from eval.report import write_report
from eval.table import print_results, to_markdown
from runtime.errors import StopReason
from tests.eval.pages import Page

META = {"environment": "household", "split": "test", "seed": 7}
COST = {
    "tokens": {"compiler_in": 40, "compiler_out": 10, "executor_in": 18, "executor_out": 2},
    "seconds": {"compiler": 0.5, "executor": 0.25, "environment": 9.0},
}


def episode(task: str, steps: int, success: bool, **changes: Any) -> Episode:
    stop = StopReason.SUCCESS if success else StopReason.STEP_LIMIT
    values: dict[str, Any] = {"kind": "pick", "family": "", "delivery": "compiled", "seed": 0, "stop_reason": stop}
    played = [StepRecord(t, "", None, None, "", **COST) for t in range(steps)]
    return Episode(task, "put mug", "home 1", "test", **{**values, "steps": played, "success": success, **changes})


def played(lengths: str, **changes: Any) -> list[Episode]:
    """`played("3 - 5")`: t0 solved in three steps, t1 not within its ten, t2 in five."""
    solved = [(f"t{i}", length) for i, length in enumerate(lengths.split())]
    return [episode(task, 10 if n == "-" else int(n), n != "-", **changes) for task, n in solved]


# which numbers of steps


@pytest.mark.parametrize(
    ("settings", "budgets"),
    [
        (["max_steps=12"], (12,)),
        (["max_steps=15"], (15,)),
        (["max_steps=40"], (15, 30, 40)),
        (["max_steps=50"], (15, 30, 50)),
        (["max_steps=80"], (15, 30, 50)),
        (["max_steps=10", "step_budgets=[8, 3, 8]"], (3, 8)),
        (["step_budgets=[]"], ()),
    ],
)
def test_budgets_are_those_that_are_played(settings: list[str], budgets: tuple[int, ...]) -> None:
    assert load_config(EvalConfig, None, settings).budgets == budgets


def test_a_budget_of_no_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match="step_budgets"):
        load_config(EvalConfig, None, ["step_budgets=[0, 15]"])


# one delivery


def test_success_within_so_many_steps_by_hand() -> None:
    # solved after 3, 5 and 8 of ten steps, one never: 1, 2, 3 and 3 of 4 within 3, 7, 8 and 10
    made = summarise(played("3 5 8 -"), (3, 7, 8, 10))
    assert {budget: (at["mean"], at["n"]) for budget, at in made["success_at"].items()} == {
        "3": (0.25, 4),
        "7": (0.5, 4),
        "8": (0.75, 4),
        "10": (0.75, 4),
    }
    assert made["success_at"]["10"] == made["success"]
    # 2 of 4: 0.5 -+ 1.959964 / (1 + 3.841459/4) * sqrt(0.25/4 + 3.841459/64) = 0.5 -+ 0.99979 * 0.35000
    low, high = made["success_at"]["7"]["low"], made["success_at"]["7"]["high"]
    assert (low, high) == (pytest.approx(0.150036, abs=2e-5), pytest.approx(0.849964, abs=2e-5))


def test_an_episode_that_broke_solves_nothing_at_any_budget() -> None:
    broken = episode("t0", 2, True, stop_reason=StopReason.ENVIRONMENT_FAILURE)
    made = summarise([broken, *played("- 4")], (5,))
    assert made["success_at"]["5"]["mean"] == pytest.approx(1 / 3)
    assert made["steps_to_success"]["counts"] == {"4": 1}


def test_families_and_kinds_have_the_same_budgets() -> None:
    text, visual = played("2 6", family="text", kind="heat"), played("- 9", family="visual", kind="cool")
    made = summarise([*text, *visual], (5, 10))
    assert [made["by_family"][name]["success_at"]["5"]["mean"] for name in ("text", "visual")] == [0.5, 0.0]
    assert [made["by_kind"][name]["success_at"]["10"]["mean"] for name in ("heat", "cool")] == [1.0, 0.5]


def test_steps_to_success_are_of_successes_alone() -> None:
    made = summarise(played("3 - 5 10 -"))["steps_to_success"]
    assert (made["mean"], made["median"], made["n"]) == (6.0, 5.0, 3)
    assert made["counts"] == {"3": 1, "5": 1, "10": 1}
    # of 27 resamples one each is (3, 3, 3) and (10, 10, 10), 1/27 > 2.5 %: the interval ends there
    assert (made["low"], made["high"]) == (3.0, 10.0)
    assert summarise(played("3 5 7 -"))["steps_to_success"]["median"] == 5.0
    assert summarise(played("3 4"))["steps_to_success"]["median"] == 3.5


def test_cost_is_of_all_episodes_for_each_success() -> None:
    # 3 + 10 + 5 = 18 steps, two successes; a step takes 50 tokens and 0.5 s of the compiler, 20 and 0.25 s of the other
    made = summarise(played("3 - 5"))["cost_per_success"]
    assert made == {"compiler": {"tokens": 450.0, "seconds": 4.5}, "executor": {"tokens": 180.0, "seconds": 2.25}}


def test_without_a_success_nothing_is_infinite() -> None:
    made = results({"none": played("- -")}, META, budgets={"none": (5,)})
    of = made["results"]["none"]
    assert of["steps_to_success"] is None and of["cost_per_success"] is None
    assert (of["success_at"]["5"]["mean"], of["success_at"]["5"]["n"]) == (0.0, 2)
    assert json.loads(json.dumps(made, allow_nan=False)) == made


def test_the_curve_rises_where_episodes_were_solved() -> None:
    curve = success_curve(summarise(played("1 3 3 -"), (2, 5)))
    assert [point.mean for point in curve] == [0.0, 0.25, 0.25, 0.75, 0.75, 0.75]
    assert curve[3] == wilson(3, 4)
    assert [point.mean for point in success_curve(summarise(played("- -"), (2,)))] == [0.0] * 3
    made = summarise(played("2 9 - 4 4 7"), (3, 4, 8))
    assert all(made["success_at"][str(t)]["mean"] == success_curve(made)[t].mean for t in (3, 4, 8))


# two deliveries


def test_mcnemar_by_hand() -> None:
    # 10 for, 1 against: 2 * (C(11, 0) + C(11, 1)) / 2^11 = 24 / 2048; 3 for: 2 / 8; 2 each: everything is as far
    ones = [Fraction(1)]
    assert sign_flip_p([*ones * 10, Fraction(-1), Fraction(0)]) == 24 / 2048
    assert sign_flip_p(ones * 3) == 0.25
    assert sign_flip_p([Fraction(1), Fraction(-1)] * 2) == 1.0
    assert sign_flip_p([Fraction(0)] * 5) == 1.0


@given(wins=st.integers(0, 40), losses=st.integers(0, 40), ties=st.integers(0, 5))
def test_a_task_played_once_is_mcnemars_test(wins: int, losses: int, ties: int) -> None:
    n, fewer = wins + losses, min(wins, losses)
    binomial = min(1.0, 2 * sum(comb(n, k) for k in range(fewer + 1)) / 2**n)
    differences = [*[Fraction(1)] * wins, *[Fraction(-1)] * losses, *[Fraction(0)] * ties]
    assert sign_flip_p(differences) == pytest.approx(binomial, rel=1e-12)


def test_a_task_of_several_seeds_counts_once() -> None:
    # differences 1, 1 and -1/2, as whole numbers 2, 2, -1: of the sums 5, 3, 1, -1, 1, -1, -3, -5 four are as far as 3
    assert sign_flip_p([Fraction(1), Fraction(1), Fraction(-1, 2)]) == 0.5
    assert sign_flip_p([Fraction(1, 3), Fraction(2, 3), Fraction(1)]) == 0.25
    # the same game solved under three seeds is no threefold evidence
    a = [solved for seed in range(3) for solved in played("3 3 3 3", seed=seed)]
    b = [failed for seed in range(3) for failed in played("- - - -", seed=seed)]
    assert difference(a, b)["p"] == 2 / 2**4


def test_differences_at_each_budget_by_hand() -> None:
    # within 4 steps a solves t0, t1, t2 and b solves t3; in the end both solve t3 and b also t0
    made = difference(played("3 4 4 9 -"), played("9 - - 2 -"), (4, 10))
    early, late = made["at"]["4"], made["at"]["10"]
    assert (early["mean"], early["wins"], early["losses"], early["n"]) == (0.4, 3, 1, 5)
    assert early["p"] == 2 * (1 + 4) / 16
    assert (late["wins"], late["losses"], late["p"]) == (2, 0, 0.5)
    assert late == {key: made[key] for key in late}


def test_pairs_are_compared_at_the_budgets_that_both_have() -> None:
    per_delivery = {"none": played("9 -", delivery="none"), "compiled": played("3 4")}
    made = results(per_delivery, META, budgets={"none": (4, 10), "compiled": (4, 6)})
    assert list(made["paired_difference"]["compiled - none"]["at"]) == ["4"]
    assert budgets_of(made["results"].values()) == [4, 6, 10]


# where it is shown


def example() -> tuple[dict[str, Any], list[Episode]]:
    per_delivery = {"none": played("9 - 9 -", delivery="none"), "compiled": played("3 4 9 -")}
    made = results(per_delivery, META, budgets=dict.fromkeys(per_delivery, (4, 10)))
    return made, [episode for episodes in per_delivery.values() for episode in episodes]


def printed(made: Mapping[str, Any]) -> str:
    out = io.StringIO()
    print_results(made, Console(file=out, width=300))
    return out.getvalue()


def words(page: Page) -> str:
    return " ".join(page.text.split())


def test_the_table_tells_budgets_that_say_more_than_success() -> None:
    text = printed(example()[0])
    heads = text.splitlines()[2].split()
    assert heads.count("≤") == 1 and "4" in heads  # within 10 steps is what is solved in the end
    line = next(line for line in text.splitlines() if "compiled, text + soft  " in line)
    # solved after 3, 4 and 9 steps, 26 with the failed one's: 26 * 50 / 3 and 26 * 20 / 3 tokens
    assert "75.0 [30.1, 95.4]" in line and "50.0" in line and "5.3 [3.0, 9.0]" in line and "433/173" in line
    assert "p = 1.000; ≤ 4 steps +50.0 [+0.0, +100.0], p = 0.500" in text
    assert "| 433/173 |" in to_markdown(example()[0])


def test_the_report_tells_each_budget_and_what_a_success_took(tmp_path: Path) -> None:
    made, episodes = example()
    page = Page(write_report(made, episodes, tmp_path / "report.html").read_text(encoding="utf-8"))
    text = words(page)
    assert "within 4 steps, %within 10 steps, % steps to success" in text
    # 2 of 4 and 3 of 4; 4 and 9 steps: the median is 4
    row = "compiled, text + soft 50.0 [15.0, 85.0] 75.0 [30.1, 95.4] 5.3 [3.0, 9.0] median 4, n 3 433 · 173 4.3 · 2.2"
    assert row in text
    assert "+25.0 [+0.0, +75.0] p = 1.000 +50.0 [+0.0, +100.0] p = 0.500" in text


def test_curves_are_drawn_for_a_run_and_for_a_matrix(tmp_path: Path) -> None:
    made, _ = example()
    whole = {"results": {f"k={k}/{name}": of for k in (1, 2, 4) for name, of in made["results"].items()}}
    for name, of in (("run", made), ("matrix", whole)):
        [_, steps] = results_plots(of, tmp_path / name)
        assert Image.open(steps).format == "PNG"


def test_runs_are_compared_at_the_budgets_that_both_have(tmp_path: Path) -> None:
    made, episodes = example()
    for name, of in (("first", made), ("second", made)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "results.json").write_text(json.dumps({**of, "config": {"name": name}}), encoding="utf-8")
        lines = [json.dumps(episode.to_json()) for episode in episodes]
        (folder / "episodes.jsonl").write_text("\n".join(lines), encoding="utf-8")
    page = Page(write_comparison([tmp_path / name for name in ("first", "second")]).read_text(encoding="utf-8"))
    data = json.loads(page.inside["script"][0])
    assert data["second/compiled"]["at"].keys() == {"4", "10"}
    assert data["second/compiled"]["at"]["4"]["n"] == 4 and data["second/compiled"]["p"] == 1.0
    text = words(page)
    assert "second/compiled, text + soft 50.0 [15.0, 85.0] 75.0 [30.1, 95.4] 5.3 [3.0, 9.0]" in text
