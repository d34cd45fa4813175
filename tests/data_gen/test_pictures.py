"""Pictures in memory: which views an entry keeps, and that rows, rollouts and services read the same ones with M."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from datasets import Image as ImageFeature
from datasets import List, load_from_disk
from PIL import Image

from agent.deliveries import Delivery
from agent.episode import EpisodeLimits, EpisodeSpec, run_episodes
from agent.expert import ExpertExecutor, ExpertTeacher
from agent.records import Episode, EpisodeContext, StepRecord, compile_request
from compiler.client import CompileBody, SamplingBody
from compiler.records import Compilation, CompileRequest
from configs.collect import CollectConfig
from data_gen.experience import collect_experience, view_selection
from data_gen.rows import SftRow, episode_rows, load_rows, save_rows
from data_gen.tasks import episode_specs
from envs.alfworld.environment import ALFWORLD
from envs.household.environment import HOUSEHOLD, HouseholdEnvironment, HouseholdSettings
from envs.registry import command_reader_for
from envs.spec import last_view
from memory.bank import MemoryBank
from memory.trajectory import png_bytes
from tests import tiny_models
from tests.data_gen.made_rows import png, row
from tests.memory.entries import by_id

SCENES = {"train": 1}
TEACHER = ExpertTeacher(reader=command_reader_for(HouseholdSettings()))


def make_env() -> HouseholdEnvironment:
    return HouseholdEnvironment(scenes=SCENES)


def settings(pictures: int) -> CollectConfig:
    return CollectConfig.model_validate({"env": {"name": "household"}, "memory": {"pictures": pictures}})


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> list[EpisodeSpec]:
    """Tasks of one home, with what a bank on disk retrieves for them."""
    bank = MemoryBank(tmp_path_factory.mktemp("bank") / "bank")
    collect_experience(make_env, make_env().tasks("train_experience"), bank, TEACHER, view_selection(settings(1)))
    return episode_specs(make_env().tasks("train")[:3], bank, 2)


def test_household_entries_keep_the_view_in_which_the_thing_was_taken(specs: list[EpisodeSpec]) -> None:
    env = make_env()
    tasks = {task.id: task for task in env.tasks("train_experience")}
    for entry in specs[0].memory:
        env.reset(tasks[entry.provenance.task_id])
        before = entry.provenance.actions[: next(t for t, a in enumerate(entry.provenance.actions) if "take" in a)]
        for action in before:
            env.step(action)
        assert entry.images == (png_bytes(env.image()),)


def test_which_views_are_telling() -> None:
    actions = ["go to desk 1", "take pen 1 from desk 1", "take pen 2 from desk 1", "look"]
    for spec in (HOUSEHOLD, ALFWORLD):
        assert list(spec.views(actions)) == [1, 2] and list(spec.views(actions[:1])) == [0]
    assert list(last_view(actions)) == [3] and list(last_view([])) == []


def test_an_entry_keeps_no_more_views_than_it_may_in_the_order_in_which_they_were_seen() -> None:
    seen = [None, *(Image.new("RGB", (8, 8), (i, 0, 0)) for i in range(4))]
    actions = ["take a 1 from b 1", "look", "take b 1 from c 1", "take c 1 from d 1", "look"]
    steps = [StepRecord(t, "", image, None, "", action=actions[t]) for t, image in enumerate(seen)]
    episode = Episode("t", "goal", "home 1", "train", "", "", "", 0, steps=steps)
    kept = lambda most: [seen.index(image) for image in view_selection(settings(most))(episode)]
    assert [kept(most) for most in (0, 1, 2, 9)] == [[], [2], [2, 3], [2, 3]]  # step 0 was seen by nobody


def test_rows_keep_the_pictures_of_m(tmp_path: Path) -> None:
    rows = [row(i, memory_images=((png(1), png(2)), ())) if i % 3 == 2 else row(i) for i in range(4)]
    rows.append(replace(rows[2], t=1, memory_images=((png(1),), (png(3),))))
    save_rows(rows, tmp_path / "rows")
    loaded = load_rows(tmp_path / "rows")
    assert loaded == rows and loaded[2].memory_images[0][0] is loaded[4].memory_images[0][0]
    stored = load_from_disk(str(tmp_path / "rows"))
    assert stored.features["memory_images"] == List(List(ImageFeature()))
    assert stored[2]["memory_images"][0][1].getpixel((0, 0)) == (2, 10, 200)
    assert [entry.images for entry in loaded[2].step_input().memory] == [(png(1), png(2)), ()]
    assert [entry.images for entry in loaded[1].step_input().memory] == [()]


class Reader(ExpertTeacher):
    """Keeps what it is asked."""

    def compile(self, requests: Sequence[CompileRequest], contexts: Sequence[EpisodeContext] = ()) -> list[Compilation]:
        self.asked = [*getattr(self, "asked", []), *requests]
        return super().compile(requests, contexts)

    __slots__ = ("asked",)


def test_rows_the_loop_and_the_service_read_the_same_pictures(specs: list[EpisodeSpec], tmp_path: Path) -> None:
    reader = Reader(reader=TEACHER.reader)
    delivery = Delivery("teacher", "compiled", reader, soft=False)
    episodes = run_episodes(make_env, specs, delivery, ExpertExecutor(), EpisodeLimits(20), 1)
    rows: list[SftRow] = [
        r for e, spec in zip(episodes, specs, strict=True) for r in episode_rows(e, by_id(spec.memory))
    ]
    save_rows(rows, tmp_path / "rows")
    compiler, blind = tiny_models.memory_compiler(True), tiny_models.memory_compiler(False)
    assert len(rows) == len(reader.asked) > 3
    for made, asked in zip(load_rows(tmp_path / "rows"), reader.asked, strict=True):
        body = CompileBody.of(asked, SamplingBody(), ("mu",))
        read = [compile_request(made.step_input()), asked, CompileBody.model_validate(body).request()]
        first, *others = [compiler.encode(request) for request in read]
        assert len(first.images) == 1 + len(asked.memory) == 3
        for other in others:
            pairs = zip(other.pictures, first.pictures, strict=True)
            assert other.ids == first.ids and all(one.looks_like(picture) for one, picture in pairs)
        assert not blind.encode(asked).pictures


def test_m_is_the_same_beginning_of_every_prompt_of_an_episode(specs: list[EpisodeSpec]) -> None:
    reader = Reader(reader=TEACHER.reader)
    delivery = Delivery("teacher", "compiled", reader, soft=False)
    run_episodes(make_env, specs[:1], delivery, ExpertExecutor(), EpisodeLimits(20), 1)
    compiler = tiny_models.memory_compiler(True)
    prompts = [compiler.encode(request) for request in reader.asked]
    text = [compiler.encoder.tokenizer.decode(prompt.ids) for prompt in prompts]
    memory = text[0][: text[0].index("goal: ", text[0].index("because"))]
    assert len(prompts) > 2 and memory.count("<|image_pad|>") == 2 * 16 and all(t.startswith(memory) for t in text)
    of_m = [[png_bytes(image) for image in prompt.images[:2]] for prompt in prompts]
    shown = [Image.open(io.BytesIO(png)).convert("RGB") for entry in specs[0].memory for png in entry.images]
    assert of_m == [[png_bytes(image) for image in shown]] * len(of_m)
