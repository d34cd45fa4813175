"""From a YAML file and `a.b=c` overrides to a validated configuration, with every mistake reported at once.

The order of precedence, lowest first: the schema's defaults, the file that `base:` names, the file, the overrides.
Mappings merge; everything else (numbers, strings, lists) replaces what was there. A block may have a `base:`, too. A
value may refer to another key of the same configuration (`${train.seed}`). Resolvers such as `${oc.env:HOME}` are
refused: a run must follow from its files and its command line alone, and a configuration from somewhere else must not
read this machine's environment.
"""

from __future__ import annotations

import codecs
import difflib
import io
import re
import reprlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue, OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from envs.registry import DEFAULT, known
from runtime.settings import did_you_mean

CONFIGS = Path(__file__).resolve().parent
BASE = "base"  # the one key that belongs to the loader, not to the schema

Schema = TypeVar("Schema", bound=BaseModel)
Tree = dict[Any, Any]  # what a YAML mapping holds, before validation
Problems = defaultdict[str, list[str]]  # dotted path (or override) -> what is wrong there

# What PyYAML's safe loader raises on hostile text: a bad explicit tag (`!!int x`, `!!timestamp x`) or endless nesting.
_PARSE_ERRORS = (yaml.YAMLError, OmegaConfBaseException, ValueError, LookupError, AttributeError, RecursionError)
_OVERRIDE_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")
_INTERPOLATION = re.compile(r"(\\*)\$\{")
_MAX_DEPTH, _MAX_NESTING = 50, 100
_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "mapping", list: "list"}


class ConfigError(ValueError):
    """A configuration that cannot be used. The message is ready to print and names every mistake."""


def load_config(schema: type[Schema], path: str | Path | None, overrides: Sequence[str] = ()) -> Schema:
    """Read, merge, resolve and validate a configuration. Unknown keys are errors at every level.

    Args:
        path: A YAML file, or the name of one in `configs/` (`find_config`); None for the schema's defaults.
        overrides: `a.b=c` each, the value parsed as YAML. A list is replaced whole (`stages=[sft, eval]`).

    Raises:
        ConfigError: naming all mistakes at once, each with its dotted path.
    """
    if BASE in schema.model_fields:
        raise TypeError(f"{schema.__name__} has a field named {BASE!r}, which the loader keeps for itself")
    tree = _read_with_base(find_config(path)) if path is not None else {}
    problems: Problems = defaultdict(list)
    for override in overrides:
        try:
            _apply_override(tree, override)
        except ConfigError as error:
            problems[f"override {override!r}"].append(str(error))
    values = _resolve(OmegaConf.create(_refuse_resolvers(tree, problems)), "", problems)
    config = _validate(schema, values, problems)
    if config is None or problems:
        raise ConfigError(_report(path, problems))
    return config


def find_config(name: str | Path) -> Path:
    """Find the file that `name` means: a path, or a name relative to `configs/`; `.yaml` may be left off."""
    for folder in (Path(), CONFIGS):
        for candidate in (folder / name, folder / f"{name}.yaml"):
            if candidate.is_file():
                return candidate
    shipped = sorted(file.relative_to(CONFIGS).with_suffix("").as_posix() for file in CONFIGS.rglob("*.yaml"))
    close = difflib.get_close_matches(str(name).removesuffix(".yaml"), shipped, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"no configuration {str(name)!r}{hint}; shipped in configs/: {', '.join(shipped) or 'none'}")


def to_yaml(config: BaseModel) -> str:
    """Write the configuration with all its defaults, as YAML that `load_config` reads back to an equal one."""
    escape = lambda text, path: _INTERPOLATION.sub(r"\1\1\\${", text)  # a literal `${`: the inverse of reading
    return OmegaConf.to_yaml(OmegaConf.create(_map_strings(config.model_dump(mode="json"), escape)))


