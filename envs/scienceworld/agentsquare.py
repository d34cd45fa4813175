"""The 90 task variations, of 16 types, that AgentSquare evaluates; its goals and subgoals are not redistributed."""

_FIRST, _LATER, _LAST = (0, 1, 2), (5, 6, 7), (20, 21, 22)

VARIATIONS: dict[str, tuple[int, ...]] = {
    "boil": (*_LATER, 8),
    "change-the-state-of-matter-of": (*_LATER, 8),
    "chemistry-mix": _LATER,
    "chemistry-mix-paint-secondary-color": _LATER,
    "chemistry-mix-paint-tertiary-color": _LATER,
    "find-animal": (*_LATER, *_LAST),
    "find-living-thing": (*_LATER, *_LAST),
    "find-non-living-thing": (*_LATER, *_LAST),
    "freeze": (6,),
    "identify-life-stages-1": (*_FIRST, 6, 7),
    "lifespan-longest-lived": (*_FIRST, *_LATER, *_LAST),
    "lifespan-longest-lived-then-shortest-lived": (*_FIRST, *_LATER, *_LAST),
    "lifespan-shortest-lived": (*_FIRST, *_LATER, *_LAST),
    "measure-melting-point-known-substance": (*_FIRST, *_LATER, 20, 21),
    "measure-melting-point-unknown-substance": (*_FIRST, *_LATER),
    "use-thermometer": (*_FIRST, *_LATER, 21, 22),
}
