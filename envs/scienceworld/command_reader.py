"""Command reader of ScienceWorld: rooms and order of a recipe's steps."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from envs.command_reader import AgentState, CommandReader, Fact, Reading, Step, last_of_each
from envs.scienceworld import view_parser

DOORS: Mapping[str, tuple[str, ...]] = {
    "art studio": ("hallway",),
    "bathroom": ("kitchen",),
    "bedroom": ("hallway",),
    "foundry": ("outside",),
    "greenhouse": ("hallway", "outside"),
    "hallway": ("art studio", "bedroom", "greenhouse", "kitchen", "living room", "workshop"),
    "kitchen": ("bathroom", "hallway", "outside"),
    "living room": ("hallway",),
    "outside": ("foundry", "greenhouse", "kitchen"),
    "workshop": ("hallway",),
}
"""The rooms of the house, and those to which each has doors."""
TELEPORT = "teleport to "
RELATED = 0.6  # minimum share of common words of goals of one type
_MOVE = re.compile(r"(?:go to|teleport to|open door to) (?P<room>.+)")
_ARRIVE = re.compile(r"(?:go|teleport) to (?P<room>.+)")
# Looks, walks and waits are no steps of a recipe; nor is a lone number, which answers a question of the simulator.
_IDLE = re.compile(r"(?:go to|teleport to|(?:open|close) door to|look|examine|inventory|wait|\d+$)")
_HARMLESS = re.compile(r"(?:go to|teleport to|open door to|look|examine|inventory)")
_VERB = re.compile(r"pick up|focus on|[a-z]+")
_MILESTONE = re.compile(r"(?:pick up|focus on|activate|mix|connect) ")
_NAMED = re.compile(r"(?:This room is called|You (?:move|teleport)(?: through the door)? to) the (?P<room>[a-z ]+)\.")
_OUTSIDE = re.compile(r"This outside location is called the (?P<room>[a-z ]+)\.")

_ABOUT = re.compile(
    r"Your task is to (?:boil|freeze|melt|change the state of matter of|measure the (?:temperature|melting point) of"
    r"|find a\(n\)|grow an?|turn on the|determine if|use chemistry to create) ((?:(?! is | from |, |\.).)+)"
)


def is_move(command: str) -> bool:
    return _MOVE.fullmatch(command) is not None


def is_harmless(command: str) -> bool:
    """Return whether a command changes at most the agent's room."""
    return _HARMLESS.match(command) is not None


def room_in(text: str) -> str:
    """Return the agent's room according to an answer; "" if it names none."""
    found = _NAMED.search(text) or _OUTSIDE.search(text)
    return found["room"] if found else ""


def next_room(here: str, place: str) -> str:
    """Return the first room on a shortest way to a place; the place itself if either is no room."""
    if here not in DOORS or place not in DOORS:
        return place
    found, ways = {here}, [[room] for room in DOORS[here]]
    for way in ways:  # grows: shorter ways first
        if way[-1] == place:
            return way[0]
        found.add(way[-1])
        ways += [[*way, room] for room in DOORS[way[-1]] if room not in found]
    return place


def destination(plan: Sequence[str]) -> tuple[int, str]:
    """Return the number of moves before the plan's next action, and the room they lead to; "" if there is none."""
    moves = next((i for i, command in enumerate(plan) if not is_move(command)), len(plan))
    rooms = [m["room"] for command in plan[:moves] if (m := _ARRIVE.fullmatch(command))]
    return moves, rooms[-1] if rooms else ""


def straighten(path: Sequence[str], room: str) -> list[str]:
    """Remove walks that return to a room without an action, and looks while passing through, from a path that starts in
    `room`."""
    direct, walk = list[str](), list[tuple[str, str]]()  # the moves since the last step, each with the room before it
    looks = list[str]()  # since the last move
    for command in path:
        if is_move(command):
            walk.append((command, room))
            looks.clear()
            if m := _ARRIVE.fullmatch(command):
                room = m["room"]
                walk = walk[: next((i for i, (_, before) in enumerate(walk) if before == room), len(walk))]
        elif is_harmless(command):
            looks.append(command)
        else:
            direct += [*(move for move, _ in walk), *looks, command]
            walk, looks = [], []
    return [*direct, *(move for move, _ in walk), *looks]


def rest_of_path(path: Sequence[str], actions: Sequence[str], rooms: Sequence[str]) -> list[str] | None:
    """Return the rest of a path after `actions`; None if an action off the path had an effect.

    Args:
        rooms: the agent's room at the start and after each action.
    """
    done, room = 0, rooms[0]  # commands of the path done, and the room they led to
    for action, before, after in zip(actions, rooms, rooms[1:], strict=False):
        ahead = _from_here(path[done:], room, before)
        if ahead[:1] == [action] and not (action.startswith(TELEPORT) and action not in path[done : done + 1]):
            done, room = len(path) - len(ahead) + 1, after
        elif not is_harmless(action):
            return None
    return _from_here(path[done:], room, rooms[-1])


def _from_here(rest: Sequence[str], room: str, here: str) -> list[str]:
    """Return the rest of a path that continues in `room`, with the way there from room `here`."""
    moves, goal = destination(rest)
    if here == room:
        return list(rest)
    return list(rest[moves:]) if here == (goal or room) else [f"{TELEPORT}{goal or room}", *rest[moves:]]


