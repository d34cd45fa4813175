"""`memcompiler plan` and `--dry-run`: load settings, plan, print."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from configs.collect import CollectConfig
from configs.evaluation import EvalConfig, QuickstartConfig
from configs.load import ConfigError, find_config, load_config
from configs.models import ServeConfig
from configs.proxy import ProxyConfig
from configs.run_folder import check_own_files
from configs.training import GrpoConfig, SftConfig
from plan.budget import Lengths, find_gpu, lines
from plan.stages import plans, remedy
from runtime.store import to_json, write_atomically

SCHEMAS = {
    "sft": SftConfig,
    "grpo": GrpoConfig,
    "eval": EvalConfig,
    "collect": CollectConfig,
    "serve": ServeConfig,
    "proxy": ProxyConfig,
    "quickstart": QuickstartConfig,
}

NODE = 8  # GPUs of the paper's GRPO


def load_any(config: str, overrides: Sequence[str], stage: str | None = None) -> Any:
    """Load a configuration of any stage: `stage`, that of its folder (a file proxy.yaml is the proxy's), or the first
    whose schema accepts it. Raises: ConfigError."""
    path = find_config(config).resolve()
    named = "proxy" if path.stem == "proxy" else path.parent.name
    if chosen := SCHEMAS.get(stage or named):
        return load_config(chosen, config, overrides)
    if stage is not None:
        raise ConfigError(f"unknown stage {stage!r}: use one of {', '.join(SCHEMAS)}")
    problems = []
    for name, schema in reversed(SCHEMAS.items()):
        try:
            return load_config(schema, config, overrides)
        except ConfigError as error:
            problems.append(f"as {name}: {error}")
    raise ConfigError("no stage accepts this configuration; set its stage with --stage\n" + "\n".join(problems))


def dry_run(settings: Any, gpus: int | None = None) -> None:
    """Print the plan of a run on this machine's GPUs, or without any on GPUs of 80 GiB; under torchrun on rank 0.
    `gpus`: number of GPUs of the run (default: that of torchrun, else of this machine)."""
    import torch

    if os.environ.get("RANK", "0") != "0":
        return
    here = torch.cuda.is_available()
    gpu = f"{torch.cuda.get_device_properties(0).total_memory / 2**30:.0f}" if here else "80"
    gpus = gpus or int(os.environ.get("WORLD_SIZE", "0")) or (torch.cuda.device_count() if here else None)
    run_plan(settings, gpu, gpus=gpus, lengths="", json=None)


def run_plan(settings: Any, gpu: str, gpus: int | None, lengths: str, json: Path | None) -> None:
    """Print the plan of every part of a run, and write it to `json`. `gpus`: default 1, for GRPO 8."""
    card, read = find_gpu(gpu), Lengths.read(lengths)
    if json is not None:
        check_own_files(json.parent, (json.name,), "plans")
    number = gpus or (NODE if isinstance(settings, GrpoConfig) else 1)
    records = []
    for own, plan in plans(settings, read, card, number):
        found = None if plan.fits(card, number) else remedy(own, read, card, number)
        print("\n".join(lines(plan, read, gpu=card, gpus=number, remedy=found)), end="\n\n", flush=True)
        records.append(plan.to_json(card, number, found))
    if json is not None:
        write_atomically(json, to_json({"lengths": asdict(read), "plans": records}, indent=1))
