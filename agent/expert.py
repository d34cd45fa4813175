"""The expert teacher: compiler and executor based on the environment's expert plan. Offline and deterministic.

The plan gives the next need. Guidance cites M alone: for a missing thing, it names the place where the entries found
such a thing. Entries of this scene come first, with their places' names, in the order of M. Entries of other scenes
follow, by kind of place, translated to this scene's names (one entry suffices if none is of this scene; otherwise two
must agree). A place that view, history or Brief State rule out is skipped. When all are ruled out, the guidance says
so once.

The Brief State notes what places lack. Where scenes share places, it also lists the places to try, best first: they are
noted at the first view, which lists the scene's places, and a place that lacks the thing leaves the list. So the next
place is always the first of the list. In environments with recipes, the teacher gives the plan's next command if past
episodes did the same at the same point. `envs.command_reader` parses commands and views.

The teacher does not use pictures: soft tokens learn from the action loss what only the view shows.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Literal

from agent.leads import Lead, answers, find_leads, find_random_lead, of_scene, rationales, scene_of
from agent.recipe_guidance import because, pairs_after, past_successes, step_pairs, words_of
from agent.records import Episode, EpisodeContext
from compiler.brief_state import MAX_ITEMS, PLAN, BriefState, Create, Delete, Fold, Op, Update
from compiler.language import Emission, render
from compiler.records import Compilation, CompileRequest
from envs.command_reader import CommandReader, Fact
from envs.household.command_reader import first_taken
from executor.prompt import ExecutorRequest
from executor.records import PAPER_VIEW, Action, ExecutorView, Grounding
from memory.entry import MemoryEntry

MAYBE, NOWHERE = "maybe ", "not where memory says"  # beliefs about a thing: places to try, or none left
MOST = 6  # places that the Brief State lists for a thing


def entry_for_goal(goal: str, memory: Sequence[MemoryEntry]) -> MemoryEntry | None:
    """Return the entry of the goal's scene whose episode took a thing that the goal names."""
    for word in re.findall(r"[a-z]+", goal.lower()):
        for entry in memory:
            fact = first_taken(entry.provenance.actions)
            if fact and fact[0] == word and goal.startswith(f"in {entry.provenance.scene}: "):
                return entry
    return None


@dataclass(frozen=True, slots=True)
class Search:
    """A need, and the places where it may be met according to M."""

    need: str  # "find mug"
    places: tuple[str, ...]  # not searched yet, best first
    named: tuple[str, ...]  # named by this scene's entries for exactly this need, searched or not
    ruled_out: frozenset[str]  # supported by M, but searched without success


