"""The tests of `openenv_cases.py`, one by one, in the interpreter that has OpenEnv.

OpenEnv and vLLM need other versions of the same packages: `make test` gives each an environment of its own.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
CASES = Path(__file__).with_name("openenv_cases.py")
NAMES = [
    node.name
    for node in ast.parse(CASES.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]
TIMEOUT = 400.0  # seconds for all of them; on a free machine they take 20


def interpreter() -> str:
    """Skips the test where OpenEnv is not installed."""
    apart = ROOT / ".venv-openenv" / "bin" / "python"
    if apart.exists():
        return str(apart)
    if importlib.util.find_spec("openenv") is not None:
        return sys.executable
    pytest.skip("OpenEnv is not installed: `make test` does that, or `uv sync --extra openenv`")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What went wrong in each of the tests, "" for those that passed."""
    report = tmp_path_factory.mktemp("openenv") / "report.xml"
    command = [interpreter(), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(CASES)]
    outer = ("PYTEST_", "VIRTUAL_ENV", "PYTHONPATH")
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={name: value for name, value in os.environ.items() if not name.startswith(outer)},
    )
    try:
        said, _ = process.communicate(timeout=TIMEOUT)
    except BaseException:  # also Ctrl-C: the server among its children must not stay
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)
        raise
    assert report.exists(), said[-3000:]
    tests = ElementTree.parse(report).getroot().iter("testcase")
    found = {test.get("name", ""): "\n".join("".join(part.itertext()) for part in test) for test in tests}
    assert set(found) == set(NAMES), said[-3000:]
    return found


@pytest.mark.slow  # the server's imports alone take ten seconds on a busy machine
@pytest.mark.alone
@pytest.mark.parametrize("name", NAMES)
def test_openenv(name: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[name], outcomes[name][-3000:]
