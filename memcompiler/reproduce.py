"""`memcompiler reproduce BENCHMARK`: run or continue a chain from collection to the tables of the paper.

OUT/stages.json    seconds of every finished stage; those are skipped
OUT/tables/        the tables; other folders: configs/reproduce.py
"""

from __future__ import annotations

import gc
import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from configs.evaluation import EvalConfig
from configs.load import BASE, CONFIGS, ConfigError, as_override, load_config, read_yaml
from configs.reproduce import Chain, Processes, Stage, chain_file, missing_needs, needs
from configs.run_folder import RunFolder
from configs.training import GrpoConfig
from eval.evaluate import run_eval
from eval.matrix import cells
from eval.paper.render import run_table
from memcompiler.collection import run_collect
from memcompiler.quickstart import STAGES
from runtime.processes import ProcessError, run_in_foreground, torchrun_command
from runtime.store import read_json

console = Console(width=120, soft_wrap=True)
FINISHED = "stages.json"
_PLAIN = re.compile(r"[\w./:-]+")
MAY_CHANGE_ON_RESUME = (
    *(f"{stage}.{name}" for stage, names in STAGES.items() for name in names),
    *(f"processes.{name}" for name in Processes.model_fields),
    "tables",
)


def run_chain(chain: Chain, stages: Sequence[Stage], tables: Sequence[int]) -> None:
    """Run all stages that are not finished, one after another, then print and write the tables.

    Raises:
        ConfigError: an API key or a file is missing; nothing has been started.
        ProcessError: a stage's process failed.
    """
    seconds = finished(chain.out)
    if missing := missing_needs([stage for stage in stages if stage.name not in seconds]):
        raise ConfigError("missing: " + "; ".join(missing))
    with RunFolder.create(chain.out, chain.config, ignore=MAY_CHANGE_ON_RESUME) as run:
        run.record(chain=chain.name)
        for number, stage in enumerate(stages, start=1):
            console.rule(f"{number}/{len(stages)}: {stage.name}", align="left")
            if stage.name in seconds:
                console.print(f"  finished in {seconds[stage.name]:.0f} s: {stage.folder}")
                continue
            started = time.perf_counter()
            start(stage, chain)
            seconds[stage.name] = time.perf_counter() - started
            run.write_json(FINISHED, seconds)
    for table in tables:
        console.rule(f"table {table}", align="left")
        run_table(table, [chain.out], chain.out / "tables")


def finished(out: Path) -> dict[str, float]:
    """Return the seconds of the finished stages whose run folders are still there, by name."""
    path = out / FINISHED
    known: dict[str, float] = read_json(path) if path.exists() else {}
    return {name: seconds for name, seconds in known.items() if (out / name).is_dir()}


def check_chain(stages: Sequence[Stage]) -> None:
    """Raise ConfigError for an evaluation whose matrix or deliveries are invalid."""
    for stage in stages:
        if isinstance(stage.config, EvalConfig):
            cells(stage.config)


def describe_chain(chain: Chain, stages: Sequence[Stage], tables: Sequence[int]) -> None:
    """Print the commands of all stages, one a line, then what they need and the plan of each kind of stage."""
    from plan.command import dry_run

    for stage in stages:
        print(command(stage, chain))
    for table in tables:
        folders = [str(stage.folder) for stage in stages if table in stage.tables]
        print(shlex.join(["memcompiler", "report", "paper", "--table", str(table), *folders]))
    print()
    for text, there in dict.fromkeys(pair for stage in stages for pair in needs(stage)):
        print(f"# needs {text}: {'found' if there else 'MISSING'}")
    print(flush=True)
    first = {(stage.kind, stage.executor): stage for stage in reversed(stages)}
    for stage in reversed(first.values()):
        dry_run(stage.config, _gpus(stage, chain))


# -- one stage ---------------------------------------------------------------------------------------------------------


