"""Replays: which episodes a page shows side by side, and what its templates see of each."""

from __future__ import annotations

import difflib
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from agent.records import Episode, StepRecord, png_base64
from eval.metrics import EMISSION_KINDS, is_control, ordered, succeeded
from eval.runs import EpisodeSource
from runtime.errors import is_failure

MAX_BYTES = 15_000_000  # a phone opens this; more tasks are left out, and the page says so
TASKS = 12  # replayed tasks, each under every delivery
PICTURE_PIXELS = 256  # longer sides are reduced: rendered benchmarks would fill the page with a few episodes


@dataclass(frozen=True, slots=True)
class Replays:
    """How many tasks a page replays, and how large it may be. `only`: these task ids and no others, in any number."""

    tasks: int = TASKS
    only: tuple[str, ...] = ()
    max_bytes: int = MAX_BYTES


REPLAYS = Replays()


@dataclass(frozen=True, slots=True)
class Head:
    """What the choice of replays looks at. `seed` tells several episodes of one task apart."""

    delivery: str
    task_id: str
    seed: int
    family: str
    success: bool


def utf8(text: str) -> bytes:
    """Model output may hold lone surrogates, which UTF-8 cannot; they are shown as their escapes."""
    return text.encode("utf-8", errors="backslashreplace")


# which episodes are replayed ------------------------------------------------------------------------------------------


def select(
    heads: Iterable[Head],
    tasks: int = TASKS,
    columns: Sequence[str] | None = None,
    pair: tuple[str, str] | None = None,
) -> list[list[Head]]:
    """Tasks to replay, each with one episode per delivery: by rule, so that nobody can pick the pretty ones.

    Tasks are sorted into heaps by family and by how the two deliveries of the pair ended. Heaps give one task in turn:
    wins, losses, both failed, both succeeded. Within a heap, tasks that more deliveries played come first, then the
    order of a hash of the task id.

    Args:
        columns: deliveries in the order in which they are shown (default: that of every table).
        pair: whose outcomes sort the tasks (default: see `compared`).
    """
    of_task: dict[str, dict[str, Head]] = defaultdict(dict)
    for head in sorted(heads, key=lambda head: (head.task_id, head.delivery, head.seed)):
        of_task[head.task_id].setdefault(head.delivery, head)
    columns = columns or ordered({delivery for played in of_task.values() for delivery in played})
    pair = pair or (compared(columns) if columns else None)
    heaps: dict[tuple[int, str], list[str]] = defaultdict(list)
    for task, played in of_task.items():
        won, baseline_won = (delivery in played and played[delivery].success for delivery in pair or ())
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
    """The two deliveries whose outcomes sort the replays: `compiled` against `none`, or the last against the first."""
    main = [delivery for delivery in ordered(deliveries) if not is_control(delivery)] or ordered(deliveries)
    return "compiled" if "compiled" in main else main[-1], "none" if "none" in main else main[0]


def head_of(episode: Episode) -> Head:
    return Head(episode.delivery, episode.task_id, episode.seed, episode.family, succeeded(episode))


def named(heads: Sequence[Head], only: Sequence[str]) -> list[Head]:
    """The heads of the tasks that `only` names; all where it names none.

    Raises:
        ValueError: naming the first task that was not played, and ids like it.
    """
    ids = {head.task_id for head in heads}
    for task in only:
        if task not in ids:
            like = difflib.get_close_matches(task, ids, n=3, cutoff=0) or ["none"]
            raise ValueError(f"there is no replay of task {task!r}; ids like it: {', '.join(like)}")
    return [head for head in heads if not only or head.task_id in only]


def load_chosen(source: EpisodeSource, chosen: Sequence[Sequence[Head]]) -> list[list[Episode]]:
    """The chosen episodes, in the chosen order, in one pass over the source."""
    wanted = {(head.delivery, head.task_id, head.seed): None for task in chosen for head in task}
    found: dict[tuple[str, str, int], Episode] = {}
    for episode in source(True):
        key = (episode.delivery, episode.task_id, episode.seed)
        if key in wanted:
            found.setdefault(key, episode)
    return [[found[head.delivery, head.task_id, head.seed] for head in task] for task in chosen]


