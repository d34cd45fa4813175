"""Placement prior: counts of kinds of things by the kind of place where they start, in training worlds.

python -m envs.household.placement_prior   # recount in generated homes and ALFWorld's train games
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from envs.household.vocabulary import ITEM_TYPES
from envs.household.world import NOWHERE, Game
from runtime.store import write_atomically

FILE = Path(__file__).with_suffix(".json")
HOMES = 64


@cache
def counts(environment: str) -> Mapping[str, Mapping[str, int]]:
    """Return the counts by thing and kind of place; {} for an environment without counts."""
    return json.loads(FILE.read_text(encoding="utf-8")).get(environment, {})


@cache
def carried() -> frozenset[str]:
    """Return the kinds of portable things of both environments."""
    return frozenset(ITEM_TYPES) | counts("alfworld").keys()


def likelihood(environment: str, thing: str, kinds: Iterable[str]) -> dict[str, float]:
    """Return the probability, with add-one smoothing, that each kind of place holds a thing."""
    seen, distinct = counts(environment).get(thing, {}), list(dict.fromkeys(kinds))
    total = sum(seen.values()) + len(distinct)
    return {kind: (seen.get(kind, 0) + 1) / total for kind in distinct}


def count_placements(games: Iterable[Game]) -> dict[str, dict[str, int]]:
    """Count portable things and lamps by the kind of place where they start."""
    found = dict[str, Counter[str]]()
    for game in games:
        for n, item in enumerate(game.items):
            for r in game.places(n, game.start) if item.pickupable or item.toggleable else ():
                if game.receptacles[r].location != NOWHERE:
                    found.setdefault(item.type, Counter())[game.receptacles[r].type] += 1
    return {thing: dict(sorted(of.items())) for thing, of in sorted(found.items())}


def main() -> None:
    from envs.alfworld.games import AlfworldGames
    from envs.household.generate import Generator
    from envs.household.world import KINDS

    homes = Generator(
        0, {"train": HOMES}, visual_share=0.0, remembered_share=0.0, fixed_objects=40, wandering_objects=0, kinds=KINDS
    )
    games = AlfworldGames()
    counts_by_environment = {
        "household": count_placements(homes.game(task)[0] for task in homes.worlds("train")),
        "alfworld": count_placements(games.game(task)[0] for task in games.tasks("train")),
    }
    lines = ",\n".join(
        f'"{name}": {{\n' + ",\n".join(f'  "{thing}": {json.dumps(of)}' for thing, of in found.items()) + "\n}"
        for name, found in counts_by_environment.items()
    )
    write_atomically(FILE, f"{{{lines}}}\n")


if __name__ == "__main__":
    main()
