"""What a visitor does is played by the agent loop, recorded as teacher data, and reachable from this machine only."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_gen.leakage import check_rows
from data_gen.rows import load_rows
from play.library import Library
from play.record import open_record
from play.stage import Stage
from runtime.store import JsonLines
from tests.eval.pages import Page

pytest.importorskip("fastapi", reason="the page needs the extra serve")

from fastapi.testclient import TestClient

from play.server import MAX_BODY, MAX_GAMES, play_app

Ask = Callable[..., Any]


@pytest.fixture
def ask(stage: Stage, tmp_path: Path) -> Iterator[Ask]:
    assert stage.envs is not None
    with open_record(tmp_path / "out", stage.envs, {}) as record:
        client = TestClient(play_app(stage, record), base_url="http://127.0.0.1")

        def asked(path: str, body: Any = None, status: int = 200) -> Any:
            answer = client.get(path) if body is None else client.post(path, json=body)
            assert answer.status_code == status, answer.text
            return answer.json()

        asked.client, asked.record = client, record  # type: ignore[attr-defined]
        yield asked


def opened(ask: Ask, delivery: str = "compiled") -> tuple[str, dict[str, Any]]:
    task = ask("/api/state")["tasks"][0]["task"]["id"]
    game = ask("/api/games", {"task": task, "delivery": delivery})
    return f"/api/games/{game['game']}", game


def commands(answer: dict[str, Any]) -> list[str]:
    return [step["action"] for step in answer["view"]["steps"]]


def test_a_visitor_steps_writes_guidance_chooses_and_goes_back(ask: Ask) -> None:
    game, first = opened(ask)
    assert commands(first) == ["inventory"] and first["view"]["steps"][0]["guidance"] == "inventory"
    assert commands(ask(f"{game}/step", {"line": 0, "t": 0})) == ["inventory", "inventory"]
    written = ask(
        f"{game}/decide", {"line": 0, "t": 1, "emission": {"guidance": "help", "operations": "+ mug: in fridge | 1"}}
    )
    assert commands(written) == ["inventory", "help"] and written["view"]["steps"][1]["by"] == ["compiler"]
    assert ["note", [["added", "mug = in fridge | 1"]]] in written["view"]["steps"][1]["state"]
    ask(f"{game}/step", {"line": 0, "t": 1})
    branch = ask(f"{game}/step", {"line": 0, "t": 0, "command": "look"})
    assert branch["line"] == 1 and commands(branch) == ["look", "inventory"]
    assert branch["lines"][1] == {"id": 1, "parent": 0, "fork": 0}
    back = ask(f"{game}?line=0")
    assert commands(back)[:2] == ["inventory", "help"]  # as it was left
    on = ask(f"{game}/step", {"line": 0, "t": 2})  # the environment is brought back to that line
    over = ask(f"{game}/step", {"line": 0, "t": 3})
    assert not on["over"] and over["over"] and over["view"]["stop_reason"] == "step_limit"


def test_what_the_visitor_decided_becomes_rows(ask: Ask, stage: Stage, tmp_path: Path) -> None:
    game, _ = opened(ask)
    assert ask(f"{game}/step", {"line": 0, "t": 0})["rows"] == 0  # the models' own steps teach nothing
    ask(f"{game}/decide", {"line": 0, "t": 1, "emission": {"guidance": "look", "reason": "a | b"}})
    assert ask(f"{game}/step", {"line": 0, "t": 1})["rows"] == 1
    assert ask(f"{game}/step", {"line": 0, "t": 2, "command": "help"})["rows"] == 2
    assert ask(f"{game}/step", {"line": 0, "t": 1, "command": "inventory"})["rows"] == 3  # on another line
    kept = list(JsonLines(tmp_path / "out" / "steps.jsonl"))
    assert [(row["at"], len(row["episode"]["steps"])) for row in kept] == [(0, 2), (2, 1), (0, 2)]  # a step each
    shutil.copytree(tmp_path / "out", tmp_path / "killed")
    ask(f"{game}/step", {"line": 0, "t": 3})  # the line's last step
    rows = load_rows(tmp_path / "out" / "rows")
    assert [(row.t, row.emission, row.action) for row in rows] == [
        (1, "> a \\| b | look", "look"),
        (2, "> memory says so | inventory", "help"),
        (1, "> a \\| b | look", "inventory"),
    ]
    assert rows[0].history == ("inventory",) and rows[0].memory_texts and rows[0].environment == "household"
    assert check_rows(tmp_path / "out" / "rows", {row.task_id for row in rows}, allow=False) == []
    assert stage.envs is not None
    left = (tmp_path / "killed" / "steps.jsonl").read_bytes()
    for _ in range(2):  # killed before the record was published, then before steps.jsonl was removed
        (tmp_path / "killed" / "steps.jsonl").write_bytes(left)
        with open_record(tmp_path / "killed", stage.envs, {}) as again:
            assert [replace(row, steps=4) for row in again.rows()[:2]] == rows[:2] and again.rows()[2] == rows[2]
            assert again.number_of_rows == 3 and load_rows(tmp_path / "killed" / "rows") == again.rows()


def test_an_edited_memory_is_what_the_compiler_reads_from_then_on(ask: Ask, reader: Any) -> None:
    game, first = opened(ask)
    id, *others = first["view"]["steps"][0]["recalled"]
    edited = ask(f"{game}/decide", {"line": 0, "t": 0, "memory": {id: "the mug is here", **dict.fromkeys(others)}})
    assert [entry.text for entry in reader.seen[-1].memory] == ["the mug is here"]
    [shown] = edited["view"]["steps"][0]["recalled"]
    assert edited["view"]["memory"][shown] == "the mug is here" and shown == f"{id} (edited at step 0)"
    assert ask(f"{game}/step", {"line": 0, "t": 0})["rows"] == 1
    assert [entry.text for entry in reader.seen[-1].memory] == ["the mug is here"]
    left = ask(f"{game}/decide", {"line": 0, "t": 1, "memory": {shown: None}})
    assert left["view"]["steps"][1]["recalled"] == [] and commands(left) == ["inventory", "help"]
    static, _ = opened(ask, "static")
    ask(f"{static}/step", {"line": 0, "t": 0})
    assert "edit it there" in ask(f"{static}/decide", {"line": 0, "t": 1, "memory": {id: "x"}}, 422)["error"]


def test_a_recorded_episode_is_watched_and_played_on(ask: Ask, stage: Stage, tmp_path: Path) -> None:
    game, _ = opened(ask)
    for t, command in enumerate(("look", "help", "look")):
        ask(f"{game}/step", {"line": 0, "t": t, "command": command})
    ask.record.publish()  # type: ignore[attr-defined]
    stage.library = Library([tmp_path / "out" / "episodes.jsonl"])
    [_], number = stage.library.episodes, 0
    watched = ask(f"/api/episodes/{number}")
    assert [step["action"] for step in watched["steps"]] == ["look", "help", "look"]
    asked = {"task": "", "delivery": "none", "episode": number, "t": 2}
    folder = TestClient(play_app(Stage(None, tmp_path, stage.library)), base_url="http://127.0.0.1")
    listed = folder.get("/api/state").json()
    assert not listed["deliveries"] and not listed["tasks"][0]["playable"] and len(listed["tasks"][0]["recorded"]) == 1
    assert "watched only" in folder.post("/api/games", json=asked).json()["error"]  # it names no models
    on = ask("/api/games", asked)
    assert commands(on) == ["look", "help", "look"] and on["view"]["delivery"] == "none"
    stage.library.open = lambda n: _elsewhere(Library(stage.library.files).open(n))  # type: ignore[method-assign]
    assert "something else at step 0" in ask("/api/games", asked, 422)["error"]


def _elsewhere(episode: Any) -> Any:
    episode.steps[0].observation = "another home"
    return episode


def test_impossible_requests_get_one_line(ask: Ask) -> None:
    game, _ = opened(ask, "none")
    for path, body, status, why in (
        ("/decide", {"line": 0, "t": 0, "emission": {"guidance": "look"}}, 422, "has no compiler"),
        ("/decide", {"line": 0, "t": 0, "memory": {"x": "y"}}, 422, "reads no memory"),
        ("/step", {"line": 3, "t": 0}, 422, "there is no line 3"),
        ("/step", {"line": 0, "t": 7}, 422, "has no step 7"),
        ("/step", {"line": 0, "t": 0, "command": "x" * 2_001}, 422, "command"),
        ("/step", {"line": 0, "t": 0, "other": 1}, 422, "other"),
    ):
        error = ask(game + path, body, status)["error"]
        assert why in error and "\n" not in error
    compiled, _ = opened(ask)
    bad = {"line": 0, "t": 0, "emission": {"operations": "a mug"}}
    assert "cannot be read" in ask(f"{compiled}/decide", bad, 422)["error"]
    for _ in range(MAX_GAMES):
        opened(ask, "none")
    assert "was closed" in ask(game, status=404)["error"]


def test_other_sites_cannot_ask(ask: Ask) -> None:
    client, body = ask.client, json.dumps({"line": 0, "t": 0})  # type: ignore[attr-defined]
    sent = {"content-type": "application/json"}
    for headers, status in (
        ({**sent, "host": "evil.example"}, 403),
        ({**sent, "origin": "https://evil.example"}, 403),
        ({"content-type": "text/plain"}, 403),
        ({**sent, "content-length": str(MAX_BODY + 1)}, 413),
        ({**sent, "content-length": "9" * 5000}, 413),
        ({**sent, "transfer-encoding": "chunked"}, 411),
        (sent, 404),
    ):
        assert client.post("/api/games/x/step", content=body, headers=headers).status_code == status
    page = client.get("/")
    assert page.headers["content-security-policy"] == "frame-ancestors 'none'"
    policy = next(attrs["content"] for tag, attrs in Page(page.text).tags if attrs.get("http-equiv"))
    assert "default-src 'none'" in str(policy) and "connect-src 'self'" in str(policy) and "unsafe" not in str(policy)


def test_an_exported_game_is_one_file_with_its_data(ask: Ask) -> None:
    game, _ = opened(ask)
    ask(f"{game}/step", {"line": 0, "t": 0, "command": "look"})
    lanes = {"lanes": [{"game": game.split("/")[-1], "line": 0}]}
    answer = ask.client.post("/api/export", json=lanes)  # type: ignore[attr-defined]
    page = Page(answer.text)
    [view] = page.episodes
    assert view["outcome"] == "open" and view["steps"][0]["action"] == "look" and view["steps"][0]["by"] == ["executor"]
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv"))
    assert "connect-src 'none'" in str(policy) and "fetch(" not in page.inside["script"][-1]
