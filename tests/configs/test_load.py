"""Configurations: what merges over what, and that every mistake is named, with its place and a way out."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, field_validator

from configs import load
from configs.evaluation import EvalConfig
from configs.load import ConfigError, load_config, parse_override, to_yaml
from configs.training import GrpoConfig, SftConfig


class Optimiser(BaseModel):
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    schedule: Literal["constant", "cosine"] = "constant"


class Household(BaseModel):
    name: Literal["household"] = "household"
    scenes: int = 8


class Games(BaseModel):
    name: Literal["games"] = "games"
    root: str


class Experiment(BaseModel):
    seed: int = 0
    warmup_seed: int = 0
    title: str = ""
    standard: float | Literal["auto"] = "auto"
    optimiser: Optimiser = Optimiser()
    env: Annotated[Household | Games, Field(discriminator="name")] = Household()
    stages: list[Optimiser] = []
    rates: dict[str, float] = {}
    split: str | None = None

    @field_validator("title")
    @classmethod
    def _short(cls, value: str) -> str:
        if len(value) > 100:
            raise ValueError("a title has at most 100 characters")
        return value


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str, name: str = "experiment.yaml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def problems(path: Path | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(Experiment, path, overrides)
    return str(caught.value)


# --- what merges over what ---


def test_defaults_without_a_file():
    assert load_config(Experiment, None) == Experiment()


def test_file_over_base_over_defaults_and_overrides_over_all(write):
    write("seed: 1\noptimiser: {lr: 0.5, schedule: cosine}\nstages: [{lr: 1}, {lr: 2}]", "deep/root.yaml")
    write("base: deep/root.yaml\noptimiser: {lr: 0.25}\nstages: [{lr: 3}]", "middle.yaml")
    path = write("base: middle.yaml\nrates: {a: 1, b: 2}")
    config = load_config(Experiment, path, ["optimiser.betas=[0.1, 0.2]", "rates.b=3", "rates={c: 4}", "title=a=b"])
    assert config.seed == 1
    assert config.optimiser == Optimiser(lr=0.25, betas=(0.1, 0.2), schedule="cosine")
    assert [stage.lr for stage in config.stages] == [3]  # lists are replaced
    assert config.rates == {"a": 1, "b": 3, "c": 4}  # mappings merge
    assert config.title == "a=b"


def test_override_creates_missing_levels_and_the_last_one_wins():
    config = load_config(Experiment, None, ["optimiser.lr=1", "optimiser.lr=1e-4", "split=null", "rates.x=.5"])
    assert config.optimiser.lr == 1e-4 and config.split is None and config.rates == {"x": 0.5}


def test_empty_file_is_the_defaults(write):
    assert load_config(Experiment, write("# nothing yet\n")) == Experiment()


def test_names_are_found_in_the_configs_folder(write, monkeypatch, tmp_path):
    write("seed: 7", "shipped/small.yaml")
    monkeypatch.setattr(load, "CONFIGS", tmp_path / "shipped")
    assert load_config(Experiment, "small").seed == load_config(Experiment, "small.yaml").seed == 7


# --- references ---


def test_a_value_may_refer_to_another_key(write):
    config = load_config(
        Experiment, write("seed: ${warmup_seed}\nwarmup_seed: 3\ntitle: seed ${seed}"), ["warmup_seed=4"]
    )
    assert (config.seed, config.title) == (4, "seed 4")


@pytest.mark.parametrize(
    "value",
    [
        "${oc.env:HOME}",
        "x ${oc.env:HOME,none} y",
        "${rates.${oc.env:HOME}}",
        "${oc.decode:'1'}",
        "${ oc.env : HOME }",
        "a: ${split} \\\\${oc.env:HOME}",
    ],
)
def test_resolvers_are_refused_and_never_run(write, value, monkeypatch):
    monkeypatch.setenv("HOME", "/the/secret")
    quoted = json.dumps(value)  # which YAML reads as well
    message = problems(write(f"title: {quoted}"))
    assert "title: " in message and "not read anything from outside" in message and "title=..." in message
    assert "/the/secret" not in message
    assert "not read anything from outside" in problems(None, f"title={quoted}")
    assert "stages.0: " in problems(None, f"stages=[{quoted}]")


def test_an_escaped_or_plain_colon_is_no_resolver(write):
    config = load_config(Experiment, write("split: home\ntitle: 'where: ${split}: \\${oc.env:HOME} {a: b}'"))
    assert config.title == "where: home: ${oc.env:HOME} {a: b}"


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("seed: ${nowhere}", "seed: Interpolation key 'nowhere' not found"),
        ("seed: ${warmup_seed}\nwarmup_seed: ${seed}", "seed: Recursive interpolation"),
        ("rates: ${env}\nenv: {name: '${rates}'}", "env.name"),
        ("title: '${'", "title: "),
        ("seed: ???", "seed: required"),
    ],
)
def test_references_that_lead_nowhere(write, text, where):
    assert where in problems(write(text))


# --- mistakes ---


def test_all_mistakes_at_once_each_with_its_place(write):
    path = write("seeds: 1\noptimiser: {lr: fast, shedule: cosine}\nstages: [{}, {lr: []}]\nenv: {name: games}")
    message = problems(path, "seed=1.5", "standard=big", "nonsense", f"title={'x' * 101}")
    assert message.splitlines()[0] == f"9 problems in {path}:"
    for line in (
        "override 'nonsense': expected key=value",
        "seeds: unknown key; did you mean 'seed'?",
        "optimiser.lr: expected a number, received 'fast' (string)",
        "optimiser.shedule: unknown key; did you mean 'schedule'?",
        "stages.1.lr: expected a number, received [] (list)",
        "env.root: required, but not given",
        "standard: expected a number or 'auto', received 'big' (string)",
        "title: a title has at most 100 characters",
        "seed: expected an integer",
    ):
        assert f"  {line}" in message


@pytest.mark.parametrize(
    ("key", "place"),
    [
        ("lr", "'optimizer.lr'"),
        ("betas", "'optimizer.betas'"),
        ("clip_low", "'loss.clip_low'"),
        ("temperature", "'compiler.temperature' or 'executor.temperature' or 'sampling.temperature'"),
    ],
)
def test_a_setting_that_has_gone_into_a_block_is_named_with_it(key, place):
    with pytest.raises(ConfigError) as caught:
        load_config(GrpoConfig, None, [f"{key}=0.5"])
    assert f"  {key}: unknown key; did you mean {place}?" in str(caught.value)


def test_unknown_key_elsewhere_in_the_schema_is_named_with_its_path():
    assert "schedule: unknown key; did you mean 'optimiser.schedule'?" in problems(None, "schedule=cosine")


def test_unknown_key_like_nothing_lists_what_there_is():
    assert "optimiser.zzz: unknown key; known here: betas, lr, schedule" in problems(None, "optimiser.zzz=1")


def test_a_mapping_where_a_model_is_due():
    assert "optimiser: expected a mapping, received 3 (integer)" in problems(None, "optimiser=3")
    assert "seed: expected an integer, received null" in problems(None, "seed=null")


def test_choices_are_listed():
    assert "expected 'constant' or 'cosine', received 'linear'" in problems(None, "optimiser.schedule=linear")
    assert "env: " in problems(None, "env={name: other}")


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("seed", "expected key=value"),
        ("=1", "expected names joined by dots"),
        ("a..b=1", "expected names joined by dots"),
        ("a b=1", "expected names joined by dots"),
        ("seed=[1", "the value is not YAML"),
        ("seed=!!python/object/apply:os.getcwd []", "the value is not YAML"),
    ],
)
def test_overrides_that_are_none(override, part):
    message = problems(None, override)
    assert f"override {override!r}: {part}" in message


def test_override_below_a_value_says_so(write):
    assert "seed is 3 (integer) and has no keys" in problems(write("seed: 3"), "seed.deep=1")


def test_file_not_found_suggests(write, monkeypatch, tmp_path):
    write("", "shipped/quickstart.yaml")
    monkeypatch.setattr(load, "CONFIGS", tmp_path / "shipped")
    with pytest.raises(ConfigError, match=r"no configuration 'quickstrat'; did you mean 'quickstart'\?"):
        load_config(Experiment, "quickstrat")
    with pytest.raises(ConfigError, match="shipped in configs/: quickstart"):
        load_config(Experiment, "/not/there.yaml")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("seed: 1\noptimiser: [1\nx: 2", ", line 3, column "),
        ("seed: 1\nseed: 2", ", line 2, column 1: while constructing a mapping found duplicate key seed"),
        ("seed: 1\n\ttitle: x", ", line 2, column 1"),
        ("- 1", ": expected a mapping (key: value) at the top"),
        ("3", ": expected a mapping (key: value) at the top"),
        ("title: !!python/object/apply:os.getcwd []", ", line 1, column 8: could not determine a constructor"),
        ("seed: !!int x", ": "),
    ],
)
def test_broken_yaml_names_the_line(write, text, part):
    path = write(text)
    assert f"{path}{part}" in problems(path)


def test_a_value_that_is_no_time_is_a_clear_error(write):
    """By YAML's own reader, or (where another library of the process taught it to take any text) by the schema."""
    path = write("seed: !!timestamp x")
    assert str(path) in problems(path)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_a_file_is_read_by_its_byte_order_mark(write, encoding):
    text = "title: café 水\nsplit: x\n"
    path = write("")
    path.write_bytes((text if encoding in ("utf-8", "utf-8-sig", "utf-16") else f"\ufeff{text}").encode(encoding))
    assert load_config(Experiment, path).title == "café 水"


