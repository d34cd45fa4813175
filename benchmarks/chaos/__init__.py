"""Kill commands and servers with SIGKILL at random moments, and compare what they end with to an undisturbed run.

    memcompiler bench chaos [--kills 100] [--seed 0] [--stage collect ...] [--out FOLDER]

Everything is small (generated homes, the shipped tiny models) and on this machine. Every stage runs once undisturbed.
Then the stages take turns: a command is killed one to three times, each time at a moment drawn from the undisturbed
run's duration, and run to its end. A server is killed and started again while its clients ask and retry. Rows,
weights, answers and memory must be equal; clocks are left out. To add a stage, add an entry to `stages.STAGES`.
"""

from benchmarks.chaos.running import app as app
