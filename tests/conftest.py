"""Common setup of all tests: one thread, no network, no display; fixtures for paths."""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from pathlib import Path

# Before anything imports torch or a hub client. One thread: the same sums on every machine, and tiny models gain
# nothing from more. Offline: a test that needs the network is wrong, and should fail here as it would elsewhere.
for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MPLBACKEND": "Agg",
}.items():
    os.environ.setdefault(_name, _value)
if shutil.which(os.environ.get("CXX", "g++")) is None:
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # vLLM has torch compile with it, even where it runs eagerly

# Where a script runs the tests in the background, its shell has them ignore Ctrl-C, and what they start would, too:
# a handler of Python's own is not inherited, so that programs under test answer SIGINT as from a terminal.
signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

# No deadline: the machine may be busy. The same examples on every run: a red test must stay red until it is mended.
settings.register_profile("shared", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """The folder that holds pyproject.toml."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Data that is not part of the repository (`shared/data` beside it); the test is skipped where it is absent."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs ../shared/data (real games and benchmark files), which is not in the repository")
    return folder


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort files with many slow tests first, so that parallel runs (-n) end at about the same time."""
    if hasattr(config, "workerinput"):
        slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
        items.sort(key=lambda item: -slow[item.path])
