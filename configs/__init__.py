"""Experiments as YAML files, the typed settings that they fill, and the folder that a run of one writes."""
