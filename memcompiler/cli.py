"""The `memcompiler` command. Heavy modules are imported inside the commands, so that `--help` is fast.

Commands on banks and rows are in data.py, on environments in env.py, benchmarks in bench.py, shipped models in zoo.py.
"""

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from memcompiler.bench import bench_app
from memcompiler.data import bank_app, data_app, leakage
from memcompiler.env import env_app, parity
from memcompiler.options import (
    Config,
    DryRun,
    Host,
    MemoryModelsOption,
    OneLineErrors,
    OnExists,
    Out,
    Overrides,
    PrintConfig,
    Public,
    Repository,
    RunsByDefault,
    command_group,
    load_settings,
    with_settings,
)
from memcompiler.zoo import zoo_app
from runtime.startup import prepare_process

if TYPE_CHECKING:
    from configs.collect import CollectConfig
    from configs.evaluation import EvalConfig, QuickstartConfig
    from configs.training import GrpoConfig, SftConfig

app = command_group("Compile memory for embodied agents, don't inject it.", OneLineErrors)
train_app = command_group("Train the compiler and the soft-token projector.")
serve_app = command_group("Serve compiler, executor or memory proxy over HTTP, on loopback.")
report_app = command_group(
    "Write an HTML page about one run (RUN) or several compared (RUN RUN ...), or a table or figure of a paper.",
    RunsByDefault,
)
for name, group in {
    "train": train_app,
    "serve": serve_app,
    "bank": bank_app,
    "data": data_app,
    "env": env_app,
    "bench": bench_app,
    "zoo": zoo_app,
    "report": report_app,
}.items():
    app.add_typer(group, name=name)


def _plan(settings: Any) -> None:
    from plan.command import dry_run

    dry_run(settings)


def _check_cells(settings: "EvalConfig | QuickstartConfig") -> None:
    """Raise ConfigError for an invalid matrix or invalid deliveries."""
    from configs.evaluation import EvalConfig
    from eval.matrix import cells

    cells(settings if isinstance(settings, EvalConfig) else settings.eval)


@app.command()
def doctor() -> None:
    """Check this installation, and print the command that fixes each missing part."""
    from memcompiler.doctor import run_doctor

    raise typer.Exit(run_doctor())


@app.command()
def plan(
    config: Annotated[str, typer.Option("--config", "-c", help="YAML file, or a name in configs/.")],
    overrides: Overrides = None,
    gpu: Annotated[str, typer.Option(help="GiB of a GPU, or its name: a100-40, a100, h100, h200, b200, ...")] = "80",
    gpus: Annotated[int | None, typer.Option(min=1, help="Number of GPUs (default: 8 for GRPO, else 1).")] = None,
    lengths: Annotated[str, typer.Option(help="Token counts to assume, such as prompt=3000,emission=200.")] = "",
    stage: Annotated[str | None, typer.Option(help="Stage of the file, if its folder does not show it.")] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the plan to this file.")] = None,
) -> None:
    """Estimate what a run needs, by process: GPU and host memory, disk, tokens per step, shares of time; and whether it
    fits (docs/guides/plan.md). Starts nothing."""
    from plan.command import load_any, run_plan

    run_plan(load_any(config, overrides or [], stage), gpu, gpus=gpus, lengths=lengths, json=json)


# the main line --------------------------------------------------------------------------------------------------------


@app.command()
@with_settings("configs.evaluation:QuickstartConfig", "quickstart", _check_cells)
def quickstart(settings: "QuickstartConfig", out: Out = Path("out/quickstart"), on_exists: OnExists = "resume") -> None:
    """Run the whole system on two CPU cores: collect, train, roll out, evaluate, report."""
    from memcompiler.quickstart import run_quickstart

    run_quickstart(settings, out, on_exists)


@app.command()
def reproduce(
    benchmark: Annotated[str, typer.Argument(help="alfworld, scienceworld, eb_alfred, eb_habitat, or a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings as STAGE.a=b, such as sft.max_steps=200.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder of the chain; default: runs/NAME.")] = None,
    executor: Annotated[list[str] | None, typer.Option(help="Only this executor of the chain; repeatable.")] = None,
    tables: Annotated[str, typer.Option(help="Tables to fill, such as 3,4; default: the chain's `tables`.")] = "",
    optional: Annotated[
        list[str] | None, typer.Option("--with", help="Also make this optional evaluation; repeatable.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print all commands and the plan; start nothing.")] = False,
    print_config: PrintConfig = False,
) -> None:
    """Reproduce a benchmark's rows of the paper's tables: collect, train a compiler for each executor, evaluate. The
    same command continues after a kill (docs/guides/paper-tables.md)."""
    from configs.load import ConfigError, to_yaml
    from configs.reproduce import find_chain
    from memcompiler import reproduce as run

    try:
        numbers = [int(number) for number in tables.split(",") if number]
    except ValueError:
        raise typer.BadParameter(f"--tables takes numbers joined by commas, received {tables!r}") from None
    try:
        chain = find_chain(benchmark, overrides or [], out)
        stages = chain.stages(numbers, executor or (), optional or ())
        run.check_chain(stages)
    except ConfigError as error:
        typer.secho(str(error), err=True, fg="red")
        raise typer.Exit(2) from error
    if print_config:
        typer.echo(to_yaml(chain.config))
    elif dry_run:
        run.describe_chain(chain, stages, numbers or chain.config.tables)
    else:
        run.run_chain(chain, stages, numbers or chain.config.tables)


