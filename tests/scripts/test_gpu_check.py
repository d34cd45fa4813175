"""The GPU check: what is recorded stays, whatever ends a part; and its parts, on a CPU with tiny models."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import parity
from benchmarks.gpu.kit import RECORD, TABLE, Kit, cell, tables
from benchmarks.gpu.parts import PARTS, Setup, Skipped
from tests.scripts.gpu_standins import SETUP, TRACE, part
from tests.waiting import until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which stand-ins say that they ran."""
    monkeypatch.setenv(TRACE, str(tmp_path / "trace"))
    return tmp_path / "trace"


@contextmanager
def alone() -> Iterator[None]:
    """In a process group of one: a new one, or that which an earlier test's engine of vLLM left in this process."""
    if torch.distributed.is_initialized():
        assert torch.distributed.get_world_size() == 1
        yield
        return
    store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


# the kit --------------------------------------------------------------------------------------------------------------


@pytest.mark.seconds
def test_a_part_that_fails_is_recorded_and_the_others_go_on(trace: Path, tmp_path: Path) -> None:
    kit = Kit(tmp_path, SETUP, [part("broken"), part("killed"), part("absent"), part("unlike"), part("fine")])
    assert not kit.run()
    made = json.loads((tmp_path / RECORD).read_text())["parts"]
    assert {name: one["status"] for name, one in made.items()} == {
        "broken": "failed", "killed": "failed", "absent": "skipped", "unlike": "failed", "fine": "passed",
    }  # fmt: skip
    assert made["broken"]["error"] == "ArithmeticError: it does not add up"
    assert made["broken"]["rows"] == [{"what": "before"}] and made["killed"]["rows"] == [{"what": "last"}]
    assert "SIGKILL" in made["killed"]["error"] and made["absent"]["reason"] == "not installed"
    assert made["unlike"]["error"] == "1 rows did not pass" and len(made["unlike"]["rows"]) == 2


def test_what_is_recorded_is_not_run_again_unless_it_is_asked_for(trace: Path, tmp_path: Path) -> None:
    kit = Kit(tmp_path, SETUP, [part("fine"), part("absent")])
    assert kit.run(["fine"]) and kit.run() and kit.run()
    assert trace.read_text().split() == ["fine", "absent"]
    assert kit.run(["fine"], again=True)
    assert trace.read_text().split() == ["fine", "absent", "fine"]
    with pytest.raises(ValueError, match="no part other: there are fine, absent"):
        kit.run(["other"])
    with pytest.raises(ValueError, match="choose another --out"):
        Kit(tmp_path, Setup("cuda", "paper"), kit.parts).run()


@pytest.mark.seconds
def test_a_part_has_a_time_limit_of_its_own_and_keeps_its_rows(trace: Path, tmp_path: Path) -> None:
    made: dict = {"rows": []}
    for seconds in (10.0, 40.0, 160.0):  # a busy machine takes its time to start a process
        if not made["rows"]:
            Kit(tmp_path / str(seconds), SETUP, [part("endless", seconds)]).run()
            made = json.loads((tmp_path / str(seconds) / RECORD).read_text())["parts"]["endless"]
    assert made["status"] == "failed" and "time limit" in made["error"] and made["rows"] == [{"what": "first"}]


