"""Does GRPO learn, and through which channel? Several seeds, held-out success at every checkpoint.

    python -m benchmarks.grpo_learning --out out/grpo-learning --jobs 2 211 212 213 [a.b=c ...]
    python -m benchmarks.grpo_learning --world alfworld --sft-steps 400 --limit 140 --out out/grpo-alfworld 0 1 2

Each seed is another short SFT run, from which every variant starts (the `linear` projector from an SFT run of its own),
of generated homes another set of scenes and another collection, too. Held-out tasks are played greedily at some
checkpoints; the change from the SFT checkpoint to the last one is paired by task, with a bootstrap interval over tasks
(a real game's seeds are averaged). What stands in --out already is not made again, so that a run that was stopped goes
on.

both    text tokens and soft tokens (pathwise gradient), the setting of configs/grpo/quickstart.yaml and alfworld.yaml
text    text tokens alone; the soft tokens that the executor reads still change with LoRA
latent  soft tokens alone, pathwise
score   soft tokens alone, by the score function: the paper's Eq. 8
linear  as `both`, with a deterministic linear projector
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure

from agent.records import Episode, read_episodes
from benchmarks.stage import WORLDS, run
from eval.metrics import paired_difference, succeeded, summarise
from eval.plots import save_figure
from eval.runs import EPISODES
from eval.table import interval, markdown_table, percent
from runtime.store import JsonLines, to_json, write_atomically

LINEAR = "compiler.soft.projector=linear"
VARIANTS = {  # name: settings of GRPO
    "both": [],
    "text": ["loss.latent_weight=0", "loss.latent_gradient=score"],
    "latent": ["loss.text_weight=0"],
    # At the rates of `both` its noise undoes the checkpoint, at a quarter of its spread it explores nothing.
    "score": [
        "loss.text_weight=0",
        "loss.latent_gradient=score",
        "optimizer.projector_lr=1.0e-3",
        "sampling.latent_temperature=1.0",
    ],
    "linear": [LINEAR],
}


def one_seed(root: Path, seed: int, linear: bool, a: argparse.Namespace) -> None:
    """Make rows and SFT checkpoints of a seed."""
    a.world.collect(root, seed)
    a.world.sft(root, seed, "gaussian", f"max_steps={a.sft_steps}")
    if linear:
        a.world.sft(root, seed, "linear", f"max_steps={a.sft_steps}", LINEAR)


def one_start(root: Path, seed: int, name: str, a: argparse.Namespace) -> None:
    """Measure held-out success of the checkpoint that a variant starts from."""
    start = start_of(root, seed, name)
    held_out(start.with_name(f"eval-{start.name}"), seed, start, name, a)


def one_variant(root: Path, seed: int, name: str, a: argparse.Namespace) -> None:
    """Run a variant's GRPO, and measure the held-out success of its checkpoints."""
    out, start = root / str(seed) / name, start_of(root, seed, name)
    settings = [f"updates={a.updates}", f"save_every={a.every}", "keep=1000", *VARIANTS[name], *a.overrides]
    run(
        out,
        "grpo",
        "train",
        "grpo",
        "-c",
        f"grpo/{a.world.stage}",
        *a.world.seeded(seed),
        *a.world.trained,
        f"compiler.checkpoint={start}",
        *settings,
        "--out",
        f"{out}/grpo",
    )
    for update in range(a.every, a.updates + 1, a.every):
        held_out(out / f"eval-{update}", seed, out / f"grpo/checkpoints/step-{update:06d}", name, a)


def start_of(root: Path, seed: int, name: str) -> Path:
    return root / str(seed) / ("sft-linear" if name == "linear" else "sft-gaussian")


def held_out(out: Path, seed: int, checkpoint: Path, name: str, a: argparse.Namespace) -> None:
    run(
        out,
        "eval",
        "eval",
        "-c",
        f"eval/{a.world.stage}",
        *a.world.seeded(seed),
        *a.world.played,
        f"max_steps={a.world.budget}",
        "deliveries=[compiled]",
        f"limit={a.limit}",
        f"compiler.checkpoint={checkpoint}",
        *([LINEAR] if name == "linear" else []),
        "--out",
        f"{out}/run",
    )


def held_out_episodes(root: Path, name: str, update: int, a: argparse.Namespace) -> dict[int, list[Episode]]:
    """Read what was played with a checkpoint, by seed."""
    played: dict[int, list[Episode]] = {}
    for seed in a.seeds:
        start = start_of(root, seed, name)
        folder = root / str(seed) / name / f"eval-{update}" if update else start.with_name(f"eval-{start.name}")
        played[seed] = list(read_episodes(folder / "run" / EPISODES))
        for episode in played[seed]:
            episode.task_id = a.world.task(seed, episode.task_id)
    return played