@dataclass(slots=True)
class ExpertTeacher:
    """A `Compiler` that knows the expert's plan. `entry="random"` is the control that cites a wrong entry's place."""

    needs_expert: ClassVar[bool] = True
    batched: ClassVar[bool] = False  # planning may take the environment seconds
    entry: Literal["right", "random"] = "right"
    seed: int = 0
    reader: CommandReader = field(default_factory=CommandReader)

    def compile(self, requests: Sequence[CompileRequest], contexts: Sequence[EpisodeContext] = ()) -> list[Compilation]:
        """Write one emission per request, in order."""
        emissions = [self.emission(r, context.plan) for r, context in zip(requests, contexts, strict=True)]
        return [Compilation(render(e), e, request=r) for e, r in zip(emissions, requests, strict=True)]

    def rationales(self, episodes: Sequence[Episode]) -> list[str]:
        """Explain why each episode succeeded, or return how it stopped."""
        return rationales(self.reader, episodes)

    def search(self, request: CompileRequest, plan: Sequence[str] | None) -> Search | None:
        """Return what the plan looks for at this step, and where it may be; None if it looks for nothing."""
        request = self._related(request)
        if (need := self.reader.need(plan or [])) is None:
            return None
        leads = self._leads(request, need.need)
        own = (lead for lead in leads if lead.fact.need == need.need and lead.scene == scene_of(request.goal))
        left = tuple(lead.place for lead in self._left(request, need.need, leads))
        seen = {*self.reader.searched(request.history), self.reader.place_without(need.need, request.observation)}
        supported = [fact.place for _, fact in answers(self.reader, request.memory, need.need)]
        vain = (
            p for p in seen.difference(left) if any(p == s or p in self.reader.similar_places(s, p) for s in supported)
        )
        return Search(need.need, left, tuple(lead.place for lead in own), frozenset(vain))

    def emission(self, request: CompileRequest, plan: Sequence[str] | None) -> Emission:
        """Write the emission for a step with this expert plan."""
        request, plan = self._related(request), plan or []
        need = self.reader.need(plan)
        ops = list(self._noted(request, request.state, plan, need)) if request.state is not None else []
        if need is not None:
            return self._searching(request, plan, need.need, ops)
        guidance = self._next_step(request, plan) if self.entry == "right" else None
        return Emission(*(guidance or ("", "")), tuple(ops))

    def _related(self, request: CompileRequest) -> CompileRequest:
        """Leave out entries of M that are not related to the goal."""
        related = (e for e in request.memory if self.reader.related(request.goal, e.provenance.goal))
        return replace(request, memory=tuple(related))

    def _searching(self, request: CompileRequest, plan: Sequence[str], need: str, ops: list[Op]) -> Emission:
        """Name the best place that is not ruled out; nothing if the agent is there, or meets the need now."""
        right = self.entry == "right"
        random_lead = partial(find_random_lead, self.reader, request.goal, request.memory, seed=self.seed)
        leads = self._leads(request, need) if right else random_lead(need, request.observation)
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

    # -- facts from M --------------------------------------------------------------------------------------------------

    def _leads(self, request: CompileRequest, need: str) -> list[Lead]:
        """List the places where the need is met according to M, best first."""
        return find_leads(self.reader, request.goal, request.memory, need, self._known_places(request, need))

    def _known_places(self, request: CompileRequest, need: str) -> str:
        """Return a text that names this scene's places: the first view, later the Brief State's list."""
        if not request.history:
            return request.observation
        listed = self._listed(request, need)
        return request.observation if listed is None else ", ".join(listed)

    def _next_step(self, request: CompileRequest, plan: Sequence[str]) -> tuple[str, str] | None:
        """Return (the plan's next command, what past episodes did here), if most did a command of this shape.

        Past episodes are aligned by the recipe's last step, word for word or else by its shape. A command with words
        that neither goal, view nor entries contain is not revealed.
        """
        if not self.reader.follows_recipes or not self.reader.steps(plan[:1]) or plan[0] in request.history[-1:]:
            return None
        step, last = plan[0], ["", *self.reader.steps(request.history)]
        episodes = [past.actions for past in past_successes(request.goal, request.memory)]
        shape, after = self.reader.shape, pairs_after(self.reader, step_pairs(self.reader, episodes), last[-1])
        votes = Counter(shape(following) for _, following in after)
        if not after or votes[shape(step)] < max(votes.values()):
            return None
        pair = min((p for p in after if shape(p[1]) == shape(step)), key=lambda p: p[1] != step)
        seen = words_of(" ".join((pair[1], request.goal, request.observation, *request.history)))
        return (step, because(pair)) if words_of(step) <= seen else None

    # -- the Brief State ----------------------------------------------------------------------------------------------

    def _noted(
        self, request: CompileRequest, state: BriefState, plan: Sequence[str], need: Fact | None
    ) -> Iterator[Op]:
        """Update subgoals, places to try (at the first view), and what a place lacks or no longer lacks."""
        yield from self._progress(request, state, plan)
        if not request.history:
            yield from self._to_try(request, state, plan)
        place, thing = self.reader.put_place(request.history[-1]) if request.history else ("", "")
        if place and f"no {thing}" in _noted_of(state, place):
            yield Delete(place)
        if need is not None and (place := self.reader.place_without(need.need, request.observation)):
            missing, known = f"no {self.reader.thing(need.need)}", _noted_of(state, place)
            if place not in (self._listed(request, need.need) or ()) and missing not in known:
                yield Update(place, ", ".join((*known, missing))) if known else Create(place, missing)
        yield from self._not_here(request, plan, need)

    def _not_here(self, request: CompileRequest, plan: Sequence[str], need: Fact | None) -> Iterator[Op]:
        """Remove the place in view from the lists of all things that it lacks."""
        for other in self._needs(plan):
            place, listed = self.reader.place_without(other, request.observation), self._listed(request, other) or ()
            if place not in listed:
                continue
            left = [tried for tried in listed if tried != place]
            if left or need is None or other != need.need:  # else `_given_up` writes the note
                yield Update(self.reader.thing(other), MAYBE + ", ".join(left) if left else NOWHERE)

    def _progress(self, request: CompileRequest, state: BriefState, plan: Sequence[str]) -> list[Op]:
        """Synchronise the state's subgoals with the rest of the plan."""
        mine = (entry.provenance.actions for entry in request.memory if of_scene(request.goal, entry))
        shown = frozenset(command for actions in mine for command in actions)
        left = self.reader.subgoals(plan, request.goal, shown)[:MAX_ITEMS]
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
        """Note the places where M locates the plan's needs, since later views do not list places."""
        for need in self._needs(plan) if self.reader.scenes_alike else ():
            places = [lead.place for lead in self._leads(request, need)]
            if places and state.belief(self.reader.thing(need)) is None:
                yield Create(self.reader.thing(need), MAYBE + ", ".join(places[:MOST]))

    def _needs(self, plan: Sequence[str]) -> list[str]:
        """List the plan's needs, each once."""
        return list(dict.fromkeys(fact.need for fact in self.reader.facts(plan)))

    def _listed(self, request: CompileRequest, need: str) -> tuple[str, ...] | None:
        """Return the state's list of places to try; None without one."""
        noted = request.state.belief(self.reader.thing(need)) if request.state is not None else None
        return tuple(noted.removeprefix(MAYBE).split(", ")) if noted and noted.startswith(MAYBE) else None

    def _to_choose_from(self, request: CompileRequest, need: str) -> tuple[str, ...] | None:
        """Return the places that a lead may name; None for the control, whose leads are random places."""
        return self._listed(request, need) if self.entry == "right" else None

    def _left(self, request: CompileRequest, need: str, leads: Sequence[Lead]) -> list[Lead]:
        """Leave out the places that view, Brief State or (without a list of places to try) history rule out. History
        proves a visit, not that nothing was found, so the list takes precedence."""
        been = self.reader.searched(request.history) if self._to_choose_from(request, need) is None else ()
        return [lead for lead in leads if lead.place not in been and not self._lacks(request, need, lead.place)]

    def _lacks(self, request: CompileRequest, need: str, place: str) -> bool:
        """Return whether view or Brief State say that the place does not meet the need."""
        if place == self.reader.place_without(need, request.observation):
            return True
        if (listed := self._to_choose_from(request, need)) is not None:
            return place not in listed
        return f"no {self.reader.thing(need)}" in _noted_of(request.state, place)

    def _given_up(self, request: CompileRequest, need: str, ops: Sequence[Op]) -> Emission:
        """Say once that all places in M have been tried, and note it in the Brief State."""
        thing = self.reader.thing(need)
        known = request.state.belief(thing) if request.state is not None else NOWHERE
        if known == NOWHERE:
            return Emission(ops=tuple(ops))
        note = Create(thing, NOWHERE) if known is None else Update(thing, NOWHERE)
        return Emission("search elsewhere", f"memory knows no other place for {thing}", (*ops, note))


