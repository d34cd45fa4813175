"""The doctor: each way in which a part can fail is one line with a remedy, and none of them stops the doctor."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from envs import registry
from envs import spec as probes
from envs.alfworld.environment import fetch_games, find_games
from envs.embodiedbench.spec import INSTALLATIONS, import_all
from envs.scienceworld.environment import start_java
from envs.spec import NotInstalled, Probe
from memcompiler import doctor
from memcompiler.doctor import Check, all_probes, iter_checks, run_doctor, run_probe
from tests.commands.running import memcompiler

# Functions of this module, not closures: they travel to the doctor's worker process.


def fine() -> str:
    print("a greeting that must not reach the table")
    return "1.0"


def absent() -> str:
    raise NotInstalled("not installed")


def failing() -> str:
    raise ImportError("libsomething.so: cannot open\nlong trace")


def hang() -> str:
    time.sleep(600)
    return "never"


def crash(number: int) -> str:
    os.kill(os.getpid(), number)
    return "never"


def leave() -> str:
    sys.exit(3)


# --- the mechanism ---


@pytest.mark.seconds
def test_every_kind_of_failure_is_one_check_and_the_rest_goes_on(capfd):
    probes = [
        Probe("fine", fine),
        Probe("absent", absent, "install it", core=False),
        Probe("hanging", hang, "reboot", seconds=3.0),
        Probe("failing", failing, "reinstall it"),
        Probe("crashing", partial(crash, signal.SIGSEGV), "other wheel"),
        Probe("leaving", leave),
        Probe("last", fine, core=False),
    ]
    start = time.monotonic()
    assert list(iter_checks(probes)) == [
        Check("fine", "ok", "1.0"),
        Check("absent", "missing", "not installed", "install it", core=False),
        Check("hanging", "broken", "no answer within 3 s", "reboot"),
        Check("failing", "broken", "ImportError: libsomething.so: cannot open", "reinstall it"),
        Check("crashing", "broken", "the check crashed (SIGSEGV)", "other wheel"),
        Check("leaving", "broken", "the check crashed (exit status 3)"),
        Check("last", "ok", "1.0", core=False),
    ]
    assert time.monotonic() - start < 60
    assert capfd.readouterr().out == ""


def test_a_worker_that_is_not_waited_for_is_ended():
    first = next(checks := iter_checks([Probe("fine", fine), Probe("hanging", hang)]))
    assert first.status == "ok"
    start = time.monotonic()
    checks.close()
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("found", "code"),
    [
        ([Check("torch", "ok", "2"), Check("vllm", "missing", "not installed", "uv sync --extra vllm", core=False)], 0),
        ([Check("torch", "ok", "2"), Check("vllm", "broken", "crashed", "uv sync --extra vllm", core=False)], 0),
        (
            [Check("torch", "missing", "not installed", "uv sync --inexact"), Check("gpu", "ok", "[H200]", core=False)],
            1,
        ),
        ([Check("torch", "broken", "[bold]odd[/] text", "uv sync --inexact")], 1),
    ],
)
def test_exit_code_and_remedies(found, code, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "iter_checks", lambda: iter(found))
    assert run_doctor() == code
    printed = capsys.readouterr().out
    for check in found:
        assert check.name in printed and check.detail.split()[0] in printed
        assert (f"{check.name}: {check.fix}\n" in printed) == (check.status != "ok")
    assert ("The core works." in printed) == (code == 0)


# --- single checks ---


def test_missing_module_and_version_without_import():
    assert run_probe(Probe("x", partial(probes.imported_version, "no_such_module_here"))).status == "missing"
    sys.modules.pop("deepspeed", None)
    assert probes.installed_version("deepspeed").count(".") >= 1
    assert "deepspeed" not in sys.modules


def test_wrong_python_is_broken(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 4, "final", 0))
    check = run_probe(Probe("python", doctor.python_version))
    assert check.status == "broken" and "this is 3.10.4" in check.detail


def test_full_text_search_works():
    assert "full-text search works" in doctor.full_text_search()


def test_full_text_search_that_finds_the_wrong_row_is_broken(monkeypatch):
    import lancedb.table

    monkeypatch.setattr(lancedb.table.LanceTable, "search", lambda self, *_, **__: _Nothing())
    assert run_probe(Probe("lancedb", doctor.full_text_search)).status == "broken"


class _Nothing:
    def limit(self, _: int) -> _Nothing:
        return self

    def to_list(self) -> list:
        return []


def test_shipped_model(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "REPOSITORY", tmp_path)
    probe = Probe("tiny", partial(doctor.shipped_model, "household", "tiny"), "git checkout -- zoo/household/tiny")
    assert run_probe(probe) == Check("tiny", "missing", "no weights in zoo/household/tiny", probe.fix)
    folder = tmp_path / "zoo" / "household" / "tiny"
    folder.mkdir(parents=True)
    weights = folder / "model.safetensors"
    weights.write_bytes(b"weights")
    assert run_probe(probe).status == "ok"
    digests = {"model.safetensors": hashlib.sha256(b"weights").hexdigest()}
    (folder / "RECORD.json").write_text(json.dumps({"sha256": digests}))
    assert run_probe(probe) == Check("tiny", "ok", "1 files verified")
    weights.write_bytes(b"version https://git-lfs")
    assert "differs from the digest in RECORD.json" in run_probe(probe).detail
    (folder / "RECORD.json").write_text(json.dumps({"sha256": {**digests, "tokenizer.json": "0"}}))
    weights.write_bytes(b"weights")
    assert run_probe(probe).detail == "zoo/household/tiny/tokenizer.json is missing"


def test_alfworld_games(monkeypatch, tmp_path):
    probe = Probe("ALFWorld games", find_games)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    assert run_probe(probe).detail == "ALFWORLD_DATA is not set"
    assert "--extra alfworld && .venv/bin/alfworld-download" in fetch_games()
    game = tmp_path / "home" / ".cache" / "alfworld" / "json_2.1.1" / "train" / "task" / "trial" / "game.tw-pddl"
    game.parent.mkdir(parents=True)
    game.touch()
    assert run_probe(probe).detail == "ALFWORLD_DATA is not set (games are in the default folder)"
    assert fetch_games() == 'export ALFWORLD_DATA="$HOME/.cache/alfworld"'
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "nowhere"))
    assert "does not exist" in run_probe(probe).detail
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    assert run_probe(probe).status == "missing" and "no game.tw-pddl" in run_probe(probe).detail
    monkeypatch.setenv("ALFWORLD_DATA", str(game.parents[3]))
    assert run_probe(probe).status == "missing"
    monkeypatch.setenv("ALFWORLD_DATA", str(game.parents[4]))
    assert run_probe(probe) == Check("ALFWorld games", "ok", "splits: train")


def test_alfworld_games_in_the_home_folder(monkeypatch, tmp_path):
    (tmp_path / "x y" / "json_2.1.1" / "train" / "task" / "trial").mkdir(parents=True)
    (tmp_path / "x y" / "json_2.1.1" / "train" / "task" / "trial" / "game.tw-pddl").touch()
    probe = Probe("ALFWorld games", find_games)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ALFWORLD_DATA", "~/x y")
    assert run_probe(probe) == Check("ALFWorld games", "ok", "splits: train")
    assert f"'{tmp_path}/x y'" in fetch_games()  # quoted, where a shell would not expand it
    monkeypatch.setenv("ALFWORLD_DATA", "~no-such-user/x")
    assert run_probe(probe).status == "broken" and "no user 'no-such-user'" in run_probe(probe).detail
    assert all_probes()


def test_probes_are_listed_for_a_user_without_a_home(monkeypatch, tmp_path):
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name in ("HOME", "ALFWORLD_DATA"):
        monkeypatch.delenv(name, raising=False)
    assert run_probe(Probe("ALFWorld games", find_games)).detail == "ALFWORLD_DATA is not set"
    assert all_probes()


def test_science_world_without_java_is_missing(monkeypatch):
    def no_java() -> str:
        raise ModuleNotFoundError("ScienceWorld needs Java")

    monkeypatch.setattr("envs.scienceworld.environment.imported_version", lambda module: "1.2.3")
    monkeypatch.setattr("envs.scienceworld.environment.java_path", no_java)
    assert run_probe(Probe("scienceworld", start_java)).status == "missing"
    monkeypatch.setattr("envs.scienceworld.environment.java_path", lambda: sys.executable)  # takes no "-version"
    assert run_probe(Probe("scienceworld", start_java)).status == "broken"


@pytest.fixture
def standin(monkeypatch, tmp_path) -> Path:
    """A checkout of EmbodiedBench as this machine's own Python would import it."""
    for module in ("embodiedbench", "ai2thor", "ai2thor/controller", "ai2thor/platform", "gym", "PIL", "PIL/Image"):
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").write_text("print('a greeting')\n")
    monkeypatch.setenv("EMBODIEDBENCH_PYTHON", sys.executable)
    monkeypatch.setenv("EMBODIEDBENCH_NAV_PYTHON", sys.executable)
    monkeypatch.setenv("EMBODIEDBENCH_HOME", str(tmp_path))
    return tmp_path


