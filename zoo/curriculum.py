"""Synthetic documents that make a tiny model's look-up circuit form (paper: none; design notes: quickstart).

A model of a million parameters does not learn to look things up from household text alone: the signal is too sparse.
Five kinds of documents give a dense one, in this order: random segments that are repeated once (copying), key-value
recall, then facts and memory documents in which only scene AND object together decide the place. (Straight from recall
to memory documents the model stayed at chance; facts told with ever more words lead there.) Then the place, or that
nothing tells it, is to be known from the goal at once, past all that stands between a goal and the question in a
compiler's prompt: what has only ever continued a fact does not know, before it has begun to tell one, whether there is
any. Every batch is `(tokens_BT, labels_BT)`; labels are -100 where nothing is to be predicted, and are not shifted.
(What stands beside an executor's lessons, for worlds whose places are searched, is `ways`.)
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
ANSWER = f"{END_OF_TURN}\n<|im_start|>assistant\n"  # where one begins
ROOM = "You are in the middle of a room. Looking quickly around you, you see"
MOST_ROOMS, MOST_ACTIONS, MOST_GONE, MOST_BEEN = 12, 4, 6, 3
"""Of a first view, of an entry, of `did:`, and of the places that memory tells of one thing, for `ways`."""
PROPOSED = 0.9  # of ways, those to a place that is told, where one is told
NOTHING = "nothing"  # no entry tells a place, no picture marks one, no place is left
Fact = tuple[tuple[str, str], str]  # scene and object, the place
Kind = Literal["copy", "recall", "facts", "documents", "goals"]

FORMS = (
    " {scene} {thing}",
    " in {scene} the {thing}",
    " in {scene} the {thing} was in",
    "\nbecause in {scene} the {thing} was in",
)
"""How a fact is told, before the place: with ever more words between the two keys, and between them and the place."""


@dataclass(frozen=True)
class Vocabulary:
    """Token ids by role. `words` is everything but bytes and special tokens."""

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
    """Random segments of 8 to 32 tokens, each repeated once; the second copy is to be predicted."""
    length = int(rng.integers(8, 33))
    segment = rng.choice(vocabulary.words, (batch, length))
    tokens = np.concatenate([segment, segment], 1)
    return _with_labels(tokens, length)


def key_value(
    vocabulary: Vocabulary, rng: np.random.Generator, batch: int, pairs: int | None = None
) -> tuple[Tensor, Tensor]:
    """4 to 16 key-value pairs, then the same pairs in another order; keys are distinct within a row."""
    n = pairs or int(rng.integers(4, 17))
    keys = np.stack([rng.choice(vocabulary.words, n, replace=False) for _ in range(batch)])
    values = rng.choice(vocabulary.words, (batch, n))
    order = np.stack([rng.permutation(n) for _ in range(batch)])
    again = np.stack([np.take_along_axis(keys, order, 1), np.take_along_axis(values, order, 1)], 2)
    tokens = np.concatenate([np.stack([keys, values], 2).reshape(batch, -1), again.reshape(batch, -1)], 1)
    ids, labels = _with_labels(tokens, 2 * n)
    labels[:, 2 * n :: 2] = IGNORE  # the order of the keys cannot be known
    return ids, labels


def fact_list(vocabulary: Vocabulary, rng: random.Random, entries: int, form: int) -> tuple[str, list[tuple[str, str]]]:
    """Text of bare facts in one of `FORMS`, and the queries (text, place) that they answer."""
    keys = _twins(vocabulary, rng, entries)
    facts = [(FORMS[form].format(scene=s, thing=t), rng.choice(vocabulary.places)) for s, t in keys]
    return "".join(f"{query} {place}" for query, place in facts), facts


def memory_document(
    vocabulary: Vocabulary, rng: random.Random, entries: int, filler: int
) -> tuple[str, list[tuple[str, str]]]:
    """Text of `entries` memory entries, and the queries (text, place) that they answer.

    Up to `filler` household actions on random places stand between an entry's head line and its reason.
    """
    places = {pair: rng.choice(vocabulary.places) for pair in _twins(vocabulary, rng, entries)}
    return _memory(vocabulary, rng, places.items(), filler), _told(places)


def goal_document(
    vocabulary: Vocabulary, rng: random.Random, entries: int, filler: int
) -> tuple[str, list[tuple[str, str]]]:
    """Text of memory entries, and beside their queries goals, to which the place of the goal's object is the answer, or
    "nothing": of the few scenes and objects that entries are about, as many pairs that one of them tells of as others.
    Between a goal and the question stand a plan, notes and up to `filler` things seen, as in a compiler's prompt."""
    few = entries // 2 + 2
    pairs = list(product(rng.sample(vocabulary.scenes, few), rng.sample(vocabulary.objects, few)))
    asked = rng.sample(pairs, min(2 * entries, len(pairs)))
    places = {pair: rng.choice(vocabulary.places) for pair in asked[:entries]}
    goals = [f"\ngoal: {_goal(vocabulary, rng, *pair)}{_state(vocabulary, rng, pair[1], filler)}" for pair in asked]
    answers = [places.get(pair, NOTHING) for pair in asked]
    return _memory(vocabulary, rng, places.items(), filler), [*_told(places), *zip(goals, answers, strict=True)]


