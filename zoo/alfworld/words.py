"""What is one token in real ALFWorld: its places and scenes, its things without their number, the words of its
commands and answers, and the phrases that hold nothing to be chosen. (Counts are the highest of the 3,553 train games,
and one or two more.)"""

from __future__ import annotations

from zoo.curriculum import ROOM
from zoo.models import Lexicon

PLACES = {
    "cabinet": 28,
    "drawer": 28,
    "shelf": 15,
    "stoveburner": 6,
    "sidetable": 5,
    "countertop": 5,
    "diningtable": 4,
    "handtowelholder": 4,
    "desk": 3,
    "safe": 2,
    "garbagecan": 2,
    "dresser": 3,
    "ottoman": 2,
    "armchair": 4,
    "coffeetable": 3,
    "toilet": 2,
    "bed": 3,
    "sofa": 3,
    "sinkbasin": 3,
    "towelholder": 3,
    "toiletpaperhanger": 2,
    "cart": 2,
    "fridge": 2,
    "microwave": 2,
    "coffeemachine": 2,
    "tvstand": 2,
    "bathtubbasin": 2,
    "toaster": 2,
    "laundryhamper": 2,
    "paintinghanger": 2,
}
THINGS = """alarmclock apple baseballbat basketball bathtub blinds book boots bowl box bread butterknife candle cd
cellphone chair cloth creditcard cup curtains desklamp dishsponge egg floorlamp footstool fork glassbottle handtowel
houseplant kettle keychain knife ladle laptop laundryhamperlid lettuce lightswitch mirror mug newspaper painting pan
papertowelroll pen pencil peppershaker pillow plate plunger poster pot potato remotecontrol saltshaker scrubbrush
showerdoor showerglass sink soapbar soapbottle spatula spoon spraybottle statue stoveknob teddybear television
tennisracket tissuebox toiletpaper toiletpaperroll tomato towel vase watch wateringcan window winebottle""".split()
LAMPS = "desklamp", "floorlamp"  # which goals name beside the thing that is to be seen under them
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
"""All scenes that there are: 108 of them in train games, the others' labels are drawn for them in training."""

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
