"""`memcompiler reproduce`: every shipped chain at tiny size to its rows of the paper's tables, killed and resumed."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from configs.load import CONFIGS, load_config
from configs.reproduce import find_chain, shipped_chains
from memcompiler.cli import app
from memcompiler.reproduce import check_chain
from memcompiler.reproduce import command as stage_command
from runtime.checksums import parse_row
from tests.faulty_server import FaultyServer

ROOT = Path(__file__).parents[2]
STANDIN = ROOT / "tests" / "envs" / "embodiedbench_standin"
MODELS: dict[str, Any] = {
    "compiler": {
        "model": "zoo/household/compiler",
        "engine": "hf",
        "dtype": "float32",
        "instructions": "none",
        "max_new_tokens": 8,
        "soft": {"n_tokens": 2, "emb_std": "auto"},
    },
    "executor": {"engine": "hf", "dtype": "float32", "instructions": "none", "max_new_tokens": 8},
}
SMALL: dict[str, Any] = {
    "executors": {"tiny": {"model": "zoo/household/executor", "chat_template": {}}},
    "collect": {"limit": 3, "executor": {"model": "zoo/household/executor", "mode": "choice"}},
    "sft": {"max_steps": 2, "batch_size": 2, "loader_workers": 0, "latent": "none", "backend": "replicated"},
    "grpo": {"updates": 1, "tasks": 2, "group_size": 2, "max_steps": 2, "cluster": "local", "micro_batch_size": 8},
    "eval": {"limit": 2, "max_steps": 2},
    "processes": {"separate": False, "sft": 1},
}


def tiny(folder: Path, benchmark: str, **changes: dict[str, Any]) -> Path:
    """Write the shipped chain of a benchmark at tiny size: its first executor is a tiny model, and little is played."""
    chain = find_chain(benchmark).config
    first = next(iter(chain.executors))
    evaluations = {n: {"executors": ["tiny"]} for n, of in chain.evaluations.items() if first in (of.executors or ())}
    asked: dict[str, Any] = {"base": str(CONFIGS / "reproduce" / f"{benchmark}.yaml"), "shared": MODELS, **SMALL}
    asked["evaluations"] = evaluations
    for block, change in changes.items():
        asked[block] = {**asked.get(block, {}), **change}
    path = folder / f"{benchmark}.yaml"
    path.write_text(yaml.safe_dump(asked), encoding="utf-8")
    return path


def reproduce(chain: Path, out: Path, *arguments: str) -> str:
    """Run a tiny chain to its end; returns the output."""
    asked = ["reproduce", str(chain), "--executor", "tiny", "--out", str(out), *arguments]
    answer = CliRunner().invoke(app, asked, catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    return answer.output


def rows(out: Path, table: int) -> dict[str, dict[str, Any]]:
    """Return the cells of a table's measured rows by method."""
    made = json.loads((out / "tables" / f"table{table}.json").read_text())
    return {row["method"]: row["cells"] for row in made["rows"] if row["source"] == "measured"}


# -- to the tables -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of ALFWorld games made from generated homes: 8 of train, 3 of valid_unseen in another home."""
    pytest.importorskip("alfworld")
    from envs.alfworld.export import export_split
    from envs.household.environment import HouseholdEnvironment

    folder = tmp_path_factory.mktemp("games")
    homes = HouseholdEnvironment(scenes={"train": 2, "valid_unseen": 1}, images=False)
    export_split(homes, "train", folder, 8)
    export_split(homes, "valid_unseen", folder, 3)
    for about in (folder / "json_2.1.1" / "valid_unseen").rglob("traj_data.json"):
        about.write_text(about.read_text().replace('"home 1"', '"FloorPlan10"'))
    return folder


@pytest.fixture(scope="module")
def alfworld(games: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """ALFWorld's chain at tiny size, and its folder with all results."""
    folder = tmp_path_factory.mktemp("alfworld")
    chain = tiny(folder, "alfworld", shared={**MODELS, "env": {"data_root": str(games)}})
    reproduce(chain, folder / "run")
    return chain, folder / "run"


@pytest.mark.slow
@pytest.mark.alfworld
def test_alfworld_s_chain_ends_in_tables_2_3_and_5(alfworld: tuple[Path, Path]) -> None:
    chain, out = alfworld
    ours = rows(out, 2)
    assert ours.keys() >= {"No Mem", "AMMI (static injection)", "Ours"} and ours["Ours"]["AlfWorld"]["n"] == 2
    without = "w/o Brief State (raw obs as state)"
    assert rows(out, 3).keys() >= {"MemCompiler (Full)", "w/o Soft-Mem (text only)", without}
    text = (out / "tables" / "table3.md").read_text()
    assert "no\\_brief (trained on alfworld without Brief State)" in text and "unlike the paper's" not in text
    assert rows(out, 5)["SCMC"]["Compiler tokens"]["value"] > 0

    before = {path: path.stat().st_mtime_ns for path in out.rglob("episodes.jsonl")}
    assert reproduce(chain, out).count("finished in") == 8  # of 8 stages
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("episodes.jsonl")}


