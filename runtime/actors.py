"""Actors on Ray, whatever they hold: a process that is as its driver would have it, an object that is asked by name,
and a function that says what it prints. Nothing heavy is imported here: a process has its variables before torch."""

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
from runtime.startup import WAITING

STREAM_S = 0.1  # that an actor gathers what it says for at most before it sends it
_ADDRESS = re.compile(r"\d+(\.\d+){3}(:\d+)?")
# What Ray says around the reason: names of its own, and what one might do.
_AROUND = re.compile(r"The actor \w+ is unavailable: |\.? ?The task may or may not.*|\.? ?Some common causes.*")
# What a process needs to do as its driver would, where its node does not say. Keys are not sent: a node has its own.
_SENT = (
    *WAITING,
    "OMP_NUM_THREADS",
    "TOKENIZERS_PARALLELISM",
    "HF_HUB_OFFLINE",
    "HF_HOME",
    "HF_HUB_CACHE",
    "ALFWORLD_DATA",
    "MEMCOMPILER_DIST_TIMEOUT",
)


class Actor:
    """What every actor begins with. `around`: variables and folder of its driver, as `surroundings` gives them."""

    def __init__(self, around: tuple[dict[str, str], str]) -> None:
        variables, folder = around
        os.environ.update(variables)
        if os.path.isdir(folder):  # relative paths of the settings mean what they mean to the driver
            os.chdir(folder)


def surroundings() -> tuple[dict[str, str], str]:
    """Say what an actor has of this process."""
    return {name: os.environ[name] for name in _SENT if name in os.environ}, os.getcwd()


def packed(make: Callable[[], Any]) -> bytes:
    """Pack something to be called in an actor, which imports what it needs when it unpacks it, and not before."""
    return pickle.dumps(make)


class Holder(Actor):
    """Holds an object and asks it by name. An object that says it is `broken` after it failed takes its process with
    it, so that Ray starts another one, which makes it anew."""

    def __init__(self, around: tuple[dict[str, str], str], make: bytes) -> None:
        super().__init__(around)
        self._held = pickle.loads(make)()

    def about(self) -> dict[str, Any]:
        """Say who is there, which one only can who has made its object."""
        return {"pid": os.getpid(), "node": os.uname().nodename, **self._held.about()}

    def ask(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._held, name)(*arguments)
        except Exception as error:
            if why := self._held.broken:
                print(f"{why}: {error}", file=sys.stderr, flush=True)
                os._exit(1)  # a process that leaves in order is not replaced
            raise


@dataclass(frozen=True, slots=True)
class Place:
    """Where an actor is: its node, an address there with a port that is free, and the GPUs that are its own."""

    node: str
    address: str
    port: int
    gpus: tuple[str, ...]


class Runner(Actor):
    """Runs a function, and says what it prints and what it tells."""

    def place(self) -> Place:
        context = import_ray().get_runtime_context()
        address = import_ray().util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((address, 0))
            port = int(probe.getsockname()[1])
        return Place(context.get_node_id(), address, port, tuple(map(str, context.get_accelerator_ids()["GPU"])))

    def run(self, variables: Mapping[str, str], call: Callable[..., object], *given: Any) -> Iterator[list[Any]]:
        """Call it with what is given and a function that it can tell things by, under these variables. Yields what it
        says: lines as text, what it tells as it was told."""
        os.environ.update(variables)
        said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        thread = ThreadPoolExecutor(1, thread_name_prefix="runner")
        with redirect_stdout(_Lines(said)), redirect_stderr(_Lines(said)):
            work = thread.submit(call, *given, said.put)
            work.add_done_callback(lambda _: said.put(None))
            yield from gathered(said)
        work.result()  # raises what it raised


class _Lines(TextIOBase):
    """Text that goes into a queue line by line."""

    def __init__(self, said: queue.SimpleQueue[Any]) -> None:
        self._said, self._begun = said, ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._said.put(line)
        return len(text)


def gathered(said: queue.SimpleQueue[Any]) -> Iterator[list[Any]]:
    """Yield what is said until None comes, what belongs to a moment together."""
    while (first := said.get()) is not None:
        some, due = [first], time.monotonic() + STREAM_S
        while (left := due - time.monotonic()) > 0:
            try:
                one = said.get(timeout=left)
            except queue.Empty:
                break
            if one is None:
                yield some
                return
            some.append(one)
        yield some


def why(error: BaseException) -> str:
    """Say in a line why an actor is lost, without the addresses of machines."""
    words = " ".join(str(error).split()).rpartition("The actor is dead because ")[2]
    return f"{type(error).__name__}: {_ADDRESS.sub('(address)', _AROUND.sub('', words))}"[:400]


def meeting(places: list[Place]) -> list[dict[str, str]]:
    """Write for each process of a group what torchrun would: they meet at the first one's. All GPUs of a node's
    processes are visible to each of them, as LOCAL_RANK counts them."""
    first, told = places[0], []
    for rank, place in enumerate(places):
        beside = [i for i, other in enumerate(places) if other.node == place.node]
        gpus = [gpu for i in beside for gpu in places[i].gpus]
        told.append(
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(places)),
                "LOCAL_RANK": str(beside.index(rank)),
                "LOCAL_WORLD_SIZE": str(len(beside)),
                "MASTER_ADDR": first.address,
                "MASTER_PORT": str(first.port),
                **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}),
                # Names of this machine lead elsewhere than to loopback; a Ray of our own stays there.
                **({"GLOO_SOCKET_IFNAME": "lo"} if first.address == LOOPBACK else {}),
            }
        )
    return told
