"""Which entries answer a task: scene and object, exclusions, any goal as data, and nothing but the entries decides."""

import sys
import types

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envs.base import Task
from memory.bank import BankError, MemoryBank
from memory.entry import MemoryEntry, Provenance
from memory.retrieval import BankRanker, RankedEntry, SentenceEmbedder, merge_rankings, move_repeats_last, query_words
from memory.words import search_terms
from tests.memory.entries import entry_from_trajectory

VERBS = {"hot": "heat", "clean": "clean", "cool": "cool"}
OBJECTS = ("mug", "apple", "plate", "knife", "egg", "tomato", "bread")


def entry(scene: str, kind: str, thing: str, n: int = 0, success: bool = True, **kwargs) -> MemoryEntry:
    place = ("cabinet 1", "shelf 2", "drawer 3")[(len(scene) + len(thing) + n) % 3]
    goal, receptacle = f"put a {kind} {thing} in cabinet", "cabinet 4"
    actions = [
        f"go to {place}",
        f"take {thing} 1 from {place}",
        f"{VERBS[kind]} {thing} 1 with microwave 1",
        f"go to {receptacle}",
        f"move {thing} 1 to {receptacle}",
    ]
    task = Task(f"{scene}/{kind}/{thing}/{n}", goal, scene, kwargs.pop("split", "train"), kind)
    id = f"{scene}|{kind} {thing}|{n}|{'ok' if success else 'no'}"
    return entry_from_trajectory(task, actions, success, f"in {scene} the {thing} was in {place}", id=id, **kwargs)


def ask(thing: str = "mug", scene: str = "home 17", id: str = "asked", kind: str = "hot") -> Task:
    return Task(id, f"put a {kind} {thing} in cabinet", scene, "test", kind)


def ids(entries) -> list[str]:
    return [e.id for e in entries]


def made(path, entries, embed=None) -> MemoryBank:
    bank = MemoryBank(path, embed)
    bank.write(entries)
    return bank


ENTRIES = [
    entry(f"home {home}", kind, thing)
    for home in (1, 2, 7, 11, 17, 71, 117)
    for kind, thing in (("clean", "mug"), ("cool", "apple"), ("hot", "plate"), ("hot", "egg"))
    if (home, thing) != (1, "mug")
]


@pytest.fixture(scope="module")
def bank(tmp_path_factory) -> MemoryBank:
    return made(tmp_path_factory.mktemp("bank") / "bank", ENTRIES)


# -- ranking ----------------------------------------------------------------------------------------------------------


def test_own_mug_first_then_own_others_and_other_mugs(bank: MemoryBank):
    found = bank.retrieve([ask()])[0]
    scenes = [e.provenance.scene for e in found]
    assert (
        found[0].id == "home 17|clean mug|0|ok"
    )  # although "hot ... in cabinet" is word for word in others of home 17
    assert scenes == ["home 17", "home 17", found[2].provenance.scene, "home 17"] and scenes[2] != "home 17"
    assert "mug" in found[2].text and all("mug" not in found[i].text for i in (1, 3))
    assert bank.retrieve([ask()], 4)[0] == found and ids(bank.retrieve([ask()], 2)[0]) == ids(found[:2])


def test_a_scene_label_is_matched_whole(bank: MemoryBank):
    first = bank.retrieve([ask(scene="home 1")], 8)[0]
    assert [e.provenance.scene for e in first].count("home 1") == 3 == len(ENTRIES) - 24
    assert first[0].provenance.scene == "home 1" and "mug" in first[2].text  # home 1 has no mug: its own, then mugs
    for scene in ("home", "17", "Home 17", "home  17", "home 17 ", "1"):
        found = bank.retrieve([ask(scene=scene)], 3)[0]
        assert all("mug" in e.text for e in found), scene  # no such scene: by the goal alone


