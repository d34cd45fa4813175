"""A stage for games with a scripted compiler and an obedient executor, in generated homes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compiler.language import Emission, render
from compiler.records import Compilation
from configs.evaluation import EvalConfig
from eval.model_cache import ModelCache
from play.stage import Stage
from tests.fakes import Obedient

SETTINGS = {"env": {"name": "household", "scenes": {"train": 2, "valid": 1, "test": 1}}, "max_steps": 4, "limit": 2}


class Reader:
    """A compiler that tells the executor to look for what the first entry of M says, and records its requests."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def compile(self, requests: Any) -> list[Compilation]:
        self.seen += requests
        told = [Emission("inventory" if request.memory else "help", "memory says so") for request in requests]
        return [Compilation(render(emission), emission) for emission in told]


@pytest.fixture
def reader() -> Reader:
    return Reader()


@pytest.fixture
def stage(reader: Reader, tmp_path: Path) -> Iterator[Stage]:
    config = EvalConfig.model_validate({**SETTINGS, "split": "train", "compiler": {"checkpoint": "none"}})
    config = config.model_copy(update={"deliveries": ("compiled",)})
    made = Stage(config, tmp_path / "out", models=ModelCache.preloaded(config, Obedient(), reader))
    yield made
    made.close()