@pytest.mark.slow
@pytest.mark.scienceworld
def test_scienceworld_s_chain_ends_in_its_tables(tmp_path: Path) -> None:
    pytest.importorskip("scienceworld", reason="needs the extra scienceworld")
    task = {
        "task": "scienceworld",
        "id": 0,
        "goal": "Your task is to find an animal, outside.",
        "subgoals": ["You move to the outside."],
        "difficulty": "easy",
        "additional_info": {"var": 5, "env_name": "find-animal"},
    }
    (tmp_path / "tasks.jsonl").write_text(json.dumps(task) + "\n")
    env = {"kinds": ["find-animal"], "tasks_file": str(tmp_path / "tasks.jsonl"), "workers": 1}
    memory = {"experience_limit": 2, "k": 2}
    chain = tiny(tmp_path, "scienceworld", shared={**MODELS, "env": env, "memory": memory})
    reproduce(chain, tmp_path / "run", "--tables", "2")
    ours = rows(tmp_path / "run", 2)["Ours"]
    assert ours["ScienceWorld"]["n"] == 1 and ours["AlfWorld"] is None


@pytest.mark.slow
@pytest.mark.alfworld
@pytest.mark.scienceworld
def test_one_compiler_for_two_benchmarks_ends_in_both_columns(games: Path, tmp_path: Path) -> None:
    pytest.importorskip("scienceworld", reason="needs the extra scienceworld")
    own = {"env": {"kinds": ["find-animal"], "tasks_file": None, "workers": 1}, "eval": {"split": "dev"}}
    shared = {**MODELS, "env": {"data_root": str(games)}, "memory": {"experience_limit": 2, "k": 2}}
    little = {**SMALL["eval"], "deliveries": ["none", "compiled"]}
    chain = tiny(tmp_path, "text", shared=shared, further={"scienceworld": own}, eval=little)
    out = tmp_path / "run"
    reproduce(chain, out, "--tables", "2")
    played = [parse_row(line) for line in (out / "grpo" / "tiny" / "both" / "rollouts.jsonl").read_text().splitlines()]
    assert [row["environment"] for row in played] == ["alfworld"] * 2 + ["scienceworld"] * 2
    ours = rows(out, 2)["Ours [trained_on=both]"]
    assert ours["AlfWorld"]["n"] == 2 and ours["scienceworld dev"]["n"] == 2
    text = (out / "tables" / "table2.md").read_text()
    assert text.count("both (trained on alfworld and scienceworld)") == 2
    assert reproduce(chain, out, "--tables", "2").count("finished in") == 6  # of 6 stages


