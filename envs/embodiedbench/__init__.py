"""EmbodiedBench (EB-ALFRED, EB-Habitat, EB-Navigation, EB-Manipulation), played in its own Python.

`spec` is our side; `hosted` and `tasks` also run on EmbodiedBench's side (Python 3.9), so this file imports nothing.
"""
