"""What a question is answered from, within a budget of tokens: any memory system of the protocol, and baselines that
rank the records themselves."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from configs.collect import MemoryConfig, MemoryModels
from data_gen.cases import Case, Question
from data_gen.memories import embedder, make_memory, open_memory
from memory.bm25 import BM25, Scores
from memory.protocol import ESTIMATED, Costs, MemorySystem, Query, Trace
from memory.registry import RESPONSES, names
from memory.retrieval import Embed
from memory.s3mem.lexical import dense, embedded, ranks, windows
from memory.s3mem.pool import RRF
from memory.s3mem.text import stems
from memory.s3mem.units import Unit
from memory.s3mem.writing import record_ids, written
from memory.words import words

EMBED = "embed"  # the baseline that ranks by vectors of a model that settings name
MOST = 256  # entries of a memory system that knows no budget


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a reader is shown: texts in reading order, ids of the records behind them, their tokens with those of
    pictures; for each text, its pictures (PNG), where the reader sees any."""

    texts: tuple[str, ...]
    pointers: frozenset[str]
    tokens: float
    pictures: tuple[tuple[bytes, ...], ...] = ()

    @classmethod
    def of(
        cls, texts: Sequence[str], pointers: Iterable[str], costs: Costs, pictures: Sequence[tuple[bytes, ...]] = ()
    ) -> Evidence:
        """Count the tokens."""
        tokens = sum(map(costs.text, texts)) + costs.picture * sum(map(len, pictures))
        return cls(tuple(texts), frozenset(pointers), tokens, tuple(pictures) if any(pictures) else ())

    def recall(self, wanted: Sequence[str]) -> float:
        """Return the share of the wanted records that it holds."""
        return sum(id in self.pointers for id in wanted) / len(wanted)


Asking = Callable[[Question, int], Evidence]
Ranking = Callable[[Question], Scores]


def asking(
    name: str,
    case: Case,
    settings: Mapping[str, Any],
    folder: Path,
    facts: bool = False,
    models: MemoryModels | None = None,
    costs: Costs = ESTIMATED,
) -> Asking:
    """Open what is asked about a case: a baseline or a memory system by name; a system's memory lies in `folder`.
    `facts`: what was noted of the records is read in their place; `models`: those that a system, or the baseline
    `embed`, may use; `costs`: by which budgets are counted. Raises: ValueError for an unknown name."""
    histories, models = case.facts if facts else case.histories, models or MemoryModels()
    if name == EMBED:
        return _ranked(_embedded(embedder(models, folder / RESPONSES)), histories, costs)
    if name in BASELINES:
        return _ranked(BASELINES[name], histories, costs)
    if name not in names():
        baselines = ", ".join([*BASELINES, EMBED])
        raise ValueError(f"no memory {name!r}: baselines are {baselines}; systems are {', '.join(names())}")
    return _remembered(MemoryConfig(system=name, settings=dict(settings), **dict(models)), histories, folder, costs)


# memory systems ------------------------------------------------------------------------------------------------------


def _remembered(config: MemoryConfig, histories: Sequence[Trace], folder: Path, costs: Costs) -> Asking:
    """Commit whole histories to a system that points to records; to any other one, each record as a history of its own,
    whose task's id is the pointer."""
    memory = _filled(config, histories, folder / "whole")
    if not any(memory.recall([Query.question(_any_text(histories), MOST)])[0].pointers):
        memory = _filled(config, [part for trace in histories for part in _apart(trace)], folder / "records")
        return lambda question, tokens: _fitting(memory, question, tokens, costs)

    def ask(question: Question, tokens: int) -> Evidence:
        [recalled] = memory.recall([Query.question(question.text, tokens, question.id, costs=costs)])
        texts, shown = [e.text for e in recalled.entries], [e.images if costs.picture else () for e in recalled.entries]
        return Evidence.of(texts, (p for ids in recalled.pointers for id in ids for p in id.split()), costs, shown)

    return ask


def _filled(config: MemoryConfig, histories: Sequence[Trace], folder: Path) -> MemorySystem:
    memory = open_memory(config, folder)
    make_memory(memory)
    memory.commit([[trace] for trace in histories])
    return memory


