"""Generator of homes whose layout persists, and of tasks in them.

Seed, split and index determine a home: its receptacles and the places of its fixed items. Three families of tasks
differ in the source of an item's place: "text", a fixed item that memory's texts name; "visual", a wandering item,
which the view marks; "remembered", a fixed item that only the views of earlier episodes mark.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from envs.base import EnvironmentFailure, Position, Task
from envs.household import world
from envs.household.sequences import WORLD, with_goal
from envs.household.vocabulary import CAN_CONTAIN, ITEM_TYPES, LAMP, LAMP_PLACES, OPENABLE, PHRASES, PLACES, ItemType
from envs.household.world import CLEAN, COOL, HEAT, KINDS, LOOK, SIMPLE, TWO, Game, Goal, Item, Receptacle, State

DEFAULT_KINDS = (SIMPLE, CLEAN, HEAT, COOL)
EXPERIENCE = "_experience"
SCENE_LABELS = 64  # "home 1" to "home 64"

_ALWAYS: tuple[str, ...] = ("microwave", "fridge", "sinkbasin")
_TREATED_AT = {CLEAN: "sinkbasin", HEAT: "microwave", COOL: "fridge"}
# Fewer item types can be heated than placed: weights balance the kinds.
_KIND_WEIGHT = {SIMPLE: 1.0, CLEAN: 1.5, HEAT: 3.0, COOL: 2.0, LOOK: 1.5, TWO: 1.5}
_HOMES_KEPT = 4096
_LITTLE = 1e-9  # tolerance for the sum of shares
_SIDE = 6  # side of a home's room, metres
_FEWEST_PLACES = 4  # minimum receptacles that may hold an item, so that memory is useful

Errand = tuple[str, str]  # (task type, receptacle type to bring the item to, "" for look_at_obj_in_light)


@dataclass(frozen=True)
class Home:
    """The persistent part of a scene: its receptacles and the places of its fixed items."""

    receptacles: tuple[Receptacle, ...]
    fixed: Mapping[str, tuple[int, ...]]  # item type -> receptacles (two for a pair)
    wandering: tuple[str, ...]
    lamp: int | None  # the lamp's receptacle
    seen: tuple[str, int] | None = None  # the item of remembered tasks, and its receptacle


@dataclass(eq=False)
class Generator:
    """Generator of all splits' homes, tasks and games. Raises: ValueError, for invalid settings."""

    seed: int
    scenes: Mapping[str, int]  # number of homes by split
    visual_share: float  # of the tasks
    remembered_share: float  # of the tasks
    fixed_objects: int  # items per home
    wandering_objects: int
    kinds: tuple[str, ...]

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.kinds) - set(KINDS)):
            raise ValueError(f"unknown task types {', '.join(unknown)}; known are {', '.join(KINDS)}")
        if not self.kinds:
            raise ValueError("kinds is empty: set at least one task type")
        shares = {"visual_share": self.visual_share, "remembered_share": self.remembered_share}
        if wrong := [f"{name} ({share})" for name, share in shares.items() if not 0 <= share <= 1]:
            raise ValueError(f"{', '.join(wrong)} must be from 0 to 1")
        if sum(shares.values()) > 1 + _LITTLE:
            raise ValueError(f"{' and '.join(shares)} must not sum to more than 1: {list(shares.values())}")
        if self.fixed_objects < 1 or self.wandering_objects < 0:
            raise ValueError("fixed_objects must be at least 1 and wandering_objects at least 0")
        if self.visual_share > 0 and (self.wandering_objects < 1 or set(self.kinds) == {TWO}):
            raise ValueError(
                "visual tasks need wandering_objects of at least 1 and a task type other than "
                f"{TWO}; or set visual_share to 0"
            )
        if self.remembered_share > 0 and set(self.kinds) == {TWO}:
            raise ValueError(f"remembered tasks need a task type other than {TWO}; or set remembered_share to 0")
        if clash := [name for name in self.scenes if name.endswith(EXPERIENCE)]:
            raise ValueError(f"a scene split may not end in {EXPERIENCE!r}: {', '.join(clash)}")
        self._homes: dict[tuple[int, str, int], Home] = {}

    # Tasks -----------------------------------------------------------------------------------------------------

    def tasks(self, split: str) -> list[Task]:
        """List a split. Raises: ValueError, if it is unknown."""
        layout = split.removesuffix(EXPERIENCE)
        splits = [name + suffix for name in self.scenes for suffix in ("", EXPERIENCE)]
        if split not in splits:
            raise ValueError(f"no split {split!r}; there are {', '.join(splits)}")
        per_scene = [self.scene_tasks(layout, index) for index in range(self.scenes[layout])]
        if split != layout:
            return [task for experience, _ in per_scene for task in experience]
        tasks = [task for _, evaluation in per_scene for task in evaluation]
        _rng(self.seed, layout, "order").shuffle(tasks)
        return tasks

    def scene_tasks(self, layout: str, index: int) -> tuple[list[Task], list[Task]]:
        """Return a home's (tasks that fill the memory, tasks to train or evaluate on)."""
        home, rng = self._home(self.seed, layout, index), _rng(self.seed, layout, index, "tasks")
        experience, evaluation = list[Task](), list[Task]()
        for item, places in home.fixed.items():
            errands = self._errands(home, item, places)
            first = _draw(rng, errands)
            second = _draw(rng, [errand for errand in errands if errand != first] or errands)
            experience.append(
                self._task(
                    rng,
                    layout + EXPERIENCE,
                    index=index,
                    number=len(experience),
                    item=item,
                    errand=first,
                    family="text",
                )
            )
            if self._text_share:
                evaluation.append(
                    self._task(
                        rng, layout, index=index, number=len(evaluation), item=item, errand=second, family="text"
                    )
                )
        for turn in range(self._count(self.visual_share)):
            item = home.wandering[turn % len(home.wandering)]
            errand = _draw(rng, self._errands(home, item, ()))
            evaluation.append(
                self._task(rng, layout, index=index, number=len(evaluation), item=item, errand=errand, family="visual")
            )
        for item, place in [home.seen] * self._count(self.remembered_share) if home.seen else ():
            errand = _draw(rng, self._errands(home, item, (place,)))
            evaluation.append(
                self._task(
                    rng, layout, index=index, number=len(evaluation), item=item, errand=errand, family="remembered"
                )
            )
        return experience, evaluation

    def worlds(self, split: str) -> list[Task]:
        """Return one task for each home of a split."""
        homes = dict[str, Task]()
        for task in self.tasks(split):
            homes.setdefault(task.data["scene"], task)
        return sorted(homes.values(), key=lambda task: int(task.data["scene"]))

    @property
    def _text_share(self) -> float:
        share = 1 - self.visual_share - self.remembered_share
        return share if share > _LITTLE else 0.0

    def _count(self, share: float) -> int:
        """Return a home's number of tasks of a share, relative to one text task per fixed item."""
        return round(self.fixed_objects * share / (self._text_share or 1))

    def _task(
        self, rng: random.Random, split: str, index: int, number: int, item: str, errand: Errand, family: str
    ) -> Task:
        kind, place = errand
        layout, id_ = split.removesuffix(EXPERIENCE), f"{split}/home-{index + 1}/{number}"
        goal, scene = rng.choice(PHRASES[kind]).format(item=item, place=place), f"home {index % SCENE_LABELS + 1}"
        data = {"seed": str(self.seed), "layout": layout, "scene": str(index), "item": item, "receptacle": place}
        # A split and its experience share homes; other splits have other homes.
        home, task = f"seed-{self.seed}/{layout}/home-{index + 1}", f"seed-{self.seed}/{id_}"
        return Task(
            id_,
            goal,
            scene=scene,
            split=split,
            kind=kind,
            family=family,
            data=data,
            isolation={"scene": (home,), "task": (task,)},
        )

    def _errands(self, home: Home, item: str, places: tuple[int, ...]) -> tuple[Errand, ...]:
        """List the errands for an item at `places` (wandering: ())."""
        kinds: tuple[str, ...] = (TWO,)
        if len(places) != 2:  # one thing
            kinds = tuple(k for k in self.kinds if k != TWO and (k != LOOK or home.lamp is not None))
        sources = tuple(sorted({home.receptacles[place].type for place in places}))
        return _possible_errands(item, kinds, sources, frozenset(r.type for r in home.receptacles))

    # Homes -----------------------------------------------------------------------------------------------------

    def _home(self, seed: int, layout: str, index: int) -> Home:
        key = (seed, layout, index)
        if key not in self._homes:
            # Redraw a home that has too few items with enough errands.
            draws = (self._try_home(_rng(*key, "home", attempt)) for attempt in range(200))
            home = next(filter(None, draws), None)
            if home is None:
                raise ValueError(
                    f"no home has {self.fixed_objects} fixed and {self.wandering_objects} wandering items for the task "
                    f"types {', '.join(self.kinds)}: ask for fewer items or more task types"
                )
            if len(self._homes) >= _HOMES_KEPT:
                self._homes.clear()
            self._homes[key] = replace(home, receptacles=_positioned(home.receptacles, _rng(*key, "positions")))
        return self._homes[key]

    def _try_home(self, rng: random.Random) -> Home | None:
        receptacles = _draw_receptacles(rng)
        lamp = None
        if LOOK in self.kinds:
            lamp = rng.choice([i for i, r in enumerate(receptacles) if r.type in LAMP_PLACES] or [None])
        bare = Home(receptacles, {}, (), lamp)
        items = [item for item in self._shuffled_items(rng) if len(_fitting(receptacles, item)) >= _FEWEST_PLACES]
        fixed = self._place_fixed(rng, bare, items)
        # Without visual tasks, wandering items need no errands.
        possible = [i for i in items if i not in fixed and (self.visual_share == 0 or self._errands(bare, i, ()))]
        wandering = possible[: self.wandering_objects]
        if len(fixed) < self.fixed_objects or len(wandering) < self.wandering_objects:
            return None
        home = Home(receptacles, fixed, tuple(wandering), lamp)
        if not self.remembered_share:
            return home
        seen = self._draw_seen(rng, home, [item for item in items if item not in fixed and item not in wandering])
        return seen and replace(home, seen=seen)

    def _draw_seen(self, rng: random.Random, home: Home, items: list[str]) -> tuple[str, int] | None:
        """Draw an item and its place; None if no item has errands at every place that may hold it."""
        for item in items:
            places = _fitting(home.receptacles, item)
            if all(self._errands(home, item, (place,)) for place in places):
                return item, rng.choice(places)
        return None

    def _place_fixed(self, rng: random.Random, home: Home, items: list[str]) -> dict[str, tuple[int, ...]]:
        """Place the first `items` that have enough errands; with TWO, the very first in pairs."""
        pairs = 0
        if TWO in self.kinds:
            pairs = self.fixed_objects if self.kinds == (TWO,) else max(1, round(self.fixed_objects / len(self.kinds)))
        # A single thing that can only be looked at has no second errand.
        only_looked_at = set(self.kinds) <= {LOOK, TWO}
        # Count appliances as used once: every home has them and most food fits, so they would dominate.
        used = Counter(_ALWAYS)
        fixed: dict[str, tuple[int, ...]] = {}
        for item in items:
            if len(fixed) == self.fixed_objects:
                break
            # Least used kinds of receptacles first, so that not all things are in cabinets.
            fitting = _fitting(home.receptacles, item)
            rng.shuffle(fitting)
            fitting.sort(key=lambda place: used[home.receptacles[place].type])
            places = tuple(fitting[: 2 if len(fixed) < pairs else 1])
            if len(self._errands(home, item, places)) >= (1 if only_looked_at and len(places) == 1 else 2):
                fixed[item] = places
                used.update(home.receptacles[place].type for place in places)
        return fixed

    def _shuffled_items(self, rng: random.Random) -> list[str]:
        """Shuffle the item types; types of many task types tend to come first, since most can only be carried."""

        def rank(item: str) -> float:
            suited = sum(_can_be(ITEM_TYPES[item], kind) for kind in self.kinds)
            return rng.random() ** (1 / max(1, suited) ** 2)

        return sorted(ITEM_TYPES, key=rank, reverse=True)

    # Games -----------------------------------------------------------------------------------------------------

    def game(self, task: Task) -> tuple[Game, int | None]:
        """Return a task's game, and the item that pictures mark: a visual task's, or in experience the remembered
        one."""
        try:
            seed, layout, index = int(task.data["seed"]), task.data["layout"], int(task.data["scene"])
            target, destination = task.data["item"], task.data["receptacle"]
        except KeyError as missing:
            raise EnvironmentFailure(
                f"task {task.id} is no task of a generated home: its data has no {missing}"
            ) from None
        home = self._home(seed, layout, index)
        seen, sequence = home.seen[0] if home.seen else None, task.data.get(WORLD)
        if sequence is None and target not in home.fixed and target not in home.wandering and target != seen:
            raise EnvironmentFailure(
                f"task {task.id} needs a {target}, which its home does not have: the task was "
                "created with another number of items or other task types"
            )
        rng = _rng(seed, sequence or task.id, "episode")
        placed: list[tuple[str, int, int]] = [  # (type, number, receptacle)
            (item, number, place) for item, places in home.fixed.items() for number, place in enumerate(places, 1)
        ]
        for item in home.wandering:
            fitting = _fitting(home.receptacles, item)
            if item == target and sequence is None:
                fitting = [i for i in fitting if home.receptacles[i].type != destination]
            placed.append((item, 1, rng.choice(fitting)))
        if home.seen is not None:
            placed.append((home.seen[0], 1, home.seen[1]))
        if home.lamp is not None:
            placed.append((LAMP, 1, home.lamp))
        placed.sort(key=lambda entry: (entry[0], -entry[1]))  # ALFWorld's order: by type, highest number first
        items = tuple(_item(kind, number) for kind, number, _ in placed)
        goal = Goal(task.kind, target, destination, LAMP if task.kind == LOOK else "")
        start = _start(home, [place for *_, place in placed])
        reachable = tuple(_front(r.position) for r in home.receptacles if r.position)
        game = Game(
            home.receptacles,
            items,
            start=start,
            goal=goal,
            task=task.goal,
            can_contain=CAN_CONTAIN,
            reachable=reachable,
        )
        game = with_goal(game, task)
        shown = target if task.family == "visual" else seen if task.split.endswith(EXPERIENCE) else None
        return game, next((i for i, item in enumerate(items) if item.type == shown), None)