def test_a_scene_named_in_the_goal_does_not_match_numbers(tmp_path):
    entries = [entry("home 3", "hot", "mug"), *(entry(f"home {n}", "hot", "apple") for n in (17, 170))]
    entries.append(MemoryEntry("17s", "17 17 17 home 17", Provenance("x", "home 9", "17", "train", True)))
    bank = made(tmp_path / "bank", entries)
    task = Task("t", "in home 17: put a hot mug in cabinet", "home 17", "test", "")
    assert "17s" not in ids(bank.retrieve([task], 9)[0]) and len(bank.retrieve([task], 9)[0]) == 3


def test_without_a_scene_the_goal_decides(bank: MemoryBank):
    assert all("mug" in e.text for e in bank.retrieve([ask(scene="")], 6)[0])


def test_either_list_may_run_out(bank: MemoryBank):
    assert [e.provenance.scene for e in bank.retrieve([Task("t", "zzz", "home 17", "", "")], 9)[0]] == ["home 17"] * 4
    assert bank.retrieve([Task("t", "zzz", "home 99", "", "")])[0] == []
    assert len(bank.retrieve([ask()], 1000)[0]) == len(ENTRIES)  # every goal has "cabinet" in it
    assert bank.retrieve([ask()], 0)[0] == [] and ids(bank.retrieve([ask()], 1)[0]) == ["home 17|clean mug|0|ok"]
    with pytest.raises(ValueError, match="negative"):
        bank.retrieve([ask()], -1)[0]


def test_ten_attempts_at_one_task_do_not_fill_memory(tmp_path):
    entries = [entry("home 17", "hot", "mug", n, success=n == 7) for n in range(10)]
    bank = made(tmp_path / "bank", [*entries, entry("home 17", "cool", "apple"), entry("home 2", "hot", "mug")])
    found = ids(bank.retrieve([ask()])[0])
    assert found[:3] == ["home 17|hot mug|7|ok", "home 17|cool apple|0|ok", "home 2|hot mug|0|ok"]


def test_an_entry_of_another_memory_system_is_found_by_its_goal(tmp_path):
    fact = MemoryEntry("fact", "it was behind the toaster", Provenance("t", "home 2", "find the teapot", "train", True))
    bank = made(tmp_path / "bank", [fact, *ENTRIES])
    assert ids(bank.retrieve([Task("x", "find teapots", "home 99", "", "")])[0])[0] == "fact"  # words are stemmed


@pytest.mark.parametrize("thing", ["pot", "cd", "pan", "can", "it", "tv"])  # some are stop words in some language
def test_every_word_counts(tmp_path, thing):
    bank = made(tmp_path / "bank", [*ENTRIES, entry("home 9", "cool", thing)])
    assert (
        ids(bank.retrieve([Task("x", f"put a clean {thing} in drawer", "", "", "")])[0])[0]
        == f"home 9|cool {thing}|0|ok"
    )


def test_the_object_outweighs_verb_and_receptacle(tmp_path):
    def e(kind: str, thing: str, place: str, receptacle: str, scene: str) -> MemoryEntry:
        actions = [f"go to {place}", f"take {thing} 1 from {place}", "go to sinkbasin 1"]
        actions += [f"{kind} {thing} 1 with sinkbasin 1", f"go to {receptacle} 1", f"move {thing} 1 to {receptacle} 1"]
        task = Task(f"{scene}{thing}{kind}", f"{kind} some {thing} and put it in {receptacle}", scene, "train", "")
        return entry_from_trajectory(task, actions, True, f"in {scene} the {thing} was in {place}")

    kinds, receptacles = ("clean", "cool", "heat"), ("fridge", "shelf", "table", "cabinet")
    entries = [
        e(kinds[(i + h) % 3], thing, "drawer 1", receptacles[(i + h) % 4], f"home {h}")
        for h in range(8)
        for i, thing in enumerate(("pot", *OBJECTS))
    ]
    entries += [
        e("cool", "pot", "drawer 2", "sinkbasin", "home 17"),
        e("clean", "tomato", "fridge 1", "fridge", "home 17"),
    ]
    bank = made(tmp_path / "bank", entries)
    task = Task("x", "clean some pot and put it in fridge", "home 17", "", "")
    assert bank.retrieve([task])[0][0].provenance.actions[1] == "take pot 1 from drawer 2"
    with pytest.MonkeyPatch.context() as patch:  # plain BM25 does not see it: the test tests something
        patch.setattr(
            BankRanker, "_by_words", lambda self, task: self._words(search_terms(" ".join(query_words(task))))
        )
        assert bank.retrieve([task])[0][0].provenance.actions[1] == "take tomato 1 from fridge 1"


