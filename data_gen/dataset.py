"""SFT rows as a published dataset: filters, statistics, dataset card, and upload to the Hugging Face hub.

The hub's token comes from the environment, as for any Hugging Face tool.

runs/collect/rows/            the rows and README.md, their card
runs/collect/statistics.json  what `memcompiler data inspect` prints
"""

from __future__ import annotations

import json
import math
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from compiler.language import Kind
from configs.load import read_yaml
from configs.run_folder import RunFolder
from data_gen.rows import SftRow, continues, load_rows, row_folders, rows_to_dataset
from runtime.parsing import without_newlines
from runtime.store import read_json

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from compiler.records import History
    from configs.collect import CollectConfig

# -- filters -----------------------------------------------------------------------------------------------------------


def thin_noaction(rows: Sequence[SftRow], keep: float, seed: int) -> list[SftRow]:
    """Drop a seeded random share of the NOACTION rows, which are most rows."""
    draw = random.Random(seed)
    return [row for row in rows if row.kind is not Kind.NOACTION or draw.random() < keep]


def filter_rows(rows: Sequence[SftRow], config: CollectConfig) -> tuple[list[SftRow], dict[str, int]]:
    """Apply the filters of the settings; return the remaining rows, and the number of dropped rows by filter."""
    selected = [row for row in rows if row.success or not config.successful_only]
    thinned = thin_noaction(selected, config.keep_noaction, config.seed)
    dropped = {}
    if config.successful_only:
        dropped["unsuccessful"] = len(rows) - len(selected)
    if config.keep_noaction < 1:
        dropped["noaction"] = len(selected) - len(thinned)
    return thinned, dropped


# -- statistics --------------------------------------------------------------------------------------------------------


def compiler_text(row: SftRow, history: History = 1) -> str:
    """Return the compiler's input as text, without instructions and pictures (`history`: `compiler.history`)."""
    from agent.records import compile_request
    from compiler.prompt import compiler_parts

    request = compile_request(replace(row, image=None).step_input())
    return "".join(part.text for part in compiler_parts(request, images=False, history=history))


TEXTS: Mapping[str, Callable[[SftRow], str]] = {  # texts of a row, whose lengths are counted
    "of it, memory": lambda row: row.memory_text,
    "emission": lambda row: row.emission,
    "action": lambda row: row.action,
}


def episodes_of(rows: Sequence[SftRow]) -> list[list[SftRow]]:
    """Group rows by episode (`data_gen.rows.continues`)."""
    episodes: list[list[SftRow]] = []
    for row in rows:
        last = episodes[-1][-1] if episodes else None
        if last is None or not continues(row, last):
            episodes.append([])
        episodes[-1].append(row)
    return episodes


def statistics(
    rows: Sequence[SftRow], tokenizer: PreTrainedTokenizerBase | None = None, history: History = 1
) -> dict[str, Any]:
    """Compute counts and length distributions of rows, as JSON.

    Args:
        tokenizer: also count lengths in tokens.
        history: past commands in the compiler's input (`compiler.history`).
    """
    episodes = episodes_of([row for row in rows if not row.memory_of])
    texts = {"compiler input": [compiler_text(row, history) for row in rows]}
    texts |= {name: [text(row) for row in rows] for name, text in TEXTS.items()}
    found: dict[str, Any] = {
        "rows": len(rows),
        "episodes": len(episodes),
        "tasks": len({row.task_id for row in rows}),
        "success_rate": sum(episode[0].success for episode in episodes) / max(1, len(episodes)),
        "with_picture": sum(row.image is not None for row in rows),
        "emissions": _counts(row.kind for row in rows),
        "verbs": _counts(row.action.split(" ", 1)[0] for row in rows),
        "steps_per_episode": summarise_values([episode[0].steps for episode in episodes if episode[0].steps]),
        "memory_entries": summarise_values([len(row.memory_ids) for row in rows]),
        "memory_pictures": summarise_values([sum(map(len, row.memory_images)) for row in rows]),
        "characters": {name: summarise_values([len(text) for text in some]) for name, some in texts.items()},
    }
    if tokenizer is not None:
        count = lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])
        found["tokens"] = {name: summarise_values([count(text) for text in some]) for name, some in texts.items()}
    return found


def summarise_values(values: Sequence[int]) -> dict[str, float] | None:
    """Return mean, minimum, median, 95th percentile and maximum; None for no values."""
    if not values:
        return None
    ordered = sorted(values)
    at = lambda share: ordered[min(len(ordered) - 1, int(share * len(ordered)))]
    return {"mean": round(fmean(ordered), 2), "min": ordered[0], "median": at(0.5), "p95": at(0.95), "max": ordered[-1]}


