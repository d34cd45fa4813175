"""The paper's tables: its figures as printed, measured ones where they belong, and nothing invented between them."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from agent.records import Episode, StepRecord
from configs.evaluation import EvalConfig
from configs.load import CONFIGS, load_config
from configs.reproduce import find_chain
from eval.intervals import bootstrap_mean, wilson
from eval.matrix import cells, joined
from eval.metrics import summarise
from eval.paper.render import table_plot, to_markdown
from eval.paper.specs import PAPERS, SPECS
from eval.paper.tables import MEASURED, NOT_MEASURED, PAPER, Table, paper_numbers, paper_table
from eval.runs import read_results

EVAL_CONFIGS = CONFIGS / "eval"


def summary(successes: int, n: int, progress: float | None = None, **more: Any) -> dict[str, Any]:
    """A summary as results.json has it; progress at `progress` for every episode."""
    values = [successes / n if progress is None else progress] * n
    return {
        "success": asdict(wilson(successes, n)),
        "progress": asdict(bootstrap_mean(values)),
        "by_family": {},
        **more,
    }


def run_of(folder: Path, results: dict[str, Any], **meta: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    head = {"environment": "household", "split": "test", "seed": 0, "n_tasks": 10, "git": "abc", **meta}
    (folder / "results.json").write_text(json.dumps({"results": results, "complete": True, **head}), encoding="utf-8")
    return folder


def matrix_of(folder: Path, config: str | EvalConfig, score: dict[str, tuple[int, int]]) -> Path:
    """Results as a configuration (the name of a shipped one) would write them: `score` by `cell group/delivery`."""
    asked = load_config(EvalConfig, EVAL_CONFIGS / f"{config}.yaml") if isinstance(config, str) else config
    made = cells(asked)
    results, described = {}, {}
    for cell in made:
        described[cell.name] = {
            "path": f"cells/{cell.name}",
            "group": cell.group,
            "environment": cell.config.env.name,
            "split": cell.config.split,
            "seed": 0,
            "scene_seed": 0,
            "n_tasks": 50,
            "config": cell.config.model_dump(mode="json"),
            "trained": {"checkpoint": "c", "environment": "e", "soft": True, "brief_state": True},
        }
        for delivery in cell.config.deliveries:
            name = joined(cell.group, delivery)
            results[name] = summary(*score.get(name, (25, 50)), delivery=delivery, levels=dict(cell.levels))
    return run_of(folder, results, cells=described)


def row(table: Table, executor: str, method: str, source: str) -> dict[str, Any]:
    [found] = [r for r in table.rows if (r.executor, r.method, r.source) == (executor, method, source)]
    return dict(found.cells)


# the paper's own numbers ----------------------------------------------------------------------------------------------


ALL = [(paper, number) for paper, of in PAPERS.items() for number in of.tables]


@pytest.mark.parametrize(("paper", "number"), ALL)
def test_every_row_has_a_value_for_every_column(paper: str, number: int) -> None:
    printed = paper_numbers(paper)["tables"][number]
    assert [c.name for c in PAPERS[paper].tables[number].columns] == printed["columns"]
    for methods in printed["executors"].values():
        for numbers in methods.values():
            assert len(numbers["values"]) == len(printed["columns"])
            assert len(numbers.get("relative", [])) == len(printed.get("relative_of", []))


def test_what_the_text_of_the_paper_says_stands_in_the_tables() -> None:
    tables = {n: paper_numbers()["tables"][n]["executors"] for n in SPECS}
    assert (
        tables[1]["Qwen-3-VL-32B"]["Ours"]["values"][0] == 40
        and tables[1]["Qwen-3-VL-32B"]["Ours"]["relative"][0] == 110
    )
    assert tables[1]["Qwen-2.5-VL-32B"]["A-Mem"]["relative"][0] == -83.3
    assert tables[2]["Qwen-3.5-27B"]["Ours"] == {"values": [91.45, 48.44], "relative": [49.5, 129]}
    assert tables[3]["Qwen-2.5-14B"]["AMMI (static injection, same memory)"]["values"][0] == 35.03
    assert tables[5]["Qwen-2.5-14B"]["SCMC"]["values"] == [0.093, 0.12, 1003.2, 8.2, 2081.4, 82.16]
    assert tables[6]["Qwen-2.5-VL-32B"]["Ours"]["relative"][0] == 54.3
    full = tables[3]["Qwen-2.5-14B"]["MemCompiler (Full)"]["values"]
    assert full[:2] == tables[2]["Qwen-2.5-14B"]["Ours"]["values"]
    assert tables[4]["Qwen-2.5-VL-32B"]["N=16 (default)"]["values"][1:] == [36, 60]


def test_averages_are_those_of_the_six_subsets_but_where_the_paper_has_it_otherwise() -> None:
    """A slip in one of 48 rows of 14 numbers would show here; the five that the paper itself has are named."""
    off = set()
    for number in (1, 6):
        for executor, methods in paper_numbers()["tables"][number]["executors"].items():
            for method, numbers in methods.items():
                for at in (0, 7):
                    of_six = sum(numbers["values"][at + 1 : at + 7]) / 6
                    if abs(of_six - numbers["values"][at]) > 0.02:
                        off.add((number, executor, method, at))
    assert off == {
        (1, "Gemini-3-flash", "G-Mem", 0),
        (1, "Qwen-2.5-VL-32B", "MemGen", 0),
        (1, "Qwen-3-VL-32B", "MemGen", 0),
        (6, "Gemini-3-flash", "LangMem", 7),
        (6, "Qwen-3-VL-32B", "Ours", 7),
    }


# measured ones --------------------------------------------------------------------------------------------------------

CHAINS = {
    1: ("eb_alfred", "eb_habitat"),
    2: ("alfworld", "scienceworld"),
    3: ("alfworld", "scienceworld"),
    4: ("eb_habitat",),
    5: ("alfworld",),
    6: ("eb_alfred", "eb_habitat"),
}


def runs_of_chains(folder: Path, table: int, score: dict[str, tuple[int, int]] | None = None) -> list[Path]:
    """Results of the shipped chains' evaluations for a table."""
    stages = [stage for name in CHAINS[table] for stage in find_chain(name).stages([table])]
    evaluations = [(stage.folder, stage.config) for stage in stages if isinstance(stage.config, EvalConfig)]
    return [matrix_of(folder / path, config, score or {}) for path, config in evaluations]


