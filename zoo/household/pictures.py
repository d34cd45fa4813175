"""Random lessons in reading pictures: the place that a picture marks, and the home that each of M's pictures shows.

Prompts are short and most answers are marks, since a base trained on the teacher's episodes, where one answer in a
hundred is a mark, did not learn which place is marked.
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
from lm.prompt import PromptPart
from memory.entry import MemoryEntry, Provenance
from memory.trajectory import png_bytes
from zoo.curriculum import FORMS, NOTHING, ROOM, Batch
from zoo.household.words import LEXICON
from zoo.lessons import Lesson, collate, dialogue_lesson, request_lesson


def picture_batch(backbone: Backbone, rng: random.Random, batch: int, views: bool) -> Batch:
    """Draw lessons about views without prompts, or about views and M's pictures after whole prompts."""
    draw = view_lesson if views else picture_lesson
    return collate(backbone, [draw(backbone, rng) for _ in range(batch)])


def view_lesson(backbone: Backbone, rng: random.Random) -> Lesson:
    """Draw a view without a prompt, from which a model learns marks in 100 to 200 steps, and ask for its mark."""
    mark = _mark(rng)
    view = [PromptPart(text="view: "), PromptPart(image=draw_room(_room(mark, rng), mark, rng))]
    return dialogue_lesson(backbone, view, [("what is marked", f" {mark or NOTHING}")])


def picture_lesson(backbone: Backbone, rng: random.Random) -> Lesson:
    """Draw one to five entries of a few homes, some with a picture, a goal and a view; ask for the goal's place in M's
    text and for the mark of each picture."""
    few = rng.randint(1, 3)
    pairs = list(product(rng.sample(LEXICON.scenes, few), rng.sample(LEXICON.things, few)))
    places = {pair: rng.choice(LEXICON.places) for pair in rng.sample(pairs, rng.randint(1, min(5, len(pairs))))}
    marks: dict[str, str] = {}  # by home
    entries = [_entry(scene, thing, place=place, marks=marks, rng=rng) for (scene, thing), place in places.items()]
    scene, thing = rng.choice(list(places)) if rng.random() < 0.5 else rng.choice(pairs)
    goal = f"in {scene}: put a {thing} in {rng.choice(LEXICON.goals)}"
    mark = _mark(rng)
    room = _room(mark, rng)
    seen = f"{ROOM} a {', a '.join(room)}."
    request = CompileRequest(
        goal, tuple(entries), state=BriefState(goal), observation=seen, image=draw_room(room, mark, rng)
    )
    questions = [("what is marked", mark), *((f"what is marked in {home}", place) for home, place in marks.items())]
    rng.shuffle(questions)
    asked = [("place", places.get((scene, thing), "")), *questions]
    return request_lesson(backbone, request, [(ask, f" {place or NOTHING}") for ask, place in asked])


def _entry(scene: str, thing: str, place: str, marks: dict[str, str], rng: random.Random) -> MemoryEntry:
    """Draw an entry; the first of a home may have a picture, and adds its mark to `marks`."""
    goal = f"in {scene}: put a {thing} in {rng.choice(LEXICON.goals)}"
    text, images = f"{goal}{FORMS[-1].format(scene=scene, thing=thing)} {place}", tuple[bytes, ...]()
    if scene not in marks and rng.random() < 0.7:
        marks[scene] = _mark(rng)
        images = (png_bytes(draw_room(_room(marks[scene], rng), marks[scene], rng)),)
    return MemoryEntry(
        f"{scene} {thing}", text, Provenance("", scene, goal=goal, split="", success=True, actions=()), images
    )


def draw_room(room: Sequence[str], mark: str, rng: random.Random) -> Image:
    """Draw a picture of a room with a mark ("": none), a few open places, and in half of the cases the agent."""
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
    """Draw the places of a room, including the marked one, in random order."""
    room = {*rng.sample(RECEPTACLE_NAMES, rng.randint(8, 14)), *filter(None, [mark])}
    return rng.sample(sorted(room), len(room))


def _mark(rng: random.Random) -> str:
    """Draw the place that a picture marks; "" (none) for one picture in four."""
    return "" if rng.random() < 0.25 else rng.choice(RECEPTACLE_NAMES)
