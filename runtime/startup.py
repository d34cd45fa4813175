"""The user's home folder, and environment variables that libraries read when they are imported."""

from __future__ import annotations

import contextlib
import getpass
import os
import stat
import tempfile
from pathlib import Path

# How OpenMP threads wait for work. torch's runtime, libgomp, has them spin: beside other work they then hold the cores
# that the thread they wait for needs, and a step takes several times as long (docs/training.md).
WAIT_POLICY = "OMP_WAIT_POLICY"
WAITING = (WAIT_POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # the variables that decide it


def prepare_process() -> None:
    """Set variables that the user has not set: how OpenMP threads wait, and home and user name where there are none.

    Call it before torch is imported. Child processes inherit the variables.
    """
    if not any(name in os.environ for name in WAITING):
        os.environ[WAIT_POLICY] = "PASSIVE"
    os.environ.update(HOME=str(home()))  # without one, libraries fail or make a folder named "~"
    try:
        getpass.getuser()  # torch and Ray do
    except (KeyError, OSError):
        os.environ["USER"] = f"user{os.getuid()}"


def home() -> Path:
    """Return the user's home folder; where the system names none, a folder in the temporary directory that no other
    user can change."""
    found = os.path.expanduser("~")
    if os.path.isabs(found):
        return Path(found)
    folder = Path(tempfile.gettempdir(), f"memcompiler-home-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    about = folder.lstat()
    if stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o077:
        return folder
    return Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))


def expand_home(path: str) -> str:
    """Replace a leading `~` or `~USER` by the home folder. Raises: ValueError, there is no such user."""
    if not path.startswith("~"):
        return path
    name, slash, rest = path.partition("/")
    folder = str(home()) if name == "~" else os.path.expanduser(name)
    if folder.startswith("~"):
        raise ValueError(f"{path}: there is no user {name[1:]!r}; write ./{path} for a file of that name")
    return folder + slash + rest
