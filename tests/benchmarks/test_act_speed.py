"""The benchmark of acting in a growing chat."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.serving import app


@pytest.mark.seconds
def test_the_cache_changes_no_action_and_holds_what_earlier_steps_read(repository: Path) -> None:
    model = str(repository / "zoo" / "household" / "executor")
    sizes = ["--steps", "3", "--episodes", "2", "--commands", "5", "--memory-tokens", "9"]
    done = CliRunner().invoke(app, ["act", "--model", model, *sizes], catch_exceptions=False)
    assert done.output.count("6 of 6 actions as without a cache") == 4
    rows = [line.split("|") for line in done.output.splitlines() if line.startswith(("| choice", "| constrained"))]
    cached = [row[-2].strip() for row in rows]
    assert cached[0] == cached[2] == "0%" and cached[1] == cached[3] != "0%"
