"""The household's planner, which returns near-shortest commands to the goal from any reachable state.

It tries every item that can fulfil the goal with every source and destination on a copy of the state, and returns the
shortest plan.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from envs.household.engine import Engine
from envs.household.world import APPLIANCES, LOOK, NOWHERE, TREATMENTS, TWO, State, bits


class _NoWay(Exception):
    """A plan is impossible; others may be possible."""


def plan(engine: Engine, state: State) -> list[str] | None:
    """Return commands from `state` to the goal; [] if it holds already, None if there is no plan."""
    if engine.won(state):
        return []
    kind = engine.game.goal.kind
    attempts = {LOOK: _look_plans, TWO: _two_plans}.get(kind, _place_plans)
    return min(attempts(engine, state), key=len, default=None)


class _Draft:
    """A plan under construction: its commands, the state after them, and the receptacle at which it ends."""

    def __init__(self, engine: Engine, state: State, destination: int) -> None:
        self.engine, self.game, self.state, self.destination = engine, engine.game, state.copy(), destination
        self.commands: list[str] = []
        self.won = False

    def do(self, command: str) -> None:
        """Add a command, unless the goal holds already (real games may have a thing in two places)."""
        if not self.won:
            self.engine.step(self.state, command)
            self.commands.append(command)
            self.won = self.engine.won(self.state)

    def go_to(self, receptacle: int) -> None:
        place = self.game.receptacles[receptacle]
        if place.location == NOWHERE:
            raise _NoWay
        if place.location != self.state.location:
            self.do(f"go to {place.name}")

    def reach(self, receptacle: int) -> None:
        """Go to a receptacle and open it."""
        self.go_to(receptacle)
        if not self.engine.is_open(self.state, receptacle):
            self.do(f"open {self.game.receptacles[receptacle].name}")

    def put(self, receptacle: int) -> None:
        self.reach(receptacle)
        held, place = self.game.items[self.state.held], self.game.receptacles[receptacle]
        self.do(self.game.wording.put.format(o=held.name, r=place.name))

    def fetch(self, item: int, source: int) -> None:
        """Take `item` from `source`, unless it is in hand; put down any other item first."""
        if self.state.held == item:
            return
        self.free_hand(on_the_way_to=source)
        self.reach(source)
        self.do(f"take {self.game.items[item].name} from {self.game.receptacles[source].name}")

    def free_hand(self, on_the_way_to: int) -> None:
        """Put down the held item at the cost of the fewest commands."""
        if self.state.held == NOWHERE:
            return
        state, places = self.state, self.game.receptacles
        fitting = [r for r, place in enumerate(places) if self.engine.fits(state.held, r) and place.location != NOWHERE]
        if not fitting:
            raise _NoWay

        def cost(r: int) -> int:
            detour = places[r].location not in (state.location, places[on_the_way_to].location)
            # Receptacles that the plan opens anyway cost nothing.
            return detour + (r not in (on_the_way_to, self.destination) and not self.engine.is_open(state, r))

        self.put(min(fitting, key=cost))

    def treat(self, verb: str) -> None:
        """Heat, cool or clean the held item, if possible at an appliance here."""
        places, types = self.game.receptacles, APPLIANCES[verb]
        appliances = [r for r, place in enumerate(places) if place.type in types and place.location != NOWHERE]
        if not appliances:
            raise _NoWay
        appliance = min(appliances, key=lambda r: places[r].location != self.state.location)
        self.go_to(appliance)
        self.do(f"{verb} {self.game.items[self.state.held].name} with {places[appliance].name}")


def _sources(engine: Engine, state: State, items: int) -> Iterator[tuple[int, int]]:
    """Yield (item, receptacle that holds it) for every wanted item; (item, NOWHERE) for the held one."""
    for item in bits(items):
        if item == state.held:
            yield item, NOWHERE
        elif engine.game.items[item].pickupable:
            for receptacle in engine.game.places(item, state):
                yield item, receptacle


def _destinations(engine: Engine, item: int) -> list[int]:
    wanted = engine.game.goal.receptacle_type
    places = engine.game.receptacles
    return [r for r, place in enumerate(places) if place.type == wanted and engine.fits(item, r)]


Step = Callable[[_Draft], None]


def _attempt(engine: Engine, state: State, steps: Iterable[Step], destination: int = NOWHERE) -> Iterator[list[str]]:
    """Yield the commands of steps if they are possible and reach the goal."""
    draft = _Draft(engine, state, destination)
    try:
        for step in steps:
            step(draft)
    except _NoWay:
        return
    if draft.won:
        yield draft.commands


def _place_plans(engine: Engine, state: State) -> Iterator[list[str]]:
    """Fetch one item, treat it if needed, and put it at a destination."""
    verb = TREATMENTS.get(engine.game.goal.kind)
    treated = engine.treated(state)
    for item, source in _sources(engine, state, engine.candidates()):
        treatment: list[Step] = []
        if verb is not None and not treated >> item & 1:
            treatment = [partial(_Draft.treat, verb=verb)]
        for destination in _destinations(engine, item):
            fetch, put = partial(_Draft.fetch, item=item, source=source), partial(_Draft.put, receptacle=destination)
            yield from _attempt(engine, state, [fetch, *treatment, put], destination)


def _two_plans(engine: Engine, state: State) -> Iterator[list[str]]:
    """Bring two items into one receptacle, counting those already there."""
    wanted = engine.candidates()
    if not wanted:
        return
    sources = list(_sources(engine, state, wanted))
    for destination in _destinations(engine, next(bits(wanted))):  # items of one type fit the same receptacles
        inside = state.contents[destination]
        outside = [(item, source) for item, source in sources if not inside >> item & 1]
        for trips in _trips(outside, already_there=bool(inside & wanted), held=state.held):
            put = partial(_Draft.put, receptacle=destination)
            steps = [step for item, source in trips for step in (partial(_Draft.fetch, item=item, source=source), put)]
            yield from _attempt(engine, state, steps, destination)


def _trips(outside: list[tuple[int, int]], already_there: bool, held: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the items to bring, in order."""
    for one in outside:
        if already_there:
            yield [one]
            continue
        for other in outside:
            # The held item comes first, to avoid putting it down.
            if one[0] != other[0] != held:
                yield [one, other]


def _look_plans(engine: Engine, state: State) -> Iterator[list[str]]:
    """Hold the item at a lamp and switch the lamp on."""
    for lamp in bits(engine.lamps()):
        switch: list[Step] = []
        if not state.toggled >> lamp & 1:
            switch = [partial(_Draft.do, command=f"use {engine.game.items[lamp].name}")]
        for place in engine.game.places(lamp, state):
            for item, source in _sources(engine, state, engine.candidates()):
                fetch, there = partial(_Draft.fetch, item=item, source=source), partial(_Draft.go_to, receptacle=place)
                yield from _attempt(engine, state, [fetch, there, *switch])
