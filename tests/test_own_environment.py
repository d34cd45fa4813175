"""An environment of one's own: one file (this one) says all of it, and it is collected, learnt from and evaluated."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field

from configs.collect import CollectConfig
from configs.evaluation import EvalConfig
from configs.load import ConfigError, load_config, to_yaml
from configs.training import SftConfig
from envs import registry
from envs.base import Environment, EnvironmentFailure, Observation, Task, Transition
from envs.manifest import Manifest
from envs.spec import EnvSettings, EnvSpec, Probe, Splits, WorkerSpec
from memcompiler import doctor
from runtime.plugins import PluginError

# The environment ------------------------------------------------------------------------------------------------------

BOXES = 3


class Vault:
    """Every vault keeps its coin in one of three boxes, always the same one."""

    name = "vault"

    def __init__(self, rooms: int) -> None:
        self._rooms, self._task, self._at = rooms, Task("", "", "", "", ""), 0

    def tasks(self, split: str) -> list[Task]:
        if split not in ("train", "past", "exam"):
            raise ValueError(f"no split {split!r}; there are train, past, exam")
        first = 100 if split == "exam" else 0
        return [
            Task(
                f"{split}/{room}",
                "take the coin",
                f"vault {room}",
                split,
                "fetch",
                "text",
                {"box": str(room % BOXES + 1)},
                {"vault": (f"vault {room}",)},
            )
            for room in range(first, first + self._rooms)
        ]

    def reset(self, task: Task) -> Observation:
        self._task, self._at = task, 0
        return self._seen("You are in a vault with three boxes.")

    def step(self, action: str) -> Transition:
        seen = self._seen("")
        if action not in (seen.admissible or ()):
            return Transition(self._seen("The guard shakes his head."), 0.0, False, False)
        won = action.startswith("take")
        if action.startswith("go to box"):
            self._at = int(action[-1])
        holds = str(self._at) == self._task.data["box"]
        text = f"On the box {self._at}, you see {'a coin 1' if holds and not won else 'nothing'}."
        return Transition(self._seen(text), float(won), won, won)

    def expert(self) -> list[str] | None:
        box = self._task.data["box"]
        return [*([] if str(self._at) == box else [f"go to box {box}"]), f"take coin 1 from box {box}"]

    def close(self) -> None:
        pass

    def _seen(self, text: str) -> Observation:
        here = str(self._at) == self._task.data["box"]
        goes = [f"go to box {i + 1}" for i in range(BOXES) if i + 1 != self._at]
        return Observation(text, None, (*goes, *([f"take coin 1 from box {self._at}"] if here else [])))


class VaultSettings(EnvSettings):
    name: Literal["vault"] = "vault"
    rooms: int = Field(default=4, ge=1)


def look_at_the_boxes() -> str:
    return f"{BOXES} boxes"


VAULT = EnvSpec(
    "vault",
    VaultSettings,
    lambda settings: WorkerSpec(f"{__name__}:Vault", {"rooms": settings.rooms}),
    splits=lambda _: Splits("exam", held_out=("exam",), experience=lambda split: {"train": "past"}.get(split, split)),
    isolation={"vault": "disjoint"},
    packages=("pydantic",),
    sources=(__name__,),
    probes=lambda: [Probe("vault", look_at_the_boxes, core=False)],
    refusals=("The guard shakes his head",),
    instructions="You stand in a vault. Answer with one command, for example: go to box 1.",
)

# ----------------------------------------------------------------------------------------------------------------------

MODELS = {
    "compiler": {
        "model": "zoo/household/compiler",
        "dtype": "float32",
        "instructions": "none",
        "max_new_tokens": 8,
        "soft": {"n_tokens": 2, "emb_std": "auto"},
    },
    "executor": {"model": "zoo/household/executor", "dtype": "float32", "max_new_tokens": 8},
}


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry._ALL, "_added", {})


@pytest.fixture
def vault(nothing_known: None) -> None:
    registry.register(VAULT)


@pytest.mark.slow
def test_it_is_collected_learnt_from_and_evaluated_by_its_name(vault: None, tmp_path: Path) -> None:
    from compiler import checkpoint
    from data_gen.leakage import rows_environments
    from eval.evaluate import run_eval
    from eval.provenance import sha256
    from lm.device import device_of
    from memcompiler.collection import run_collect
    from training.sft import train_sft

    run_collect(CollectConfig.model_validate({"env": "vault", "noise": 0.0, "max_steps": 4}), tmp_path / "collect")
    collected = json.loads((tmp_path / "collect" / "collect.json").read_text())
    assert collected["tasks"] == collected["successes"] == 4 and collected["bank_entries"] == 4
    assert {task.split for task in Manifest.read(tmp_path / "collect" / "manifest.json").tasks} == {"train", "past"}
    assert json.loads((tmp_path / "collect" / "leakage.json").read_text())["verdict"]["benchmark"] == "vault"

    rows = str(tmp_path / "collect" / "rows")
    assert rows_environments([Path(rows)]) == {"vault": VAULT}
    sft = {**MODELS, "rows": rows, "max_steps": 2, "latent": "none"}
    train_sft(SftConfig.model_validate(sft), tmp_path / "sft")
    assert len((tmp_path / "sft" / "metrics.jsonl").read_text().splitlines()) == 2
    assert checkpoint.environments(checkpoint.find(tmp_path / "sft")) == ("vault",)

    asked = {
        "env": {"name": "vault", "rooms": 2},
        **MODELS,
        "deliveries": ["static", "compiled"],
        "max_steps": 2,
        "memory": {"experience_split": "exam"},
    }
    asked["compiler"] = {**MODELS["compiler"], "checkpoint": str(tmp_path / "sft")}
    results = run_eval(EvalConfig.model_validate(asked), tmp_path / "eval")
    assert (results["environment"], results["split"], results["n_tasks"]) == ("vault", "exam", 2)
    version = results["environment_version"]
    assert version["packages"]["pydantic"] and len(version["engine_sha256"]) == 64
    assert results["prompts"]["executor_instructions"] == sha256(VAULT.instructions)
    placed = [json.loads((tmp_path / run / "environment.json").read_text())["devices"] for run in ("sft", "eval")]
    here = {"device": device_of("auto"), "dtype": "float32"}
    assert placed == [{"compiler": here, "executor": here}] * 2
    facts = json.loads((tmp_path / "eval" / "leakage.json").read_text())
    assert facts["training"]["overlaps"][0]["dimension"] == "vault" and facts["training"]["clean"] is True


def test_training_on_what_its_spec_holds_out_is_refused(vault: None, tmp_path: Path) -> None:
    from memcompiler.collection import run_collect

    with pytest.raises(ConfigError, match="4 shared vault"):
        run_collect(CollectConfig.model_validate({"env": "vault", "split": "exam"}), tmp_path / "collect")


def test_its_settings_and_refusals_are_known(vault: None, tmp_path: Path) -> None:
    from agent.records import StepRecord
    from eval.error_analysis import refused

    config = load_config(EvalConfig, None, ["env=vault", "env.rooms=7"])
    assert isinstance(config.env, VaultSettings) and config.env.rooms == 7
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load_config(EvalConfig, tmp_path / "again.yaml") == config
    with pytest.raises(ConfigError, match=r"environment household has no setting rooms \(of vault\)"):
        load_config(EvalConfig, None, ["env.rooms=7"])
    with pytest.raises(ConfigError, match="environment vault has no setting room; did you mean 'rooms'"):
        load_config(EvalConfig, None, ["env=vault", "env.room=7"])
    with pytest.raises(ConfigError, match="no environment 'vaults'; did you mean 'vault'"):
        load_config(EvalConfig, None, ["env=vaults"])
    step = StepRecord(0, "", None, None, "", feedback="The guard shakes his head.")
    assert refused(step) and not refused(StepRecord(0, "", None, None, "", feedback="Opened."))
    assert "vault" in {probe.name for probe in doctor.all_probes()}
    assert isinstance(Vault(1), Environment)
    with pytest.raises(PluginError, match="already"):
        registry.register(EnvSpec("household", VaultSettings, VAULT.construct, VAULT.splits))


# Of another package ---------------------------------------------------------------------------------------------------


class Offered(metadata.EntryPoint):
    """An entry point whose object is at hand."""

    def load(self) -> object:
        if self.value == "broken":
            raise ImportError("libvault.so: cannot open")
        return VAULT if self.value == "vault" else object()


@pytest.fixture
def offers(nothing_known: None, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = [
        Offered("vault", "vault", registry.GROUP),
        Offered("shaft", "broken", registry.GROUP),
        Offered("cave", "nothing", registry.GROUP),
    ]

    def entry_points(group: str, name: str | None = None) -> metadata.EntryPoints:
        if group != "memcompiler.environments":
            return metadata.EntryPoints()
        return metadata.EntryPoints(e for e in installed if name in (None, e.name))

    monkeypatch.setattr(metadata, "entry_points", entry_points)


def test_another_package_offers_one_by_an_entry_point(offers: None) -> None:
    from envs.registry import Environments

    assert "vault" in registry.names() and VAULT not in registry.loaded()  # not before it is asked for
    config = EvalConfig.model_validate({"env": {"name": "vault", "rooms": 1}})
    assert registry.find("vault") is VAULT and VAULT in registry.loaded()
    with Environments(config.env) as envs:
        env = envs.lease()
        env.reset(envs.tasks("exam")[0])
        plan = env.expert() or []
        assert [env.step(command).success for command in plan] == [False, True]


def test_one_that_cannot_be_loaded_is_named_when_it_is_asked_for(offers: None) -> None:
    assert load_config(EvalConfig, None, ["env=alfworld"]).env.name == "alfworld"
    with pytest.raises(ConfigError, match=r"'shaft'.* cannot be loaded .*libvault\.so"):
        load_config(EvalConfig, None, ["env=shaft"])
    with pytest.raises(ConfigError, match=r"'cave'.* is no EnvSpec of that name"):
        load_config(EvalConfig, None, ["env=cave"])
    probes = {probe.name: probe for probe in doctor.all_probes()}
    check = doctor.run_probe(probes["shaft"])
    assert check.status == "broken" and "libvault.so" in check.detail and not check.core
    assert doctor.run_probe(probes["vault"]).detail == "3 boxes"


@pytest.mark.slow
def test_what_runs_in_a_worker_is_the_same(vault: None) -> None:
    from envs.registry import Environments

    with Environments(VaultSettings(workers=1)) as envs, pytest.raises(EnvironmentFailure, match="no live episode"):
        assert envs.tasks("train") == Vault(4).tasks("train")
        envs.lease().step("go to box 1")
