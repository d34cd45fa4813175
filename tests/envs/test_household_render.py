"""The small picture: what it must show, and what it must not."""

from __future__ import annotations

import numpy as np
import pytest

from envs.household.environment import HouseholdEnvironment
from envs.household.render import AGENT, CELL, GRID, MARK, RECEPTACLE_NAMES, cells_of


@pytest.fixture(scope="module")
def env() -> HouseholdEnvironment:
    return HouseholdEnvironment(scenes={"a": 12})


def pixels(image: object) -> np.ndarray:
    return np.asarray(image)


def cell(picture: np.ndarray, name: str) -> np.ndarray:
    row, column = divmod(RECEPTACLE_NAMES.index(name), GRID)
    return picture[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL]


def count(picture: np.ndarray, colour: tuple[int, int, int]) -> int:
    return int((picture == colour).all(axis=-1).sum())


def test_only_the_visual_family_is_marked_and_only_where_the_item_is(env: HouseholdEnvironment) -> None:
    pictures: dict[str, set[bytes]] = {}
    for task in env.tasks("a"):
        picture = pixels(env.reset(task).image)
        assert picture.shape == (64, 64, 3) and picture.dtype == np.uint8
        if task.family == "text":
            assert count(picture, MARK) == 0
            continue
        assert env.marked_receptacle is not None
        marked = cell(picture, env.marked_receptacle)
        assert count(picture, MARK) == count(marked, MARK) == 4 * (CELL - 1)
        pictures.setdefault(task.scene, set()).add(picture.tobytes())
        held = env.game.items[env.game.items.index(next(i for i in env.game.items if i.type == task.data["item"]))]
        assert held.name in [env.game.items[i].name for i in _contents(env, env.marked_receptacle)]
    assert all(len(different) > 1 for different in pictures.values())


def _contents(env: HouseholdEnvironment, name: str) -> list[int]:
    index = [receptacle.name for receptacle in env.game.receptacles].index(name)
    return [i for i in range(len(env.game.items)) if env.state.contents[index] >> i & 1]


def test_every_receptacle_gives_another_picture_when_marked(env: HouseholdEnvironment) -> None:
    from envs.household.engine import Engine
    from envs.household.render import Renderer

    task = env.tasks("a")[0]
    env.reset(task)
    engine = Engine(env.game)
    renderer = Renderer(engine)
    marked = [pixels(renderer.draw(env.state, index)).tobytes() for index in range(len(env.game.receptacles))]
    plain = pixels(renderer.draw(env.state)).tobytes()
    assert len({*marked, plain}) == len(marked) + 1


def test_the_mark_follows_the_item(env: HouseholdEnvironment) -> None:
    task = next(task for task in env.tasks("a") if task.family == "visual")
    env.reset(task)
    for command in env.expert() or []:
        picture = pixels(env.step(command).observation.image)
        held = env.game.items[env.state.held].type == task.data["item"] if env.state.held >= 0 else False
        assert (count(picture, MARK) == 0) == held == (env.marked_receptacle is None)


def test_agent_and_open_doors_show(env: HouseholdEnvironment) -> None:
    env.reset(next(task for task in env.tasks("a") if task.family == "text"))
    shut = pixels(env.image())
    assert count(shut, AGENT) == 0
    there = pixels(env.step("go to fridge 1").observation.image)
    assert count(cell(there, "fridge 1"), AGENT) > 0 == count(cell(there, "microwave 1"), AGENT)
    opened = pixels(env.step("open fridge 1").observation.image)
    assert (cell(opened, "fridge 1") != cell(there, "fridge 1")).any()
    env.step("go to microwave 1")
    away = pixels(env.step("look").observation.image)
    assert (cell(away, "fridge 1") != cell(shut, "fridge 1")).any()  # still open, seen from elsewhere
    env.step("go to fridge 1")
    closed = pixels(env.step("close fridge 1").observation.image)
    assert (closed == there).all()


def test_things_show_only_at_the_agents_place(env: HouseholdEnvironment) -> None:
    for task in env.tasks("a")[:12]:
        env.reset(task)
        before = pixels(env.image())
        for index, receptacle in enumerate(env.game.receptacles):
            if receptacle.openable or not env.state.contents[index]:
                continue
            there = pixels(env.step(f"go to {receptacle.name}").observation.image)
            mine = cell(there, receptacle.name)
            plain = cell(before, receptacle.name)
            other = (mine != plain).any(axis=-1) & ~(mine == AGENT).all(axis=-1)
            assert other.sum() >= 2
            elsewhere = there.copy()
            cell(elsewhere, receptacle.name)[:] = plain
            assert (elsewhere == before).all()


def test_size_and_absence() -> None:
    drawn = HouseholdEnvironment(scenes={"a": 1})
    image = drawn.reset(drawn.tasks("a")[0]).image
    assert image is not None and image.size == (64, 64) and image.mode == "RGB"
    none = HouseholdEnvironment(scenes={"a": 1}, images=False)
    assert none.reset(none.tasks("a")[0]).image is None


def test_names_of_real_games_get_free_cells() -> None:
    names = [f"cabinet {number}" for number in range(1, 9)] + ["toilet 1", "fridge 1"]
    cells = cells_of(names)
    assert len(cells) == len(names) == len(set(cells.values()))
    assert cells[0] == 0 and cells[9] == RECEPTACLE_NAMES.index("fridge 1")
    assert all(cells[index] >= len(RECEPTACLE_NAMES) for index in (6, 7, 8))
    crowded = cells_of([f"drawer {number}" for number in range(1, 80)])
    assert len(crowded) == 64 - len(RECEPTACLE_NAMES) + 6 and max(crowded.values()) == 63
