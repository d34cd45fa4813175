"""S3Mem's parts against numbers that are worked out beside them (its specification, section 7)."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from envs.base import Task
from memory.protocol import Record, Trace
from memory.s3mem.anchors import Anchor, Vocabulary, parse_question
from memory.s3mem.features import EDGE_DIMENSIONS, NODE_DIMENSIONS, hash_columns, node_features
from memory.s3mem.index import Candidate, UnitIndex
from memory.s3mem.packing import pack_evidence, reading_order
from memory.s3mem.router import (
    MAX_NEGATIVES,
    Head,
    RouterExample,
    fit_router,
    load_router,
    training_matrices,
    training_pairs,
)
from memory.s3mem.rule_writer import record_ids, write_units
from memory.s3mem.settings import S3MemSettings
from memory.s3mem.units import EventUnit, StateChange, UnitOrigin
from memory.stemming import stem


def unit(id: str, order: int, event: str = "", **fields: object) -> EventUnit:
    text = {"event": event or f"event {id}", "when": f"step {order}", "pointers": (f"p{id}",)}
    return EventUnit(order=order, origin=UnitOrigin("h", "step"), id=id, **{**text, **fields})  # type: ignore[arg-type]


def candidate(id: str, t: int, cost: float, support: float, anchor: float, **fields: object) -> Candidate:
    return Candidate(unit(id, t, **fields), cost, support, anchor, t)  # type: ignore[arg-type]


def ids(picks: Sequence[Candidate]) -> list[str]:
    return [pick.unit.id for pick in picks]


def tokens(picks: Sequence[Candidate]) -> float:
    return sum(pick.cost for pick in picks)


# heads (check 1) -----------------------------------------------------------------------------------------------------


def test_a_head_is_a_logistic_of_its_features() -> None:
    head = Head(np.array([3.0, 1.0, -1.0]), -2.0)
    [p] = head(csr_matrix([[2 / 3, 1, 0.33]]))
    assert p == pytest.approx(0.6615, abs=1e-4)  # z = 3 * 2/3 + 1 - 0.33 - 2 = 0.67


def test_positives_weigh_as_much_as_negatives() -> None:
    from sklearn.utils.class_weight import compute_class_weight

    labels = np.array([1] * 5 + [0] * 95)
    negative, positive = compute_class_weight("balanced", classes=np.array([0, 1]), y=labels)
    assert positive == pytest.approx(10.0) and negative == pytest.approx(0.526, abs=1e-3)
    assert positive / negative == pytest.approx(19)
    assert positive * -math.log(0.6615) == pytest.approx(4.13, abs=0.01)


def test_the_heads_have_the_papers_dimensions_and_two_of_them_touch_the_same_buckets() -> None:
    router = load_router()
    assert router.support.weights.shape == router.anchor.weights.shape == (NODE_DIMENSIONS,) == (2048,)
    assert router.edge.weights.shape == (EDGE_DIMENSIONS,) == (1024,)
    assert np.array_equal(router.support.weights != 0, router.anchor.weights != 0)


# labels (check 2) ----------------------------------------------------------------------------------------------------

ACTIONS = {1: "look at orange", 3: "mix picture", 4: "mix picture", 5: "mix door to kitchen", 39: "focus on hallway"}
QUESTION = "From steps 1 to 39, how many times did you execute mix picture?"


def table_7() -> tuple[UnitIndex, dict[int, str]]:
    """The paper's example of router training."""
    actions = [ACTIONS.get(t, "wait") for t in range(40)]
    records = tuple(Record(t, "", action, "Done.") for t, action in enumerate(actions))
    trace = Trace(Task("t", "", "", "train", "log"), records, True)
    units = write_units(trace)
    return UnitIndex(units, S3MemSettings()), {unit.order: unit.id for unit in units}


def example() -> RouterExample:
    index, at = table_7()
    evidence = frozenset({at[3], at[4]})
    return RouterExample(index.score(QUESTION), evidence, evidence, ((at[3], at[4]),))


def test_the_papers_example_has_its_labels() -> None:
    index, _ = table_7()
    asked = index.score(QUESTION)
    assert asked.anchor.steps == (1, 39) and asked.anchor.events == ("mix picture",) and asked.anchor.multi_hop
    assert "count" in asked.anchor.ops
    assert [index.units[i].order for i in np.flatnonzero(asked.matches)] == [3, 4]
    pairs = training_pairs(example(), asked.candidates(), np.random.default_rng(0))
    positive = [pair for pair, label in pairs if label]
    negative = [pair for pair, label in pairs if not label]
    assert positive == [(3, 4)] and (4, 3) not in positive
    assert 0 < len(negative) <= MAX_NEGATIVES == 64 and (3, 4) not in negative


