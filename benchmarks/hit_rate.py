"""How often short-term memory holds what a task needs, by replacement policy: KARMA's Figures 4 to 6, on traces.

    memcompiler bench hit-rate --stream drifting --objects 40 --capacity 10 --policy wtinylfu --window 9
    python -m benchmarks.hit_rate --out out/karma-figures        # all streams, five seeds, with plots

A query asks for one object and is a hit where its unit is held; then the object is used, which writes its unit. Streams
draw the objects uniformly, by Zipf's weights, or by Zipf's weights drawn in another order every
hundred (or 25) queries.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal

import typer

from eval.intervals import bootstrap_mean
from eval.plots import figure_of, quiet, save_figure, titled
from eval.table import markdown_table
from memory.karma.cache import Cache, make_cache
from memory.karma.settings import KarmaSettings
from runtime.store import to_json, write_atomically

Stream = Literal["uniform", "skewed", "drifting"]
DRIFT, FASTER = (
    100,
    25,
)  # queries for which favourites stay the same: as long as it takes counts of C = 10 to age, or less
STREAMS: Mapping[str, tuple[Stream, int]] = {
    "uniform": ("uniform", DRIFT), "skewed": ("skewed", DRIFT), f"drifting every {DRIFT}": ("drifting", DRIFT),
    f"drifting every {FASTER}": ("drifting", FASTER),
}  # fmt: skip
WARM = 0.95  # share of the capacity from which on a memory is warmed up (section 4.4)
OBJECTS, QUERIES, SEEDS, SHOWN = 40, 20_000, 5, 400  # the last: queries that a figure shows
SPLITS = ((9, 1), (7, 3), (5, 5), (3, 7), (1, 9))  # window and main of Figure 4
CAPACITIES = (5, 10, 15, 20, 25)  # of Figures 5 and 6


def trace(stream: Stream, objects: int, queries: int, seed: int, drift: int = DRIFT) -> list[str]:
    """Draw the objects that are asked for, one after another."""
    return list(_drawn(stream, objects, queries, random.Random(f"{stream} {objects} {seed}"), drift))


def _drawn(stream: Stream, objects: int, queries: int, rng: random.Random, drift: int) -> Iterator[str]:
    names = [str(number) for number in range(objects)]
    weights = [1.0 if stream == "uniform" else 1 / rank for rank in range(1, objects + 1)]
    edges = list(accumulate(weights))
    for number in range(queries):
        if stream == "drifting" and number % drift == 0:
            rng.shuffle(names)
        yield rng.choices(names, cum_weights=edges)[0]


@dataclass(frozen=True, slots=True)
class Hits:
    """One outcome a query. `first`: it was the object's first use; `warm`: the query from which memory is warmed up."""

    hit: tuple[bool, ...]
    first: tuple[bool, ...]
    warm: int

    @property
    def rate(self) -> float:
        return _share(self.hit)

    @property
    def without_first_uses(self) -> float:
        return _share([hit for hit, first in zip(self.hit, self.first, strict=True) if not first])

    @property
    def warmed_up(self) -> float:
        return _share(self.hit[self.warm :])


def _share(hits: Sequence[bool]) -> float:
    return sum(hits) / len(hits) if hits else 0.0


def replay(asked: Sequence[str], cache: Cache[None], capacity: int) -> Hits:
    """Ask for objects one after another, each used afterwards."""
    hit, first, known, warm = list[bool](), list[bool](), set[str](), len(asked)
    for number, thing in enumerate(asked):
        if len(cache) > WARM * capacity:
            warm = min(warm, number)
        hit.append(thing in cache)
        first.append(thing not in known)
        if hit[-1]:
            cache.use(thing)
        cache.write(thing, None)
        known.add(thing)
    return Hits(tuple(hit), tuple(first), warm)


def run_bench_hit_rate(
    stream: Stream, objects: int, capacity: int, policy: str, window: int | None, queries: int, seed: int, drift: int
) -> Hits:  # fmt: skip
    """Replay one stream and print its hit rates; the last line is the one with first uses. ValueError for a window that
    does not fit."""
    own = {"window": window} if policy == "wtinylfu" else {}
    settings = KarmaSettings.model_validate({"policy": policy, "capacity": capacity, **own})
    hits = replay(trace(stream, objects, queries, seed, drift), make_cache(settings), capacity)
    typer.echo(f"{queries} queries over {objects} objects, {stream}, seed {seed}; {named(settings)}")
    typer.echo(f"without first uses: {hits.without_first_uses:.4f}")
    typer.echo(f"after warm-up ({hits.warm} queries): {hits.warmed_up:.4f}")
    typer.echo(f"hit rate: {hits.rate:.4f}")
    return hits


