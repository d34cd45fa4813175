"""Generate the reference pages of commands, settings and files for the docs site (a hook of mkdocs)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic import BaseModel
from pydantic.fields import FieldInfo

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the site."""
    for name, content in (("commands", commands_page()), ("settings", settings_page()), ("files", files_page())):
        path = f"reference/{name}.md"  # the page in the repository says how to build it
        if (placeholder := files.get_file_from_path(path)) is not None:
            files.remove(placeholder)
        files.append(File.generated(config, path, content=content))
    return files


def commands_page() -> str:
    """Describe every command with its arguments and options."""
    from memcompiler.cli import app

    parts = ["# Commands\n\nGenerated from `memcompiler --help`."]
    for name, command in _commands(typer.main.get_command(app), ()):
        parts.append(f"## memcompiler {name}\n\n{_text(command.help)}")
        rows = [_parameter(p) for p in command.params if p.name != "help" and not getattr(p, "hidden", False)]
        if rows:
            parts.append("| parameter | default | |\n| --- | --- | --- |\n" + "\n".join(rows))
    return "\n\n".join(parts)


def settings_page() -> str:
    """Describe every setting of the commands that read a YAML file."""
    from configs.collect import CollectConfig
    from configs.evaluation import EvalConfig, QuickstartConfig
    from configs.models import ServeConfig
    from configs.proxy import ProxyConfig
    from configs.reproduce import ReproduceConfig
    from configs.training import GrpoConfig, SftConfig

    serving = [ServeConfig, ProxyConfig]
    roots = [CollectConfig, SftConfig, GrpoConfig, EvalConfig, *serving, QuickstartConfig, ReproduceConfig]
    parts = ["# Settings\n\nGenerated from the typed settings. Set them in YAML or as `a.b=c` on the command line."]
    seen: list[type[BaseModel]] = []
    for model in _models(roots):
        if model not in seen:
            seen.append(model)
            rows = [_setting(name, field) for name, field in model.model_fields.items()]
            parts.append(f"## {model.__name__}\n\n{_text(model.__doc__)}")
            parts.append("| setting | type | default | |\n| --- | --- | --- | --- |\n" + "\n".join(rows))
    return "\n\n".join(parts)


def files_page() -> str:
    """List every Python file with the first sentence of its docstring."""
    order = (ROOT / "docs" / "design" / "architecture.md").read_text(encoding="utf-8")
    folders = [line.split()[0] for line in order.split("```layers", 1)[1].split("```", 1)[0].strip().splitlines()]
    parts = [
        "# Files\n\nGenerated from the first line of each module's docstring, from the lowest layer to the highest."
    ]
    for folder in folders:
        rows = []
        for path in sorted((ROOT / folder).rglob("*.py")):
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
            if docstring:
                rows.append(
                    f"| `{path.relative_to(ROOT / folder).as_posix()}` | {_cell(docstring.split(chr(10) * 2)[0])} |"
                )
        parts.append(f"## {folder}/\n\n| file | |\n| --- | --- |\n" + "\n".join(rows))
    return "\n\n".join(parts)


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield " ".join(path), command
    else:
        for name, child in children.items():
            yield from _commands(child, (*path, name))


def _parameter(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    default = "required" if parameter.required else "" if callable(parameter.default) else parameter.default
    shown = "" if default in (None, "", (), []) else f"`{default}`" if default != "required" else default
    return f"| {names} | {shown} | {_cell(getattr(parameter, 'help', None))} |"


def _models(models: list[type[BaseModel]]) -> Iterator[type[BaseModel]]:
    for model in models:
        yield model
        yield from _models([m for field in model.model_fields.values() for m in _inside(field.annotation)])


def _inside(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the settings classes that a type annotation contains."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _inside(part)


def _setting(name: str, field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True) if not field.is_required() else "required"
    shown = default.__class__.__name__ if isinstance(default, BaseModel) else default
    kind = field.annotation.__name__ if isinstance(field.annotation, type) else str(field.annotation)
    kind = kind.replace("typing.", "").replace("NoneType", "None")
    return f"| `{name}` | {_code(kind)} | {_code(shown)} | {_cell(field.description)} |"


def _code(value: object) -> str:
    return f"`{_cell(str(value))}`" if str(value) else ""


def _cell(text: str | None) -> str:
    return _text(text).replace("|", "\\|").replace("\n", " ")


def _text(text: str | None) -> str:
    return " ".join((text or "").split())
