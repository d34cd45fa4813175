"""Recipes of the small models of real ALFWorld: trained from scratch on the train games, on CPU.

    memcompiler zoo executor --world alfworld --out OUT
    memcompiler zoo compiler --world alfworld --out OUT

Both start from a model that looks things up untrained (`zoo/induction_init.py`), multiply matrices in bfloat16 and save
float16. The executor clones a script (`play.py`), first on short prompts, then under all text deliveries. The compiler
base answers questions on view and Brief State, then also on M, and finally writes emissions without a question. Games
and memory are of the train split, of which every 25th game is held out for the exams in the log.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from transformers import LlamaForCausalLM, PreTrainedModel

from agent.episode import EpisodeSpec
from lm.backbone import Backbone
from zoo import stages
from zoo.alfworld import play
from zoo.alfworld.lessons import (
    Ask,
    CompilerBatches,
    ExecutorBatches,
    ask_all,
    ask_emission,
    ask_nothing,
    ask_state,
    without_memory,
)
from zoo.alfworld.words import LEXICON
from zoo.curriculum import Level, Vocabulary, document_batch, ways
from zoo.induction_init import build_induction_model, learning_rate_scales
from zoo.models import make_tokenizer
from zoo.recipes import Draw, train_stage, write_model

EXAM_OF = 25  # every 25th game is held out for exams
EXECUTOR_LAYERS, COMPILER_LAYERS = 5, 6
RATE = 1e-3
STRAYS = 0.15  # share of steps at which the script ignores guidance and memory, so that models learn to recover
DOCUMENTS = (Level("documents", 8, 1), Level("goals", 12, 1))
"""Synthetic documents to mix with real prompts, so that models do not forget look-up."""

ASKED, UNASKED = (0.07, 0.13, 0.3, 0.5), (0.05, 0.05, 0.15, 0.75)  # shares of lessons: see `_emissions`
EXECUTOR_STAGES = ("short", "cloning")
COMPILER_STAGES = ("states", "emissions", "writing")


def train_executor(
    out: Path, work: Path, seed: int = 0, games: int | None = None, steps: Sequence[int] = (100, 800), batch: int = 6
) -> None:
    """Train the executor on short prompts, then by cloning.

    Args:
        games: number of train games (default: all).
        steps: steps on short prompts, and of cloning.
        batch: rows per batch, of up to eight steps with a shared beginning.
    """
    material = _Material(work, seed, games=games, batch=batch, few=2 * batch)
    model: PreTrainedModel = build_induction_model(material.tokenizer, EXECUTOR_LAYERS, seed, gathers=LEXICON)
    model = material.stage(
        model,
        "short",
        steps=steps[0],
        draws=lambda: _cloning(material, short=True),
        warmup=50,
        rate=RATE / 2,
        scaled=True,
    )
    model = material.stage(model, "cloning", steps[1], lambda: _cloning(material), rate=RATE / 2, scaled=True)
    settings = {"seed": seed, "games": games, "steps": list(steps), "batch": batch}
    write_model(
        "executor --world alfworld",
        out,
        model=model.half(),
        processor=material.tokenizer,
        work=work,
        names=EXECUTOR_STAGES,
        settings=settings,
    )


def train_compiler(
    out: Path,
    work: Path,
    seed: int = 0,
    games: int | None = None,
    steps: Sequence[int] = (200, 2600, 1000),
    batch: int = 20,
) -> None:
    """Train the compiler base without M, then with M, then on emissions without a question.

    Args:
        steps: steps of the three stages.
    """
    material = _Material(work, seed, games=games, batch=batch, few=max(batch // 2, 1))
    model: PreTrainedModel = build_induction_model(material.tokenizer, COMPILER_LAYERS, seed)
    model = material.stage(model, "states", steps[0], lambda: _states(material, model))
    model = material.stage(model, "emissions", steps[1], lambda: _emissions(material, model, ask_emission, ASKED))
    model = material.stage(
        model, "writing", steps[2], lambda: _emissions(material, model, ask_nothing, UNASKED), rate=RATE / 5
    )
    settings = {"seed": seed, "games": games, "steps": list(steps), "batch": batch}
    write_model(
        "compiler --world alfworld",
        out,
        model=model.half(),
        processor=material.tokenizer,
        work=work,
        names=COMPILER_STAGES,
        settings=settings,
    )


@dataclass
class _Material:
    """Training material of both recipes: games, steps of teacher and script, and synthetic documents."""

    work: Path
    seed: int
    games: int | None
    batch: int
    few: int  # documents per batch

    def __post_init__(self) -> None:
        self.tokenizer = make_tokenizer(LEXICON)
        vocabulary = Vocabulary.of(self.tokenizer, LEXICON)
        self.documents: Draw = partial(document_batch, vocabulary, self.tokenizer, DOCUMENTS, self.few)
        self.ways: Draw = lambda rng: ways(vocabulary, self.tokenizer, rng, self.few)

    def stage(
        self,
        model: PreTrainedModel,
        name: str,
        steps: int,
        draws: Callable[[], tuple[Draw, Draw]],
        warmup: float = 0.02,
        rate: float = RATE,
        scaled: bool = False,
    ) -> PreTrainedModel:
        """Train one stage on the batches and the exam that `draws` returns.

        Args:
            scaled: scale the learning rates of set heads.
        """
        if stages.finished(folder := self.work / name):  # before `draws` plays games
            return LlamaForCausalLM.from_pretrained(folder)
        draw, exam = draws()
        scales = learning_rate_scales(model) if scaled else None
        return train_stage(
            model,
            self.work,
            name=name,
            seed=self.seed,
            steps=steps,
            draw=draw,
            exam=exam,
            rate=rate,
            warmup=warmup,
            bf16=True,
            learning_rate_scales=scales,
        )

    @cached_property
    def _games(self) -> tuple[play.Make, list[EpisodeSpec], list[EpisodeSpec]]:
        """Return the environment factory, the games to learn from and the held-out games."""
        make_env, specs = play.material(self.work, limit=self.games)
        return make_env, [spec for i, spec in enumerate(specs) if i % EXAM_OF], list(specs[::EXAM_OF])

    @cached_property
    def teacher_steps(self) -> tuple[list[play.TeacherStep], list[play.TeacherStep]]:
        make_env, *parts = self._games
        learned, held_out = (play.teacher_steps(make_env, specs, self.seed) for specs in parts)
        return learned, held_out

    @cached_property
    def scripted_steps(self) -> tuple[list[play.ScriptedStep], list[play.ScriptedStep]]:
        make_env, *parts = self._games
        script = play.ScriptedPolicy.of([spec for specs in parts for spec in specs])
        learned, held_out = (
            play.scripted_steps(
                make_env, specs, play.ImitatedExecutor(script, strays=STRAYS, seed=self.seed), self.seed
            )
            for specs in parts
        )
        return learned, held_out


def _states(material: _Material, model: PreTrainedModel) -> tuple[Draw, Draw]:
    draws = partial(CompilerBatches, Backbone(model, material.tokenizer))
    (bare, later), (held_out, _) = ((without_memory(steps), steps) for steps in material.teacher_steps)
    lessons = mix(
        (0.4, draws(bare, material.batch, ask_emission).draw), (0.6, draws(later, material.batch, ask_state).draw)
    )
    return lessons, draws(held_out, 64, ask_emission).draw


def _emissions(material: _Material, model: PreTrainedModel, ask: Ask, shares: Sequence[float]) -> tuple[Draw, Draw]:
    """Mix documents, states without M, all questions, and the question of `ask` in these shares."""
    draws, all_of_it = (
        partial(CompilerBatches, Backbone(model, material.tokenizer)),
        partial(ask_all, emission_first=0.5),
    )
    learned, held_out = material.teacher_steps
    parts = (
        material.documents,
        draws(learned, material.batch, ask_state).draw,
        draws(learned, max(material.batch // 2, 1), all_of_it).draw,
        draws(learned, material.batch, ask).draw,
    )
    return mix(*zip(shares, parts, strict=True)), draws(held_out, 64, ask).draw


def _cloning(material: _Material, short: bool = False) -> tuple[Draw, Draw]:
    learned, held_out = (
        ExecutorBatches(material.tokenizer, examples, material.batch, short) for examples in material.scripted_steps
    )
    return mix((0.2, material.ways), (0.8, learned.draw)), held_out.draw


def mix(*parts: tuple[float, Draw]) -> Draw:
    """Draw each batch from one of the parts, in these shares."""

    def draw(rng: random.Random) -> stages.Batch:
        shares, draws = zip(*parts, strict=True)
        return rng.choices(draws, shares)[0](rng)

    return draw