BRAINMEM = {4: "tiers", 5: "working", 6: "window", 7: "episodic", 8: "experiences", 9: "insights", 14: "orders"}


@pytest.mark.parametrize("number", BRAINMEM)
def test_each_of_brainmem_s_rows_is_measured_by_its_configuration_as_an_analogue(number: int, tmp_path: Path) -> None:
    table = paper_table(number, [matrix_of(tmp_path / "run", f"brainmem-{BRAINMEM[number]}", {})], "brainmem")
    printed = paper_numbers("brainmem")["tables"][number]
    assert table.columns[0] == "EB-ALFRED Base" and table.columns[-1].startswith("alfworld valid_seen")
    for method in printed["executors"]["GPT-4o"]:
        [ours] = [r for r in table.rows if (r.executor, r.method, r.source) == ("scripted planner", method, MEASURED)]
        assert set(ours.cells) == {c for c in table.columns if c.startswith("alfworld")}
    assert "analogues" in to_markdown(table) and "2604.16331" in to_markdown(table)


def test_brainmem_s_own_benchmarks_fill_the_paper_s_columns(tmp_path: Path) -> None:
    usage = {"executor": {"calls": 9, "tokens_in": 4_000_000, "tokens_out": 50_000}}
    run = matrix_of(tmp_path / "run", "brainmem-embodiedbench", {})
    results = json.loads((run / "results.json").read_text())
    for of in results["results"].values():
        of["usage"] = usage
    (run / "results.json").write_text(json.dumps(results))
    [ours] = [r for r in paper_table(10, [run], "brainmem").rows if (r.method, r.source) == ("BrainMem", MEASURED)]
    assert ours.cells["EB-ALFRED Base, 10^6 tokens"].value == ours.cells["EB-ALFRED Long, 10^6 tokens"].value == 4.05
    assert "EB-ALFRED Base" in row(paper_table(14, [run], "brainmem"), ours.executor, "live memory", MEASURED)


