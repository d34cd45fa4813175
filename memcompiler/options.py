"""What commands share: options, settings from file and command line, failures in one line."""

import inspect
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from runtime.startup import expand_home

Config = Annotated[str | None, typer.Option("--config", "-c", help="YAML file, or a name in configs/.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Run folder.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Settings as a.b=c, over the file's.")]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="Print the resolved settings and stop.")]
OnExists = Annotated[
    Literal["resume", "raise", "overwrite"],
    typer.Option(
        help="For a run that is there: resume it (same settings), refuse it, or delete what it wrote and start anew."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only print the plan: what it needs, and whether it fits.")]
MemoryModelsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--with",
        help="A model that the memory uses: embed=NAME, or embed_api.model=NAME or api.model=NAME and further "
        "settings of that endpoint; may be given several times.",
    ),
]
Host = Annotated[str, typer.Option(help="Loopback address to bind to.")]
Public = Annotated[bool, typer.Option(help="Make a new repository public.")]
Repository = Annotated[str, typer.Argument(help="Hub repository, owner/name.")]


def command_group(help: str, cls: type | None = None) -> typer.Typer:
    return typer.Typer(no_args_is_help=True, help=help, cls=cls)


def with_settings(
    schema: str, config: str | None = None, check: Callable[[Any], object] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command, whose first argument is settings, the options that they come from.

    Args:
        schema: "module:class" of the settings, imported when the command runs.
        config: the file that is read where the user names none.
        check: raises ConfigError for what the schema cannot know.
    """

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        def command(overrides: Any, config: Any, print_config: Any, **rest: Any) -> None:
            run(load_settings(schema, config, overrides or [], print_config, check), **rest)

        def option(name: str, annotation: Any, default: Any) -> inspect.Parameter:
            return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

        _, *own = inspect.signature(run).parameters.values()
        own = [option(parameter.name, parameter.annotation, parameter.default) for parameter in own]
        given = [option("overrides", Overrides, None), option("config", Config, config)]
        options = [*given, *own, option("print_config", PrintConfig, False)]
        command.__name__, command.__doc__ = run.__name__, run.__doc__
        command.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        command.__annotations__ = {option.name: option.annotation for option in options}
        return command

    return decorate


def load_settings(
    schema: str,
    config: str | None,
    overrides: list[str],
    print_config: bool,
    check: Callable[[Any], object] | None = None,
) -> Any:
    """Return validated settings; end the command with a clear message (exit 2) where they are wrong, or once they are
    printed."""
    from configs.load import ConfigError, load_config, to_yaml

    try:
        settings = load_config(pkgutil.resolve_name(schema), config, overrides)
        if check:
            check(settings)
    except ConfigError as error:
        typer.secho(str(error), err=True, fg="red")
        raise typer.Exit(2) from error
    if print_config:
        typer.echo(to_yaml(settings))
        raise typer.Exit
    return settings


def own_settings(overrides: list[str] | None) -> dict[str, Any]:
    """Read a memory system's or an endpoint's settings, as a.b=c. Raises: ConfigError."""
    from configs.load import read_overrides

    return read_overrides(overrides or [])


class OneLineErrors(TyperGroup):
    """A group whose known failures end in one clear line (exit 1); anything else keeps its traceback. A leading `~` is
    expanded in all arguments, because shells do so in some places only (not in `--out=~/run`)."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            expanded = [_expanded(argument) for argument in args]
        except ValueError as error:
            raise typer.BadParameter(str(error), ctx) from error
        return super().parse_args(ctx, expanded)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if (message := _one_line(error)) is None:
                raise
            typer.secho(f"error: {message}", err=True, fg="red")
            raise typer.Exit(1) from error


def _expanded(argument: str) -> str:
    option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    return option + equals + expand_home(value)


class RunsByDefault(TyperGroup):
    """`report RUN ...` is `report runs RUN ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, *ctx.help_option_names}:
            args = ["runs", *args]
        return super().parse_args(ctx, args)


_FULL = re.compile("no space left|quota exceeded|disk is full", re.IGNORECASE)
_READ_ONLY = re.compile("read-only file system|readonly database|unable to open database", re.IGNORECASE)


def _one_line(error: Exception) -> str | None:
    """Return the line that a failure ends in; None where its traceback is wanted."""
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    elif _FULL.search(text) or _READ_ONLY.search(text):  # of a library, whatever the exception's type
        text = ": ".join([*getattr(error, "__notes__", [])[:1], text.partition("\n")[0]])
    elif not isinstance(error, _known_failures()):
        return None
    return text + (" (free some space and run the same command again)" if _FULL.search(text) else "")


def _known_failures() -> tuple[type[Exception], ...]:
    """Import them when something has failed: a command that only starts another program is spared what they import."""
    from configs.load import ConfigError
    from envs.base import EnvironmentFailure
    from lm.ledger import EndpointStop
    from memory.bank import BankError
    from runtime.cluster import ClusterError
    from runtime.processes import ProcessError
    from training.checkpoint import CheckpointError

    return (
        BankError,
        CheckpointError,
        ClusterError,
        ConfigError,
        EndpointStop,
        EnvironmentFailure,
        FileExistsError,
        FileNotFoundError,
        ModuleNotFoundError,
        ProcessError,
        ValueError,
    )
