"""The recipes of the small models of real ALFWorld: from nothing and the train games, on CPU, with one thread.

    memcompiler zoo executor --world alfworld --out OUT
    memcompiler zoo compiler --world alfworld --out OUT

Both begin with the text curriculum (`zoo/curriculum.py`). The executor goes on with search (places that one has not
been to), clones a script (`play.py`) under all text deliveries in equal shares, and goes through rounds in which it
plays itself and learns what the script would do in the states that it came to. The compiler base learns to answer
questions about task memory, search and emission in the compiler's own prompts (`lessons.py`); to write emissions
unasked is left to SFT.

Nothing of a valid game is in any of it: games and memory are those of the train split, and every 25th game is kept for
the exams in the log.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from transformers import Qwen2ForCausalLM

from agent.episode import EpisodeSpec
from executor.hf import FrozenExecutor
from lm.backbone import Backbone
from zoo import recipes, stages
from zoo.alfworld import play
from zoo.alfworld.lessons import Ask, DeedDraws, LessonDraws, Shares, ask_all, ask_state
from zoo.alfworld.words import LEXICON
from zoo.curriculum import LEVELS, SEARCH, Level
from zoo.models import as_llama, deepened, make_tokenizer
from zoo.recipes import RATE

EXECUTOR: recipes.Stages = {**recipes.TEXT, "search": (RATE / 2, ("search",))}
"""The stages of text; those of the compiler base are all worlds'."""
EXAM_OF = 25
LAYERS = 8  # of the compiler base

Draw = Callable[[random.Random], stages.Batch]


def train_executor(
    out: Path, work: Path, seed: int = 0, games: int | None = None, steps: Sequence[int] = (1600,),
    played: int = 1000, batch: int = 32, levels: Sequence[Level] = (*LEVELS, *SEARCH),
) -> None:  # fmt: skip
    """Make the executor: text curriculum, cloning, then for each further number of `steps` a round of its own episodes.

    Args:
        games: the first so many train games (default: all).
        played: games of a round.
    """
    tokenizer = make_tokenizer(LEXICON)
    model = recipes.train_text(tokenizer, LEXICON, work, seed, levels, text=EXECUTOR)
    make_env, specs = play.material(work, limit=games)
    script, (specs, kept) = play.Script.of(specs), _kept(specs)
    exam = DeedDraws(tokenizer, play.examples_of(make_env, kept, play.Pupil(script, seed=seed), seed), 8 * batch).draw
    examples = play.examples_of(make_env, specs, play.Pupil(script, seed=seed), seed)
    names = ["cloning", *(f"own_{n}" for n in range(1, len(steps)))]
    for n, name in enumerate(names):
        if n:
            actor = FrozenExecutor(Backbone(model, tokenizer), reads=play.READS)
            mine = specs[(n - 1) * played % len(specs) :][:played]
            examples += play.examples_of(make_env, mine, play.Pupil(script, actor, seed=seed), seed + n)
            model.requires_grad_(True)
        draw, rate = DeedDraws(tokenizer, examples, batch).draw, RATE / (4 if n else 2)
        model = _stage(model, work / name, seed, steps[n], rate, draw, exam)
    settings = {"seed": seed, "games": games, "steps": list(steps), "played": played, "batch": batch}
    recipes.finish("executor --world alfworld", out, as_llama(model), tokenizer, work, (*EXECUTOR, *names), settings)


def train_compiler(
    out: Path, work: Path, seed: int = 0, games: int | None = None, steps: Sequence[int] = (800, 500, 600),
    batch: int = 16, levels: Sequence[Level] = LEVELS,
) -> None:  # fmt: skip
    """Make the compiler base: text curriculum; questions about view and Brief State alone, then about M too, both
    mostly where something is looked for; then mostly the emission first, in states as often as they come."""
    tokenizer = make_tokenizer(LEXICON)
    model = deepened(recipes.train_text(tokenizer, LEXICON, work, seed, levels), LAYERS)
    make_env, specs = play.material(work, limit=games)
    specs, kept = _kept(specs)
    situations = play.situations_of(make_env, specs, seed)
    held_out = play.situations_of(make_env, kept, seed)
    draws = partial(LessonDraws, Backbone(model, tokenizer))
    asked: dict[str, tuple[Ask, Shares]] = {
        "states": (ask_state, (0.4, 0.4)),
        "questions": (partial(ask_all, emission_first=0.2), (0.4, 0.4)),
        "emissions": (partial(ask_all, emission_first=0.8), (0.3, 0.2)),
    }
    for n, (name, (ask, shares)) in zip(steps, asked.items(), strict=True):
        draw, exam = draws(situations, batch, ask, shares).draw, draws(held_out, 64, ask).draw
        model = _stage(model, work / name, seed, n, RATE / 2, draw, exam)
    settings = {"seed": seed, "games": games, "steps": list(steps), "batch": batch}
    made = (*recipes.TEXT, *asked)
    recipes.finish("compiler --world alfworld", out, as_llama(model), tokenizer, work, made, settings)


def _kept(specs: Sequence[EpisodeSpec]) -> tuple[list[EpisodeSpec], list[EpisodeSpec]]:
    """Part the games that are learned from those that are kept for exams."""
    return [spec for i, spec in enumerate(specs) if i % EXAM_OF], list(specs[::EXAM_OF])


def _stage(
    model: Qwen2ForCausalLM, folder: Path, seed: int, steps: int, rate: float, draw: Draw, exam: Draw
) -> Qwen2ForCausalLM:
    """Train on `draw`, with the accuracy on one batch of `exam` in the log."""
    return stages.train_on_answers(
        model, folder, seed, steps, lambda step: draw(random.Random(f"{seed}/{folder.name}/{step}")),
        lambda _: exam(random.Random(seed)), rate, every=50,
    )  # type: ignore[return-value]  # fmt: skip