def test_tokens_and_orders_of_a_stream(tmp_path: Path) -> None:
    usage = {"executor": {"calls": 9, "tokens_in": 2_000_000, "tokens_out": 50_000}, "environment": {"calls": 9}}
    config = {"executor": {"engine": "scripted"}}
    run = run_of(
        tmp_path / "a", {"none": summary(5, 10, usage=usage)}, environment="alfworld", split="x", config=config
    )
    table = paper_table(10, [run], "brainmem")
    assert row(table, "scripted planner", "No memory", MEASURED)["alfworld x, 10^6 tokens"].value == 2.05
    assert "| 2.05 |" in to_markdown(table)
    table_plot(table, tmp_path / "table.png")
    orders = {str(n): score for n, score in enumerate((0.80, 0.82, 0.82, 0.80, 0.84))}
    results = {"live": summary(408, 500, levels={"memory": "brainmem"}, success_by_order=orders)}
    streams = paper_table(14, [run_of(tmp_path / "b", results, config=config)], "brainmem")
    assert "BrainMem: 81.6 ± 1.7 (mean and standard deviation of 5 orders)." in streams.notes
    with pytest.raises(ValueError, match="there are none of nobody"):
        paper_table(4, [], "nobody")


@pytest.mark.parametrize("number", [1, 2, 3, 4, 6])
def test_the_chains_fill_every_column_of_the_paper(number: int, tmp_path: Path) -> None:
    table = paper_table(number, runs_of_chains(tmp_path, number))
    columns = paper_numbers()["tables"][number]["columns"]
    assert list(table.columns) == columns  # and no column beside them: all of it is the paper's
    for executor, methods in paper_numbers()["tables"][number]["executors"].items():
        for method in methods.keys() & (set(SPECS[number].methods.values()) - {"MemGen"}):  # no chain trains it
            if any(r.executor == executor and r.source == MEASURED for r in table.rows):
                assert set(row(table, executor, method, MEASURED)) == set(columns), (executor, method)
    measured = {r.executor for r in table.rows if r.source == MEASURED}
    assert measured and measured <= paper_numbers()["tables"][number]["executors"].keys()


def test_measured_stands_beside_paper_with_interval_and_change(tmp_path: Path) -> None:
    """67 of 134 without memory and 110 of 134 compiled: 50 % and 82.1 %, a change of +64.2 %."""
    table = paper_table(2, runs_of_chains(tmp_path, 2, {"none": (67, 134), "compiled": (110, 134)}))
    ours = row(table, "Qwen-2.5-14B", "Ours", MEASURED)["AlfWorld"]
    expected = wilson(110, 134)
    assert (ours.value, ours.low, ours.high) == pytest.approx(
        [100 * v for v in (110 / 134, expected.low, expected.high)]
    )
    assert ours.n == 134 and ours.relative == pytest.approx(100 * (110 / 67 - 1))
    paper = row(table, "Qwen-2.5-14B", "Ours", PAPER)["AlfWorld"]
    assert (paper.value, paper.low, paper.n, paper.relative) == (82.16, None, None, 77.6)
    text = to_markdown(table)
    assert "| Qwen-2.5-14B | Ours | paper | 82.16 (+77.6%) |" in text
    assert "| Qwen-2.5-14B | Ours | **measured** | 82.1 [74.7, 87.7] (+64.2%) |" in text
    assert f"| Qwen-2.5-14B | G-Mem | paper; {NOT_MEASURED} |" in text


