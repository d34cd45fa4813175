"""Synthetic documents that make a tiny model's look-up circuit form (paper: none; design notes: quickstart).

A model of a million parameters does not learn to look things up from household text alone: the signal is too sparse.
Three kinds of documents give a dense one, in this order: random segments that are repeated once (copying), key-value
recall, and memory documents in which only scene AND object together decide the place.
Every function returns `(tokens_BT, labels_BT)`; labels are -100 where nothing is to be predicted, and are not shifted.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from zoo.household.models import OBJECTS, RECEPTACLES, SPECIAL

IGNORE = -100


@dataclass(frozen=True)
class Vocabulary:
    """Token ids by role. `words` is everything but bytes and special tokens."""

    words: np.ndarray
    scenes: list[str]
    objects: list[str]
    places: list[str]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> Vocabulary:
        words = np.arange(256, len(tokenizer) - len(SPECIAL))
        places = [f"{name} {i}" for name, count in RECEPTACLES.items() for i in range(1, min(count, 6) + 1)]
        return cls(words, [f"home {i}" for i in range(1, 65)], list[str](OBJECTS), places)


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


def memory_document(
    vocabulary: Vocabulary, rng: random.Random, entries: int, filler: int
) -> tuple[str, list[tuple[str, str]]]:
    """Text of `entries` memory entries and the queries (prefix, place) that they answer.

    Entries come in twins that share the object (another scene) or the scene (another object), so that neither
    key alone decides. `filler` household actions on random entities stand between head line and reason.
    """
    scenes, objects = rng.sample(vocabulary.scenes, entries), rng.sample(vocabulary.objects, entries)
    for k in range(0, entries - 1, 2):
        if rng.random() < 0.5:
            objects[k + 1] = objects[k]
        else:
            scenes[k + 1] = scenes[k]
    keys = list(zip(scenes, objects, strict=True))
    rng.shuffle(keys)
    facts = [(f" in {scene} the {thing} was in", rng.choice(vocabulary.places)) for scene, thing in keys]
    texts = []
    for (scene, thing), (prefix, place) in zip(keys, facts, strict=True):
        actions = " ; ".join(_action(vocabulary, rng, thing) for _ in range(rng.randint(0, filler)))
        goal = f"put a {rng.choice(['', 'hot ', 'cool ', 'clean '])}{thing} in {rng.choice(list(RECEPTACLES))}"
        texts.append(f"in {scene}: {goal}\n{actions}\nbecause{prefix} {place}")
    return "\n\n".join(texts), facts


def _action(vocabulary: Vocabulary, rng: random.Random, thing: str) -> str:
    place = rng.choice(vocabulary.places)
    return rng.choice([f"go to {place}", f"open {place}", f"take {thing} 1 from {place}", f"move {thing} 1 to {place}"])


def memory_documents(
    tokenizer: Any,
    vocabulary: Vocabulary,
    rng: random.Random,
    batch: int,
    entries: int,
    filler: int,
) -> tuple[Tensor, Tensor]:
    """A batch of memory documents followed by two to four queries; only the queried places are to be predicted."""
    rows, labels = [], []
    for _ in range(batch):
        text, facts = memory_document(vocabulary, rng, entries, filler)
        ids = tokenizer("memory:\n" + text + "\n", add_special_tokens=False)["input_ids"]
        target = [IGNORE] * len(ids)
        for prefix, place in rng.sample(facts, min(len(facts), 4)):
            query = tokenizer(f"\nbecause{prefix}", add_special_tokens=False)["input_ids"]
            answer = tokenizer(f" {place}", add_special_tokens=False)["input_ids"]
            ids, target = ids + query + answer, target + [IGNORE] * len(query) + answer
        rows.append(ids)
        labels.append(target)
    return pad(rows, tokenizer.pad_token_id), pad(labels, IGNORE)


def pad(rows: list[list[int]], value: int) -> Tensor:
    """Right-padded (B, T) tensor."""
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


def _with_labels(tokens: np.ndarray, known: int) -> tuple[Tensor, Tensor]:
    ids = torch.from_numpy(tokens)
    labels = ids.clone()
    labels[:, :known] = IGNORE
    return ids, labels