def test_other_scripts_are_split_into_words(tmp_path):
    entries = [
        MemoryEntry(str(i), t, Provenance("t", "", t, "train", True)) for i, t in enumerate(("加热杯子", "清洗盘子"))
    ]
    assert ids(made(tmp_path / "bank", entries).retrieve([Task("x", "把杯子放进柜子", "", "", "")])[0]) == ["0"]


def test_merging_and_repeats():
    def f(i: int, goal: str = "", success: bool = True) -> RankedEntry:
        return RankedEntry(i, str(i), goal or str(i), "s", "t", success)

    here, elsewhere = [f(i) for i in range(4)], [f(10 + i) for i in range(4)]
    assert [x.row for x in merge_rankings(here, elsewhere, 8)] == [0, 1, 10, 2, 11, 3, 12, 13]
    assert [x.row for x in merge_rankings([], elsewhere, 2)] == [10, 11] and merge_rankings(here, [], 0) == []
    repeats = [f(0, "a", False), f(1, "b"), f(2, "a"), f(3, "a"), f(4, "c")]
    assert [x.row for x in move_repeats_last(repeats)] == [1, 2, 4, 3, 0]


# -- exclusions -------------------------------------------------------------------------------------------------------


def test_own_task_is_excluded(bank: MemoryBank):
    own = "home 17/clean/mug/0"
    assert "home 17|clean mug|0|ok" not in ids(bank.retrieve([ask(id=own)], 100)[0])
    assert bank.retrieve([ask()])[0][0].id == "home 17|clean mug|0|ok"
    many = bank.retrieve([ask(id=own), ask(), ask(id=own)])
    assert many == [bank.retrieve([ask(id=own)])[0], bank.retrieve([ask()])[0], many[0]]


def test_own_task_is_excluded_however_many_attempts_it_has(tmp_path):
    own = [MemoryEntry(f"own{i}", e.text, e.provenance) for i, e in enumerate([entry("home 17", "hot", "mug")] * 300)]
    bank = made(tmp_path / "bank", [*own, entry("home 17", "cool", "apple"), entry("home 2", "hot", "mug")])
    task = ask(id="home 17/hot/mug/0")
    assert ids(bank.retrieve([task])[0]) == ["home 17|cool apple|0|ok", "home 2|hot mug|0|ok"]


# -- goals are data ---------------------------------------------------------------------------------------------------

NASTY = (
    "",
    " ",
    "'",
    '"',
    '"mug',
    "mug'",
    "{}",
    "{mug}",
    "(mug",
    "mug AND NOT apple",
    "mug OR",
    "NOT",
    "+mug -apple",
    "mug~2",
    "mu*",
    "text:mug",
    "mug^5",
    "[a TO b]",
    "x' OR 1=1 --",
    "'; DROP TABLE entries; --",
    "\\",
    "\\'",
    "%s",
    "$1",
    "?",
    "\0",
    "a\0b",
    "\n",
    "\u2028",
    "é",
    "e\u0301",
    "日本語",
    "\U0001f600",
    "\ud800",
    "mug " * 5000,
    "x" * 100_000,
    "-" * 3000,
)


@pytest.mark.parametrize("goal", NASTY, ids=range(len(NASTY)))
def test_nasty_goals_scenes_and_ids(bank: MemoryBank, goal: str):
    assert bank.retrieve([Task(goal, goal, goal, goal, goal)])[0] is not None
    assert [e.provenance.scene for e in bank.retrieve([Task(goal, goal, "home 17", "", "")])[0]][:2] == ["home 17"] * 2


