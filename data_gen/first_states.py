"""Rows that ask a memory for the first states of other tasks.

An episode has one first state, in which M's entries say where to begin, and reading M is most of a row's cost. Here
each M answers several: SFT with `share_prefix` reads it once for all of them.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from agent.command_teacher import CommandTeacher
from agent.leads import of_scene
from agent.recipe_guidance import words_of
from agent.records import EpisodeContext, compile_request
from compiler.records import Compilation
from data_gen.rows import SftRow
from memory.entry import MemoryEntry
from memory.protocol import EntryStore

RELATED = 0.75  # share of the tasks that are drawn from those whose goals are most like M's
POOL = 4  # how many times as many related tasks there are to draw from


def first_state_rows(
    rows: Sequence[SftRow], entries: EntryStore, teacher: CommandTeacher, count: int, seed: int
) -> list[SftRow]:
    """Return, for each task that recalled something, rows of its M with the first states of `count` other tasks.

    No M holds an entry of a task that it is asked for. The emission is the teacher's; the action is its command, or
    without one the expert's in that task.

    Args:
        rows: of episodes.
        entries: the bank's entries by id.
    """
    firsts = [row for row in rows if row.t == 0]
    requests = [compile_request(row.step_input()) for row in firsts]
    words = [words_of(row.goal) for row in firsts]
    of_goals = Counter(word for some in words for word in some)
    rarity = {word: math.log(len(firsts) / n) for word, n in of_goals.items()}
    asked = list[SftRow]()
    for row in firsts:
        if not (memory := tuple(entries[id] for id in row.memory_ids)):
            continue
        own = {row.task_id, *(entry.provenance.task_id for entry in memory)}
        of_memory = set[str]().union(*(words_of(f"{e.provenance.scene} {e.provenance.goal}") for e in memory))
        likeness = {
            i: sum(rarity[word] for word in of_memory & words[i])
            for i, other in enumerate(firsts)
            if other.task_id not in own
        }
        drawn = _draw(likeness, count, random.Random(f"{seed} {row.task_id} first states"))
        contexts = [EpisodeContext(None, firsts[i].task_id) for i in drawn]
        said = teacher.compile([replace(requests[i], memory=memory) for i in drawn], contexts)
        asked += [_row(firsts[i], row, memory, one, teacher.level) for i, one in zip(drawn, said, strict=True)]
    return asked


def _draw(likeness: dict[int, float], count: int, rng: random.Random) -> list[int]:
    """Draw indices: a share `RELATED` of them from those with the highest likeness, the others from all."""
    pool = heapq.nlargest(POOL * count, likeness, key=lambda i: (likeness[i], -i))
    related = rng.sample(pool, min(round(RELATED * count), len(pool)))
    rest = sorted(likeness.keys() - set(related))
    return related + rng.sample(rest, min(count - len(related), len(rest)))


def _row(first: SftRow, of: SftRow, memory: Sequence[MemoryEntry], said: Compilation, level: str) -> SftRow:
    """Return a first state with the memory of another row, and what the teacher said."""
    commanded = said.emission.guidance if level == "command" else ""
    return replace(
        first,
        memory_ids=of.memory_ids,
        memory_texts=of.memory_texts,
        memory_images=of.memory_images,
        emission=said.text,
        action=commanded or first.action,
        own_scene=any(bool(e.provenance.scene) and of_scene(first.goal, e) for e in memory),
        memory_of=of.task_id,
    )
