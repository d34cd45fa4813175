"""A stand-in for the package `embodiedbench`: its environment classes' call surface over toy worlds."""
