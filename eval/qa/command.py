"""From the command line's words to a run of questions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from configs.models import EndpointConfig
from eval.qa.answers import Asked, run_answers, to_markdown
from eval.qa.files import read_cases
from eval.qa.readers import EndpointReader, HfReader, Reader, VllmReader


def run_qa(
    data: Path, memory: str, settings: Mapping[str, Any], tokens: int, facts: bool,
    reader: tuple[str, str, str, str | None], limit: int | None, out: Path,
) -> None:  # fmt: skip
    cases = read_cases(data)
    out.mkdir(parents=True, exist_ok=True)
    read = load_reader(*reader, out)
    asked = Asked(data.name, memory, settings, tokens, facts, f"{reader[0]}:{reader[1]}", limit)
    typer.echo(to_markdown(run_answers(asked, cases, read, out)))


def load_reader(engine: str, model: str, base_url: str, key_env: str | None, out: Path) -> Reader:
    if engine == "endpoint":
        config = EndpointConfig(base_url=base_url, model=model, key_env=key_env)
        return EndpointReader.load(config, out / "responses.sqlite")
    return VllmReader.load(model) if engine == "vllm" else HfReader.load(model)
