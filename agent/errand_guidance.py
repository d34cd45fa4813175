"""Guidance for household errands from what an agent may know: goal, M, b_t, o_t and the last command, without a plan.

What is due follows from the goal's subgoals, which the Brief State holds. Its first three lines may be the
environment's (`env.notes_places`):

    places: desk 1, shelf 2, ...                the first place of each kind, as the first view lists them
    unsearched: desk 1, shelf 2, shelf 1, ...   places whose content has not been seen; the environment notes the first
                                                of each kind and those in front of the agent
    holding: mug 1
    mug: shelf 2, countertop                    where to look for a mug: places where one was seen, and one kind of
                                                place where M's entries found one. Kinds that need no opening come
                                                before others, then the order is alphabetical; the order of M's entries
                                                does not matter. Where scenes differ: M's places of this scene
    cabinet: cabinet 2                          where the first of two things was put
    example: FloorPlan3                         the scene of M's first successful episode of this kind of errand, whose
                                                routine is followed; "none" without one

A past command counts as done if its answer does not refuse it. All functions are pure: `note` gives operations on b_t,
and `Errands.due` reads the state after them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from agent.leads import Lead
from agent.records import is_refusal
from compiler.brief_state import BETWEEN, MAX_CHARACTERS, PLAN, BriefState, Create, Delete, Fold, Op, Update
from envs.household.command_reader import PUT, TAKE, TREAT
from envs.household.errands import (
    HOLDING,
    LOOK,
    PLACES,
    UNSEARCHED,
    Errand,
    Step,
    View,
    kind_of,
    kind_of_episode,
    listed_places,
    place_notes,
    place_of,
    read_view,
    steps_of,
    taken_thing,
)
from envs.household.vocabulary import OPENABLE
from memory.entry import MemoryEntry

EXAMPLE = "example"
NONE, NAMELESS = "none", "an episode"  # examples: there is none, or its scene has no name
MOST = 2  # places of this scene that are noted for a thing at first
GO, OPEN = "go to ", "open "
SHOWN_BY = {"find": "take"}  # the step that shows a subgoal, where it has another verb


@dataclass(frozen=True, slots=True)
class Due:
    """The command that is due, and why."""

    command: str
    reason: str

    @property
    def at_hand(self) -> bool:
        """Return whether the command acts where the agent is."""
        return not self.command.startswith(GO)


@dataclass(frozen=True, slots=True)
class Answered:
    """The last command with its answer, and what the answer shows."""

    command: str
    text: str
    view: View

    @property
    def refused(self) -> bool:
        return is_refusal(self.text)

    @property
    def here(self) -> str:
        """Return the place in front of the agent, as far as command and answer tell it."""
        if self.view.place or self.command.startswith(("examine ", "slice ")):
            return self.view.place
        there = not self.refused or self.command.startswith(GO) or PUT.fullmatch(self.command)  # it may be closed
        return place_of(self.command) if there else ""

    @property
    def unseen(self) -> tuple[str, ...]:
        """List the places in front of the agent whose content the answer does not show."""
        return self.view.facing or ((self.here,) if self.refused and self.command.startswith(GO) else ())


def answered(command: str, text: str) -> Answered:
    """Read the answer to a command; "" for the first view, or for an answer that is not known and counts as done."""
    return Answered(command, text, read_view(text))


class Notes:
    """A Brief State and the operations that made it."""

    def __init__(self, state: BriefState) -> None:
        self.state, self.ops = state, list[Op]()

    def do(self, op: Op) -> None:
        self.state = self.state.apply(op)
        self.ops.append(op)

    def put(self, key: str, value: str) -> None:
        """Set a belief; "" removes it."""
        known = self.state.belief(key)
        if value != (known or ""):
            self.do(Delete(key) if not value else Create(key, value) if known is None else Update(key, value))

    def places(self, key: str) -> list[str]:
        """List the places that a belief names."""
        known = self.state.belief(key)
        return known.split(BETWEEN) if known else []

    def put_places(self, key: str, places: Sequence[str]) -> None:
        """Set a list of places: as many of the first as fit."""
        while len(BETWEEN.join(places)) > MAX_CHARACTERS:
            places = places[:-1]
        self.put(key, BETWEEN.join(places))

    def drop(self, key: str, place: str, times: int = 1) -> None:
        """Remove the first occurrences of a place from a list, as many as there are and at most `times`."""
        for _ in range(min(times, self.places(key).count(place))):
            self.do(Delete(key, place))


@dataclass(frozen=True, slots=True)
class Errands:
    """What is due in an errand, according to M.

    Args:
        memory: entries; those of successful episodes of the errand's kind show its routine.
        scene: the goal's scene, "" without one.
        leads: returns where M's entries met a need ("find mug"), given a text that names the scene's places.
        by_kinds: things are in alike places in all scenes, so M tells kinds of places.
    """

    errand: Errand
    memory: tuple[MemoryEntry, ...]
    scene: str
    leads: Callable[[str, str], Sequence[Lead]]
    by_kinds: bool = True

    # -- the Brief State ----------------------------------------------------------------------------------------------

    def note(self, notes: Notes, last: Answered) -> None:
        """Note the plan, what the last command did, and what the view shows."""
        if not notes.state.current:
            notes.do(Create(PLAN, "; ".join(self._plan(notes.state))))
        if (places := listed_places(last.text)) and not last.command:
            self._list(notes, last.text, places)
        self._note_example(notes)
        if last.command and not last.refused:
            self._note_done(notes, last.command)
        elif last.command:
            self._note_refused(notes, last)
        holding = notes.state.belief(HOLDING) or ""
        if notes.state.current == f"find {kind_of(holding)}":
            notes.do(Fold(f"hold {holding}"))
        if last.view.things is not None:
            self._note_seen(notes, last.view.place, last.view)

    def _plan(self, state: BriefState) -> list[str]:
        """List the subgoals; where all were done and the goal is not reached, those of one more thing."""
        if not state.completed:
            return self.errand.subgoals
        again = replace(self.errand, count=1).subgoals
        return again[1:] if kind_of(state.belief(HOLDING) or "") == self.errand.thing else again

    def _list(self, notes: Notes, text: str, places: Sequence[str]) -> None:
        """Note the scene's places, and where to look for things."""
        for key, listed in place_notes(text) if notes.state.belief(PLACES) is None else ():
            notes.put_places(key, listed.split(BETWEEN))
        for thing in self._things():
            in_memory = dict.fromkeys(lead.place for lead in self.leads(f"find {thing}", text))  # without duplicates
            if self.by_kinds:
                to_look = sorted(map(kind_of, in_memory), key=lambda kind: (kind in OPENABLE, kind))[:1]
            else:
                to_look = [place for place in in_memory if place in places][:MOST]
            notes.put_places(thing, to_look)

    def _note_example(self, notes: Notes) -> None:
        """Note the first example, unless one is noted."""
        scenes = [entry.provenance.scene or NAMELESS for entry, _ in self._routines()]
        if notes.state.belief(EXAMPLE) not in (scenes or [NONE]):
            notes.put(EXAMPLE, next(iter(scenes), NONE))

    def _things(self) -> list[str]:
        """List the kinds of things to look for."""
        return [self.errand.thing, *([self.errand.target] if self.errand.kind == LOOK else [])]

    def _note_done(self, notes: Notes, command: str) -> None:
        thing, current = self.errand.thing, notes.state.current
        if m := TAKE.fullmatch(command):
            notes.put(HOLDING, taken_thing(command))
            notes.drop(m["thing"], m["place"])
            if current == f"find {m['thing']}":
                notes.do(Fold(command))
        elif m := PUT.fullmatch(command):
            notes.put(HOLDING, "")
            if current == f"put {thing} in {m['kind']}" and m["thing"] == thing:
                notes.do(Fold(command))
                if notes.state.current:  # another one goes to the same place
                    notes.put_places(self.errand.target, [m["place"]])
            elif m["thing"] == thing and not current.startswith("find "):
                left = [f"find {thing}", current, *notes.state.pending]
                notes.do(Update(PLAN, "; ".join(left)))
                notes.put_places(thing, [m["place"], *_without_one(notes.places(thing), m["place"])])
        elif (m := TREAT.match(command)) and current == f"{m['verb']} {m['thing']}":
            notes.do(Fold(command))

    def _note_refused(self, notes: Notes, last: Answered) -> None:
        """Drop a place that cannot even be looked at. Other refused commands may have been given elsewhere."""
        place = place_of(last.command)
        if not last.command.startswith("examine ") or not place:
            return
        for key in (*self._things(), self.errand.target, PLACES, UNSEARCHED):
            notes.drop(key, place, times=len(notes.places(key)))

    def _note_seen(self, notes: Notes, place: str, view: View) -> None:
        """Remove the place from those not searched and from the lists of things that are not there; add it to those of
        things that are there, except of a single one that is taken now."""
        notes.drop(UNSEARCHED, place)
        for name in self._things():
            listed, there = notes.places(name), len(view.of_kind(name))
            if place == self._delivered(notes.state):
                there = 0
            count = min(there, self.errand.count)
            taken_now = self.errand.count == 1 and notes.state.current == f"find {name}"
            if count > listed.count(place) and not taken_now:
                notes.put_places(name, [place] * count + [other for other in listed if other != place])
            notes.drop(name, place, times=listed.count(place) - count)

    def _delivered(self, state: BriefState) -> str:
        """Return the place that received the first of two things; "" if none did."""
        if self.errand.count == 1:
            return ""
        put = next((m for done in state.completed if (m := PUT.fullmatch(done))), None)
        return put["place"] if put else ""

    # -- what is due ---------------------------------------------------------------------------------------------------

    def due(self, notes: Notes, last: Answered) -> Due | None:
        """Return the command that is due and why; None where M supports none."""
        verb, _, rest = notes.state.current.partition(" ")
        cited = self._cited(notes.state.belief(EXAMPLE) or NONE, SHOWN_BY.get(verb, verb))
        if not cited:
            return None
        holding = notes.state.belief(HOLDING) or ""
        match verb:
            case "find":
                return self._find(notes, last, rest, holding)
            case "put":
                return self._put(notes, last, holding, cited)
            case "use":
                lamps = last.view.of_kind(rest) or self._lamp_seen_here(notes, last, rest)
                return Due(f"use {lamps[0]}", cited) if lamps else self._seek(notes, last, rest)
        return self._treat(notes, last, verb, holding, cited)

    def _lamp_seen_here(self, notes: Notes, last: Answered, lamp: str) -> list[str]:
        """Name the lamp that an earlier view of this place showed, which the last answer does not show."""
        seen = (
            last.view.things is None and last.here in notes.places(lamp) and last.here not in notes.places(UNSEARCHED)
        )
        return [f"{lamp} 1"] if seen and last.here and not last.view.closed and not last.refused else []

    def _find(self, notes: Notes, last: Answered, thing: str, holding: str) -> Due | None:
        if holding and last.here and not last.view.closed and not (last.refused and PUT.fullmatch(last.command)):
            return Due(self._put_command(holding, last.here), f"hands must be free for the {thing}")
        found = last.view.of_kind(thing)
        if found and last.here != self._delivered(notes.state):
            return Due(f"take {found[0]} from {last.here}", f"the {found[0]} is in view")
        return self._seek(notes, last, thing)

    def _seek(self, notes: Notes, last: Answered, thing: str) -> Due | None:
        """Go on searching: open the place here, or go to the next that M names or that was not searched yet."""
        to_look, unsearched, here = notes.places(thing), notes.places(UNSEARCHED), last.here
        named = [name for name in to_look if kind_of(name) != name]  # the others are kinds of places
        if here in (*named, *unsearched) and last.view.closed:
            return Due(f"{OPEN}{here}", "it is closed")
        unknown = [place for place in last.unseen if place in (*named, *unsearched)]
        if unknown or (here in named and last.view.things is None):
            unknown = unknown or [here]
            return Due(f"examine {unknown[0]}", f"what is in {unknown[0]} is not known")
        of_kinds = [place for place in unsearched if kind_of(place) in to_look]
        place = next((place for place in (*named, *of_kinds, *unsearched) if place != here), "")
        if not place:
            return None
        if place in named:
            return Due(f"{GO}{place}", self._why_there(thing, place))
        kind = kind_of(place)
        before, not_seen = f"the {thing} was in {kind} before", f"the {thing} was not seen so far"
        return Due(f"{GO}{place}", before if kind in to_look else not_seen)

    def _treat(self, notes: Notes, last: Answered, verb: str, holding: str, cited: str) -> Due | None:
        used = {kind_of(step.place) for _, steps in self._routines() for step in steps if step.verb == verb}
        if not holding or not used:
            return None
        here = next((place for place in (last.here, *last.view.facing) if kind_of(place) in used), "")
        place = here or next((place for place in notes.places(PLACES) if kind_of(place) in used), "")
        why = _compared(cited, wanted=kind_of(place), here=here or last.here)
        if here:
            return Due(f"{verb} {holding} with {here}", why)
        return Due(f"{GO}{place}", why) if place else None

    def _put(self, notes: Notes, last: Answered, holding: str, cited: str) -> Due | None:
        target, here, noted = self.errand.target, last.here, notes.places(self.errand.target)
        fits = lambda place: place in noted if noted else kind_of(place) == target
        if unknown := next(filter(fits, last.unseen), ""):
            return Due(f"examine {unknown}", f"whether {unknown} is open is not known")
        if last.view.closed and here:  # wherever it is: then a compiler need not compare two places
            return Due(f"{OPEN}{here}", "it is closed")
        why = _compared(cited, wanted=noted[0] if noted else target, here=here)
        if not fits(here):
            place = next(filter(fits, noted or notes.places(PLACES)), "")
            return Due(f"{GO}{place}", why) if holding and place else None
        if last.refused and PUT.fullmatch(last.command):
            return Due(f"{OPEN}{here}", "it is closed")
        return Due(self._put_command(holding, here), why) if holding else None

    def _put_command(self, thing: str, place: str) -> str:
        """Write the command that puts a thing down in the words of M's episodes: "move X to Y" or "put X in/on Y"."""
        done = (action for entry in self.memory for action in entry.provenance.actions)
        put = next((m for action in done if (m := PUT.fullmatch(action))), None)
        return f"{put['verb']} {thing} {put['link']} {place}" if put else f"move {thing} to {place}"

    # -- what M shows --------------------------------------------------------------------------------------------------

    def _routines(self) -> list[tuple[MemoryEntry, list[Step]]]:
        """List M's successful episodes of this kind of errand, with their steps; those with all steps come first."""
        successes = [entry for entry in self.memory if entry.provenance.success]
        routines = [(entry, steps_of(entry.provenance.actions)) for entry in successes]
        of_kind = [(entry, steps) for entry, steps in routines if kind_of_episode(steps) == self.errand.kind]
        verbs = {SHOWN_BY.get(verb, verb) for verb, *_ in map(str.split, self.errand.subgoals)}
        return sorted(of_kind, key=lambda routine: not verbs <= {step.verb for step in routine[1]})

    def _cited(self, example: str, verb: str) -> str:
        """Say what the example did before such a step; "" if it shows none."""
        of_example = (steps for entry, steps in self._routines() if (entry.provenance.scene or NAMELESS) == example)
        verbs = [step.verb for step in next(of_example, ())]
        if verb not in verbs:
            return ""
        at = verbs.index(verb)
        return f"in {example} {f'after {verbs[at - 1]}' if at else 'first'} came {verb}"

    def _why_there(self, thing: str, place: str) -> str:
        """Say that the thing was seen there, or cite the entry of this scene that found it there."""
        leads = [] if self.by_kinds else self.leads(f"find {thing}", place)
        lead = next((lead for lead in leads if lead.fact.place == place and lead.scene == self.scene), None)
        here = f" in {lead.scene}" if lead and lead.scene else ""
        return f"the {thing} was in {place}{here}" if lead else f"the {thing} was seen in {place}"


def _compared(cited: str, wanted: str, here: str) -> str:
    """Add the place that is wanted and the one in front of the agent to a reason: whether they agree decides what is
    due, and a small compiler compares them more easily side by side."""
    return f"{cited}: for {wanted}" + (f", here is {here}" if here else "")


def _without_one(places: Sequence[str], place: str) -> list[str]:
    """Remove the first occurrence of a place."""
    left = list(places)
    if place in left:
        left.remove(place)
    return left
