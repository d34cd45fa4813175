"""Load a configuration from a YAML file and `a.b=c` overrides, and report all errors at once.

Precedence, lowest first: the schema's defaults, the file named by `base:`, the file, the overrides. Mappings merge;
other values (numbers, strings, lists) replace. Blocks may have a `base:` as well. A value may refer to another key of
the configuration (`${train.seed}`). Resolvers such as `${oc.env:HOME}` are refused: a run must follow from its files
and its command line, and a foreign configuration must not read this machine's environment."""

from __future__ import annotations

import codecs
import difflib
import io
import json
import re
import reprlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, MissingMandatoryValue, OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from envs.registry import DEFAULT, known
from runtime.checksums import RecordError, read_checked
from runtime.settings import did_you_mean

CONFIGS = Path(__file__).resolve().parent
BASE = "base"  # the loader's own key, which no schema may have

Schema = TypeVar("Schema", bound=BaseModel)
Tree = dict[Any, Any]  # a YAML mapping before validation
Problems = defaultdict[str, list[str]]  # dotted path (or override) -> error messages

# PyYAML's safe loader raises these on hostile text: bad explicit tags (`!!int x`, `!!timestamp x`), deep nesting.
_PARSE_ERRORS = (yaml.YAMLError, OmegaConfBaseException, ValueError, LookupError, AttributeError, RecursionError)
_OVERRIDE_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")
_INTERPOLATION = re.compile(r"(\\*)\$\{")
_MAX_DEPTH, _MAX_NESTING = 50, 100
_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "mapping", list: "list"}


class ConfigError(ValueError):
    """Invalid configuration. The message lists every error."""


def load_config(schema: type[Schema], path: str | Path | None, overrides: Sequence[str] = ()) -> Schema:
    """Read, merge, resolve and validate a configuration. Unknown keys are errors at every level.

    Args:
        path: a YAML file, or the name of one in `configs/` (`find_config`); None: the schema's defaults.
        overrides: `a.b=c`, the value parsed as YAML. A list replaces the whole list (`stages=[sft, eval]`).

    Raises:
        ConfigError: lists all errors, each with its dotted path.
    """
    if BASE in schema.model_fields:
        raise TypeError(f"{schema.__name__} has a field named {BASE!r}, which is reserved for the loader")
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


def changed(config: Schema, *changes: Mapping[str, Any], without: Collection[str] = ()) -> Schema:
    """Return a copy of a configuration with changes merged over the settings that it sets, in their order.

    Args:
        changes: settings by dotted key; mappings merge. They may refer to keys of the configuration (`${seed}`).
        without: keys of the configuration to leave out.

    Raises:
        ConfigError: as `load_config`.
    """
    own = config.model_dump(mode="json", exclude_unset=True, exclude=set(without))
    # References of the configuration are resolved already, so its literal `${` are escaped.
    overrides = [as_override(key, value) for key, value in own.items()]
    overrides += [f"{key}={json.dumps(value)}" for change in changes for key, value in change.items()]
    return load_config(type(config), None, overrides)


def as_override(key: str, value: object) -> str:
    """Write a setting as an override, `a.b=c`, that sets exactly this value."""
    text = json.dumps(value)  # JSON is YAML
    return f"{key}={text}".replace("${", "\\\\${")


