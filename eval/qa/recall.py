"""`memcompiler bench memory recall`: the share of each question's evidence that a memory packs; uses no reader."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import typer

from configs.collect import MemoryModels
from data_gen.questions.records import QuestionSet
from eval.intervals import bootstrap_mean
from eval.qa.benchmark_files import read_question_sets
from eval.qa.retrievers import open_retriever
from eval.table import markdown_table
from memory.registry import RESPONSES
from runtime.store import to_json, write_atomically

ALL = "all"
Recalls = dict[tuple[str, int], list[float]]  # a share of evidence per question, by category and budget


def run_recall(
    data: Path,
    *,
    memory: str,
    budgets: Sequence[int],
    settings: Mapping[str, Any],
    facts: bool,
    out: Path | None,
    models: MemoryModels,
) -> None:
    """Measure and print recall; the last line is the recall at the budget nearest to 1000 tokens.

    Raises:
        ValueError: no question has evidence.
    """
    cached = models.cached_in(out / RESPONSES) if out is not None else models
    sets = read_question_sets(data)
    shares, times = measure_recall(sets, memory, budgets, settings=settings, facts=facts, models=cached)
    if not shares:
        raise ValueError(f"no question of {data} has evidence: recall cannot be measured")
    categories = [*dict.fromkeys(category for category, _ in shares if category != ALL), ALL]
    rows = [
        [name, str(len(shares[name, budgets[0]])), *(_format(shares[name, b], name == ALL) for b in budgets)]
        for name in categories
    ]
    typer.echo("\n".join(markdown_table(["category", "n", *(f"{b} tokens" for b in budgets)], rows)))
    whole = [f"{100 * np.mean(np.array(shares[ALL, b]) >= 1):.1f}" for b in budgets]
    typer.echo(
        f"all evidence found: {' / '.join(whole)}; {memory}: written in {times['write_s']:.2f} s, "
        f"median recall {times['recall_ms']:.1f} ms, of processor time"
    )
    means = {f"{c}@{b}": float(np.mean(v)) for (c, b), v in shares.items()}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        about = {"data": data.name, "memory": memory, "settings": dict(settings), "facts": facts, **times}
        about |= {"models": models.model_names()} if models.model_names() else {}
        about |= {"recall": means, "n": len(shares[ALL, budgets[0]])}
        write_atomically(out / "recall.json", to_json(about, 1))
    shown = min(budgets, key=lambda budget: (abs(budget - 1000), budget))
    typer.echo(f"recall@{shown}: {100 * means[f'{ALL}@{shown}']:.1f}")


def measure_recall(
    sets: Sequence[QuestionSet],
    memory: str,
    budgets: Sequence[int],
    *,
    settings: Mapping[str, Any] | None = None,
    facts: bool = False,
    models: MemoryModels | None = None,
) -> tuple[Recalls, dict[str, float]]:
    """Retrieve evidence for every question at every budget; also return the CPU time of writing (s) and of the median
    recall (ms)."""
    shares: Recalls = {}
    writing, recalls = 0.0, list[float]()
    for n, each in enumerate(sets):
        with tempfile.TemporaryDirectory() as folder:
            started = time.process_time()
            path = Path(folder) / str(n)
            retrieve = open_retriever(memory, each, settings or {}, path, facts=facts, models=models)
            writing += time.process_time() - started
            for question in each.questions:
                for budget in budgets if question.evidence else ():
                    started = time.process_time()
                    share = retrieve(question, budget).recall(question.evidence)
                    recalls.append(1000 * (time.process_time() - started))
                    for category in (question.category, ALL):
                        shares.setdefault((category, budget), []).append(share)
    return shares, {"write_s": writing, "recall_ms": float(np.median(recalls)) if recalls else 0.0}


def _format(shares: Sequence[float], interval: bool) -> str:
    mean = f"{100 * np.mean(shares):.1f}"
    if not interval or len(shares) < 2:
        return mean
    found = bootstrap_mean(shares)
    return f"{mean} [{100 * found.low:.1f}, {100 * found.high:.1f}]"
