"""The page in a real browser: a visitor opens, steps, edits, branches and compares; hostile text stays text."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from eval.metrics import results
from eval.player import episode_view, player_page
from eval.report import write_report
from play.stage import Stage
from runtime.http import LOOPBACK, bound_socket
from tests.eval.pages import HOSTILE, episode, hostile_episode
from tests.play.browser import CHROMIUM, Browser
from tests.waiting import until

pytest.importorskip("fastapi", reason="the page needs the extra serve")
uvicorn = pytest.importorskip("uvicorn", reason="the page needs the extra serve")

from play.server import play_app  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)"),
]
IDLE = "document.body.getAttribute('aria-busy') === 'false'"


@pytest.fixture
def address(stage: Stage) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(play_app(stage), log_level="warning"))
    bound = bound_socket(LOOPBACK, 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    until(lambda: server.started)
    yield f"http://{LOOPBACK}:{bound.getsockname()[1]}/"
    server.should_exit = True
    thread.join(20)


def at_step(number: int) -> str:
    return f"document.querySelector('#where').textContent.startsWith('step {number} ') && {IDLE}"


def test_a_visitor_opens_steps_edits_branches_and_compares(address: str, tmp_path: Path) -> None:
    with Browser(tmp_path / "profile") as page:
        page.open(address)
        page.wait(f"document.querySelectorAll('.step').length === 2 && {IDLE}")  # none beside compiled
        page.press("ArrowRight")
        page.wait(at_step(1))
        page.press("e")
        page.run("document.querySelector('.edit textarea').value = 'help'")
        page.run("document.querySelector('.edit textarea').dispatchEvent(new Event('input'))")
        page.run("[...document.querySelectorAll('.edit button')].find((b) => b.textContent === 'deliver').click()")
        said = "document.querySelector('.lane.active .emission')?.textContent"
        page.wait(f"{said} === '> memory says so | help' && {IDLE}")
        assert page.run("document.querySelector('.lane.active .action b').textContent") == "help"
        page.press("Home")
        page.press("2")  # another command at step 0: a branch
        page.wait(f"document.querySelector('.line-select')?.value === '1' && {IDLE}")
        assert page.run("[...document.querySelectorAll('.lane .stepdot')].length") == 4  # two steps in each column
        page.resize(390, 844)
        assert page.run("document.documentElement.scrollWidth") == 390
        assert page.problems == []


def test_hostile_text_is_shown_and_never_run(tmp_path: Path) -> None:
    alone, report = tmp_path / "episode.html", tmp_path / "report.html"
    shown = [hostile_episode("none", False), hostile_episode("compiled", True)]
    alone.write_bytes(player_page([episode_view(one) for one in shown]).encode(errors="backslashreplace"))
    per_delivery = {name: [episode("t0", name, name == "compiled")] for name in ("none", "compiled")}
    write_report(results(per_delivery, {"environment": "x", "split": "y", "seed": 0}), shown, report)
    with Browser(tmp_path / "profile") as page:
        for file in (alone, report):
            page.open(file.as_uri())
            page.wait("document.querySelectorAll('.lane .step').length === 2")
            assert HOSTILE.split(" ")[0] in page.run("document.querySelector('.lane .observation').textContent")
            assert page.run("document.querySelectorAll('#player script, #player img[src=x]').length") == 0
        rate = "getComputedStyle(document.querySelector('#results svg.bar'))"
        assert page.run(f"[{rate}.paddingLeft, {rate}.height]") == ["0px", "10px"]  # no rule of the player's reaches it
        assert page.problems == []