def rows(root: Path, a: argparse.Namespace) -> Iterator[dict]:
    """Yield a row per variant, family and checkpoint: success over all seeds, and its change since SFT by task."""
    updates = range(0, a.updates + 1, a.every)
    for name in a.variants:
        every = {update: held_out_episodes(root, name, update, a) for update in updates}
        families = ["", *sorted({e.family for played in every[0].values() for e in played} - {""})]
        for family, update in itertools.product(families, updates):
            of = lambda played, family=family: [e for e in played if family in ("", e.family)]
            before, after = (of(itertools.chain(*every[u].values())) for u in (0, update))
            change = paired_difference(after, before)
            yield {
                "variant": name,
                "family": family or "all",
                "update": update,
                "n": change.n,
                "success": summarise(after)["success"],
                "change": asdict(change),
                "by_seed": {seed: fmean(map(succeeded, of(played))) for seed, played in every[update].items()},
            }


def plot(found: list[dict], root: Path, a: argparse.Namespace) -> None:
    families = list(dict.fromkeys(row["family"] for row in found))
    figure = Figure(figsize=(3.25 * (1 + len(families)), 3.4), dpi=150, layout="constrained")
    training, *held = figure.subplots(1, 1 + len(families), sharey=True)
    for i, name in enumerate(a.variants):
        files = [root / str(seed) / name / "grpo" / "metrics.jsonl" for seed in a.seeds]
        updates = list(zip(*([row["reward"] for row in JsonLines(file)] for file in files), strict=True))
        low, curve, high = ([100 * f(rewards) for rewards in updates] for f in (min, fmean, max))
        training.fill_between(range(1, len(curve) + 1), low, high, color=f"C{i}", alpha=0.12, lw=0)
        training.plot(range(1, len(curve) + 1), curve, color=f"C{i}", label=name)
        for panel, family in zip(held, families, strict=True):
            line = [r for r in found if (r["variant"], r["family"]) == (name, family)]
            at, low, high = [r["update"] for r in line], *([r["success"][end] for r in line] for end in ("low", "high"))
            panel.fill_between(at, [100 * x for x in low], [100 * x for x in high], color=f"C{i}", alpha=0.12, lw=0)
            panel.plot(at, [100 * r["success"]["mean"] for r in line], color=f"C{i}", marker="o", ms=3)
            panel.set_title(f"held-out, {family} (n = {line[0]['n']})", loc="left", fontsize=9)
    training.set_title("training, sampled; band: seeds", loc="left", fontsize=9)
    training.set_ylabel("success %")
    training.legend(frameon=False, fontsize=8)
    for panel in figure.axes:
        panel.set_xlabel("GRPO update")
        panel.grid(alpha=0.25)
    save_figure(figure, root / "curves.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--world", type=WORLDS.__getitem__, default="household", help=", ".join(WORLDS))
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--every", type=int, default=12, help="updates between checkpoints that are evaluated")
    parser.add_argument("--sft-steps", type=int, default=100)
    parser.add_argument("--limit", type=int, default=96, help="held-out tasks of each seed")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    parser.add_argument("rest", nargs="+", help="seeds, then settings of GRPO as a.b=c")
    a = parser.parse_args()
    a.seeds, a.overrides = [int(x) for x in a.rest if "=" not in x], [x for x in a.rest if "=" in x]
    started = time.perf_counter()
    with ThreadPoolExecutor(a.jobs) as pool:
        each: Callable[[Callable, list], list] = lambda f, xs: list(pool.map(lambda x: f(a.out, *x, a), xs))
        each(one_seed, [(seed, "linear" in a.variants) for seed in a.seeds])
        starts = {start_of(a.out, seed, name): (seed, name) for name in a.variants for seed in a.seeds}
        each(one_start, list(starts.values()))
        each(one_variant, [(seed, name) for name in a.variants for seed in a.seeds])
    found = list(rows(a.out, a))
    write_atomically(a.out / "results.json", to_json(found, indent=1))
    plot(found, a.out, a)
    heads = ["variant", "tasks", "before %", "after % [95 %]", "change [95 %]", "better / worse", "by seed"]
    print("\n".join(markdown_table(heads, [cells(row) for row in found if row["update"] == a.updates], left=2)))
    print(f"this call: {(time.perf_counter() - started) / 60:.0f} minutes")


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


if __name__ == "__main__":
    main()
