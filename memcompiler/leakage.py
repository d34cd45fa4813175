"""`memcompiler leakage`: what training and evaluation share."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from configs.collect import CollectConfig
from configs.load import ConfigError
from data_gen.leakage import LEAKAGE, MANIFEST, Audit, audit_training, check, held_out_tasks
from data_gen.tasks import chosen_tasks
from envs.environments import Environments
from envs.manifest import Manifest


def run_leakage(
    train: Path | None, evaluation: Path | None, config: CollectConfig | None, out: Path | None = None
) -> None:
    """Print what training and evaluation share. Each side is a manifest, or what a `collect` configuration says:
    the tasks that it would play, and its held-out splits.

    Args:
        out: folder for the training side's manifest.json and for leakage.json.

    Raises:
        ConfigError: a leak, or nothing that could be checked.
        ManifestError, LeakageError: files that cannot be compared.
    """
    if config is None and (train is None or evaluation is None):
        raise ConfigError("give --train and --eval, or a collect configuration for what is not given")
    ours, audit = _sides(train, evaluation, config)
    console = Console(width=120)
    if audit.verdict:
        console.print(audit.verdict.table())
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        ours.write(out / MANIFEST)
        (out / LEAKAGE).write_text(json.dumps(audit.to_json(), indent=2) + "\n", encoding="utf-8")
    if not audit.clean:
        raise ConfigError("; ".join(audit.leaks) or f"nothing was checked. {audit.summary}")
    if audit.unchecked:
        console.print(audit.summary)


def _sides(train: Path | None, evaluation: Path | None, config: CollectConfig | None) -> tuple[Manifest, Audit]:
    if train and evaluation:
        ours = Manifest.read(train)
        return ours, Audit(ours.sha256, check(ours, Manifest.read(evaluation)))
    assert config is not None
    with Environments(config.env) as envs:
        if train:
            ours = Manifest.read(train)
        else:
            tasks, experience = chosen_tasks(config, envs, config.split)
            ours = Manifest.of(config.env.name, [*tasks, *experience])
        if evaluation:
            return ours, Audit(ours.sha256, check(ours, Manifest.read(evaluation)))
        return ours, audit_training(config, ours, *held_out_tasks(config, envs))