def test_no_part_is_begun_when_the_time_is_over(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    kit = Kit(tmp_path, SETUP, [part("fine")])
    assert not kit.run(minutes=0.0)
    assert not trace.exists() and "no time for fine: run this again" in capsys.readouterr().out


def test_a_killed_run_keeps_what_was_recorded_and_goes_on_from_there(trace: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.scripts.gpu_standins", str(tmp_path), "fine", "endless"]
    run = subprocess.Popen(command, cwd=ROOT, env=dict(os.environ))
    try:
        until(lambda: trace.exists() and "endless" in trace.read_text(), 120)
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait()
    assert list(json.loads((tmp_path / RECORD).read_text())["parts"]) == ["fine"]
    assert Kit(tmp_path, SETUP, [part("fine"), part("absent")]).run()
    assert trace.read_text().split() == ["fine", "endless", "absent"]
    assert list(json.loads((tmp_path / RECORD).read_text())["parts"]) == ["fine", "absent"]


def test_the_table_holds_what_the_record_holds(trace: Path, tmp_path: Path) -> None:
    Kit(tmp_path, SETUP, [part("fine"), part("absent")]).run()
    record = json.loads((tmp_path / RECORD).read_text())
    lines = (tmp_path / TABLE).read_text().splitlines()
    assert lines == tables(record) and lines[0] == "Setup: device cpu, size tiny, processes 1."
    assert any(line.startswith("| absent | skipped |") and line.endswith("| not installed |") for line in lines)
    at = lines.index("### fine")
    assert lines[at + 2 :] == [
        "| what | seconds | passed | tokens |", "| --- | ---: | ---: | ---: |", "| a \\| b | 1.235 | yes | – |",
        "| c | – | – | 7 |",
    ]  # fmt: skip
    assert [cell(value) for value in (None, False, 3, 0.00012345)] == ["–", "no", "3", "0.0001234"]


def test_every_part_and_every_page_knows_the_others() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    for one in PARTS:
        assert f"| `{one.name}` |" in page and f"| {one.limit_s / 60:.0f} min |" in page
        assert Path(ROOT, *one.runs.partition(":")[0].split(".")).with_suffix(".py").is_file()
    subprocess.run(["bash", "-n", str(ROOT / "scripts" / "gpu_check.sh")], check=True)


# the parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.seconds
def test_both_sides_agree_until_a_weight_is_changed_on_one() -> None:
    cpu, here = (parity.make_side("float32", "cpu") for _ in range(2))
    rows = list(parity.compare("float32", cpu, here))
    assert all(row["passed"] for row in rows) and len(rows) == 13
    assert rows[0]["what"] == "loss text" and rows[-1]["what"] == "soft tokens (mu)"
    projector = here.compiler.projector.linear.weight
    with torch.no_grad():
        projector[0] += 0.05
    changed = {row["what"]: row["passed"] for row in parity.compare("float32", cpu, here)}
    assert not changed["loss latent (gauss_nll)"] and not changed["gradients (gauss_nll)"]
    assert not changed["soft tokens (mu)"] and changed["loss text"]  # which the projector has no part in
    with torch.no_grad():
        projector[0] -= 0.05
        here.executor.model.get_output_embeddings().weight.mul_(1.01)
    changed = {row["what"]: row["passed"] for row in parity.compare("float32", cpu, here)}
    assert not changed["loss action"] and not changed["log-probabilities of candidates"] and changed["loss text"]
    with torch.no_grad():
        here.compiler.backbone.embedding_table[:500] *= 1.05
    changed = {row["what"]: row["passed"] for row in parity.compare("float32", cpu, here)}
    assert not changed["loss text"] and not changed["tokens of greedy emissions, share that is the same"]


@pytest.mark.slow
@pytest.mark.alone
def test_sft_takes_the_memory_that_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import sft

    monkeypatch.setattr(sft, "ROWS", (1,))
    rows = list(sft.measure(SETUP))
    told = [(row["attention"], row["checkpointing"], row["outcome"][:7]) for row in rows]
    assert told[:4] == [("sdpa", True, "ok"), ("sdpa", False, "ok"), ("eager", True, "ok"), ("eager", False, "ok")]
    assert [outcome for *_, outcome in told[4:]] == ["skipped", "skipped"]
    for row in rows[:2]:
        assert row["plan_over_peak"] == pytest.approx(1.0, abs=0.05) and row["tokens_per_s"] > 0
    assert rows[1]["peak_gib"] > rows[0]["peak_gib"]  # without checkpointing, activations stay


def test_running_out_of_memory_is_a_result() -> None:
    from benchmarks.gpu.measuring import tried

    def full() -> dict:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert tried(SETUP, {"rows": 4}, full) == {"rows": 4, "outcome": "out of memory"}
    with pytest.raises(ZeroDivisionError):
        tried(SETUP, {}, lambda: {"x": 1 / 0})


@pytest.mark.seconds
def test_a_compiled_step_is_what_its_parts_take() -> None:
    from benchmarks.gpu import emission

    rows = list(emission.measure(SETUP))
    assert [(row["episodes"], row["act"]) for row in rows] == [(n, a) for n in (1, 2) for a in ("generate", "choice")]
    for row in rows:
        assert row["compiled_s"] == row["batch_s"] + row["act_compiled_s"]
        assert row["compiled_over_static"] == row["compiled_s"] / row["static_s"]
        assert 0 < row["second_pass_s"] < row["batch_s"]
        assert row["tokens_per_s"] == pytest.approx(12 / row["emission_s"])
        assert row["plan_over_peak"] == pytest.approx(1.0, abs=0.1)


@pytest.mark.slow
@pytest.mark.alone
def test_an_update_takes_the_memory_that_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import update

    monkeypatch.setattr(update, "ROWS", (1,))
    rows = list(update.measure(SETUP))
    assert [(row["gradient"], row["checkpointing"]) for row in rows] == [
        (gradient, recompute) for gradient in ("score", "pathwise") for recompute in (True, False)
    ]
    for row in rows:
        assert row["samples"] == 2 and row["plan_over_peak"] == pytest.approx(1.0, abs=0.05)
    assert rows[2]["peak_gib"] > rows[0]["peak_gib"]  # the executor is there


def test_slices_are_for_several_devices() -> None:
    from benchmarks.gpu import fsdp

    with pytest.raises(Skipped, match="one cpu device"):
        list(fsdp.measure(SETUP))


@pytest.mark.slow
@pytest.mark.alone
def test_one_process_with_slices_measures_what_several_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import fsdp
    from training.backend import Fsdp

    monkeypatch.setattr(Fsdp, "in_lockstep", False)  # which a single process is refused for
    with alone():
        whole, sliced = fsdp.compare(SETUP)
    assert (whole["backend"], sliced["backend"]) == ("replicated", "fsdp")
    assert sliced["first_loss"] == pytest.approx(whole["first_loss"], rel=1e-5) and sliced["passed"]
    assert whole["plan_over_peak"] == pytest.approx(1.0, abs=0.05) and sliced["tokens_per_s"] > 0


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(
    ("gib", "name"), [(79.2, "Qwen2.5-VL-7B-Instruct and Qwen2.5-14B-Instruct"), (4.0, "SmolLM2-135M-Instruct twice")]
)
def test_the_largest_models_that_fit_are_chosen(gib: float, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import models

    monkeypatch.setattr(models, "free_bytes", lambda setup: gib * 2**30)
    assert models.chosen(Setup("cpu", "paper")).name == name


@pytest.mark.slow
@pytest.mark.alone
def test_slices_have_the_loss_of_whole_models(tmp_path: Path) -> None:
    """By torchrun, two processes on this CPU, as on two GPUs."""
    fsdp = next(part for part in PARTS if part.name == "fsdp")
    assert Kit(tmp_path, Setup("cpu", "tiny", 2), [fsdp]).run()
    whole, sliced = json.loads((tmp_path / RECORD).read_text())["parts"]["fsdp"]["rows"]
    assert (whole["backend"], sliced["backend"]) == ("replicated", "fsdp") and sliced["gap_of_loss"] < 1e-4
    # What a step takes beyond that is a few slices at a time: at this size as much, and not the same each time.
    assert sliced["stays_gib"] < 0.75 * whole["stays_gib"]


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.vllm
def test_vllm_says_what_pytorch_says(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    parts = [part for part in PARTS if part.name in ("vllm", "speculation")]
    assert Kit(tmp_path, SETUP, parts).run(), (tmp_path / RECORD).read_text()


def test_without_vllm_its_parts_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import engine

    monkeypatch.setattr(engine.importlib.util, "find_spec", lambda name: None)
    for runs in (engine.measure, engine.speculate):
        with pytest.raises(Skipped, match="vLLM is not installed"):
            next(runs(SETUP))


WANTED = ("trl", "deepspeed", "datasets", "lancedb", "openai", "sklearn", "matplotlib", "vllm")


@pytest.mark.slow
@pytest.mark.alone
def test_no_part_needs_more_than_the_script_asks_for() -> None:
    """All modules are imported where the other packages are not there."""
    modules = sorted({one.runs.partition(":")[0] for one in PARTS})
    code = (
        "import sys, importlib\n"
        f"sys.modules.update(dict.fromkeys({WANTED!r}))\n"  # None: an ImportError
        f"for name in {modules!r}: importlib.import_module(name)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=500)
