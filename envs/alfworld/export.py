"""Export generated games as ALFWorld's files, for TextWorld, alfworld and software built on them.

The export writes the problem (places, things, goal) and reads the PDDL domain and grammar from the installed alfworld
package, since they are its authors' work. It loses the picture, which TextWorld cannot show.
"""

import importlib.util
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from envs.alfworld.games import FOLDER, GOALS, load_game
from envs.base import EnvironmentFailure, Task
from envs.household import world
from envs.household.environment import HouseholdEnvironment
from envs.household.world import NOWHERE, Game, Goal, Item, Receptacle, bits

NO_ALFWORLD = "export reads the game's rules and sentences from the alfworld package, which is not installed: \
uv sync --extra alfworld"

# The domain mentions these types even if a home has none.
_ITEM_TYPES = ("knife", "butterknife")
_PLACE_TYPES = ("fridge", "microwave", "sink", "sinkbasin")


def export_split(
    environment: HouseholdEnvironment, split: str, out: str | os.PathLike[str], limit: int | None = None
) -> list[Path]:
    """Write the first `limit` games of a split (default: all) into OUT, which becomes an ALFWORLD_DATA folder.

    Returns:
        The games' folders OUT/json_2.1.1/SPLIT/TASK/TRIAL, which hold game.tw-pddl and traj_data.json.

    Raises:
        ValueError: the split is unknown, or alfworld's rules and sentences do not fit a game.
        FileExistsError: OUT has games of that split already.
        EnvironmentFailure: the alfworld package is not installed.
    """
    tasks = environment.tasks(split)[:limit]
    folder = Path(out) / FOLDER / split
    if folder.is_dir() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} holds games already: give another folder, or delete it first")
    written: list[Path] = []
    for task in tasks:
        environment.reset(task)
        goal, scene = environment.game.goal, int(task.data.get("scene", 0)) + 1
        data = export_game(environment.game, environment.expert())
        # As alfworld names them: task type, object, movable receptacle, place or lamp, number of the scene.
        name = f"{task.kind}-{goal.item_type}-None-{goal.receptacle_type or goal.lamp_type}-{scene}"
        trial = folder / name / f"trial_{task.id.partition('/')[2].replace('/', '_')}"
        trial.mkdir(parents=True)
        (trial / "game.tw-pddl").write_text(json.dumps(data), encoding="utf-8")
        (trial / "traj_data.json").write_text(json.dumps(_about(task, goal, scene), indent=1), encoding="utf-8")
        written.append(trial)
    return written


def export_game(game: Game, walkthrough: Sequence[str] | None) -> dict[str, Any]:
    """Return the content of a `game.tw-pddl`; `walkthrough` is a plan to the goal, None if there is none.

    Raises:
        ValueError: the game differs when read back, since its names, order or phrases are not alfworld's.
        EnvironmentFailure: the alfworld package is not installed.
    """
    domain, grammar = _rules()
    data = {
        "pddl_domain": domain,
        "grammar": grammar.replace("UNKNOWN GOAL", json.dumps(game.task)[1:-1]),
        "pddl_problem": _problem(game),
        "solvable": walkthrough is not None,
        "walkthrough": list(walkthrough or ()),
    }
    # The file's names of locations differ, but no text of alfworld 0.4 contains them.
    if replace(load_game(data), locations=game.locations) != game:
        raise ValueError(f"the game {game.task!r} cannot be written as an ALFWorld game: it differs when read back")
    return data


@lru_cache(maxsize=1)
def _rules() -> tuple[str, str]:
    """Read alfworld's domain and grammar without importing alfworld, which creates folders in the user's home."""
    spec = importlib.util.find_spec("alfworld")
    if spec is None or not spec.submodule_search_locations:
        raise EnvironmentFailure(NO_ALFWORLD)
    folder = Path(spec.submodule_search_locations[0]) / "data"
    try:
        domain, grammar = (folder / name for name in ("alfred.pddl", "alfred.twl2"))
        return domain.read_text(encoding="utf-8"), grammar.read_text(encoding="utf-8")
    except OSError as error:
        raise EnvironmentFailure(
            f"the installed alfworld has no {error.filename}: reinstall alfworld==0.4.2"
        ) from error


