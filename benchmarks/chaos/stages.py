"""The stages of the chaos benchmark: commands that are resumed, and servers whose clients retry."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.clients import compile_all, converse, echoing_upstream
from benchmarks.chaos.facts import Facts, bank_of, collected, evaluated, trained

MEMCOMPILER = (sys.executable, "-m", "memcompiler")
HOMES = "env.scenes={train: 3, test: 3}"
MANY = ("placement.retries=20", "placement.restarts=20")  # more than a run is killed
FEW = (HOMES, "limit=6", "max_steps=4")


@dataclass(frozen=True)
class Stage:
    """A command that can be resumed, or a server.

    Attributes:
        command: without --out and --port, given the folder of the undisturbed runs of the stages before it.
        facts: what its finished run folder holds, without clocks.
        use: of a server: what its clients ask it, by its URL. They retry, and return the answers.
        has_folder: whether the command takes --out.
        on_ray: whether it runs on Ray nodes, which are started for it; its processes and nodes are killed, too.
        same_as: stage whose undisturbed run ends with the same facts.
    """

    command: Callable[[Path], list[str]]
    facts: Callable[[Path], Facts]
    use: Callable[[str], Facts] | None = None
    has_folder: bool = True
    on_ray: bool = False
    same_as: str = ""


def _grpo(whole: Path, *more: str) -> list[str]:
    return [
        *(*MEMCOMPILER, "train", "grpo", "-c", "grpo/quickstart", f"compiler.checkpoint={whole / 'sft'}"),
        *(*FEW, "updates=3", "tasks=2", "group_size=2", *more),
    ]


def _collect(*more: str) -> list[str]:
    return [*MEMCOMPILER, "collect", "-c", "collect/quickstart", HOMES, "limit=12", *more]


def _eval(whole: Path, *more: str) -> list[str]:
    return [*MEMCOMPILER, "eval", "-c", "eval/quickstart", f"compiler.checkpoint={whole / 'sft'}", *FEW, *more]


STAGES: Mapping[str, Stage] = {
    "collect": Stage(lambda whole: _collect(), collected),
    "sft": Stage(
        lambda whole: [
            *(*MEMCOMPILER, "train", "sft", "-c", "sft/quickstart", f"rows={whole / 'collect' / 'rows'}"),
            *("max_steps=8", "batch_size=4", "micro_batch_size=4", "save_every=2"),
        ],
        trained,
    ),
    "grpo": Stage(lambda whole: _grpo(whole, "save_every=1"), trained),
    "overlapped": Stage(
        lambda whole: _grpo(whole, "save_every=2", "max_staleness=1", "loss.importance_cap=2"),
        trained,
    ),
    "eval": Stage(_eval, evaluated),
    "matrix": Stage(
        lambda whole: _eval(whole, "deliveries=[static,compiled]", "matrix={memory: {1: {memory.k: 1}, 4: {}}}"),
        evaluated,
    ),
    "online": Stage(
        lambda whole: _eval(whole, "memory.protocol=online", "deliveries=[static,compiled]"),
        evaluated,
    ),
    "compiler": Stage(
        lambda whole: [*MEMCOMPILER, "serve", "compiler", "-c", "serve/quickstart", "--checkpoint", str(whole / "sft")],
        lambda out: {},
        compile_all,
        has_folder=False,
    ),
    "proxy": Stage(
        lambda whole: [
            *(*MEMCOMPILER, "serve", "proxy", "-c", "serve/proxy", f"upstream.url={echoing_upstream()}"),
            "compiler.max_new_tokens=24",
        ],
        lambda out: bank_of(out / "bank"),
        converse,
    ),
    "ray": Stage(
        lambda whole: _grpo(whole, "save_every=1", "cluster=ray", "placement.cpus=0.3", *MANY),
        trained,
        on_ray=True,
        same_as="grpo",
    ),
    "ray-collect": Stage(
        lambda whole: _collect("cluster=ray", "ray.batch_size=2"),
        collected,
        on_ray=True,
        same_as="collect",
    ),
}
