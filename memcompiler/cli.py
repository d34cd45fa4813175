"""The `memcompiler` command. Heavy imports happen inside the commands, so that --help answers at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup


class RunsByDefault(TyperGroup):
    """`report RUN ...` is `report runs RUN ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, *ctx.help_option_names}:
            args = ["runs", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Compile memory for embodied agents, don't inject it."
)
train_app = typer.Typer(no_args_is_help=True, help="Train the compiler and the soft-token projector.")
launch_app = typer.Typer(no_args_is_help=True, help="Training and the services it needs, each on GPUs of its own.")
bank_app = typer.Typer(no_args_is_help=True, help="Look at a memory bank, import or export it.")
data_app = typer.Typer(no_args_is_help=True, help="Look at SFT rows, push them to the Hugging Face hub.")
env_app = typer.Typer(no_args_is_help=True, help="Write generated homes as ALFWorld games; serve any environment.")
bench_app = typer.Typer(no_args_is_help=True, help="Measure side by side; the last line is the ratio.")
zoo_app = typer.Typer(no_args_is_help=True, help="Reproduce and test the tiny models that the repository ships.")
report_app = typer.Typer(
    no_args_is_help=True, cls=RunsByDefault,
    help="Evaluations as a page that opens offline, one (RUN) or several compared (RUN RUN ...), or beside the paper.",
)  # fmt: skip
serve_app = typer.Typer(no_args_is_help=True, help="Serve compiler and executor over HTTP, on loopback.")
app.add_typer(train_app, name="train")
app.add_typer(serve_app, name="serve")
app.add_typer(launch_app, name="launch")
app.add_typer(bank_app, name="bank")
app.add_typer(data_app, name="data")
app.add_typer(env_app, name="env")
app.add_typer(bench_app, name="bench")
app.add_typer(zoo_app, name="zoo")
app.add_typer(report_app, name="report")

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
    from configs.quickstart import QuickstartConfig
    from eval.matrix import cells

    settings = _load(QuickstartConfig, config, overrides, print_config, lambda settings: cells(settings.eval))
    from memcompiler.quickstart import run_quickstart

    _guard(run_quickstart, settings, out, on_exists)


@app.command()
def collect(
    overrides: Overrides = None, config: Config = None, out: Out = Path("out/collect"),
    print_config: PrintConfig = False, on_exists: OnExists = "resume",
) -> None:  # fmt: skip
    """Play the training tasks with a teacher, the expert or an endpoint: a memory bank (OUT/bank) and SFT rows
    (OUT/rows)."""
    from configs.collect import CollectConfig

    settings = _load(CollectConfig, config, overrides, print_config)
    from memcompiler.collect import run_collect

    _guard(run_collect, settings, out, on_exists)


@train_app.command("sft")
def train_sft(
    overrides: Overrides = None, config: Config = None, out: Out = Path("out/sft"),
    print_config: PrintConfig = False, on_exists: OnExists = "resume",
) -> None:  # fmt: skip
    """Stage 1: LoRA and projector on SFT rows, against the frozen executor. Resumes after a kill."""
    from configs.training import SftConfig

    settings = _load(SftConfig, config, overrides, print_config)
    from memcompiler.sft import run_train_sft

    _guard(run_train_sft, settings, out, on_exists)


@train_app.command("grpo")
def train_grpo(
    overrides: Overrides = None, config: Config = None, out: Out = Path("out/grpo"),
    print_config: PrintConfig = False, on_exists: OnExists = "resume",
) -> None:  # fmt: skip
    """Stage 2: continue an SFT checkpoint by GRPO on binary success, text and soft tokens together. Resumes."""
    from configs.training import GrpoConfig

    settings = _load(GrpoConfig, config, overrides, print_config)
    from memcompiler.grpo import run_train_grpo

    _guard(run_train_grpo, settings, out, on_exists)


@launch_app.command("grpo")
def launch_grpo(
    overrides: Overrides = None, config: Config = None, out: Out = Path("out/grpo"),
    torchrun: Annotated[str, typer.Option(help="Further arguments of torchrun, where several nodes meet.")] = "",
    print_config: PrintConfig = False, on_exists: OnExists = "resume",
) -> None:  # fmt: skip
    """Stage 2 with the GPUs of a node shared out: placement.actors train, placement.rollouts compile, and
    placement.executors act. Settings as for train grpo."""
    from configs.training import GrpoConfig

    settings = _load(GrpoConfig, config, overrides, print_config)
    from training.launch import launch_grpo as launch

    _guard(launch, settings, out, torchrun, on_exists)


@app.command("eval")
def evaluate(
    overrides: Overrides = None, config: Config = None, out: Out = Path("out/eval"),
    print_config: PrintConfig = False, on_exists: OnExists = "overwrite",
) -> None:  # fmt: skip
    """Evaluate deliveries side by side on the same tasks, or a matrix of settings; writes results.json, episodes.jsonl
    and report.html. After a kill, --on-exists resume goes on."""
    from configs.evaluation import EvalConfig
    from eval.matrix import cells

    settings = _load(EvalConfig, config, overrides, print_config, cells)
    from eval.evaluate import run_eval

    _guard(run_eval, settings, out, on_exists)


@report_app.command("runs")
def report_runs(
    runs: Annotated[list[Path], typer.Argument(help="Run folders with results.json; the first is the baseline.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="HTML file (default: in the first run).")] = None,
    tasks: Annotated[int, typer.Option(min=1, help="Replay so many tasks, as far as the page holds them.")] = 12,
    task: Annotated[list[str] | None, typer.Option(help="Replay this task; may be given several times.")] = None,
) -> None:
    """Write RUN/report.html again, or compare several runs in FIRST/compare.html. Either is one file that opens
    offline."""
    from eval.compare import write_comparison
    from eval.report import Replays, write_run_report

    replays = Replays(tasks, tuple(task or ()))

    def write() -> None:
        page = write_comparison(runs, out, replays) if len(runs) > 1 else write_run_report(runs[0], out, replays)
        typer.echo(str(page))

    _guard(write)


@report_app.command("paper")
def report_paper(
    runs: Annotated[
        list[str] | None,
        typer.Argument(help="Run folders (none: the paper's table); for a figure one, and a.b=c over its settings."),
    ] = None,
    table: Annotated[int | None, typer.Option(help="1 to 6, from runs with results.json.")] = None,
    figure: Annotated[
        int | None, typer.Option(help="3: attention by step, 4: soft and text tokens; a run, or a cell of a matrix.")
    ] = None,
    deliveries: Annotated[str, typer.Option(help="Of a figure, such as static,compiled.")] = "",
    limit: Annotated[int | None, typer.Option(min=1, help="So many tasks for a figure (default: all).")] = None,
    seed: Annotated[int, typer.Option(help="Of figure 4: seed of t-SNE, of the probe's split and its shuffles.")] = 0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder to write to (default: RUN/paper).")] = None,
) -> None:
    """One of the paper's tables, or of its measured figures, with what RUN measured beside it: Markdown, JSON, PNG
    (docs/paper-tables.md)."""
    from eval.paper.commands import run_figure, run_table

    if (table is None) == (figure is None):
        raise typer.BadParameter("say which: --table N or --figure N")
    folders = [Path(run) for run in runs or [] if "=" not in run or Path(run).is_dir()]  # a cell's name has one, too
    overrides = [run for run in runs or [] if Path(run) not in folders]
    if table is not None:
        if overrides:
            raise typer.BadParameter(f"no such run: {overrides[0]}")
        _guard(run_table, table, folders, out)
    elif len(folders) != 1:
        raise typer.BadParameter(f"a figure is made from one run: name one, not {len(folders)}")
    else:
        named = tuple(name for name in deliveries.split(",") if name)
        _guard(run_figure, figure, folders[0], overrides, out, named, limit, seed)


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


@data_app.command("inspect")
def data_inspect(
    rows: Annotated[list[str], typer.Argument(help="Folders of rows, or patterns such as 'runs/shard-*/rows'.")],
    tokenizer: Annotated[str | None, typer.Option(help="Count tokens, too: a Hugging Face name or folder.")] = None,
) -> None:
    """What rows hold: episodes, emission kinds, lengths, actions; all folders together."""
    from memcompiler.data import run_inspect

    _guard(run_inspect, rows, tokenizer)


@data_app.command("push")
def data_push(
    rows: Annotated[Path, typer.Argument(help="A folder of rows.")],
    repo: Annotated[str, typer.Argument(help="Hub repository, owner/name.")],
    public: Annotated[bool, typer.Option(help="Make a new repository public.")] = False,
) -> None:
    """Upload rows (Parquet, pictures included) and their card to the Hugging Face hub."""
    from memcompiler.data import run_push

    _guard(run_push, rows, repo, public)


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
    from memcompiler.env import run_parity

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
    from configs.collect import CollectConfig

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
    from configs.collect import CollectConfig

    settings = _load(CollectConfig, config, overrides, False)
    from memcompiler.env import run_export

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
    from configs.collect import CollectConfig

    settings = _load(CollectConfig, config, overrides, False)
    from memcompiler.env import run_serve

    _guard(run_serve, settings, host, port, sessions)


@serve_app.command("compiler")
def serve_compiler(
    overrides: Overrides = None, config: Config = None,
    checkpoint: Annotated[str | None, typer.Option(help="A run or checkpoint (compiler.checkpoint).")] = None,
    host: Annotated[str, typer.Option(help="Loopback address to bind to.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8100,
    print_config: PrintConfig = False,
) -> None:  # fmt: skip
    """A trained compiler, with its projector, behind POST /compile (docs/serving.md). In vLLM, unless
    compiler.engine=hf."""
    from configs.serving import ServeConfig

    named = [f"compiler.checkpoint={checkpoint}"] if checkpoint else []
    settings = _load(ServeConfig, config, [*(overrides or []), *named], print_config)
    from memcompiler.serve import run_serve_compiler

    _guard(run_serve_compiler, settings, host, port)


@serve_app.command("executor")
def serve_executor(
    model: Annotated[str, typer.Option(help="Any Hugging Face name or folder.")],
    extra: Annotated[list[str] | None, typer.Argument(help="After --: further arguments of vllm serve.")] = None,
    host: Annotated[str, typer.Option(help="Loopback address to bind to.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port.")] = 8000,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the command.")] = False,
) -> None:  # fmt: skip
    """A frozen executor behind vLLM's own server, started so that it takes soft tokens."""
    from memcompiler.serve import run_serve_executor

    _guard(run_serve_executor, model, host, port, extra or [], dry_run)


@bench_app.command("env")
def bench_env(
    games: Annotated[Path, typer.Option(help="Folder with game.tw-pddl files, e.g. $ALFWORLD_DATA.")],
    number: Annotated[int, typer.Option(min=1, help="Games, one of each split and task type in turn.")] = 6,
    steps: Annotated[int, typer.Option(min=1, help="Steps in each game.")] = 40,
    seed: Annotated[int, typer.Option(help="Seed of the games and of the walks.")] = 0,
) -> None:
    """Resets and steps per second of TextWorld and of the native engine, on the same games and commands."""
    from memcompiler.env import run_bench

    _guard(run_bench, games, number, steps, seed)


@bench_app.command("rollout")
def bench_rollout(
    overrides: Overrides = None, config: Config = "grpo/quickstart", out: Out = Path("out/bench-rollout"),
    updates: Annotated[int, typer.Option(min=1, help="Updates whose rollouts are played, each way.")] = 2,
    print_config: PrintConfig = False,
) -> None:  # fmt: skip
    """Rollouts with all episodes batched against one episode at a time."""
    from configs.training import GrpoConfig

    settings = _load(GrpoConfig, config, overrides, print_config)
    from memcompiler.grpo import run_bench_rollout

    _guard(run_bench_rollout, settings, out, updates)


@bench_app.command("delivery")
def bench_delivery(
    model: Annotated[str, typer.Option(help="Hugging Face name or folder: executor, and base of the compiler.")],
    memory_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an episode's task memory.")] = 1500,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each episode.")] = 10,
    concurrency: Annotated[str, typer.Option(help="Episodes side by side, such as 1,4,16.")] = "1,4,16",
    engine: Annotated[str, typer.Option(help="hf, vllm or both.")] = "both",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16; auto: bfloat16 on a GPU.")] = "auto",
    n_soft: Annotated[int, typer.Option(min=1, help="Soft tokens.")] = 16,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Run folder, for results.json.")] = None,
) -> None:
    """What a step costs, static against compiled delivery of the same memory: tokens, latency and where it goes,
    throughput, in the Hugging Face and vLLM engines."""
    from benchmarks.delivery import run_bench_delivery

    _guard(run_bench_delivery, model, memory_tokens, steps, concurrency, engine, dtype, n_soft, out)


@zoo_app.command("gate")
def zoo_gate(
    model: Annotated[str, typer.Option(help="Compiler base to test.")] = "zoo/household/compiler",
    scenes: Annotated[int, typer.Option(help="Held-out scenes.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the scenes.")] = 1,
) -> None:
    """The look-up gate: does the base name the place that the right memory entry holds? Exits 1 at 95 % or below."""
    from zoo.household.gate import run_gate

    raise typer.Exit(run_gate(model, scenes, seed))


@zoo_app.command("compiler")
def zoo_compiler(out: Out = Path("zoo/household/compiler"), seed: int = 0) -> None:
    """Pretrain the tiny compiler base from nothing (CPU, about an hour); writes the model and its RECORD.json."""
    from zoo.household.pretrain import pretrain_compiler

    pretrain_compiler(out, seed)


@zoo_app.command("executor")
def zoo_executor(out: Out = Path("zoo/household/executor"), seed: int = 0) -> None:
    """Train the tiny executor from nothing (CPU, about an hour); writes the model and its RECORD.json."""
    from zoo.household.pretrain import pretrain_executor

    pretrain_executor(out, seed)


def _load(
    schema, config: str | None, overrides: list[str] | None, print_config: bool,
    check: Callable[[Any], object] = lambda settings: None,
):  # fmt: skip
    """Settings, or a clear message and exit 2. `check` raises ConfigError for what the schema cannot know."""
    from configs.load import ConfigError, load_config, to_yaml

    try:
        settings = load_config(schema, config, overrides or [])
        check(settings)
    except ConfigError as error:
        typer.secho(str(error), err=True, fg="red")
        raise typer.Exit(2) from error
    if print_config:
        typer.echo(to_yaml(settings))
        raise typer.Exit
    return settings


def _guard(command, *arguments: object) -> None:
    """Known failures end in one clear line; anything else keeps its traceback."""
    try:
        command(*arguments)
    except Exception as error:
        if not isinstance(error, _known_failures()):
            raise
        typer.secho(f"error: {error}", err=True, fg="red")
        raise typer.Exit(1) from error


def _known_failures() -> tuple[type[Exception], ...]:
    """Imported when something has failed: a command that only starts another program is spared what they import."""
    from configs.load import ConfigError
    from envs.base import EnvironmentFailure
    from lm.ledger import EndpointStop
    from memory.bank import BankError
    from runtime.processes import ProcessError
    from training.checkpoint import CheckpointError

    return (
        BankError, CheckpointError, ConfigError, EndpointStop, EnvironmentFailure, FileExistsError, FileNotFoundError,
        ModuleNotFoundError, ProcessError, ValueError,
    )  # fmt: skip


def main() -> None:
    app()