# what the templates see of an episode ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a Brief State line: `change` is "same", "added" or "removed"."""

    change: str
    text: str


@dataclass(frozen=True, slots=True)
class StateLine:
    """One line of the Brief State, e.g. label `know` with its beliefs as pieces. `change` as in Piece."""

    change: str
    label: str
    pieces: tuple[Piece, ...]


def episode_view(episode: Episode) -> dict[str, Any]:
    return {
        "episode": episode,
        "outcome": outcome(episode),
        "steps": list(_step_views(episode.steps)),
        "kinds": [kind for kind in EMISSION_KINDS if any(step.emission_kind == kind for step in episode.steps)],
        "parse_errors": sum(step.parse_error is not None for step in episode.steps),
    }


def outcome(episode: Episode) -> str:
    """ "broken" (a failure of our own machinery), "success" or "failure"."""
    if is_failure(episode.stop_reason):
        return "broken"
    return "success" if succeeded(episode) else "failure"


def _step_views(steps: Sequence[StepRecord]) -> Iterator[dict[str, Any]]:
    answer, compiles = None, any(step.emission_kind for step in steps)
    for step in steps:
        # A step on which the episode broke has no state after it: that is not a state from which all was removed.
        state = diff_state(step.brief_before, step.brief_after or step.brief_before)
        yield {
            "step": step,
            "picture": _picture(step.image),
            "state": state if compiles else [],  # without a compiler it is the goal and nothing more, at every step
            "changed": any(piece.change != "same" for line in state for piece in line.pieces),
            "seen_before": step.observation == answer,  # the last feedback, word for word
        }
        answer = step.feedback


def diff_state(before: str, after: str) -> list[StateLine]:
    """What an emission changed in the Brief State. Lines are matched by their label, then compared item by item."""
    old, new = ([_split_line(line) for line in text.splitlines()] for text in (before, after))
    matcher = difflib.SequenceMatcher(a=[line[0] for line in old], b=[line[0] for line in new], autojunk=False)
    lines: list[StateLine] = []
    for tag, i, j, k, m in matcher.get_opcodes():
        if tag == "equal":
            pairs = zip(old[i:j], new[k:m], strict=True)
            lines += [StateLine("same", label, _diff_items(was, now)) for (label, was), (_, now) in pairs]
            continue
        lines += [StateLine("removed", label, (Piece("removed", " ; ".join(was)),)) for label, was in old[i:j]]
        lines += [StateLine("added", label, (Piece("added", " ; ".join(now)),)) for label, now in new[k:m]]
    return lines


def _split_line(line: str) -> tuple[str, list[str]]:
    """`know: a = 1 ; b = 2` -> ("know", ["a = 1", "b = 2"])"""
    label, mark, body = line.partition(": ")
    return (label, body.split(" ; ")) if mark else ("", [line])


def _diff_items(was: Sequence[str], now: Sequence[str]) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    for tag, i, j, k, m in difflib.SequenceMatcher(a=was, b=now, autojunk=False).get_opcodes():
        if tag == "equal":
            pieces.append(Piece("same", " ; ".join(was[i:j])))
            continue
        pieces += [Piece("removed", " ; ".join(was[i:j]))] if i < j else []
        pieces += [Piece("added", " ; ".join(now[k:m]))] if k < m else []
    return tuple(pieces)


def _picture(image: Image.Image | None) -> dict[str, Any] | None:
    if image is None:
        return None
    if max(image.size) > PICTURE_PIXELS or image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA"):
        image = image.convert("RGB")
        image.thumbnail((PICTURE_PIXELS, PICTURE_PIXELS))
    return {"data": png_base64(image), "width": image.width, "height": image.height}