def test_an_average_needs_all_subsets_and_pools_their_episodes(tmp_path: Path) -> None:
    splits = ("base", "common_sense", "complex_instruction", "visual_appearance", "spatial", "long_horizon")
    score = {f"split={name}/compiled": (10 * i, 50) for i, name in enumerate(splits)}
    runs = runs_of_chains(tmp_path, 1, score)
    [run] = [run for run in runs if run.parts[-4:-1] == ("eb_alfred", "eval", "qwen3-vl-32b")]
    whole = row(paper_table(1, runs), "Qwen-3-VL-32B", "Ours", MEASURED)
    assert whole["EB-ALFRED Avg."].n == 300 and whole["EB-ALFRED Avg."].value == pytest.approx(50.0)
    assert whole["EB-ALFRED Long"].value == 100 and whole["EB-ALFRED Base"].value == 0
    assert whole["EB-ALFRED Avg."].low == pytest.approx(100 * wilson(150, 300).low)
    results = json.loads((run / "results.json").read_text())
    results["results"] = {k: v for k, v in results["results"].items() if "long_horizon" not in k}
    (run / "results.json").write_text(json.dumps(results))
    table = paper_table(1, runs)
    part = row(table, "Qwen-3-VL-32B", "Ours", MEASURED)
    assert "EB-ALFRED Avg." not in part and "EB-ALFRED Long" not in part and "EB-Habitat Avg." in part
    shown = "| Qwen-3-VL-32B | Ours | **measured**"
    assert NOT_MEASURED in next(line for line in to_markdown(table).splitlines() if line.startswith(shown))


def test_another_split_or_benchmark_gets_a_column_of_its_own(tmp_path: Path) -> None:
    """valid_seen is not what the paper's AlfWorld column is of."""
    run = run_of(
        tmp_path, {"none": summary(3, 10), "compiled": summary(6, 10)}, environment="alfworld", split="valid_seen"
    )
    table = paper_table(2, [run])
    assert table.columns == ("AlfWorld", "ScienceWorld", "alfworld valid_seen")
    ours = row(table, "unknown executor", "Ours", MEASURED)
    assert set(ours) == {"alfworld valid_seen"} and ours["alfworld valid_seen"].relative == pytest.approx(100)


def test_families_are_columns_and_a_zero_baseline_has_no_relative_change(tmp_path: Path) -> None:
    def both(text: int, visual: int) -> dict[str, Any]:
        return summary(text + visual, 20, by_family={"text": summary(text, 10), "visual": summary(visual, 10)})

    run = run_of(tmp_path, {"none": both(0, 5), "compiled": both(8, 10)})
    table = paper_table(1, [run])
    assert table.columns[-3:] == ("household test", "household test: text", "household test: visual")
    ours = row(table, "unknown executor", "Ours", MEASURED)
    assert ours["household test: text"].relative is None
    assert ours["household test: visual"].relative == pytest.approx(100) and ours["household test"].n == 20


def test_progress_tables_show_progress(tmp_path: Path) -> None:
    run = run_of(tmp_path, {"none": summary(0, 10, progress=0.25), "compiled": summary(0, 10, progress=0.5)})
    ours = row(paper_table(6, [run]), "unknown executor", "Ours", MEASURED)["household test"]
    assert ours.value == 50 and ours.relative == pytest.approx(100)
    both = row(paper_table(3, [run]), "unknown executor", "MemCompiler (Full)", MEASURED)
    assert (both["household test"].value, both["household test progress"].value) == (0, 50)