class ScienceWorldReader(CommandReader):
    """Reader for one fixed house, where other variations of a task show the room of each step and the next step.

    The agent carries any number of things, and can move a thing without taking it.
    """

    reads_views = True
    one_hand = False

    def look(self, text: str) -> Reading:
        """Read rooms and containers with their contents, the inventory, and the rooms to which there are doors. The
        agent is in the room that lists it."""
        views = list(view_parser.parse_views(text))
        at = next((view.at for view in views if view_parser.AGENT in view.seen), None)
        seen = tuple(replace(v, seen=tuple(t for t in v.seen if t != view_parser.AGENT)) for v in views)
        return Reading(at, view_parser.parse_inventory(text), views=seen, places=view_parser.parse_doors(text))

    def read(self, state: AgentState, step: Step) -> Reading:
        """Read also what was taken, put down, eaten or switched, and the room that a move led to."""
        if step.refused:
            return Reading()
        told, done = self.look(step.feedback), view_parser.parse_effect(step.feedback)
        at, held = told.at, told.held
        if at is None and not told.views:
            at = room_in(step.feedback) or None
        if done is not None and done.verb == "take":
            done = replace(done, place=state.where.get(done.thing, state.at))
            held = (*state.held, done.thing)
        elif done is not None and done.verb == "put":
            held = view_parser.without(state.held, done.thing)
        elif eaten := view_parser.parse_eaten(step.feedback):
            held = view_parser.without(state.held, eaten)
        return replace(told, at=at, held=held, effect=done)

    def goal_things(self, goal: str, known: Iterable[str] = ()) -> frozenset[str]:
        """Return the thing or substance that a goal is about, and those of `known` that it names."""
        text, named = goal.lower(), _ABOUT.search(goal)
        shown = {name for name in known if re.search(rf"\b{re.escape(name)}\b", text)}
        return frozenset(shown | ({named[1]} if named else set()))

    def fetch(self, thing: str, place: str) -> tuple[str, ...]:
        """Return the commands that take a thing in a room."""
        return (f"{TELEPORT}{place}", f"pick up {thing}") if place in DOORS else (f"pick up {thing}",)

    def related(self, goal: str, other: str) -> bool:
        """Return whether both goals are of one task type, by their share of common words."""
        mine, theirs = (set(re.findall(r"[a-z]+", text.lower())) for text in (goal, other))
        return len(mine & theirs) >= RELATED * len(mine | theirs)

    def facts(self, actions: Sequence[str]) -> list[Fact]:
        """List steps with their rooms, from the first room that a command names."""
        found, room = list[Fact](), ""
        for command in actions:
            if m := _ARRIVE.fullmatch(command):
                room = m["room"]
            elif room and not _IDLE.match(command):
                found.append(Fact(_need(command), room))
        return found

    def need(self, plan: Sequence[str]) -> Fact | None:
        """Return the step that the plan walks to and its room."""
        moves, room = destination(plan)
        step = next(iter(self.steps(plan)), "")
        return Fact(_need(step), room) if moves and room and step else None

    def need_kind(self, need: str) -> str:
        """Return the kind of step, since things differ between variations."""
        return self.shape(need)

    def subgoals(self, plan: Sequence[str], goal: str, shown: frozenset[str]) -> list[str]:
        """List the remaining milestones, in words of the goal and of past episodes."""
        known = set(re.findall(r"\w+", " ".join((goal, *shown)).lower()))
        milestones = (command for command in plan if _MILESTONE.match(command))
        return last_of_each(c for c in milestones if set(re.findall(r"\w+", c.lower())) <= known)

    def steps(self, actions: Sequence[str]) -> list[str]:
        return [command for command in actions if not _IDLE.match(command)]

    def adapted(self, command: str, goal: str, to: str) -> str:
        """Replace the thing or substance that a goal is about; things in the inventory are named without it, as valid
        commands do."""
        theirs, own = (found[1].lower() if (found := _ABOUT.search(text)) else "" for text in (goal, to))
        if theirs and own:
            command = re.sub(rf"\b{re.escape(theirs)}\b", lambda _: own, command, flags=re.IGNORECASE)
        return command.replace(" in inventory", "")

    def shape(self, command: str) -> str:
        """Return the verb."""
        verb = _VERB.match(command)
        return verb[0] if verb else command

    def here(self, observation: str, history: Sequence[str]) -> frozenset[str]:
        """Return the room that the view names, or the last destination."""
        gone = (m["room"] for command in reversed(history) if (m := _ARRIVE.fullmatch(command)))
        room = room_in(observation) or next(gone, "")
        return frozenset((room,) if room else ())

    def place_without(self, need: str, observation: str) -> str:
        """Return the visible room if it does not show the thing to pick up."""
        thing = self.thing(need)
        return "" if thing == need or thing in observation else room_in(observation)

    def searched(self, history: Sequence[str]) -> frozenset[str]:
        """Return the rooms in which the agent looked around since its last step."""
        room, looked = "", set[str]()
        for command in history:
            if m := _ARRIVE.fullmatch(command):
                room = m["room"]
            elif command == "look around":
                looked.add(room)
            elif not _IDLE.match(command):
                looked.clear()
        return frozenset(looked - {""})

    def thing(self, need: str) -> str:
        return need.removeprefix("pick up ")

    def way(self, place: str, here: str = "") -> str:
        """Return the move to the next room on a shortest way from room `here`, or to the place itself."""
        return super().way(next_room(here, place))

    def sentence(self, scene: str, need: str, place: str) -> str:
        """Write the room of a step."""
        return f"in {place}: {need}"

    def rationale(self, scene: str, actions: Sequence[str]) -> str:
        """Write the first step in each room."""
        first: dict[str, Fact] = {}
        for fact in self.facts(actions):
            first.setdefault(fact.place, fact)
        return "; ".join(self.sentence("", fact.need, fact.place) for fact in first.values())


def _need(command: str) -> str:
    """Return the name of a step, without the thing of "focus on", which differs between variations."""
    return "focus on" if command.startswith("focus on ") else command
