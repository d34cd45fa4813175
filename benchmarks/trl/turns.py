"""Run each side of `memcompiler bench trl` in a process of its own; they take turns, so that other load meets both."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

from benchmarks.trl.task import Measured, Task
from runtime.processes import ProcessError
from runtime.progress import disable_library_progress_bars

PATIENCE_S = 3600.0  # longest time for loading a model and taking a step


def take_turns(task: Task, sides: Mapping[str, str], folder: Path) -> list[list[Measured]]:
    """Run the task's steps on each side (name and module with a `run`) in turns; return each side's measurements.

    Raises:
        ProcessError: a side ended early, or does not answer.
    """
    spawn = multiprocessing.get_context("spawn")
    taken, running = {name: list[Measured]() for name in sides}, dict[str, tuple[SpawnProcess, Connection]]()
    try:
        for name, module in sides.items():
            here, there = spawn.Pipe()
            process = spawn.Process(target=_run, args=(task, module, folder / name, there), daemon=True)
            process.start()
            there.close()
            running[name] = process, here
        for step in range(task.sizes.steps):
            for name in list(sides)[:: 1 if step % 2 else -1]:
                taken[name].append(_ask(name, *running[name]))
        for process, _ in running.values():
            process.join(PATIENCE_S)
    finally:
        for process, connection in running.values():
            process.kill()
            process.join()
            connection.close()
    return list(taken.values())


def _ask(name: str, process: SpawnProcess, connection: Connection) -> Measured:
    """Let a side take a step."""
    try:
        connection.send("step")
        if connection.poll(PATIENCE_S):
            return connection.recv()
    except (EOFError, OSError):
        process.join()
        raise ProcessError(f"the process of {name} ended early (exit code {process.exitcode})") from None
    raise ProcessError(f"the process of {name} did not answer within {PATIENCE_S:.0f} s")


def _run(task: Task, module: str, out: Path, connection: Connection) -> None:
    disable_library_progress_bars()
    import_module(module).run(task, out, wait=connection.recv, tell=connection.send)