def test_nasty_entries_are_found_by_exactly_their_own_scene(tmp_path):
    # A surrogate is stored as another of them, "?", and a task's scene has no newlines.
    names = [n for n in NASTY if n.splitlines() == [n] and len(n) < 100 and n != "\ud800"]
    bank = made(tmp_path / "bank", [MemoryEntry(f"e{i}", n, Provenance(n, n, n, n, True)) for i, n in enumerate(names)])
    for i, name in enumerate(names):
        elsewhere = Task("t", "zzz", name, "", "")
        assert ids(bank.retrieve([elsewhere])[0]) == [f"e{i}"], name
        assert bank.retrieve([Task(name, "zzz", name, "", "")])[0] == [], name  # its own task


operators = st.sampled_from([*NASTY[:-3], "mug", "cabinet", "home 17", "AND", "OR", '" AND "'])
queries = st.lists(operators | st.text(max_size=10), max_size=6).map(" ".join)


@given(queries, st.sampled_from(["", "home 17", "home 1"]) | queries, queries)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_query_is_answered(bank: MemoryBank, goal, scene, id):
    [found] = bank.retrieve([Task(id, goal, scene, "", "")])
    assert len({e.id for e in found}) == len(found) <= 4
    assert not found or not scene.startswith("home 1") or found[0].provenance.scene == scene


# -- nothing but the entries decides ----------------------------------------------------------------------------------


MANY = [entry(f"home {h}", k, t, n, n == 0) for h in range(4) for k in VERBS for t in OBJECTS for n in range(2)]
TASKS = [ask(t, f"home {h}", kind=k) for h, t, k in ((1, "mug", "hot"), (3, "egg", "cool"), (9, "knife", "hot"))]


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> list[list[str]]:
    return [ids(found) for found in made(tmp_path_factory.mktemp("all") / "bank", MANY).retrieve(TASKS, 20)]


@given(
    st.randoms(use_true_random=False),
    st.lists(st.integers(1, 60), min_size=1, max_size=8),
    st.booleans(),
    st.sampled_from([3, 64]),
)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_order_and_batches_of_writing_do_not_matter(
    tmp_path_factory, monkeypatch, expected, random, sizes, read_last, crowded
):
    monkeypatch.setattr("memory.bank_table.CROWDED", crowded)
    entries = random.sample(MANY, len(MANY))
    bank = MemoryBank(tmp_path_factory.mktemp("bank") / "bank")
    start = 0
    for size in [*sizes, len(MANY)]:
        bank.write(entries[start : start + size])
        start += size
        if random.random() < 0.5:
            bank.retrieve(TASKS[:1])
    if read_last:
        bank = MemoryBank(bank.path)
    assert [ids(found) for found in bank.retrieve(TASKS, 20)] == expected
    assert [ids(found) for found in MemoryBank(bank.path).retrieve(TASKS, 20)] == expected
    assert bank.entries() == entries


def test_a_view_ranks_as_the_bank_of_its_time_did(tmp_path):
    bank, then = MemoryBank(tmp_path / "bank"), {}
    for i in range(0, 120, 30):
        bank.write(MANY[i : i + 30])
        then[bank.snapshot()] = bank.retrieve(TASKS, 10)
    for version, found in then.items():
        assert bank.at(version).retrieve(TASKS, 10) == found


def test_rows_after_a_recall_are_found_and_ranked_on_the_same_scale(tmp_path):
    bank = made(tmp_path / "bank", [entry("home 1", "hot", "apple")])
    assert len(bank.retrieve([ask()])[0]) == 1
    bank.write([entry(f"home {i}", "hot", "mug") for i in range(2, 40)])
    assert bank.retrieve([ask(scene="home 30")])[0][0].provenance.scene == "home 30"
    assert all("mug" in e.text for e in bank.retrieve([ask(scene="")], 38)[0])


def test_ties_are_broken_by_id_even_among_hundreds(tmp_path):
    text = "in {}: put a hot mug in cabinet"

    def tie(i: int) -> MemoryEntry:
        return MemoryEntry(f"{i:04}", text.format("x"), Provenance(f"t{i}", f"s{i}", "put a hot mug", "train", True))

    order = np.random.default_rng(0).permutation(500).tolist()
    bank = made(tmp_path / "bank", [tie(i) for i in order])
    assert ids(bank.retrieve([ask()])[0]) == ["0000", "0001", "0002", "0003"]


