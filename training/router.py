"""Training of S3Mem's evidence router (section 3.4): template questions about what our own expert did, evidence exact
by construction; scenes that none of it shares are held out. No benchmark's questions, answers or evidence are read.

    memcompiler train router --out DIR           # DIR/router.safetensors, DIR/router.json (the manifest)

Questions that a language model wrote may be added (`--questions`, of `memcompiler data questions`).
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from configs.evaluation import EvalConfig
from configs.load import load_config
from data_gen.cases import Case, Question, load_cases
from data_gen.histories import lived, played
from data_gen.questions import step_case
from data_gen.retold import dialogue_case
from envs.registry import Environments
from memory.protocol import Trace
from memory.s3mem.features import Features
from memory.s3mem.packing import packed
from memory.s3mem.pool import Index
from memory.s3mem.router import Labels, Router, fit, material
from memory.s3mem.settings import S3MemSettings
from memory.s3mem.writing import written
from runtime.store import to_json

WORLDS, TASKS = 24, 8  # living worlds of each environment, tasks in each
SCIENCE = 8  # ScienceWorld's episodes: the first of each kind of task
NOISE = 0.25  # share of the expert's actions that are detours, so that things recur
PER_CATEGORY = {"steps": 3, "dialogues": 10}  # questions of a history
DIALOGUES, SESSIONS = 20, 12
HELD_OUT = 0.25  # share of the scenes, and of the dialogues, on which C is chosen
CS = (0.01, 0.1, 1.0)
BUDGETS = (100, 200, 400)
console = Console(width=120)


@dataclass(frozen=True, slots=True)
class Source:
    """Histories of one environment, and what they follow from."""

    name: str
    histories: tuple[Trace, ...]

    def facts(self) -> dict[str, Any]:
        told = [[t.task.id, *t.actions] for t in self.histories]
        sha = hashlib.sha256(to_json(told, ascii=True).encode()).hexdigest()[:16]
        return {"histories": len(told), "steps": sum(len(t) - 1 for t in told), "sha256": sha}


def sources(names: Sequence[str], seed: int = 0, worlds: int | None = None) -> list[Source]:
    """Have the experts act in the train splits: household and alfworld in living worlds (WORLDS, or so many),
    scienceworld task by task."""
    found, lived_in = [], f"{{tasks: R, worlds: {worlds or WORLDS}, length: {TASKS}}}"
    for name in names:
        more = "" if name == "scienceworld" else f", sequences: {lived_in}"
        engine = ", engine: native" if name == "alfworld" else ""
        config = load_config(EvalConfig, None, [f"env={{name: {name}{engine}{more}}}"])
        with Environments(config.env) as envs:
            if name == "scienceworld":
                kinds: dict[str, Any] = {}
                for task in envs.tasks("train"):
                    kinds.setdefault(task.kind, task)
                told = played(envs, list(kinds.values())[:SCIENCE], NOISE, seed)
            else:
                told = lived(envs, "train", NOISE, seed)
        found.append(Source(name, tuple(trace for trace in told if trace.records)))
    return found


def cases_of(found: Sequence[Source], seed: int = 0, asked: Sequence[Case] = ()) -> tuple[list[Case], list[Case]]:
    """Make the questions: (training, held out). A scene is on one side alone; a dialogue is about histories of one.
    `asked`: cases that somebody else wrote, which go to their scenes' sides."""
    train, held = list[Trace](), list[Trace]()
    for source in found:
        kept = _held_scenes(source.histories, seed)
        for trace in source.histories:
            (held if _scene(trace) in kept else train).append(trace)
    sides = []
    for side, n in ((train, DIALOGUES), (held, round(HELD_OUT * DIALOGUES))):
        homes, draw = [trace for trace in side if trace.task.kind == "history"], random.Random(seed)
        pairs = [draw.sample(homes, 2) for _ in range(n if len(homes) > 1 else 0)]
        name, most = "train" if side is train else "held", PER_CATEGORY["dialogues"]
        told = [dialogue_case(f"{name}-{i}", (a, b), SESSIONS, most, seed) for i, (a, b) in enumerate(pairs)]
        sides.append([*(step_case(trace, PER_CATEGORY["steps"], seed) for trace in side), *told])
    kept = {_scene(trace) for trace in held}
    new = [case.histories[0] for case in asked if _scene(case.histories[0]) not in kept | set(map(_scene, train))]
    kept |= _held_scenes(new, seed)
    for case in asked:
        sides[_scene(case.histories[0]) in kept].append(case)
    return sides[0], sides[1]


