"""Options that commands share, settings from file and command line, and one-line errors."""

import inspect
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from runtime.startup import expand_home

Config = Annotated[str | None, typer.Option("--config", "-c", help="YAML file, or the name of one in configs/.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Run folder to write.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Settings as a.b=c; they override the file.")]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="Print the resolved settings and exit.")]
OnExists = Annotated[
    Literal["resume", "raise", "overwrite"],
    typer.Option(help="If the run exists: resume it (same settings), fail, or delete its files and start again."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what the run needs and whether it fits; start nothing.")]
MemoryModelsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--with",
        help="Model that the memory uses: embed=NAME, embed_api.model=NAME or api.model=NAME, and other settings of "
        "that endpoint; repeatable.",
    ),
]
Host = Annotated[str, typer.Option(help="Loopback address to bind to.")]
Public = Annotated[bool, typer.Option(help="Make a new repository public.")]
Repository = Annotated[str, typer.Argument(help="Hub repository, OWNER/NAME.")]


def command_group(help: str, cls: type[TyperGroup] | None = None) -> typer.Typer:
    """Create a group of commands with plain help: importing rich would take most of the time of `--help`."""
    return typer.Typer(
        no_args_is_help=True,
        help=help,
        cls=cls,
        rich_markup_mode=None,
        add_completion=False,
        context_settings={"max_content_width": 120},
    )


def with_settings(
    schema: str, config: str | None = None, check: Callable[[Any], object] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options that fill the settings, the first argument of the decorated command.

    Args:
        schema: "module:class" of the settings, imported when the command runs.
        config: default of `--config`.
        check: raises ConfigError for errors that the schema cannot detect.
    """

    def decorate(run: Callable[..., None]) -> Callable[..., None]:
        def command(overrides: Any, config: Any, print_config: Any, **rest: Any) -> None:
            run(
                load_settings(schema, config, overrides=overrides or [], print_config=print_config, check=check), **rest
            )

        def option(name: str, annotation: Any, default: Any) -> inspect.Parameter:
            return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

        _, *own = inspect.signature(run).parameters.values()
        options = [
            option("overrides", Overrides, None),
            option("config", Config, config),
            *(option(parameter.name, parameter.annotation, parameter.default) for parameter in own),
            option("print_config", PrintConfig, False),
        ]
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
    """Return validated settings; exit with a message (status 2) if they are wrong, or after `--print-config`."""
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
    """Read settings of a memory system or an endpoint from a.b=c overrides. Raises: ConfigError."""
    from configs.load import read_overrides

    return read_overrides(overrides or [])


class OneLineErrors(TyperGroup):
    """Group of commands whose known errors end in one line (status 1); other errors show their traceback.

    A leading `~` is expanded in all arguments: shells do not expand it in `--out=~/run`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            expanded = [_expand_home(argument) for argument in args]
        except ValueError as error:
            raise typer.BadParameter(str(error), ctx) from error
        return super().parse_args(ctx, expanded)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, TyperException):  # --help and usage errors, which need no slow imports
            raise
        except Exception as error:
            if (message := _one_line(error)) is None:
                raise
            typer.secho(f"error: {message}", err=True, fg="red")
            raise typer.Exit(1) from error


def _expand_home(argument: str) -> str:
    option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    return option + equals + expand_home(value)


class RunsByDefault(TyperGroup):
    """Group in which `report RUN ...` means `report runs RUN ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, *ctx.help_option_names}:
            args = ["runs", *args]
        return super().parse_args(ctx, args)


_DISK_FULL = re.compile("no space left|quota exceeded|disk is full", re.IGNORECASE)
_READ_ONLY = re.compile("read-only file system|readonly database|unable to open database", re.IGNORECASE)


def _one_line(error: Exception) -> str | None:
    """Return the message of a known error; None for an error whose traceback is useful."""
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    elif _DISK_FULL.search(text) or _READ_ONLY.search(text):  # libraries raise these with types of their own
        text = ": ".join([*getattr(error, "__notes__", [])[:1], text.partition("\n")[0]])
    elif not isinstance(error, _known_errors()):
        return None
    return text + (" (free some space and run the same command again)" if _DISK_FULL.search(text) else "")


def _known_errors() -> tuple[type[Exception], ...]:
    """Import the known error types; only after an error, because these imports are slow."""
    from configs.load import ConfigError
    from envs.base import EnvironmentFailure
    from lm.answer_cache import EndpointStop
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
