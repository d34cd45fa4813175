"""The shipped tiny models: their tokenizer, their curriculum, their record, and the look-up gate."""

import hashlib
import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny_models import tokenizer
from zoo import curriculum
from zoo.household.gate import THRESHOLD, gate
from zoo.household.words import LEXICON

FOLDER = Path(__file__).parents[2] / "zoo" / "household"


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=60))
def test_tokenizer_is_lossless_on_any_text(text):
    ids = tokenizer()(text, add_special_tokens=False)["input_ids"]
    if "<|" not in text:
        assert tokenizer().decode(ids) == text


@pytest.mark.parametrize("entity", [" cabinet 2", " mug 1", " home 17", " sinkbasin 1", " drawer 12"])
def test_an_entity_is_one_token(entity):
    assert len(tokenizer()(entity, add_special_tokens=False)["input_ids"]) == 1


def test_curriculum_labels_only_what_can_be_known():
    vocabulary = curriculum.Vocabulary.of(tokenizer(), LEXICON)
    rng = np.random.default_rng(0)
    tokens, labels = curriculum.repeated_segments(vocabulary, rng, 4)
    half = tokens.shape[1] // 2
    assert (tokens[:, :half] == tokens[:, half:]).all() and (labels[:, :half] == curriculum.IGNORE).all()
    tokens, labels = curriculum.key_value(vocabulary, rng, 4, 5)
    assert (labels[:, :10] == curriculum.IGNORE).all() and (labels[:, 10::2] == curriculum.IGNORE).all()
    for row in tokens.tolist():
        known = dict(zip(row[:10:2], row[1:10:2], strict=True))
        assert all(known[k] == v for k, v in zip(row[10::2], row[11::2], strict=True))


@pytest.mark.parametrize("difficulty", range(4))
@pytest.mark.parametrize("document", [curriculum.fact_list, curriculum.memory_document])
def test_documents_need_scene_and_object(document, difficulty):
    vocabulary = curriculum.Vocabulary.of(tokenizer(), LEXICON)
    text, facts = document(vocabulary, random.Random(3), 4, difficulty)
    keys = [re.search(rf"(home \d+) (?:the )?({'|'.join(vocabulary.objects)})", query) for query, _ in facts]
    pairs = [key.groups() for key in keys if key]
    assert len(set(pairs)) == 4
    assert len({scene for scene, _ in pairs}) < 4 or len({thing for _, thing in pairs}) < 4  # neither alone decides
    assert all(f"{query} {place}" in text for query, place in facts)


@pytest.mark.parametrize("filler", [0, 6, 12])
def test_a_goals_place_is_what_the_entry_of_its_scene_and_object_tells(filler):
    vocabulary = curriculum.Vocabulary.of(tokenizer(), LEXICON)
    text, queries = curriculum.goal_document(vocabulary, random.Random(3), 4, filler)
    goals = [(query, answer) for query, answer in queries if query.startswith("\ngoal: ")]
    for query, answer in goals:
        scene, task = query.removeprefix("\ngoal: in ").splitlines()[0].split(": ")
        [thing] = [thing for thing in vocabulary.objects if re.search(rf"\b{thing} (in|on|and) ", task)]
        told = re.search(rf"because in {scene} the {thing} was in (.*)", text)
        assert answer == (told[1] if told else curriculum.NOTHING)
    assert sum(answer == curriculum.NOTHING for _, answer in goals) == 4 and len(goals) == 8


def test_only_the_places_asked_for_are_to_be_predicted():
    vocabulary, rng = curriculum.Vocabulary.of(tokenizer(), LEXICON), random.Random(3)
    tokens, labels = curriculum.look_ups(tokenizer(), rng, 5, lambda: curriculum.memory_document(vocabulary, rng, 3, 2))
    asked = labels != curriculum.IGNORE
    assert (asked.sum(1) == 3).all() and (labels[asked] == tokens[asked]).all()
    assert {tokenizer().decode([i]).strip() for i in labels[asked].tolist()} <= set(vocabulary.places)


@pytest.mark.parametrize("name", ["compiler", "executor"])
def test_shipped_weights_are_those_of_the_record(name):
    record = json.loads((FOLDER / name / "RECORD.json").read_text())
    for file, sha256 in record["sha256"].items():
        assert hashlib.sha256((FOLDER / name / file).read_bytes()).hexdigest() == sha256
        assert (FOLDER / name / file).stat().st_size < 8 * 2**20
    assert not [p for p in (FOLDER / name).iterdir() if p.suffix in (".bin", ".pt", ".pkl")]


@pytest.mark.slow
def test_the_gate():
    """On held-out scenes the base names the place that the right entry holds, and reads the mark of the view."""
    entries, told, untold, view = gate(str(FOLDER / "compiler"), scenes=24, seed=7, pictures=0)
    assert entries.n >= 100 and entries.chance < 0.4 and entries.passed and entries.value > THRESHOLD
    assert told.n == entries.n and untold.n == view.n  # whether an entry tells it, asked in one word
    assert view.n >= 100 and view.value > 5 * view.chance


@pytest.mark.slow
def test_the_gate_asks_for_pictures_in_memory_where_entries_keep_some():
    found = gate(str(FOLDER / "compiler"), scenes=2, seed=7, pictures=1)
    assert [share.name for share in found] == [
        "entries",
        "at once, known",
        "at once, unknown",
        "view",
        "pictures in memory",
    ]
    assert found[-1].n == 12 and found[-1].chance > 0.5  # most entries are of the task's own home
