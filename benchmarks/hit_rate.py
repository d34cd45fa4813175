"""How often short-term memory holds what a task needs, by replacement policy, on traces (KARMA, section 4.4).

    memcompiler bench hit-rate --stream drifting --objects 40 --capacity 10 --policy wtinylfu --window 9

A query asks for one object and is a hit where its unit is held; then the object is used, which writes its unit. Streams
draw the objects uniformly, by Zipf's weights, or by Zipf's weights whose order is drawn anew every so many queries.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import typer

from memory.karma.cache import Cache, make_cache
from memory.karma.settings import KarmaSettings

Stream = Literal["uniform", "skewed", "drifting"]
DRIFT = 100  # queries for which favourites stay the same: as long as counts of C = 10 take to age
WARM = 0.95  # share of the capacity from which on a memory is warmed up


def trace(stream: Stream, objects: int, queries: int, seed: int, drift: int = DRIFT) -> list[str]:
    """Draw the objects that are asked for, one after another."""
    return list(_drawn(stream, objects, queries, random.Random(f"{stream} {objects} {seed}"), drift))


def _drawn(stream: Stream, objects: int, queries: int, rng: random.Random, drift: int) -> Iterator[str]:
    names = [str(number) for number in range(objects)]
    edges = list(accumulate(1.0 if stream == "uniform" else 1 / rank for rank in range(1, objects + 1)))
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


def replay(asked: Sequence[str], settings: KarmaSettings) -> Hits:
    """Ask for objects one after another, each used afterwards."""
    cache: Cache[None] = make_cache(settings)
    hit, first, known, warm = list[bool](), list[bool](), set[str](), len(asked)
    for number, thing in enumerate(asked):
        if len(cache) > WARM * settings.capacity:
            warm = min(warm, number)
        hit.append(thing in cache)
        first.append(thing not in known)
        if hit[-1]:
            cache.use(thing)
        cache.write(thing, None)
        known.add(thing)
    return Hits(tuple(hit), tuple(first), warm)


def named(settings: KarmaSettings) -> str:
    """Name a policy as the paper does: FIFO [10], W-TinyLFU [9, 1]."""
    if settings.policy == "wtinylfu":
        window, main = settings.segments
        return f"W-TinyLFU [{window}, {main}]{' duel' if settings.victim == 'duel' else ''}"
    return f"{settings.policy.upper()} [{settings.capacity}]"


def run_bench_hit_rate(
    stream: Stream, objects: int, capacity: int, policy: str, window: int | None, queries: int, seed: int, drift: int
) -> None:
    """Replay one stream and print its hit rates; the last line is the one with first uses. BadParameter for a window
    that does not fit."""
    if policy == "wtinylfu" and window is not None and window > capacity:
        raise typer.BadParameter(f"a window of {window} units does not fit a capacity of {capacity}")
    own = {"window": window} if policy == "wtinylfu" else {}
    settings = KarmaSettings.model_validate({"policy": policy, "capacity": capacity, **own})
    hits = replay(trace(stream, objects, queries, seed, drift), settings)
    typer.echo(f"{queries} queries over {objects} objects, {stream}, seed {seed}; {named(settings)}")
    typer.echo(f"without first uses: {hits.without_first_uses:.4f}")
    typer.echo(f"after warm-up ({hits.warm} queries): {hits.warmed_up:.4f}")
    typer.echo(f"hit rate: {hits.rate:.4f}")