def _problem(game: Game) -> str:
    """Write the PDDL problem (objects, initial facts, goal) in lower case, as TextWorld shows it."""
    items, places = _identifiers(game.items), _identifiers(game.receptacles)
    locations = [f"loc_bar_{position:03}" for position in range(len(game.start.standing))]
    kinds = {  # declarations, by PDDL type
        "agent": ["agent1"],
        "object": items,
        "receptacle": places,
        "location": locations,
        "otype": sorted(
            {
                f"{kind}type"
                for kind in (*_ITEM_TYPES, *(item.type for item in game.items), *(kind for _, kind in game.can_contain))
            }
        ),
        "rtype": sorted(
            {
                f"{kind}type"
                for kind in (
                    *_PLACE_TYPES,
                    *(place.type for place in game.receptacles),
                    *(kind for kind, _ in game.can_contain),
                )
            }
        ),
    }
    declared = "\n".join(f"  {' '.join(names)} - {kind}" for kind, names in kinds.items() if names)
    facts = "\n".join(f"  ({fact})" for fact in _facts(game, items, places, locations))
    goal = game.goal
    wanted = GOALS[goal.kind].format(item=goal.item_type, place=goal.receptacle_type, lamp=goal.lamp_type)
    return (
        f"(define (problem household)\n(:domain alfred)\n(:objects\n{declared}\n)\n(:init\n{facts}\n)\n"
        f"(:goal (and {wanted}))\n)\n"
    )


def _identifiers(things: Sequence[Item] | Sequence[Receptacle]) -> list[str]:
    """Return identifiers in the things' order, which alfworld's demangler converts to "mug 2" and "sinkbasin 1"."""
    return [
        f"{thing.type.removesuffix('basin')}_bar_{position:03}" + f"_bar_{thing.type}" * thing.type.endswith("basin")
        for position, thing in enumerate(things)
    ]


def _facts(game: Game, items: list[str], places: list[str], locations: list[str]) -> Iterator[str]:
    start = game.start
    yield f"atlocation agent1 {locations[start.location]}"
    if start.held != NOWHERE:
        yield f"holds agent1 {items[start.held]}"
        yield "holdsany agent1"
    for place, kind in sorted(game.can_contain):
        yield f"cancontain {place}type {kind}type"
    for id_, receptacle in zip(places, game.receptacles, strict=True):
        yield f"receptacletype {id_} {receptacle.type}type"
        if receptacle.openable:
            yield f"openable {id_}"
        if receptacle.location != NOWHERE:
            yield f"receptacleatlocation {id_} {locations[receptacle.location]}"
    for id_, item in zip(items, game.items, strict=True):
        yield f"objecttype {id_} {item.type}type"
        yield from (f"{flag} {id_}" for flag in world.FLAGS if getattr(item, flag))
        if item.inside is not None:
            yield f"isreceptacleobject {id_}"
            yield from (f"inreceptacleobject {items[inner]} {id_}" for inner in item.inside)
    for place, mask in zip(places, start.contents, strict=True):
        yield from (f"inreceptacle {items[item]} {place}" for item in bits(mask))
    for location, mask in zip(locations, start.standing, strict=True):
        yield from (f"objectatlocation {items[item]} {location}" for item in bits(mask))
    yield from (f"opened {places[place]}" for place in bits(start.opened))
    for predicate, name in world.CONDITIONS.items():
        yield from (f"{predicate} {items[item]}" for item in bits(getattr(start, name)))


def _about(task: Task, goal: Goal, scene: int) -> dict[str, Any]:
    """Return the part of ALFRED's `traj_data.json` that alfworld and `games._task` read, and our `key`."""
    return {
        "task_type": task.kind,
        "task_id": task.id,
        "scene": {"floor_plan": task.scene, "scene_num": scene, "key": task.isolation.get("scene", (task.scene,))[0]},
        "pddl_params": {
            "object_target": goal.item_type,
            "parent_target": goal.receptacle_type,
            "toggle_target": goal.lamp_type,
            "mrecep_target": "",
            "object_sliced": False,
        },
        "turk_annotations": {"anns": [{"task_desc": task.goal}]},
    }
