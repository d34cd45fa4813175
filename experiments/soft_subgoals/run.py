"""Train soft tokens to carry the command that is due where the text names only the subgoal.

The rows are those of a collection by the teacher of level `command`: the same states and actions, but the guidance of
every step, past ones too, is reworded to level `subgoal`, on which the frozen executor solves nothing by text. The
compiler of commands is first trained further to say subgoals. What the executor gains from a compiler trained on these
rows therefore comes through the soft tokens. Each variant is one SFT run, and one evaluation with text alone, with soft
tokens, and with another episode's soft tokens.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from agent.command_teacher import CommandTeacher
from agent.deliveries import recorded_step
from agent.records import Episode, EpisodeContext, compile_request, read_episodes
from data_gen.collect import rows_from_record
from data_gen.rows import save_rows
from experiments.stages import run_once
from memory.bank import MemoryBank
from memory.protocol import EntryStore
from zoo.alfworld.commands import train_subgoal_compiler
from zoo.alfworld.play import READER

COMMANDS = Path("zoo/alfworld-frozen/compiler")
VARIANTS = {  # name: settings of SFT and evaluation
    "n0": ["soft=false"],
    "n4": ["compiler.soft.n_tokens=4"],
    "n8": ["compiler.soft.n_tokens=8"],
    "n16": ["compiler.soft.n_tokens=16"],
    "no_orth": ["compiler.soft.n_tokens=8", "weights.orth=0"],
    "linear": ["compiler.soft.n_tokens=8", "compiler.soft.projector=linear"],
}


def reword(episode: Episode, entries: EntryStore, teacher: CommandTeacher) -> None:
    """Give every guided step the guidance of the teacher's level."""
    episode.delivery = "expert_compiler"  # what evaluations call the teacher's delivery
    steps = [recorded_step(episode, t, episode.memory_at(t, entries)) for t in range(len(episode.steps))]
    requests = list(map(compile_request, steps))
    said = teacher.compile(requests, [EpisodeContext(task_id=episode.task_id)] * len(requests))
    for step, compilation in zip(episode.steps, said, strict=True):
        if step.guidance:
            step.emission_text = compilation.text
            step.guidance, step.reason = compilation.emission.guidance, compilation.emission.reason


def reworded_rows(collection: Path, out: Path) -> None:
    """Write the rows of a collection with the guidance of level `subgoal`, unless they are there."""
    if (out / "rows" / "dataset_info.json").exists():
        return
    entries = {entry.id: entry for entry in MemoryBank(collection / "bank")}
    teacher = CommandTeacher("subgoal", reader=READER)
    episodes = list(read_episodes(collection / "episodes.jsonl"))
    for episode in episodes:
        reword(episode, entries, teacher)
    rows = rows_from_record(episodes, entries, own_label=False, commands=True)[0]
    kept = (row for row in rows if row.success)
    save_rows([replace(row, teacher_level="subgoal", environment="alfworld") for row in kept], out / "rows")
    for name in ("manifest.json", "collect.json", "leakage.json"):  # which tasks and memory the rows come from
        shutil.copy(collection / name, out / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/soft-subgoals"))
    parser.add_argument("--collection", type=Path, help="finished run of collect/alfworld-frozen")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--sft", nargs="*", default=(), metavar="a.b=c", help="settings of all SFT runs")
    parser.add_argument("--eval", nargs="*", default=(), metavar="a.b=c", help="settings of all evaluations")
    a = parser.parse_args()
    if a.collection is None:
        a.collection = a.out / "collect"
        run_once(a.out, "collect", "collect", "-c", "collect/alfworld-frozen", "limit=400", "--out", str(a.collection))
    reworded_rows(a.collection, a.out / "reworded")
    if not (a.out / "compiler" / "RECORD.json").exists():
        train_subgoal_compiler(a.out / "compiler", a.out / "work", COMMANDS)
    for name in a.variants:
        train_and_evaluate(name, VARIANTS[name], out=a.out, sft=a.sft, evaluation=a.eval)


def train_and_evaluate(
    name: str, settings: Sequence[str], *, out: Path, sft: Sequence[str], evaluation: Sequence[str]
) -> None:
    """Train a variant and evaluate it in homes left out; both resume."""
    trained, merged, soft = out / f"sft-{name}", out / f"merged-{name}", "soft=false" not in settings
    says = f"compiler.model={out / 'compiler'}"
    own = [says, *(setting for setting in settings if setting.startswith("compiler."))]
    deliveries = ["compiled_text", "compiled", "compiled_shuffled_soft"] if soft else ["compiled_text"]
    trains = ["train", "sft", "-c", "sft/alfworld-frozen", f"rows={out / 'reworded' / 'rows'}"]
    run_once(out, trained.name, *trains, says, *settings, *sft, "--out", f"{trained}")
    run_once(out, merged.name, "merge", f"{trained}", "--out", f"{merged}")
    chosen = [f"compiler.checkpoint={merged}", "select={home: [left_out]}", f"deliveries=[{','.join(deliveries)}]"]
    plays = ["eval", "-c", "eval/alfworld-frozen", *chosen, *own, *evaluation]
    run_once(out, f"eval-{name}", *plays, "--out", f"{out}/eval-{name}")


if __name__ == "__main__":
    main()
