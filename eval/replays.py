"""Replays: which episodes a page shows side by side, and what its templates see of each."""

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

MAX_BYTES = 15_000_000  # a phone opens this; more tasks are left out, and the page says so
PICTURE_PIXELS = 256  # longer sides are reduced: rendered benchmarks would fill the page with a few episodes


@dataclass(frozen=True, slots=True)
class Replays:
    """How many tasks a page replays, and how large it may be. `only`: these task ids and no others, in any number."""

    tasks: int = 12
    only: tuple[str, ...] = ()
    max_bytes: int = MAX_BYTES


REPLAYS = Replays()


def utf8(text: str) -> bytes:
    """Encode model output, whose lone surrogates, if any, are shown as their escapes."""
    return text.encode("utf-8", errors="backslashreplace")


# which episodes are replayed ------------------------------------------------------------------------------------------


def select(heads: Iterable[Episode], tasks: int, columns: Sequence[str], pair: tuple[str, str]) -> list[list[Episode]]:
    """Choose tasks to replay, each with one episode per delivery: by rule, so that nobody can pick the pretty ones.

    Tasks are sorted into heaps by family and by how the two deliveries of the pair ended. Heaps give one task in turn:
    wins, losses, both failed, both succeeded. Within a heap, tasks that more deliveries played come first, then the
    order of a hash of the task id.

    Args:
        heads: episodes; their steps are not looked at.
        columns: deliveries in the order in which they are shown.
        pair: whose outcomes sort the tasks.
    """
    of_task: dict[str, dict[str, Episode]] = defaultdict(dict)
    for head in sorted(heads, key=lambda head: (head.task_id, head.delivery, head.seed)):
        of_task[head.task_id].setdefault(head.delivery, head)
    heaps: dict[tuple[int, str], list[str]] = defaultdict(list)
    for task, played in of_task.items():
        won, baseline_won = (delivery in played and succeeded(played[delivery]) for delivery in pair)
        turn = {(True, False): 0, (False, True): 1, (False, False): 2, (True, True): 3}[won, baseline_won]
        heaps[turn, next(iter(played.values())).family].append(task)
    piles = [
        sorted(heaps[key], key=lambda task: (-len(of_task[task]), hashlib.sha256(utf8(task)).digest()))
        for key in sorted(heaps)
    ]
    rounds = max(map(len, piles), default=0)
    turns = [pile[i] for i in range(rounds) for pile in piles if i < len(pile)]
    return [[of_task[task][name] for name in columns if name in of_task[task]] for task in turns[:tasks]]


def compared(deliveries: Sequence[str]) -> tuple[str, str]:
    """Name the two deliveries whose outcomes sort the replays: `compiled` and `none`, or the last and the first."""
    main = [delivery for delivery in ordered(deliveries) if not is_control(delivery)] or ordered(deliveries)
    return "compiled" if "compiled" in main else main[-1], "none" if "none" in main else main[0]


def named(heads: Sequence[Episode], only: Sequence[str]) -> list[Episode]:
    """Keep the episodes of the tasks that `only` names; all where it names none.

    Raises:
        ValueError: naming the first task that was not played, and ids like it.
    """
    ids = {head.task_id for head in heads}
    for task in only:
        if task not in ids:
            like = difflib.get_close_matches(task, ids, n=3, cutoff=0) or ["none"]
            raise ValueError(f"there is no replay of task {task!r}; ids like it: {', '.join(like)}")
    return [head for head in heads if not only or head.task_id in only]


def load_chosen(source: EpisodeSource, chosen: Sequence[Sequence[Episode]]) -> list[list[Episode]]:
    """Read the chosen episodes with steps and pictures, in the chosen order, in one pass over the source."""
    wanted = {_key(head) for task in chosen for head in task}
    found: dict[tuple[str, str, int], Episode] = {}
    for episode in source(True):
        if _key(episode) in wanted:
            found.setdefault(_key(episode), episode)
    return [[found[_key(head)] for head in task] for task in chosen]


def _key(episode: Episode) -> tuple[str, str, int]:
    return episode.delivery, episode.task_id, episode.seed


# what the templates see of an episode ---------------------------------------------------------------------------------


class Piece(NamedTuple):
    """A stretch of a Brief State line: `change` is "same", "added" or "removed"."""

    change: str
    text: str


class StateLine(NamedTuple):
    """One line of the Brief State, e.g. label `know` with its beliefs as pieces."""

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
    """Tell "broken" (a failure of our own machinery), "success" or "failure"."""
    if is_failure(episode.stop_reason):
        return "broken"
    return "success" if episode.success else "failure"


def _step_views(episode: Episode) -> Iterator[dict[str, Any]]:
    steps, known = episode.steps, set(episode.memory_ids)
    answer, compiles = None, any(step.emission_kind for step in steps)
    for step in steps:
        ids = episode.memory_ids if step.memory_ids is None else step.memory_ids
        fresh, known = [id for id in ids if id not in known], set(ids)
        # A step on which the episode broke has no state after it: that is not a state from which all was removed.
        state = diff_state(step.brief_before, step.brief_after or step.brief_before)
        yield {
            "step": step,
            "picture": _picture(step.image),
            "state": state if compiles else [],  # without a compiler it is the goal and nothing more, at every step
            "changed": any(piece.change != "same" for line in state for piece in line.pieces),
            # what is recalled at this step that was not at the one before; the text of what no bank holds
            "recalled": [(id, episode.made[id].text if id in episode.made else "") for id in fresh],
            "seen_before": step.observation == answer,  # the last feedback, word for word
        }
        answer = step.feedback


def diff_state(before: str, after: str) -> list[StateLine]:
    """Compare two Brief States: lines are matched by their label, then compared item by item."""
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