@app.command()
@with_settings("configs.collect:CollectConfig")
def collect(settings: "CollectConfig", out: Out = Path("out/collect"), on_exists: OnExists = "resume") -> None:
    """Play the training tasks with a teacher (the expert or an endpoint); writes a memory bank (OUT/bank) and SFT rows
    (OUT/rows)."""
    from memcompiler.collection import run_collect

    run_collect(settings, out, on_exists)


@train_app.command("sft")
@with_settings("configs.training:SftConfig")
def train_sft(
    settings: "SftConfig", out: Out = Path("out/sft"), on_exists: OnExists = "resume", dry_run: DryRun = False
) -> None:
    """Stage 1: train LoRA and projector on SFT rows, through the frozen executor. Resumes after a kill."""
    if dry_run:
        return _plan(settings)
    from training.sft import train_sft as train

    train(settings, out, on_exists)


@train_app.command("grpo")
@with_settings("configs.training:GrpoConfig")
def train_grpo(
    settings: "GrpoConfig", out: Out = Path("out/grpo"), on_exists: OnExists = "resume", dry_run: DryRun = False
) -> None:
    """Stage 2: continue an SFT checkpoint by GRPO on binary success, text and soft tokens together. Resumes after a
    kill. With cluster=ray, engines for rollouts run beside the trainers, on this machine or on several
    (docs/guides/cluster.md)."""
    if dry_run:
        return _plan(settings)
    from eval.plots import training_plot
    from training.grpo import train_grpo as train

    train(settings, out, on_exists)
    if os.environ.get("RANK", "0") == "0":
        typer.echo(f"  curves: {training_plot(out / 'metrics.jsonl', out / 'plots' / 'training.png')}")


@train_app.command("gate")
def train_gate(
    run: Annotated[Path, typer.Argument(help="Folder of an SFT run, whose rows are the training data.")],
    recall: Annotated[
        float, typer.Option(min=0, max=1, help="Share of guided steps that the gate must compile.")
    ] = 0.98,
    seed: int = 0,
) -> None:
    """Fit the compile gate of the delivery `compiled_gated`: takes seconds and loads no model."""
    from training.gate import train_gate

    train_gate(run, recall, seed)


@train_app.command("router")
def train_router(
    out: Out = Path("out/router"),
    environments: Annotated[str, typer.Option(help="Environments whose expert episodes are the histories.")] = (
        "household,alfworld,scienceworld"
    ),
    seed: int = 0,
    questions: Annotated[Path | None, typer.Option(help="Additional questions, a file of `data questions`.")] = None,
) -> None:
    """Train S3Mem's evidence router on template questions about our episodes (docs/guides/questions.md)."""
    from configs.run_folder import output_folder
    from training.router import train_router

    read = [("--questions", questions)] if questions else []
    with output_folder(out, "train router", names=("router.json", "router.safetensors"), key="trained_on", inputs=read):
        train_router(out, environments.split(","), seed, questions)


@app.command("eval")
@with_settings("configs.evaluation:EvalConfig", check=_check_cells)
def evaluate(settings: "EvalConfig", out: Out = Path("out/eval"), on_exists: OnExists = "resume") -> None:
    """Evaluate deliveries on the same tasks, or a matrix of settings; writes results.json, episodes.jsonl and
    report.html. Resumes after a kill; a finished run prints its table again."""
    from eval.evaluate import run_eval

    run_eval(settings, out, on_exists)


