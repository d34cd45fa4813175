"""Rows as a dataset: what is kept of a collection, what it holds, and its card, in a run folder and on the Hugging Face
hub (whose token comes from the environment, as for any HF tool).

runs/collect/rows/            the rows and README.md, their card
runs/collect/statistics.json  what `memcompiler data inspect` prints
runs/collect/plots/rows.png   the same, drawn
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
from data_gen.rows import SftRow, as_dataset, load_rows, row_folders
from runtime.store import read_json
from runtime.told import without_newlines

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

    from configs.collect import CollectConfig

# -- filters ----------------------------------------------------------------------------------------------------------


def distinct(rows: Sequence[SftRow]) -> list[SftRow]:
    """Keep the first of all rows with the same compiler input and emission."""
    seen: dict[tuple, SftRow] = {}
    for row in rows:
        read = (row.goal, row.memory_texts, row.memory_images, row.state, row.observation, row.image, row.history)
        seen.setdefault((*read, row.emission), row)
    return list(seen.values())


def thin_noaction(rows: Sequence[SftRow], keep: float, seed: int) -> list[SftRow]:
    """Keep all rows with something to say, and a seeded share of those with nothing (most steps need nothing)."""
    draw = random.Random(seed)
    return [row for row in rows if row.kind is not Kind.NOACTION or draw.random() < keep]


def cap_kinds(rows: Sequence[SftRow], ratio: float, seed: int) -> list[SftRow]:
    """Keep of each emission kind at most `ratio` times as many rows as the rarest kind has: a seeded sample, in
    order."""
    by_kind: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        by_kind.setdefault(row.kind, []).append(i)
    most = math.floor(ratio * min(map(len, by_kind.values()), default=0))
    draw = random.Random(seed)
    kept = {i for at in by_kind.values() for i in (draw.sample(at, most) if len(at) > most else at)}
    return [row for i, row in enumerate(rows) if i in kept]


def filtered(rows: Sequence[SftRow], config: CollectConfig) -> tuple[list[SftRow], dict[str, int]]:
    """Apply the filters that the settings ask for: what is left, and how many rows each dropped."""
    filters: dict[str, Callable[[list[SftRow]], list[SftRow]]] = {}
    if config.successful_only:
        filters["unsuccessful"] = lambda rows: [row for row in rows if row.success]
    if config.deduplicate:
        filters["duplicate"] = distinct
    if config.keep_noaction < 1:
        filters["noaction"] = lambda rows: thin_noaction(rows, config.keep_noaction, config.seed)
    if (ratio := config.max_kind_ratio) is not None:
        filters["kind_ratio"] = lambda rows: cap_kinds(rows, ratio, config.seed)
    kept, dropped = list(rows), {}
    for name, choose in filters.items():
        before, kept = len(kept), choose(kept)
        dropped[name] = before - len(kept)
    return kept, dropped


# -- statistics -------------------------------------------------------------------------------------------------------


def compiler_text(row: SftRow) -> str:
    """Return what the compiler reads, without instructions and pictures."""
    from agent.records import compile_request
    from compiler.prompt import compiler_parts

    request = compile_request(replace(row, image=None).step_input())
    return "".join(part.text for part in compiler_parts(request, images=False))


PARTS: Mapping[str, Callable[[SftRow], str]] = {  # whose lengths are counted
    "compiler input": compiler_text,
    "of it, memory": lambda row: row.memory_text,
    "emission": lambda row: row.emission,
    "action": lambda row: row.action,
}


def episodes_of(rows: Sequence[SftRow]) -> list[list[SftRow]]:
    """Group rows by episode: they stand in order, so that another task or an earlier step begins the next one."""
    episodes: list[list[SftRow]] = []
    for row in rows:
        last = episodes[-1][-1] if episodes else None
        if last is None or row.task_id != last.task_id or row.t <= last.t:
            episodes.append([])
        episodes[-1].append(row)
    return episodes


def statistics(rows: Sequence[SftRow], tokenizer: PreTrainedTokenizerBase | None = None) -> dict[str, Any]:
    """Count what rows hold, JSON-ready. Lengths are in characters, and in tokens too where there is a tokenizer.
    `success_rate` is of the episodes that rows are from (1 where failed ones were filtered out)."""
    episodes = episodes_of(rows)
    texts = {name: [part(row) for row in rows] for name, part in PARTS.items()}
    found: dict[str, Any] = {
        "rows": len(rows),
        "episodes": len(episodes),
        "tasks": len({row.task_id for row in rows}),
        "success_rate": sum(episode[0].success for episode in episodes) / max(1, len(episodes)),
        "with_picture": sum(row.image is not None for row in rows),
        "emissions": _counts(row.kind for row in rows),
        "verbs": _counts(verb(row.action) for row in rows),
        "steps_per_episode": spread([episode[0].steps for episode in episodes if episode[0].steps]),
        "memory_entries": spread([len(row.memory_ids) for row in rows]),
        "memory_pictures": spread([sum(map(len, row.memory_images)) for row in rows]),
        "characters": {name: spread([len(text) for text in some]) for name, some in texts.items()},
    }
    if tokenizer is not None:
        count = lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])
        found["tokens"] = {name: spread([count(text) for text in some]) for name, some in texts.items()}
    return found


def verb(action: str) -> str:
    return action.split(" ", 1)[0]


def spread(values: Sequence[int]) -> dict[str, float] | None:
    """Summarise values; None for no values."""
    if not values:
        return None
    ordered = sorted(values)
    at = lambda share: ordered[min(len(ordered) - 1, int(share * len(ordered)))]
    return {"mean": round(fmean(ordered), 2), "min": ordered[0], "median": at(0.5), "p95": at(0.95), "max": ordered[-1]}


def in_words(found: Mapping[str, Any]) -> list[str]:
    """Say what is counted, one line each."""
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
    """Print lengths and the like as a table, and counts in words."""
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
    for line in in_words(found):
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def _counts(names: Iterable[str]) -> dict[str, int]:
    return {str(name): n for name, n in sorted(Counter(names).items(), key=lambda item: (-item[1], item[0]))}


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in counts.items()) or "none"


def statistics_plot(rows: Sequence[SftRow], path: Path) -> Path:
    """Draw emission kinds, action verbs, steps per episode and lengths in characters, one small panel each."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 5.5), dpi=140, layout="constrained")
    kinds, verbs, steps, lengths = figure.subplots(2, 2).ravel()
    for panel, counts in ((kinds, _counts(row.kind for row in rows)), (verbs, _counts(verb(r.action) for r in rows))):
        names = list(counts)[:12]
        panel.barh(names, [counts[name] for name in names], color="#2f6f8f")
        panel.invert_yaxis()
    known = [episode[0].steps for episode in episodes_of(rows) if episode[0].steps]
    steps.hist(known, bins=range(1, max(known, default=1) + 2), align="left", color="#2f6f8f")
    lengths.hist([len(compiler_text(row)) for row in rows], bins=40, color="#2f6f8f", label="compiler input")
    lengths.hist([len(row.emission) for row in rows], bins=40, color="#c2703d", label="emission")
    lengths.legend(frameon=False, fontsize=8)
    titles = ("emissions, rows", "action verbs, rows", "steps, episodes", "characters, rows")
    for panel, title in zip((kinds, verbs, steps, lengths), titles, strict=True):
        panel.set_title(title, loc="left", fontsize=9)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(str(path))
    return path


