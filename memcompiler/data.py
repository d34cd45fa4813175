"""Commands for banks and rows: `bank`, `data` and `leakage`."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from memcompiler.options import Out, Public, Repository, command_group, with_settings

if TYPE_CHECKING:
    from configs.collect import CollectConfig, QuestionsConfig
    from data_gen.leakage import LeakageAudit
    from envs.manifest import Manifest
    from memory.bank import MemoryBank

bank_app = command_group("Inspect, copy, export or import a memory bank.")
Bank = Annotated[str, typer.Argument(help="Folder of a bank, or s3://BUCKET/PREFIX.")]
data_app = command_group("Inspect, export or push SFT rows; generate questions with a language model.")


@bank_app.command("inspect")
def bank_inspect(bank: Bank) -> None:
    """Print a bank's number of entries by split, scene and source, and its versions."""
    from memory.bank import MemoryBank

    typer.echo(json.dumps(MemoryBank(bank).inspect(), indent=1))


@bank_app.command("show")
def bank_show(
    bank: Bank,
    run: Annotated[Path | None, typer.Option(help="Run folder of eval: also show what it recalled.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for pictures (default: BANK/show).")] = None,
    most: Annotated[int, typer.Option(min=1, help="Maximum rows of a table.")] = 20,
    env: Annotated[
        str | None, typer.Option(help="Environment whose views it read (default: the one that the bank names).")
    ] = None,
) -> None:
    """Print and draw the content of a memory; with --run, also the entries that the run recalled and followed."""
    from eval.memory_report import show
    from memory.bank_store import place_of

    place = place_of(bank)
    beside = place / "show" if isinstance(place, Path) else Path("show")  # a bank on a store has no pictures to draw
    show(place, run, out or beside, most, env)


@bank_app.command("export")
def bank_export(bank: Bank, jsonl: Path) -> None:
    """Export a bank as JSON lines (pictures as base64)."""
    from configs.run_folder import check_inputs
    from memory.bank import MemoryBank

    opened = MemoryBank(bank)
    check_inputs(jsonl, [("BANK", opened.place)] if isinstance(opened.place, Path) else [])
    if jsonl.exists():
        raise FileExistsError(f"{jsonl} exists: choose another file")
    opened.export_jsonl(jsonl)


@bank_app.command("import")
def bank_import(bank: Bank, jsonl: Path) -> None:
    """Import JSON lines into a bank; existing entries stay unchanged."""
    from memory.bank import MemoryBank

    opened = MemoryBank(bank)
    with _locked(opened, "bank import"):
        opened.import_jsonl(jsonl)


@bank_app.command("copy")
def bank_copy(bank: Bank, to: Bank) -> None:
    """Append a bank's entries to another bank or a new one; either may be on an object store. Entries that it has
    stay unchanged. An interrupted copy is continued by the same command."""
    from memory.bank import MemoryBank

    source, target = MemoryBank(bank), MemoryBank(to)
    with _locked(target, "bank copy"):
        written = target.copy_from(source)
    typer.echo(f"{to}: {written.added} entries added, {written.ignored} known, version {target.snapshot()}")


@contextmanager
def _locked(bank: "MemoryBank", command: str) -> Iterator[None]:
    """Hold the locks of a bank's folder. A store needs none: it accepts each version from one process only."""
    from configs.run_folder import memory_lock

    with memory_lock(bank.place, command) if isinstance(bank.place, Path) else nullcontext():
        yield


@data_app.command("inspect")
def data_inspect(
    rows: Annotated[list[str], typer.Argument(help="Folders of rows, or patterns such as 'runs/shard-*/rows'.")],
    tokenizer: Annotated[str | None, typer.Option(help="Also count tokens: a Hugging Face name or folder.")] = None,
) -> None:
    """Print statistics of rows from all folders together: episodes, emission kinds, lengths, actions."""
    from configs.models import model_path
    from data_gen.dataset import collection_counts, print_statistics, statistics
    from data_gen.rows import load_rows, row_folders
    from runtime.progress import disable_library_progress_bars

    disable_library_progress_bars()
    folders = row_folders(rows)
    reader = None
    if tokenizer is not None:
        from transformers import AutoTokenizer

        reader = AutoTokenizer.from_pretrained(model_path(tokenizer))
    found = statistics(load_rows(folders), reader)
    if len(folders) == 1:
        found |= collection_counts(folders[0])
    print_statistics(found)


@data_app.command("questions")
@with_settings("configs.collect:QuestionsConfig")
def data_questions(settings: "QuestionsConfig", out: Out = Path("out/questions")) -> None:
    """Generate questions about the experts' histories with a language model, for `train router --questions
    OUT/questions.jsonl` (docs/guides/questions.md)."""
    from configs.run_folder import output_folder
    from data_gen.questions.histories import expert_histories
    from data_gen.questions.llm_questions import (
        ACCOUNT,
        QUESTIONS,
        REJECTED,
        RESPONSES,
        QuestionTeacher,
        write_questions,
    )
    from lm.endpoint import Endpoint

    with output_folder(out, "data questions", (ACCOUNT, QUESTIONS, REJECTED), "teacher"):
        teacher = QuestionTeacher(Endpoint(settings.api, out / RESPONSES), settings.per_part)
        sources = expert_histories(settings.environments, settings.seed, settings.worlds)
        histories = [trace for source in sources for trace in source.histories]
        typer.echo(json.dumps(write_questions(teacher, histories, out), indent=1))


