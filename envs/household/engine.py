"""Rules and texts of the household: possible commands, their effects and the game's answers.

Implements the rules of ALFWorld's PDDL domain and the sentences of its grammar, including their quirks; a step takes
tens of microseconds.
"""

from collections.abc import Iterable

from envs.household.world import APPLIANCES, CLEAN, COOL, HEAT, LOOK, NOWHERE, TREATMENTS, TWO, Game, State, bits

Command = tuple[str, int, int]  # verb, item (or NOWHERE), receptacle (for "slice": the sliced item)
NOTHING_HAPPENS = "Nothing happens."


class Engine:
    """Engine of one `Game`; it holds no state, so that it can serve several branches."""

    def __init__(self, game: Game) -> None:
        self.game = game
        self._names = [item.name for item in game.items]
        self._listed = [f"a {item.name}" for item in game.items]
        self._here: dict[int, tuple[int, ...]] = {}
        for index, receptacle in enumerate(game.receptacles):
            if receptacle.location != NOWHERE:
                self._here[receptacle.location] = (*self._here.get(receptacle.location, ()), index)
        self._pickupable = _mask(item.pickupable for item in game.items)
        self._toggleable = _mask(item.toggleable for item in game.items)
        self._sliceable = _mask(item.sliceable for item in game.items)
        by_type = {
            kind: _mask((kind, item.type) in game.can_contain for item in game.items)
            for kind in {receptacle.type for receptacle in game.receptacles}
        }
        self._fits = [by_type[receptacle.type] for receptacle in game.receptacles]  # masks by receptacle
        self._treatable = {verb: _mask(getattr(item, f"{verb}able") for item in game.items) for verb in APPLIANCES}
        self._of_type = {kind: _mask(item.type == kind for item in game.items) for kind in {i.type for i in game.items}}
        # Commands that depend on the location only, cached at the first visit.
        self._common: dict[int, dict[str, Command]] = {}

    # Possible commands -----------------------------------------------------------------------------------------

    def reset(self) -> State:
        """Return a fresh state at the start of the game."""
        return self.game.start.copy()

    def intro(self) -> str:
        """Describe the room at the start, or the view if the agent starts in front of a place."""
        facing = self.here(self.game.start)
        return self._look(self.game.start) if facing else f"You are in the middle of a room. {self._places()}"

    def again(self, state: State) -> str:
        """Describe the room's places and the view during an episode."""
        return f"{self._places()} {self._look(state)}" if self.here(state) else self.intro()

    def _places(self) -> str:
        seen = enumerated([f"a {r.name}" for r in self.game.receptacles if r.location != NOWHERE])
        return f"Looking quickly around you, you see {seen}."

    def here(self, state: State) -> tuple[int, ...]:
        """Return the receptacles at the agent's location."""
        return self._here.get(state.location, ())

    def is_open(self, state: State, receptacle: int) -> bool:
        """Return whether a receptacle is open or needs no opening."""
        return not self.game.receptacles[receptacle].openable or bool(state.opened >> receptacle & 1)

    def fits(self, item: int, receptacle: int) -> bool:
        """Return whether a receptacle of this type may hold an item of this type."""
        return bool(self._fits[receptacle] >> item & 1)

    def commands(self, state: State) -> dict[str, Command]:
        """Return the possible commands with their parsed form."""
        common = self._common.get(state.location)
        if common is None:
            common = self._common[state.location] = self._common_commands(state.location)
        possible = common.copy()
        for receptacle in self.here(state):
            self._add_at_receptacle(possible, state, receptacle)
        if state.held != NOWHERE:
            self._add_in_hand(possible, state)
        return possible

    def _common_commands(self, location: int) -> dict[str, Command]:
        possible: dict[str, Command] = {verb: (verb, NOWHERE, NOWHERE) for verb in ("inventory", "look")}
        if self.game.wording.help:
            possible["help"] = ("help", NOWHERE, NOWHERE)
        for index, receptacle in enumerate(self.game.receptacles):
            if receptacle.location == location:
                possible[f"examine {receptacle.name}"] = ("examine receptacle", NOWHERE, index)
            elif receptacle.location != NOWHERE:
                possible[f"go to {receptacle.name}"] = ("go to", NOWHERE, index)
        return possible

    def _add_at_receptacle(self, possible: dict[str, Command], state: State, index: int) -> None:
        receptacle, names = self.game.receptacles[index], self._names
        name, held, contents = receptacle.name, state.held, state.contents[index]
        accessible = self.is_open(state, index)
        if receptacle.openable:
            verb = "close" if accessible else "open"
            possible[f"{verb} {name}"] = (verb, NOWHERE, index)
        if accessible and held == NOWHERE:
            for item in bits(contents & self._pickupable):
                possible[f"take {names[item]} from {name}"] = ("take", item, index)
        elif accessible and self.fits(held, index):
            possible[self.game.wording.put.format(o=names[held], r=name)] = ("put", held, index)
        # The domain allows switching on a lamp in a closed receptacle.
        for item in bits(contents & self._toggleable):
            possible[f"use {names[item]}"] = ("use", item, index)
        if held != NOWHERE:
            for verb, types in APPLIANCES.items():
                if receptacle.type in types and self._treatable[verb] >> held & 1:
                    possible[f"{verb} {names[held]} with {name}"] = (verb, held, index)

    def _add_in_hand(self, possible: dict[str, Command], state: State) -> None:
        held = self.game.items[state.held]
        # Only the held item: in every release a stray comma ("?l - location, ?r - receptacle") voids the domain's rule
        # for visible ones.
        possible[f"examine {held.name}"] = ("examine item", state.held, NOWHERE)
        if held.type in ("knife", "butterknife"):
            for item in bits(state.standing[state.location] & self._sliceable):
                possible[f"slice {self._names[item]} with {held.name}"] = ("slice", state.held, item)

    # Effects ---------------------------------------------------------------------------------------------------

    def step(self, state: State, text: str, possible: dict[str, Command] | None = None) -> str:
        """Carry out a command, change `state` in place, and return the game's answer.

        Args:
            possible: `commands(state)`, if the caller has it already.
        """
        command = (self.commands(state) if possible is None else possible).get(text.strip())
        if command is None:
            return NOTHING_HAPPENS
        verb, item, target = command
        names, places, wording = self._names, self.game.receptacles, self.game.wording
        match verb:
            case "go to":
                state.location = places[target].location
                location = self.game.locations[state.location] if self.game.locations else ""
                return f"{wording.arrive.format(r=places[target].name, l=location)} {self._view(state, target)}"
            case "take":
                state.held = item
                state.contents[target] &= ~(1 << item)
                state.taken[target] |= 1 << item
                state.standing[state.location] &= ~(1 << item)
                return f"You pick up the {names[item]} from the {places[target].name}."
            case "put":
                state.held = NOWHERE
                state.contents[target] |= 1 << item
                state.taken[target] &= ~(1 << item)
                state.standing[state.location] |= 1 << item
                return wording.put_feedback.format(o=names[item], r=places[target].name)
            case "open":
                state.opened |= 1 << target
                return f"You open the {places[target].name}. {self._view(state, target)}"
            case "close":
                state.opened &= ~(1 << target)
                return f"You close the {places[target].name}."
            case "heat" | "cool" | "clean":
                self._treat(state, verb, 1 << item)
                return f"You {verb} the {names[item]} using the {places[target].name}."
            case "use":
                state.toggled |= 1 << item
                return f"You turn on the {names[item]}."
            case "slice":
                state.sliced |= 1 << target
                return f"You sliced the {names[target]} with the {names[item]}."
            case "look":
                return self._look(state)
            case "inventory" if state.held == NOWHERE:
                return "You are not carrying anything."
            case "inventory":
                return f"You are carrying: {self._listed[state.held]}."
            case "examine receptacle":
                return self._view(state, target)
            case "examine item":
                return self._describe(state, item)
            case _:
                return wording.help

    def _treat(self, state: State, verb: str, bit: int) -> None:
        if verb == "clean":
            state.clean |= bit
        elif verb == "heat":
            state.hot, state.cool = state.hot | bit, state.cool & ~bit
        else:
            state.cool, state.hot = state.cool | bit, state.hot & ~bit

    # Texts -----------------------------------------------------------------------------------------------------

    def _view(self, state: State, index: int) -> str:
        receptacle = self.game.receptacles[index]
        if receptacle.openable and not state.opened >> index & 1:
            return f"The {receptacle.name} is closed."
        seen = enumerated([self._listed[item] for item in bits(state.contents[index])])
        if receptacle.openable:
            return f"The {receptacle.name} is open. In it, you see {seen}."
        return f"On the {receptacle.name}, you see {seen}."

    def _look(self, state: State) -> str:
        here = self.here(state)
        if not here:
            return "You are in the middle of a room. Looking quickly around you, you see nothing."
        facing = enumerated([self.game.receptacles[r].name for r in here])
        # TextWorld lists as "next to it" things at this location that were once taken out of a receptacle here, once
        # for every such receptacle.
        standing = state.standing[state.location]
        beside = sorted((item, r) for r in here for item in bits(standing & state.taken[r]))
        return f"You are facing the {facing}. Next to it, you see {enumerated([self._listed[i] for i, _ in beside])}."

    def _describe(self, state: State, index: int) -> str:
        item, bit = self.game.items[index], 1 << index
        if item.inside is not None:
            return f"This is a normal {item.name}. In it, you see {enumerated([self._listed[i] for i in item.inside])}."
        clean, hot, cool, sliced = (bool(mask & bit) for mask in (state.clean, state.hot, state.cool, state.sliced))
        warmth = "hot" if hot else "cool" if cool else ""
        if sliced and (warmth or clean):
            return f"This is a {' and '.join(filter(None, (warmth, 'clean' if clean else '')))} sliced {item.name}."
        if clean and warmth:
            return f"This is a {warmth} and clean {item.name}."
        if hot or clean or cool:
            return f"This is a {'hot' if hot else 'clean' if clean else 'cold'} {item.name}."
        if item.toggleable and state.toggled & bit:
            return f"This {item.name} is on."
        if item.sliceable and sliced:
            return f"This is a sliced {item.name}."
        return f"There's nothing special about {item.name}."

    # Goals -----------------------------------------------------------------------------------------------------

    def candidates(self) -> int:
        """Return the mask of items of the goal's type that allow its treatment."""
        goal = self.game.goal
        mask = self._of_type.get(goal.item_type, 0)
        if goal.kind in TREATMENTS:
            mask &= self._treatable[TREATMENTS[goal.kind]]
        return mask

    def lamps(self) -> int:
        """Return the mask of lamps of the goal's type that can be switched on."""
        return self._of_type.get(self.game.goal.lamp_type, 0) & self._toggleable

    def treated(self, state: State) -> int:
        """Return the mask of items that have the goal's treatment; all items if it has none."""
        return {CLEAN: state.clean, HEAT: state.hot, COOL: state.cool}.get(self.game.goal.kind, -1)

    def progress(self, state: State) -> float:
        """Return the share of the goal's conditions that hold for the item or receptacle that fulfils most."""
        kind = self.game.goal.kind
        if kind == LOOK:
            lit, wanted = self.lamps() & state.toggled, self._of_type.get(self.game.goal.item_type, 0)
            held = state.held != NOWHERE and bool(wanted >> state.held & 1)
            return (any(state.contents[r] & lit for r in self.here(state)) + held) / 2
        if kind == TWO:
            wanted = self.candidates()
            return max((min(2, (mask & wanted).bit_count()) for mask in self._destinations(state)), default=0) / 2
        wanted, treated, placed = self.candidates(), self.treated(state), 0
        for mask in self._destinations(state):
            placed |= mask
        if kind not in TREATMENTS:
            return 1.0 if wanted & placed else 0.0
        if wanted & placed & treated:
            return 1.0
        return 0.5 if wanted & (placed | treated) else 0.0

    def won(self, state: State) -> bool:
        return self.progress(state) == 1.0

    def _destinations(self, state: State) -> list[int]:
        wanted = self.game.goal.receptacle_type
        return [mask for mask, r in zip(state.contents, self.game.receptacles, strict=True) if r.type == wanted]


def _mask(flags: Iterable[bool]) -> int:
    """Return the bit mask of flags; bit i is the i-th."""
    return sum(1 << index for index, flag in enumerate(flags) if flag)


def enumerated(words: list[str]) -> str:
    """Write a list as ALFWorld does: "nothing", "a", "a, and b", "a, b, and c"."""
    if len(words) < 2:
        return words[0] if words else "nothing"
    return f"{', '.join(words[:-1])}, and {words[-1]}"
