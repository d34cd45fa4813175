"""Two processes train to the same weights as one, whatever the backend: same rows, same losses, summed gradients."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from compiler import checkpoint
from configs.load import load_config
from configs.training import GrpoConfig
from runtime.processes import torchrun_command
from tests.training import backend_cases as cases
from tests.training import grpo_trainers, sft_trainers
from training import distributed

ROOT = Path(__file__).parents[2]


TORCHRUN = torchrun_command(2)
ACCELERATE = [
    sys.executable,
    "-m",
    "accelerate.commands.launch",
    "--multi_gpu",
    "--num_processes=2",
    "--main_process_port=0",
]
ACCELERATE += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", f"--log_dir={os.devnull}"]


def torchrun(out: Path, backends: str, names: str, launcher=TORCHRUN) -> subprocess.CompletedProcess[str]:
    """As the check of GPUs starts processes: nothing of it stays in the temporary directory."""
    temporary = out / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*launcher, "-m", "tests.training.backend_cases", str(out), backends, names],
        env=env | {"TMPDIR": str(temporary)},
        cwd=ROOT,
        timeout=400,
        capture_output=True,
        text=True,
    )
    assert not list(temporary.iterdir())
    return done


def steps(out: Path, step: int, run: str = "sft") -> dict[str, Tensor]:
    """All tensors of a checkpoint: adapter, projector, moments."""
    folder = out / run / "checkpoints" / f"step-{step:06d}"
    files = [folder / "adapter" / "adapter_model.safetensors", folder / "projector.safetensors"]
    return {name: t for path in [*files, folder / "optimizer.safetensors"] for name, t in load_file(path).items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name] - b[name]).abs().max() < 2e-5, name


def assert_alike(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """As `assert_same`, but for one number in a hundred: where a gradient is all but nothing, bf16's rounding, which
    follows the order of sums and how rows share prefixes, decides where Adam goes."""
    assert a.keys() == b.keys()
    every = torch.cat([(a[name] - b[name]).abs().flatten() for name in a])
    assert float((every > 2e-5).float().mean()) < 0.01


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """Both stages in this process, without torchrun."""
    out = tmp_path_factory.mktemp("alone")
    assert distributed.world_size() == 1
    cases.sft(out, "replicated")
    cases.mixed(out, "replicated")
    cases.recomputed(out, "replicated")
    cases.sliced(out, "replicated")
    cases.grpo(out, "replicated")
    cases.pathwise(out, "replicated")
    moved = [(a - b).abs().max() for a, b in zip(steps(out, 2).values(), steps(out, 3).values(), strict=True)]
    assert max(moved) > 1e-4  # far more than what the comparisons allow for
    return out


def two_ranks_equal_one(alone: Path, out: Path, backends: tuple[str, ...]) -> None:
    """Uneven shares, idle ranks, a checkpoint of one process taken over, and one of two given back."""
    for backend in backends:
        shutil.copytree(
            alone / "sft" / "checkpoints" / "step-000002", out / backend / "resumed" / "checkpoints" / "step-000002"
        )
    done = torchrun(out, ",".join(backends), "sliced,sft,mixed,recomputed,resumed,grpo,pathwise,served")
    assert done.returncode == 0, done.stderr[-4000:]
    for backend in backends:
        for step in (2, 3):
            assert_same(steps(alone, step), steps(out / backend, step))
        found, told = (json.loads((folder / "validation.json").read_text()) for folder in (out / backend, alone))
        assert found.keys() == told.keys() == {"2", "3"} and found == pytest.approx(told, abs=1e-4)
        (losses, hash), (theirs, same) = (json.loads((f / "sliced.json").read_text()) for f in (alone, out / backend))
        assert losses == pytest.approx(theirs, rel=1e-5) and hash == same
        assert_same(steps(alone, 3), steps(out / backend, 3, "resumed"))
        if backend != "zero3":  # which is refused
            assert_same(steps(alone, 2, "recomputed"), steps(out / backend, 2, "recomputed"))
        mixed = steps(out / backend, 2, "mixed")
        assert_alike(steps(alone, 2, "mixed"), mixed)
        assert {value.dtype for value in mixed.values()} == {torch.float32}
        for name, same in (("grpo", "grpo"), ("pathwise", "pathwise"), ("served", "grpo")):
            assert_same(load_file(alone / f"{same}.safetensors"), load_file(out / backend / f"{name}.safetensors"))
        shutil.rmtree(out / backend / "sft" / "checkpoints" / "step-000003")
        goes_on_alone = cases.sft_trainer(out / backend / "sft", "replicated")
        assert goes_on_alone.resume() and goes_on_alone.step == 2
        list(goes_on_alone.steps())
        assert_same(steps(alone, 3), steps(out / backend, 3))


@pytest.mark.slow
@pytest.mark.engine
def test_two_replicated_or_sharded_ranks_equal_one(alone, tmp_path):
    two_ranks_equal_one(alone, tmp_path, ("replicated", "fsdp"))


@pytest.mark.slow
@pytest.mark.engine
def test_accelerate_launch_is_torchrun_and_ranks_share_out_the_episodes_of_a_task_and_of_held_out_ones(alone, tmp_path):
    """The group of a task that two ranks play is whole."""
    done = torchrun(tmp_path, "replicated", "sft,shared,evaluated", ACCELERATE)
    assert done.returncode == 0, done.stderr[-4000:]
    assert_same(steps(alone, 3), steps(tmp_path / "replicated", 3))


@pytest.mark.parametrize("plugin", ["FSDP", "DEEPSPEED"])
def test_accelerates_own_sharding_is_refused(monkeypatch, plugin):
    """transformers would load empty weights on all ranks but one, in silence."""
    monkeypatch.setenv(f"ACCELERATE_USE_{plugin}", "true")
    with pytest.raises(ValueError, match=f"accelerate's {plugin} is not supported.*set backend"), distributed.group():
        pass


@pytest.mark.parametrize(("ranks", "episodes"), [(1, 16), (3, 16), (8, 16), (16, 16)])
def test_shares_are_whole_and_even(monkeypatch, ranks, episodes):
    monkeypatch.setattr(distributed, "world_size", lambda: ranks)
    shares = []
    for rank in range(ranks):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        shares.append(list(distributed.share(episodes)))
    assert [e for share in shares for e in share] == list(range(episodes))
    assert {len(share) for share in shares} <= {episodes // ranks, -(-episodes // ranks)}


def test_the_papers_settings_give_each_of_its_8_gpus_episodes():
    config = load_config(GrpoConfig, "grpo/paper")
    assert (config.tasks, config.group_size) == (4, 4)  # C.3.2
    assert config.tasks * config.group_size >= 8


def test_ranks_that_would_idle_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "world_size", lambda: 9)
    with pytest.raises(ValueError, match="2 tasks x 4 episodes an update leave 9 ranks only 8 episodes"):
        grpo_trainers.trainer(tmp_path)


@pytest.mark.slow
@pytest.mark.engine
def test_two_ranks_of_deepspeed_equal_one(alone, tmp_path):
    two_ranks_equal_one(alone, tmp_path, ("zero2", "zero3"))


@pytest.mark.slow
@pytest.mark.engine
def test_a_killed_rank_ends_the_run_and_the_run_resumes(alone, tmp_path):
    assert torchrun(tmp_path, "fsdp", "killed").returncode != 0
    kept = [p.name for p in checkpoint.checkpoints(tmp_path / "fsdp" / "sft" / "checkpoints")]
    assert kept == ["step-000002"]
    done = torchrun(tmp_path, "fsdp", "sft")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "'step': 1," not in done.stdout and "'step': 3," in done.stdout
    assert_same(steps(alone, 3), steps(tmp_path / "fsdp", 3))


@pytest.mark.parametrize("backend", ["fsdp", "zero2", "zero3"])
def test_sharing_needs_processes_to_share_between(tmp_path, backend):
    with pytest.raises(ValueError, match="torchrun --nproc_per_node"):
        sft_trainers.trainer(tmp_path, backend=backend)


def test_a_gradient_that_is_not_finite_stops_the_run_before_it_reaches_the_weights(tmp_path):
    t = sft_trainers.trainer(tmp_path)
    before = t.backend.weights()
    t.backend.forward(lambda: t.compiler.projector.linear.weight.sum() * float("inf")).backward()
    with pytest.raises(RuntimeError, match=r"gradient norm is (inf|nan)"):
        t.backend.step()
    assert all(torch.equal(before[name], w) for name, w in t.backend.weights().items())


def test_a_time_out_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(distributed.TIMEOUT, "soon")
    monkeypatch.setattr(distributed.dist, "is_initialized", lambda: False)  # a vLLM engine of this process may be
    with pytest.raises(ValueError, match="must be minutes, not 'soon'"), distributed.group():
        pass
