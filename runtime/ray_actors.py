"""Ray actors: one that holds an object and calls its methods, and one that runs a function and streams its output.

Nothing heavy is imported here: a process must have its environment variables before it imports torch.
"""

from __future__ import annotations

import os
import pickle
import queue
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import TextIOBase
from typing import Any

from runtime.cluster import import_ray
from runtime.http import LOOPBACK
from runtime.startup import WAIT_VARIABLES

STREAM_S = 0.1  # longest time for which output is batched before it is sent
_ADDRESS = re.compile(r"\d+(\.\d+){3}(:\d+)?")
# Ray's words around a reason: its own names, and advice.
_BOILERPLATE = re.compile(r"The actor \w+ is unavailable: |\.? ?The task may or may not.*|\.? ?Some common causes.*")
# Variables that a process needs to behave as its driver, if its node does not set them. Keys are never sent.
_SENT = (
    *WAIT_VARIABLES,
    "OMP_NUM_THREADS",
    "TOKENIZERS_PARALLELISM",
    "HF_HUB_OFFLINE",
    "HF_HOME",
    "HF_HUB_CACHE",
    "ALFWORLD_DATA",
    "MEMCOMPILER_DIST_TIMEOUT",
)


class Actor:
    """Base of all actors. `context`: variables and working directory of the driver, from `driver_context`."""

    def __init__(self, context: tuple[dict[str, str], str]) -> None:
        variables, folder = context
        os.environ.update(variables)
        if os.path.isdir(folder):  # so that relative paths in settings resolve as on the driver
            os.chdir(folder)


def driver_context() -> tuple[dict[str, str], str]:
    """Return the environment variables and the working directory that actors take over from this process."""
    return {name: os.environ[name] for name in _SENT if name in os.environ}, os.getcwd()


class ObjectActor(Actor):
    """Holds an object and calls its methods. If the object is `broken` after an error, the process exits, and Ray
    starts another one that makes the object again.

    Args:
        make: Pickled function that makes the object; unpickled here, so that its imports happen in this process.
    """

    def __init__(self, context: tuple[dict[str, str], str], make: bytes) -> None:
        super().__init__(context)
        self._object = pickle.loads(make)()

    def about(self) -> dict[str, Any]:
        """Return process id, node name and the object's own facts."""
        return {"pid": os.getpid(), "node": os.uname().nodename, **self._object.about()}

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the object."""
        try:
            return getattr(self._object, method)(*arguments)
        except Exception as error:
            if reason := self._object.broken:
                print(f"{reason}: {error}", file=sys.stderr, flush=True)
                os._exit(1)  # Ray does not replace a process that exits normally
            raise


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Node of an actor, its address there with a free port, and the ids of its GPUs."""

    node: str
    address: str
    port: int
    gpus: tuple[str, ...]


class FunctionActor(Actor):
    """Runs a function and streams what it prints and reports."""

    def place(self) -> ProcessPlace:
        context, address = import_ray().get_runtime_context(), import_ray().util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            port = int(probe.getsockname()[1])
        return ProcessPlace(context.get_node_id(), address, port, tuple(map(str, context.get_accelerator_ids()["GPU"])))

    def run(self, variables: Mapping[str, str], function: Callable[..., object], *given: Any) -> Iterator[list[Any]]:
        """Set environment variables, and call `function(*given, report)`. Yields batches of its output: printed lines
        as text, reports unchanged."""
        os.environ.update(variables)
        output: queue.SimpleQueue[Any] = queue.SimpleQueue()
        thread = ThreadPoolExecutor(1, thread_name_prefix="runner")
        with redirect_stdout(_LineWriter(output)), redirect_stderr(_LineWriter(output)):
            work = thread.submit(function, *given, output.put)
            work.add_done_callback(lambda _: output.put(None))
            yield from in_batches(output)
        work.result()  # raises what the function raised


class _LineWriter(TextIOBase):
    """Text stream that puts whole lines into a queue."""

    def __init__(self, output: queue.SimpleQueue[Any]) -> None:
        self._output, self._partial = output, ""

    def write(self, text: str) -> int:
        *lines, self._partial = (self._partial + text).split("\n")
        for line in lines:
            self._output.put(line)
        return len(text)


def in_batches(output: queue.SimpleQueue[Any]) -> Iterator[list[Any]]:
    """Yield items of a queue until None, in batches of `STREAM_S` seconds."""
    while (first := output.get()) is not None:
        batch, due = [first], time.monotonic() + STREAM_S
        while (left := due - time.monotonic()) > 0:
            try:
                item = output.get(timeout=left)
            except queue.Empty:
                break
            if item is None:
                yield batch
                return
            batch.append(item)
        yield batch


def loss_reason(error: BaseException) -> str:
    """Describe in one line why an actor is lost, without addresses of machines."""
    words = " ".join(str(error).split()).rpartition("The actor is dead because ")[2]
    return f"{type(error).__name__}: {_ADDRESS.sub('(address)', _BOILERPLATE.sub('', words))}"[:400]


def torchrun_variables(places: list[ProcessPlace]) -> list[dict[str, str]]:
    """Return the variables that torchrun would set for each process of a group, which meet at the first one's address.
    A process sees all GPUs of its node's processes, because LOCAL_RANK counts those."""
    first, variables = places[0], []
    for rank, place in enumerate(places):
        local = [i for i, other in enumerate(places) if other.node == place.node]
        gpus = [gpu for i in local for gpu in places[i].gpus]
        variables.append(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(places)),
                "LOCAL_RANK": str(local.index(rank)),
                "LOCAL_WORLD_SIZE": str(len(local)),
                "MASTER_ADDR": first.address,
                "MASTER_PORT": str(first.port),
                **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
                # The machine's host name may resolve to another address, and a Ray of our own is on loopback only.
                **({"GLOO_SOCKET_IFNAME": "lo"} if first.address == LOOPBACK else {}),
            }
        )
    return variables