def named(settings: KarmaSettings) -> str:
    """Name a policy as the paper does: FIFO [10], W-TinyLFU [9, 1]."""
    if settings.policy == "wtinylfu":
        window, main = settings.segments
        return f"W-TinyLFU [{window}, {main}]{' duel' if settings.victim == 'duel' else ''}"
    return f"{settings.policy.upper()} [{settings.capacity}]"


# figures --------------------------------------------------------------------------------------------------------------


def figure_settings(number: int) -> list[KarmaSettings]:
    """Give the memories that a figure of the paper compares (Figure 4 with LRU and TinyLFU's duel beside them)."""
    if number == 4:
        splits = [{"window": window, "victim": victim} for victim in ("pool", "duel") for window, _ in SPLITS]
        others = [{"policy": "fifo"}, {"policy": "lru"}]
        return [KarmaSettings.model_validate({"capacity": 10, **each}) for each in (*others, *splits)]
    policy = {5: "fifo", 6: "wtinylfu"}[number]
    return [KarmaSettings.model_validate({"policy": policy, "capacity": c}) for c in CAPACITIES]


def measured(number: int, stream: Stream, drift: int, queries: int, seeds: int) -> dict[str, list[Hits]]:
    """Replay a stream of each seed in each memory of a figure."""
    return {
        named(settings): [
            replay(trace(stream, OBJECTS, queries, seed, drift), make_cache(settings), settings.capacity)
            for seed in range(seeds)
        ]
        for settings in figure_settings(number)
    }


def _table(found: Mapping[str, Sequence[Hits]]) -> list[list[str]]:
    rows = []
    for name, of_seeds in found.items():
        told = [
            bootstrap_mean([getattr(h, of) for h in of_seeds]) for of in ("rate", "without_first_uses", "warmed_up")
        ]
        rows.append([name, *(f"{100 * i.mean:.1f} [{100 * i.low:.1f}, {100 * i.high:.1f}]" for i in told)])
    return rows


def _draw(found: Mapping[str, Mapping[str, Sequence[Hits]]], number: int, path: Path) -> Path:
    """Draw the hit rate so far against the number of queries, means of all seeds, one panel a stream."""
    figure, panels = figure_of((4.2 * len(found), 3.4), 1, len(found), sharey=True)
    for panel, (stream, of_stream) in zip(panels, found.items(), strict=True):
        for name, of_seeds in of_stream.items():
            if "duel" in name:
                continue
            sums = [list(accumulate(h.hit[:SHOWN])) for h in of_seeds]
            ran = [sum(each) / len(each) / (n + 1) for n, each in enumerate(zip(*sums, strict=True))]
            [line] = panel.plot(range(1, len(ran) + 1), ran, label=name, linewidth=1.2)
            warm = sum(h.warm for h in of_seeds) / len(of_seeds)
            panel.axvline(min(warm, SHOWN), color=line.get_color(), linewidth=0.5, linestyle=":")
        titled(panel, stream)
        quiet(panel, grid="y")
        panel.set_xlabel("tasks")
    panels[0].set_ylabel("hit rate so far")
    panels[-1].legend(fontsize=6.5, loc="lower right")
    return save_figure(figure, path, f"KARMA Figure {number}, on traces; dotted: warmed up (over 95 % full)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--queries", type=int, default=QUERIES)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    for number in (4, 5, 6):
        found = {name: measured(number, *of, a.queries, a.seeds) for name, of in STREAMS.items()}
        for stream, of_stream in found.items():
            print(f"\nFigure {number}, {stream}, hit rate in percent (mean of {a.seeds} seeds, 95 % bootstrap)\n")
            heads = ["memory", "all queries", "without first uses", "after warm-up"]
            print(*markdown_table(heads, _table(of_stream), left=1), sep="\n")
        rates = {s: {name: [h.rate for h in hits] for name, hits in of.items()} for s, of in found.items()}
        write_atomically(a.out / f"figure{number}.json", to_json(rates))
        print(_draw(found, number, a.out / f"figure{number}.png"))


if __name__ == "__main__":
    main()
