"""What a decoder with hand-set heads does before training."""

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
    REFUSED,
    ROOM,
    Vocabulary,
    fact_list,
    look_ups,
    memory_document,
    repeated_segments,
    ways,
)
from zoo.induction_init import (
    EMBEDDED,
    EMBEDDING_PACE,
    HEAD_DIM,
    HEADS,
    PACE,
    SCENE,
    GoalPlace,
    Induction,
    build_induction_model,
    head_layout,
    learning_rate_scales,
)
from zoo.models import make_tokenizer

TOKENIZER = make_tokenizer(LEXICON)
VOCABULARY = Vocabulary.of(TOKENIZER, LEXICON)
GO = TOKENIZER(" go to", add_special_tokens=False)["input_ids"][0]


@pytest.fixture(scope="module")
def model():
    return build_induction_model(TOKENIZER, layers=5)


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
    rows = head_layout(6)
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
    again = build_induction_model(TOKENIZER, layers=5).state_dict()
    assert all(torch.equal(weight, again[name]) for name, weight in model.state_dict().items())


# -- heads that gather ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gathering():
    model = build_induction_model(TOKENIZER, layers=3, gathers=LEXICON)
    model.set_attn_implementation("eager")
    return model


def answered(model, batches: int = 4) -> dict[str, float]:
    """Of prompts that end with the goal, the share in which a place is named that memory tells, or, where it tells
    none, the next one of the first view; and, at the end of ways, by how many nats refusing is likelier than ending the
    turn: where one has been (but for where one is, behind which deeds do not go on), and where not."""
    kinds, rng = dict[str, list[float]](), random.Random(5)
    (semicolon,), end = TOKENIZER(REFUSED, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id
    for _ in range(batches):
        batch = ways(VOCABULARY, TOKENIZER, rng, 24)
        with torch.no_grad():
            logits = model(batch["input_ids"]).logits
        for i, (ids, labels, said) in enumerate(zip(batch["input_ids"], batch["labels"], logits, strict=True)):
            last = int((labels != IGNORE).nonzero()[-1, 0])
            gone = "been" if labels[last] == semicolon else "not been"
            if f"You arrive at{TOKENIZER.decode([int(ids[last - 1])])}." not in TOKENIZER.decode(ids):
                kinds.setdefault(gone, []).append(float(said[last - 1, semicolon] - said[last - 1, end]))
            if i % 2:
                continue
            prompt, named = TOKENIZER.decode(ids), TOKENIZER.decode([int(said[last - 2].argmax())])
            scene, thing = re.search(r"\ngoal: in (\w+): .*? (?:a|some)(?: hot| cool| clean)? (\w+) ", prompt).groups()
            because = f"because in {scene} the {thing} was in"
            told = (
                f"{because}{named}\n" in prompt if because in prompt else bool(said[last - 2].argmax() == ids[last - 1])
            )
            kinds.setdefault("told" if because in prompt else "following", []).append(told)
    return {kind: sum(right) / len(right) for kind, right in kinds.items()}


@pytest.mark.seconds
def test_untrained_it_goes_where_memory_tells_or_to_the_next_place_of_the_first_view(gathering):
    shares = answered(gathering)
    assert shares["told"] > 0.65 and shares["following"] > 0.5
    assert shares["been"] > shares["not been"] + 8


@pytest.mark.seconds
def test_without_its_wiring_it_goes_nowhere(gathering):
    torch.manual_seed(0)
    shares = answered(type(gathering)(gathering.config), 1)
    assert max(shares["told"], shares["following"]) < 0.1 and abs(shares["been"] - shares["not been"]) < 1


@pytest.mark.seconds
def test_embeddings_that_begin_apart_are_less_alike_than_random_ones(gathering, model):
    def alike(some) -> float:
        vectors = torch.nn.functional.normalize(some.get_input_embeddings().weight[:, :EMBEDDED].detach(), dim=1)
        return float((vectors @ vectors.T).fill_diagonal_(0).max(1).values.mean())

    assert alike(gathering) < 0.35 < alike(model)


def finds(model, head: Induction | GoalPlace, prompt: str) -> tuple[str, float]:
    """Say what a head of the second layer attends to most at a prompt's end, and how much; "" is nothing."""
    ids = TOKENIZER(prompt, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        attended = model(torch.tensor([ids]), output_attentions=True).attentions[1]
    found = attended[0, head_layout(3, True)[1].index(head), -1]
    at = int(found.argmax())
    return TOKENIZER.decode([ids[at]]).strip() if TOKENIZER.decode([ids[at]]) != "<|im_start|>" else "", float(
        found[at]
    )


def asked(goal: str, did: str = "", see: str = "You arrive at bed 1. On the bed 1, you see a bowl 2.") -> str:
    return (
        f"<|im_start|>user\nfirst: {ROOM} a bed 1, a cabinet 3, a drawer 2, a microwave 1, and a shelf 1.\nmemory:\n"
        "in FloorPlan12: put a mug in drawer\ngo to cabinet 3 ; take mug 1 from cabinet 3 ; go to shelf 1 ; "
        "move mug 1 to shelf 1\nbecause in FloorPlan12 the mug was in cabinet 3\n\n"
        f"{did and f'did: {did}'}\nsee: {see}\n"
        f"goal: in FloorPlan12: {goal}{ANSWER}go to"
    ).replace("\n\n\nsee", "\n\nsee")


SECOND = head_layout(3, gathers=True)[1]
TOLD = next(head for head in SECOND if isinstance(head, Induction) and SCENE in dict(head.pairs))
NAMED = next(head for head in SECOND if isinstance(head, Induction) and head.only_at)
GONE_TO = next(head for head in SECOND if isinstance(head, Induction) and head.penalty)
THING_IN_VIEW = next(head for head in SECOND if isinstance(head, Induction) and head.kind and not head.writes)
TAKES = next(head for head in SECOND if isinstance(head, Induction) and head.writes)
GOALS, TREATMENTS = (
    next(head for head in SECOND if isinstance(head, GoalPlace) and head.kind == kind)
    for kind in ("goals", "treatments")
)
SOUGHT, IN_HAND = "go to drawer 2 ; go to bed 1", "go to drawer 2 ; go to bed 1 ; take mug 1 from bed 1"
HEATED = f"{IN_HAND} ; go to microwave 1 ; heat mug 1 with microwave 1"
PUT_FIRST = f"{IN_HAND} ; go to shelf 1 ; move mug 1 to shelf 1 ; go to microwave 1 ; go to bed 1"


@pytest.mark.seconds
@pytest.mark.parametrize("did", ["", SOUGHT, PUT_FIRST])
def test_untrained_it_finds_what_memory_tells_of_the_goals_thing_unless_something_is_in_hand(gathering, did):
    assert finds(gathering, TOLD, asked("put a mug in shelf", did))[0] == "cabinet 3"
    assert finds(gathering, TOLD, asked("put a mug in shelf", IN_HAND))[0] == ""
    heated = asked("heat some mug and put it in shelf", HEATED, "You heat the mug 1 using the microwave 1.")
    assert finds(gathering, TOLD, heated)[0] == ""


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("did", "gone_to", "not_gone_to"),
    [
        (SOUGHT, "drawer 2", "cabinet 3"),
        (PUT_FIRST, "microwave 1", "cabinet 3"),
        (PUT_FIRST, "microwave 1", "drawer 2"),
        (IN_HAND, "", "drawer 2"),
    ],
)
def test_untrained_it_finds_where_it_has_been_in_this_search_and_not_what_memory_did(
    gathering, did, gone_to, not_gone_to
):
    prompt = asked("put two mug in shelf", did)
    if gone_to:
        assert finds(gathering, GONE_TO, f"{prompt} {gone_to}") == (";", pytest.approx(1, abs=0.05))
    assert finds(gathering, GONE_TO, f"{prompt} {not_gone_to}")[0] == ""


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("goal", "head", "did", "see", "wanted"),
    [
        ("heat some bowl and put it in drawer", THING_IN_VIEW, SOUGHT, None, "2"),
        ("put a mug in drawer", GOALS, IN_HAND, None, "drawer 2"),
        ("put a mug in drawer", GOALS, SOUGHT, None, ""),
        ("heat some mug and put it in drawer", TREATMENTS, IN_HAND, None, "microwave 1"),
        ("put a hot mug in drawer", TREATMENTS, IN_HAND, None, "microwave 1"),
        ("put a hot mug in drawer", TREATMENTS, SOUGHT, None, ""),
        ("put a hot mug in drawer", TREATMENTS, HEATED, "You heat the mug 1 using the microwave 1.", ""),
        ("put a hot mug in drawer", GOALS, HEATED, "You heat the mug 1 using the microwave 1.", "drawer 2"),
    ],
)
def test_untrained_it_finds_the_goals_thing_in_view_and_where_to_bring_what_is_in_hand(
    gathering, goal, head, did, see, wanted
):
    prompt = asked(goal, did, see) if see else asked(goal, did)
    assert finds(gathering, head, prompt)[0] == wanted