def _rng(*name: object) -> random.Random:
    """Return the random generator of a name."""
    digest = hashlib.sha256("/".join(map(str, name)).encode()).digest()
    return random.Random(int.from_bytes(digest[:8], "big"))


def _fitting(receptacles: tuple[Receptacle, ...], item: str) -> list[int]:
    """Return the receptacles that may hold an item of this type."""
    places = ITEM_TYPES[item].places
    return [index for index, receptacle in enumerate(receptacles) if receptacle.type in places]


def _draw_receptacles(rng: random.Random) -> tuple[Receptacle, ...]:
    """Draw 11 to 14 receptacles, numbered from 1 within their type, in ALFWorld's order."""
    counts = dict.fromkeys(_ALWAYS, 1)
    pool = [kind for kind in Counter(PLACES).elements() if kind not in _ALWAYS]
    for kind in rng.sample(pool, rng.randint(11, 14) - len(_ALWAYS)):
        counts[kind] = counts.get(kind, 0) + 1
    names = [(kind, number) for kind in sorted(counts) for number in range(counts[kind], 0, -1)]
    return tuple(Receptacle(f"{kind} {number}", kind, kind in OPENABLE, at) for at, (kind, number) in enumerate(names))


def _positioned(receptacles: tuple[Receptacle, ...], rng: random.Random) -> tuple[Receptacle, ...]:
    """Place each receptacle in another square of the room, in metres."""
    squares = rng.sample([(x, z) for x in range(_SIDE) for z in range(_SIDE)], len(receptacles))
    return tuple(
        replace(r, position=(round(x + rng.random() / 2, 2), round(rng.random(), 2), round(z + rng.random() / 2, 2)))
        for r, (x, z) in zip(receptacles, squares, strict=True)
    )


