"""Typed settings, the YAML files that fill them, and run folders."""
