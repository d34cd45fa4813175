"""Replays of a report: selection of the episodes, and what the templates show of each."""

from __future__ import annotations

import difflib
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from PIL import Image

from agent.records import Episode, png_base64
from eval.metrics import EMISSION_KINDS, is_control, ordered, succeeded
from eval.runs import EpisodeSource
from runtime.errors import is_failure

MAX_BYTES = 15_000_000  # of a page, so that phones open it; the page states how many tasks are left out
PICTURE_PIXELS = 256  # maximum side of a picture


@dataclass(frozen=True, slots=True)
class Replays:
    """Bounds of a page: number of replayed tasks and bytes. `only`: ids of the tasks to replay instead."""

    tasks: int = 12
    only: tuple[str, ...] = ()
    max_bytes: int = MAX_BYTES


REPLAYS = Replays()


def utf8(text: str) -> bytes:
    """Encode text; lone surrogates of model output become escapes."""
    return text.encode("utf-8", errors="backslashreplace")


# selection ------------------------------------------------------------------------------------------------------------


def select(heads: Iterable[Episode], tasks: int, columns: Sequence[str], pair: tuple[str, str]) -> list[list[Episode]]:
    """Select tasks to replay by a fixed rule; return each with one episode per delivery.

    Tasks are grouped by family and by the outcomes of the two deliveries of `pair`. Groups take turns: wins, losses,
    both failed, both succeeded. Within a group, tasks played under more deliveries come first, then the order of a hash
    of the task id.

    Args:
        heads: episodes; steps are not needed.
        columns: deliveries in the order of the page.
        pair: the two deliveries that are compared.
    """
    of_task: dict[str, dict[str, Episode]] = defaultdict(dict)
    for head in sorted(heads, key=lambda head: (head.task_id, head.delivery, head.seed)):
        of_task[head.task_id].setdefault(head.delivery, head)
    groups: dict[tuple[int, str], list[str]] = defaultdict(list)
    for task, played in of_task.items():
        won, baseline_won = (delivery in played and succeeded(played[delivery]) for delivery in pair)
        turn = {(True, False): 0, (False, True): 1, (False, False): 2, (True, True): 3}[won, baseline_won]
        groups[turn, next(iter(played.values())).family].append(task)
    queues = [
        sorted(groups[key], key=lambda task: (-len(of_task[task]), hashlib.sha256(utf8(task)).digest()))
        for key in sorted(groups)
    ]
    rounds = max(map(len, queues), default=0)
    turns = [queue[i] for i in range(rounds) for queue in queues if i < len(queue)]
    return [[of_task[task][name] for name in columns if name in of_task[task]] for task in turns[:tasks]]


def compared(deliveries: Sequence[str]) -> tuple[str, str]:
    """Return the two deliveries whose outcomes sort the replays: `compiled` and `none`, else the last and the first."""
    main = [delivery for delivery in ordered(deliveries) if not is_control(delivery)] or ordered(deliveries)
    return "compiled" if "compiled" in main else main[-1], "none" if "none" in main else main[0]


def named(heads: Sequence[Episode], only: Sequence[str]) -> list[Episode]:
    """Return the episodes of the tasks in `only`; all episodes if it is empty.

    Raises:
        ValueError: a task was not played; the message names similar ids.
    """
    ids = {head.task_id for head in heads}
    for task in only:
        if task not in ids:
            like = difflib.get_close_matches(task, ids, n=3, cutoff=0) or ["none"]
            raise ValueError(f"there is no replay of task {task!r}; ids like it: {', '.join(like)}")
    return [head for head in heads if not only or head.task_id in only]


def load_chosen(source: EpisodeSource, chosen: Sequence[Sequence[Episode]]) -> list[list[Episode]]:
    """Read the selected episodes with steps and pictures, in order, in one pass over the source."""
    wanted = {_key(head) for task in chosen for head in task}
    found: dict[tuple[str, str, int], Episode] = {}
    for episode in source(True):
        if _key(episode) in wanted:
            found.setdefault(_key(episode), episode)
    return [[found[_key(head)] for head in task] for task in chosen]


