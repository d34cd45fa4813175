"""Studies behind the tables in README.md and docs/."""
