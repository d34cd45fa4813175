"""Retrievers: pack evidence for a question within a token budget, by any memory system or by a baseline that ranks
records."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from configs.collect import MemoryConfig, MemoryModels
from data_gen.memory_factory import embedder, initialise_memory, open_memory
from data_gen.questions.records import Question, QuestionSet
from memory.bm25 import BM25, Scores
from memory.protocol import ESTIMATED, MemorySystem, Query, TokenCosts, Trace
from memory.registry import RESPONSES, names
from memory.retrieval import Embed
from memory.s3mem.index import RRF
from memory.s3mem.rule_writer import record_ids, write_units
from memory.s3mem.text import stems
from memory.s3mem.text_scores import Dense, embed_texts, fit_vectors, join_neighbours, ranks
from memory.s3mem.units import EventUnit
from memory.words import words

EMBED = "embed"  # baseline: rank by the vectors of the embedding model that the settings name
MAX_ENTRIES = 256  # recalled from a memory system that has no token budget


@dataclass(frozen=True, slots=True)
class Evidence:
    """Packed evidence: texts in reading order, and the records that they come from."""

    texts: tuple[str, ...]
    pointers: frozenset[str]  # ids of the records
    tokens: float  # of texts and pictures
    pictures: tuple[tuple[bytes, ...], ...] = ()  # PNG, by text; () for a reader that sees none

    @classmethod
    def of(
        cls,
        texts: Sequence[str],
        pointers: Iterable[str],
        costs: TokenCosts,
        pictures: Sequence[tuple[bytes, ...]] = (),
    ) -> Evidence:
        """Create evidence with its token count."""
        tokens = sum(map(costs.text, texts)) + costs.picture * sum(map(len, pictures))
        return cls(tuple(texts), frozenset(pointers), tokens, tuple(pictures) if any(pictures) else ())

    def recall(self, wanted: Sequence[str]) -> float:
        """Return the share of the wanted records that the evidence contains."""
        return sum(id in self.pointers for id in wanted) / len(wanted)


Retriever = Callable[[Question, int], Evidence]  # from a question and a token budget
Scorer = Callable[[Question], Scores]  # a score per unit


def open_retriever(
    name: str,
    questions: QuestionSet,
    settings: Mapping[str, Any],
    folder: Path,
    *,
    facts: bool = False,
    models: MemoryModels | None = None,
    costs: TokenCosts = ESTIMATED,
) -> Retriever:
    """Open a retriever over the histories of a question set.

    Args:
        name: a baseline or a memory system.
        settings: the memory system's own.
        folder: for the memory system's files.
        facts: index the set's notes instead of its records.
        models: of a memory system, or of the baseline `embed`.
        costs: token counts of texts and pictures.

    Raises:
        ValueError: the name is unknown.
    """
    histories, models = questions.facts if facts else questions.histories, models or MemoryModels()
    if name == EMBED:
        return _baseline_retriever(_embedding_scorer(embedder(models, folder / RESPONSES)), histories, costs)
    if name in BASELINES:
        return _baseline_retriever(BASELINES[name], histories, costs)
    if name not in names():
        baselines = ", ".join([*BASELINES, EMBED])
        raise ValueError(f"no memory {name!r}: baselines are {baselines}; systems are {', '.join(names())}")
    return _memory_retriever(
        MemoryConfig(system=name, settings=dict(settings), **dict(models)), histories, folder, costs
    )


# memory systems -------------------------------------------------------------------------------------------------------


def _memory_retriever(config: MemoryConfig, histories: Sequence[Trace], folder: Path, costs: TokenCosts) -> Retriever:
    """Commit whole histories to a system that returns pointers; to any other system, each record as its own history,
    with the record's id as task id."""
    memory = _filled_memory(config, histories, folder / "whole")
    first = next((record.action for trace in histories for record in trace.records), "")
    if not any(memory.recall([Query.question(first, MAX_ENTRIES)])[0].record_ids):
        records = [part for trace in histories for part in _split_records(trace)]
        memory = _filled_memory(config, records, folder / "records")
        return lambda question, tokens: _recall_within(memory, question, tokens, costs)

    def retrieve(question: Question, tokens: int) -> Evidence:
        [recalled] = memory.recall([Query.question(question.text, tokens, question.id, costs=costs)])
        texts, shown = [e.text for e in recalled.entries], [e.images if costs.picture else () for e in recalled.entries]
        return Evidence.of(texts, (p for ids in recalled.record_ids for id in ids for p in id.split()), costs, shown)

    return retrieve