@data_app.command("push")
def data_push(
    rows: Annotated[Path, typer.Argument(help="A folder of rows.")], repo: Repository, public: Public = False
) -> None:
    """Upload rows (Parquet, pictures included) and their card to the Hugging Face hub."""
    from data_gen.dataset import push_rows
    from runtime.progress import disable_library_progress_bars

    disable_library_progress_bars()
    typer.echo(push_rows(rows, repo, private=not public))


@data_app.command("export")
def data_export(
    rows: Annotated[list[str], typer.Argument(help="Folders of rows, or patterns such as 'runs/shard-*/rows'.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="New folder.")],
    images: Annotated[bool, typer.Option("--images", help="Include pictures, for vision-language models.")] = False,
    instructions: Annotated[bool, typer.Option(help="Include the compiler's instructions as system turn.")] = True,
    held_out: Annotated[float, typer.Option(min=0, max=1, help="Share of the tasks in split `test`.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Selects these tasks, as in SFT's validation.")] = 0,
    history: Annotated[Literal["0", "1", "all"], typer.Option(help="Past commands, as compiler.history.")] = "1",
    entries: Annotated[
        Literal["whole", "commands"], typer.Option(help="Raw trajectories of memory, as compiler.entries.")
    ] = "whole",
) -> None:
    """Export rows as TRL conversations (prompt and completion, Parquet) for `trl sft --dataset_name OUT`."""
    from compiler.prompt import system_turns
    from configs.run_folder import check_inputs
    from data_gen.conversations import export_conversations
    from data_gen.leakage import rows_by_environment, rows_environments
    from data_gen.rows import load_rows, row_folders
    from envs.registry import of_environments
    from runtime.progress import disable_library_progress_bars

    disable_library_progress_bars()
    folders = row_folders(rows)
    check_inputs(out, [("ROWS", folder) for folder in folders])
    environments = {name: spec.compiler_instructions for name, spec in rows_environments(folders).items()}
    named = rows_by_environment(folders).items()
    loaded = [replace(row, environment=name) for name, some in named for row in load_rows(some)]
    exported = export_conversations(
        loaded,
        out,
        instructions=system_turns(of_environments(environments)) if instructions else "",
        images=images,
        history="all" if history == "all" else 1 if history == "1" else 0,
        entries=entries,
        held_out=held_out,
        seed=seed,
    )
    typer.echo(f"{out}: {exported}")


@with_settings("configs.collect:CollectConfig")
def leakage(
    settings: "CollectConfig",
    train: Annotated[Path | None, typer.Option(help="Manifest of the training side (default: the settings').")] = None,
    evaluation: Annotated[Path | None, typer.Option("--eval", help="Manifest of the evaluation side.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for manifest.json, leakage.json.")] = None,
) -> None:
    """Check whether training and evaluation tasks overlap; exit 1 on a leak, or if nothing could be checked. Settings
    as for collect: env, split, leakage.held_out."""
    run_leakage(train, evaluation, settings, out)


def run_leakage(
    train: Path | None, evaluation: Path | None, config: "CollectConfig | None", out: Path | None = None
) -> None:
    """Print the overlap of training and evaluation tasks; write manifest.json and leakage.json to OUT.

    Each side is a manifest, or comes from a `collect` configuration: the tasks that it plays, and its held-out splits.

    Raises:
        ConfigError: the tasks leak, or nothing could be checked.
        ManifestError, LeakageError: the files cannot be compared.
    """
    from rich.console import Console

    from configs.load import ConfigError
    from configs.run_folder import output_folder
    from data_gen.leakage import LEAKAGE, MANIFEST
    from runtime.store import write_atomically

    if config is None and (train is None or evaluation is None):
        raise ConfigError("give --train and --eval, or a collect configuration for the missing side")
    training, audit = _sides(train, evaluation, config)
    console = Console(width=120)
    if audit.verdict:
        console.print(audit.verdict.table())
    if out is not None:
        with output_folder(out, "leakage", (LEAKAGE, MANIFEST), "train_sha256"):
            write_atomically(out / LEAKAGE, json.dumps(audit.to_json(), indent=2) + "\n")
            training.write(out / MANIFEST)
    if not audit.clean:
        raise ConfigError("; ".join(audit.leaks) or f"nothing was checked. {audit.summary}")
    if audit.unchecked:
        console.print(audit.summary)


def _sides(
    train: Path | None, evaluation: Path | None, config: "CollectConfig | None"
) -> tuple["Manifest", "LeakageAudit"]:
    from data_gen.isolation import check
    from data_gen.leakage import LeakageAudit, audit_training, held_out_tasks
    from data_gen.tasks import select_tasks
    from envs.manifest import Manifest
    from envs.registry import Environments

    training, held_out = (Manifest.read(path) if path else None for path in (train, evaluation))
    if training and held_out:
        return training, LeakageAudit(training.sha256, check(training, held_out))
    assert config is not None
    with Environments(config.env) as envs:
        if training is None:
            tasks, experience = select_tasks(config, envs, config.split, envs.spec.expert)
            training = Manifest.of(config.env.name, [*tasks, *experience])
        if held_out:
            return training, LeakageAudit(training.sha256, check(training, held_out))
        return training, audit_training(config, training, *held_out_tasks(config, envs))