def _any_text(histories: Sequence[Trace]) -> str:
    return next((record.action for trace in histories for record in trace.records), "")


def _apart(trace: Trace) -> list[Trace]:
    """Make a history of each record: what it says is its goal, its id the task's."""
    units = written(trace)
    return [
        Trace(replace(trace.task, id=id, goal=unit.rendered("chunk")), (record,), True)
        for id, record, unit in zip(record_ids(trace), trace.records, units, strict=True)
    ]


def _fitting(memory: MemorySystem, question: Question, tokens: int, costs: Costs) -> Evidence:
    """Take as many entries as fit, asked for fewer or more of them."""
    low, high, best = 0, MOST, Evidence((), frozenset(), 0.0)
    while low < high:
        k = (low + high + 1) // 2
        [recalled] = memory.recall([Query.question(question.text, tokens, question.id, k=k)])
        entries = recalled.entries
        texts, ids = [e.provenance.goal or e.text for e in entries], [e.provenance.task_id for e in entries]
        found = Evidence.of(texts, ids, costs)
        if found.tokens <= tokens:
            best, low = found, k
        else:
            high = k - 1
    return best


# baselines -----------------------------------------------------------------------------------------------------------


def _ranked(make: Callable[[Sequence[Unit]], Ranking], histories: Sequence[Trace], costs: Costs) -> Asking:
    """Take records in the order of their rank until the first that does not fit."""
    units = [unit for trace in histories for unit in written(trace)]
    spent = [unit.cost("chunk", costs) for unit in units]
    score = make(units)

    def ask(question: Question, tokens: int) -> Evidence:
        chosen, left = list[int](), float(tokens)
        for i in np.argsort(-score(question), kind="stable"):
            if spent[i] > left:
                break
            left -= spent[i]
            chosen.append(int(i))
        ids = (id for i in chosen for pointer in units[i].pointers for id in pointer.split())
        entries = [units[i].entry("chunk", costs.picture > 0) for i in sorted(chosen)]
        return Evidence.of([entry.text for entry in entries], ids, costs, [entry.images for entry in entries])

    return ask


def _bm25(read: Callable[[str], list[str]], near: bool = False) -> Callable[[Sequence[Unit]], Ranking]:
    def make(units: Sequence[Unit]) -> Ranking:
        documents = [read(unit.searched("chunk")) for unit in units]
        groups = [unit.origin.history for unit in units]
        index = BM25(windows(documents, groups) if near else documents)
        return lambda question: index(read(question.text))

    return make


def _dense(units: Sequence[Unit]) -> Ranking:
    score = dense("lsa", [stems(unit.searched("chunk")) for unit in units])
    return lambda question: score(stems(question.text))


def _characters(units: Sequence[Unit]) -> Ranking:
    score = dense("hash", [words(unit.searched("chunk")) for unit in units])
    return lambda question: score(words(question.text))


def _embedded(embed: Embed | None) -> Callable[[Sequence[Unit]], Ranking]:
    def make(units: Sequence[Unit]) -> Ranking:
        score = embedded(embed, [unit.searched("chunk") for unit in units])
        return lambda question: score(question.text)

    return make


def _hybrid(units: Sequence[Unit]) -> Ranking:
    both = [_bm25(stems)(units), _dense(units)]
    return lambda question: sum((1 / (RRF + 1 + ranks(score(question))) for score in both), np.zeros(len(units)))


def _random(units: Sequence[Unit]) -> Ranking:
    def score(question: Question) -> Scores:
        draw = random.Random(question.id)
        return np.array([draw.random() for _ in units])

    return score


def _oracle(units: Sequence[Unit]) -> Ranking:
    """Rank the evidence first: what no memory can exceed."""
    of = lambda unit, question: any(id in question.evidence for pointer in unit.pointers for id in pointer.split())
    return lambda question: np.array([of(unit, question) for unit in units], dtype=float)


BASELINES: Mapping[str, Callable[[Sequence[Unit]], Ranking]] = {
    "bm25": _bm25(words),
    "bm25-stems": _bm25(stems),
    "windows": _bm25(stems, near=True),
    "dense": _dense,
    "characters": _characters,
    "hybrid": _hybrid,
    "random": _random,
    "oracle": _oracle,
}
