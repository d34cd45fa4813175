"""The tests of tests/pretended on a pretended GPU, in a process of their own: it has to be loaded before torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_everything_runs_on_a_pretended_gpu(repository: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("gcc, which compiles the stub of the CUDA runtime, is not installed")
    if torch.version.cuda is None:
        pytest.skip("this torch is built without CUDA")
    command = [sys.executable, "-m", "pytest", "-p", "tests.pretend_gpu", "tests/pretended", "-q", "--color=no"]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**own, "PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