def _front(position: Position) -> Position:
    """Return the agent's position for using a position: on the floor, on the side of the room's middle."""
    x, _, z = position
    return (round(x + (0.5 if x < _SIDE / 2 else -0.5), 2), 0.0, z)


@lru_cache(maxsize=65536)
def _possible_errands(
    item: str, kinds: tuple[str, ...], sources: tuple[str, ...], types: frozenset[str]
) -> tuple[Errand, ...]:
    """List errands for an item type, to any other kind of place than its own."""
    kind_of_item = ITEM_TYPES[item]
    errands: list[Errand] = []
    for kind in kinds:
        if kind == LOOK:
            errands.append((LOOK, ""))
        elif _can_be(kind_of_item, kind):
            excluded = {*sources, _TREATED_AT.get(kind)}
            errands += [(kind, place) for place in sorted(kind_of_item.places & types) if place not in excluded]
    if not sources:  # a wandering item must have another place to start from
        errands = [errand for errand in errands if kind_of_item.places & types - {errand[1]}]
    return tuple(errands)


def _can_be(item: ItemType, kind: str) -> bool:
    return kind not in world.TREATMENTS or item.flags[f"{world.TREATMENTS[kind]}able"]


def _draw(rng: random.Random, errands: Sequence[Errand]) -> Errand:
    """Draw one errand: the task type by weight, then the destination."""
    kinds = sorted({kind for kind, _ in errands})
    kind = rng.choices(kinds, [_KIND_WEIGHT[kind] for kind in kinds])[0]
    return rng.choice([errand for errand in errands if errand[0] == kind])


def _item(kind: str, number: int) -> Item:
    if kind == LAMP:
        return Item(f"{kind} {number}", kind, pickupable=False, toggleable=True)
    return Item(f"{kind} {number}", kind, inside=None, **ITEM_TYPES[kind].flags)


def _start(home: Home, places: list[int]) -> State:
    """Return a start with all closed, the agent in the room's middle, and item i in receptacle places[i]."""
    count = len(home.receptacles)
    state = State.empty(location=count, receptacles=count, locations=count + 1)
    for item, place in enumerate(places):
        state.contents[place] |= 1 << item
        state.standing[home.receptacles[place].location] |= 1 << item
    return state
