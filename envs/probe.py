"""Looking at a part of the installation: for the environments' specs, and `memcompiler doctor`, which asks them."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import shutil
from collections.abc import Callable
from dataclasses import dataclass


class Missing(Exception):
    """The part is not there (which for an extra is no fault)."""


@dataclass(frozen=True)
class Probe:
    """How to find out: `run` returns a detail, raises `Missing`, or anything else when the part is broken.

    It travels to another process, so `run` is a function of a module (or a partial of one). `fix` is a command to
    paste in the repository's folder, or empty.
    """

    name: str
    run: Callable[[], str]
    fix: str = ""
    core: bool = True
    seconds: float = 120.0


def is_installed(module: str, distribution: str | None = None) -> str:
    """Return the distribution's version without importing it (deepspeed's import looks for compilers: seconds).

    Raises:
        Missing: there is no such module.
    """
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise Missing("not installed")
    return importlib.metadata.version(distribution or module)


def imports(module: str, distribution: str | None = None) -> str:
    """Return the distribution's version after importing the module."""
    version = is_installed(module, distribution)
    importlib.import_module(module)
    return version


def sync(extra: str = "") -> str:
    """Return the command that installs the locked packages, with those of an extra; by the uv that `make` uses."""
    uv = "uv" if shutil.which("uv") else ".uv/bin/uv"
    return f"{uv} sync --inexact" + (f" --extra {extra}" if extra else "")
