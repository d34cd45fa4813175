"""Text curriculum: synthetic documents that teach a small model to look things up before it sees real prompts.

A model of a million parameters does not learn look-up from household text, whose signal is too sparse. The curriculum
has five kinds of documents, in order: repeated random segments, key-value recall, facts in ever more words, memory
documents where scene and object together determine the place, and goals, whose answer may be that no place is known.
Labels are not shifted, and -100 where nothing is to be predicted. `ways` is for the executor of ALFWorld.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, TrainerCallback

from zoo.models import END_OF_TURN, SPECIAL, Lexicon

IGNORE = -100
Batch = dict[str, Tensor]
ANSWER = f"{END_OF_TURN}\n<|im_start|>assistant\n"  # precedes an answer
ROOM = "You are in the middle of a room. Looking quickly around you, you see"
MOST_ROOMS, MOST_ACTIONS, MOST_GONE, MOST_BEEN = 12, 4, 6, 3
"""Maxima of `ways`: places in a first view, actions of an entry, actions in `did:`, and places of a thing in memory."""
PROPOSED = 0.9  # share of ways to a known place, if there is one
NOTHING = "nothing"  # the answer if no entry names a place, no picture marks one, or no place is left
Fact = tuple[tuple[str, str], str]  # scene and object, the place
Kind = Literal["copy", "recall", "facts", "documents", "goals"]

FORMS = (
    " {scene} {thing}",
    " in {scene} the {thing}",
    " in {scene} the {thing} was in",
    "\nbecause in {scene} the {thing} was in",
)
"""Forms of a fact before its place, with ever more words between the keys and the place."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by role; `words` has the ids of all tokens except bytes and special ones."""

    words: np.ndarray
    scenes: Sequence[str]
    objects: Sequence[str]
    places: Sequence[str]
    goals: Sequence[str]  # kinds of places

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast, lexicon: Lexicon) -> Vocabulary:
        words = np.arange(256, len(tokenizer) - len(SPECIAL))
        return cls(words, lexicon.scenes, lexicon.things, lexicon.places, lexicon.goals)


def repeated_segments(vocabulary: Vocabulary, rng: np.random.Generator, batch: int) -> tuple[Tensor, Tensor]:
    """Draw random segments of 8 to 32 tokens, each twice; labels are on the second copy."""
    length = int(rng.integers(8, 33))
    segment = rng.choice(vocabulary.words, (batch, length))
    tokens = np.concatenate([segment, segment], 1)
    return _with_labels(tokens, length)


def key_value(
    vocabulary: Vocabulary, rng: np.random.Generator, batch: int, pairs: int | None = None
) -> tuple[Tensor, Tensor]:
    """Draw 4 to 16 key-value pairs, then the same pairs in another order; a row's keys are distinct."""
    n = pairs or int(rng.integers(4, 17))
    keys = np.stack([rng.choice(vocabulary.words, n, replace=False) for _ in range(batch)])
    values = rng.choice(vocabulary.words, (batch, n))
    order = np.stack([rng.permutation(n) for _ in range(batch)])
    again = np.stack([np.take_along_axis(keys, order, 1), np.take_along_axis(values, order, 1)], 2)
    tokens = np.concatenate([np.stack([keys, values], 2).reshape(batch, -1), again.reshape(batch, -1)], 1)
    ids, labels = _with_labels(tokens, 2 * n)
    labels[:, 2 * n :: 2] = IGNORE  # the order of the keys is random
    return ids, labels


def fact_list(vocabulary: Vocabulary, rng: random.Random, entries: int, form: int) -> tuple[str, list[tuple[str, str]]]:
    """Draw facts in one of `FORMS`; return their text and queries (text, place) on them."""
    keys = _twins(vocabulary, rng, entries)
    facts = [(FORMS[form].format(scene=s, thing=t), rng.choice(vocabulary.places)) for s, t in keys]
    return "".join(f"{query} {place}" for query, place in facts), facts


def memory_document(
    vocabulary: Vocabulary, rng: random.Random, entries: int, filler: int
) -> tuple[str, list[tuple[str, str]]]:
    """Draw memory entries with up to `filler` random actions each; return their text and queries (text, place)."""
    places = {pair: rng.choice(vocabulary.places) for pair in _twins(vocabulary, rng, entries)}
    return _memory(vocabulary, rng, places.items(), filler), _queries(places)


