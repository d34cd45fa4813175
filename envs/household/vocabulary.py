"""Vocabulary of generated homes: item types with their flags and the places that may hold them, as in ALFWorld."""

from collections.abc import Mapping
from dataclasses import dataclass

OPENABLE = frozenset({"cabinet", "drawer", "fridge", "microwave", "safe"})
# Maximum number of receptacles of each type, in the order of their cells in the picture.
PLACES = {"cabinet": 6, "drawer": 6, "shelf": 4, "countertop": 3, "sidetable": 2} | dict.fromkeys(
    (
        "microwave",
        "fridge",
        "sinkbasin",
        "diningtable",
        "desk",
        "dresser",
        "coffeetable",
        "bed",
        "sofa",
        "armchair",
        "safe",
        "garbagecan",
        "cart",
        "ottoman",
        "tvstand",
        "coffeemachine",
    ),
    1,
)


@dataclass(frozen=True, slots=True)
class ItemType:
    """A portable kind of thing."""

    name: str
    flags: Mapping[str, bool]  # of an `Item`
    places: frozenset[str]  # receptacle types that can contain it


_KITCHEN = "cabinet countertop diningtable fridge microwave shelf sidetable sinkbasin"
_FOOD = "countertop diningtable fridge garbagecan microwave sidetable sinkbasin"
_CUTLERY = "countertop diningtable drawer sidetable sinkbasin"
_SPICE = "cabinet countertop diningtable drawer shelf sidetable"
_POCKET = "armchair coffeetable countertop desk diningtable drawer dresser ottoman safe shelf sidetable sofa"
_PAPER = "coffeetable countertop desk diningtable drawer dresser garbagecan shelf sidetable"
_BATH = "cabinet cart countertop diningtable drawer garbagecan shelf sidetable"
_ORNAMENT = "coffeetable countertop desk diningtable dresser safe shelf sidetable"
_LOUNGE = "armchair coffeetable diningtable drawer dresser ottoman shelf sidetable sofa"
_SEAT = "armchair bed coffeetable countertop desk diningtable dresser ottoman sidetable sofa"

_FLAGS = {"c": "cleanable", "h": "heatable", "f": "coolable", "s": "sliceable"}  # f: fits into the fridge
# name: (flags, places)
_TABLE = {
    "alarmclock": ("", "countertop desk diningtable dresser shelf sidetable"),
    "apple": ("chfs", _FOOD),
    "book": ("", f"{_SEAT} cabinet drawer shelf"),
    "bowl": ("cf", f"{_KITCHEN} coffeetable desk dresser"),
    "box": ("", "armchair cabinet coffeetable desk diningtable dresser ottoman shelf sidetable sofa"),
    "bread": ("hfs", "countertop diningtable fridge garbagecan microwave sidetable"),
    "butterknife": ("c", _CUTLERY),
    "candle": ("", "cabinet cart coffeetable countertop diningtable drawer dresser shelf sidetable"),
    "cd": ("", "cabinet countertop desk diningtable drawer dresser garbagecan safe shelf sidetable"),
    "cellphone": ("", f"{_POCKET} bed"),
    "cloth": ("c", f"{_BATH} armchair desk dresser sinkbasin"),
    "creditcard": ("", _POCKET),
    "cup": ("chf", _KITCHEN),
    "dishsponge": ("c", f"{_BATH} sinkbasin"),
    "egg": ("chfs", _FOOD),
    "fork": ("c", _CUTLERY),
    "glassbottle": ("", "cabinet countertop diningtable fridge microwave shelf sinkbasin"),
    "kettle": ("c", "cabinet countertop diningtable shelf sidetable sinkbasin"),
    "keychain": ("", _POCKET),
    "knife": ("c", _CUTLERY),
    "ladle": ("c", "cabinet countertop diningtable drawer sinkbasin"),
    "laptop": ("", _SEAT),
    "lettuce": ("cfs", "countertop diningtable fridge garbagecan sidetable sinkbasin"),
    "mug": ("chf", f"{_KITCHEN} coffeemachine desk dresser"),
    "newspaper": ("", f"{_LOUNGE} cabinet garbagecan"),
    "pan": ("cf", "cabinet countertop diningtable fridge sidetable sinkbasin"),
    "pen": ("", _PAPER),
    "pencil": ("", _PAPER),
    "peppershaker": ("", _SPICE),
    "pillow": ("", "armchair bed ottoman sofa"),
    "plate": ("chf", f"{_KITCHEN} coffeetable dresser"),
    "pot": ("cf", "cabinet countertop diningtable fridge shelf sidetable sinkbasin"),
    "potato": ("chfs", _FOOD),
    "remotecontrol": ("", f"{_LOUNGE} countertop desk"),
    "saltshaker": ("", _SPICE),
    "soapbar": ("c", "cabinet cart countertop drawer garbagecan shelf sidetable sinkbasin"),
    "soapbottle": ("", _BATH),
    "spatula": ("c", _CUTLERY),
    "spoon": ("c", _CUTLERY),
    "spraybottle": ("", f"{_BATH} dresser"),
    "statue": ("", _ORNAMENT),
    "tissuebox": ("", f"{_BATH} coffeetable desk dresser tvstand"),
    "tomato": ("chfs", _FOOD),
    "vase": ("", f"{_ORNAMENT} cabinet"),
    "watch": ("", "coffeetable desk diningtable drawer dresser shelf sidetable"),
    "winebottle": ("f", "cabinet countertop diningtable fridge garbagecan shelf sidetable"),
}