def test_evidence_is_put_among_the_candidates_in_training_alone() -> None:
    index, at = table_7()
    asked = index.score("What about zebras?")
    assert not len(asked.candidates())  # nothing shares a word
    told = training_matrices([RouterExample(asked, frozenset({at[3]}), frozenset({at[3]}), ((at[3], at[4]),))])
    assert told.support.sum() == 1
    assert not len(asked.candidates())


def test_training_tells_the_counted_steps_from_their_like() -> None:
    router = fit_router(training_matrices([example()] * 3))
    asked = table_7()[0].score(QUESTION)
    nodes = sorted(router.nodes(asked), key=lambda c: -c.support)
    assert sorted(c.unit.order for c in nodes[:2]) == [3, 4]
    assert nodes[1].support > 0.5 > nodes[2].support


# packing (check 3) ---------------------------------------------------------------------------------------------------

A, B = candidate("A", 3, 33, 0.9, 0.8), candidate("B", 4, 33, 0.7, 0.6)
C, D = candidate("C", 1, 29, 0.65, 0.1), candidate("D", 39, 109, 0.6, 0.3)
EDGES = {("A", "B"): 0.8, ("A", "D"): 0.3, ("A", "C"): 0.2}
ONE, MANY = Anchor("", ops=frozenset()), Anchor("", multi_hop=True)


def pack(anchor: Anchor, budget: float, **settings: object):
    return pack_evidence(anchor, [A, B, C, D], EDGES, budget=budget, settings=S3MemSettings(**settings))  # type: ignore[arg-type]


def test_a_single_hop_takes_the_best_in_order_of_time() -> None:
    two, three = pack(ONE, 100, n_single=2), pack(ONE, 100, n_single=3)
    assert ids(two) == ["A", "B"] and tokens(two) == 66
    assert ids(three) == ["C", "A", "B"] and tokens(three) == 95


def test_a_multi_hop_follows_edges_and_fills_what_is_left_where_that_is_asked() -> None:
    chain, filled, small = pack(MANY, 100), pack(MANY, 100, fill=True), pack(MANY, 60)
    assert ids(chain) == ["A", "B"]
    assert ids(filled) == ["C", "A", "B"] and tokens(filled) == 95
    assert ids(small) == ["A"] and tokens(small) == 33
    assert ids(pack(MANY, 60, fill=True)) == ["A"]  # of the 27 tokens that are left not even C's 29


def test_where_no_link_fits_the_surest_support_is_read_and_not_the_anchor_alone() -> None:
    """The specification is silent on an edge that passes to what does not fit: it counts as none."""
    anchor, support = candidate("A", 3, 33, 0.6, 0.8), candidate("B", 4, 33, 0.9, 0.6)
    picks = pack_evidence(MANY, [anchor, support], {("A", "B"): 0.8}, budget=60, settings=S3MemSettings())
    assert ids(picks) == ["B"]


def test_switches_of_the_packer() -> None:
    assert ids(pack(MANY, 100, packing="topk")) == ["C", "A", "B"]
    assert ids(pack_evidence(MANY, [A, B, C, D], {}, budget=100, settings=S3MemSettings())) == [
        "C",
        "A",
        "B",
    ]  # no edge: by support
    assert ids(pack_evidence(ONE, [D], {}, budget=200, settings=S3MemSettings(tau_sup=0.9))) == [
        "D"
    ]  # the best where none is sure


def test_a_pack_fits_and_does_not_depend_on_the_order_of_candidates() -> None:
    draw = random.Random(0)
    for _ in range(50):
        some = [
            candidate(str(i), i, draw.randint(5, 60), draw.random(), draw.random(), pointers=(f"p{draw.randrange(8)}",))
            for i in range(12)
        ]
        edges = {(str(i), str(j)): draw.random() for i in range(12) for j in range(12) if i != j}
        budget, anchor = draw.randint(10, 200), draw.choice((ONE, MANY))
        for fill in (False, True):
            settings = S3MemSettings(fill=fill)
            first = pack_evidence(anchor, some, edges, budget=budget, settings=settings)
            assert tokens(first) <= budget
            pointers = [pointer for pick in first for pointer in pick.unit.pointers]
            assert len(pointers) == len(set(pointers))
            assert ids(first) == ids(
                pack_evidence(anchor, draw.sample(some, 12), edges, budget=budget, settings=settings)
            )


def test_repeated_changes_are_skipped_unless_they_are_counted() -> None:
    change = (StateChange("mug 1.temperature", "", "hot"),)
    twice = [candidate(id, t, 10, 0.9, 0.9, changes=change) for id, t in (("x", 1), ("y", 2))]
    settings = S3MemSettings(fill=True)
    assert len(pack_evidence(ONE, twice, {}, budget=100, settings=settings)) == 1
    assert len(pack_evidence(replace(ONE, ops=frozenset({"count"})), twice, {}, budget=100, settings=settings)) == 2


