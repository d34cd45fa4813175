"""From the command line's words to a run of questions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from configs.collect import MemoryModels
from configs.models import EndpointConfig
from configs.run_folder import output_folder
from eval.qa.answers import ANSWERS, ASKED, RESULTS, Asked, run_answers, to_markdown
from eval.qa.files import read_cases
from eval.qa.readers import EndpointReader, HfReader, Reader, SeeingReader, VllmReader
from memory.registry import RESPONSES
from runtime.attempts import ATTEMPTS


def run_qa(
    data: Path,
    memory: str,
    settings: Mapping[str, Any],
    tokens: int,
    facts: bool,
    reader: tuple[str, str, Mapping[str, Any]],
    limit: int | None,
    out: Path,
    models: MemoryModels,
    picture: int = 0,
    attempts: int = ATTEMPTS,
) -> None:
    cases = read_cases(data)
    counted = "" if reader[0] == "endpoint" else "reader"  # whose tokenizer is not known
    asked = Asked(
        data.name,
        memory,
        settings,
        tokens,
        facts,
        f"{reader[0]}:{reader[1]}",
        limit,
        models.model_names(),
        picture,
        counted,
    )
    with output_folder(out, "qa", (ASKED, ANSWERS, RESULTS, "memory"), "reader", [("--data", data)]):
        read = load_reader(*reader, out, picture > 0)
        typer.echo(to_markdown(run_answers(asked, cases, read, out, models.cached_in(out / RESPONSES), attempts)))


def load_reader(engine: str, model: str, api: Mapping[str, Any], out: Path, sees: bool = False) -> Reader:
    """Load what answers; `api`: settings of its endpoint; `sees`: it is shown pictures. Raises: ValueError, where it
    cannot be."""
    if engine == "endpoint":
        config = EndpointConfig.model_validate({**api, "model": model})
        return EndpointReader.load(config, out / RESPONSES)
    if engine == "vllm":
        if sees:
            raise ValueError("readers on vLLM are shown no pictures here: --engine hf or endpoint")
        return VllmReader.load(model)
    return SeeingReader.load(model) if sees else HfReader.load(model)
