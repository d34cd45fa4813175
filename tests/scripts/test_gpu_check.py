"""The GPU check: what is recorded stays, whatever ends a part; and its parts, on a CPU with tiny models."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import parity
from benchmarks.gpu.kit import ARCHIVE, RECORD, TABLE, Kit, cell, tables
from benchmarks.gpu.parts import PAIRS, PARTS, Setup, largest_pair
from benchmarks.gpu.planned import with_predictions
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
        "broken": "failed",
        "killed": "failed",
        "absent": "skipped",
        "unlike": "failed",
        "fine": "passed",
    }
    assert made["broken"]["why"] == "ArithmeticError: it does not add up"
    assert made["broken"]["rows"] == [{"what": "before"}] and made["killed"]["rows"] == [{"what": "last"}]
    assert "SIGKILL" in made["killed"]["why"] and made["absent"]["why"] == "nosuchpackage not installed"
    assert made["unlike"]["why"] == "1 rows did not pass" and len(made["unlike"]["rows"]) == 2


def test_what_is_recorded_is_not_run_again_unless_it_is_asked_for(trace: Path, tmp_path: Path) -> None:
    kit = Kit(tmp_path, SETUP, [part("fine"), part("absent")])
    assert kit.run(["fine"]) and kit.run() and kit.run()
    assert trace.read_text().split() == ["fine"]
    assert kit.run(["fine"], again=True)
    assert trace.read_text().split() == ["fine", "fine"]
    with pytest.raises(ValueError, match="no part other: there are fine, absent"):
        kit.run(["other"])
    with pytest.raises(ValueError, match="choose another --out"):
        Kit(tmp_path, Setup("cuda", "paper"), kit.parts).run()


@pytest.mark.seconds
def test_a_part_gets_its_share_of_the_time_and_keeps_its_rows_when_it_is_over(trace: Path, tmp_path: Path) -> None:
    made, minutes = dict[str, dict](), 0.35
    while not made.get("endless", {}).get("rows") and minutes < 10:  # a busy machine takes its time to start a process
        out, minutes = tmp_path / str(minutes), 2 * minutes
        assert Kit(out, SETUP, [part("endless"), part("fine")]).run(minutes=minutes)
        made = json.loads((out / RECORD).read_text())["parts"]
    assert made["endless"]["status"] == "cut" and "time limit" in made["endless"]["why"]
    assert made["endless"]["rows"] == [{"what": "first"}] and made["fine"]["status"] == "passed"
    half = (60 * minutes - 5) / 2
    assert made["endless"]["limit_s"] == pytest.approx(half, abs=1) and made["fine"]["limit_s"] > half - 5


@pytest.mark.seconds
def test_the_plan_is_made_beside_the_parts_and_joined_to_their_rows(trace: Path, tmp_path: Path) -> None:
    kit = Kit(tmp_path, SETUP, [part("slow", 0.0, background=True), part("fine")])
    assert kit.run()
    made = json.loads((tmp_path / RECORD).read_text())["parts"]
    assert set(trace.read_text().split()) == {"slow", "fine"} and made["slow"]["status"] == "passed"
    [plan] = made["slow"]["rows"]
    rows = [{"rows": 2, "seconds": 2.0, "peak_gib": 4.0}, {"rows": 1, "seconds": 1.0}, {"rows": 2, "outcome": "full"}]
    first, *others = with_predictions("sft", rows, [plan], 6.0)
    assert first == {**rows[0], "tflop_per_s": 3.0, "mfu": 0.5, "plan_gib": 3.0, "plan_over_peak": 0.75}
    assert others == rows[1:] and with_predictions("update", rows, [plan], 6.0) == rows
    with tarfile.open(tmp_path / ARCHIVE) as archive:
        assert {RECORD, TABLE, "parts/fine.jsonl", "parts/slow.log"} <= set(archive.getnames())


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
    assert trace.read_text().split() == ["fine", "endless"]
    assert list(json.loads((tmp_path / RECORD).read_text())["parts"]) == ["fine", "absent"]


def test_the_table_holds_what_the_record_holds(trace: Path, tmp_path: Path) -> None:
    Kit(tmp_path, SETUP, [part("fine"), part("absent")]).run()
    record = json.loads((tmp_path / RECORD).read_text())
    lines = (tmp_path / TABLE).read_text().splitlines()
    assert lines == tables(record) and lines[0] == "Setup: device cpu, size tiny, processes 1, pair 0."
    [absent] = [line for line in lines if line.startswith("| absent | skipped |")]
    assert absent.endswith("| nosuchpackage not installed |")
    at = lines.index("### fine")
    assert lines[at + 2 :] == [
        "| what | seconds | passed | tokens |",
        "| --- | ---: | ---: | ---: |",
        "| a \\| b | 1.235 | yes | – |",
        "| c | – | – | 7 |",
    ]
    assert [cell(value) for value in (None, False, 3, 0.00012345)] == ["–", "no", "3", "0.0001234"]


def test_every_part_and_every_page_knows_the_others() -> None:
    page = (ROOT / "docs" / "guides" / "gpu.md").read_text(encoding="utf-8")
    for one in PARTS:
        assert f"| `{one.name}` |" in page
        assert Path(ROOT, *one.runs.partition(":")[0].split(".")).with_suffix(".py").is_file()
    subprocess.run(["bash", "-n", str(ROOT / "scripts" / "gpu_check.sh")], check=True)


# the parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.seconds
def test_both_sides_agree_until_a_weight_is_changed_on_one() -> None:
    cpu, here = (parity.make_models("float32", "cpu") for _ in range(2))
    rows = list(parity.compare("float32", cpu, here))
    assert all(row["passed"] for row in rows) and len(rows) == 17
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
def test_sft_takes_the_memory_that_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import sft

    monkeypatch.setattr(sft, "ROWS", (1,))
    rows = list(sft.measure(SETUP))
    told = [(row["attention"], row["checkpointing"], row["outcome"][:7]) for row in rows]
    assert told[:4] == [("sdpa", True, "ok"), ("sdpa", False, "ok"), ("eager", True, "ok"), ("eager", False, "ok")]
    assert [outcome for *_, outcome in told[4:]] == ["skipped", "skipped"]
    for row in with_predictions("sft", rows, [{"part": "sft", **row} for row in sft.plan(SETUP)], None)[:2]:
        assert row["plan_over_peak"] == pytest.approx(1.0, abs=0.05) and row["tokens_per_s"] > 0
        assert row["tflop_per_s"] > 0
    assert rows[1]["peak_gib"] > rows[0]["peak_gib"]  # without checkpointing, activations stay


def test_running_out_of_memory_is_a_result() -> None:
    from benchmarks.gpu.measuring import completed

    def full() -> dict:
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert completed(SETUP, {"rows": 4}, full) == {"rows": 4, "outcome": "out of memory"}
    with pytest.raises(ZeroDivisionError):
        completed(SETUP, {}, lambda: {"x": 1 / 0})


@pytest.mark.seconds
def test_a_compiled_step_is_what_its_parts_take() -> None:
    from benchmarks.gpu import emission

    planned = [{"part": "emission", **row} for row in emission.plan(SETUP)]
    rows = with_predictions("emission", list(emission.measure(SETUP)), planned, None)
    assert [(row["episodes"], row["act"]) for row in rows] == [(n, a) for n in (1, 2) for a in ("generate", "choice")]
    for row in rows:
        assert row["compiled_s"] == row["batch_s"] + row["act_compiled_s"]
        assert row["compiled_over_static"] == row["compiled_s"] / row["static_s"]
        assert 0 < row["second_pass_s"] < row["batch_s"]
        assert row["tokens_per_s"] == pytest.approx(12 / row["emission_s"])
        assert row["plan_over_peak"] == pytest.approx(1.0, abs=0.1)


@pytest.mark.slow
def test_an_update_takes_the_memory_that_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import update

    monkeypatch.setattr(update, "ROWS", (1,))
    planned = [{"part": "update", **row} for row in update.plan(SETUP)]
    rows = with_predictions("update", list(update.measure(SETUP)), planned, None)
    assert [(row["gradient"], row["checkpointing"]) for row in rows] == [
        (gradient, recompute) for gradient in ("score", "pathwise") for recompute in (True, False)
    ]
    for row in rows:
        assert row["samples"] == 2 and row["plan_over_peak"] == pytest.approx(1.0, abs=0.05)
    assert rows[2]["peak_gib"] > rows[0]["peak_gib"]  # the executor is there


@pytest.mark.slow
def test_a_training_run_says_how_fast_and_what_it_learns() -> None:
    from benchmarks.gpu import learning

    rows = {row["what"]: row["value"] for row in learning.measure(SETUP)}
    assert rows["rows"] > 100 and rows["steps/s on the CPU"] > 0 and rows["steps/s on cpu"] > 0
    assert rows["loss, steps 4 to 4"] < rows["loss, steps 1 to 1"]
    assert all(0 <= rows[f"success on 4 held-out tasks {when}"] <= 1 for when in ("before", "after"))


def test_what_cannot_be_measured_here_starts_no_process() -> None:
    parts = {one.name: one for one in PARTS}
    assert parts["fsdp"].skip_reason(SETUP) == "one cpu device: shards are for several"
    assert parts["fsdp"].skip_reason(Setup("cuda", "paper", 2)) is None
    assert part("absent").skip_reason(SETUP) == "nosuchpackage not installed"


@pytest.mark.slow
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
@pytest.mark.parametrize(
    ("gib", "name"), [(79.2, "Qwen2.5-VL-7B-Instruct and Qwen2.5-14B-Instruct"), (4.0, "SmolLM2-135M-Instruct twice")]
)
def test_the_largest_models_that_fit_are_chosen_and_fit_as_the_plan_says(gib: float, name: str) -> None:
    from benchmarks.gpu.models import lengths_of, model_pair, sft_config
    from plan.budget import Gpu
    from plan.stages import plan_sft

    setup = Setup("cpu", "paper", pair=largest_pair(gib))
    case = model_pair(setup)
    assert case.name == name
    needs = plan_sft(sft_config(case), lengths_of(setup), Gpu("any", gib), 1).needs()
    assert needs == pytest.approx(PAIRS[setup.pair][2], rel=0.03)


@pytest.mark.slow
@pytest.mark.engine
def test_slices_have_the_loss_of_whole_models(tmp_path: Path) -> None:
    """By torchrun, two processes on this CPU, as on two GPUs."""
    fsdp = next(part for part in PARTS if part.name == "fsdp")
    assert Kit(tmp_path, Setup("cpu", "tiny", 2), [fsdp]).run()
    whole, sliced = json.loads((tmp_path / RECORD).read_text())["parts"]["fsdp"]["rows"]
    assert (whole["backend"], sliced["backend"]) == ("replicated", "fsdp") and sliced["gap_of_loss"] < 1e-4
    # What a step takes beyond that is a few slices at a time: at this size as much, and not the same each time.
    assert sliced["stays_gib"] < 0.75 * whole["stays_gib"]


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.vllm
def test_vllm_says_what_pytorch_says(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    parts = [part for part in PARTS if part.name in ("vllm", "speculation")]
    assert Kit(tmp_path, SETUP, parts).run(), (tmp_path / RECORD).read_text()


WANTED = ("trl", "deepspeed", "datasets", "lancedb", "openai", "scipy", "sklearn", "matplotlib", "vllm")


@pytest.mark.slow
def test_no_part_needs_more_than_the_script_asks_for() -> None:
    """All modules are imported where the other packages are not there."""
    modules = sorted({one.runs.partition(":")[0] for one in PARTS})
    code = (
        "import sys, importlib\n"
        f"sys.modules.update(dict.fromkeys({WANTED!r}))\n"  # None: an ImportError
        f"for name in {modules!r}: importlib.import_module(name)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=500)