def describe_statistics(found: Mapping[str, Any]) -> list[str]:
    """Return the counts as sentences, one per line."""
    played, dropped = found.get("played"), found.get("dropped")
    lines = [
        f"{found['rows']} rows ({found['with_picture']} with a picture) from {found['episodes']} episodes of "
        f"{found['tasks']} tasks; {found['success_rate']:.0%} of these episodes succeeded"
    ]
    if played:
        lines.append(f"played: {played['episodes']} episodes, {played['successes']} succeeded")
    if dropped:
        lines.append(f"dropped: {_listed(dropped)}")
    return [*lines, f"emissions: {_listed(found['emissions'])}", f"actions: {_listed(found['verbs'])}"]


def print_statistics(found: Mapping[str, Any]) -> None:
    """Print distributions as a table, and counts as sentences."""
    from rich.console import Console
    from rich.table import Table

    table = Table("", "mean", "min", "median", "95 %", "max")
    for column in table.columns[1:]:
        column.justify = "right"
    spreads = {"steps per episode": found["steps_per_episode"]}
    spreads |= {f"memory {name} per row": found[f"memory_{name}"] for name in ("entries", "pictures")}
    for unit in ("characters", "tokens"):
        spreads |= {f"{name}, {unit}": values for name, values in found.get(unit, {}).items()}
    for name, values in spreads.items():
        table.add_row(name, *map(str, values.values() if values else ["unknown"]))
    console = Console(width=120)
    console.print(table)
    for line in describe_statistics(found):
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def _counts(names: Iterable[str]) -> dict[str, int]:
    return {str(name): n for name, n in sorted(Counter(names).items(), key=lambda item: (-item[1], item[0]))}


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in counts.items()) or "none"


# -- card and hub ------------------------------------------------------------------------------------------------------

CARD = "README.md"
SHARD_BYTES = 500 * 2**20  # of a Parquet file
LICENCES = {"household": "apache-2.0"}  # licence of texts and pictures; other environments have their own terms
FIELDS: Mapping[str, str] = {
    "task_id, split, family": "the task that was played, and its place in the benchmark",
    "t, steps": "step of the episode, counted from 0, and how many steps the episode has (0: unknown)",
    "success": "whether the episode reached its goal",
    "goal": "the goal, as agent and memory state it",
    "memory_ids, memory_texts": "the entries that were retrieved for the episode, in the order of the prompt",
    "memory_images": "the views (PNG) of its episode that each of these entries stores; empty without any",
    "state": "the Brief State before the step",
    "observation, image": "what the environment showed: text, and the view (PNG) where it draws one",
    "first": "the first observation of the episode",
    "own_scene": "whether an entry of the memory was of the task's own scene",
    "teacher_level": "what the guidance says: place, subgoal or command",
    "environment": "name of the environment",
    "memory_of": "the task whose memory is shown, in rows that ask it for the first state of another task; else empty",
    "history": "the actions before the step",
    "views, guidances, reasons": "what the agent saw at the earlier steps, and the guidance that it was given there",
    "commands": "what was possible, where executors are shown it; else empty",
    "emission": "the teacher's emission: the target of the text loss",
    "action": "the action to take: the target of the action loss through the frozen executor",
}
_SIZES = {1e3: "n<1K", 1e4: "1K<n<10K", 1e5: "10K<n<100K", 1e6: "100K<n<1M", math.inf: "n>1M"}
_VERDICTS = {
    "True": "isolated from the held-out splits",
    "False": "LEAKS into the held-out splits",
    "None": "not checked",
}
_TEMPLATE = """---
pretty_name: {title}
license: {license}
language: [en]
size_categories: ['{size}']
tags: [memcompiler, embodied-agents, memory]
---

# MemCompiler SFT rows: {place}

Steps of a teacher that compiles memory for an embodied agent. Each row holds both supervisions of the first training
stage: compiler input -> emission, and executor input -> action.

## Collection

A teacher plays the tasks with the entries that a memory bank of earlier episodes retrieves for each; every step that
passes the filters is a row.

| fact | value |
|---|---|
{facts}

## Contents

{contents}

| field | meaning |
|---|---|
{fields}

## Licence

{terms}
"""
_OWN_TERMS = "The scenes are generated by MemCompiler: the rows are under its licence, Apache 2.0."
_OTHER_TERMS = (
    "Texts and pictures come from {} and stay under its terms: check them before you publish. What MemCompiler adds "
    "(states, emissions) is under Apache 2.0."
)


