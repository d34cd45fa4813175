"""Single tokens of generated homes: numbered places and things, scenes and words."""

from __future__ import annotations

from zoo.models import Lexicon
from zoo.words import PLACES, THINGS

RECEPTACLES = PLACES | {
    "cabinet": 27,
    "shelf": 13,
    "safe": 3,
    "garbagecan": 3,
    "ottoman": 3,
    "armchair": 3,
    "toilet": 3,
    "bed": 2,
    "sofa": 2,
    "sinkbasin": 2,
    "towelholder": 2,
    "tvstand": 1,
    "bathtubbasin": 1,
    "toaster": 1,
    "laundryhamper": 1,
    "paintinghanger": 1,
}
OBJECTS = sorted([*THINGS, "faucet", "papertowel"])
WORDS = """a an the some and or of it is was in on at to from with using no not nothing next you You your are see
facing middle room Looking quickly around Next arrive At go take put move open close opened closed clean heat cool
slice use examine look inventory help up down pick picked turn under two find first then there here because failed
Nothing happens hot cold cool clean sliced carrying Your task help This special about There what where which marked
view goal done now know note memory state did guide see soft system user assistant place found took checked holding
hand empty has have had plan plans look at desk lamp light examine went loop stuck again try object home FloorPlan
kitchen into looked in/on""".split()
SCENES = tuple(f"home {i}" for i in range(1, 65))
_NAMES = (
    *(f"{name} {i}" for name, count in RECEPTACLES.items() for i in range(1, count + 1)),
    *(f"{name} {i}" for name in OBJECTS for i in range(1, 4)),
    *SCENES,
)
LEXICON = Lexicon(
    pieces=(*_NAMES, *RECEPTACLES, *OBJECTS, *WORDS),
    scenes=SCENES,
    things=tuple(OBJECTS),
    goals=tuple(RECEPTACLES),
    places=tuple(f"{name} {i}" for name, count in RECEPTACLES.items() for i in range(1, min(count, 6) + 1)),
)
