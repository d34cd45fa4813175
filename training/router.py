"""Training of S3Mem's evidence router (section 3.4) on synthetic questions about the expert's own episodes.

    memcompiler train router --out DIR           # DIR/router.safetensors, DIR/router.json (the manifest)

C is chosen on scenes that training does not contain. No benchmark's questions, answers or evidence are read.
`--questions` adds questions of a language model (`memcompiler data questions`).
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console

from data_gen.questions.dialogue_questions import dialogue_questions
from data_gen.questions.histories import ExpertHistories, expert_histories
from data_gen.questions.records import Question, QuestionSet, load_question_sets
from data_gen.questions.templates import template_questions
from memory.protocol import Trace
from memory.s3mem.features import FEATURES_CHOSEN_WITH
from memory.s3mem.index import UnitIndex
from memory.s3mem.packing import pack_evidence
from memory.s3mem.router import Router, RouterExample, fit_router, training_matrices
from memory.s3mem.rule_writer import write_units
from memory.s3mem.settings import S3MemSettings

PER_CATEGORY = {"steps": 3, "dialogues": 10}  # questions of a history
DIALOGUES, SESSIONS = 20, 12
HELD_OUT = 0.25  # share of the scenes, and of the dialogues, on which C is chosen
CS = (0.01, 0.1, 1.0)
BUDGETS = (100, 200, 400)  # tokens
console = Console(width=120)


def split_questions(
    sources: Sequence[ExpertHistories], seed: int = 0, written: Sequence[QuestionSet] = ()
) -> tuple[list[QuestionSet], list[QuestionSet]]:
    """Generate questions about histories; return (training, held out) with no scene in common.

    Args:
        written: question sets of a language model; each follows its scene.
    """
    train, held = list[Trace](), list[Trace]()
    for source in sources:
        held_scenes = _sample_scenes(source.histories, seed)
        for trace in source.histories:
            (held if _scene(trace) in held_scenes else train).append(trace)
    sides = []
    for name, side, n in (("train", train, DIALOGUES), ("held", held, round(HELD_OUT * DIALOGUES))):
        homes, draw = [trace for trace in side if trace.task.kind == "history"], random.Random(seed)
        pairs = [draw.sample(homes, 2) for _ in range(n if len(homes) > 1 else 0)]
        dialogues = [
            dialogue_questions(f"{name}-{i}", (a, b), SESSIONS, PER_CATEGORY["dialogues"], seed=seed)
            for i, (a, b) in enumerate(pairs)
        ]
        sides.append([*(template_questions(trace, PER_CATEGORY["steps"], seed) for trace in side), *dialogues])
    held_scenes = {_scene(trace) for trace in held}
    known = held_scenes | set(map(_scene, train))
    held_scenes |= _sample_scenes([t for each in written if _scene(t := each.histories[0]) not in known], seed)
    for each in written:
        sides[_scene(each.histories[0]) in held_scenes].append(each)
    return sides[0], sides[1]


def _scene(trace: Trace) -> str:
    return trace.task.scene or trace.task.id


def _sample_scenes(histories: Iterable[Trace], seed: int) -> set[str]:
    scenes = sorted(set(map(_scene, histories)))
    return set(random.Random(seed).sample(scenes, round(HELD_OUT * len(scenes))))


def label_questions(questions: QuestionSet, settings: S3MemSettings) -> list[tuple[Question, RouterExample]]:
    """Turn each question's record ids into labels of the units that point to these records."""
    units = [unit for history in questions.histories for unit in write_units(history)]
    index, by_pointer = UnitIndex(units, settings), {pointer: unit.id for unit in units for pointer in unit.pointers}
    unit_ids = lambda records: frozenset(by_pointer[id] for id in records)
    return [
        (
            q,
            RouterExample(
                index.score(q.text),
                support=unit_ids(q.evidence),
                anchor=unit_ids(q.anchors),
                edges=tuple((by_pointer[a], by_pointer[b]) for a, b in q.links),
            ),
        )
        for q in questions.questions
    ]


def held_out_recall(
    router: Router, examples: Iterable[tuple[Question, RouterExample]], settings: S3MemSettings
) -> float:
    """Return the mean share of evidence that is packed, over questions and BUDGETS."""
    shares = []
    for _, example in examples:
        anchor, nodes = example.query.anchor, router.nodes(example.query)
        linked = settings.edges and anchor.multi_hop
        edges = router.edges(example.query, nodes, settings.edge_nodes) if linked else {}
        for budget in BUDGETS:
            pack = pack_evidence(anchor, nodes, edges, budget=budget, settings=settings)
            found = {candidate.unit.id for candidate in pack}
            shares.append(len(found & example.support) / len(example.support))
    return float(np.mean(shares))


def train_router(out: Path, environments: Sequence[str], seed: int = 0, questions: Path | None = None) -> Router:
    """Train the router, choose C on held-out scenes, and write weights and manifest.

    Args:
        questions: a file of further question sets.

    Raises:
        ValueError: `questions` is no such file.
    """
    settings = S3MemSettings(fill=True)
    started = time.monotonic()
    written = load_question_sets(questions) if questions else []
    sources = expert_histories(environments, seed)
    train, held = split_questions(sources, seed, written)
    examples = [example for each in train for _, example in label_questions(each, settings)]
    tests = [pair for each in held for pair in label_questions(each, settings)]
    console.print(f"  router: {len(examples)} training questions, {len(tests)} held out")
    matrices = training_matrices(examples, seed)
    scores: dict[float, tuple[float, Router]] = {}
    for c in CS:
        router = fit_router(matrices, c)
        scores[c] = held_out_recall(router, tests, settings), router
        console.print(f"  C={c:g}: {100 * scores[c][0]:.1f} % of held-out evidence packed")
    best = max(CS, key=lambda c: scores[c][0])
    manifest = {
        "trained_on": {source.environment: source.summary() for source in sources},
        "dialogues": DIALOGUES,
        "seed": seed,
        "questions": len(examples),
        "held_out": len(tests),
        "c": best,
        "held_out_recall": {f"{c:g}": round(score, 4) for c, (score, _) in scores.items()},
        "benchmarks": [],
        "features_chosen_with": list(FEATURES_CHOSEN_WITH),
        "settings": settings.model_dump(mode="json"),
    }
    if questions:
        sha = hashlib.sha256(questions.read_bytes()).hexdigest()[:16]
        manifest["asked"] = {"questions": sum(len(each.questions) for each in written), "sha256": sha}
    router = replace(scores[best][1], manifest=manifest)
    router.save(out / "router.safetensors")
    console.print(f"  its features were chosen with {', '.join(FEATURES_CHOSEN_WITH)} in sight, its weights were not")
    console.print(f"  {out / 'router.safetensors'}: sha256 {router.sha256[:16]}, {time.monotonic() - started:.0f} s")
    return router
