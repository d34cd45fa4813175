"""One way down: a folder imports only folders below it, and no files import each other in a circle.

docs/design/architecture.md has the order of the layers. Late imports and imports for type checkers count too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

FENCE = "```layers"


def floors(architecture: str) -> list[str]:
    """Folders from the lowest to the highest."""
    block = architecture.split(FENCE, 1)[1].split("```", 1)[0]
    return [line.split()[0] for line in block.strip().splitlines()]


def modules(folder: Path) -> dict[str, Path]:
    """Importable names of all Python files below a top-level folder."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, known: set[str]) -> Iterator[str]:
    """Modules of ours that a file names, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            names = []
        for name in names:
            if (known_name := name if name in known else name.rpartition(".")[0]) in known:
                yield known_name


@pytest.fixture(scope="module")
def order(repository: Path) -> list[str]:
    return floors((repository / "docs" / "design" / "architecture.md").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def graph(repository: Path, order: list[str]) -> dict[str, set[str]]:
    """What each module imports of ours."""
    files = {name: path for folder in order for name, path in modules(repository / folder).items()}
    return {name: set(imported(path, set(files))) - {name} for name, path in files.items()}


def test_a_folder_imports_only_folders_below_it(graph: dict[str, set[str]], order: list[str]) -> None:
    floor = {folder: i for i, folder in enumerate(order)}
    up = [
        f"{name} imports {other}"
        for name, others in graph.items()
        for other in sorted(others)
        if floor[other.split(".")[0]] > floor[name.split(".")[0]]
    ]
    assert not up


def test_nothing_that_ships_imports_the_tests(repository: Path, order: list[str]) -> None:
    tests = set(modules(repository / "tests"))
    files = [path for folder in order for path in modules(repository / folder).values()]
    assert not [str(path) for path in files if set(imported(path, tests))]


def test_no_files_import_each_other_in_a_circle(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


def test_every_package_has_its_floor(repository: Path, order: list[str]) -> None:
    packages = {path.parent.name for path in repository.glob("*/__init__.py")} - {"tests"}
    assert packages == set(order)


def test_the_test_sees_late_and_type_checkers_imports(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from low.b import X\n\n\n"
        "def f():\n    import low.c\n    from low import d\n    from low.e import name\n"
    )
    known = {"low", "low.b", "low.c", "low.d", "low.e"}
    assert set(imported(file, known)) == {"low.b", "low.c", "low.d", "low.e"}