def _noted_of(state: BriefState | None, place: str) -> tuple[str, ...]:
    """List what a place lacks, according to the state."""
    known = state.belief(place) if state is not None else None
    return tuple(known.split(", ")) if known else ()


@dataclass(slots=True)
class ExpertExecutor:
    """Acts on the expert's plan. `Action.text` is always the expert's own choice: the label of the SFT row.

    Randomness depends on seed, goal and history alone: an episode does not depend on those played beside it.

    Args:
        noise: probability of a detour instead, so that rows cover states off the shortest path.
        obeys: choose the guidance's command where it is possible. The plan knows where things are, M only where they
            have been: labels that disagree with guidance would ask soft tokens for what M does not contain.
    """

    needs_expert: ClassVar[bool] = True
    batched: ClassVar[bool] = False
    noise: float = 0.0
    seed: int = 0
    obeys: bool = False
    accepts_soft: bool = False
    sees_images: bool = False
    reads: ExecutorView = PAPER_VIEW

    def act(self, requests: Sequence[ExecutorRequest], contexts: Sequence[EpisodeContext] = ()) -> list[Action]:
        """Choose one action per request, in order."""
        return [self._act(request, context.plan) for request, context in zip(requests, contexts, strict=True)]

    def _act(self, request: ExecutorRequest, plan: Sequence[str] | None) -> Action:
        if plan is None and not request.history:
            raise ValueError("the environment's expert knows no way to the goal")  # nothing to learn from this episode
        guided = request.delivered.guidance
        label = guided if self.obeys and guided in (request.admissible or ()) else plan[0] if plan else "look"
        detours = [c for c in request.admissible or () if c.startswith("go to ") and c != label]
        chance = random.Random(f"{self.seed} {request.goal} {request.history}")
        wander = detours and chance.random() < self.noise
        action = chance.choice(detours) if wander else label
        return Action(action, Grounding.CHOICE, label)
