"""The recipes of the small models of real ALFWorld: from nothing and the train games, on CPU.

    memcompiler zoo executor --world alfworld --out OUT
    memcompiler zoo compiler --world alfworld --out OUT

Both begin with a model that looks things up untrained (`zoo/wiring.py`), and go from what is short to what is long, in
bfloat16 where matrices are multiplied; what is written is float16. The executor learns what to do where a prompt is
short, then it clones a script (`play.py`) under all text deliveries. The
compiler base is asked about view and Brief State behind prompts without M, then about M too, mostly for the emission
first; at last it writes the emission unasked, so that SFT has little left to change.

Nothing of a valid game is in any of it: games and memory are those of the train split, and every 25th game is kept for
the exams in the log.
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
from zoo import recipes, stages
from zoo.alfworld import play
from zoo.alfworld.lessons import (
    Ask,
    DeedDraws,
    LessonDraws,
    ask_all,
    ask_emission,
    ask_nothing,
    ask_state,
    without_memory,
)
from zoo.alfworld.words import LEXICON
from zoo.curriculum import Level, Vocabulary, document_batch, ways
from zoo.models import make_tokenizer
from zoo.wiring import paces, wired

EXAM_OF = 25
EXECUTOR_LAYERS, COMPILER_LAYERS = 5, 6
RATE = 1e-3
STRAYS = 0.15  # of what the script is told, what it does not do: what comes then is to be learned, too
DOCUMENTS = (Level("documents", 8, 1), Level("goals", 12, 1))
"""What goes on beside real prompts, so that look-up stays."""

ASKED, UNASKED = (0.07, 0.13, 0.3, 0.5), (0.05, 0.05, 0.15, 0.75)  # shares of lessons: see `_emissions`
EXECUTOR_STAGES = ("short", "cloning")
COMPILER_STAGES = ("states", "emissions", "writing")

Draw = Callable[[random.Random], stages.Batch]


def train_executor(
    out: Path, work: Path, seed: int = 0, games: int | None = None, steps: Sequence[int] = (100, 800), batch: int = 6
) -> None:
    """Make the executor: short prompts, then cloning.

    Args:
        games: the first so many train games (default: all).
        steps: on short prompts, and of cloning.
        batch: rows, of up to eight deeds that have one beginning.
    """
    made = _Recipe(work, seed, games, batch, 2 * batch)
    model: PreTrainedModel = wired(made.tokenizer, EXECUTOR_LAYERS, seed, gathers=LEXICON)
    model = made.stage(model, "short", steps[0], lambda: _deeds(made, short=True), 50, RATE / 2, paced=True)
    model = made.stage(model, "cloning", steps[1], lambda: _deeds(made), rate=RATE / 2, paced=True)
    settings = {"seed": seed, "games": games, "steps": list(steps), "batch": batch}
    recipes.finish("executor --world alfworld", out, model.half(), made.tokenizer, work, EXECUTOR_STAGES, settings)


def train_compiler(
    out: Path,
    work: Path,
    seed: int = 0,
    games: int | None = None,
    steps: Sequence[int] = (200, 2600, 1000),
    batch: int = 20,
) -> None:
    """Make the compiler base: view and Brief State without M, then all of it, then the emission unasked.

    Args:
        steps: without M, with it, and unasked.
    """
    made = _Recipe(work, seed, games, batch, max(batch // 2, 1))
    model: PreTrainedModel = wired(made.tokenizer, COMPILER_LAYERS, seed)
    model = made.stage(model, "states", steps[0], lambda: _states(made, model))
    model = made.stage(model, "emissions", steps[1], lambda: _emissions(made, model, ask_emission, ASKED))
    model = made.stage(model, "writing", steps[2], lambda: _emissions(made, model, ask_nothing, UNASKED), rate=RATE / 5)
    settings = {"seed": seed, "games": games, "steps": list(steps), "batch": batch}
    recipes.finish("compiler --world alfworld", out, model.half(), made.tokenizer, work, COMPILER_STAGES, settings)


@dataclass
class _Recipe:
    """What both recipes share: games, situations, documents."""

    work: Path
    seed: int
    games: int | None
    batch: int
    few: int  # documents at a time

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
        drawn: Callable[[], tuple[Draw, Draw]],
        warmup: float = 0.02,
        rate: float = RATE,
        paced: bool = False,
    ) -> PreTrainedModel:
        """Train on what is drawn for it, with the accuracy on one batch of the exam in the log. `paced`: heads that are
        set learn at their own pace."""
        folder, seed = self.work / name, self.seed
        if stages.finished(folder):
            return LlamaForCausalLM.from_pretrained(folder)
        draw, exam = drawn()
        return stages.train_on_answers(
            model,
            folder,
            seed,
            steps,
            lambda step: draw(random.Random(f"{seed}/{name}/{step}")),
            lambda _: exam(random.Random(seed)),
            rate,
            every=50,
            warmup=warmup,
            bf16=True,
            paces=paces(model) if paced else None,
        )

    @cached_property
    def material(self) -> tuple[play.Make, list[EpisodeSpec], list[EpisodeSpec]]:
        """What environments come from, the games that are learned from, and those that are kept for exams."""
        make_env, specs = play.material(self.work, limit=self.games)
        return make_env, [spec for i, spec in enumerate(specs) if i % EXAM_OF], list(specs[::EXAM_OF])

    @cached_property
    def situations(self) -> tuple[list[play.Situation], list[play.Situation]]:
        make_env, *parts = self.material
        learned, kept = (play.situations_of(make_env, specs, self.seed) for specs in parts)
        return learned, kept

    @cached_property
    def examples(self) -> tuple[list[play.Example], list[play.Example]]:
        make_env, *parts = self.material
        script = play.Script.of([spec for specs in parts for spec in specs])
        learned, kept = (
            play.examples_of(make_env, specs, play.Pupil(script, strays=STRAYS, seed=self.seed), self.seed)
            for specs in parts
        )
        return learned, kept


def _states(made: _Recipe, model: PreTrainedModel) -> tuple[Draw, Draw]:
    draws = partial(LessonDraws, Backbone(model, made.tokenizer))
    (bare, later), (kept, _) = ((without_memory(some), some) for some in made.situations)
    lessons = mixed((0.4, draws(bare, made.batch, ask_emission).draw), (0.6, draws(later, made.batch, ask_state).draw))
    return lessons, draws(kept, 64, ask_emission).draw


def _emissions(made: _Recipe, model: PreTrainedModel, ask: Ask, shares: Sequence[float]) -> tuple[Draw, Draw]:
    """Draw documents, states without M, all questions, and what `ask` asks, in these shares."""
    draws, all_of_it = partial(LessonDraws, Backbone(model, made.tokenizer)), partial(ask_all, emission_first=0.5)
    learned, kept = made.situations
    parts = (
        made.documents,
        draws(learned, made.batch, ask_state).draw,
        draws(learned, max(made.batch // 2, 1), all_of_it).draw,
        draws(learned, made.batch, ask).draw,
    )
    return mixed(*zip(shares, parts, strict=True)), draws(kept, 64, ask).draw


def _deeds(made: _Recipe, short: bool = False) -> tuple[Draw, Draw]:
    learned, kept = (DeedDraws(made.tokenizer, examples, made.batch, short) for examples in made.examples)
    return mixed((0.2, made.ways), (0.8, learned.draw)), kept.draw


def mixed(*parts: tuple[float, Draw]) -> Draw:
    """Draw each batch from one of the parts, in these shares."""

    def draw(rng: random.Random) -> stages.Batch:
        shares, draws = zip(*parts, strict=True)
        return rng.choices(draws, shares)[0](rng)

    return draw