def _scene(trace: Trace) -> str:
    return trace.task.scene or trace.task.id


def _held_scenes(histories: Iterable[Trace], seed: int) -> set[str]:
    scenes = sorted(set(map(_scene, histories)))
    return set(random.Random(seed).sample(scenes, round(HELD_OUT * len(scenes))))


def labelled(case: Case, settings: S3MemSettings) -> list[tuple[Question, Labels]]:
    """Turn the records that answer questions into labels of the units that point to them."""
    units = [unit for history in case.histories for unit in written(history)]
    index, by_pointer = Index(units, settings), {pointer: unit.id for unit in units for pointer in unit.pointers}
    of = lambda ids: frozenset(by_pointer[id] for id in ids)
    return [
        (
            q,
            Labels(
                index.ask(q.text),
                of(q.evidence),
                of(q.anchors),
                tuple((by_pointer[a], by_pointer[b]) for a, b in q.links),
            ),
        )
        for q in case.questions
    ]


def held_out_recall(router: Router, examples: Iterable[tuple[Question, Labels]], settings: S3MemSettings) -> float:
    """Return the mean share of evidence that is packed, over questions and BUDGETS."""
    shares = []
    for _, example in examples:
        nodes = router.nodes(example.asked)
        wanted = settings.edges and example.asked.anchor.multi_hop
        edges = router.edges(example.asked, nodes, settings.edge_nodes) if wanted else {}
        for budget in BUDGETS:
            got = {c.unit.id for c in packed(example.asked.anchor, nodes, edges, budget, settings).picks}
            shares.append(len(got & example.support) / len(example.support))
    return float(np.mean(shares))


def train_router(
    out: Path,
    environments: Sequence[str],
    features: Features = "numeric",
    seed: int = 0,
    settings: S3MemSettings | None = None,
    questions: Path | None = None,
) -> Router:
    """Train, choose C on the held-out scenes, and write router and manifest. `questions`: a file of cases with more of
    them. Raises: ValueError, where that is none."""
    settings = settings or S3MemSettings(fill=True)
    started = time.monotonic()
    more = load_cases(questions) if questions else []
    found = sources(environments, seed)
    train, held = cases_of(found, seed, more)
    examples = [label for case in train for _, label in labelled(case, settings)]
    tests = [pair for case in held for pair in labelled(case, settings)]
    console.print(f"  router: {len(examples)} questions to learn from, {len(tests)} held out")
    told = material(examples, features, seed)
    scores: dict[float, tuple[float, Router]] = {}
    for c in CS:
        router = fit(told, c)
        scores[c] = held_out_recall(router, tests, settings), router
        console.print(f"  C={c:g}: {100 * scores[c][0]:.1f} % of held-out evidence packed")
    best = max(CS, key=lambda c: scores[c][0])
    chosen = scores[best][1]
    manifest = {
        "trained_on": {source.name: source.facts() for source in found},
        "dialogues": DIALOGUES,
        "seed": seed,
        "questions": len(examples),
        "held_out": len(tests),
        "c": best,
        "held_out_recall": {f"{c:g}": round(score, 4) for c, (score, _) in scores.items()},
        "benchmarks": [],
        "settings": settings.model_dump(mode="json"),
    }
    if questions:
        sha = hashlib.sha256(questions.read_bytes()).hexdigest()[:16]
        manifest["asked"] = {"questions": sum(len(case.questions) for case in more), "sha256": sha}
    router = replace(chosen, manifest=manifest)
    router.save(out / "router.safetensors")
    console.print(f"  {out / 'router.safetensors'}: sha256 {router.sha256[:16]}, {time.monotonic() - started:.0f} s")
    return router