def goal_document(
    vocabulary: Vocabulary, rng: random.Random, entries: int, filler: int
) -> tuple[str, list[tuple[str, str]]]:
    """Draw memory entries; return their text and queries, and queries after goals, half of which have no known place.

    As in a compiler's prompt, a plan, notes and up to `filler` seen things separate goal and question.
    """
    few = entries // 2 + 2
    pairs = list(product(rng.sample(vocabulary.scenes, few), rng.sample(vocabulary.objects, few)))
    asked = rng.sample(pairs, min(2 * entries, len(pairs)))
    places = {pair: rng.choice(vocabulary.places) for pair in asked[:entries]}
    goals = [f"\ngoal: {_goal(vocabulary, rng, *pair)}{_state(vocabulary, rng, pair[1], filler)}" for pair in asked]
    answers = [places.get(pair, NOTHING) for pair in asked]
    return _memory(vocabulary, rng, places.items(), filler), [*_queries(places), *zip(goals, answers, strict=True)]


def _memory(vocabulary: Vocabulary, rng: random.Random, facts: Iterable[Fact], filler: int) -> str:
    """Write memory entries from facts, with up to `filler` actions each."""
    texts = []
    for (scene, thing), place in facts:
        actions = " ; ".join(_action(vocabulary, rng, thing) for _ in range(rng.randint(0, filler)))
        reason = f"{FORMS[-1].format(scene=scene, thing=thing)} {place}"
        texts.append(f"{_goal(vocabulary, rng, scene, thing)}\n{actions}{reason}")
    return "memory:\n" + "\n\n".join(texts) + "\n"


def _queries(places: Mapping[tuple[str, str], str]) -> list[tuple[str, str]]:
    return [(FORMS[-1].format(scene=scene, thing=thing), place) for (scene, thing), place in places.items()]


def _goal(vocabulary: Vocabulary, rng: random.Random, scene: str, thing: str) -> str:
    target = rng.choice(vocabulary.goals)
    task = rng.choice(
        [
            f"put a {rng.choice(['', 'hot ', 'cool ', 'clean '])}{thing} in {target}",
            f"put some {thing} on {target}",
            f"{rng.choice(['heat', 'cool', 'clean'])} some {thing} and put it in {target}",
        ]
    )
    return f"in {scene}: {task}"


