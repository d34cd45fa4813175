"""EmbodiedBench's hosts over the stand-in, in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from envs.embodiedbench import hosted
from envs.embodiedbench.hosted import HostedEmbodiedBench

STANDIN = Path(__file__).parent / "envs" / "embodiedbench_standin"


@contextmanager
def standin(benchmark: str) -> Iterator[HostedEmbodiedBench]:
    """Yield a host; its folder, import path and modules are removed afterwards."""
    folder, paths = Path.cwd(), list(sys.path)
    bench = hosted.host(benchmark, home=str(STANDIN), resolution=8)
    try:
        yield bench
    finally:
        bench.close()
        os.chdir(folder)
        sys.path[:] = paths
        for name in [name for name in sys.modules if name.split(".")[0] == "embodiedbench"]:
            del sys.modules[name]
