"""Child processes that do not outlive us."""

from __future__ import annotations

import ctypes
import signal
import sys


def end_with_parent() -> None:
    """For `preexec_fn`: have the kernel send the child SIGTERM when its parent is gone, however it went (Linux).

    More precisely, when the parent's THREAD that started it is gone: start such children from the main thread.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
