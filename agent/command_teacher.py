"""A teacher that says what to do next at every step that M supports, from nothing but M, b_t, o_t and past commands.

Level `command` gives the next command: to a place that M names, or that was not searched yet; or the next step of the
routine that M's entries of this kind of task show. Level `subgoal` gives the subgoal it serves ("cool mug 1", "find mug
in cabinet 6"). Where M has nothing of the kind, it is silent. It never asks the environment's expert, so it plays in
environments without one. `agent.expert.ExpertTeacher` is the teacher of level `place`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Literal

from agent.errand_guidance import GO, OPEN, Due, Errands, Notes, answered
from agent.expert import ExpertTeacher
from agent.leads import Lead, find_facts, find_random_lead, rationales, scene_of
from agent.recipe_guidance import recipe_emission
from agent.records import Episode, EpisodeContext
from compiler.brief_state import BriefState
from compiler.language import Emission, render
from compiler.records import Compilation, CompileRequest
from envs.command_reader import CommandReader, TeacherLevel
from envs.household.command_reader import HouseholdReader
from envs.household.errands import HOLDING, Errand, read_errand


@dataclass(slots=True)
class CommandTeacher:
    """A `Compiler` that gives subgoals or commands.

    Args:
        level: what the guidance says.
        entry: where M says that things are: as it says, by a random entry, or not at all (controls).
        silence: share of the steps at which the agent is on its way already where nothing is said.
    """

    needs_expert: ClassVar[bool] = False  # the loop passes contexts without plan
    batched: ClassVar[bool] = False
    level: Literal["subgoal", "command"] = "command"
    entry: Literal["right", "random", "none"] = "right"
    seed: int = 0
    reader: CommandReader = field(default_factory=CommandReader)
    silence: float = 0.0

    def compile(self, requests: Sequence[CompileRequest], contexts: Sequence[EpisodeContext] = ()) -> list[Compilation]:
        """Write one emission per request, in order."""
        emissions = [self.emission(r, context.task_id) for r, context in zip(requests, contexts, strict=True)]
        write = partial(render, guidance_last=True)  # what is due follows from the notes
        return [Compilation(write(e), e, request=r) for e, r in zip(emissions, requests, strict=True)]

    def rationales(self, episodes: Sequence[Episode]) -> list[str]:
        """Explain why each episode succeeded, or return how it stopped."""
        return rationales(self.reader, episodes)

    def emission(self, request: CompileRequest, task_id: str = "") -> Emission:
        """Write the emission for a step."""
        related = (e for e in request.memory if self.reader.related(request.goal, e.provenance.goal))
        request = replace(request, memory=tuple(related))
        if isinstance(self.reader, HouseholdReader):
            said, on_its_way = self._errand(request)
        else:
            said = recipe_emission(self.reader, request, self.entry, self.seed)
            on_its_way = bool(self.reader.steps([said.guidance]))
        drawn = random.Random(f"{self.seed} {task_id} {len(request.history)}").random()
        return Emission(ops=said.ops) if on_its_way and request.history and drawn < self.silence else said

    def _errand(self, request: CompileRequest) -> tuple[Emission, bool]:
        """Write the emission for a household errand; return whether the agent is where the due command acts."""
        errand = read_errand(request.goal)
        if errand is None:
            return Emission(), False
        state = request.state
        notes = Notes(state or BriefState(request.goal))
        scene, by_kinds = scene_of(request.goal), self.reader.scenes_alike
        errands = Errands(errand, request.memory, scene, self._leads(request), by_kinds)
        if state is None:  # past answers are not known: every command counts as done
            for command in ("", *request.history[:-1]):
                errands.note(notes, answered(command, ""))
        last = answered(request.history[-1] if request.history else "", request.observation)
        errands.note(notes, last)
        due = errands.due(notes, last)
        ops = tuple(notes.ops) if state is not None else ()
        if due is None:
            return Emission(ops=ops), False
        guidance = due.command if self.level == "command" else subgoal_words(notes, errand, due)
        return Emission(guidance, due.reason, ops), due.at_hand

    def _leads(self, request: CompileRequest) -> Callable[[str, str], Sequence[Lead]]:
        """Return the function that lists where M's entries met a need."""
        goal, memory = request.goal, request.memory
        if self.entry == "right":
            return partial(find_facts, self.reader, goal, memory)
        if self.entry == "random":
            return partial(find_random_lead, self.reader, goal, memory, seed=self.seed)
        return no_leads


def no_leads(need: str, known_places: str) -> list[Lead]:
    """Name no place."""
    return []


def subgoal_words(notes: Notes, errand: Errand, due: Due) -> str:
    """Name the current subgoal with the thing in hand, or with the place where to look."""
    current = notes.state.current
    if current.startswith(("find ", "use ")):
        place = due.command.removeprefix(GO).removeprefix(OPEN)
        return f"{current} in {place}" if place != due.command else current
    return current.replace(errand.thing, notes.state.belief(HOLDING) or errand.thing, 1)


@dataclass(frozen=True, slots=True)
class Teaching:
    """How the teacher without a model guides (`teacher_level` and `teacher_silence` of collect and eval)."""

    level: TeacherLevel = "place"
    silence: float = 0.0


NAMES_PLACES = Teaching()


def load_teacher(
    reader: CommandReader,
    teaching: Teaching = NAMES_PLACES,
    seed: int = 0,
    entry: Literal["right", "random", "none"] = "right",
) -> ExpertTeacher | CommandTeacher:
    """Create the teacher of a level; without places, level `place` becomes `command`.

    Raises:
        ValueError: the reader does not support the level.
    """
    level = "command" if teaching.level == "place" and entry == "none" else teaching.level
    if level not in reader.levels:
        raise ValueError(f"teacher_level {level}: {type(reader).__name__} supports {', '.join(reader.levels)}")
    if level == "place" and entry != "none":
        return ExpertTeacher(entry, seed, reader)
    return CommandTeacher("subgoal" if level == "subgoal" else "command", entry, seed, reader, teaching.silence)