ITEM_TYPES: dict[str, ItemType] = {
    name: ItemType(name, {flag: mark in flags for mark, flag in _FLAGS.items()}, frozenset(places.split()))
    for name, (flags, places) in _TABLE.items()
}

# Colour and group of things, which describe them without their name.
_GROUPS = {
    "food": "red apple, brown bread, white egg, green lettuce, brown potato, red tomato",
    "dish": "white bowl, blue cup, blue mug, white plate",
    "cutlery": "silver butterknife, silver fork, silver knife, silver ladle, black spatula, silver spoon",
    "cookware": "black kettle, black pan, silver pot",
    "bottle": "green glassbottle, green winebottle, white soapbottle, blue spraybottle",
    "device": "black alarmclock, black cellphone, silver laptop, black remotecontrol, silver watch",
    "stationery": "blue book, white newspaper, blue pen, yellow pencil",
    "ornament": "white candle, white statue, blue vase",
    "washing thing": "white cloth, yellow dishsponge, white soapbar",
    "spice": "black peppershaker, white saltshaker",
}
TRAITS: dict[str, tuple[str, str]] = {
    thing: (colour, group)
    for group, things in _GROUPS.items()
    for colour, thing in (each.split() for each in things.split(", "))
}
"""Colour and group by item type, for types that have a group."""

# Number of ALFWorld's 3,553 train games by the goal's item type.
GOAL_COUNTS: dict[str, int] = dict(
    mug=220,
    cup=145,
    potato=136,
    egg=126,
    tomato=124,
    apple=122,
    book=114,
    cellphone=113,
    spraybottle=108,
    bowl=106,
    soapbar=106,
    plate=97,
    soapbottle=95,
    creditcard=90,
    keychain=90,
    cd=89,
    candle=84,
    alarmclock=84,
    lettuce=81,
    pan=81,
    pot=76,
    remotecontrol=76,
    pencil=75,
    pillow=71,
    newspaper=67,
    pen=66,
    cloth=63,
    kettle=62,
    bread=58,
    tissuebox=52,
    laptop=52,
    statue=43,
    ladle=42,
    dishsponge=39,
    knife=36,
    spatula=35,
    peppershaker=34,
    butterknife=32,
    spoon=31,
    box=31,
    watch=31,
    winebottle=29,
    saltshaker=28,
    vase=28,
    fork=25,
    glassbottle=12,
)

LAMP = "desklamp"
LAMP_PLACES = frozenset({"desk", "dresser", "shelf", "sidetable", "diningtable", "countertop", "coffeetable"})

CAN_CONTAIN = frozenset((place, kind.name) for kind in ITEM_TYPES.values() for place in kind.places)

# Two wordings of each task, as in ALFWorld.
PHRASES = {
    "pick_and_place_simple": ("put a {item} in {place}", "put some {item} on {place}"),
    "pick_clean_then_place_in_recep": ("put a clean {item} in {place}", "clean some {item} and put it in {place}"),
    "pick_heat_then_place_in_recep": ("put a hot {item} in {place}", "heat some {item} and put it in {place}"),
    "pick_cool_then_place_in_recep": ("put a cool {item} in {place}", "cool some {item} and put it in {place}"),
    "pick_two_obj_and_place": ("put two {item} in {place}", "find two {item} and put them in {place}"),
    "look_at_obj_in_light": (f"look at {{item}} under the {LAMP}", f"examine the {{item}} with the {LAMP}"),
}
