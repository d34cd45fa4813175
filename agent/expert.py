"""The expert teacher: plays compiler (and executor) from the environment's own expert plan. Offline and deterministic.

The plan says what is needed next; what is said about it comes from M alone. While something is on its way to be found,
the guidance names the place where the entries found its like: in this scene by name, in the order of M, then in other
scenes by kind of place, as this scene names it (one entry's word counts where none of this scene has any, else two have
to agree). A place that view, history or Brief State rule out is passed over; when all are, that is said
once. The Brief State keeps what places lack; and where scenes are alike the
places that are to be tried, best first. They are noted at the first view, which lists the scene's places, and one that
lacks the thing leaves the list, so that to choose is to take the first of it. Where an environment has recipes, the
plan's next command is said if past episodes gave its like at the same point. How commands and views read is the
environment's own matter (`envs.trajectories`).

It does not look at pictures: what only the view shows is left to the soft tokens, which learn it from the action loss.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import ClassVar, Literal

from agent.records import Episode
from compiler.brief_state import MOST as MOST_SUBGOALS
from compiler.brief_state import PLAN, BriefState, Create, Delete, Fold, Op, Update
from compiler.language import Emission, render
from compiler.records import Compilation, CompileRequest
from envs.household.trajectories import taken
from envs.trajectories import Fact, TrajectoryReader
from executor.prompt import ExecutorRequest
from executor.records import PAPER, Action, Grounding, Reads
from memory.entry import MemoryEntry

MAYBE, NOWHERE = "maybe ", "not where memory says"  # what the Brief State notes of a thing: places to try, or none left
MOST = 6  # places that are noted of a thing


def of_scene(goal: str, entry: MemoryEntry) -> bool:
    """Tell whether an entry is of the scene that the goal states, or of an environment without scenes."""
    return not entry.provenance.scene or goal.startswith(f"in {entry.provenance.scene}: ")


def right_entry(goal: str, memory: Sequence[MemoryEntry], thing: str) -> MemoryEntry | None:
    """Find the entry that answers "where is `thing`?": same scene as the goal's, and it took a `thing`."""
    for entry in memory:
        fact = taken(entry.provenance.actions)
        if fact and fact[0] == thing and goal.startswith(f"in {entry.provenance.scene}: "):
            return entry
    return None


def entry_for_goal(goal: str, memory: Sequence[MemoryEntry]) -> MemoryEntry | None:
    """Find the right entry for a goal whose words name its object."""
    words = re.findall(r"[a-z]+", goal.lower())
    return next((e for word in words if (e := right_entry(goal, memory, word))), None)


@dataclass(frozen=True, slots=True)
class _Lead:
    """A place worth trying, and the entry's fact that speaks for it."""

    place: str
    scene: str
    fact: Fact


@dataclass(frozen=True, slots=True)
class Search:
    """What is on its way to be found, and where M says that it may be."""

    need: str  # "find mug"
    places: tuple[str, ...]  # that are left, best first
    named: tuple[str, ...]  # all that this scene's entries name for this very need, also where it was looked in vain
    ruled_out: frozenset[str]  # that M speaks for, too, and that were looked into in vain