@pytest.fixture
def embodiedbench(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """EmbodiedBench's stand-in and a teacher behind an endpoint; returns the changes of the collection."""
    monkeypatch.setenv("EMBODIEDBENCH_PYTHON", sys.executable)
    monkeypatch.setenv("EMBODIEDBENCH_HOME", str(STANDIN))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    with FaultyServer(answer=lambda messages: "> the mug was found at once | find a Mug") as server:
        yield {**SMALL["collect"], "api": {"base_url": server.url}, "successful_only": False, "max_steps": 3}


@pytest.mark.slow
@pytest.mark.parametrize("benchmark", ["eb_alfred", "eb_habitat"])
def test_embodiedbench_s_chains_end_in_tables_1_and_6(
    benchmark: str, embodiedbench: dict[str, Any], tmp_path: Path
) -> None:
    # The stand-in has few of the six subsets, and all of EB-Habitat's training tasks share something with them.
    played: dict[str, Any] = {
        "eb_alfred": {"leakage": {"held_out": ["base"]}},
        "eb_habitat": {"leakage": {"held_out": []}, "split": "train_validation"},
    }[benchmark]
    chain = tiny(
        tmp_path,
        benchmark,
        shared={**MODELS, "env": {"resolution": 64}},
        collect={**embodiedbench, **played},
        grpo={**SMALL["grpo"], **played},
        eval={**SMALL["eval"], "matrix": {"split": ["base"]}},
    )
    reproduce(chain, tmp_path / "run")
    name = {"eb_alfred": "EB-ALFRED", "eb_habitat": "EB-Habitat"}[benchmark]
    for table in (1, 6):
        ours = rows(tmp_path / "run", table)["Ours"]
        assert ours[f"{name} Base"]["n"] == 2 and ours[f"{name} Long"] is None and ours[f"{name} Avg."] is None


# -- kill and resume ---------------------------------------------------------------------------------------------------


def kill_once(mark: Path, *arguments: str) -> None:
    """Start a chain, and kill -9 it as soon as a file of the stage that it should be in has content."""
    process = subprocess.Popen(
        [sys.executable, "-m", "memcompiler", "reproduce", *arguments],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and not (mark.is_file() and mark.stat().st_size):
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.alfworld
def test_killed_in_every_stage_it_continues_to_the_same_result(alfworld: tuple[Path, Path], tmp_path: Path) -> None:
    chain, whole = alfworld
    out, only = tmp_path / "run", ("--tables", "2")
    asked = (str(chain), "--executor", "tiny", "--out", str(out), *only)
    kill_once(out / "collect" / "episodes.jsonl", *asked)
    kill_once(out / "sft" / "tiny" / "full" / "metrics.jsonl", *asked, "processes.separate=true")
    kill_once(out / "grpo" / "tiny" / "full" / "config.resolved.yaml", *asked)
    kill_once(out / "eval" / "tiny" / "main" / "episodes.jsonl", *asked)
    assert not (out / "tables").exists()
    reproduce(chain, out, *only)
    assert rows(out, 2) == rows(whole, 2)
    for kind in ("sft", "grpo"):
        for file in ("projector.safetensors", "adapter/adapter_model.safetensors"):
            one, other = (next((run / kind / "tiny" / "full").glob(f"checkpoints/*/{file}")) for run in (out, whole))
            assert one.read_bytes() == other.read_bytes(), (kind, file)
    played = [
        sorted((e["delivery"], e["task_id"], [step["action"] for step in e["steps"]]) for e in map(parse_row, lines))
        for run in (out, whole)
        for lines in [(run / "eval" / "tiny" / "main" / "episodes.jsonl").open()]
    ]
    assert played[0] == played[1] and len(played[0]) == 5 * 2


# -- before anything is started ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("benchmark", shipped_chains())
def test_the_paths_of_a_chain_fit_together_and_its_commands_are_its_stages(benchmark: str) -> None:
    """What a stage reads, an earlier one writes; and the printed command has the settings that the chain runs."""
    chain = find_chain(benchmark)
    stages = chain.stages([table for of in chain.config.evaluations.values() for table in of.tables])
    check_chain(stages)
    written: set[Path] = set()
    for stage in stages:
        config: Any = stage.config
        rows = config.rows if stage.kind == "sft" else ()
        read = [*([rows] if isinstance(rows, str) else rows)]
        if stage.kind in ("grpo", "eval"):
            banks = [part.memory.bank for part in getattr(config, "parts", [config])]
            read = [config.compiler.checkpoint, *banks]
        sources = [Path(path) for path in read if path]
        assert all(path in written or path.parent in written for path in sources)
        assert bool(sources) == (stage.kind != "collect")
        written.add(stage.folder)
        assert chain.out in stage.folder.parents and stage.folder == chain.out / stage.name

        command = shlex.split(stage_command(stage, chain))
        given = command[command.index("memcompiler") + 1 :]
        file = given[given.index("-c") + 1] if "-c" in given else None
        settings = [word for word in given if "=" in word]
        assert load_config(type(config), file, settings) == config
        assert given[-1] == str(stage.folder)


def test_a_row_without_brief_state_is_of_a_compiler_that_was_trained_without_it() -> None:
    for benchmark in ("alfworld", "scienceworld"):
        stages = {stage.name: stage for stage in find_chain(benchmark).stages([3])}
        sft: Any = stages["sft/qwen25-14b/no_brief"].config
        grpo: Any = stages["grpo/qwen25-14b/no_brief"].config
        played: Any = stages["eval/qwen25-14b/no_brief"].config
        assert (sft.brief_state, grpo.delivery, played.deliveries) == (
            False,
            "compiled_no_brief",
            ("compiled_no_brief",),
        )
        assert played.compiler.checkpoint == str(stages["grpo/qwen25-14b/no_brief"].folder)


def test_every_row_of_table_4_is_a_training_run_of_its_own() -> None:
    stages = find_chain("eb_habitat").stages([4])
    trained = {stage.compiler: stage for stage in stages if stage.kind == "sft"}
    assert {name: of.config.compiler.soft.n_tokens for name, of in trained.items()} == {  # type: ignore[union-attr]
        **dict.fromkeys(("full", "n0", "no_orth", "linear"), 16),
        **{"n4": 4, "n8": 8, "n32": 32},
    }
    evaluated = [stage.config.compiler.checkpoint for stage in stages if stage.kind == "eval"]  # type: ignore[union-attr]
    assert len(set(evaluated)) == len(evaluated) == 7


def test_a_chain_of_two_benchmarks_trains_on_both_and_evaluates_each(tmp_path: Path) -> None:
    stages = {stage.name: stage for stage in find_chain("text", out=tmp_path).stages([2], ["qwen25-14b"])}
    assert list(stages) == [
        "collect",
        "collect-scienceworld",
        "sft/qwen25-14b/both",
        "grpo/qwen25-14b/both",
        "eval/qwen25-14b/main",
        "eval/qwen25-14b/main-scienceworld",
    ]
    collect, other, sft, grpo, main, further = (stage.config for stage in stages.values())
    assert (collect.env.name, other.env.name, other.max_steps) == ("alfworld", "scienceworld", 100)  # type: ignore[union-attr]
    assert sft.rows == tuple(str(tmp_path / name / "rows") for name in ("collect", "collect-scienceworld"))  # type: ignore[union-attr]
    assert [(part.env.name, part.leakage.drop) for part in grpo.parts] == [("alfworld", False), ("scienceworld", True)]  # type: ignore[union-attr]
    assert (main.env.name, further.env.name, further.split) == ("alfworld", "scienceworld", "agentsquare")  # type: ignore[union-attr]
    assert main.compiler.checkpoint == further.compiler.checkpoint == str(tmp_path / "grpo/qwen25-14b/both")  # type: ignore[union-attr]


def refused(*arguments: str, out: Path) -> str:
    answer = CliRunner().invoke(app, ["reproduce", *arguments, "--out", str(out)])
    assert answer.exit_code in (1, 2) and "Traceback" not in answer.output and not (out / "collect").exists()
    return answer.output


def test_what_a_chain_needs_and_lacks_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    out = tmp_path / "run"
    said = refused("eb_habitat", out=out)
    assert "OPENAI_API_KEY (api.key_env), for gpt-5.2" in said and said.count("\n") <= 2
    assert "runs/agentsquare/test.jsonl" in refused("scienceworld", out=out)
    assert "executor.api.key_env" in refused("alfworld", "--with", "closed", out=out)
    assert "no table 4; there are" in refused("alfworld", "--tables", "4", out=out)
    assert "no executor gpt" in refused("alfworld", "--executor", "gpt", out=out)
    assert "alfworld, eb_alfred, eb_habitat, scienceworld" in refused("kitchen", out=out)
    assert "did you mean" in refused("alfworld", "sft.epoch=3", out=out)
    assert "stage sft: 1 problem" in refused("alfworld", "executors.qwen25-14b.modle=x", out=out)
    assert "pattern" in refused("alfworld", "executors={a.b: {}}", out=out)
    assert "alfworld is the chain's first benchmark already" in refused("alfworld", "further={alfworld: {}}", out=out)
    assert "qa is not among benchmarks" in refused("text", "evaluations.main.benchmarks=[qa]", out=out)


@pytest.mark.seconds
def test_a_dry_run_prints_every_command_what_is_needed_and_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    asked = [str(tiny(tmp_path, "eb_habitat")), "--executor", "tiny", "--dry-run", "--out", str(tmp_path / "run")]
    answer = CliRunner().invoke(app, ["reproduce", *asked], catch_exceptions=False)
    assert answer.exit_code == 0 and not (tmp_path / "run").exists()
    lines = [line for line in answer.output.splitlines() if line.startswith("memcompiler ")]
    first = [" ".join(line.split()[1:3]) for line in lines]
    assert first == ["collect -c", "train sft", "train grpo", "eval -c", "report paper", "report paper"]
    assert "OPENAI_API_KEY (api.key_env), for gpt-5.2: MISSING" in answer.output
    assert [line.split()[1].strip(":,") for line in answer.output.splitlines() if line.startswith("## ")] == [
        "collection",
        "SFT",
        "GRPO",
        "evaluation",
    ]


def test_a_table_finds_the_chains_in_runs_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = CliRunner().invoke(app, ["report", "paper", "--table", "3"], catch_exceptions=False)
    assert answer.exit_code == 0 and "No run was given" in answer.output
    assert "`memcompiler reproduce alfworld --executor qwen25-14b --tables 3`" in answer.output
    assert answer.output.count("Not measured: ") == 2  # ALFWorld and ScienceWorld, one executor
