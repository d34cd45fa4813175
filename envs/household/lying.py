"""Where kinds of things lie in training worlds: what anyone knows of homes before seeing one.

python -m envs.household.lying        # counts anew: homes of the split train, and ALFWorld's train games
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

FILE = Path(__file__).with_name("lying.json")
HOMES = 64


@cache
def counts(environment: str) -> Mapping[str, Mapping[str, int]]:
    """Return how often a kind of thing lay in a kind of place at the start, by thing and place; {} for an environment
    of which nobody counted."""
    return json.loads(FILE.read_text(encoding="utf-8")).get(environment, {})


@cache
def carried() -> frozenset[str]:
    """Return the kinds of things that can be carried, in homes of either environment."""
    return frozenset(ITEM_TYPES) | counts("alfworld").keys()


def likelihood(environment: str, thing: str, kinds: Iterable[str]) -> dict[str, float]:
    """Return for each kind of place how likely a thing lies in such a one, each counted once more than it was."""
    seen, distinct = counts(environment).get(thing, {}), list(dict.fromkeys(kinds))
    total = sum(seen.values()) + len(distinct)
    return {kind: (seen.get(kind, 0) + 1) / total for kind in distinct}


def counted(games: Iterable[Game]) -> dict[str, dict[str, int]]:
    """Count what can be carried, by where it lies at the start."""
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

    homes = Generator(0, {"train": HOMES}, 0.0, 0.0, 40, 0, KINDS)
    games = AlfworldGames()
    told = {
        "household": counted(homes.game(task)[0] for task in homes.worlds("train")),
        "alfworld": counted(games.game(task)[0] for task in games.tasks("train")),
    }
    lines = ",\n".join(
        f'"{name}": {{\n' + ",\n".join(f'  "{thing}": {json.dumps(of)}' for thing, of in found.items()) + "\n}"
        for name, found in told.items()
    )
    write_atomically(FILE, f"{{{lines}}}\n")


if __name__ == "__main__":
    main()