@dataclass(slots=True)
class ExpertTeacher:
    """A `Compiler` that knows the expert's plan. `entry="random"` is the control that cites a wrong entry's place."""

    batched: ClassVar[bool] = False  # the plan may take its environment seconds
    entry: Literal["right", "random"] = "right"
    seed: int = 0
    reader: TrajectoryReader = field(default_factory=TrajectoryReader)

    def compile(self, requests: Sequence[CompileRequest]) -> list[Compilation]:
        made = [self.emission(request) for request in requests]
        return [Compilation(render(e), e, request=r) for e, r in zip(made, requests, strict=True)]

    def rationales(self, episodes: Sequence[Episode]) -> list[str]:
        """Say why each episode succeeded, or how it stopped."""
        return [
            self.reader.rationale(episode.scene, [step.action for step in episode.steps])
            if episode.success
            else str(episode.stop_reason)
            for episode in episodes
        ]

    def search(self, request: CompileRequest) -> Search | None:
        """Say what is looked for at this step and what is known of where; None where nothing is."""
        request, plan = self._read(request)
        if (need := self.reader.need(plan)) is None:
            return None
        leads = self._leads(request, need.need)
        own = (lead for lead in leads if lead.fact.need == need.need and lead.scene == _scene(request.goal))
        left = tuple(lead.place for lead in self._left(request, need.need, leads))
        seen = {*self.reader.searched(request.history), self.reader.lacking(need.need, request.observation)}
        told = [fact.place for _, fact in self._answers(request, need.need)]
        vain = (p for p in seen.difference(left) if any(p == t or p in self.reader.likes(t, p) for t in told))
        return Search(need.need, left, tuple(lead.place for lead in own), frozenset(vain))

    def emission(self, request: CompileRequest) -> Emission:
        request, plan = self._read(request)
        need = self.reader.need(plan)
        ops = list(self._noted(request, request.state, plan, need)) if request.state is not None else []
        if need is not None:
            return self._searching(request, plan, need.need, ops)
        guidance = self._next_step(request, plan) if self.entry == "right" else None
        return Emission(*(guidance or ("", "")), tuple(ops))

    def _read(self, request: CompileRequest) -> tuple[CompileRequest, Sequence[str]]:
        """Leave out entries of M that say nothing about the goal; and ask for the expert's plan."""
        related = (e for e in request.memory if self.reader.related(request.goal, e.provenance.goal))
        plan = (request.expert() if request.expert else None) or []
        return replace(request, memory=tuple(related)), plan

    def _searching(self, request: CompileRequest, plan: Sequence[str], need: str, ops: list[Op]) -> Emission:
        """Name the best place that is not ruled out; nothing where the agent stands there, or meets the need now."""
        right = self.entry == "right"
        leads = self._leads(request, need) if right else self._random_lead(request, need)
        left = self._left(request, need, leads)
        meets = right and self.reader.subgoals(plan[:1], request.goal, frozenset(plan[:1]))
        if meets or (left and left[0].place in self.reader.here(request.observation, request.history)):
            return Emission(ops=tuple(ops))
        if not left:
            tried = right and leads and all(self._lacks(request, need, lead.place) for lead in leads)
            return self._given_up(request, need, ops) if tried else Emission(ops=tuple(ops))
        lead = left[0]
        reason = self.reader.sentence(lead.scene, lead.fact.need, lead.fact.place)
        return Emission(self.reader.way(lead.place), reason, tuple(ops))

    # -- what M says --------------------------------------------------------------------------------------------------

    def _leads(self, request: CompileRequest, need: str) -> list[_Lead]:
        """List the places where M says the need is met, best first: this scene's by name, in M's order (where there are
        no scenes, the ones that most entries speak for first); then those of the kinds that most of other scenes'
        entries name (beside this scene's own, only what two of them agree on: one alone says little)."""
        here, elsewhere = list[_Lead](), list[_Lead]()
        for entry, fact in self._answers(request, need):
            lead = _Lead(fact.place, entry.provenance.scene, fact)
            (here if of_scene(request.goal, entry) else elsewhere).append(lead)
        known = self._known_places(request, need)
        alike = [
            _Lead(place, lead.scene, lead.fact) for lead in elsewhere for place in self.reader.likes(lead.place, known)
        ]
        ranked = dict[str, _Lead]()
        own = here if _scene(request.goal) else _most_said(here)
        for lead in (*own, *_most_said(alike, at_least=2 if here else 1)):
            ranked.setdefault(lead.place, lead)
        return list(ranked.values())

    def _answers(self, request: CompileRequest, need: str) -> list[tuple[MemoryEntry, Fact]]:
        """List what the entries know of the need, each place once for each; where none does, of its kind."""
        told = [(entry, self.reader.facts(entry.provenance.actions)) for entry in request.memory]
        exact = any(fact.need == need for _, facts in told for fact in facts)
        kind = self.reader.broader(need)
        found = dict[tuple[int, str], tuple[MemoryEntry, Fact]]()
        for number, (entry, facts) in enumerate(told):
            for fact in facts:
                if fact.need == need or (not exact and kind and self.reader.broader(fact.need) == kind):
                    found.setdefault((number, fact.place), (entry, fact))
        return list(found.values())

    def _known_places(self, request: CompileRequest, need: str) -> str:
        """Return the text that names this scene's places: the first view, later what was noted of it."""
        if not request.history:
            return request.observation
        listed = self._listed(request, need)
        return request.observation if listed is None else ", ".join(listed)

    def _random_lead(self, request: CompileRequest, need: str) -> list[_Lead]:
        """Draw an entry that does not answer the need, and claim that its first place does."""
        others = [
            entry
            for entry in request.memory
            if (facts := self.reader.facts(entry.provenance.actions))
            and (all(f.need != need for f in facts) or not (self.reader.alike or of_scene(request.goal, entry)))
        ]
        if not others:
            return []
        entry = random.Random(f"{self.seed} {request.goal}").choice(others)
        place = self.reader.facts(entry.provenance.actions)[0].place
        if self.reader.alike and not of_scene(request.goal, entry):
            place = next(iter(self.reader.likes(place, request.observation)), "")
        return [_Lead(place, _scene(request.goal), Fact(need, place))] if place else []

    def _next_step(self, request: CompileRequest, plan: Sequence[str]) -> tuple[str, str] | None:
        """Give (the plan's next command, what past episodes did here), where they did its like at the same point.

        The point is the last step of the recipe that was taken, word for word in an entry or, where none has it, in
        its shape. Words that goal, view and entries do not hold stay unsaid.
        """
        if not self.reader.follows_recipes or not self.reader.steps(plan[:1]) or plan[0] in request.history[-1:]:
            return None
        step, last = plan[0], ["", *self.reader.steps(request.history)]
        pairs = [
            pair
            for entry in request.memory
            if entry.provenance.success and of_scene(request.goal, entry)
            for steps in [["", *self.reader.steps(entry.provenance.actions)]]
            for pair in pairwise(steps)
        ]
        shape = self.reader.shape
        after = [p for p in pairs if p[0] == last[-1]] or [p for p in pairs if shape(p[0]) == shape(last[-1])]
        votes = Counter(shape(following) for _, following in after)
        if not after or votes[shape(step)] < max(votes.values()):
            return None
        before, following = min((p for p in after if shape(p[1]) == shape(step)), key=lambda p: p[1] != step)
        seen = _words(" ".join((following, request.goal, request.observation, *request.history)))
        if not _words(step) <= seen:
            return None
        return step, f"after {before} came {following}" if before else f"it began with {following}"

    # -- what the Brief State says ------------------------------------------------------------------------------------

    def _noted(
        self, request: CompileRequest, state: BriefState, plan: Sequence[str], need: Fact | None
    ) -> Iterator[Op]:
        """Keep the state in step: subgoals, where to try (at the first view), what a place lacks and lacks no more."""
        yield from self._progress(request, state, plan)
        if not request.history:
            yield from self._to_try(request, state, plan)
        place, thing = self.reader.filled(request.history[-1]) if request.history else ("", "")
        if place and f"no {thing}" in _noted_of(state, place):
            yield Delete(place)
        if need is not None and (place := self.reader.lacking(need.need, request.observation)):
            missing, known = f"no {self.reader.thing(need.need)}", _noted_of(state, place)
            if place not in (self._listed(request, need.need) or ()) and missing not in known:
                yield Update(place, ", ".join((*known, missing))) if known else Create(place, missing)
        yield from self._not_here(request, plan, need)

    def _not_here(self, request: CompileRequest, plan: Sequence[str], need: Fact | None) -> Iterator[Op]:
        """Take the place in view from the lists of what it lacks, whatever is looked for now."""
        for other in self._needs(plan):
            place, listed = self.reader.lacking(other, request.observation), self._listed(request, other) or ()
            if place not in listed:
                continue
            left = [tried for tried in listed if tried != place]
            if left or need is None or other != need.need:  # else it is said that memory knows no other
                yield Update(self.reader.thing(other), MAYBE + ", ".join(left) if left else NOWHERE)

    def _progress(self, request: CompileRequest, state: BriefState, plan: Sequence[str]) -> list[Op]:
        """Keep the state's subgoals in step with what is left of the plan."""
        mine = (entry.provenance.actions for entry in request.memory if of_scene(request.goal, entry))
        shown = frozenset(command for actions in mine for command in actions)
        left = self.reader.subgoals(plan, request.goal, shown)[:MOST_SUBGOALS]
        known = [state.current, *state.pending] if state.current else []
        if not left:
            return []
        if not known:
            return [] if state.completed else [Create(PLAN, "; ".join(left))]
        done = len(known) - len(left)
        if done >= 0 and known[done:] == left:
            return [Fold(request.history[-1] if request.history else known[0])] * done
        return [Update(PLAN, "; ".join(left))]

    def _to_try(self, request: CompileRequest, state: BriefState, plan: Sequence[str]) -> Iterator[Op]:
        """Name the places where M says that what the plan needs may be: later views do not list this scene's."""
        for need in self._needs(plan) if self.reader.alike else ():
            places = [lead.place for lead in self._leads(request, need)]
            if places and state.belief(self.reader.thing(need)) is None:
                yield Create(self.reader.thing(need), MAYBE + ", ".join(places[:MOST]))

    def _needs(self, plan: Sequence[str]) -> list[str]:
        """List what the plan needs, each once."""
        return list(dict.fromkeys(fact.need for fact in self.reader.facts(plan)))

    def _listed(self, request: CompileRequest, need: str) -> tuple[str, ...] | None:
        """Return the places that the state says are still to be tried; None where it says nothing of the kind."""
        noted = request.state.belief(self.reader.thing(need)) if request.state is not None else None
        return tuple(noted.removeprefix(MAYBE).split(", ")) if noted and noted.startswith(MAYBE) else None

    def _to_choose_from(self, request: CompileRequest, need: str) -> tuple[str, ...] | None:
        """Return the list that a lead has to be on; the control's leads are random places, which stand on none."""
        return self._listed(request, need) if self.entry == "right" else None

    def _left(self, request: CompileRequest, need: str, leads: Sequence[_Lead]) -> list[_Lead]:
        """Leave out the places that history, view or Brief State speak against. History alone says that one was looked
        into, not that nothing was there: who wandered off after a find has to come back by himself."""
        been = self.reader.searched(request.history) if self._to_choose_from(request, need) is None else ()
        return [lead for lead in leads if lead.place not in been and not self._lacks(request, need, lead.place)]

    def _lacks(self, request: CompileRequest, need: str, place: str) -> bool:
        """Tell whether view or Brief State say that the place does not hold what is needed."""
        if place == self.reader.lacking(need, request.observation):
            return True
        if (listed := self._to_choose_from(request, need)) is not None:
            return place not in listed
        return f"no {self.reader.thing(need)}" in _noted_of(request.state, place)

    def _given_up(self, request: CompileRequest, need: str, ops: Sequence[Op]) -> Emission:
        """Say once that all places that M knows of have been tried; the Brief State keeps that it was said."""
        thing = self.reader.thing(need)
        known = request.state.belief(thing) if request.state is not None else NOWHERE
        if known == NOWHERE:
            return Emission(ops=tuple(ops))
        note = Create(thing, NOWHERE) if known is None else Update(thing, NOWHERE)
        return Emission("search elsewhere", f"memory knows no other place for {thing}", (*ops, note))