def provenance(rows: Path) -> dict[str, Any]:
    """Return how rows were collected, from the files beside them; "unknown" for missing facts."""
    run = rows.parent
    config = read_yaml(run / "config.resolved.yaml") if (run / "config.resolved.yaml").is_file() else {}
    environment, git = config.get("env"), _read_object(run / "environment.json").get("git")
    environment, git = (each if isinstance(each, dict) else {} for each in (environment, git))
    collected = _read_object(run / "collect.json")
    facts = {
        "environment": environment.get("name"),
        "environment seed": environment.get("seed"),
        "split": config.get("split"),
        "tasks (SHA-256 of the manifest)": _read_object(run / "manifest.json").get("sha256"),
        "leakage": _VERDICTS.get(str(_read_object(run / "leakage.json").get("clean"))),
        "teacher": collected.get("teacher"),
        "teacher level": config.get("teacher_level"),
        "past commands": config.get("history"),
        "own scene": collected.get("own_scene"),
        "memory of the episodes": _listed(collected["recall"]) if "recall" in collected else None,
        "noise": config.get("noise"),
        "seed": config.get("seed"),
        "MemCompiler commit": git.get("commit"),
    }
    return {name: "unknown" if value is None else value for name, value in facts.items()}


def collection_counts(rows: Path) -> dict[str, Any]:
    """Return the collection's counts of played episodes and dropped rows, if it recorded them."""
    collected = _read_object(rows.parent / "collect.json")
    played = {name: collected[name] for name in ("episodes", "successes") if name in collected}
    return {"played": played, "dropped": collected.get("dropped")}


def dataset_card(origin: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Render the dataset's README.md.

    Args:
        origin: from `provenance`.
        found: from `statistics` and `collection_counts`.
    """
    licence = LICENCES.get(origin["environment"])
    cell = lambda value: without_newlines(str(value)).replace("|", r"\|")
    table = lambda facts: "\n".join(f"| {name} | {cell(value)} |" for name, value in facts.items())
    environment, split = (without_newlines(str(origin[name])) for name in ("environment", "split"))
    return _TEMPLATE.format(
        title=json.dumps(f"MemCompiler SFT rows, {environment} {split}"),
        place=f"{environment}, {split}",
        license=licence or "other",
        size=next(label for limit, label in _SIZES.items() if found["rows"] < limit),
        facts=table(origin),
        contents="\n".join(f"- {line}" for line in describe_statistics(found)),
        fields=table(FIELDS),
        terms=_OWN_TERMS if licence else _OTHER_TERMS.format(environment),
    )


def describe_rows(run: RunFolder, rows: Sequence[SftRow], collected: Mapping[str, Any]) -> None:
    """Write and print the rows' statistics, and write their card. `collected`: the content of collect.json."""
    played = {name: collected[name] for name in ("episodes", "successes")}
    found = statistics(rows, history=collected["history"]) | {"played": played, "dropped": collected["dropped"]}
    run.write_json("statistics.json", found)
    origin = provenance(run.path / "rows")
    origin |= {"teacher": collected["teacher"], "own scene": collected["own_scene"]}
    origin["memory of the episodes"] = _listed(collected["recall"])
    (run.path / "rows" / CARD).write_text(dataset_card(origin, found), encoding="utf-8")
    print_statistics(found)


def write_parquet(dataset: Dataset, folder: Path, split: str = "train") -> None:
    """Write a split as Parquet files that `datasets.load_dataset(folder)` reads."""
    (folder / "data").mkdir(exist_ok=True)
    shards = math.ceil(dataset.data.nbytes / SHARD_BYTES)
    for i in range(shards):
        file = folder / "data" / f"{split}-{i:05d}-of-{shards:05d}.parquet"
        dataset.shard(shards, i, contiguous=True).to_parquet(str(file))


def push_rows(rows: str | Path, repo: str, private: bool = True) -> str:
    """Upload the rows of one folder as a dataset of Parquet files with a card; return its address.

    Raises:
        FileNotFoundError: there are no rows.
        ValueError: several folders match the pattern, or a file beside them is unreadable.
    """
    from huggingface_hub import HfApi

    folders = row_folders(rows)
    if len(folders) > 1:
        raise ValueError(f"{len(folders)} folders of rows match {rows}: push each to its own repository")
    loaded = load_rows(folders[0])
    card = dataset_card(provenance(folders[0]), statistics(loaded) | collection_counts(folders[0]))
    with tempfile.TemporaryDirectory(prefix="memcompiler-push-") as folder:
        write_parquet(rows_to_dataset(loaded), Path(folder))
        (Path(folder) / CARD).write_text(card, encoding="utf-8")
        api = HfApi()
        api.create_repo(repo, repo_type="dataset", private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, repo_type="dataset", folder_path=folder)
    return f"hub:datasets/{repo}"


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; an empty one for a missing file. Raises: RecordError for anything else."""
    return read_json(path) if path.is_file() else {}
