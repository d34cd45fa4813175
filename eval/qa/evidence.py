"""What a question is answered from, within a budget of tokens: any memory system of the protocol, and baselines that
rank the records themselves."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from configs.collect import MemoryConfig
from data_gen.cases import Case, Question
from data_gen.memories import make_memory, open_memory
from memory.bm25 import BM25, Scores
from memory.protocol import MemorySystem, Query, Trace
from memory.registry import names
from memory.s3mem.lexical import dense, ranks, windows
from memory.s3mem.pool import RRF
from memory.s3mem.text import stems, words
from memory.s3mem.units import Unit, word_tokens
from memory.s3mem.writing import record_ids, written

MOST = 256  # entries of a memory system that knows no budget


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a reader is shown: texts in reading order, ids of the records behind them, their tokens (words x 1.3)."""

    texts: tuple[str, ...]
    pointers: frozenset[str]
    tokens: float

    @classmethod
    def of(cls, texts: Sequence[str], pointers: Iterable[str]) -> Evidence:
        return cls(tuple(texts), frozenset(pointers), sum(map(word_tokens, texts)))

    def recall(self, wanted: Sequence[str]) -> float:
        """Return the share of the wanted records that it holds."""
        return sum(id in self.pointers for id in wanted) / len(wanted)


Asking = Callable[[Question, int], Evidence]
Ranking = Callable[[Question], Scores]


def asking(name: str, case: Case, settings: Mapping[str, Any], folder: Path, facts: bool = False) -> Asking:
    """Open what is asked about a case: a baseline or a memory system by name; a system's memory lies in `folder`.
    `facts`: what was noted of the records is read in their place. Raises: ValueError for an unknown name."""
    histories = case.facts if facts else case.histories
    if name in BASELINES:
        return _ranked(BASELINES[name], histories)
    if name not in names():
        raise ValueError(f"no memory {name!r}: baselines are {', '.join(BASELINES)}; systems are {', '.join(names())}")
    return _remembered(name, histories, settings, folder)


# memory systems ------------------------------------------------------------------------------------------------------


def _remembered(name: str, histories: Sequence[Trace], settings: Mapping[str, Any], folder: Path) -> Asking:
    """Commit whole histories to a system that points to records; to any other one, each record as a history of its own,
    whose task's id is the pointer."""
    memory = _filled(name, histories, settings, folder / "whole")
    if not any(memory.recall([Query.question(_any_text(histories), MOST)])[0].pointers):
        memory = _filled(name, [part for trace in histories for part in _apart(trace)], settings, folder / "records")
        return lambda question, tokens: _fitting(memory, question, tokens)

    def ask(question: Question, tokens: int) -> Evidence:
        [recalled] = memory.recall([Query.question(question.text, tokens, question.id)])
        texts = [entry.text for entry in recalled.entries]
        return Evidence.of(texts, (p for ids in recalled.pointers for id in ids for p in id.split()))

    return ask


def _filled(name: str, histories: Sequence[Trace], settings: Mapping[str, Any], folder: Path) -> MemorySystem:
    memory = open_memory(MemoryConfig(system=name, settings=dict(settings)), folder)
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


def _fitting(memory: MemorySystem, question: Question, tokens: int) -> Evidence:
    """Take as many entries as fit, asked for fewer or more of them."""
    low, high, best = 0, MOST, Evidence((), frozenset(), 0.0)
    while low < high:
        k = (low + high + 1) // 2
        [recalled] = memory.recall([Query.question(question.text, tokens, question.id, k=k)])
        entries = recalled.entries
        found = Evidence.of([e.provenance.goal or e.text for e in entries], (e.provenance.task_id for e in entries))
        if found.tokens <= tokens:
            best, low = found, k
        else:
            high = k - 1
    return best


# baselines -----------------------------------------------------------------------------------------------------------


def _ranked(make: Callable[[Sequence[Unit]], Ranking], histories: Sequence[Trace]) -> Asking:
    """Take records in the order of their rank until the first that does not fit."""
    units = [unit for trace in histories for unit in written(trace)]
    texts = [unit.rendered("chunk") for unit in units]
    score = make(units)

    def ask(question: Question, tokens: int) -> Evidence:
        chosen, left = list[int](), float(tokens)
        for i in np.argsort(-score(question), kind="stable"):
            if (cost := word_tokens(texts[i])) > left:
                break
            left -= cost
            chosen.append(int(i))
        ids = (id for i in chosen for pointer in units[i].pointers for id in pointer.split())
        return Evidence.of([texts[i] for i in sorted(chosen)], ids)

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
    "bm25": _bm25(words), "bm25-stems": _bm25(stems), "windows": _bm25(stems, near=True), "dense": _dense,
    "characters": _characters, "hybrid": _hybrid, "random": _random, "oracle": _oracle,
}  # fmt: skip