# -- embeddings -------------------------------------------------------------------------------------------------------


class Bag:
    """An embedding that knows that a cup is a mug: one axis per word."""

    words = ("mug", "apple", "plate", "egg", "hot", "clean", "cool", "cabinet")
    name = "bag"

    def __call__(self, texts: list[str]) -> np.ndarray:
        split = [t.replace("cup", "mug").split() for t in texts]
        return np.array([[s.count(w) for w in self.words] for s in split], dtype=np.float64)


def test_embeddings_rank_by_meaning(tmp_path):
    bank = made(tmp_path / "bank", ENTRIES, Bag())
    found = bank.retrieve([ask("cup", kind="clean")])[0]
    assert found[0].id == "home 17|clean mug|0|ok"
    assert [e.provenance.scene == "home 17" for e in found] == [True, True, False, True]
    assert found[2].id == "home 117|clean mug|0|ok"  # six mugs tie: the first id
    assert bank.at(bank.snapshot()).retrieve([ask("cup", kind="clean")])[0] == found
    assert bank.inspect()["embedding"] == {"name": "bag", "dimension": 8}
    assert "home 17|clean mug|0|ok" not in ids(bank.retrieve([ask("cup", id="home 17/clean/mug/0")], 99)[0])
    assert bank.retrieve([Task("t", "", "", "", "")])[0] != []
    assert MemoryBank(bank.path).retrieve([ask()])[0][0] == found[0]  # words still work


def test_embeddings_and_banks_that_do_not_go_together(tmp_path):
    made(tmp_path / "words", ENTRIES[:3])
    with pytest.raises(BankError, match=r"without embeddings: open it without, or export it"):
        MemoryBank(tmp_path / "words", Bag()).retrieve([ask()])[0]
    made(tmp_path / "bag", ENTRIES[:3], Bag())
    other = Bag()
    other.name = "other"
    with pytest.raises(BankError, match="with the embedding bag, not other"):
        len(MemoryBank(tmp_path / "bag", other))
    with pytest.raises(BankError, match="open it with embed"):
        MemoryBank(tmp_path / "bag").write(ENTRIES[4])
    with pytest.raises(ValueError, match="3 dimensions"):
        MemoryBank(tmp_path / "bag", lambda texts: np.ones((len(texts), 3))).retrieve([ask()])[0]
    with pytest.raises(ValueError, match="3 dimensions"):
        MemoryBank(tmp_path / "bag", lambda texts: np.ones((len(texts), 3))).write(ENTRIES[4])
    assert len(MemoryBank(tmp_path / "bag")) == 3


@pytest.mark.parametrize("bad", [np.zeros(3), np.full((3, 2), np.nan), np.zeros((2, 2))])
def test_a_bad_embedding_is_refused(tmp_path, bad):
    with pytest.raises(ValueError, match="embed must return finite values"):
        made(tmp_path / "bank", ENTRIES[:3], lambda texts: bad)


def test_sentence_transformers_are_loaded_at_the_first_call(monkeypatch: pytest.MonkeyPatch, tmp_path):
    loaded = []

    class SentenceTransformer:
        def __init__(self, name: str, device: str | None) -> None:
            loaded.append((name, device))

        def encode(self, texts, batch_size, convert_to_numpy, show_progress_bar):
            return Bag()(texts)

    fake = types.ModuleType("sentence_transformers")
    fake.SentenceTransformer = SentenceTransformer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sentence_transformers", fake)
    embed = SentenceEmbedder("some/model", "cpu")
    assert loaded == [] and embed.name == "some/model" and SentenceEmbedder(tmp_path).name == tmp_path.name
    bank = made(tmp_path / "bank", ENTRIES, embed)
    assert bank.retrieve([ask()])[0][0].id == "home 17|clean mug|0|ok" and loaded == [("some/model", "cpu")]
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ImportError, match="extra embed"):
        SentenceEmbedder("some/model")(["x"])
