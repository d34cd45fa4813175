"""The `memcompiler` command. Heavy imports happen inside the commands, so that --help answers at once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Compile memory for embodied agents, don't inject it."
)
train_app = typer.Typer(no_args_is_help=True, help="Train the compiler and the soft-token projector.")
bank_app = typer.Typer(no_args_is_help=True, help="Look at a memory bank, import or export it.")
env_app = typer.Typer(no_args_is_help=True, help="Write generated homes as ALFWorld games; serve any environment.")
bench_app = typer.Typer(no_args_is_help=True, help="Measure side by side; the last line is the ratio.")
tiny_app = typer.Typer(no_args_is_help=True, help="Reproduce and test the tiny models that the repository ships.")
app.add_typer(train_app, name="train")
app.add_typer(bank_app, name="bank")
app.add_typer(env_app, name="env")
app.add_typer(bench_app, name="bench")
app.add_typer(tiny_app, name="tiny")

Config = Annotated[str | None, typer.Option("--config", "-c", help="YAML file, or a name in configs/.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Run folder.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Settings as a.b=c, over the file's.")]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="Print the resolved settings and stop.")]
OnExists = Annotated[str, typer.Option(help="What to do when the run folder exists: resume, overwrite, raise or ask.")]


@app.command()
def doctor() -> None:
    """Check this machine: the core, and what each missing extra needs."""
    from memcompiler.doctor import run_doctor

    raise typer.Exit(run_doctor())


@app.command()
def quickstart(
    overrides: Overrides = None,
    config: Config = "quickstart",
    out: Out = Path("out/quickstart"),
    print_config: PrintConfig = False,
    on_exists: OnExists = "overwrite",
) -> None:
    """The whole system once, on two CPU cores: collect, train, roll out, evaluate, report."""
    from configs.schema import QuickstartConfig

    settings = _load(QuickstartConfig, config, overrides, print_config)
    from memcompiler.commands import run_quickstart

    _guard(run_quickstart, settings, out, on_exists)


@app.command()
def collect(
    overrides: Overrides = None, config: Config = None, out: Out = Path("out/collect"),
    print_config: PrintConfig = False, on_exists: OnExists = "resume",
) -> None:  # fmt: skip
    """Play the training tasks with the expert: a memory bank (OUT/bank) and SFT rows (OUT/rows)."""
    from configs.schema import CollectConfig

    settings = _load(CollectConfig, config, overrides, print_config)
    from memcompiler.commands import run_collect

    _guard(run_collect, settings, out, on_exists)


@train_app.command("sft")
def train_sft(
    overrides: Overrides = None, config: Config = None, out: Out = Path("out/sft"),
    print_config: PrintConfig = False, on_exists: OnExists = "resume",
) -> None:  # fmt: skip
    """Stage 1: LoRA and projector on SFT rows, against the frozen executor. Resumes after a kill."""
    from configs.schema import SftConfig

    settings = _load(SftConfig, config, overrides, print_config)
    from memcompiler.commands import run_train_sft

    _guard(run_train_sft, settings, out, on_exists)


@train_app.command("grpo")
def train_grpo(
    overrides: Overrides = None, config: Config = None, out: Out = Path("out/grpo"),
    print_config: PrintConfig = False, on_exists: OnExists = "resume",
) -> None:  # fmt: skip
    """Stage 2: continue an SFT checkpoint by GRPO on binary success, text and soft tokens together. Resumes."""
    from configs.schema import GrpoConfig

    settings = _load(GrpoConfig, config, overrides, print_config)
    from memcompiler.grpo import run_train_grpo

    _guard(run_train_grpo, settings, out, on_exists)


@app.command("eval")
def evaluate(
    overrides: Overrides = None, config: Config = None, out: Out = Path("out/eval"),
    print_config: PrintConfig = False, on_exists: OnExists = "overwrite",
) -> None:  # fmt: skip
    """Evaluate deliveries side by side on the same tasks; writes results.json, episodes.jsonl and report.html."""
    from configs.schema import EvalConfig

    settings = _load(EvalConfig, config, overrides, print_config)
    from memcompiler.commands import run_eval

    _guard(run_eval, settings, out, on_exists)


@app.command()
def report(run: Annotated[Path, typer.Argument(help="A run folder with results.json and episodes.jsonl.")]) -> None:
    """Write RUN/report.html again."""
    from eval.report import write_run_report

    typer.echo(str(write_run_report(run)))


@app.command()
def push(
    run: Annotated[Path, typer.Argument(help="A run or checkpoint folder.")],
    repo: Annotated[str, typer.Argument(help="Hub repository, owner/name.")],
    public: Annotated[bool, typer.Option(help="Make a new repository public.")] = False,
) -> None:
    """Upload a checkpoint (adapter, projector, model card) to the Hugging Face hub."""
    from training.publish import push as upload

    _guard(lambda: typer.echo(upload(run, repo, private=not public)))


@bank_app.command("inspect")
def bank_inspect(bank: Path) -> None:
    """What a bank holds: entries by split, scene and source, versions."""
    import json

    from memory.bank import MemoryBank

    typer.echo(json.dumps(MemoryBank(bank).inspect(), indent=1))


@bank_app.command("export")
def bank_export(bank: Path, jsonl: Path) -> None:
    """Bank to JSON lines (pictures as base64)."""
    from memory.bank import MemoryBank

    MemoryBank(bank).export_jsonl(jsonl)


@bank_app.command("import")
def bank_import(bank: Path, jsonl: Path) -> None:
    """JSON lines into a bank; entries that are there already are left alone."""
    from memory.bank import MemoryBank

    MemoryBank(bank).import_jsonl(jsonl)


@app.command()
def parity(
    games: Annotated[Path, typer.Option(help="Folder with game.tw-pddl files, e.g. $ALFWORLD_DATA.")],
    steps: Annotated[int, typer.Option(min=1, help="Commands to compare, over all games.")] = 2000,
    seed: Annotated[int, typer.Option(help="Seed of the games' order and of the walks.")] = 0,
    per_game: Annotated[int, typer.Option(min=1, help="Commands in each game.")] = 400,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    plain: Annotated[bool, typer.Option(help="TextWorld untouched, its parsers not memoised.")] = False,
) -> None:  # fmt: skip
    """Play the same commands in TextWorld and in the native engine; exit 1 if any answer differs."""
    from memcompiler.engines import run_parity

    _guard(run_parity, games, steps, seed, per_game, jobs, plain)


@app.command()
def leakage(
    overrides: Overrides = None, config: Config = None,
    train: Annotated[Path | None, typer.Option(help="Manifest of the training side (default: the settings').")] = None,
    evaluation: Annotated[Path | None, typer.Option("--eval", help="Manifest of the evaluation side.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for manifest.json, leakage.json.")] = None,
) -> None:  # fmt: skip
    """What training and evaluation share; exits 1 on a leak, or when nothing could be checked. Settings as for
    collect: env, split, leakage.held_out."""
    from configs.schema import CollectConfig

    settings = None if train and evaluation else _load(CollectConfig, config, overrides, False)
    from memcompiler.leakage import run_leakage

    _guard(run_leakage, train, evaluation, settings, out)


@env_app.command("export")
def env_export(
    overrides: Overrides = None, config: Config = None,
    split: Annotated[str, typer.Option(help="Split of the generated scenes to write.")] = "test",
    limit: Annotated[int | None, typer.Option(min=1, help="So many tasks (default: all).")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="An ALFWORLD_DATA folder to make.")] = Path("out/alfworld"),
) -> None:  # fmt: skip
    """Write a generated split as ALFWorld games, which alfworld and TextWorld play too (extra `alfworld`). Settings as
    for collect: env.seed, env.scenes, env.kinds."""
    from configs.schema import CollectConfig

    settings = _load(CollectConfig, config, overrides, False)
    from memcompiler.engines import run_export

    _guard(run_export, settings.env, split, limit, out)


@env_app.command("serve")
def env_serve(
    overrides: Overrides = None, config: Config = None,
    host: Annotated[str, typer.Option(help="Address to bind to.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port.")] = 8765,
    sessions: Annotated[int, typer.Option(min=1, help="Clients at a time.")] = 64,
) -> None:  # fmt: skip
    """Serve an environment in the OpenEnv protocol (extra `openenv`); settings as for collect: env and split. There is
    no authentication: keep to loopback."""
    from configs.schema import CollectConfig

    settings = _load(CollectConfig, config, overrides, False)
    from memcompiler.engines import run_serve

    _guard(run_serve, settings, host, port, sessions)


@bench_app.command("env")
def bench_env(
    games: Annotated[Path, typer.Option(help="Folder with game.tw-pddl files, e.g. $ALFWORLD_DATA.")],
    number: Annotated[int, typer.Option(min=1, help="Games, one of each split and task type in turn.")] = 6,
    steps: Annotated[int, typer.Option(min=1, help="Steps in each game.")] = 40,
    seed: Annotated[int, typer.Option(help="Seed of the games and of the walks.")] = 0,
) -> None:
    """Resets and steps per second of TextWorld and of the native engine, on the same games and commands."""
    from memcompiler.engines import run_bench

    _guard(run_bench, games, number, steps, seed)


@bench_app.command("rollout")
def bench_rollout(
    overrides: Overrides = None, config: Config = "grpo/quickstart", out: Out = Path("out/bench-rollout"),
    updates: Annotated[int, typer.Option(min=1, help="Updates whose rollouts are played, each way.")] = 2,
    print_config: PrintConfig = False,
) -> None:  # fmt: skip
    """Rollouts with all episodes batched against one episode at a time."""
    from configs.schema import GrpoConfig

    settings = _load(GrpoConfig, config, overrides, print_config)
    from memcompiler.grpo import run_bench_rollout

    _guard(run_bench_rollout, settings, out, updates)


@tiny_app.command("gate")
def tiny_gate(
    model: Annotated[str, typer.Option(help="Compiler base to test.")] = "assets/compiler-tiny",
    scenes: Annotated[int, typer.Option(help="Held-out scenes.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the scenes.")] = 1,
) -> None:
    """The look-up gate: does the base name the place that the right memory entry holds? Exits 1 at 95 % or below."""
    from training.tiny.gate import run_gate

    raise typer.Exit(run_gate(model, scenes, seed))


@tiny_app.command("compiler")
def tiny_compiler(out: Out = Path("assets/compiler-tiny"), seed: int = 0) -> None:
    """Pretrain the tiny compiler base from nothing (CPU, about an hour); writes the model and its RECORD.json."""
    from training.tiny.pretrain import pretrain_compiler

    pretrain_compiler(out, seed)


@tiny_app.command("executor")
def tiny_executor(out: Out = Path("assets/executor-tiny"), seed: int = 0) -> None:
    """Train the tiny executor from nothing (CPU, about an hour); writes the model and its RECORD.json."""
    from training.tiny.pretrain import pretrain_executor

    pretrain_executor(out, seed)


def _load(schema, config: str | None, overrides: list[str] | None, print_config: bool):
    """Settings, or a clear message and exit 2."""
    from configs.load import ConfigError, load_config, to_yaml

    try:
        settings = load_config(schema, config, overrides or [])
    except ConfigError as error:
        typer.secho(str(error), err=True, fg="red")
        raise typer.Exit(2) from error
    if print_config:
        typer.echo(to_yaml(settings))
        raise typer.Exit
    return settings


def _guard(command, *arguments: object) -> None:
    """Known failures end in one clear line; anything else keeps its traceback."""
    from configs.load import ConfigError
    from envs.base import EnvironmentFailure
    from memory.bank import BankError
    from training.checkpoint import CheckpointError

    known = (
        BankError, CheckpointError, ConfigError, EnvironmentFailure, FileExistsError, FileNotFoundError,
        ModuleNotFoundError, ValueError,
    )  # fmt: skip
    try:
        command(*arguments)
    except known as error:
        typer.secho(f"error: {error}", err=True, fg="red")
        raise typer.Exit(1) from error


def main() -> None:
    app()