def test_in_causal_order_no_effect_stands_before_its_cause() -> None:
    cause = candidate("cause", 9, 1, 1, 1, relations=(("causes", "effect"),))
    effect, other = candidate("effect", 2, 1, 1, 1), candidate("other", 1, 1, 1, 1)
    assert ids(reading_order([cause, effect, other])) == ["other", "effect", "cause"]
    assert ids(reading_order([cause, effect, other], causal=True)) == ["other", "cause", "effect"]
    circle = [candidate(a, t, 1, 1, 1, relations=(("causes", b),)) for a, b, t in (("a", "b", 2), ("b", "a", 1))]
    assert ids(reading_order(circle, causal=True)) == ["b", "a"]


# writing and anchors -------------------------------------------------------------------------------------------------


def household() -> Trace:
    steps = [
        ("go to shelf 1", "You arrive at shelf 1. On the shelf 1, you see a mug 1, and a plate 2."),
        ("take mug 1 from shelf 1", "You pick up the mug 1 from the shelf 1."),
        ("go to microwave 1", "You arrive at microwave 1. The microwave 1 is closed."),
        ("heat mug 1 with microwave 1", "You heat the mug 1 using the microwave 1."),
        ("fly", "Nothing happens."),
    ]
    records = tuple(Record(t, "", a, f, refused=a == "fly") for t, (a, f) in enumerate(steps))
    return Trace(Task("home/1", "heat a mug", "home 1", "train", "heat"), records, True)


def test_a_step_becomes_a_unit_of_eight_fields() -> None:
    units = write_units(household())
    seen, taken, _, heated, refused = units
    assert [u.pointers for u in units] == [(id,) for id in record_ids(household())]
    assert seen.place == "shelf 1" and {"mug 1", "plate 2"} <= set(seen.objects)
    assert taken.changes == (StateChange("mug 1.location", "shelf 1", "held"),) and taken.action == "take"
    assert heated.changes == (StateChange("mug 1.temperature", "", "hot"),) and heated.place == "microwave 1"
    assert ("causes", heated.id) in taken.relations
    assert refused.event == "fly (refused)" and not refused.changes
    assert seen.rendered() == "[in home 1, step 0, at shelf 1] go to shelf 1; objects: mug 1, plate 2"
    assert len({u.id for u in units}) == 5 and [u.id for u in write_units(household())] == [u.id for u in units]


def test_a_turn_becomes_a_unit_that_replies_to_the_last_one() -> None:
    said = [("Ann", "I saw Berlin last week."), ("Bo", "How was it?"), ("Ann", "Lovely.")]
    days = ["9:00 am on 8 May, 2023"] * 2 + ["1:00 pm on 9 May, 2023"]
    records = tuple(Record(t, "", s, "", id=f"D{t}", actor=a, when=days[t]) for t, (a, s) in enumerate(said))
    one, two, three = write_units(Trace(Task("d", "", "", "", "dialogue"), records, True))
    assert one.rendered() == "(9:00 am on 8 May, 2023) Ann: I saw Berlin last week." and one.pointers == ("D0",)
    assert "berlin" in one.objects and (one.place, three.place) == ("session 1", "session 2")
    assert two.relations == (("replies", one.id),) and three.relations == ()


def test_a_question_is_parsed_without_any_answer() -> None:
    known = Vocabulary({"mix picture", "go to shelf 1"}, {"mug 1", "shelf 1"}, {"shelf 1"}, ["ann"])
    asked = parse_question("What did Ann do just after you executed go to shelf 1 for the second time?", known)
    assert asked.events == ("go to shelf 1",) and asked.nth == 2 and asked.multi_hop
    assert {"after", "nth"} <= asked.ops and asked.sources == ("ann",)
    where = parse_question("Where was the mug 1 last seen?", known)
    assert where.objects == ("mug 1",) and where.kind == "state" and {"last", "where"} <= where.ops
    assert not where.multi_hop
    assert parse_question("When did Ann go, on 8 May 2023?", known).dates == ("8 may 2023",)


def test_words_are_stemmed_as_porter_has_it() -> None:
    pairs = "caresses:caress ponies:poni agreed:agre plastered:plaster hopping:hop filing:file happy:happi sky:sky"
    assert {w: stem(w) for w, _ in (p.split(":") for p in pairs.split())} == dict(p.split(":") for p in pairs.split())


def test_turn_features_exclude_habits_of_generated_dialogues() -> None:
    said = [("Ann", "I bought a mug."), ("Bo", "A mug?"), ("Ann", "Yes.")]
    records = tuple(Record(t, "", s, "", id=f"D{t}", actor=a, when="8 May") for t, (a, s) in enumerate(said))
    index = UnitIndex(write_units(Trace(Task("d", "", "", "", "dialogue"), records, True)), S3MemSettings())
    asked, rows = index.score("What did Ann buy, a mug?"), np.arange(3)
    assert set(node_features(asked, rows)) == {"turn:own", "turn:window", "turn:actor", "turn:bias"}
    assert hash_columns(node_features(asked, rows), 3, NODE_DIMENSIONS).shape == (3, 2048)
