"""Run commands: in this process, in one of their own, or in one until a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
from typer.testing import CliRunner

from memcompiler.cli import app

ROOT = Path(__file__).parents[2]


def memcompiler(*arguments: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, because a new one takes seconds to import torch and transformers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        for name, value in env.items():
            patch.setenv(name, value)
        result = CliRunner().invoke(app, list(arguments))
    if result.exit_code == 130:  # Ctrl-C ends the command, and the tests, too
        raise KeyboardInterrupt
    crashed = result.exception is not None and not isinstance(result.exception, SystemExit)
    trace = "".join(traceback.format_exception(result.exception)) if crashed else ""
    return subprocess.CompletedProcess(arguments, result.exit_code, result.stdout, result.stderr + trace)


def memcompiler_process(*arguments: str, timeout: float = 300, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "memcompiler", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )


def kill_after(lines: int, common: list[str], out: Path) -> None:
    """Start a training command and kill -9 it once its metrics have a number of lines."""
    process = subprocess.Popen(
        [sys.executable, "-m", "memcompiler", *common, "--out", str(out)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 200
    metrics = out / "metrics.jsonl"
    while time.monotonic() < deadline and (not metrics.exists() or metrics.read_bytes().count(b"\n") < lines):
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
