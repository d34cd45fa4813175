"""A decoder whose heads are set by hand: what it can do before it has learned anything."""

from __future__ import annotations

import random
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
from zoo.wiring import HEAD_DIM, HEADS, PACE, PLACE, SCENE, THING, Aim, Match, layout, paces, wired

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


def found(gathering, head: Match) -> tuple[float, float]:
    """Of prompts that end with the goal, the mean attention that a head of layer 1 pays the place that is to be
    answered: where memory tells it and no other, and where it is the next one of the first view."""
    batch = ways(VOCABULARY, TOKENIZER, random.Random(5), 32)
    with torch.no_grad():
        attended = gathering(batch["input_ids"], output_attentions=True).attentions[1]
    paid: dict[bool, list[float]] = {True: [], False: []}
    mine = attended[:, layout(3, True)[1].index(head)]
    for ids, labels, weights in zip(batch["input_ids"], batch["labels"], mine, strict=True):
        at, prompt = int((labels != IGNORE).nonzero()[0, 0]), TOKENIZER.decode(ids)
        if "memory" in prompt and "did" in prompt:
            continue
        paid["memory" in prompt].append(float(weights[at - 1, :at][ids[:at] == ids[at]].sum()))
    return sum(paid[True]) / len(paid[True]), sum(paid[False]) / len(paid[False])


def test_untrained_it_finds_what_memory_tells_of_the_goal_and_what_follows_the_place_where_one_is(gathering):
    told, _ = found(gathering, Match(((THING, 2), (SCENE, 4))))
    _, following = found(gathering, Match(((PLACE, 2),), behind=1))
    assert told > 0.9 and following > 0.6


@pytest.mark.parametrize(("goal", "head", "wanted"), [
    ("heat some cup and put it in drawer", Match(((THING, 1),), behind=2), " 3"),
    ("put a clean mug in drawer", Match(((THING, 1),), behind=2), " 1"),
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


def test_what_gathers_looks_up_too(gathering):
    assert right(gathering, *documents(memory_document, 12)) > 0.9


def test_heads_that_are_set_learn_at_their_own_pace(gathering):
    shares = paces(gathering)
    named = dict(gathering.named_parameters())
    assert {name.split(".")[2] for name in shares} == {"0", "1", "2"}
    for name, share in shares.items():
        assert {round(float(part), 3) for part in share.expand_as(named[name]).unique()} <= {1.0, PACE}
    last = shares["model.layers.2.self_attn.v_proj.bias"].reshape(-1, HEAD_DIM)[:, 0]
    assert last.tolist() == pytest.approx([1.0 if head is None else PACE for head in layout(3, True)[2]])
