"""Every setting with a domain has it in its type: what lies outside is an error before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError, create_model

from configs.collect import CollectConfig
from configs.evaluation import EvalConfig, QuickstartConfig
from configs.load import ConfigError, load_config
from configs.models import ServeConfig
from configs.proxy import ProxyConfig
from configs.training import GrpoConfig, SftConfig
from envs.registry import loaded
from memory.registry import find, names
from runtime.settings import Settings

ROOTS = (CollectConfig, EvalConfig, SftConfig, GrpoConfig, ServeConfig, ProxyConfig, QuickstartConfig)
FREE = {"init_log_sigma"}  # may be negative


def models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        for field in annotation.model_fields.values():
            yield from models(field.annotation)
    for inside in get_args(annotation):
        yield from models(inside)


def kinds(annotation: Any) -> set[Any]:
    inside = get_args(annotation)
    return set().union(*map(kinds, inside)) if inside else {annotation}


OF_ENVIRONMENTS = [spec.settings for spec in loaded()]
OF_MEMORIES = [find(name).settings for name in names()]
SETTINGS = {model for root in (*ROOTS, *OF_ENVIRONMENTS, *OF_MEMORIES) for model in models(root)}
NUMBERS = {
    f"{model.__name__}.{name}": (model, name)
    for model in sorted(SETTINGS, key=lambda model: model.__name__)
    for name, field in model.model_fields.items()
    if kinds(field.annotation) & {int, float} and bool not in kinds(field.annotation)
}


def test_every_class_of_settings_is_found() -> None:
    found = {model.__name__ for model in SETTINGS}
    assert {"Optimizer", "GymnasiumKeys", "VllmEngine", "RaySettings", "S3MemSettings", "Working"} <= found
    assert len(NUMBERS) > 100 and all(issubclass(model, Settings) for model in SETTINGS)


@pytest.mark.parametrize("place", NUMBERS)
def test_no_number_is_below_zero_infinite_or_a_truth_value(place: str) -> None:
    model, name = NUMBERS[place]
    field = model.model_fields[name]
    alone = create_model("Alone", __base__=Settings, **{name: (field.rebuild_annotation(), ...)})  # type: ignore[call-overload]
    kind = str(field.annotation)
    shaped = (
        (lambda value: {"a": value})
        if kind.startswith("dict")
        else (lambda value: (value, value))
        if kind.startswith("tuple")
        else lambda value: value
    )
    wrong = [float("nan"), float("inf"), -float("inf"), *([] if name in FREE else [-1, -3, -0.5])]
    for value in [*map(shaped, wrong), True, False]:
        with pytest.raises(ValidationError):
            alone(**{name: value})


@pytest.mark.parametrize("schema", [CollectConfig, EvalConfig, GrpoConfig])
@pytest.mark.parametrize("value", ["0", "-1", "-3", "true", ".nan", ".inf", "1.5", "[]"])
def test_a_limit_counts_from_one(schema: type[BaseModel], value: str) -> None:
    with pytest.raises(ConfigError, match=r"limit: .*received|limit: expected"):
        load_config(schema, None, [f"limit={value}"])
    assert load_config(schema, None, ["limit=1"]).limit == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["env.gymnasium.keys.succes=won"], "env.gymnasium.keys.succes: unknown key; did you mean 'success'?"),
        (
            ["env.gymnasium.splits.train.seed=[1]"],
            "env.gymnasium.splits.train.seed: unknown key; did you mean 'seeds'?",
        ),
        (["memory.system=s3mem", "memory.settings.tau_supp=0.5"], "tau_supp: unknown key; did you mean 'tau_sup'?"),
        (["memory.system=s3mem", "memory.settings.tau_sup=7"], "tau_sup: Input should be less than or equal to 1"),
        (
            ["memory.settings.text=raw", "memory.system=s3mem"],
            "memory.settings=null drops those of a file",
        ),
        (["memory.settings.text=row"], "text: Input should be 'raw' or 'commands'"),
        (["env.worker=1"], "no setting worker; did you mean 'workers'?"),
    ],
)
def test_unknown_keys_of_environments_and_memories_have_suggestions(overrides: list[str], said: str) -> None:
    block = "env={name: gymnasium, gymnasium: {id: X, goal: g, splits: {train: {seeds: [0]}}}}"
    with pytest.raises(ConfigError) as caught:
        load_config(CollectConfig, None, [block, *overrides])
    assert said in str(caught.value)


def test_another_memory_system_drops_the_settings_of_a_file() -> None:
    config = load_config(EvalConfig, "eval/alfworld-frozen")
    assert config.memory.settings == {"text": "raw", "outcomes": "success"}
    overrides = ["memory.system=brainmem", "memory.settings=null", "memory.settings.working.window=3"]
    config = load_config(EvalConfig, "eval/alfworld-frozen", overrides)
    assert config.memory.settings == {"working": {"window": 3}}
