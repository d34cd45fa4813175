"""The gates of the small models of real ALFWorld, measured on any model folder, on games that nothing learned from.

An executor has to find its own way where it is told nothing, to go where guidance says, and to read pasted memory as
well: else a comparison of deliveries would starve one of them. A compiler has to name the right place, to keep silent
where nothing is to be said, to leave out what is ruled out and to cite what M holds, with a checkpoint and as a base,
which writes what SFT is to keep. What is right is what the teacher says; states are those of episodes
in which the teacher compiles and a script acts, as often as they come.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from compiler.build import load_compiler
from compiler.hf import MemoryCompiler
from compiler.language import Emission
from compiler.records import CompileRequest
from configs.models import CompilerConfig, ExecutorConfig
from envs.spec import Told
from eval.metrics import succeeded
from executor.build import load_frozen
from executor.hf import FrozenExecutor
from lm.backbone import load_backbone
from zoo.alfworld import play
from zoo.alfworld.lessons import UNASKED
from zoo.gates import Asked, Share

SCRIPT = "script"  # in the place of an executor's folder
ALONE, THRESHOLD = 0.70, 0.95
WITHIN = (15, 30, play.STEPS)
TOKENS = 96  # of an emission, at most


def executor_gates(model: str, work: Path, split: str, limit: int | None, seed: int = 0) -> list[Share]:
    """Play the games alone, with the teacher's guidance and with all of M pasted, which has to be worth what guidance
    is, within the binomial error of so many games. Beside success: how often the executor goes where guidance or memory
    says, of the occasions and of the steps at which the script would. `SCRIPT` plays the script itself: what an
    executor can reach that learns from it."""
    make_env, specs = play.material(work, split, limit)
    script, shares = play.Script.of(specs), list[Share]()
    actor = None if model == SCRIPT else load_executor(model)
    alone, static, guided, _ = play.deliveries(seed)
    asked_for = {(alone.name, play.STEPS): ALONE}
    for delivery in (alone, guided, static):
        pupil = play.Pupil(script, actor, seed=seed)
        episodes = play.played(make_env, specs, delivery, pupil)
        for steps in WITHIN:
            name, solved = delivery.name, (succeeded(episode, steps) for episode in episodes)
            share = Share.of(f"{name}, solved within {steps} steps", solved, asked_for.get((name, steps)))
            shares.append(share)
            if delivery is guided:
                asked_for[static.name, steps] = share.interval.low
        if delivery is not alone:
            told = [example for example in pupil.examples if example.choice.why is play.Why.TOLD]
            threshold = THRESHOLD if delivery is guided else None
            shares.append(Share.of(f"{delivery.name}, goes where it is told", _obeyed(_occasions(told)), threshold))
            shares.append(Share.of(f"{delivery.name}, of all steps at which it is told", _obeyed(told)))
    return shares


def _obeyed(told: Iterable[play.Example]) -> Iterator[bool]:
    return (example.done in example.choice.commands for example in told)


def _occasions(told: Iterable[play.Example]) -> Iterable[play.Example]:
    """Keep the first of an episode's states at which the same ways serve: who goes elsewhere there does so again and
    again, and one bad episode would count as dozens."""
    first = dict[tuple[str, tuple[str, ...]], play.Example]()
    for example in told:
        first.setdefault((example.episode, example.choice.commands), example)
    return first.values()


def compiler_gates(
    model: str, checkpoint: str | None, work: Path, split: str, limit: int | None, seed: int = 0
) -> list[Share]:
    """Compare what a compiler says with what the teacher says, state by state."""
    make_env, specs = play.material(work, split, limit)
    situations = play.situations_of(make_env, specs, seed)
    compiler = load(model, checkpoint)
    made = compiler.compile([situation.request for situation in situations])
    return judged(situations, [each.emission for each in made])


def judged(situations: Sequence[play.Situation], said: Sequence[Emission]) -> list[Share]:
    """Count the states in which a compiler does what it should. Where the teacher names a place, any serves that M
    tells of what is looked for and that is not ruled out: of two that entries name, the teacher's is only the first."""
    pairs = list(zip(situations, said, strict=True))
    named = [(s, theirs) for s, theirs in pairs if s.emission.guidance.startswith(play.GO)]
    right = [(s, _serves(s, theirs)) for s, theirs in pairs]
    return [
        Share.of("right place", (_serves(s, theirs) for s, theirs in named), THRESHOLD),
        Share.of("right silence", (good for s, good in right if not s.emission.guidance), THRESHOLD),
        Share.of(
            "right where something is ruled out",
            (good for s, good in right if s.search and s.search.ruled_out),
            THRESHOLD,
        ),
        Share.of(
            "cites an entry that exists",
            (theirs.reason in _sentences(s.request) for s, theirs in pairs if theirs.guidance.startswith(play.GO)),
            THRESHOLD,
        ),
        Share.of("the place is the teacher's", (theirs.guidance == s.emission.guidance for s, theirs in named)),
        Share.of("the whole emission is the teacher's", (theirs == s.emission for s, theirs in pairs)),
    ]


def _serves(situation: play.Situation, theirs: Emission) -> bool:
    ours = situation.emission.guidance
    if not ours.startswith(play.GO) or situation.search is None:
        return theirs.guidance == ours
    return theirs.guidance.startswith(play.GO) and theirs.guidance.removeprefix(play.GO) in situation.search.places


def _sentences(request: CompileRequest) -> set[str]:
    """List the facts that M holds, in the teacher's words."""
    return {
        play.READER.sentence(entry.provenance.scene, fact.need, fact.place)
        for entry in request.memory
        for fact in play.READER.facts(entry.provenance.actions)
    }


def load_executor(model: str) -> FrozenExecutor:
    """Load an executor that reads what it was made for."""
    settings = ExecutorConfig(
        model=model, dtype="float32", instructions="none", max_new_tokens=16, first_view=True, goal_last=True
    )
    return load_frozen(settings, Told(""))


def load(model: str, checkpoint: str | None) -> MemoryCompiler:
    """Load a compiler with its checkpoint; without one, a base."""
    settings = CompilerConfig(
        model=model, checkpoint=checkpoint, dtype="float32", instructions="none", max_new_tokens=TOKENS
    )
    if checkpoint:
        return load_compiler(settings, None)
    return Asked(load_backbone(model, torch.float32, "cpu"), lambda _: UNASKED, TOKENS)