@pytest.mark.parametrize(
    "content", ["title: café".encode("latin-1"), b"\xff\xfet", b"title: \x00", b"\xfe\xff\xd8\x00"]
)
def test_a_file_of_another_encoding_is_named_in_one_line(write, content):
    path = write("")
    path.write_bytes(content)
    assert str(path) in problems(path) and "\n" not in problems(path)


def test_binary_file(write):
    path = write("")
    path.write_bytes(b"\xff\xfe\x00seed")
    assert str(path) in problems(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file(write):
    path = write("seed: 1")
    path.chmod(0)
    assert f"{path}: Permission denied" in problems(path)


def test_base_errors(write):
    assert "`base` must be a file name, received 3 (integer)" in problems(write("base: 3"))
    assert "`base: gone.yaml`: no such file" in problems(write("base: gone.yaml"))
    write("base: experiment.yaml", "other.yaml")
    assert "experiment.yaml -> other.yaml -> experiment.yaml" in problems(write("base: other.yaml"))


def test_a_block_may_have_a_base_of_its_own(write):
    write("lr: 0.25\nschedule: ${split}", "optimiser.yaml")
    path = write("split: cosine\noptimiser: {base: optimiser.yaml, lr: 0.5}\nrates: {base: 2.0}")
    config = load_config(Experiment, path)
    assert (config.optimiser.lr, config.optimiser.schedule, config.rates) == (0.5, "cosine", {"base": 2.0})
    assert "`base: gone.yaml`: no such file" in problems(write("optimiser: {base: gone.yaml}"))


def test_base_is_the_loaders_own_key():
    class Wrong(BaseModel):
        base: str = ""

    with pytest.raises(TypeError, match="reserved for the loader"):
        load_config(Wrong, None)


# --- there and back, and text from anywhere ---

awkward = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    st.text(st.sampled_from("${}\\:.?ab"), max_size=10),
    st.sampled_from(["1e3", "yes", "null", "~", "0x1f", "${seed}", "\\${seed}", "12:30:00", "2020-01-01", "", "a: b"]),
).filter(lambda text: text != "???")


