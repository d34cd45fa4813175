"""Measure whether GRPO learns, and through which channel: held-out success at checkpoints, over several seeds.

Each seed is another short SFT run from which every variant starts (`linear` from a separate SFT run) and, on
generated homes, another set of scenes and rows. The change since SFT is paired by task, with a bootstrap interval over
tasks.

both    text tokens and soft tokens (pathwise gradient), as in configs/grpo/quickstart.yaml and alfworld.yaml
text    text tokens only; soft tokens still change through LoRA
latent  soft tokens only, pathwise
score   soft tokens only, by the score function: the paper's Eq. 8
linear  as `both`, with a deterministic linear projector
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from agent.records import Episode, read_episodes
from eval.metrics import paired_difference, succeeded, summarise
from eval.runs import EPISODES
from eval.table import interval, markdown_table, percent
from experiments.stages import PIPELINES, run_once, seeds_and_settings
from runtime.store import to_json, write_atomically

LINEAR = "compiler.soft.projector=linear"
VARIANTS = {  # name: settings of GRPO
    "both": [],
    "text": ["loss.latent_weight=0", "loss.latent_gradient=density_root"],
    "latent": ["loss.text_weight=0"],
    # The rates of `both` destroy the checkpoint by noise; a quarter of its spread does not explore.
    "score": [
        "loss.text_weight=0",
        "loss.latent_gradient=density_root",
        "optimizer.projector_lr=1.0e-3",
        "sampling.latent_temperature=1.0",
    ],
    "linear": [LINEAR],
}


def sft_checkpoint(out: Path, seed: int, variant: str) -> Path:
    return out / str(seed) / ("sft-linear" if variant == "linear" else "sft-gaussian")


def run_variant(a: argparse.Namespace, seed: int, variant: str) -> None:
    """Train SFT and GRPO of a variant, and evaluate the SFT checkpoint and GRPO's checkpoints."""
    start, out = sft_checkpoint(a.out, seed, variant), a.out / str(seed) / variant
    projector = [LINEAR] if variant == "linear" else []
    own = a.pipeline.seed_overrides(seed)
    a.pipeline.collect(a.out, seed)
    a.pipeline.sft(a.out, seed, start.name.removeprefix("sft-"), f"max_steps={a.sft_steps}", *projector)
    settings = [*own, *a.pipeline.grpo_settings, f"compiler.checkpoint={start}", f"updates={a.updates}"]
    settings += [f"save_every={a.every}", "keep=1000", *VARIANTS[variant], *a.settings, "--out", f"{out}/grpo"]
    run_once(out, "grpo", "train", "grpo", "-c", f"grpo/{a.pipeline.config}", *settings)
    for update, folder in evaluation_folders(a, seed, variant).items():
        checkpoint = out / f"grpo/checkpoints/step-{update:06d}" if update else start
        settings = [*own, *a.pipeline.eval_settings, f"max_steps={a.pipeline.grpo_max_steps}", "deliveries=[compiled]"]
        settings += [f"limit={a.limit}", f"compiler.checkpoint={checkpoint}", *projector, "--out", f"{folder}/run"]
        run_once(folder, "eval", "eval", "-c", f"eval/{a.pipeline.config}", *settings)


def evaluation_folders(a: argparse.Namespace, seed: int, variant: str) -> dict[int, Path]:
    """Return the evaluation folders by update; 0 is the SFT checkpoint."""
    start, out = sft_checkpoint(a.out, seed, variant), a.out / str(seed) / variant
    updates = range(a.every, a.updates + 1, a.every)
    return {0: start.with_name(f"eval-{start.name}"), **{update: out / f"eval-{update}" for update in updates}}


def held_out_episodes(a: argparse.Namespace, variant: str, update: int) -> dict[int, list[Episode]]:
    """Read the held-out episodes of an update by seed; tasks of different scenes get different ids."""
    played: dict[int, list[Episode]] = {}
    for seed in a.seeds:
        played[seed] = list(read_episodes(evaluation_folders(a, seed, variant)[update] / "run" / EPISODES))
        for episode in played[seed] if a.pipeline.seeded_scenes else ():
            episode.task_id = f"{seed}/{episode.task_id}"
    return played


def rows(a: argparse.Namespace, variant: str) -> Iterator[dict]:
    """Yield success over all seeds, and its change since SFT, per task family and update."""
    by_update = {update: held_out_episodes(a, variant, update) for update in evaluation_folders(a, a.seeds[0], variant)}
    families = ["", *sorted({e.family for played in by_update[0].values() for e in played} - {""})]
    for family, update in itertools.product(families, by_update):
        of = lambda played, family=family: [e for e in played if family in ("", e.family)]
        before, after = (of(itertools.chain(*by_update[u].values())) for u in (0, update))
        change = paired_difference(after, before)
        yield {
            "variant": variant,
            "family": family or "all",
            "update": update,
            "n": change.n,
            "success": summarise(after)["success"],
            "change": asdict(change),
            "by_seed": {seed: fmean(map(succeeded, of(played))) for seed, played in by_update[update].items()},
        }


def cells(row: dict) -> list[str]:
    success, change = row["success"], row["change"]
    return [
        row["variant"],
        f"{row['family']} (n = {row['n']})",
        percent(success["mean"] - change["mean"]),
        interval(success),
        interval(change, "{:+.1f}"),
        f"{change['wins']} / {change['losses']}",
        " / ".join(map(percent, row["by_seed"].values())),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--env", default="household", choices=PIPELINES)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--every", type=int, default=12, help="updates between evaluated checkpoints")
    parser.add_argument("--sft-steps", type=int, default=100)
    parser.add_argument("--limit", type=int, default=96, help="held-out tasks per seed")
    parser.add_argument("arguments", nargs="+", help="seeds, then settings of GRPO as a.b=c")
    a = parser.parse_args()
    a.pipeline, (a.seeds, a.settings) = PIPELINES[a.env], seeds_and_settings(a.arguments)
    for seed in a.seeds:
        for variant in a.variants:
            run_variant(a, seed, variant)
    found = [row for variant in a.variants for row in rows(a, variant)]
    write_atomically(a.out / "results.json", to_json(found, indent=1))
    heads = ["variant", "tasks", "before %", "after % [95 %]", "change [95 %]", "better / worse", "by seed"]
    print("\n".join(markdown_table(heads, [cells(row) for row in found if row["update"] == a.updates], left=2)))


if __name__ == "__main__":
    main()
