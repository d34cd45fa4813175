"""Measurements of speed, memory and robustness; each ends with a ratio or a table."""
