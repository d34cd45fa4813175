"""Results of chains (`memcompiler reproduce`) for the paper's tables, and the commands that make what is missing."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from configs.evaluation import EvalConfig
from configs.load import load_config
from configs.reproduce import RUNS, Chain, ReproduceConfig, Stage, find_chain, shipped_chains
from configs.run_folder import CONFIG, ENVIRONMENT
from eval.metrics import grouped
from eval.runs import RESULTS
from runtime.store import read_json


def chain_in(folder: Path) -> Chain | None:
    """Return the chain whose folder this is; None for another folder."""
    about = read_json(folder / ENVIRONMENT) if (folder / ENVIRONMENT).is_file() else {}
    if about.get("kind") != ReproduceConfig.COMMAND:
        return None
    return Chain(load_config(ReproduceConfig, folder / CONFIG), folder, about.get("chain") or folder.name)


def default_chains() -> list[Chain]:
    """Return the chains in `runs/`, and the shipped ones of one benchmark that were not started there."""
    found = [chain for folder in sorted(RUNS.glob("*")) if (chain := chain_in(folder))]
    there = {chain.out for chain in found}
    shipped = [find_chain(name) for name in shipped_chains() if RUNS / name not in there]
    return found + [chain for chain in shipped if not chain.config.further]


def finished_runs(chain: Chain, table: int) -> list[Path]:
    """Return the finished evaluations of a chain that belong to a table."""
    return [stage.folder for stage in _evaluations(chain, table) if _complete(stage.folder)]


def missing_runs(chain: Chain, table: int, methods: Mapping[str, str]) -> list[str]:
    """Say which rows of a table a chain lacks, a line for each executor, with the command that measures them.

    Args:
        methods: delivery -> name of the table's row (`Spec.methods`).
    """
    due = [s for s in _evaluations(chain, table) if not (s.optional or _complete(s.folder))]
    lines = []
    for executor, stages in grouped(due, lambda stage: stage.executor).items():
        rows = list(dict.fromkeys(row for stage in stages for row in _rows(stage, methods)))
        if rows:
            out = [] if chain.out == RUNS / chain.name else ["--out", str(chain.out)]
            command = ["memcompiler", "reproduce", chain.name, *out, "--executor", executor, "--tables", str(table)]
            where = ", ".join(dict.fromkeys(_environment(stage) for stage in stages))
            lines.append(f"Not measured: {where}, {executor}: {', '.join(rows)}. To measure: `{shlex.join(command)}`")
    return lines


def _evaluations(chain: Chain, table: int) -> list[Stage]:
    """Return all evaluations of a chain that belong to a table, optional ones as well."""
    known = chain.config.evaluations
    if not any(table in of.tables for of in known.values()):
        return []
    stages = chain.stages([table], optional=[name for name, of in known.items() if of.optional])
    return [stage for stage in stages if table in stage.tables]


def _complete(run: Path) -> bool:
    return (run / RESULTS).is_file() and bool(read_json(run / RESULTS).get("results"))


def _rows(stage: Stage, methods: Mapping[str, str]) -> list[str]:
    deliveries: Sequence[str] = stage.config.deliveries if isinstance(stage.config, EvalConfig) else ()
    names = (methods.get(f"{stage.compiler}/{name}", methods.get(name, "")) for name in deliveries)
    return [name for name in names if name]


def _environment(stage: Stage) -> str:
    return stage.config.env.name if isinstance(stage.config, EvalConfig) else ""