@given(awkward, st.floats(allow_nan=False), st.dictionaries(awkward, st.floats(allow_nan=False), max_size=3))
def test_to_yaml_reads_back_equal(tmp_path_factory, title, lr, rates):
    config = Experiment(title=title, split=title, optimiser=Optimiser(lr=lr), rates=rates, stages=[Optimiser()])
    path = tmp_path_factory.mktemp("yaml") / "config.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")
    assert load_config(Experiment, path) == config


@given(st.one_of(awkward, st.builds("{}={}".format, st.sampled_from(["title", "rates.x", "env"]), awkward)))
def test_any_override_is_read_or_refused(text):
    try:
        keys, _ = parse_override(text)
    except ConfigError as error:
        assert str(error)
    else:
        assert ".".join(keys) == text.partition("=")[0]
    try:
        load_config(Experiment, None, [text])
    except ConfigError as error:
        assert str(error).startswith(("1 problem", "2 problems"))


@given(st.one_of(awkward, st.text(st.sampled_from("a:-[]{}!&*#|>'\"%@` \n\t?1"), max_size=30)))
def test_any_file_is_read_or_refused(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("yaml") / "config.yaml"
    path.write_text(text, encoding="utf-8")
    try:
        load_config(Experiment, path)
    except ConfigError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize(
    ("schema", "key"),
    [
        (SftConfig, "rows"),
        (SftConfig, "compiler.model"),
        (GrpoConfig, "compiler.checkpoint"),
        (EvalConfig, "executor.model"),
        (EvalConfig, "memory.bank"),
        (EvalConfig, "memory.experience_folder"),
        (EvalConfig, "memory.tokenizer"),
        (EvalConfig, "memory.embed"),
        (EvalConfig, "executor.api.cache"),
        (EvalConfig, "env.data_root"),
    ],
)
def test_a_path_may_begin_with_the_home_folder(monkeypatch, schema, key):
    monkeypatch.setenv("HOME", "/the/home")
    others = ["env=alfworld"] if key.startswith("env") else []
    value = load_config(schema, None, [*others, f"{key}=~/a b"])
    for part in key.split("."):
        value = getattr(value, part)
    assert value == "/the/home/a b"
    with pytest.raises(ConfigError, match=f"{key}: ~no-such-user/x: there is no user 'no-such-user'"):
        load_config(schema, None, [*others, f"{key}=~no-such-user/x"])


def test_each_of_several_paths_may_begin_with_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/the/home")
    assert load_config(SftConfig, None, ["rows=[~/a, b/~, ~/]"]).rows == ("/the/home/a", "b/~", "/the/home/")