WORDS = "household"  # the environment whose words histories of homes are in; in dialogues its reader finds nothing


def _filled_memory(config: MemoryConfig, histories: Sequence[Trace], folder: Path) -> MemorySystem:
    memory = open_memory(config, folder, WORDS)
    initialise_memory(memory, WORDS)
    memory.commit([[trace] for trace in histories])
    return memory


def _split_records(trace: Trace) -> list[Trace]:
    """Turn each record into a separate history, with its text as goal and its id as task id."""
    units = write_units(trace)
    return [
        Trace(replace(trace.task, id=id, goal=unit.rendered("chunk")), (record,), True)
        for id, record, unit in zip(record_ids(trace), trace.records, units, strict=True)
    ]


def _recall_within(memory: MemorySystem, question: Question, tokens: int, costs: TokenCosts) -> Evidence:
    """Recall as many entries as fit the budget, by bisection over their number."""
    low, high, best = 0, MAX_ENTRIES, Evidence((), frozenset(), 0.0)
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


# baselines ------------------------------------------------------------------------------------------------------------


def _baseline_retriever(
    make_scorer: Callable[[Sequence[EventUnit]], Scorer], histories: Sequence[Trace], costs: TokenCosts
) -> Retriever:
    """Return records by rank, up to the first that does not fit the budget."""
    units = [unit for trace in histories for unit in write_units(trace)]
    tokens_of = [unit.cost("chunk", costs) for unit in units]
    score = make_scorer(units)

    def retrieve(question: Question, tokens: int) -> Evidence:
        chosen, left = list[int](), float(tokens)
        for i in np.argsort(-score(question), kind="stable"):
            if tokens_of[i] > left:
                break
            left -= tokens_of[i]
            chosen.append(int(i))
        ids = (id for i in chosen for pointer in units[i].pointers for id in pointer.split())
        entries = [units[i].entry("chunk", costs.picture > 0) for i in sorted(chosen)]
        return Evidence.of([entry.text for entry in entries], ids, costs, [entry.images for entry in entries])

    return retrieve


def _bm25(tokenise: Callable[[str], list[str]], near: bool = False) -> Callable[[Sequence[EventUnit]], Scorer]:
    def make(units: Sequence[EventUnit]) -> Scorer:
        documents = [tokenise(unit.searched("chunk")) for unit in units]
        groups = [unit.origin.history for unit in units]
        index = BM25(join_neighbours(documents, groups) if near else documents)
        return lambda question: index(tokenise(question.text))

    return make


def _vectors(how: Dense, tokenise: Callable[[str], list[str]]) -> Callable[[Sequence[EventUnit]], Scorer]:
    def make(units: Sequence[EventUnit]) -> Scorer:
        score = fit_vectors(how, [tokenise(unit.searched("chunk")) for unit in units])
        return lambda question: score(tokenise(question.text))

    return make


def _embedding_scorer(embed: Embed | None) -> Callable[[Sequence[EventUnit]], Scorer]:
    def make(units: Sequence[EventUnit]) -> Scorer:
        score = embed_texts(embed, [unit.searched("chunk") for unit in units])
        return lambda question: score(question.text)

    return make


def _hybrid(units: Sequence[EventUnit]) -> Scorer:
    both = [_bm25(stems)(units), _vectors("lsa", stems)(units)]
    return lambda question: sum((1 / (RRF + 1 + ranks(score(question))) for score in both), np.zeros(len(units)))


def _random(units: Sequence[EventUnit]) -> Scorer:
    def score(question: Question) -> Scores:
        draw = random.Random(question.id)
        return np.array([draw.random() for _ in units])

    return score


def _oracle(units: Sequence[EventUnit]) -> Scorer:
    """Score the gold evidence 1 and other units 0: an upper bound for every memory."""
    of = lambda unit, question: any(id in question.evidence for pointer in unit.pointers for id in pointer.split())
    return lambda question: np.array([of(unit, question) for unit in units], dtype=float)


BASELINES: Mapping[str, Callable[[Sequence[EventUnit]], Scorer]] = {
    "bm25": _bm25(words),
    "bm25-stems": _bm25(stems),
    "windows": _bm25(stems, near=True),
    "dense": _vectors("lsa", stems),
    "characters": _vectors("hash", words),
    "hybrid": _hybrid,
    "random": _random,
    "oracle": _oracle,
}
