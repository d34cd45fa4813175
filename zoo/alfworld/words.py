"""Single tokens of real ALFWorld: places, scenes, things without numbers, words and phrases."""

from __future__ import annotations

from dataclasses import replace

from zoo.curriculum import ROOM
from zoo.models import Lexicon
from zoo.words import PLACES, THINGS

LAMPS = "desklamp", "floorlamp"  # goals name them besides the thing to look at
WORDS = """a an the some and or of it is was in on at to from with using under no not nothing next You you your are put
two them find look examine clean heat cool hot take move open close use slice inventory help go turn carrying because
The failed memory goal done now note did guide see soft system user assistant maybe plan where who what which best place
places left for out here hand yes ask emission speaks names ruled used search elsewhere knows says other lamp""".split()
PHRASES = (
    "go to",
    ROOM,
    "You arrive at",
    "On the",
    "In it, you see",
    "is closed",
    "is open",
    "You open the",
    "You close the",
    "You pick up the",
    "from the",
    "You move the",
    "to the",
    "using the",
    "Nothing happens.",
    "You turn on the",
    "because in",
    "was in",
    "= no",
    "= maybe",
)
JOINTS = (", you see", ", and a", ", a", "\nsee:", "\ndid:", "\nguide:", "\nnote:", "\nnow:", "\nnext:", "\ndone:")
NUMBERS = tuple(f" {i}" for i in range(1, 10))  # of things; a place and its number are one token
SCENES = tuple(f"FloorPlan{room + i}" for room in (0, 200, 300, 400) for i in range(1, 31))
"""All 120 scenes, 108 of which have train games; random scene labels in training cover the others."""

_PLACES = tuple(f"{name} {i}" for name, count in PLACES.items() for i in range(1, count + 1))
LEXICON = Lexicon(
    pieces=(*_PLACES, *SCENES, *PLACES, *THINGS, *WORDS),
    scenes=SCENES,
    goals=tuple(PLACES),
    places=_PLACES,
    things=tuple(thing for thing in THINGS if thing not in LAMPS),
    phrases=(*PHRASES, *(f" {phrase}" for phrase in PHRASES), *JOINTS, *NUMBERS),
    names=r" ?FloorPlan\d+(?!\d)",
    numbered=tuple(PLACES),
    treatments={"heat": "microwave", "hot": "microwave", "cool": "fridge", "clean": "sinkbasin"},
)

COMMAND_WORDS = """unsearched searched holding hold after came first view so far known seen facing must be free hands
whether Next another thing things come because looked example none before""".split()
COMMAND_LEXICON = replace(LEXICON, pieces=(*LEXICON.pieces, *COMMAND_WORDS))
"""`LEXICON` with the words of commands' reasons and of raw entries, for compilers of level `command`."""
