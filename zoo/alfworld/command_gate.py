"""Gates of the compiler of commands, on games outside its training data, in homes with and without own entries.

State by state it is compared with its teacher: the right command, silence where memory has nothing of the kind, notes,
and citations of entries that exist. Then an executor that always obeys plays with the compiler and with the teacher.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from agent.command_teacher import CommandTeacher
from agent.deliveries import Delivery
from agent.errand_guidance import EXAMPLE
from compiler.brief_state import Create, Update, apply_ops
from compiler.language import Emission, parse
from compiler.records import Compiler, CompileRequest
from eval.metrics import succeeded
from zoo.alfworld.commands import READER, STEPS, Follower, State, material, recorded_states
from zoo.alfworld.play import run_games
from zoo.alfworld.text_compilers import Engine, load_text_compiler
from zoo.gates import GateResult

THRESHOLD = 0.95
WITHIN = (15, STEPS)
BATCH = 16  # states that a compiler reads at once
HOMES = {"home in the bank": {"own_scene": 1.0}, "home left out": {"own_scene": 0.0}}
SILENT = {"memory empty": {"nothing": 1.0}, "other kinds alone": {"other_kinds": 1.0}}
_SCENE = re.compile(r"\bFloorPlan\d+")


def command_gates(
    model: str,
    checkpoint: str | None,
    work: Path,
    split: str,
    limit: int | None,
    seed: int = 0,
    engine: Engine = "hf",
) -> list[GateResult]:
    """Compare a compiler with its teacher in every state of the games, and play with both."""
    compiler, results = load_text_compiler(model, checkpoint, engine), list[GateResult]()
    for name, mix in (HOMES | SILENT).items():
        make_env, specs = material(work, seed, limit, split, mix)
        states = list(chain(*recorded_states(make_env, specs, seed)))
        requests = [state.request for state in states]
        batches = (requests[i : i + BATCH] for i in range(0, len(requests), BATCH))
        said = [compilation.emission for batch in batches for compilation in compiler.compile(batch)]
        judge = judged_silence if name in SILENT else judged
        results += judge(name, states, said)
        if name in SILENT:
            continue
        players: dict[str, Compiler] = {"teacher": CommandTeacher(reader=READER), "compiler": compiler}
        for player, it in players.items():
            delivery = Delivery("compiled_text", "compiled", it, soft=False)
            episodes = run_games(make_env, specs, delivery, Follower(strays=0.0, seed=seed), STEPS)
            for steps in WITHIN:
                solved = (succeeded(episode, steps) for episode in episodes)
                results.append(GateResult.of(f"{name}: {player}, obeyed, solves within {steps} steps", solved))
    return results


def judged(name: str, states: Sequence[State], said: Sequence[Emission]) -> list[GateResult]:
    """Count the states in which a compiler is right."""
    pairs = [
        (state.request, parse(state.emission).emission, theirs) for state, theirs in zip(states, said, strict=True)
    ]
    guided = [(ours, theirs) for _, ours, theirs in pairs if ours.guidance]
    return [
        GateResult.of(f"{name}: right command", (o.guidance == t.guidance for o, t in guided), THRESHOLD),
        GateResult.of(f"{name}: same notes", (_after(r, o) == _after(r, t) for r, o, t in pairs), THRESHOLD),
        GateResult.of(f"{name}: cites an entry that exists", _cited(states, said), THRESHOLD),
        GateResult.of(f"{name}: whole emission", (o == t for _, o, t in pairs)),
    ]


def judged_silence(name: str, states: Sequence[State], said: Sequence[Emission]) -> list[GateResult]:
    """Count the states without guidance, where memory supports none."""
    return [GateResult.of(f"{name}: right silence", (not theirs.guidance for theirs in said), THRESHOLD)]


def _after(request: CompileRequest, emission: Emission) -> object:
    """Return the Brief State after an emission."""
    return None if request.state is None else apply_ops(emission.ops, request.state)[0]


def _cited(states: Sequence[State], said: Sequence[Emission]) -> Iterator[bool]:
    """Yield whether the scenes that reasons name, or that are noted as an example, are those of entries of M."""
    for state, theirs in zip(states, said, strict=True):
        scenes = {entry.provenance.scene for entry in state.request.memory}
        noted = " ".join(op.value for op in theirs.ops if isinstance(op, Create | Update) and op.key == EXAMPLE)
        yield from (scene in scenes for scene in _SCENE.findall(f"{theirs.reason} {noted}"))
