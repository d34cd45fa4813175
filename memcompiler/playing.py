"""`memcompiler play`: the settings of what is played, and one-line errors before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from memcompiler.hub import model_settings
from runtime.http import check_loopback

# Played without RUN: the shipped compiler and executor, in homes that are generated.
DEFAULT = ("zoo/alfworld", "env=household", "split=null", "max_steps=30")


def run_play(
    run: str | None, overrides: Sequence[str], *, out: Path | None, host: str, port: int, browser: bool
) -> None:
    """Serve the page for a run folder, a checkpoint or a shipped name; without one, for the shipped models.

    Raises:
        ModuleNotFoundError: the extra `serve` is missing.
        ConfigError, CheckpointError, ValueError: the run, the settings, the address or the output folder are wrong.
    """
    check_loopback(host)
    try:
        from play.command import OUT, open_run, serve_play
        from play.stage import Stage
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"playing needs {error.name}: uv sync --inexact --extra serve") from error
    if run is not None and "=" in run and not Path(run).exists():
        run, overrides = None, [run, *overrides]
    name, *own = DEFAULT if run is None else (run,)
    folder = Path(name)
    stage = open_run(folder, overrides, out) if run is not None and folder.is_dir() else None
    if stage is None:
        config = model_settings(name, [*own, *overrides])
        stage = Stage(config, out or OUT / config.env.name)
    serve_play(stage, host, port, folder if stage.library.files else None, browser)
