"""Environment variables that libraries read on import, and the user's home folder."""

from __future__ import annotations

import contextlib
import getpass
import os
import stat
import tempfile
from pathlib import Path

# How OpenMP threads wait. libgomp's default spins: waiting threads then occupy the cores of other processes and of the
# thread they wait for, and a step takes several times as long (docs/guides/training.md).
WAIT_POLICY = "OMP_WAIT_POLICY"
WAIT_VARIABLES = (WAIT_POLICY, "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # variables that control it


def prepare_process() -> None:
    """Set unset environment variables: OpenMP's wait policy, home folder and user name.

    Call it before importing torch. Child processes inherit the variables.
    """
    if not any(name in os.environ for name in WAIT_VARIABLES):
        os.environ[WAIT_POLICY] = "PASSIVE"
    os.environ.update(HOME=str(home()))  # without it, libraries fail or create a folder named "~"
    try:
        getpass.getuser()  # torch and Ray call it
    except (KeyError, OSError):
        os.environ["USER"] = f"user{os.getuid()}"


def home() -> Path:
    """Return the user's home folder, or a private folder in the temporary directory if the system has none."""
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
    """Replace a leading `~` or `~USER` by the home folder. Raises: ValueError, for an unknown user."""
    if not path.startswith("~"):
        return path
    name, slash, rest = path.partition("/")
    folder = str(home()) if name == "~" else os.path.expanduser(name)
    if folder.startswith("~"):
        raise ValueError(f"{path}: there is no user {name[1:]!r}; write ./{path} for a file of that name")
    return folder + slash + rest