def test_embodied_bench_is_looked_for_in_its_own_python(standin, monkeypatch):
    probe = Probe("eb_alfred", partial(import_all, "eb_alfred"), "export ...", core=False)
    version = ".".join(map(str, sys.version_info[:3]))
    assert run_probe(probe).detail == "embodiedbench/envs/eb_alfred/data/json_2.1.0 is not in the checkout"
    (standin / "embodiedbench/envs/eb_alfred/data/json_2.1.0").mkdir(parents=True)
    assert run_probe(probe) == Check("eb_alfred", "ok", f"Python {version} imports ai2thor; not started", core=False)
    navigation = Probe("eb_navigation", partial(import_all, "eb_navigation"), core=False)
    assert run_probe(navigation).status == "ok"  # git brings its data
    (standin / "ai2thor" / "controller" / "__init__.py").write_text("import no_such_library\n")
    check = run_probe(probe)
    assert check.status == "broken" and "No module named 'no_such_library'" in check.detail
    monkeypatch.setenv("EMBODIEDBENCH_PYTHON", "no-such-python")
    assert run_probe(probe).status == "broken" and "is not executable" in run_probe(probe).detail
    monkeypatch.delenv("EMBODIEDBENCH_PYTHON")
    assert run_probe(probe) == Check("eb_alfred", "missing", "EMBODIEDBENCH_PYTHON is not set", "export ...", False)