def _state(vocabulary: Vocabulary, rng: random.Random, thing: str, longest: int) -> str:
    """Write the text after a goal: a Brief State, an observation of up to `longest` things, and the question."""
    lines = []
    if longest and rng.random() < 0.5:
        lines += [f"now: find {thing}", f"next: put {thing} in {rng.choice(vocabulary.goals)}"]
    if noted := rng.sample(vocabulary.places, rng.randint(0, longest // 4)):
        lines.append(f"note: {' ; '.join(f'{place} = no {thing}' for place in noted)}")
    if seen := rng.sample(vocabulary.places, rng.randint(0, longest)):
        others = [f"{other} 1" for other in rng.sample(vocabulary.objects, rng.randint(0, 2))]
        lines.append(f"see: You arrive at {seen[0]}. you see a {', a '.join([*seen, *others])}.")
    return "\n" + "\n".join([*lines, _question(rng, "place")])


def _question(rng: random.Random, name: str) -> str:
    """Write a question as a bare label or as in lessons."""
    return rng.choice([f"{name}:", f"ask: {name}{ANSWER}"])


def _twins(vocabulary: Vocabulary, rng: random.Random, entries: int) -> list[tuple[str, str]]:
    """Draw (scene, object) of every entry, in pairs that share one of the two, so that neither determines the place."""
    scenes, objects = rng.sample(vocabulary.scenes, entries), rng.sample(vocabulary.objects, entries)
    for k in range(0, entries - 1, 2):
        shared = objects if rng.random() < 0.5 else scenes
        shared[k + 1] = shared[k]
    keys = list(zip(scenes, objects, strict=True))
    rng.shuffle(keys)
    return keys


def _action(vocabulary: Vocabulary, rng: random.Random, thing: str) -> str:
    place = rng.choice(vocabulary.places)
    return rng.choice([f"go to {place}", f"open {place}", f"take {thing} 1 from {place}", f"move {thing} 1 to {place}"])


REFUSED = " ;"  # follows a refused command
ENTRIES = (2, 3, 4, 4, 5, 6)  # entries of a document
DOCUMENTS = {"facts": fact_list, "documents": memory_document, "goals": goal_document}


def ways(vocabulary: Vocabulary, tokenizer: Any, rng: random.Random, batch: int) -> dict[str, Tensor]:
    """Draw prompts that end with the goal, each with a way ("go to PLACE") as answer.

    Memory and first view propose the way: in a share `PROPOSED` of the cases to a place that memory names, otherwise to
    the next place of the first view. A refusal ends the way to a visited place. Each prompt appears twice, the second
    time with labels on the end only.
    """
    tokenize = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    end, (refused,) = tokenizer.eos_token_id, tokenize(REFUSED)
    rows, labels = [], []
    for _ in range(batch):
        text, known, following, been = (_known_way if rng.random() < 0.5 else _next_way)(vocabulary, rng)
        ids = tokenize(f"<|im_start|>user\n{text}{ANSWER}go to")
        first = rng.choice(known) if known and rng.random() < PROPOSED else following
        for place, proposed in ((first, True), (rng.choice(been or [following]), False)):
            way, last = tokenize(f" {place}"), refused if place in been else end
            rows.append([*ids, *way, last])
            labels.append([IGNORE] * len(ids) + (way if proposed else [IGNORE] * len(way)) + [last])
    return {"input_ids": pad(rows, tokenizer.pad_token_id), "labels": pad(labels, IGNORE)}


def _known_way(vocabulary: Vocabulary, rng: random.Random) -> tuple[str, list[str], str, list[str]]:
    """Draw a prompt with memory; return it, the places that memory names, the next place and the visited places."""
    keys = _twins(vocabulary, rng, rng.choice(ENTRIES))
    places = rng.sample(vocabulary.places, len(keys) + MOST_BEEN)
    pair = rng.choice(keys)
    known = places[len(keys) : len(keys) + rng.randint(1, MOST_BEEN)]
    facts = [(key, other) for key, other in zip(keys, places, strict=False) if key != pair]
    facts += [(pair, place) for place in known]
    memory = _memory(vocabulary, rng, rng.sample(facts, len(facts)), rng.randint(0, MOST_ACTIONS))
    others = rng.sample(vocabulary.places, rng.randint(1, MOST_ROOMS))
    been = list(dict.fromkeys([*known[: rng.randint(0, len(known))], *others[: rng.randint(0, 2)]]))
    rng.shuffle(been)
    did = f"did: {' ; '.join(f'go to {each}' for each in been)}\n" if been else ""
    rooms = list(dict.fromkeys([*others, *known]))
    rng.shuffle(rooms)
    here = been[-1] if been else rng.choice(vocabulary.places)
    following = rooms[(rooms.index(here) + 1) % len(rooms)] if here in rooms else rooms[0]
    return _view(vocabulary, rng, rooms=rooms, given=f"{memory}\n{did}", here=here, pair=pair), known, following, been


def _next_way(vocabulary: Vocabulary, rng: random.Random) -> tuple[str, list[str], str, list[str]]:
    """Draw a prompt without memory; return the same as `_known_way`."""
    rooms = rng.sample(vocabulary.places, rng.randint(2, MOST_ROOMS))
    at = rng.randrange(len(rooms) - 1)
    been = rooms[max(0, at - rng.randint(0, MOST_GONE)) : at + 1]
    did = f"did: {' ; '.join(f'go to {place}' for place in been)}\n"
    pair = rng.choice(vocabulary.scenes), rng.choice(vocabulary.objects)
    return _view(vocabulary, rng, rooms=rooms, given=did, here=rooms[at], pair=pair), [], rooms[at + 1], been


def _view(
    vocabulary: Vocabulary, rng: random.Random, rooms: Sequence[str], given: str, here: str, pair: tuple[str, str]
) -> str:
    seen = ", a ".join(f"{thing} 1" for thing in rng.sample(vocabulary.objects, rng.randint(1, MOST_GONE)))
    see = f"see: You arrive at {here}. On the {here}, you see a {seen}."
    return f"first: {ROOM} a {', a '.join(rooms)}.\n{given}{see}\ngoal: {_goal(vocabulary, rng, *pair)}"


def look_ups(
    tokenizer: Any, rng: random.Random, batch: int, document: Callable[[], tuple[str, list[tuple[str, str]]]]
) -> tuple[Tensor, Tensor]:
    """Batch documents with their queries in random order; labels are on places only."""
    tokenize = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    rows, labels = [], []
    for _ in range(batch):
        text, facts = document()
        ids = tokenize(text)
        target = [IGNORE] * len(ids)
        for query, place in rng.sample(facts, len(facts)):
            asked, answer = tokenize(query), tokenize(f" {place}")
            ids, target = ids + asked + answer, target + [IGNORE] * len(asked) + answer
        rows.append(ids)
        labels.append(target)
    return pad(rows, tokenizer.pad_token_id), pad(labels, IGNORE)


def document_batch(
    vocabulary: Vocabulary, tokenizer: Any, levels: Sequence[Level], batch: int, rng: random.Random
) -> dict[str, Tensor]:
    """Draw a batch of one random level's documents."""
    level = rng.choice(levels)
    make = partial(DOCUMENTS[level.kind], vocabulary, rng, rng.choice(ENTRIES), level.difficulty)
    tokens, labels = look_ups(tokenizer, rng, batch, make)
    return {"input_ids": tokens, "labels": labels}


def pad(rows: list[list[int]], value: int) -> Tensor:
    """Pad rows on the right to a tensor (B, T)."""
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


def _with_labels(tokens: np.ndarray, known: int) -> tuple[Tensor, Tensor]:
    ids = torch.from_numpy(tokens)
    labels = ids.clone()
    labels[:, :known] = IGNORE
    return ids, labels


@dataclass(frozen=True)
class Level:
    """A kind of documents, its difficulty, and the accuracy above which the next level begins."""

    kind: Kind
    difficulty: int  # index of the fact's form, or filler actions per entry
    until: float


LEVELS = (
    Level("copy", 0, 0.9),
    Level("recall", 0, 0.97),
    *(Level("facts", form, 0.95) for form in range(len(FORMS))),
    *(Level("documents", filler, 0.97) for filler in range(0, 12, 2)),
    Level("documents", 12, 0.985),
    Level("goals", 0, 0.97),
    Level("goals", 6, 0.97),
    Level("goals", 12, 0.975),
)


class TextCurriculum(TrainerCallback):
    """Batches of the text curriculum, and the callback that raises the level when the model passes an exam. A resumed
    run continues identically, since the trainer's log records the exams."""

    def __init__(self, tokenizer: Any, lexicon: Lexicon, seed: int, levels: Sequence[Level] = LEVELS) -> None:
        self.tokenizer, self.seed, self.levels = tokenizer, seed, levels
        self.vocabulary = Vocabulary.of(tokenizer, lexicon)
        self.passed: list[int] = []  # steps at which exams were passed

    def batch(self, step: int) -> dict[str, Tensor]:
        """Draw documents of the level or of earlier kinds (half during recall, then a fifth)."""
        level = self.levels[sum(passed + 1 < step for passed in self.passed)]  # the loader prefetches one batch
        numbers, draw = np.random.default_rng((self.seed, step)), random.Random(f"{self.seed}/{step}")
        share = draw.random()
        if share < {"copy": 1.0, "recall": 0.5}.get(level.kind, 0.1):
            level = LEVELS[0]
        elif share < 0.2:  # only after recall
            level = LEVELS[1]
        return self._drawn(level, numbers, draw, 32 if level.kind in ("documents", "goals") else 64)

    def exam(self, _: int) -> dict[str, Tensor]:
        """Draw the level's exam: 64 rows, the same until the model passes it."""
        n, level = len(self.passed), self.levels[min(len(self.passed), len(self.levels) - 1)]
        return self._drawn(
            level,
            np.random.default_rng((self.seed, n, 1)),
            draw=random.Random(f"{self.seed}/exam/{n}"),
            batch=64,
            pairs=12,
            entries=4,
        )

    def _drawn(
        self,
        level: Level,
        numbers: np.random.Generator,
        draw: random.Random,
        batch: int,
        pairs: int | None = None,
        entries: int | None = None,
    ) -> dict[str, Tensor]:
        match level.kind:
            case "copy":
                tokens, labels = repeated_segments(self.vocabulary, numbers, batch)
            case "recall":
                tokens, labels = key_value(self.vocabulary, numbers, batch, pairs)
            case _:
                n = entries or draw.choice(ENTRIES)
                make = partial(DOCUMENTS[level.kind], self.vocabulary, draw, n, level.difficulty)
                tokens, labels = look_ups(self.tokenizer, draw, batch, make)
        return {"input_ids": tokens, "labels": labels}

    @property
    def done(self) -> bool:
        return len(self.passed) == len(self.levels)

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.passed = []
        for row in state.log_history:
            self._read(row)

    def on_log(self, args, state, control, **kwargs) -> None:
        self._read(state.log_history[-1])
        control.should_training_stop = control.should_training_stop or self.done

    def on_train_end(self, args, state, control, **kwargs) -> None:
        """Raise RuntimeError if a level was not passed, so that the stage does not count as finished."""
        if not self.done:
            raise RuntimeError("the model did not pass all levels of the curriculum: read the log, or try another seed")

    def _read(self, row: dict[str, float]) -> None:
        if "eval_accuracy" in row and not self.done and row["eval_accuracy"] > self.levels[len(self.passed)].until:
            self.passed.append(int(row["step"]))
