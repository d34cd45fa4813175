"""What each part of compiler and executor loses on real ALFWorld games, by replacing one at a time with its oracle.

    python -m benchmarks.alfworld_apart --out out/apart --compiler zoo/alfworld/compiler --checkpoint RUN/sft \\
        --executor zoo/alfworld/executor [--limit 140]

The oracle of the executor is the script that it learned from, that of the compiler the expert teacher. Of what the
compiler says, one part at a time is the teacher's: the silence (where the teacher says nothing), the speech (where the
compiler is silent and the teacher is not), the choice (which place, where both name one), the Brief State. Text alone
is delivered, for neither oracle has soft tokens. Success is told within several numbers of steps; differences from
nothing replaced are paired by game.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from agent.deliveries import Delivery
from agent.records import Episode
from compiler.language import Emission, render
from compiler.records import Compilation, Compiler, CompileRequest
from eval.intervals import wilson
from eval.metrics import paired_difference, succeeded
from eval.table import interval, markdown_table, points
from executor.records import Executor
from runtime.store import to_json, write_atomically
from zoo.alfworld import gate, play

Merge = Callable[[Emission, Emission], Emission]  # of the compiler's emission and the teacher's


def _silence(mine: Emission, theirs: Emission) -> Emission:
    return mine if theirs.guidance else Emission(ops=mine.ops)


def _speech(mine: Emission, theirs: Emission) -> Emission:
    return mine if mine.guidance else Emission(theirs.guidance, theirs.reason, mine.ops)


def _choice(mine: Emission, theirs: Emission) -> Emission:
    both = mine.guidance and theirs.guidance
    return Emission(theirs.guidance, theirs.reason, mine.ops) if both else mine


def _state(mine: Emission, theirs: Emission) -> Emission:
    return Emission(mine.guidance, mine.reason, theirs.ops)


PARTS: dict[str, Merge] = {
    "nothing": lambda mine, theirs: mine, "silence": _silence, "speech": _speech, "choice": _choice,
    "Brief State": _state, "compiler": lambda mine, theirs: theirs,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Repaired:
    """A compiler, part of whose emissions is the teacher's."""

    compiler: Compiler
    merge: Merge

    def compile(self, requests: Sequence[CompileRequest]) -> list[Compilation]:
        pairs = zip(self.compiler.compile(requests), play.TEACHER.compile(requests), strict=True)
        made = [self.merge(mine.emission, theirs.emission) for mine, theirs in pairs]
        return [Compilation(render(e), e, request=r) for e, r in zip(made, requests, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--compiler", required=True, help="a model folder")
    parser.add_argument("--checkpoint", help="a training run; without, the base is asked for the emission")
    parser.add_argument("--executor", required=True, help="a model folder")
    parser.add_argument("--split", default="valid_seen")
    parser.add_argument("--limit", type=int)
    a = parser.parse_args()
    make_env, specs = play.material(a.out / "bank", a.split, a.limit)
    compiler = gate.load(a.compiler, a.checkpoint)
    model, script = gate.load_executor(a.executor), play.Pupil(play.Script.of(specs))

    def played(merge: Merge, executor: Executor) -> list[Episode]:
        return play.played(make_env, specs, Delivery("text", "compiled", Repaired(compiler, merge), False), executor)

    runs = {f"{part} replaced": played(merge, model) for part, merge in PARTS.items()}
    runs |= {"executor replaced": played(PARTS["nothing"], script), "both": played(PARTS["compiler"], script)}
    base, found = runs["nothing replaced"], {}
    for name, episodes in runs.items():
        found[name] = {
            str(steps): {
                "success": asdict(wilson(sum(succeeded(e, steps) for e in episodes), len(episodes))),
                "gain": asdict(paired_difference(episodes, base, steps)),
            }
            for steps in gate.WITHIN
        }
    write_atomically(a.out / "apart.json", to_json(found, indent=1))
    heads = ["replaced by its oracle", *(f"within {steps}" for steps in gate.WITHIN), f"gain at {gate.WITHIN[0]}"]
    rows = [
        [name, *(interval(cell["success"]) for cell in of.values()), points(of[str(gate.WITHIN[0])]["gain"])]
        for name, of in found.items()
    ]
    print("\n".join(markdown_table(heads, rows)))


if __name__ == "__main__":
    main()
