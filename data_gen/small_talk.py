"""Sentences around what is told in `data_gen.retold`: what people say when they say nothing that is asked for."""

NAMES = (
    "Ada", "Bruno", "Carla", "Dmitri", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kaori", "Luis", "Mina",
    "Nils", "Olga", "Pavel", "Quentin", "Rosa", "Selim", "Tara",
)  # fmt: skip
PLACES = "the garden|my sister's flat|the market|the library|the old bridge|the station|the lake|the office".split("|")
TIMES = (
    "yesterday", "last week", "this morning", "last Friday", "two days ago", "on Monday", "last weekend", "last month",
    "today", "the other day", "recently",
)  # fmt: skip
SMALL_TALK = (
    "Hey {other}! It has been a while, how are things on your side?",
    "Hi {other}, good to hear from you. What have you been up to lately?",
    "Honestly I was so tired yesterday that I forgot about dinner altogether.",
    "My cousin keeps talking about her {thing}, she says that everybody needs one.",
    "We went to {spot} last week, the weather was lovely and we walked for hours.",
    "I am thinking of buying a new {thing}, the one that I have looks rather sad by now.",
    "Work has been busy, but I try to keep my evenings free for the things that I like.",
    "Did I tell you that we might move next year? I would miss {spot} a lot.",
    "There was a film about a {thing} on television, it was silly but I laughed so much.",
    "That sounds great, {other}! You always find time for these things.",
    "I have been sleeping badly, maybe because of all the noise from {spot}.",
    "Somebody at {spot} asked me whether I could lend them a {thing}, can you imagine?",
    "We should meet at {spot} soon, I would love to catch up properly.",
    "I tried a new recipe, it came out a bit burnt, but everybody liked it.",
    "How do you keep the {place} so tidy? Mine is always full of stuff.",
    "I read that a {thing} should never be left near the {place}. Is that true?",
    "I ran into {companion} at {spot}, we talked for ages.",
    "Are you ready for {occasion}? I have not done anything yet.",
    "I spoke to {companion} on the phone, all is well there.",
    "I still have to think of something for {occasion}.",
)
REACTIONS = (
    "Oh nice, {other}! I always liked that {thing} of yours.",
    "Haha, the {thing} again! You two are inseparable.",
    "Good for you! I would have forgotten about the {thing} completely.",
    "Wow, really? The {thing}? I never would have thought of that.",
    "That makes sense. How did you feel about the {thing} afterwards?",
    "Lovely. You have to show me that {thing} next time that I come over.",
    "I see, well done! It is the small things that make a home.",
    "So what are you going to do with the {thing} now?",
    "My own {thing} has seen better days, I should take care of it, too.",
    "Was the {thing} much trouble? Things like that always take longer than one thinks.",
    "What a lovely {thing}! And how did it go?",
    "So all is ready for {occasion}?",
    "Great! Where was the {thing}?",
    "Tell me more about the {thing}, who was there?",
    "I thought that {companion} was away?",
    "That will be something for {occasion}.",
)
PADDING = (
    "It took me a while, but I am glad that it is done.",
    "You know how I am with these things.",
    "I was in a hurry as always, and the phone kept ringing.",
    "It made me think of when we were at {spot} together.",
    "I had some music on and it was rather peaceful for once.",
    "My mother was around and wanted to help with everything.",
    "Anyway, I felt much better after that, and I even had time for a walk to {spot}.",
    "Next week I want to do the same at my parents' place.",
    "Life is short, so one should enjoy the little things!",
    "Three years ago I would not have bothered at all.",
    "How about you, any plans for the weekend?",
    "Have you been to {spot} lately?",
    "What do you think, is that strange?",
    "It is what it is.",
    "I told {companion} about it already.",
)