def _memory(vocabulary: Vocabulary, rng: random.Random, facts: Iterable[Fact], filler: int) -> str:
    """Text of memory entries that tell a place by scene and object."""
    texts = []
    for (scene, thing), place in facts:
        actions = " ; ".join(_action(vocabulary, rng, thing) for _ in range(rng.randint(0, filler)))
        reason = f"{FORMS[-1].format(scene=scene, thing=thing)} {place}"
        texts.append(f"{_goal(vocabulary, rng, scene, thing)}\n{actions}{reason}")
    return "memory:\n" + "\n\n".join(texts) + "\n"


def _told(places: Mapping[tuple[str, str], str]) -> list[tuple[str, str]]:
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
    """Write what follows a goal: a Brief State, an observation of up to `longest` things, and the question."""
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
    """Ask barely, or as lessons ask."""
    return rng.choice([f"{name}:", f"ask: {name}{ANSWER}"])


def _twins(vocabulary: Vocabulary, rng: random.Random, entries: int) -> list[tuple[str, str]]:
    """(scene, object) of every entry. They come in twins that share the object (in another scene) or the scene (with
    another object), so that neither key alone decides."""
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


REFUSED = " ;"  # what comes behind a command that does not serve: by which deeds go on
ENTRIES = (2, 3, 4, 4, 5, 6)  # of a document
DOCUMENTS = {"facts": fact_list, "documents": memory_document, "goals": goal_document}


def ways(vocabulary: Vocabulary, tokenizer: Any, rng: random.Random, batch: int) -> dict[str, Tensor]:
    """Make a batch of prompts that end with the goal, each answered by a way. It is proposed by memory and the first
    view alone: `PROPOSED` of the time to one of the places that memory tells of the goal's thing in its scene, where it
    tells any, else to the one that the first view names after the place where one is. At its end the way is refused,
    if one has been there. Each prompt comes a second time, with a way of which nothing but that is to be predicted."""
    tokenize = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    end, (refused,) = tokenizer.eos_token_id, tokenize(REFUSED)
    rows, labels = [], []
    for _ in range(batch):
        text, told, following, been = (_told_way if rng.random() < 0.5 else _next_way)(vocabulary, rng)
        ids = tokenize(f"<|im_start|>user\n{text}{ANSWER}go to")
        first = rng.choice(told) if told and rng.random() < PROPOSED else following
        for place, proposed in ((first, True), (rng.choice(been or [following]), False)):
            way, last = tokenize(f" {place}"), refused if place in been else end
            rows.append([*ids, *way, last])
            labels.append([IGNORE] * len(ids) + (way if proposed else [IGNORE] * len(way)) + [last])
    return {"input_ids": pad(rows, tokenizer.pad_token_id), "labels": pad(labels, IGNORE)}


def _told_way(vocabulary: Vocabulary, rng: random.Random) -> tuple[str, list[str], str, list[str]]:
    """Make a prompt; list the places that memory tells, name the next one of the first view, list those gone to."""
    keys = _twins(vocabulary, rng, rng.choice(ENTRIES))
    places = rng.sample(vocabulary.places, len(keys) + MOST_BEEN)
    pair = rng.choice(keys)
    told = places[len(keys) : len(keys) + rng.randint(1, MOST_BEEN)]
    facts = [(key, other) for key, other in zip(keys, places, strict=False) if key != pair]
    facts += [(pair, place) for place in told]
    memory = _memory(vocabulary, rng, rng.sample(facts, len(facts)), rng.randint(0, MOST_ACTIONS))
    others = rng.sample(vocabulary.places, rng.randint(1, MOST_ROOMS))
    been = list(dict.fromkeys([*told[: rng.randint(0, len(told))], *others[: rng.randint(0, 2)]]))
    rng.shuffle(been)
    did = f"did: {' ; '.join(f'go to {each}' for each in been)}\n" if been else ""
    rooms = list(dict.fromkeys([*others, *told]))
    rng.shuffle(rooms)
    here = been[-1] if been else rng.choice(vocabulary.places)
    following = rooms[(rooms.index(here) + 1) % len(rooms)] if here in rooms else rooms[0]
    return _view(vocabulary, rng, rooms, f"{memory}\n{did}", here, pair), told, following, been


