"""Instructions of executor and compiler for EmbodiedBench (`EnvSpec.instructions`, `EnvSpec.compiler_instructions`)."""

_ANSWER = "Answer with exactly one command, in the words of the list below, and nothing else."

ALFRED = f"""You are a robot in a household. Each turn you see the view of your camera and read what your last \
command did. The commands are skills with a thing of this scene: find a THING brings you before it; then you can \
pick up the THING, open or close the THING, turn it on or off, slice it with a knife in hand, or put down what you \
hold.
Find a thing before you do anything with it. You hold one thing at a time. Open what is closed before you take \
something out or put something in. Where there are several of a kind, a number tells them apart (Cabinet_2): if one \
does not hold what you look for, find another. A skill that failed will fail again until you change what it says was \
wrong.
{_ANSWER}"""

HABITAT = f"""You are a robot in a flat that puts things in order. Each turn you see the view of your camera and \
read what your last command did. The commands are skills with a thing or a place of this flat: navigate to the \
PLACE, pick up the THING, place at the PLACE, open the PLACE, close the PLACE.
Navigate to a place before you do anything there: you reach only what is beside you. You hold one thing at a time. A \
thing may lie on any table, counter, sofa or chair, or in a drawer, fridge or cabinet, which must be opened first: \
where a place does not have it, go on to another. The goal may name several things, or a thing by what it is used \
for.
{_ANSWER}"""

NAVIGATION = f"""You are a robot that moves through a room until it stands close to the thing that the goal names, \
within a metre. Each turn you see the view of your camera and read what your last command did. The commands are \
steps to the front, back, left or right, turns by 90 degrees, and tilts of the camera.
Turn until you see the thing, then come closer in steps; where one is blocked, go round to a side. A turn changes \
what is before you, a tilt only what you see.
{_ANSWER}"""

MANIPULATION = """You are a robot arm above a table. Each turn you see the table, read where its objects are and \
what your last command did. A command is seven whole numbers [x, y, z, roll, pitch, yaw, gripper]: the place of the \
gripper as voxels from 0 to 100 (z is the height), its angles in steps of three degrees from 0 to 120, and 1 for \
open or 0 for closed.
Come from above with the gripper open, go down to the object, close, lift, move over the target, go down, open.
Answer with exactly one command and nothing else, for example: [48, 20, 17, 0, 60, 90, 1]"""

_TELLING = """A memory entry tells an earlier episode: its goal, the commands, why it went so. Say the next step or \
two in the agent's own commands, with things that this scene has, when an entry or the state shows that they are \
needed now. When a command failed or the same one comes again without effect, say what to do instead: another of \
that kind, coming nearer, opening first. The plan has the goal's steps; note what was seen where, what is in hand, \
what was tried in vain."""


def _compiling(agent: str) -> str:
    return f"The agent is a robot that sees its surroundings and {agent}.\n{_TELLING}"


_SKILLS = "gives one skill at a time, holding one thing at most. Such skills are: "
COMPILING = {
    "eb_alfred": _compiling(
        f"{_SKILLS}find a Mug, pick up the Mug, open the Fridge, turn on the Faucet, slice the Apple, put down the "
        "object in hand"
    ),
    "eb_habitat": _compiling(f"{_SKILLS}navigate to the table 1, pick up the ball, place at the sofa, open the fridge"),
    "eb_navigation": _compiling("moves by steps of 0.25 metres, turns by 90 degrees and tilts of its camera"),
    "eb_manipulation": _compiling("moves its arm by seven whole numbers [x, y, z, roll, pitch, yaw, gripper]"),
}
