"""Lessons in reading pictures, drawn at random: which place a picture marks, and which of M's pictures is whose.

In a teacher's episodes one answer of a hundred is about a mark, and a base that met marks there alone told a marked
view from an unmarked one, and not the place (28 % of 384, after 850 steps). Here prompts are short, and most answers
are.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

from PIL.Image import Image

from compiler.brief_state import BriefState
from compiler.records import CompileRequest
from envs.household.render import RECEPTACLE_NAMES, cells_of, draw_agent, draw_mark, draw_open, floor_plan, picture
from lm.backbone import Backbone
from lm.prompt import Part
from memory.entry import MemoryEntry, Provenance
from memory.trajectory import png_bytes
from zoo import lessons as shared
from zoo.curriculum import FORMS, NOTHING, ROOM, Batch
from zoo.household.words import LEXICON
from zoo.lessons import Lesson, collate


def picture_batch(backbone: Backbone, rng: random.Random, batch: int, views: bool) -> Batch:
    """Draw fresh lessons: about nothing but views, or about views and M's pictures behind whole prompts."""
    draw = view_lesson if views else picture_lesson
    return collate(backbone, [draw(backbone, rng) for _ in range(batch)])


def view_lesson(backbone: Backbone, rng: random.Random) -> Lesson:
    """Draw a view with nothing around it, and ask what it marks. Reading marks forms here in a hundred steps or two;
    behind whole prompts it did not begin to in as many (measured)."""
    mark = _mark(rng)
    view = [Part(text="view: "), Part(image=drawn(_room(mark, rng), mark, rng))]
    return shared.questions_about(backbone, view, [("what is marked", f" {mark or NOTHING}")])


def picture_lesson(backbone: Backbone, rng: random.Random) -> Lesson:
    """Draw one to five entries of a few homes, of which some have a picture, a goal and a view; ask for the goal's
    place, as M's text tells it, and for what is marked in each picture."""
    few = rng.randint(1, 3)
    pairs = list(product(rng.sample(LEXICON.scenes, few), rng.sample(LEXICON.things, few)))
    told = {pair: rng.choice(LEXICON.places) for pair in rng.sample(pairs, rng.randint(1, min(5, len(pairs))))}
    marks: dict[str, str] = {}  # by home
    entries = [_entry(scene, thing, place, marks, rng) for (scene, thing), place in told.items()]
    scene, thing = rng.choice(list(told)) if rng.random() < 0.5 else rng.choice(pairs)
    goal = f"in {scene}: put a {thing} in {rng.choice(LEXICON.goals)}"
    mark = _mark(rng)
    room = _room(mark, rng)
    seen = f"{ROOM} a {', a '.join(room)}."
    request = CompileRequest(goal, tuple(entries), BriefState(goal), seen, drawn(room, mark, rng))
    talk = [("what is marked", mark), *((f"what is marked in {home}", place) for home, place in marks.items())]
    rng.shuffle(talk)
    asked = [("place", told.get((scene, thing), "")), *talk]
    return shared.questions(backbone, request, [(ask, f" {place or NOTHING}") for ask, place in asked])


def _entry(scene: str, thing: str, place: str, marks: dict[str, str], rng: random.Random) -> MemoryEntry:
    """Write an entry; the first of a home may have a picture, and what it marks is added to `marks`."""
    goal = f"in {scene}: put a {thing} in {rng.choice(LEXICON.goals)}"
    text, images = f"{goal}{FORMS[-1].format(scene=scene, thing=thing)} {place}", tuple[bytes, ...]()
    if scene not in marks and rng.random() < 0.7:
        marks[scene] = _mark(rng)
        images = (png_bytes(drawn(_room(marks[scene], rng), marks[scene], rng)),)
    return MemoryEntry(f"{scene} {thing}", text, Provenance("", scene, goal, "", True, ()), images)


def drawn(room: Sequence[str], mark: str, rng: random.Random) -> Image:
    """Draw a room's places, the one that is marked ("" for none), a few opened, and half the time the agent."""
    cells = dict(zip(room, cells_of(list(room)).values(), strict=True))
    pixels = floor_plan({cell: name.split()[0] for name, cell in cells.items()})
    for name in rng.sample(list(room), rng.randint(0, 2)):
        draw_open(pixels, cells[name])
    if rng.random() < 0.5:
        colours = [(rng.randrange(256), rng.randrange(256), rng.randrange(128)) for _ in range(rng.randint(0, 3))]
        draw_agent(pixels, cells[rng.choice(room)], colours)
    if mark:
        draw_mark(pixels, cells[mark])
    return picture(pixels)


def _room(mark: str, rng: random.Random) -> list[str]:
    """Draw the places of a room, in random order, with the one that is marked."""
    room = {*rng.sample(RECEPTACLE_NAMES, rng.randint(8, 14)), *filter(None, [mark])}
    return rng.sample(sorted(room), len(room))


def _mark(rng: random.Random) -> str:
    """Draw the place that a picture marks; "" for none, of one picture in four."""
    return "" if rng.random() < 0.25 else rng.choice(RECEPTACLE_NAMES)
