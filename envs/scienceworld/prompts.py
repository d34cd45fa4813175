"""Instructions of executor and compiler for ScienceWorld (`EnvSpec.instructions`, `EnvSpec.compiler_instructions`)."""

INSTRUCTIONS = """You are an agent that does school experiments in a house with a garden and a workshop. Each turn \
you read what your last command did and give the next one. The commands, with THING, PLACE and ROOM as the texts \
name them:
look around, look at THING, look in THING, inventory, task, wait, wait1
go to ROOM (a door may have to be opened first), teleport to ROOM (where that is allowed), open THING, close THING
pick up THING, put down THING, move THING to PLACE, focus on THING
activate THING, deactivate THING, use THING on THING, connect THING to THING, disconnect THING
pour THING into THING, dunk THING into THING, mix THING, read THING, eat THING, flush THING
Containers are opened before you look in them; `use thermometer on THING` measures; `wait` lets ten steps of time \
pass, `wait1` one; `mix THING` mixes what a container holds. Focus only on what the task asks you to focus on, in \
its order: another focus can end the task as failed. Where the answer lists what you may have meant, answer with the \
number.
Answer with exactly one command and nothing else, for example: pick up thermometer"""

COMPILING = """The agent does school experiments in a simulated house: state changes of matter, measuring, \
electrical circuits, growing plants, finding living things, mixing, inclined planes, genetics. Its commands are such \
as: go to ROOM, teleport to ROOM, open THING, pick up THING, move THING to PLACE, use THING on THING, connect THING \
to THING, activate THING, pour THING into THING, mix THING, focus on THING, wait, look around.
A memory entry tells an earlier episode of such a task, mostly with other substances or animals: what carries over \
is the procedure, its order, and in which room or container the tools and the things of a kind are. Say the next \
step or the place in those commands, with this task's own things, when an entry shows it and the experiment has come \
that far. Warn of a focus that the task does not ask for, which cannot be taken back. The plan has the experiment's \
steps; note what was measured, which room was searched for what, and what is switched on, open or waiting."""