def _scene(goal: str) -> str:
    return goal.split(":")[0].removeprefix("in ") if goal.startswith("in ") else ""


def _noted_of(state: BriefState | None, place: str) -> tuple[str, ...]:
    """List what the state says that a place lacks."""
    known = state.belief(place) if state is not None else None
    return tuple(known.split(", ")) if known else ()


def _most_said(leads: Sequence[_Lead], at_least: int = 1) -> list[_Lead]:
    """Put the places that most leads name first, each once, with the first lead that names it; those of fewer than
    `at_least` are left out."""
    votes = Counter(lead.place for lead in leads)
    first = {lead.place: lead for lead in reversed(leads)}
    return [first[place] for place, n in votes.most_common() if n >= at_least]


def _words(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", text.lower()))


@dataclass(slots=True)
class ExpertExecutor:
    """Acts on the expert's plan; with probability `noise` it does something else instead, so that rows also cover
    states off the shortest path. `Action.text` is always the expert's own choice: the label.

    With `obeys` that choice is what guidance says, where it is a possible command. The plan knows where things are, M
    only where they have been: labels that go elsewhere than guidance would ask soft tokens for what nobody can read.

    Chance depends on seed, goal and history alone: an episode is the same whichever others are played beside it."""

    batched: ClassVar[bool] = False
    noise: float = 0.0
    seed: int = 0
    obeys: bool = False
    accepts_soft: bool = False
    sees_images: bool = False
    reads: Reads = PAPER

    def act(self, requests: Sequence[ExecutorRequest]) -> list[Action]:
        return [self._act(request) for request in requests]

    def _act(self, request: ExecutorRequest) -> Action:
        plan = request.expert() if request.expert else None
        if plan is None and not request.history:
            raise ValueError("the environment's expert knows no way to the goal")  # nothing to learn from this episode
        said = request.delivered.guidance
        label = said if self.obeys and said in (request.admissible or ()) else plan[0] if plan else "look"
        detours = [c for c in request.admissible or () if c.startswith("go to ") and c != label]
        chance = random.Random(f"{self.seed} {request.goal} {request.history}")
        wander = detours and chance.random() < self.noise
        action = chance.choice(detours) if wander else label
        return Action(action, Grounding.CHOICE, label, (), 0, 0)
