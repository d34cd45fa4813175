"""README and the docs site: sizes, links, and the commands of README run as they are written."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.http import free_port, responds
from runtime.processes import ChildProcess
from tests.commands.running import memcompiler

PAGE_BYTES = 12_000
# Settings that make a command of README small; the command itself is README's.
SMALL = {
    "collect": ["env.scenes={train: 4, test: 3}"],
    "train sft": ["max_steps=4", "batch_size=4"],
    "train grpo": ["env.scenes={train: 4, test: 3}", "updates=1", "tasks=2", "group_size=2", "max_steps=3"],
    "eval": ["env.scenes={train: 4, test: 3}", "limit=4", "max_steps=4"],
}


def code_blocks(page: str, language: str = "") -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    return [text for name, text in blocks if name == language]


@pytest.fixture(scope="module")
def readme(repository: Path) -> str:
    return (repository / "README.md").read_text(encoding="utf-8")


def test_readme_is_short_and_shows_a_diagram_and_a_report(readme: str, repository: Path) -> None:
    assert len(readme.split()) <= 750
    pictures = re.findall(r"!\[.+?\]\((.+?)\)", readme)
    shown = ("overview.svg", "report.png", "memory_size.png", "attention.png")
    assert pictures == [f"docs/images/{name}" for name in shown]
    links = [link for link in re.findall(r"\]\(([^)]+)\)", readme) if not link.startswith("http")]
    assert not [link for link in links if not (repository / link.split("#")[0]).exists()]


def test_pages_are_short_and_in_the_navigation(repository: Path) -> None:
    pages = {path.relative_to(repository / "docs").as_posix(): path for path in (repository / "docs").rglob("*.md")}
    assert not {name: path.stat().st_size for name, path in pages.items() if path.stat().st_size > PAGE_BYTES}
    navigation = (repository / "mkdocs.yml").read_text(encoding="utf-8").split("nav:", 1)[1]
    assert pages.keys() <= set(re.findall(r"[\w/-]+\.md", navigation))


@pytest.mark.slow
def test_the_site_builds_strictly(repository: Path, tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(repository)}
    done = subprocess.run(command, cwd=repository, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    reference = (tmp_path / "reference" / "settings" / "index.html").read_text(encoding="utf-8")
    assert "episode_attempts" in reference


@pytest.mark.slow
def test_the_commands_of_readme_run_as_they_are_written(readme: str, repository: Path, tmp_path: Path) -> None:
    block = next(block for block in code_blocks(readme) if "memcompiler collect" in block)
    env = {**os.environ, "PYTHONPATH": str(repository)}
    for line in block.strip().splitlines():
        program, *arguments = shlex.split(line, comments=True)
        assert program == ".venv/bin/memcompiler"
        if arguments[0] == "serve":
            port = free_port()
            command = [sys.executable, "-m", "memcompiler", *arguments, "--port", str(port)]
            with ChildProcess(command, cwd=tmp_path, env=env, output=tmp_path / "log") as server:
                server.wait_until_ready(lambda: responds(f"http://127.0.0.1:{port}/health"), 120)  # noqa: B023
            continue
        small = SMALL[" ".join(arguments[: 2 if arguments[0] == "train" else 1])]
        done = memcompiler(*arguments, *small, cwd=tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    assert (tmp_path / "out" / "eval" / "results.json").exists()


@pytest.mark.slow
def test_the_example_of_readme_runs(readme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import memcompiler as mc
    from envs.base import Task
    from tests.fakes import CountingEnv

    [example] = code_blocks(readme, "python")
    monkeypatch.chdir(tmp_path)
    env = CountingEnv()

    class Env:
        def step(self, action: str) -> tuple[str, bool]:
            transition = env.step(action)
            return transition.observation.text, transition.done

    observed = env.reset(Task("2", "put a hot mug in cabinet", "FloorPlan19", "test", ""))
    given = {"env": Env(), "done": False, "observation": observed.text, "admissible": observed.admissible}
    exec(compile(example, "README.md", "exec"), given)
    assert given["done"] and len(mc.open_memory("runs/collect/bank")) == 1
