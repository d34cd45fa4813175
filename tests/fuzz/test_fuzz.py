"""The fuzzer: a short sample finds nothing, a planted fault is found, replayed and shortened."""

from __future__ import annotations

import json
import time

import pytest

from tests.fuzz import __main__ as run
from tests.fuzz.inputs import text
from tests.fuzz.target import Target, expect


@pytest.mark.slow
def test_a_sample_of_all_targets_shows_no_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.run_fuzz(seed=45, inputs=1500) == 0, capsys.readouterr().out
    assert capsys.readouterr().out.splitlines()[-1].startswith("faults: 0 in ")


def raises(given: str) -> None:
    if ";" in given:
        raise KeyError(given)


def changes(given: str) -> None:
    expect(";" not in given, "a separator is not escaped")


def hangs(given: str) -> None:
    while ";" in given:
        time.sleep(0.01) if len(given) % 2 else None


@pytest.mark.parametrize(
    ("check", "named"),
    [(raises, "KeyError"), (changes, "a separator is not escaped"), (hangs, "Hang: more than 0.05 s")],
)
def test_a_fault_is_found_replayed_and_shortened(
    check: object, named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = Target("planted", text, check)  # type: ignore[arg-type]
    monkeypatch.setattr(run, "TARGETS", (target,))
    monkeypatch.setattr("tests.fuzz.target.LIMIT_S", 0.05)
    numbers = [n for n in range(60) if ";" in target.draw(7, n)]
    assert numbers and run.run_fuzz(seed=7, inputs=60) == len(numbers)
    first = numbers[0]
    out = capsys.readouterr().out
    assert named in out and f"--seed 7 --only planted:{first} " in out
    assert f"faults: {len(numbers)} in 60 inputs" in out
    assert run.run_fuzz(seed=7, only=f"planted:{first}") == 1
    if check is not hangs:
        assert "input: ';'" in out


def test_inputs_follow_from_seed_target_and_number() -> None:
    for target in run.TARGETS:
        assert repr(target.draw(1, 5)) == repr(target.draw(1, 5)), target.name
    answers = run.TARGETS[0]
    assert len({repr(answers.draw(seed, number)) for seed in (1, 2) for number in range(20)}) > 20


def test_a_documented_error_is_no_fault_and_an_unknown_target_is_named() -> None:
    assert Target("json", text, json.loads, (ValueError,)).fault("{") is None
    with pytest.raises(ValueError, match=r"no target nowhere; there are endpoint\.answer"):
        run.run_fuzz(only="nowhere:1")