def start(stage: Stage, chain: Chain) -> None:
    """Run a stage to its end, or resume it, in a process of its own or in this one. Raises: ProcessError."""
    n = _processes(stage, chain)
    if not chain.config.processes.separate and n == 1:
        _run_here(stage)
        return
    program = [*torchrun_command(n), "-m"] if n > 1 else [sys.executable, "-m"]
    if status := run_in_foreground([*program, "memcompiler", *arguments(stage, chain)]):
        raise ProcessError(
            f"stage {stage.name} failed (exit {status}): see its messages above, then run the same command again, "
            "which continues there"
        )


def _run_here(stage: Stage) -> None:
    from training.grpo import train_grpo
    from training.sft import train_sft

    run: Any = {"collect": run_collect, "sft": train_sft, "grpo": train_grpo, "eval": run_eval}[stage.kind]
    run(stage.config, stage.folder)
    gc.collect()


def _processes(stage: Stage, chain: Chain) -> int:
    if isinstance(stage.config, GrpoConfig) and stage.config.cluster == "ray":
        return 1
    return {"sft": chain.config.processes.sft, "grpo": chain.config.processes.grpo}.get(stage.kind, 1)


def _gpus(stage: Stage, chain: Chain) -> int | None:
    """Return the GPUs of a stage's command; None: those of this machine."""
    if isinstance(stage.config, EvalConfig):
        return max(stage.config.executor.vllm.tensor_parallel_size, stage.config.compiler.vllm.tensor_parallel_size)
    return _processes(stage, chain) if stage.kind == "sft" else None


# -- commands ----------------------------------------------------------------------------------------------------------


def command(stage: Stage, chain: Chain) -> str:
    """Return the command that runs a stage, for a shell."""
    n = _processes(stage, chain)
    program = [f"torchrun --nproc_per_node {n} -m memcompiler" if n > 1 else "memcompiler"]
    return " ".join([*program, shlex.join(arguments(stage, chain))])


def arguments(stage: Stage, chain: Chain) -> list[str]:
    """Return a stage's command line: its command, its file in configs/, and what the chain changes."""
    wanted = stage.config.model_dump(mode="json", exclude_unset=True)
    schema, base = type(stage.config), stage_file(chain.name, stage.kind) if chain.name else None
    for file in (base, None):
        given = load_config(schema, file).model_dump(mode="json", exclude_unset=True) if file else {}
        overrides = list(_overrides(wanted, given))
        if load_config(schema, file, overrides) == stage.config:
            return [*schema.COMMAND.split(), *(["-c", file] if file else []), *overrides, "--out", str(stage.folder)]
    raise AssertionError(f"the settings of {stage.name} cannot be written as overrides")


def _overrides(wanted: Mapping[str, Any], given: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the overrides that turn `given` into `wanted`."""
    for name, value in wanted.items():
        key, old = f"{prefix}{name}", given.get(name)
        if name in given and old == value:
            continue
        plain = isinstance(value, dict) and all(re.fullmatch(r"[A-Za-z_][\w-]*", inner) for inner in value)
        if plain and value and (isinstance(old, dict) or (prefix == "" and old is None)):
            yield from _overrides(value, old or {}, f"{key}.")
        elif isinstance(value, str) and _PLAIN.fullmatch(value) and yaml.safe_load(value) == value:
            yield f"{key}={value}"
        else:
            yield as_override(key, value)


def stage_file(name: str, kind: str) -> str | None:
    """Return the file that a chain's block of this kind is based on, as `--config` takes it; None without one."""
    return _based_on(chain_file(name).resolve(), kind)


def _based_on(path: Path, kind: str) -> str | None:
    tree = read_yaml(path)
    block = tree.get(kind)
    if isinstance(block, dict) and isinstance(block.get(BASE), str):
        file = (path.parent / block[BASE]).resolve()
        return file.relative_to(CONFIGS).with_suffix("").as_posix() if file.is_relative_to(CONFIGS) else str(file)
    return _based_on((path.parent / tree[BASE]).resolve(), kind) if isinstance(tree.get(BASE), str) else None
