"""A decoder whose heads are set by hand: what it can do before it has learned anything."""

from __future__ import annotations

import random
import re
from functools import partial

import numpy as np
import pytest
import torch

from zoo.alfworld.words import LEXICON
from zoo.curriculum import (
    ANSWER,
    IGNORE,
    ROOM,
    Vocabulary,
    fact_list,
    look_ups,
    memory_document,
    repeated_segments,
    ways,
)
from zoo.models import make_tokenizer
from zoo.wiring import EMBEDDED, HEAD_DIM, HEADS, PACE, THING, Aim, Match, layout, paces, wired

TOKENIZER = make_tokenizer(LEXICON)
VOCABULARY = Vocabulary.of(TOKENIZER, LEXICON)


@pytest.fixture(scope="module")
def model():
    return wired(TOKENIZER, layers=5)


def right(model, tokens, labels) -> float:
    """Share of the labelled tokens that are predicted."""
    with torch.no_grad():
        predicted = model(tokens).logits.argmax(-1)[:, :-1]
    asked = labels[:, 1:] != IGNORE
    return float((predicted == labels[:, 1:])[asked].float().mean())


def documents(make, difficulty: int):
    draw = random.Random(1)
    return look_ups(TOKENIZER, draw, 16, partial(make, VOCABULARY, draw, 4, difficulty))


def test_untrained_it_copies_what_comes_twice(model):
    tokens, labels = repeated_segments(VOCABULARY, np.random.default_rng(0), 16)
    assert right(model, tokens, labels) > 0.85


@pytest.mark.parametrize(("make", "difficulty"), [(fact_list, 3), (memory_document, 12)])
def test_untrained_it_looks_up_by_scene_and_thing_where_neither_alone_decides(model, make, difficulty):
    assert right(model, *documents(make, difficulty)) > 0.95


def test_without_its_wiring_it_looks_nothing_up(model):
    torch.manual_seed(0)
    other = type(model)(model.config)
    assert right(other, *documents(memory_document, 12)) < 0.1


def test_every_layer_has_its_heads_and_the_last_ones_are_free():
    rows = layout(6)
    assert [len(row) for row in rows] == [HEADS] * 6
    assert all(head is None for row in rows[3:] for head in row)


def test_free_layers_add_nothing_at_first(model):
    ids = torch.tensor([TOKENIZER("in FloorPlan301 the mug was in cabinet 2")["input_ids"]])
    seen = model(ids, output_hidden_states=True).hidden_states
    assert torch.equal(seen[-2], seen[3])  # (the last one has been through the final norm)


def test_all_of_it_is_trained(model):
    tokens, labels = documents(fact_list, 0)
    model(tokens, labels=labels).loss.backward()
    still = {name for name, weight in model.named_parameters() if weight.grad is None}
    model.zero_grad()
    assert not still


def test_the_same_seed_makes_the_same_weights(model):
    again = wired(TOKENIZER, layers=5).state_dict()
    assert all(torch.equal(weight, again[name]) for name, weight in model.state_dict().items())


# -- heads that gather ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gathering():
    model = wired(TOKENIZER, layers=3, gathers=LEXICON)
    model.set_attn_implementation("eager")
    return model


def answered(model, batches: int = 4) -> dict[str, float]:
    """Of prompts that end with the goal, the share that is answered with the right place: where memory tells it and no
    other, where it tells others, too, in which one has been, and where it is the next one of the first view."""
    kinds, rng = dict[str, list[bool]](), random.Random(5)
    for _ in range(batches):
        batch = ways(VOCABULARY, TOKENIZER, rng, 24)
        with torch.no_grad():
            predicted = model(batch["input_ids"]).logits.argmax(-1)
        for ids, labels, guess in zip(batch["input_ids"], batch["labels"], predicted, strict=True):
            at, prompt = int((labels != IGNORE).nonzero()[0, 0]), TOKENIZER.decode(ids)
            scene, thing = re.search(r"\ngoal: in (\w+): .*? (?:a|some)(?: hot| cool| clean)? (\w+) ", prompt).groups()
            told = prompt.count(f"because in {scene} the {thing} was in")
            kind = "following" if told == 0 else "told" if told == 1 else "told, been"
            kinds.setdefault(kind, []).append(bool(guess[at - 1] == labels[at]))
    return {kind: sum(right) / len(right) for kind, right in kinds.items()}


def test_untrained_it_goes_where_memory_tells_or_to_the_next_place_of_the_first_view(gathering):
    shares = answered(gathering)
    assert shares["told"] > 0.65 and shares["following"] > 0.65 and shares["told, been"] > 0.15


def test_without_its_wiring_it_goes_nowhere(gathering):
    torch.manual_seed(0)
    assert max(answered(type(gathering)(gathering.config), 1).values()) < 0.1


def test_embeddings_that_begin_apart_are_less_alike_than_random_ones(gathering, model):
    def alike(some) -> float:
        vectors = torch.nn.functional.normalize(some.get_input_embeddings().weight[:, :EMBEDDED].detach(), dim=1)
        return float((vectors @ vectors.T).fill_diagonal_(0).max(1).values.mean())

    assert alike(gathering) < 0.35 < alike(model)


@pytest.mark.parametrize(("goal", "head", "wanted"), [
    ("heat some cup and put it in drawer", Match(((THING, 1),), behind=2, sink=32), " 3"),
    ("put a clean mug in drawer", Match(((THING, 1),), behind=2, sink=32), " 1"),
    ("heat some cup and put it in drawer", Aim(True), " drawer 4"),
])  # fmt: skip
def test_untrained_it_finds_the_goals_thing_in_view_and_a_place_of_the_goals_kind(gathering, goal, head, wanted):
    prompt = (
        f"first: {ROOM} a cabinet 1, a drawer 4, and a shelf 1.\nsee: You arrive at cabinet 2. On the cabinet 2, you "
        f"see a mug 1, a cup 3, and a bowl 2.\ngoal: in FloorPlan12: {goal}{ANSWER}go to"
    )
    ids = TOKENIZER(prompt, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        attended = gathering(torch.tensor([ids]), output_attentions=True).attentions[1]
    at = int(attended[0, layout(3, True)[1].index(head), -1].argmax())
    assert TOKENIZER.decode([ids[at]]) == wanted


def test_heads_that_are_set_learn_at_their_own_pace(gathering):
    shares = paces(gathering)
    named = dict(gathering.named_parameters())
    assert {name.split(".")[2] for name in shares} == {"0", "1", "2", "weight"}  # and the embeddings
    for name, share in shares.items():
        assert {round(float(part), 3) for part in share.expand_as(named[name]).unique()} <= {1.0, PACE}
    last = shares["model.layers.2.self_attn.v_proj.bias"].reshape(-1, HEAD_DIM)[:, 0]
    assert last.tolist() == pytest.approx([1.0 if head is None else PACE for head in layout(3, True)[2]])
