"""Replays of a report: selection of the episodes that its player shows."""

from __future__ import annotations

import difflib
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agent.records import Episode
from eval.metrics import is_control, ordered, succeeded
from eval.runs import EpisodeSource

MAX_BYTES = 15_000_000  # of a page, so that phones open it; the page states how many tasks are left out


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