@app.command("qa")
def answer_questions(
    data: Annotated[Path, typer.Option(help="File of LoCoMo or AMA-Bench, or folder of EMemBench.")],
    model: Annotated[str, typer.Option(help="Reader: a Hugging Face name or folder, or a model name of the endpoint.")],
    memory: Annotated[str, typer.Option(help="Memory system, or baseline: windows, oracle, ...")] = "s3mem",
    tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of evidence.")] = 1000,
    engine: Annotated[Literal["hf", "vllm", "endpoint"], typer.Option(help="Engine of the reader.")] = "hf",
    base_url: Annotated[str, typer.Option(help="engine endpoint: address.")] = "https://api.openai.com/v1",
    key_env: Annotated[str, typer.Option(help="engine endpoint: variable with the key; empty: none.")] = "",
    api: Annotated[
        list[str] | None,
        typer.Option(
            help="engine endpoint: another setting (extra.max_completion_tokens=4096); repeatable.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of questions, over all categories.")] = None,
    facts: Annotated[bool, typer.Option("--facts", help="Read the file's notes instead of the records.")] = False,
    picture_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help="Show the records' pictures to the reader, each counted as this many tokens; 0: no pictures.",
        ),
    ] = 0,
    attempts: Annotated[int, typer.Option(min=1, help="Attempts at a question whose answer fails, over all runs.")] = 3,
    models: MemoryModelsOption = None,
    settings: Annotated[list[str] | None, typer.Argument(help="Settings of the memory system, as a.b=c.")] = None,
    out: Out = Path("out/qa"),
) -> None:
    """Answer questions about long histories from evidence that a memory system selects. Resumes after a kill."""
    from configs.collect import MemoryModels
    from eval.qa.answers import run_qa
    from memcompiler.options import own_settings

    endpoint, used = own_settings(api), MemoryModels.model_validate(own_settings(models))
    reader = (engine, model, {"base_url": base_url, "key_env": key_env or None, **endpoint})
    run_qa(
        data,
        memory=memory,
        settings=own_settings(settings),
        tokens=tokens,
        facts=facts,
        reader=reader,
        limit=limit,
        out=out,
        models=used,
        picture=picture_tokens,
        attempts=attempts,
    )


@app.command()
def push(
    run: Annotated[str, typer.Argument(help="A run or checkpoint folder.")],
    repo: Repository,
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings, such as executor.model=ORG/NAME.")] = None,
    public: Public = False,
) -> None:
    """Upload a trained compiler (adapter, projector, gate, settings, model card) to the Hugging Face Hub; `mc.load` and
    compiler.checkpoint=hub:ORG/NAME read it back."""
    from memcompiler.hub import push as upload

    typer.echo(upload(run, repo, private=not public, overrides=overrides or []))