# -- card and hub -----------------------------------------------------------------------------------------------------

CARD = "README.md"
SHARD_BYTES = 500 * 2**20  # of a file on the hub
LICENCES = {"household": "apache-2.0"}  # of texts and pictures; other environments have terms of their own
FIELDS: Mapping[str, str] = {
    "task_id, split, family": "the task that was played, and its place in the benchmark",
    "t, steps": "step of the episode, counted from 0, and how many steps the episode has (0: unknown)",
    "success": "whether the episode reached its goal",
    "goal": "the goal, as agent and memory state it",
    "memory_ids, memory_texts": "the entries that were retrieved for the episode, in the order of the prompt",
    "memory_images": "the views (PNG) that each of these entries keeps of its episode; empty where none does",
    "state": "the Brief State before the step",
    "observation, image": "what the environment showed: text, and the view (PNG) where it draws one",
    "first": "the first observation of the episode",
    "history": "the actions before the step",
    "commands": "what was possible, where executors are shown it; else empty",
    "emission": "what the teacher says as compiler: the target of the text loss",
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

## How it was made

A teacher plays the tasks with what a memory bank of earlier episodes retrieves for each; every step that the filters
keep is a row.

| fact | value |
|---|---|
{facts}

## What it holds

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
    """Say how rows were made, from the records of their collection beside them; "unknown" where those do not say."""
    run = rows.parent
    config = read_yaml(run / "config.resolved.yaml") if (run / "config.resolved.yaml").is_file() else {}
    environment, git = config.get("env"), _json(run / "environment.json").get("git")
    environment, git = (each if isinstance(each, dict) else {} for each in (environment, git))
    known = {
        "environment": environment.get("name"),
        "environment seed": environment.get("seed"),
        "split": config.get("split"),
        "tasks (SHA-256 of the manifest)": _json(run / "manifest.json").get("sha256"),
        "leakage": _VERDICTS.get(str(_json(run / "leakage.json").get("clean"))),
        "teacher": _json(run / "collect.json").get("teacher"),
        "noise": config.get("noise"),
        "seed": config.get("seed"),
        "MemCompiler commit": git.get("commit"),
    }
    return {name: "unknown" if value is None else value for name, value in known.items()}


def of_collection(rows: Path) -> dict[str, Any]:
    """Count episodes that were `played` and rows that were `dropped`, where the collection says so."""
    collected = _json(rows.parent / "collect.json")
    played = {name: collected[name] for name in ("episodes", "successes") if name in collected}
    return {"played": played, "dropped": collected.get("dropped")}


def dataset_card(made: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Write README.md of the dataset, from `provenance` and from `statistics` with what `of_collection` adds."""
    licence = LICENCES.get(made["environment"])
    cell = lambda value: without_newlines(str(value)).replace("|", r"\|")
    table = lambda facts: "\n".join(f"| {name} | {cell(value)} |" for name, value in facts.items())
    environment, split = (without_newlines(str(made[name])) for name in ("environment", "split"))
    return _TEMPLATE.format(
        title=json.dumps(f"MemCompiler SFT rows, {environment} {split}"),
        place=f"{environment}, {split}",
        license=licence or "other",
        size=next(label for limit, label in _SIZES.items() if found["rows"] < limit),
        facts=table(made),
        contents="\n".join(f"- {line}" for line in in_words(found)),
        fields=table(FIELDS),
        terms=_OWN_TERMS if licence else _OTHER_TERMS.format(environment),
    )


def describe_rows(run: RunFolder, rows: Sequence[SftRow], collected: Mapping[str, Any]) -> None:
    """Write statistics (also printed), their plot and the rows' card. `collected`: what collect.json says."""
    played = {name: collected[name] for name in ("episodes", "successes")}
    found = statistics(rows) | {"played": played, "dropped": collected["dropped"]}
    run.write_json("statistics.json", found)
    statistics_plot(rows, run.path / "plots" / "rows.png")
    made = provenance(run.path / "rows") | {"teacher": collected["teacher"]}
    (run.path / "rows" / CARD).write_text(dataset_card(made, found), encoding="utf-8")
    print_statistics(found)


def write_parquet(dataset: Dataset, folder: Path, split: str = "train") -> None:
    """Write a split as `datasets.load_dataset(folder)` reads it."""
    (folder / "data").mkdir(exist_ok=True)
    shards = math.ceil(dataset.data.nbytes / SHARD_BYTES)
    for i in range(shards):
        file = folder / "data" / f"{split}-{i:05d}-of-{shards:05d}.parquet"
        dataset.shard(shards, i, contiguous=True).to_parquet(str(file))


def push(rows: str | Path, repo: str, private: bool = True) -> str:
    """Upload the rows of one folder as Parquet, with their card, as a dataset; returns its address.
    `datasets.load_dataset(repo)` gives them back, pictures included.

    Raises:
        FileNotFoundError: there are no rows.
        ValueError: several folders fit the pattern, or a record beside them is not readable.
    """
    from huggingface_hub import HfApi

    folders = row_folders(rows)
    if len(folders) > 1:
        raise ValueError(f"{len(folders)} folders of rows fit {rows}: push each to a repository of its own")
    loaded = load_rows(folders[0])
    card = dataset_card(provenance(folders[0]), statistics(loaded) | of_collection(folders[0]))
    with tempfile.TemporaryDirectory(prefix="memcompiler-push-") as folder:
        write_parquet(as_dataset(loaded), Path(folder))
        (Path(folder) / CARD).write_text(card, encoding="utf-8")
        api = HfApi()
        api.create_repo(repo, repo_type="dataset", private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, repo_type="dataset", folder_path=folder)
    return f"hub:datasets/{repo}"


def _json(path: Path) -> dict[str, Any]:
    """Read an object from a file; an empty one where there is none. Raises: RecordError, for anything else."""
    return read_json(path) if path.is_file() else {}
