"""Commands around environments: parity and bench beside TextWorld, export of generated homes, the OpenEnv server."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from configs.collect import CollectConfig
from configs.load import ConfigError
from envs.alfworld import parity
from envs.environments import Environments
from envs.spec import EnvSettings
from runtime.progress import progress

console = Console(width=120, soft_wrap=True)


def run_parity(games: Path, steps: int, seed: int, per_game: int, jobs: int, plain: bool) -> None:
    """Print every difference, then `differences: M in N steps`; exit 1 if M > 0."""
    found = parity.find_games(games)
    total = parity.Compared()
    with progress("parity", -(-steps // per_game)) as advance:
        for compared in parity.compare(found, steps, seed, per_game, jobs, plain):
            for difference in compared.differences:
                console.print(str(difference), markup=False, highlight=False)
            total.add(compared)
            advance(f"{total.steps:,} steps, {total.different:,} differ")
    console.print(f"games: {parity.by_kind(total.games)}", highlight=False)
    console.print(f"commands: {parity.by_kind(total.verbs)}", highlight=False)
    console.print(f"differences: {total.different} in {total.steps} steps", highlight=False)
    if total.different:
        raise typer.Exit(1)


def run_bench(games: Path, number: int, steps: int, seed: int) -> None:
    """One table, then `ratio: R`: steps per second, native over TextWorld."""
    chosen = parity.choose_games(parity.find_games(games), number, seed)
    textworld, native = parity.measure(chosen, steps, seed)
    table = Table(title=f"{number} games, {steps} steps each, seed {seed}")
    for name in ("", "reading a game, ms", "resets/s once read", "steps/s with commands"):
        table.add_column(name, justify="right")
    for name, t in (("TextWorld", textworld), ("native", native)):
        table.add_row(name, f"{1e3 * t.load:.2f}", f"{1 / t.reset:,.1f}", f"{1 / t.step:,.1f}")
    console.print(table)
    live = parity.choose_games(parity.find_games(games), 16, seed)
    console.print(f"16 live games, native: {parity.live_memory(live):.1f} MiB", highlight=False)
    console.print(f"ratio: {textworld.step / native.step:.0f}", highlight=False)


def run_export(config: EnvSettings, split: str, limit: int | None, out: Path) -> None:
    """Write a generated split as games. Raises: ConfigError, for an environment that generates none."""
    from envs.alfworld.export import export_split
    from envs.household.environment import HouseholdEnvironment

    if config.name != "household":
        raise ConfigError(f"only generated homes can be exported (env.name=household), not {config.name}")
    with Environments(config.model_copy(update={"images": False, "workers": 0})) as envs:
        home = envs.lease()
        assert isinstance(home, HouseholdEnvironment)
        written = export_split(home, split, out, limit)
    console.print(f"{len(written)} games in {out}; play them with env.name=alfworld env.data_root={out}")


def run_serve(config: CollectConfig, host: str, port: int, sessions: int) -> None:
    """Until interrupted."""
    from envs.openenv_server import serve_openenv

    with Environments(config.env) as envs:
        serve_openenv(envs.lease, config.split, host, port, min(sessions, envs.capacity))