def test_axes_that_no_row_or_column_tells_stand_beside_the_method(tmp_path: Path) -> None:
    graph = summary(5, 10, delivery="static", levels={"memory": "graph"})
    none = summary(4, 10, delivery="none", levels={"memory": "graph"})
    flat = summary(2, 10, delivery="static", levels={"memory": "flat"})
    names = {"memory=graph/static": graph, "memory=graph/none": none, "memory=flat/static": flat}
    table = paper_table(2, [run_of(tmp_path, names)])
    of_graph = row(table, "unknown executor", "AMMI (static injection) [memory=graph]", MEASURED)["household test"]
    assert of_graph.relative == pytest.approx(25)
    assert (
        row(table, "unknown executor", "AMMI (static injection) [memory=flat]", MEASURED)["household test"].relative
        is None
    )


def memory_cell(delivery: str, system: str, solved: int, by: str = "writer", **levels: str) -> dict[str, Any]:
    """A cell of eval/memories: 10 episodes with a system's memory, under the paper's conditions but for `levels`."""
    paper = {"protocol": "frozen", "homes": "in_bank", "size": "native"}
    writing = {"writing": {"system": system, "written_by": by}} if system != "none" and delivery != "memgen" else {}
    return summary(solved, 10, delivery=delivery, levels={**paper, **levels, "memory": system}, **writing)


@pytest.mark.parametrize("number", [1, 2, 6])
def test_cells_of_the_memory_matrix_are_the_paper_s_rows(number: int, tmp_path: Path) -> None:
    cells = [
        memory_cell("none", "none", 4),
        memory_cell("none", "none", 2, size="equal"),
        memory_cell("static", "trajectory", 6, by="rules"),
        memory_cell("compiled", "trajectory", 8, by="rules"),
        memory_cell("static", "amem", 5),
        memory_cell("static", "amem", 3, size="equal"),
        memory_cell("compiled", "amem", 9),
        memory_cell("static", "gmemory", 1),
        memory_cell("static", "mem0", 2),
        memory_cell("static", "langmem", 7, by="rules"),
        memory_cell("memgen", "none", 6),
    ]
    table = paper_table(number, [run_of(tmp_path, {f"cell {n}/{of['delivery']}": of for n, of in enumerate(cells)})])
    column = "household test"
    measured = {r.method: r.cells[column] for r in table.rows if r.source == MEASURED}
    assert {method: round(cell.value) for method, cell in measured.items()} == {
        "No Mem": 40,
        "No Mem [size=equal]": 20,
        "AMMI (static injection)": 60,
        "Ours": 80,
        "A-Mem": 50,
        "A-Mem [size=equal]": 30,
        "Ours [memory=amem]": 90,
        "G-Mem": 10,
        "Mem0": 20,
        "LangMem-style memory, written by rules": 70,
        "MemGen": 60,
    }
    assert {"G-Mem", "Mem0", "A-Mem", "MemGen", "Ours"} <= {r.method for r in table.rows if r.source == PAPER}
    changes = {method: cell.relative for method, cell in measured.items()}
    assert changes["A-Mem"] == pytest.approx(25) and changes["MemGen"] == pytest.approx(50)
    assert changes["A-Mem [size=equal]"] == pytest.approx(50)  # of 20 % under the same condition
    assert changes["Ours [memory=amem]"] == pytest.approx(125)
    assert "not the published systems" in to_markdown(table)


def test_two_measurements_for_one_cell_are_an_error(tmp_path: Path) -> None:
    runs = [run_of(tmp_path / name, {"none": summary(1, 10)}) for name in ("a", "b")]
    with pytest.raises(ValueError, match="two measurements"):
        paper_table(2, runs)
    other = run_of(tmp_path / "c", {"none": summary(1, 10)}, split="valid")
    assert "household valid" in paper_table(2, [runs[0], other]).columns


def test_runs_that_are_not_there_or_not_whole_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="memcompiler eval"):
        read_results(tmp_path)
    (tmp_path / "results.json").write_text('{"complete": false, "missing": ["seed=1"]}')
    with pytest.raises(ValueError, match="seed=1 are missing: continue with --on-exists resume"):
        read_results(tmp_path)
    with pytest.raises(ValueError, match="there is no table 7"):
        paper_table(7, [tmp_path])


