"""Commands around environments: export of generated homes, sequences, the OpenEnv server, parity with TextWorld."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memcompiler.options import command_group, with_settings

if TYPE_CHECKING:
    from configs.collect import CollectConfig
    from configs.evaluation import EvalConfig

env_app = command_group("Write generated homes as ALFWorld games; serve any environment.")
Games = Annotated[Path, typer.Option(help="Folder with game.tw-pddl files, e.g. $ALFWORLD_DATA.")]


@env_app.command("export")
@with_settings("configs.collect:CollectConfig")
def env_export(
    settings: "CollectConfig",
    split: Annotated[str, typer.Option(help="Split of the generated scenes to write.")] = "test",
    limit: Annotated[int | None, typer.Option(min=1, help="Number of tasks (default: all).")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="ALFWORLD_DATA folder to create.")] = Path("out/alfworld"),
) -> None:
    """Write a generated split as ALFWorld games, playable by alfworld and TextWorld (extra `alfworld`). Settings as for
    collect: env.seed, env.scenes, env.kinds."""
    from configs.load import ConfigError
    from envs.alfworld.export import export_split
    from envs.household.environment import HouseholdEnvironment
    from envs.registry import Environments

    if settings.env.name != "household":
        raise ConfigError(f"only generated homes can be exported (env.name=household), not {settings.env.name}")
    with Environments(settings.env.model_copy(update={"images": False, "workers": 0})) as envs:
        home = envs.lease()
        assert isinstance(home, HouseholdEnvironment)
        written = export_split(home, split, out, limit)
    typer.echo(f"{len(written)} games in {out}; play them with env.name=alfworld env.data_root={out}")


@env_app.command("sequences")
@with_settings("configs.evaluation:EvalConfig")
def env_sequences(
    settings: "EvalConfig", out: Annotated[Path | None, typer.Option("--out", "-o", help="Manifest to write.")] = None
) -> None:
    """List the sequences of tasks in one world for the settings env, env.sequences and split: their number, their tasks
    as a manifest, and its hash."""
    from collections import Counter

    from configs.run_folder import check_own_files
    from envs.manifest import Manifest
    from envs.registry import Environments, evaluation_split

    with Environments(settings.env) as envs:
        sequences = envs.sequences(settings.split or evaluation_split(settings.env))
    manifest = Manifest.of(settings.env.name, (task for sequence in sequences for task in sequence.tasks))
    for family, number in Counter(sequence.family for sequence in sequences).items():
        tasks = sum(len(sequence.tasks) for sequence in sequences if sequence.family == family)
        typer.echo(f"{family}: {number} sequences, {tasks} tasks")
    if out is not None:
        check_own_files(out.parent, (out.name,), "tasks")
        manifest.write(out)
    typer.echo(f"sha256: {manifest.sha256}")


@env_app.command("serve")
@with_settings("configs.collect:CollectConfig")
def env_serve(
    settings: "CollectConfig",
    host: Annotated[str, typer.Option(help="Address to bind to.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port.")] = 8765,
    sessions: Annotated[int, typer.Option(min=1, help="Concurrent clients.")] = 64,
) -> None:
    """Serve an environment in the OpenEnv protocol (extra `openenv`); settings as for collect: env and split. There is
    no authentication: bind to loopback."""
    from envs.openenv_server import serve_openenv
    from envs.registry import Environments

    with Environments(settings.env) as envs:
        serve_openenv(envs.lease, settings.split, host=host, port=port, max_sessions=min(sessions, envs.capacity))


def parity(
    games: Games,
    steps: Annotated[int, typer.Option(min=1, help="Commands to compare, over all games.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the games' order and of the walks.")] = 0,
    per_game: Annotated[int, typer.Option(min=1, help="Commands per game.")] = 400,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    plain: Annotated[bool, typer.Option(help="Use unchanged TextWorld, without memoised parsers.")] = False,
) -> None:
    """Play the same commands in TextWorld and in the native engine; exit 1 if any answer differs."""
    from envs.alfworld.parity import ParityReport, by_kind, compare, find_games
    from runtime.progress import progress

    total = ParityReport()
    with progress("parity", -(-steps // per_game)) as advance:
        for report in compare(find_games(games), steps, seed=seed, per_game=per_game, jobs=jobs, plain=plain):
            for difference in report.differences:
                typer.echo(str(difference))
            total.add(report)
            advance(f"{total.steps:,} steps, {total.different:,} differ")
    typer.echo(f"games: {by_kind(total.games)}")
    typer.echo(f"commands: {by_kind(total.verbs)}")
    typer.echo(f"differences: {total.different} in {total.steps} steps")
    if total.different:
        raise typer.Exit(1)
