"""Experiments as YAML files, one each, with the schema that reads them and the folder that a run of one writes."""
