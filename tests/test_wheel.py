"""The wheel works in an empty folder: built, installed into an environment without the repository, and used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
NOT_SHIPPED = (".git", ".github", ".ci", "docs", "tests", "examples", "scripts", "experiments")


def tracked(repository: Path) -> list[str]:
    """Files of the repository that belong to packages."""
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=repository, text=True)
    return [name for name in listed.split("\0") if "/" in name and name.split("/")[0] not in NOT_SHIPPED]


@pytest.fixture(scope="module")
def wheel(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy, so that the checkout stays as it is."""
    if not (repository / ".git").exists():
        pytest.skip("needs a clone: git says which files belong to the repository")
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in [*tracked(repository), "pyproject.toml", "README.md", "LICENSE"]:
        if (repository / name).is_file():  # else deleted, and not committed yet
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(repository / name, source / name)
    done = subprocess.run([sys.executable, "-c", BUILD, str(dist)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    [built] = dist.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel and this one's dependencies. A path in a .pth file adds their
    folder without its own .pth files, so that an editable install of the repository stays out."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    with zipfile.ZipFile(wheel) as file:  # what an installer does with a wheel of pure Python
        file.extractall(packages)
    paths = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    (packages / "dependencies.pth").write_text("\n".join(paths))
    return folder / "bin" / "python"


def run(python: Path, folder: Path, *arguments: str) -> str:
    """Run Python in an empty folder, with nothing of the repository on its path; return what it printed."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    done = subprocess.run([python, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def test_it_holds_every_file_of_every_package(wheel: Path, repository: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        missing = set(tracked(repository)) - set(file.namelist())
    assert not {name for name in missing if (repository / name).is_file()}


def test_the_commands_and_the_api_work_from_it(python: Path, tmp_path: Path) -> None:
    where = run(python, tmp_path, "-c", "import memcompiler, configs; print(memcompiler.__file__, configs.__file__)")
    assert all(str(python.parents[1]) in file for file in where.split())
    assert "The core works." in run(python, tmp_path, "-m", "memcompiler", "doctor")
    small = ["collect.env.scenes={train: 2, test: 2}", "sft.max_steps=2", "sft.batch_size=2", "grpo=null"]
    few = ["eval.limit=2", "eval.max_steps=2", "eval.deliveries=[none, compiled]"]
    assert "report.html" in run(python, tmp_path, "-m", "memcompiler", "quickstart", *small, *few)
    assert (tmp_path / "out" / "quickstart" / "report.html").stat().st_size > 10_000
    shipped = ["-c", "eval/alfworld", "env=household", "split=test", "env.scenes={test: 2}", "limit=2", "max_steps=2"]
    played = run(python, tmp_path, "-m", "memcompiler", "eval", *shipped, "deliveries=[none, compiled_gated]")
    assert "compiled, gated" in played
    loads = "import memcompiler as mc; print(*(type(model).__name__ for model in mc.load('zoo/alfworld')))"
    assert run(python, tmp_path, "-c", loads).split() == ["MemoryCompiler", "FrozenExecutor"]