@app.command()
def merge(
    run: Annotated[Path, typer.Argument(help="A run or checkpoint folder.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="New folder to write.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings of the compiler, such as model=NAME.")] = None,
) -> None:
    """Merge a trained compiler's adapter into its base model; writes a Hugging Face model with the projector, for
    compiler.checkpoint=OUT (docs/guides/training.md)."""
    from configs.run_folder import check_inputs
    from runtime.progress import disable_library_progress_bars
    from training.merge import merge as merged

    check_inputs(out, [("RUN", run)])
    disable_library_progress_bars()
    typer.echo(str(merged(run, out, overrides or [])))


@app.command()
def play(
    run: Annotated[
        str | None,
        typer.Argument(help="A run folder, a checkpoint, or a shipped name; none: shipped models in generated homes."),
    ] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of the rows that you make (default: out/play/ENV).")
    ] = None,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free port.")] = 8200,
    browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Watch and play in a browser: episodes step by step, with memory, Brief State, guidance, soft tokens and the
    probabilities of commands; change them, act, branch (docs/guides/play.md)."""
    from memcompiler.playing import run_play

    run_play(run, overrides or [], out=out, host=host, port=port, browser=browser)


# reports --------------------------------------------------------------------------------------------------------------


@report_app.command("runs")
def report_runs(
    runs: Annotated[list[Path], typer.Argument(help="Run folders with results.json; the first is the baseline.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="HTML file (default: in the first run).")] = None,
    tasks: Annotated[
        int, typer.Option(min=1, help="Maximum number of replayed tasks; fewer where the page would grow too large.")
    ] = 12,
    task: Annotated[list[str] | None, typer.Option(help="Replay this task; repeatable.")] = None,
) -> None:
    """Write RUN/report.html again, or compare several runs in FIRST/compare.html. Each page is one file that opens
    offline."""
    from eval.compare import write_comparison
    from eval.replays import Replays
    from eval.report import write_run_report

    replays = Replays(tasks, tuple(task or ()))
    page = write_comparison(runs, out, replays) if len(runs) > 1 else write_run_report(runs[0], out, replays)
    typer.echo(str(page))


@report_app.command("paper")
def report_paper(
    runs: Annotated[
        list[str] | None,
        typer.Argument(help="Run folders (none: the paper's numbers only); for a figure one run, and a.b=c overrides."),
    ] = None,
    table: Annotated[
        int | None, typer.Option(help="memcompiler: 1 to 6; brainmem: 4 to 10, 14; karma: 1, 2; s3mem: 1 to 5, 7.")
    ] = None,
    of: Annotated[str, typer.Option(help="Paper of the table: memcompiler, brainmem, karma or s3mem.")] = "memcompiler",
    figure: Annotated[
        int | None,
        typer.Option(help="3: attention by step; 4: soft and text tokens. RUN is a run or a cell of a matrix."),
    ] = None,
    deliveries: Annotated[str, typer.Option(help="Deliveries of a figure, such as static,compiled.")] = "",
    limit: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of tasks for a figure (default: all).")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Figure 4: seed of t-SNE, of the probe's split and of its shuffles.")
    ] = 0,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder to write to (default: RUN/paper).")] = None,
) -> None:
    """Write a paper's table, or a measured figure, with the results of RUN beside the paper's: Markdown, JSON and PNG
    (docs/guides/paper-tables.md)."""
    if (table is None) == (figure is None):
        raise typer.BadParameter("give either --table N or --figure N")
    # Names of matrix cells hold "=" as well.
    folders = [Path(run) for run in runs or [] if "=" not in run or Path(run).is_dir()]
    overrides = [run for run in runs or [] if Path(run) not in folders]
    if table is not None:
        if overrides:
            raise typer.BadParameter(f"no such run: {overrides[0]}")
        from eval.paper.render import run_table

        run_table(table, folders, out, of)
    elif figure is not None:
        if len(folders) != 1:
            raise typer.BadParameter(f"a figure needs exactly one run, received {len(folders)}")
        from eval.paper.figures import run_figure

        named = tuple(name for name in deliveries.split(",") if name)
        run_figure(figure, folders[0], overrides=overrides, out=out, deliveries=named, limit=limit, seed=seed)


app.command()(leakage)
app.command()(parity)


# services -------------------------------------------------------------------------------------------------------------


@serve_app.command("compiler")
def serve_compiler(
    overrides: Overrides = None,
    config: Config = None,
    checkpoint: Annotated[str | None, typer.Option(help="Run or checkpoint folder (compiler.checkpoint).")] = None,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free port.")] = 8100,
    print_config: PrintConfig = False,
) -> None:
    """Serve a trained compiler and its projector at POST /compile (docs/guides/serving.md), in vLLM unless
    compiler.engine=hf."""
    named = [f"compiler.checkpoint={checkpoint}"] if checkpoint else []
    settings = load_settings("configs.models:ServeConfig", config, [*(overrides or []), *named], print_config)
    from configs.models import COMPILER_KEY
    from runtime.http import check_loopback

    check_loopback(host)
    try:
        from compiler.server.app import serve_compiler as serve
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"serving needs {error.name}: uv sync --inexact --extra serve") from error
    serve(settings, host, port, os.environ.get(COMPILER_KEY))


@serve_app.command("proxy")
def serve_proxy(
    overrides: Overrides = None,
    config: Config = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of sessions and memory.")] = Path("out/proxy"),
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free port.")] = 8200,
    print_config: PrintConfig = False,
) -> None:
    """Serve an OpenAI API that adds compiled memory to the requests of any agent and passes them on to an upstream
    (docs/guides/proxy.md)."""
    settings = load_settings("configs.proxy:ProxyConfig", config, overrides or [], print_config)
    from runtime.http import check_loopback

    check_loopback(host)
    try:
        from proxy.serve import serve_proxy as serve
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"serving needs {error.name}: uv sync --inexact --extra serve") from error
    serve(settings, out, host, port)


@serve_app.command("executor")
def serve_executor(
    model: Annotated[str, typer.Option(help="Hugging Face name or folder.")],
    extra: Annotated[list[str] | None, typer.Argument(help="After --: other arguments of vllm serve.")] = None,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port.")] = 8000,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command; start nothing.")] = False,
) -> None:
    """Serve a frozen executor by vLLM's own server, with soft tokens enabled."""
    from configs.models import model_path
    from executor.client import serve, server_command
    from runtime.http import check_loopback, http_url

    check_loopback(host)
    command = server_command(model_path(model), host, port, extra or [])
    typer.echo(shlex.join(command))
    if dry_run:
        return
    typer.echo(f"executor.engine=http executor.model={model} executor.url={http_url(host, port)}")
    if status := serve(command):
        raise typer.Exit(status)


def main() -> None:
    prepare_process()
    app()