def played(delivery: str, task: str, calls: list[tuple[float, int, int]]) -> Episode:
    """(executor seconds, tokens in, out) by step; a compiled one takes twice of each."""
    steps = []
    for t, (seconds, read, written) in enumerate(calls):
        step = StepRecord(t, "see", None, None, "goal: x", seconds={"executor": seconds})
        step.tokens = {"executor_in": read, "executor_out": written}
        if delivery == "compiled":
            step.seconds["compiler"] = 2 * seconds
            step.tokens |= {"compiler_in": 2 * read, "compiler_out": 2 * written}
        steps.append(step)
    return Episode(task, "x", "", "test", "", "", delivery, 0, steps=steps)


def test_table_5_is_per_call_over_all_steps_with_intervals_over_episodes(tmp_path: Path) -> None:
    """Executor: (0.1 + 0.1 + 0.4) / 3 = 0.2 s, (100 + 100 + 400) / 3 = 200 tokens read; the compiler twice that."""
    episodes = {
        name: [played(name, "a", [(0.1, 100, 5), (0.1, 100, 5)]), played(name, "b", [(0.4, 400, 8)])]
        for name in ("static", "compiled")
    }
    run = run_of(tmp_path, {name: summarise(of) for name, of in episodes.items()}, config={"concurrency": 4})
    with (run / "episodes.jsonl").open("w") as file:
        file.writelines(json.dumps(e.to_json()) + "\n" for of in episodes.values() for e in of)
    table = paper_table(5, [run])
    compiled = row(table, "unknown executor", "SCMC, household test", MEASURED)
    assert compiled["Executor s"].value == pytest.approx(0.2) and compiled["Compiler s"].value == pytest.approx(0.4)
    assert compiled["Exec In"].value == pytest.approx(200) and compiled["Exec Out"].value == pytest.approx(6)
    assert compiled["Compiler tokens"].value == pytest.approx(2 * 206) and compiled["Exec In"].n == 2
    assert (compiled["Exec In"].low, compiled["Exec In"].high) == pytest.approx((100, 400))  # all of a, all of b
    static = row(table, "unknown executor", "AMMI, household test", MEASURED)
    assert "Compiler s" not in static and any("batched" in note for note in table.notes)
    (run / "episodes.jsonl").unlink()
    alone = row(paper_table(5, [run]), "unknown executor", "SCMC, household test", MEASURED)
    assert alone["Exec In"].value == pytest.approx(200) and alone["Exec In"].low is None


def test_json_tells_paper_from_measured_and_null_from_zero(tmp_path: Path) -> None:
    run = run_of(tmp_path, {"none": summary(0, 10), "compiled": summary(5, 10)})
    made = json.loads(json.dumps(paper_table(2, [run]).to_json()))
    by = {(r["executor"], r["method"], r["source"]): r for r in made["rows"]}
    assert by["unknown executor", "No Mem", MEASURED]["cells"]["household test"]["value"] == 0
    assert by["unknown executor", "No Mem", MEASURED]["cells"]["AlfWorld"] is None
    assert by["Qwen-2.5-14B", "Ours", PAPER]["measured"] is False and made["runs"][0]["seed"] == ["0"]


def test_names_from_data_cannot_break_the_table_or_the_picture(tmp_path: Path) -> None:
    config = {"executor": {"model": "org/a|b\n$x$ <b>"}}
    table = paper_table(2, [run_of(tmp_path, {"none": summary(1, 10)}, config=config)])
    lines = [line for line in to_markdown(table).splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in lines} == {lines[0].count("|")} and "<b>" not in "".join(
        lines
    ).replace("\\<", "")
    assert table_plot(table, tmp_path / "t.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
