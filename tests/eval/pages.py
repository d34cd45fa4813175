"""Episodes for reports, also hostile ones, and a parser of pages."""

from __future__ import annotations

import json
from dataclasses import fields
from html.parser import HTMLParser
from typing import Any

from PIL import Image

from agent.records import Episode, StepRecord
from runtime.errors import StopReason

HOSTILE = (
    """</pre></script><script>alert(1)</script><img src=x onerror="alert(2)">'"--> {{ 7 * 7 }} $x_1$ \x00 \ud800 &lt;"""
)


def step(t: int, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "observation": f"observation {t}",
        "image": Image.new("RGB", (8, 8), (t, 0, 0)),
        "admissible": ("look",),
        "brief_before": "goal: put mug",
        "brief_after": "goal: put mug\nnow: find mug",
        "emission_text": "+ plan: find mug",
        "emission_kind": "BRIEF",
        "executor_prompt": f"prompt {t}",
        "executor_text": "look",
        "action": "look",
        "grounding": "choice",
        "feedback": f"observation {t + 1}",
    }
    return StepRecord(t=t, **{**values, **changes})


def episode(task: str, delivery: str, success: bool, **changes: Any) -> Episode:
    values: dict[str, Any] = {"goal": f"goal of {task}", "scene": "home 1", "split": "test", "kind": "pick", "seed": 0}
    stop = StopReason.SUCCESS if success else StopReason.STEP_LIMIT
    ended = {"success": success, "progress": float(success), "stop_reason": stop}
    values |= {"family": "text", "memory_ids": ("m1",), "memory_text": "the mug was in cabinet 2"}
    return Episode(
        task_id=task, delivery=delivery, **{**values, **ended, "steps": [step(t) for t in range(2)], **changes}
    )


class Page(HTMLParser):
    """A page's tags with attributes, its text, and the contents of script and style."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.inside: dict[str, list[str]] = {"script": [], "style": []}
        self._raw = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in self.inside:
            self._raw = tag
            self.inside[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._raw:
            self._raw = ""

    def handle_data(self, data: str) -> None:
        if self._raw:
            self.inside[self._raw][-1] += data
        else:
            self.text += data

    @property
    def episodes(self) -> list[dict[str, Any]]:
        """The episodes that the page's player shows, task by task."""
        return [view for task in json.loads(self.inside["script"][-2])["tasks"] for view in task["episodes"]]

    def attributes(self, name: str) -> list[str]:
        return [value or "" for _, attrs in self.tags for key, value in attrs.items() if key == name]


def hostile_episode(delivery: str, success: bool) -> Episode:
    """Return an episode with hostile text in every text field."""
    texts = {field.name: HOSTILE for field in fields(StepRecord) if field.type == "str"}
    bad = step(0, **texts, parse_error=HOSTILE, op_errors=(HOSTILE,), soft={HOSTILE: 1.0}, admissible=(HOSTILE,))
    names = ("goal", "scene", "split", "kind", "family", "memory_text", "error")
    changes: dict[str, Any] = dict.fromkeys(names, HOSTILE) | {"memory_ids": (HOSTILE,), "steps": [bad, step(1)]}
    return episode(HOSTILE, delivery, success, **changes)
