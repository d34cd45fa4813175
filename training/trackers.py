"""Experiment trackers through accelerate (extra `trackers`); off by default.

TensorBoard's events are in the run folder (`tensorboard/`). trackio and wandb have a project `memcompiler`, with a run
id that the run folder stores, so that a resumed run continues there.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from configs.load import ConfigError
from configs.run_folder import flatten
from configs.training import TrackerName
from runtime.store import read_json, write_atomically

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

PROJECT = "memcompiler"
IDENTITY = "trackers.json"  # in the run folder: the run's id


def require(names: Sequence[TrackerName]) -> None:
    """Check that trackers are installed. Raises: ConfigError, names the extra."""
    if missing := [name for name in names if find_spec(name) is None]:
        raise ConfigError(
            f"trackers: {', '.join(missing)} is not installed: uv sync --extra trackers (or pip install {missing[0]})"
        )


@contextmanager
def open_trackers(
    names: Sequence[TrackerName], run: Path, settings: BaseModel, step: int
) -> Iterator[Callable[[Mapping[str, float], int], None]]:
    """Yield `track(metrics, step)`, which sends metrics to all trackers. TensorBoard events after `step`, where the run
    resumes, are dropped."""
    flat = flatten(settings.model_dump(mode="json"))  # trackers accept one level of plain values
    plain = {key: v if isinstance(v, (bool, int, float, str)) else json.dumps(v) for key, v in flat.items()}
    with ExitStack() as stack:
        trackers = [_open(name, run, step) for name in names]
        for tracker in trackers:
            stack.callback(tracker.finish)
            tracker.store_init_configuration(plain)

        def track(metrics: Mapping[str, float], step: int) -> None:
            for tracker in trackers:
                tracker.log(dict(metrics), step=step)

        yield track


def _open(name: TrackerName, run: Path, step: int) -> GeneralTracker:
    from accelerate.state import PartialState
    from accelerate.tracking import TensorBoardTracker, TrackioTracker, WandBTracker

    PartialState()  # the trackers read the rank from it
    match name:
        case "tensorboard":
            tracker: GeneralTracker = TensorBoardTracker("tensorboard", run, purge_step=step + 1)
        case "trackio":
            tracker = TrackioTracker(PROJECT, name=f"{run.name}-{_identity(run)}", resume="allow")
        case "wandb":
            tracker = WandBTracker(PROJECT, name=run.name, id=_identity(run), dir=str(run), resume="allow")
    tracker.start()
    return tracker


def _identity(run: Path) -> str:
    """Read the run's id, or create one."""
    path = run / IDENTITY
    if not path.exists():
        write_atomically(path, json.dumps({"id": uuid.uuid4().hex[:12]}))
    return read_json(path)["id"]
