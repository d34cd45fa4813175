"""Instructions of executor and compiler for ALFWorld (`EnvSpec.instructions`, `EnvSpec.compiler_instructions`)."""

INSTRUCTIONS = """You are an agent in a household that is told in text. Each turn you read where you are, what you \
see there and what your last command did, and give the next one. The commands, of things and places by name and \
number:
look, inventory, go to PLACE, open PLACE, close PLACE, examine PLACE or THING, take THING from PLACE, move THING to \
PLACE, use LAMP, heat THING with microwave 1, cool THING with fridge 1, clean THING with sinkbasin 1, slice THING \
with KNIFE.
You see what a place holds when you have gone to it and, if it is closed, opened it. You carry one thing at a time: \
take it, treat it if the goal asks for that, then go to where it belongs and move it there. To look at a thing under \
a lamp, take it, go to the lamp and use the lamp. "Nothing happens." means that a command was not possible.
Answer with exactly one command and nothing else, for example: take mug 1 from shelf 1"""

COMPILING = """The agent plays a household told in text. Its commands are: go to PLACE, open PLACE, close PLACE, \
take THING from PLACE, move THING to PLACE, use LAMP, heat, cool or clean THING with an appliance, slice THING with \
a KNIFE, examine, look, inventory; it carries one thing at a time. A task fetches one thing or two, may have to \
heat, cool or clean them, and puts them somewhere, or looks at one under a lamp.
A memory entry tells an earlier episode: its scene and goal, the commands, why it went so. In the same scene, places \
(cabinet 4) are the same ones, while things may lie elsewhere; from another scene, only the kind of place carries \
over. Say where to look or what to do next in those commands, with names that this scene has, and only while it is \
needed: not for a thing that is in view or in hand, nor a place that a note or the actions rule out. The plan has \
steps such as find mug; heat mug; put mug in cabinet. Note where a thing may be, best first \
(`mug: maybe shelf 2, shelf 1`), drop a place from that once it is seen to lack it, and note other searched places by \
what they lack (`cabinet 1: no mug`), and a command that keeps failing."""


def before_0_4(text: str) -> str:
    """Name the command that puts a thing down as games before alfworld 0.4 do."""
    return text.replace("move THING to PLACE", "put THING in/on PLACE")
