"""memcompiler bench recall: the share of a question's evidence that a memory packs, by category; no model is needed."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import typer

from configs.collect import MemoryModels
from data_gen.cases import Case
from eval.intervals import bootstrap_mean
from eval.qa.evidence import asking
from eval.qa.files import read_cases
from eval.table import markdown_table
from memory.registry import RESPONSES
from runtime.store import to_json, write_atomically

ALL = "all"
Shares = dict[tuple[str, int], list[float]]  # by category and budget


def run_recall(
    data: Path,
    memory: str,
    budgets: Sequence[int],
    settings: Mapping[str, Any],
    facts: bool,
    out: Path | None,
    models: MemoryModels,
) -> None:
    """Measure and print; the last line is the recall at 1000 tokens, or at the budget nearest to it. Raises:
    ValueError, where no question says where its answer stands."""
    cached = models.cached_in(out / RESPONSES) if out is not None else models
    shares, times = measured(read_cases(data), memory, budgets, settings, facts, cached)
    if not shares:
        raise ValueError(f"no question of {data} names the records that answer it: recall cannot be told")
    categories = [*dict.fromkeys(category for category, _ in shares if category != ALL), ALL]
    rows = [
        [name, str(len(shares[name, budgets[0]])), *(told(shares[name, b], name == ALL) for b in budgets)]
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
        about |= {"models": models.told()} if models.told() else {}
        about |= {"recall": means, "n": len(shares[ALL, budgets[0]])}
        write_atomically(out / "recall.json", to_json(about, 1))
    shown = min(budgets, key=lambda budget: (abs(budget - 1000), budget))
    typer.echo(f"recall@{shown}: {100 * means[f'{ALL}@{shown}']:.1f}")


def measured(
    cases: Sequence[Case],
    memory: str,
    budgets: Sequence[int],
    settings: Mapping[str, Any] | None = None,
    facts: bool = False,
    models: MemoryModels | None = None,
) -> tuple[Shares, dict[str, float]]:
    """Ask every question that has evidence at every budget; also give the processor time of writing and of a recall,
    which does not depend on what else the machine does."""
    shares: Shares = {}
    writing, recalls = 0.0, list[float]()
    for n, case in enumerate(cases):
        with tempfile.TemporaryDirectory() as folder:
            started = time.process_time()
            ask = asking(memory, case, settings or {}, Path(folder) / str(n), facts, models)
            writing += time.process_time() - started
            for question in case.questions:
                for budget in budgets if question.evidence else ():
                    started = time.process_time()
                    share = ask(question, budget).recall(question.evidence)
                    recalls.append(1000 * (time.process_time() - started))
                    for category in (question.category, ALL):
                        shares.setdefault((category, budget), []).append(share)
    return shares, {"write_s": writing, "recall_ms": float(np.median(recalls)) if recalls else 0.0}


def told(shares: Sequence[float], interval: bool) -> str:
    mean = f"{100 * np.mean(shares):.1f}"
    if not interval or len(shares) < 2:
        return mean
    found = bootstrap_mean(shares)
    return f"{mean} [{100 * found.low:.1f}, {100 * found.high:.1f}]"
