"""Which part of S3Mem misses how much evidence: each part beside its oracle, on a file of questions with evidence.

    python -m benchmarks.evidence_parts --data FILE --out out/parts

The oracle scores what of the evidence is among the candidates 1 and all else 0, and packs as ever: what it lacks to 100
the pool misses or the packer skips; what S3Mem lacks to it, a better router could find. Beside it: the router without
edges and without anchors, the compact pack (which stops at the surest), and the order of retrieval in its place.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from data_gen.cases import Case, Question
from eval.intervals import bootstrap_mean
from eval.qa.files import read_cases
from eval.table import markdown_table
from memory.s3mem.anchors import Anchor
from memory.s3mem.packing import packed
from memory.s3mem.pool import Asked, Candidate, Index
from memory.s3mem.router import by_rank, candidates, load_router
from memory.s3mem.settings import S3MemSettings
from memory.s3mem.writing import written
from runtime.store import to_json, write_atomically

BUDGETS = (500, 1000, 2000)
ALL, ORACLE, RANKED = "all", "oracle in the pool", "retrieval rank"
SETTINGS = S3MemSettings(fill=True)


def variants(index: Index, question: Question) -> Iterator[tuple[str, Asked, Sequence[Candidate], S3MemSettings]]:
    """Yield each part's candidates with their scores, and the settings that they are packed by."""
    router, asked = load_router(), index.ask(question.text)
    rows, wanted = asked.candidates(), set(question.evidence)
    found = [float(bool(wanted.intersection(index.units[i].pointers))) for i in rows]
    yield ORACLE, asked, candidates(asked, rows, found, found), SETTINGS
    nodes = router.nodes(asked)
    yield "S3Mem", asked, nodes, SETTINGS
    yield "w/o edges", asked, nodes, SETTINGS.model_copy(update={"edges": False})
    yield "compact (no fill)", asked, nodes, SETTINGS.model_copy(update={"fill": False})
    yield RANKED, asked, by_rank(asked), SETTINGS
    plain = index.ask(question.text, Anchor(question.text))
    yield "w/o anchors", plain, router.nodes(plain), SETTINGS


def measured(cases: Sequence[Case]) -> dict[tuple[str, str, int], list[float]]:
    """Return shares of evidence by part, category and budget."""
    shares: dict[tuple[str, str, int], list[float]] = {}
    for case in cases:
        index = Index([unit for trace in case.histories for unit in written(trace)], SETTINGS)
        for question in (question for question in case.questions if question.evidence):
            for name, asked, nodes, settings in variants(index, question):
                linked = settings.edges and asked.anchor.multi_hop and name not in (ORACLE, RANKED)
                edges = load_router().edges(asked, nodes, settings.edge_nodes) if linked else {}
                for budget in BUDGETS:
                    picks = packed(asked.anchor, nodes, edges, budget, settings).picks
                    got = {pointer for pick in picks for pointer in pick.unit.pointers}
                    share = sum(id in got for id in question.evidence) / len(question.evidence)
                    for category in (question.category, ALL):
                        shares.setdefault((name, category, budget), []).append(share)
    return shares


def table(shares: Mapping[tuple[str, str, int], Sequence[float]]) -> str:
    names = list(dict.fromkeys(name for name, _, _ in shares))
    categories = [*dict.fromkeys(c for _, c, _ in shares if c != ALL), ALL]
    cell = lambda name, c: " / ".join(f"{100 * np.mean(shares[name, c, b]):.1f}" for b in BUDGETS)
    rows = [[name, *(cell(name, c) for c in categories)] for name in names]
    return "\n".join(markdown_table(["part", *categories], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    shares = measured(read_cases(options.data))
    options.out.mkdir(parents=True, exist_ok=True)
    rows = {f"{name}, {category}, {budget}": told(of) for (name, category, budget), of in shares.items()}
    write_atomically(options.out / "parts.json", to_json(rows, indent=1))
    print(table(shares))
    print(f"S3Mem@1000: {100 * np.mean(shares['S3Mem', ALL, 1000]):.1f}")


def told(shares: Sequence[float]) -> dict[str, float]:
    of = bootstrap_mean(shares)
    return {"mean": of.mean, "low": of.low, "high": of.high, "n": of.n}


if __name__ == "__main__":
    main()
