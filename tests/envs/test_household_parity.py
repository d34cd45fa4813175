"""TextWorld beside the native engine, on a sample of real games; the comparison itself is tested too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from envs.alfworld import parity
from envs.base import EnvironmentFailure
from memcompiler.cli import app

pytestmark = pytest.mark.alfworld


@pytest.fixture(scope="module")
def games(shared_data: Path) -> Path:
    pytest.importorskip("textworld")
    pytest.importorskip("alfworld")
    return shared_data / "alfworld" / "json_2.1.1"


@pytest.fixture(scope="module")
def smallest(games: Path) -> Path:
    """The real game that TextWorld plays fastest."""
    return min(parity.find_games(games), key=lambda path: path.stat().st_size)


def run(*arguments: str) -> tuple[int, list[str]]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output.strip().splitlines()


@pytest.mark.slow
def test_no_differences_over_a_sample_of_every_task_type(games: Path) -> None:
    code, lines = run("parity", "--games", str(games), "--steps", "900", "--per-game", "150", "--seed", "11")
    assert code == 0 and lines[-1] == "differences: 0 in 900 steps", lines[-10:]
    assert all(kind in lines[-3] for kind in ("look_at", "simple", "clean", "heat", "cool", "two")), lines[-3]
    assert "(refused)" in lines[-2]


def test_a_difference_is_found_printed_and_fails(games: Path, smallest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = parity.NativeGame.step

    def careless(self: parity.NativeGame, command: str) -> parity.EngineOutput:
        seen = honest(self, command)
        if not command.startswith("go to"):
            return seen
        return parity.EngineOutput(seen.text.lower(), seen.admissible[1:], seen.won, seen.facts | {("hot", "mug 9")})

    monkeypatch.setattr(parity.NativeGame, "step", careless)
    code, lines = run("parity", "--games", str(smallest.parent), "--steps", "40")
    walks = sum("'go to" in line and line.endswith(": text") for line in lines)
    assert code == 1 and walks and lines[-1] == f"differences: {walks} in 40 steps"
    shown = "\n".join(lines)
    assert ": admissible" in shown and ": facts" in shown and "textworld: []" in shown and "mug 9" in shown


def test_memoised_parsers_change_nothing(smallest: Path) -> None:
    """The quick reference is the plain one: `plain` compares the native engine with TextWorld untouched, and both
    comparisons of the same walk find nothing. Whatever memoising changed would be a difference in one of them."""
    quick, plain = (next(iter(parity.compare([smallest], 40, 3, per_game=40, plain=plain))) for plain in (False, True))
    assert quick.differences == plain.differences == [] and quick.verbs == plain.verbs


def test_the_reference_leaves_the_command_line_alone(smallest: Path) -> None:
    before = sys.argv[:]
    from envs.alfworld.environment import TextWorldGame

    TextWorldGame(smallest).reset()
    assert sys.argv == before


def test_bench_ends_with_its_ratio(smallest: Path) -> None:
    code, lines = run(*"bench environment engine --number 1 --steps 5 --games".split(), str(smallest.parent))
    assert code == 0 and lines[-1].startswith("ratio: ") and int(lines[-1].split()[1]) > 1


def test_games_are_chosen_evenly_and_reproducibly(games: Path) -> None:
    found = parity.find_games(games)
    chosen = parity.choose_games(found, 12, seed=0)
    assert chosen == parity.choose_games(found, 12, seed=0) != parity.choose_games(found, 12, seed=1)
    kinds = [parity.kind_of(path) for path in chosen]
    assert {kinds.count(kind) for kind in kinds} == {2} and len(set(kinds)) == 6
    assert len(set(parity.choose_games(found[:2], 5, 0))) == 2  # repeated when there are too few


def test_what_cannot_be_compared_is_explained(tmp_path: Path) -> None:
    code, lines = run("parity", "--games", str(tmp_path))
    assert code == 1 and "no game.tw-pddl below" in " ".join(lines)
    folder = tmp_path / "json_2.1.1" / "train" / "x" / "y"
    folder.mkdir(parents=True)
    (folder / "game.tw-pddl").write_text('{"pddl_problem": "", "grammar": "", "pddl_domain": ""}')
    pytest.importorskip("textworld")
    with pytest.raises((EnvironmentFailure, ValueError)):
        parity.compare_game(folder / "game.tw-pddl", 0, 1)
