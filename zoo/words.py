"""Places and things of ALFWorld's homes, which are single tokens in both worlds' tokenizers."""

# Highest number of each place: one or two above that of the 3,553 train games.
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
