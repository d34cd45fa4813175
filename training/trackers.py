"""Experiment trackers beside metrics.jsonl, by accelerate's interface to them (extra `trackers`); off by default.

TensorBoard's events go into the run folder (`tensorboard/`). trackio and wandb get a project `memcompiler` with a run
whose id the run folder keeps, so that a run that resumes goes on there, too.
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
IDENTITY = "trackers.json"  # of the run, among a project's


def require(names: Sequence[TrackerName]) -> None:
    """Check that the trackers are installed. Raises: ConfigError, which names the extra."""
    if missing := [name for name in names if find_spec(name) is None]:
        raise ConfigError(
            f"trackers: {', '.join(missing)} is not installed: uv sync --extra trackers (or pip install {missing[0]})"
        )


@contextmanager
def open_trackers(
    names: Sequence[TrackerName], run: Path, settings: BaseModel, step: int
) -> Iterator[Callable[[Mapping[str, float], int], None]]:
    """Yield a function that tells all trackers the metrics of a step, in the folder of a run of these settings. What a
    tracker was told of steps after `step`, where the run goes on, is void."""
    flat = flatten(settings.model_dump(mode="json"))  # one level of plain values is what all trackers take
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

    PartialState()  # the trackers ask it for the rank; it takes the process group as it finds it, and waits for nobody
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
    """Read the run's id, or make one."""
    path = run / IDENTITY
    if not path.exists():
        write_atomically(path, json.dumps({"id": uuid.uuid4().hex[:12]}))
    return read_json(path)["id"]
