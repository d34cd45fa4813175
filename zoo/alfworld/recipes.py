"""The recipes of the small models of real ALFWorld: from nothing and the train games, on CPU, with one thread.

    memcompiler zoo executor --world alfworld --out OUT
    memcompiler zoo compiler --world alfworld --out OUT

Both begin with the text curriculum (`zoo/curriculum.py`) and with *reading*: questions about task memory, view and
Brief State behind the compiler's own prompts (`lessons.py`). From there the compiler base goes on to emissions (to
write them unasked is left to SFT), and the executor to the way from place to place; then it clones a script (`play.py`)
under all text deliveries in equal shares.

Nothing of a valid game is in any of it: games and memory are those of the train split, and every 25th game is kept for
the exams in the log.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from transformers import PreTrainedModel, Qwen2ForCausalLM, set_seed

from agent.episode import EpisodeSpec
from lm.backbone import Backbone
from zoo import recipes, stages
from zoo.alfworld import play
from zoo.alfworld.lessons import DeedDraws, LessonDraws, ask_all, ask_state
from zoo.alfworld.words import LEXICON
from zoo.curriculum import LEVELS, SEARCH, Level, TextCurriculum, Vocabulary, document_batch
from zoo.models import as_llama, deepened, make_tokenizer
from zoo.recipes import RATE

EXAM_OF = 25
LAYERS = 8
READING = 1300  # steps
DOCUMENTS = (Level("goals", 12, 1), Level("lists", 6, 1))
"""What goes on to be learned beside real prompts: without it to look up is forgotten while the rest is learned."""
OFTEN = (0.4, 0.4)  # shares of lessons in which a place is named, and in which none is though something is looked for

Draw = Callable[[random.Random], stages.Batch]


def train_executor(
    out: Path, work: Path, seed: int = 0, games: int | None = None, steps: Sequence[int] = (READING, 1600),
    batch: int = 32, levels: Sequence[Level] = (*LEVELS, *SEARCH),
) -> None:  # fmt: skip
    """Make the executor: reading, the way from place to place, cloning.

    Args:
        games: the first so many train games (default: all).
        steps: of reading and of cloning.
    """
    made = _Recipe(work, seed, games, batch // 2, levels)
    model = made.reader(steps[0])
    search = TextCurriculum(made.tokenizer, LEXICON, seed, [level for level in levels if level.kind == "search"])
    model = recipes.through(model, work / "search", search, RATE / 2)
    model = made.stage(model, "cloning", steps[1], lambda: _deeds(made, batch))
    settings = {"seed": seed, "games": games, "steps": list(steps), "batch": batch}
    names = (*recipes.TEXT, "reading", "search", "cloning")
    recipes.finish("executor --world alfworld", out, as_llama(model), made.tokenizer, work, names, settings)


def train_compiler(
    out: Path, work: Path, seed: int = 0, games: int | None = None, steps: Sequence[int] = (READING, 600),
    batch: int = 16, levels: Sequence[Level] = LEVELS,
) -> None:  # fmt: skip
    """Make the compiler base: reading, then mostly the emission first, in states as often as they come."""
    made = _Recipe(work, seed, games, batch, levels)
    model = made.reader(steps[0])
    model = made.stage(model, "emissions", steps[1], lambda: _emissions(made, model))
    settings = {"seed": seed, "games": games, "steps": list(steps), "batch": batch}
    names = (*recipes.TEXT, "reading", "emissions")
    recipes.finish("compiler --world alfworld", out, as_llama(model), made.tokenizer, work, names, settings)


@dataclass
class _Recipe:
    """What both recipes share: games, situations, and the model that they begin with."""

    work: Path
    seed: int
    games: int | None
    batch: int
    levels: Sequence[Level]

    def __post_init__(self) -> None:
        self.tokenizer = make_tokenizer(LEXICON)
        vocabulary = Vocabulary.of(self.tokenizer, LEXICON)
        self.documents: Draw = partial(document_batch, vocabulary, self.tokenizer, DOCUMENTS, self.batch)

    def reader(self, steps: int) -> Qwen2ForCausalLM:
        """Make a model that reads compile prompts: text curriculum; then questions about view and Brief State alone,
        and about M too, both mostly where something is looked for, and documents."""
        model = recipes.train_text(self.tokenizer, LEXICON, self.work, self.seed, self.levels)
        set_seed(self.seed)
        model = deepened(model, LAYERS)
        return self.stage(model, "reading", steps, lambda: _questions(self, model))

    def stage(
        self, model: PreTrainedModel, name: str, steps: int, drawn: Callable[[], tuple[Draw, Draw]]
    ) -> Qwen2ForCausalLM:
        """Train on what is drawn for it, with the accuracy on one batch of the exam in the log."""
        folder, seed = self.work / name, self.seed
        if stages.finished(folder):
            return Qwen2ForCausalLM.from_pretrained(folder)
        draw, exam = drawn()
        return stages.train_on_answers(
            model, folder, seed, steps, lambda step: draw(random.Random(f"{seed}/{name}/{step}")),
            lambda _: exam(random.Random(seed)), RATE / 2, every=50,
        )  # type: ignore[return-value]  # fmt: skip

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


def _questions(made: _Recipe, model: PreTrainedModel) -> tuple[Draw, Draw]:
    draws, ask = partial(LessonDraws, Backbone(model, made.tokenizer)), partial(ask_all, emission_first=0.2)
    learned, kept = made.situations
    states, questions = (draws(learned, made.batch, asks, OFTEN).draw for asks in (ask_state, ask))
    return mixed((0.2, made.documents), (0.25, states), (0.55, questions)), draws(kept, 64, ask).draw


def _emissions(made: _Recipe, model: PreTrainedModel) -> tuple[Draw, Draw]:
    draws, ask = partial(LessonDraws, Backbone(model, made.tokenizer)), partial(ask_all, emission_first=0.8)
    learned, kept = made.situations
    lessons = draws(learned, made.batch, ask, (0.3, 0.2)).draw
    return mixed((0.1, made.documents), (0.9, lessons)), draws(kept, 64, ask).draw


def _deeds(made: _Recipe, batch: int) -> tuple[Draw, Draw]:
    make_env, learned, kept = made.material
    script = play.Script.of((*learned, *kept))
    examples, asked = (
        play.examples_of(make_env, specs, play.Pupil(script, seed=made.seed), made.seed) for specs in (learned, kept)
    )
    deeds = DeedDraws(made.tokenizer, examples, batch, told=0.4).draw
    return mixed((0.1, made.documents), (0.9, deeds)), DeedDraws(made.tokenizer, asked, 8 * batch).draw


def mixed(*parts: tuple[float, Draw]) -> Draw:
    """Draw each batch from one of the parts, in these shares."""

    def draw(rng: random.Random) -> stages.Batch:
        shares, draws = zip(*parts, strict=True)
        return rng.choices(draws, shares)[0](rng)

    return draw