@pytest.mark.seconds
def test_an_embodied_bench_that_hangs_is_given_up(standin):
    (standin / "gym" / "__init__.py").write_text("import time\ntime.sleep(600)\n")
    probe = Probe("eb_navigation", partial(import_all, "eb_navigation", seconds=2.0), core=False)
    check = run_probe(probe)
    assert check.status == "broken" and "did not import in 2 s" in check.detail


def test_every_environment_has_a_check_and_none_of_the_foreign_ones_is_core():
    names = {probe.name: probe for probe in all_probes()}
    foreign = {"ALFWorld games", "alfworld", "scienceworld", *INSTALLATIONS, "gymnasium", "openenv", "mem0", "langmem"}
    assert foreign <= set(names) and not any(names[name].core for name in foreign)
    assert set(INSTALLATIONS) < set(registry.names())
    assert names["built-in engine"].core


def test_without_a_gpu(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert run_probe(Probe("gpu", doctor.gpus)).status == "missing"


def test_a_gpu_that_torch_cannot_use_is_broken(monkeypatch):
    import torch

    listed = subprocess.CompletedProcess([], 0, stdout="GPU 0: NVIDIA H200\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: listed)
    assert "torch cannot use" in run_probe(Probe("gpu", doctor.gpus)).detail


def test_remedies_use_the_private_uv_where_there_is_no_other(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert {probe.fix.split()[0] for probe in all_probes() if "sync --inexact" in probe.fix} == {".uv/bin/uv"}
    assert all(probe.fix for probe in all_probes() if probe.name not in ("gpu", "capability"))


def test_shipped_models_are_restored_from_git_where_they_are_committed(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "REPOSITORY", tmp_path)
    assert doctor._restore("household", "compiler") == ".venv/bin/memcompiler zoo compiler --world household"
    record = tmp_path / "zoo" / "household" / "compiler" / "RECORD.json"
    record.parent.mkdir(parents=True)
    record.touch()
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    assert doctor._restore("household", "compiler") == "git checkout -- zoo/household/compiler"


# --- this machine ---


@pytest.mark.slow
def test_the_core_works_here():
    done = memcompiler("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The core works." in done.stdout