@pytest.mark.seconds
@pytest.mark.parametrize(("verb", "named"), [("take", "mug"), ("go to", ""), ("open", "")])
def test_untrained_it_names_the_goals_thing_behind_what_is_done_with_one(gathering, verb, named):
    prompt = asked("put a mug in drawer", SOUGHT, "You arrive at bed 1. On the bed 1, you see a bowl 2, and a mug 3.")
    assert finds(gathering, NAMED, prompt.removesuffix("go to") + verb)[0] == named


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("did", "see", "goal", "number"),
    [
        (SOUGHT, "a bowl 2, and a mug 3.", "put a mug in drawer", "3"),
        (SOUGHT, "a bowl 2, and a mug 3.", "heat some bowl and put it in drawer", "2"),
        (SOUGHT, "a bowl 2.", "put a mug in drawer", ""),  # memory took mug 1
        (IN_HAND, "a bowl 2, and a mug 3.", "put a mug in drawer", ""),
        (PUT_FIRST, "a bowl 2, and a mug 3.", "put two mug in drawer", "3"),
    ],
)
def test_untrained_an_answer_begins_with_take_where_the_goals_thing_is_in_view_and_nothing_in_hand(
    gathering, did, see, goal, number
):
    prompt = asked(goal, did, f"You arrive at bed 1. On the bed 1, you see {see}").removesuffix("go to")
    found = finds(gathering, TAKES, prompt)[0]
    assert (found == number) if number else not found.isdigit()  # of what is no number, nothing is said
    assert not finds(gathering, TAKES, f"{prompt}take")[0]


