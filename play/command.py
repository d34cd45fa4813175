"""`memcompiler play`: finds out what a folder holds, and serves the page until Ctrl-C."""

from __future__ import annotations

import threading
import time
import webbrowser
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import typer
import uvicorn

from configs.evaluation import EvalConfig
from configs.load import ConfigError, load_config, read_yaml
from configs.run_folder import CONFIG
from play.library import Library, episode_files
from play.record import open_record
from play.server import Games, play_app
from play.stage import Stage
from runtime.http import bound_socket, http_url

OUT = Path("out/play")
BANK = "bank"  # of a run folder


def open_run(run: Path, overrides: Sequence[str], out: Path | None) -> Stage | None:
    """Open a run folder with recorded episodes; None for one without any.

    Raises:
        ConfigError, ValueError: the folder's settings or episodes cannot be read.
    """
    files = episode_files(run)
    if not files:
        return None
    folder = files[0].parent
    config = _settings(folder, overrides) if len({file.parent for file in files}) == 1 else None
    bank = folder / BANK
    where = out or OUT / (config.env.name if config is not None else "watched")
    return Stage(config, where, Library(files), bank.resolve() if config is not None and bank.exists() else None)


def _settings(folder: Path, overrides: Sequence[str]) -> EvalConfig | None:
    """Return the settings of an evaluation's folder; None for another kind of run."""
    path = folder / CONFIG
    if not path.is_file() or "deliveries" not in read_yaml(path):
        if overrides:
            raise ConfigError(f"{folder} is no evaluation, so settings cannot be changed ({overrides[0]})")
        return None
    return load_config(EvalConfig, path, overrides)


def serve_play(stage: Stage, host: str, port: int, run: Path | None = None, browser: bool = False) -> None:
    """Serve the page until SIGTERM or SIGINT. `run`: the folder that is played, in which nothing is written.

    Raises:
        ValueError: the port is taken, or the record's folder is not ours.
    """
    with ExitStack() as held:
        held.callback(stage.close)
        _ = stage.tasks  # lists them now, so that errors are shown before the page opens
        record = None
        if stage.envs is not None:
            record = held.enter_context(open_record(stage.out, stage.envs, {"RUN": run} if run else {}))
        app = play_app(stage, record)
        held.callback(app.state.games.close)
        bound = bound_socket(host, port)
        url = http_url(*bound.getsockname()[:2])
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
        threading.Thread(target=_announce, args=(server, url, app.state.games, browser), daemon=True).start()
        server.run(sockets=[bound])


def _announce(server: Any, url: str, games: Games, browser: bool) -> None:
    """Print the address once the server listens. Where nothing is recorded, load the models meanwhile."""
    while not server.started and not server.should_exit:
        time.sleep(0.05)
    if not server.started:
        return
    typer.echo(f"watch and play: {url}")
    if games.record is not None:
        typer.echo(f"  what you decide becomes rows in {games.record.out / 'rows'}")
    if browser:
        webbrowser.open(url)
    if not games.stage.library.episodes:
        games.warm_up()
        typer.echo("  models and memory are loaded")