def _next_way(vocabulary: Vocabulary, rng: random.Random) -> tuple[str, list[str], str, list[str]]:
    rooms = rng.sample(vocabulary.places, rng.randint(2, MOST_ROOMS))
    at = rng.randrange(len(rooms) - 1)
    been = rooms[max(0, at - rng.randint(0, MOST_GONE)) : at + 1]
    did = f"did: {' ; '.join(f'go to {place}' for place in been)}\n"
    pair = rng.choice(vocabulary.scenes), rng.choice(vocabulary.objects)
    return _view(vocabulary, rng, rooms, did, rooms[at], pair), [], rooms[at + 1], been


def _view(
    vocabulary: Vocabulary, rng: random.Random, rooms: Sequence[str], given: str, here: str, pair: tuple[str, str]
) -> str:
    seen = ", a ".join(f"{thing} 1" for thing in rng.sample(vocabulary.objects, rng.randint(1, MOST_GONE)))
    see = f"see: You arrive at {here}. On the {here}, you see a {seen}."
    return f"first: {ROOM} a {', a '.join(rooms)}.\n{given}{see}\ngoal: {_goal(vocabulary, rng, *pair)}"


def look_ups(
    tokenizer: Any, rng: random.Random, batch: int, document: Callable[[], tuple[str, list[tuple[str, str]]]]
) -> tuple[Tensor, Tensor]:
    """Make a batch of documents, each followed by its queries in random order; only places are to be predicted."""
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
    """Make a batch of one level's documents, as a part of what other lessons are drawn from."""
    level = rng.choice(levels)
    make = partial(DOCUMENTS[level.kind], vocabulary, rng, rng.choice(ENTRIES), level.difficulty)
    tokens, labels = look_ups(tokenizer, rng, batch, make)
    return {"input_ids": tokens, "labels": labels}


def pad(rows: list[list[int]], value: int) -> Tensor:
    """Right-padded (B, T) tensor."""
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


def _with_labels(tokens: np.ndarray, known: int) -> tuple[Tensor, Tensor]:
    ids = torch.from_numpy(tokens)
    labels = ids.clone()
    labels[:, :known] = IGNORE
    return ids, labels


# ---------------------------------------------------------------------------------------------------------------------
# The levels, and what is drawn at each


@dataclass(frozen=True)
class Level:
    """What is learned, how difficult it is, and the accuracy at which the next level begins."""

    kind: Kind
    difficulty: int  # the form of a fact, the filler actions in a document's entry,
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
    """The batches of the text curriculum, and the callback that raises its level when an exam is passed.

    A batch depends on seed, step and the exams passed so far, and these stand in the trainer's log: so a run that is
    resumed goes on as if it had never stopped.
    """

    def __init__(self, tokenizer: Any, lexicon: Lexicon, seed: int, levels: Sequence[Level] = LEVELS) -> None:
        self.tokenizer, self.seed, self.levels = tokenizer, seed, levels
        self.vocabulary = Vocabulary.of(tokenizer, lexicon)
        self.passed: list[int] = []  # the steps after which exams were passed

    def batch(self, step: int) -> dict[str, Tensor]:
        """Draw the level's own documents, or those of earlier kinds: half of recall's, a fifth from facts on."""
        level = self.levels[sum(passed + 1 < step for passed in self.passed)]  # the loader draws one batch ahead
        numbers, draw = np.random.default_rng((self.seed, step)), random.Random(f"{self.seed}/{step}")
        share = draw.random()
        if share < {"copy": 1.0, "recall": 0.5}.get(level.kind, 0.1):
            level = LEVELS[0]
        elif share < 0.2:  # from facts on: the other two are drawn by now
            level = LEVELS[1]
        return self._drawn(level, numbers, draw, 32 if level.kind in ("documents", "goals") else 64)

    def exam(self, _: int) -> dict[str, Tensor]:
        """Draw the level's exam: 64 rows that do not change until it is passed."""
        n, level = len(self.passed), self.levels[min(len(self.passed), len(self.levels) - 1)]
        return self._drawn(
            level, np.random.default_rng((self.seed, n, 1)), random.Random(f"{self.seed}/exam/{n}"), 64, 12, 4
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
        """Raise RuntimeError where a level is left: such a curriculum must not pass for finished."""
        if not self.done:
            raise RuntimeError("the curriculum did not get through: look at the log, try another seed")

    def _read(self, row: dict[str, float]) -> None:
        if "eval_accuracy" in row and not self.done and row["eval_accuracy"] > self.levels[len(self.passed)].until:
            self.passed.append(int(row["step"]))
