"""Gates of the small models of real ALFWorld, on games outside the training data.

An executor must search without help, follow guidance and use pasted memory equally well, so that no delivery has an
advantage. A compiler, with a checkpoint or as a base, must name the right place, give no guidance where none is needed,
skip excluded places and cite entries of M, as the teacher does.
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
from envs.spec import ExecutorInstructions
from eval.metrics import succeeded
from executor.build import load_frozen
from executor.hf import FrozenExecutor
from lm.backbone import load_backbone
from zoo.alfworld import play
from zoo.alfworld.lessons import UNASKED
from zoo.gates import GateResult, QuestionAnswerer
from zoo.lessons import text_deliveries

SCRIPT = "script"  # play the script instead of an executor
ALONE, THRESHOLD = 0.70, 0.95
WITHIN = (15, 30, play.STEPS)
TOKENS = 96  # maximum tokens of an emission


def executor_gates(model: str, work: Path, split: str, limit: int | None, seed: int = 0) -> list[GateResult]:
    """Play the games without help, with the teacher's guidance and with all of M pasted; measure success and obedience.

    Pasted memory must succeed as often as guidance, within the binomial error. Obedience is the rate at which the
    executor goes to a place that guidance or memory names.

    Args:
        model: an executor's folder, or `SCRIPT`, whose results bound those of an executor that clones it.
    """
    make_env, specs = play.material(work, split, limit)
    script, results = play.ScriptedPolicy.of(specs), list[GateResult]()
    actor = None if model == SCRIPT else load_executor(model)
    alone, static, guided, _ = text_deliveries(play.TEACHER, seed)
    thresholds = {(alone.name, play.STEPS): ALONE}
    for delivery in (alone, guided, static):
        executor = play.ImitatedExecutor(script, actor, seed=seed)
        episodes = play.run_games(make_env, specs, delivery, executor)
        for steps in WITHIN:
            name, solved = delivery.name, (succeeded(episode, steps) for episode in episodes)
            result = GateResult.of(f"{name}, solved within {steps} steps", solved, thresholds.get((name, steps)))
            results.append(result)
            if delivery is guided:
                thresholds[static.name, steps] = result.interval.low
        if delivery is not alone:
            given = [example for example in executor.examples if example.choice.source is play.ChoiceSource.GIVEN]
            threshold = THRESHOLD if delivery is guided else None
            results.append(
                GateResult.of(f"{delivery.name}, goes to a named place", _obeyed(_occasions(given)), threshold)
            )
            results.append(GateResult.of(f"{delivery.name}, of all steps with a named place", _obeyed(given)))
    return results


def _obeyed(given: Iterable[play.ScriptedStep]) -> Iterator[bool]:
    return (example.done in example.choice.commands for example in given)


def _occasions(given: Iterable[play.ScriptedStep]) -> Iterable[play.ScriptedStep]:
    """Return an episode's first state of each set of ways, since an executor repeats its errors in the others."""
    first = dict[tuple[str, tuple[str, ...]], play.ScriptedStep]()
    for example in given:
        first.setdefault((example.episode, example.choice.commands), example)
    return first.values()


def compiler_gates(
    model: str, checkpoint: str | None, work: Path, split: str, limit: int | None, seed: int = 0
) -> list[GateResult]:
    """Compare a compiler's emissions with the teacher's in every state."""
    make_env, specs = play.material(work, split, limit)
    situations = play.teacher_steps(make_env, specs, seed)
    compiler = load(model, checkpoint)
    made = compiler.compile([situation.request for situation in situations])
    return judged(situations, [each.emission for each in made])


def judged(situations: Sequence[play.TeacherStep], said: Sequence[Emission]) -> list[GateResult]:
    """Count the states in which a compiler is right: it may name any place of M that the search allows."""
    pairs = list(zip(situations, said, strict=True))
    named = [(s, theirs) for s, theirs in pairs if s.emission.guidance.startswith(play.GO)]
    right = [(s, _serves(s, theirs)) for s, theirs in pairs]
    return [
        GateResult.of("right place", (_serves(s, theirs) for s, theirs in named), THRESHOLD),
        GateResult.of("right silence", (good for s, good in right if not s.emission.guidance), THRESHOLD),
        GateResult.of(
            "right where something is ruled out",
            (good for s, good in right if s.search and s.search.ruled_out),
            THRESHOLD,
        ),
        GateResult.of(
            "cites an entry that exists",
            (theirs.reason in _sentences(s.request) for s, theirs in pairs if theirs.guidance.startswith(play.GO)),
            THRESHOLD,
        ),
        GateResult.of("the place is the teacher's", (theirs.guidance == s.emission.guidance for s, theirs in named)),
        GateResult.of("the whole emission is the teacher's", (theirs == s.emission for s, theirs in pairs)),
    ]


def _serves(situation: play.TeacherStep, theirs: Emission) -> bool:
    ours = situation.emission.guidance
    if not ours.startswith(play.GO) or situation.search is None:
        return theirs.guidance == ours
    return theirs.guidance.startswith(play.GO) and theirs.guidance.removeprefix(play.GO) in situation.search.places


def _sentences(request: CompileRequest) -> set[str]:
    """Return the facts in M, in the teacher's words."""
    return {
        play.READER.sentence(entry.provenance.scene, fact.need, fact.place)
        for entry in request.memory
        for fact in play.READER.facts(entry.provenance.actions)
    }


def load_executor(model: str) -> FrozenExecutor:
    """Load an executor with the prompt settings of its training."""
    settings = ExecutorConfig(
        model=model,
        dtype="float32",
        instructions="none",
        max_new_tokens=16,
        context="rebuilt",
        first_view=True,
        goal_last=True,
    )
    return load_frozen(settings, ExecutorInstructions(""))


def load(model: str, checkpoint: str | None) -> MemoryCompiler:
    """Load a compiler with a checkpoint, or the base without one."""
    settings = CompilerConfig(
        model=model, checkpoint=checkpoint, dtype="float32", instructions="none", history=0, max_new_tokens=TOKENS
    )
    if checkpoint:
        return load_compiler(settings, None)
    return QuestionAnswerer(load_backbone(model, torch.float32, "cpu"), lambda _: UNASKED, TOKENS)