def _key(episode: Episode) -> tuple[str, str, int]:
    return episode.delivery, episode.task_id, episode.seed


# what templates show of an episode ------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """Part of a Brief State line; `change` is "same", "added" or "removed"."""

    change: str
    text: str


class StateLine(NamedTuple):
    """Line of the Brief State, e.g. label `note` with its beliefs as pieces."""

    label: str
    pieces: tuple[Piece, ...]


def episode_view(episode: Episode) -> dict[str, Any]:
    return {
        "episode": episode,
        "outcome": outcome(episode),
        "steps": list(_step_views(episode)),
        "kinds": [kind for kind in EMISSION_KINDS if any(step.emission_kind == kind for step in episode.steps)],
        "parse_errors": sum(step.parse_error is not None for step in episode.steps),
    }


def outcome(episode: Episode) -> str:
    """Return "broken" (a technical failure), "success" or "failure"."""
    if is_failure(episode.stop_reason):
        return "broken"
    return "success" if episode.success else "failure"


def _step_views(episode: Episode) -> Iterator[dict[str, Any]]:
    steps, known = episode.steps, set(episode.memory_ids)
    answer, compiles = None, any(step.emission_kind for step in steps)
    for step in steps:
        ids = episode.memory_ids if step.memory_ids is None else step.memory_ids
        fresh, known = [id for id in ids if id not in known], set(ids)
        # the step of a technical failure has no state after it
        state = diff_state(step.brief_before, step.brief_after or step.brief_before)
        yield {
            "step": step,
            "picture": _picture(step.image),
            "state": state if compiles else [],  # without a compiler it is only the goal
            "changed": any(piece.change != "same" for line in state for piece in line.pieces),
            # newly recalled entries, with the text of generated ones, which no bank holds
            "recalled": [(id, episode.made[id].text if id in episode.made else "") for id in fresh],
            "seen_before": step.observation == answer,  # equal to the last feedback
        }
        answer = step.feedback


def diff_state(before: str, after: str) -> list[StateLine]:
    """Compare two Brief States: match lines by label, then compare their items."""
    old, new = ([_split_line(line) for line in text.splitlines()] for text in (before, after))
    matcher = difflib.SequenceMatcher(a=[label for label, _ in old], b=[label for label, _ in new], autojunk=False)
    lines: list[StateLine] = []
    for tag, i, j, k, m in matcher.get_opcodes():
        if tag == "equal":
            pairs = zip(old[i:j], new[k:m], strict=True)
            lines += [StateLine(label, _diff_items(was, now)) for (label, was), (_, now) in pairs]
            continue
        lines += [StateLine(label, _diff_items(was, [])) for label, was in old[i:j]]
        lines += [StateLine(label, _diff_items([], now)) for label, now in new[k:m]]
    return lines


def _split_line(line: str) -> tuple[str, list[str]]:
    """`note: a = 1 ; b = 2` -> ("note", ["a = 1", "b = 2"])"""
    label, mark, body = line.partition(": ")
    return (label, body.split(" ; ")) if mark else ("", [line])


def _diff_items(was: Sequence[str], now: Sequence[str]) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    for tag, i, j, k, m in difflib.SequenceMatcher(a=was, b=now, autojunk=False).get_opcodes():
        parts = [("same", was[i:j])] if tag == "equal" else [("removed", was[i:j]), ("added", now[k:m])]
        pieces += [Piece(change, " ; ".join(items)) for change, items in parts if items]
    return tuple(pieces)


def _picture(image: Image.Image | None) -> dict[str, Any] | None:
    if image is None:
        return None
    if max(image.size) > PICTURE_PIXELS or image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA"):
        image = image.convert("RGB")
        image.thumbnail((PICTURE_PIXELS, PICTURE_PIXELS))
    return {"data": png_base64(image), "width": image.width, "height": image.height}
