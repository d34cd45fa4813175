"""Tests on a pretended GPU, which tests/test_pretended_gpu.py starts: pytest -p tests.pretend_gpu tests/pretended"""

from __future__ import annotations

import sys

collect_ignore_glob = [] if "tests.pretend_gpu" in sys.modules else ["test_*.py"]
