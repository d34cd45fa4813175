"""Measure what reaches a frozen public language model in a growing chat, and what its prompt costs step by step.

The evaluation `eval/alfworld-levels` plays real games with nothing, with pasted memory, and with each level of the
expert teacher's guidance. Then the prompts of the pasted episodes are written again with raw and compact entries, in
both contexts, to count their tokens by step; the steps of the record say which of them a prefix cache held.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from agent.deliveries import recorded_step
from agent.records import Episode, executor_request, read_episodes
from configs.evaluation import EvalConfig
from configs.load import load_config
from envs.registry import executor_instructions_for
from eval.metrics import succeeded
from eval.runs import EPISODES, read_results
from eval.table import markdown_table
from executor.base import TokenExecutor
from executor.build import executor_view
from executor.prompt import memory_text
from experiments.stages import run_once
from lm.backbone import load_encoder
from memory.trajectory import compact_text
from runtime.store import to_json, write_atomically

STEPS = (0, 1, 2, 4, 9, 14, 19)  # shown in the table
CONTEXTS = ("turns", "rebuilt")


def by_cell(run: Path) -> dict[str, list[Episode]]:
    """Read the evaluation's episodes by cell of the matrix and delivery."""
    found: dict[str, list[Episode]] = {}
    for cell in read_results(run)["cells"].values():
        for episode in read_episodes(run / cell["path"] / EPISODES, images=False):
            found.setdefault(f"{cell['group']}: {episode.delivery}", []).append(episode)
    return found


def success_table(found: dict[str, list[Episode]], budgets: Sequence[int]) -> list[str]:
    """Format success within each number of steps, and tokens a step, by cell and delivery."""
    rows = []
    for name, episodes in found.items():
        steps = [step for episode in episodes for step in episode.steps]
        share = lambda within, of=episodes: f"{100 * fmean(succeeded(e, within) for e in of):.1f}"
        tokens = fmean(step.tokens.get("executor_in", 0) for step in steps)
        cached = fmean(step.tokens.get("executor_cached", 0) for step in steps)
        told = fmean(bool(step.guidance) for step in steps)
        figures = [f"{tokens:.0f}", f"{100 * cached / max(tokens, 1):.0f}", f"{100 * told:.0f}"]
        rows.append([name, str(len(episodes)), *map(share, budgets), *figures])
    heads = ["", "games", *(f"within {b}" for b in budgets), "tokens a step", "cached %", "steps with guidance %"]
    return markdown_table(heads, rows, left=1)


def tokens_by_step(episodes: Sequence[Episode], config: EvalConfig) -> dict[str, dict[int, float]]:
    """Count the tokens of pasted episodes' prompts at each step, written with raw and with compact entries, in both
    contexts; and those of the memory alone."""
    encoder, environment = load_encoder(config.executor.model), executor_instructions_for(config.env)
    executors = {
        context: TokenExecutor(encoder, environment.instructions, reads=executor_view(settings, environment))
        for context in CONTEXTS
        for settings in [config.executor.model_copy(update={"context": context})]
    }
    counts: dict[str, dict[int, list[int]]] = {}

    def count(name: str, t: int, tokens: int) -> None:
        counts.setdefault(name, {}).setdefault(t, []).append(tokens)

    for episode in episodes:
        raw = episode.memory_text
        for kind, memory in (("raw", raw), ("commands", memory_text([*map(compact_text, raw.split("\n\n"))]))):
            for t in range(len(episode.steps)):
                step = replace(recorded_step(episode, t), pasted_memory=memory)
                count(f"memory, {kind}", t, len(encoder.ids(memory)))
                for context, executor in executors.items():
                    count(f"{kind}, {context}", t, len(executor.encode(executor_request(step, executor)).ids))
    return {name: {t: fmean(of) for t, of in by_step.items()} for name, by_step in counts.items()}


def cached_by_step(episodes: Sequence[Episode]) -> dict[int, float]:
    """Return the share of the prompts' tokens that the prefix cache held, by step."""
    read: dict[int, list[tuple[int, int]]] = {}
    for episode in episodes:
        for step in episode.steps:
            held = step.tokens.get("executor_cached", 0), step.tokens.get("executor_in", 0)
            read.setdefault(step.t, []).append(held)
    return {t: sum(a for a, _ in of) / max(1, sum(b for _, b in of)) for t, of in read.items()}


def by_step_table(columns: dict[str, dict[int, float]], form: str) -> list[str]:
    """Format figures by step: a row per column of figures, for the steps of `STEPS`."""
    rows = [[name, *(format(of[t], form) if t in of else "" for t in STEPS)] for name, of in columns.items()]
    return markdown_table(["", *(f"step {t + 1}" for t in STEPS)], rows, left=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings of the evaluation, such as limit=33")
    parser.add_argument("--out", type=Path, default=Path("out/frozen"))
    a = parser.parse_args()
    run_once(a.out, "eval", "eval", "-c", "eval/alfworld-levels", *a.overrides, "--out", str(a.out / "eval"))
    config = load_config(EvalConfig, "eval/alfworld-levels", a.overrides)
    found = by_cell(a.out / "eval")
    tokens = tokens_by_step(next(of for name, of in found.items() if name.endswith("nothing: static")), config)
    cached = {name: cached_by_step(episodes) for name, episodes in found.items()}
    table = success_table(found, config.budgets)
    print(*table, "", *by_step_table(tokens, ".0f"), "", *by_step_table(cached, ".0%"), sep="\n")
    facts = {"config": config.model_dump(mode="json"), "tokens": tokens, "cached": cached, "table": table}
    write_atomically(a.out / "frozen.json", to_json(facts, indent=1))


if __name__ == "__main__":
    main()