def read_yaml(path: Path) -> Tree:
    """Read one YAML file as plain data, its references as they stand. Raises: ConfigError, which names the line."""
    try:
        loaded = OmegaConf.load(io.StringIO(_shallow(_decoded(path.read_bytes()))))
        data = OmegaConf.to_container(loaded, resolve=False)
    except OSError as error:  # OmegaConf raises one without strerror for a file that holds a bare number
        raise ConfigError(f"{path}: {error.strerror or 'expected a mapping (key: value) at the top'}") from None
    except _PARSE_ERRORS as error:
        raise ConfigError(f"{path}{_yaml_error(error)}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping (key: value) at the top, received {_show(data)}")
    return data


def _decoded(raw: bytes) -> str:
    """Decode a file by its byte-order mark, without one as UTF-8. Raises: UnicodeDecodeError."""
    return raw.decode("utf-16" if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig")


def _shallow(text: str) -> str:
    """Return a YAML text that is not nested so deeply that its parser would overflow the stack. Raises: ValueError."""
    opened = accumulate(1 if mark in "[{" else -1 for mark in re.findall(r"[\[\]{}]", text))
    compact = (len(re.findall(r"[-?]\s", line)) for line in text.split("\n"))
    if max((*opened, *compact), default=0) > _MAX_NESTING:
        raise ValueError("nested too deeply")
    return text


# --- merging ---


def _read_with_base(path: Path, chain: tuple[Path, ...] = ()) -> Tree:
    """Merge a file, and each block of it, over its `base` file, and that over its own."""
    path = path.resolve()
    if path in chain:
        cycle = " -> ".join(file.name for file in (*chain, path))
        raise ConfigError(f"{path}: `{BASE}` leads back to itself: {cycle}")

    def based(tree: Tree, top: bool = False) -> Tree:
        blocks = {key: based(value) if isinstance(value, dict) else value for key, value in tree.items()}
        if top and not isinstance(blocks.get(BASE, ""), str):
            raise ConfigError(f"{path}: `{BASE}` must be a file name, received {_show(blocks[BASE])}")
        if not isinstance(blocks.get(BASE), str):  # further down, other things may be called so
            return blocks
        base = str(blocks.pop(BASE))
        if not (path.parent / base).is_file():
            raise ConfigError(f"{path}: `{BASE}: {base}`: no such file (the name is relative to {path.parent})")
        return _merge(_read_with_base(path.parent / base, (*chain, path)), blocks)

    return based(read_yaml(path), top=True)


def _merge(below: Tree, above: Mapping[Any, Any]) -> Tree:
    """Lay mappings over mappings. (OmegaConf.merge would follow references that it meets, resolvers too, before
    `_refuse_resolvers` has seen them; and lay a mapping over what a reference means.)"""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def parse_override(text: str) -> tuple[list[str], object]:
    """Split `a.b=c` into its key's parts and its value, the value read as YAML. Raises: ConfigError."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError("expected key=value, for example train.seed=1")
    if not _OVERRIDE_KEY.fullmatch(key):
        raise ConfigError("expected names joined by dots before the '=', for example train.seed=1")
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={_shallow(value)}"]), resolve=False)
    except _PARSE_ERRORS as error:
        raise ConfigError(f"the value is not YAML{_yaml_error(error)}") from None
    assert isinstance(parsed, dict)
    return key.split("."), parsed["value"]


# A string in place of such a block stands for this key of it: `env=alfworld env.limit=3`.
SHORTHANDS = {"env": "name"}


def _apply_override(tree: Tree, text: str) -> None:
    """Set one override in place; a mapping merges into what is there, like a file over its base."""
    (*parents, last), value = parse_override(text)
    node = tree
    for depth, part in enumerate(parents, start=1):
        if node.get(part) is None:
            node[part] = {}
        elif isinstance(node[part], str) and part in SHORTHANDS:
            node[part] = {SHORTHANDS[part]: node[part]}
        node = node[part]
        if not isinstance(node, dict):
            where = ".".join(parents[:depth])
            raise ConfigError(
                f"{where} is {_show(node)} and has no keys; give all of it: {where}='{{key: value, ...}}'"
            )
    node.update(_merge({last: node.get(last)}, {last: value}))


def read_overrides(overrides: Sequence[str]) -> Tree:
    """Read `a.b=c` settings that no schema here knows as plain data. Raises: ConfigError."""
    tree: Tree = {}
    for override in overrides:
        try:
            _apply_override(tree, override)
        except ConfigError as error:
            raise ConfigError(f"override {override!r}: {error}") from None
    return tree


# --- references between keys ---


def _map_strings(node: Any, change: Callable[[str, str], Any], path: str = "") -> Any:
    """Copy a tree with `change(string, dotted path)` in place of every string."""
    if isinstance(node, dict):
        return {key: _map_strings(value, change, _join(path, key)) for key, value in node.items()}
    if isinstance(node, list):
        return [_map_strings(value, change, _join(path, i)) for i, value in enumerate(node)]
    return change(node, path) if isinstance(node, str) else node


def _refuse_resolvers(tree: Tree, problems: Problems) -> Tree:
    """Copy a tree; every string that calls a resolver becomes None and is noted, so that none ever runs."""

    def checked(text: str, path: str) -> str | None:
        if not _calls_resolver(text):
            return text
        problems[path].append(
            f"{text!r} is not allowed: a value may refer to other keys (${{train.seed}}), but read "
            f"nothing from outside; write the value itself, or say {path}=... when you run"
        )
        return None

    return _map_strings(tree, checked)


def _calls_resolver(text: str) -> bool:
    """Tell whether a `:` stands inside a `${...}` (a plain reference holds none) that is not escaped as `\\${`."""
    for match in _INTERPOLATION.finditer(text):
        if len(match.group(1)) % 2:  # an odd number of backslashes escapes
            continue
        depth = 1
        for character in text[match.end() :]:
            depth += (character == "{") - (character == "}")
            if depth == 0:
                break
            if character == ":":
                return True
    return False


def _resolve(node: Any, path: str, problems: Problems, depth: int = 0) -> Any:
    """Fill in every reference, giving plain values; one that cannot be filled becomes None and is noted."""
    if not isinstance(node, (DictConfig, ListConfig)):
        return node
    if depth > _MAX_DEPTH:
        problems[path].append("nested too deeply, or refers to itself")
        return None
    values: Tree = {}
    for key in node if isinstance(node, DictConfig) else range(len(node)):
        where = _join(path, key)
        try:
            values[key] = _resolve(cast(Any, node)[key], where, problems, depth + 1)
        except OmegaConfBaseException as error:
            values[key] = None
            problems[where].append(_reference_error(error))
    return values if isinstance(node, DictConfig) else list(values.values())


def _reference_error(error: OmegaConfBaseException) -> str:
    if isinstance(error, MissingMandatoryValue):
        return "required: '???' stands for a value that you give"
    reason = str(error).splitlines()[0]
    if isinstance(error, InterpolationKeyError):
        return f"{reason} (neither the file nor an override sets it)"
    return reason


# --- validation, and saying what is wrong ---


def _validate(schema: type[Schema], values: Tree, problems: Problems) -> Schema | None:
    """Make the validated model, or None with all its errors added to `problems`."""
    try:
        return schema.model_validate(values, extra="forbid")
    except ValidationError as error:
        known = set(problems)
        for details in error.errors(include_url=False):
            path = _written_path(details, values)
            if path not in known:  # a value that is None only because it could not be resolved is reported already
                problems[path].append(_explain(details, *_schema_of(schema, path, values)))
        return None


def _written_path(error: ErrorDetails, values: Tree) -> str:
    """Give the error's place as the user wrote it: pydantic also names union members and validators on the way."""
    path, node = "", cast(Any, values)
    for i, part in enumerate(error["loc"]):
        if _holds(node, part):
            path, node = _join(path, part), node[part]
        elif error["type"] == "missing" and i == len(error["loc"]) - 1:
            path = _join(path, part)
    return path


def _holds(node: object, part: str | int) -> bool:
    return part in (node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ())


def _schema_of(schema: type[BaseModel], path: str, values: Tree) -> tuple[type[BaseModel], str]:
    """Return the schema that knows a path's keys, and the path in it: an environment's own, below `env`."""
    parts, node = path.split("."), cast(Any, values)
    for i, part in enumerate(parts[:-1], start=1):
        node = node.get(part) if isinstance(node, dict) else None
        if part == "env" and isinstance(node, dict) and (spec := known(str(node.get("name", DEFAULT)))):
            return spec.settings, ".".join(parts[i:])
    return schema, path


def _explain(error: ErrorDetails, schema: type[BaseModel], path: str) -> str:
    if error["type"] == "extra_forbidden":
        return f"unknown key{_suggest(schema, path)}"
    if error["type"] == "missing":
        return "required, but not given"
    if error["type"] in ("value_error", "assertion_error"):
        return str(error.get("ctx", {}).get("error", error["msg"]))
    if error["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return f"expected a mapping, received {_show(error['input'])}"
    message = (
        error["msg"]
        .partition(", unable")[0]
        .replace("Input should be", "expected")
        .replace("a valid integer", "an integer")
        .replace("a valid ", "a ")
    )
    return f"{message}, received {_show(error['input'])}"


def _suggest(schema: type[BaseModel], path: str) -> str:
    """Say what an unknown key may have been: the same name elsewhere in the schema, or a like name at its level."""
    *parents, name = path.split(".")
    fields = sorted({field for model in _models_at(schema, parents) for field in model.model_fields})
    elsewhere = [place for place in _field_paths(schema) if place.rpartition(".")[2] == name]
    if elsewhere and not difflib.get_close_matches(name, fields, cutoff=0.8):
        nearest = sorted(elsewhere, key=lambda place: place.count("."))[:3]
        return f"; did you mean {' or '.join(map(repr, nearest))}?"
    return did_you_mean(name, fields)


def _models_at(annotation: Any, path: Sequence[str]) -> Iterator[type[BaseModel]]:
    """Find the models that may stand at a path, through unions, dicts and lists."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if not path:
            yield annotation
        elif path[0] in annotation.model_fields:
            yield from _models_at(annotation.model_fields[path[0]].annotation, path[1:])
    elif get_origin(annotation) in (list, tuple, dict):
        for inside in get_args(annotation)[-2:] if path else ():
            yield from _models_at(inside, path[1:])
    else:
        for part in get_args(annotation):
            yield from _models_at(part, path)


def _field_paths(annotation: Any, prefix: str = "", seen: tuple[type, ...] = ()) -> list[str]:
    """List the dotted paths of all fields that a key can name, through unions, but not in lists and dicts. A model that
    holds itself is entered once."""
    if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        inner = () if get_origin(annotation) in (list, tuple, dict) else get_args(annotation)
        return [path for part in inner for path in _field_paths(part, prefix, seen)]
    if annotation in seen:
        return []
    paths: list[str] = []
    for name, field in annotation.model_fields.items():
        paths += [_join(prefix, name), *_field_paths(field.annotation, _join(prefix, name), (*seen, annotation))]
    return paths


def _report(path: str | Path | None, problems: Problems) -> str:
    lines = []
    for where, texts in problems.items():
        expected = [text.partition(", received ") for text in dict.fromkeys(texts)]
        if len(expected) > 1 and all(received for _, received, _ in expected):
            # A union: one error for each of its members.
            kinds = " or ".join(text.removeprefix("expected ") for text, _, _ in expected)
            texts = [f"expected {kinds}, received {expected[0][2]}"]
        lines.append(f"  {where or '(top level)'}: {'; '.join(dict.fromkeys(texts))}")
    count = f"{len(lines)} problem{'s' * (len(lines) > 1)}"
    return "\n".join([f"{count} in {path or 'the configuration'}:", *lines])


def _yaml_error(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        reason = " ".join(part for part in (error.context, error.problem) if part)
        return f", line {mark.line + 1}, column {mark.column + 1}: {reason}"
    where = f"{error.full_key}: " if isinstance(error, OmegaConfBaseException) and error.full_key else ""
    return f": {where}{str(error).splitlines()[0] if str(error) else type(error).__name__}"


def _show(value: object) -> str:
    if value is None:
        return "null"
    return f"{reprlib.repr(value)} ({_KINDS.get(type(value), type(value).__name__)})"


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)