@pytest.mark.seconds
def test_untrained_a_number_is_that_of_the_thing_in_view_or_of_what_was_taken_and_not_memorys(gathering):
    seen = asked("put a mug in drawer", SOUGHT, "You arrive at bed 1. On the bed 1, you see a bowl 2, and a mug 3.")
    assert finds(gathering, THING_IN_VIEW, seen.removesuffix("go to") + "take mug")[0] == "3"
    taken = asked("put a mug in drawer", IN_HAND.replace("mug 1", "mug 4"), "You arrive at drawer 2.")
    assert finds(gathering, THING_IN_VIEW, taken.removesuffix("go to") + "move mug")[0] == "4"


@pytest.mark.seconds
def test_heads_that_are_set_learn_at_their_own_pace(gathering):
    shares = learning_rate_scales(gathering)
    named = dict(gathering.named_parameters())
    assert {name.split(".")[2] for name in shares} == {"0", "1", "2", "weight"}  # and the embeddings
    for name, share in shares.items():
        expected = {1.0, PACE, EMBEDDING_PACE, 0.0}
        assert {round(float(part), 3) for part in share.expand_as(named[name]).unique()} <= expected
        assert not name.startswith("model.layers.0.") or not share.any()  # what is compared stays as it is
    last = shares["model.layers.2.self_attn.v_proj.bias"].reshape(-1, HEAD_DIM)[:, 0]
    assert last.tolist() == pytest.approx([1.0 if head is None else PACE for head in head_layout(3, True)[2]])
