"""Two processes train to the same weights as one: same rows, same losses, summed gradients (gloo, CPU)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from pathlib import Path
from training import distributed
from tests.training.test_sft import ROWS, executor, trainer
from training.sft import run_sft
distributed.init()
assert distributed.world_size() == int(sys.argv[2])
t = trainer(Path(sys.argv[1]), batch_size=5, micro_batch_size=2, max_steps=3, save_every=3)
t.compiler.eval(); t.compiler.train = lambda mode=True: t.compiler  # no dropout, and below no noise: both are per rank
t.compiler.projector.draw = lambda gaussian, *a: gaussian.mu
run_sft(t, lambda m: print(m))
"""


def train(tmp_path: Path, processes: int) -> dict:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    out = tmp_path / str(processes)
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--master_port=0"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "--standalone", str(script), str(out), str(processes)],
        env=env,
        timeout=300,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    folder = out / "checkpoints" / "step-000003"
    return load_file(folder / "projector.safetensors") | load_file(folder / "adapter" / "adapter_model.safetensors")


@pytest.mark.slow
def test_two_ranks_with_uneven_rows_equal_one(tmp_path):
    one, two = train(tmp_path, 1), train(tmp_path, 2)
    assert one.keys() == two.keys()
    for name in one:
        assert (one[name] - two[name]).abs().max() < 2e-5, name