def find_config(name: str | Path) -> Path:
    """Return the file of a path, or of a name relative to `configs/`; `.yaml` is optional."""
    for folder in (Path(), CONFIGS):
        for candidate in (folder / name, folder / f"{name}.yaml"):
            if candidate.is_file():
                return candidate
    shipped = sorted(file.relative_to(CONFIGS).with_suffix("").as_posix() for file in CONFIGS.rglob("*.yaml"))
    close = difflib.get_close_matches(str(name).removesuffix(".yaml"), shipped, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ConfigError(f"no configuration {str(name)!r}{hint}; shipped in configs/: {', '.join(shipped) or 'none'}")


def to_yaml(config: BaseModel) -> str:
    """Serialise a configuration with all defaults; `load_config` reads an equal one back."""
    escape = lambda text, path: _INTERPOLATION.sub(r"\1\1\\${", text)  # escape literal `${`
    return OmegaConf.to_yaml(OmegaConf.create(_map_strings(config.model_dump(mode="json"), escape)))


def read_yaml(path: Path) -> Tree:
    """Read a YAML file as plain data, with unresolved references. Raises: ConfigError, with the line, or for another
    checksum than its folder records."""
    try:
        loaded = OmegaConf.load(io.StringIO(_shallow(_decoded(read_checked(path)))))
        data = OmegaConf.to_container(loaded, resolve=False)
    except OSError as error:  # OmegaConf raises one without strerror for a bare number
        raise ConfigError(f"{path}: {error.strerror or 'expected a mapping (key: value) at the top'}") from None
    except RecordError as error:
        raise ConfigError(str(error)) from None
    except _PARSE_ERRORS as error:
        raise ConfigError(f"{path}{_yaml_error(error)}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping (key: value) at the top, received {_show(data)}")
    return data


def _decoded(raw: bytes) -> str:
    """Decode by byte-order mark, else as UTF-8. Raises: UnicodeDecodeError."""
    return raw.decode("utf-16" if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig")


def _shallow(text: str) -> str:
    """Return the text. Raises: ValueError, if its nesting would overflow the stack of the YAML parser."""
    opened = accumulate(1 if mark in "[{" else -1 for mark in re.findall(r"[\[\]{}]", text))
    compact = (len(re.findall(r"[-?]\s", line)) for line in text.split("\n"))
    if max((*opened, *compact), default=0) > _MAX_NESTING:
        raise ValueError("nested too deeply")
    return text


# --- merging ---


def _read_with_base(path: Path, chain: tuple[Path, ...] = ()) -> Tree:
    """Read a file and merge it, and each of its blocks, over their `base` files, recursively."""
    path = path.resolve()
    if path in chain:
        cycle = " -> ".join(file.name for file in (*chain, path))
        raise ConfigError(f"{path}: `{BASE}` leads back to itself: {cycle}")

    def based(tree: Tree, top: bool = False) -> Tree:
        blocks = {key: based(value) if isinstance(value, dict) else value for key, value in tree.items()}
        if top and not isinstance(blocks.get(BASE, ""), str):
            raise ConfigError(f"{path}: `{BASE}` must be a file name, received {_show(blocks[BASE])}")
        if not isinstance(blocks.get(BASE), str):  # inside a block, `base` may be an ordinary key
            return blocks
        base = str(blocks.pop(BASE))
        if not (path.parent / base).is_file():
            raise ConfigError(f"{path}: `{BASE}: {base}`: no such file (the name is relative to {path.parent})")
        return _merge(_read_with_base(path.parent / base, (*chain, path)), blocks)

    return based(read_yaml(path), top=True)


def _merge(below: Tree, above: Mapping[Any, Any]) -> Tree:
    """Merge mappings recursively. (OmegaConf.merge would resolve references, and resolvers, before
    `_refuse_resolvers`.)"""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def parse_override(text: str) -> tuple[list[str], object]:
    """Split `a.b=c` into the parts of its key and its value, parsed as YAML. Raises: ConfigError."""
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


def _apply_override(tree: Tree, text: str) -> None:
    """Apply an override in place; a mapping merges like a file over its base."""
    (*parents, last), value = parse_override(text)
    node = tree
    for depth, part in enumerate(parents, start=1):
        if node.get(part) is None:
            node[part] = {}
        elif part == "env" and isinstance(node[part], str):
            node[part] = {"name": node[part]}  # `env=alfworld` is short for `env.name=alfworld`
        node = node[part]
        if not isinstance(node, dict):
            where = ".".join(parents[:depth])
            raise ConfigError(
                f"{where} is {_show(node)} and has no keys; set the whole block: {where}='{{key: value, ...}}'"
            )
    node.update(_merge({last: node.get(last)}, {last: value}))


def read_overrides(overrides: Sequence[str]) -> Tree:
    """Read `a.b=c` settings without a schema as plain data. Raises: ConfigError."""
    tree: Tree = {}
    for override in overrides:
        try:
            _apply_override(tree, override)
        except ConfigError as error:
            raise ConfigError(f"override {override!r}: {error}") from None
    return tree


# --- references between keys ---


def _map_strings(node: Any, change: Callable[[str, str], Any], path: str = "") -> Any:
    """Copy a tree, replacing every string by `change(string, dotted path)`."""
    if isinstance(node, dict):
        return {key: _map_strings(value, change, _join(path, key)) for key, value in node.items()}
    if isinstance(node, list):
        return [_map_strings(value, change, _join(path, i)) for i, value in enumerate(node)]
    return change(node, path) if isinstance(node, str) else node


def _refuse_resolvers(tree: Tree, problems: Problems) -> Tree:
    """Copy a tree; replace strings that call a resolver by None and add an error, so that no resolver runs."""

    def checked(text: str, path: str) -> str | None:
        if not _calls_resolver(text):
            return text
        problems[path].append(
            f"{text!r} is not allowed: a value may refer to other keys (${{train.seed}}), but not read anything from "
            f"outside; write the value itself, or set {path}=... on the command line"
        )
        return None

    return _map_strings(tree, checked)


def _calls_resolver(text: str) -> bool:
    """Return whether an unescaped `${...}` contains a `:`, as resolvers do and plain references do not."""
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
    """Resolve every reference; replace one that cannot be resolved by None and add an error."""
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
        return "required: replace '???' by a value"
    reason = str(error).splitlines()[0]
    if isinstance(error, InterpolationKeyError):
        return f"{reason} (neither the file nor an override sets it)"
    return reason


# --- validation and error messages ---


def _validate(schema: type[Schema], values: Tree, problems: Problems) -> Schema | None:
    """Return the validated model; None, with all errors added to `problems`, if it is invalid."""
    try:
        return schema.model_validate(values, extra="forbid")
    except ValidationError as error:
        known = set(problems)
        for details in error.errors(include_url=False):
            path = _written_path(details, values)
            if path not in known:  # unresolved values are reported already
                problems[path].append(_explain(details, *_schema_of(schema, path, values)))
        return None


def _written_path(error: ErrorDetails, values: Tree) -> str:
    """Return the dotted path of an error as the user wrote it, without pydantic's union members and validators."""
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
    """Return the schema of a path's keys and the path within it; below `env` it is the environment's schema."""
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
    """Suggest replacements for an unknown key: the same name elsewhere in the schema, or a similar name at its
    level."""
    *parents, name = path.split(".")
    fields = sorted({field for model in _models_at(schema, parents) for field in model.model_fields})
    elsewhere = [place for place in _field_paths(schema) if place.rpartition(".")[2] == name]
    if elsewhere and not difflib.get_close_matches(name, fields, cutoff=0.8):
        nearest = sorted(elsewhere, key=lambda place: place.count("."))[:3]
        return f"; did you mean {' or '.join(map(repr, nearest))}?"
    return did_you_mean(name, fields)


def _models_at(annotation: Any, path: Sequence[str]) -> Iterator[type[BaseModel]]:
    """Yield the models at a path, through unions, dicts and lists."""
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
    """Return the dotted paths of all fields, through unions, but not inside lists and dicts. Recursive models are
    entered once."""
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
            # one error for each member of a union
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
