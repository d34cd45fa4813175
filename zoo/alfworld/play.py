"""Episodes of real ALFWorld games for training: a scripted executor, and the states of teacher and executors.

As in an evaluation, every task has K entries of the bank that the expert fills from the train games, without the task's
own game.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from agent.deliveries import Delivery
from agent.episode import EpisodeLimits, EpisodeSpec, run_episodes
from agent.expert import ExpertTeacher, Search
from agent.records import Episode, EpisodeContext
from compiler.language import Emission
from compiler.records import Compilation, CompileRequest
from configs.evaluation import EvalConfig, EvalMemoryConfig
from data_gen.experience import open_experience_bank
from data_gen.tasks import episode_specs, select_tasks
from envs.alfworld.environment import AlfworldSettings
from envs.base import Environment, Task
from envs.household.command_reader import PUT, TAKE, TREAT, AlfworldReader
from envs.household.observation_parser import parse_room
from envs.registry import Environments
from executor.prompt import ExecutorRequest, executor_text
from executor.records import Action, Executor, ExecutorView, Grounding
from memory.entry import MemoryEntry
from memory.protocol import MemorySystem
from zoo.lessons import text_deliveries
from zoo.models import MEMORY_TOKEN

READER = AlfworldReader()
TEACHER = ExpertTeacher(reader=READER)
K, STEPS, SIDE_BY_SIDE = 4, 50, 64
READS = ExecutorView(first_view=True, goal_last=True)
"""The executor reads guidance with its reason, as in the paper; the first view, since no later one lists the places;
and the goal at the end, where a small model attends to it."""
GO = "go to "

Make = Callable[[], Environment]


def material(work: Path, split: str = "train", limit: int | None = None) -> tuple[Make, list[EpisodeSpec]]:
    """Return an environment factory, and the first `limit` games of a split with their memories; the bank is beside
    `work`.

    Raises:
        FileNotFoundError: ALFWORLD_DATA holds no games.
    """
    make_env, tasks, bank = games_and_bank(work, split, limit, EvalMemoryConfig(k=K), AlfworldSettings())
    return make_env, episode_specs(tasks, bank, K)


def games_and_bank(
    work: Path, split: str, limit: int | None, memory: EvalMemoryConfig, env: AlfworldSettings
) -> tuple[Make, list[Task], MemorySystem]:
    """Return an environment factory, the first `limit` games of a split, and the bank of the train games.

    Raises:
        FileNotFoundError: ALFWORLD_DATA holds no games.
    """
    config = EvalConfig(env=env, memory=memory, split=split, limit=limit)
    envs = Environments(config.env)  # in this process: needs no close
    tasks, experience = select_tasks(config, envs, split)
    return envs.lease, tasks, open_experience_bank(config, envs, experience, work)


class ChoiceSource(StrEnum):
    """The script's reason for a command."""

    GIVEN = "given"  # guidance or memory names the place
    SEARCH = "search"  # nothing names the place
    PLAN = "plan"  # the thing is in view or in hand


@dataclass(frozen=True, slots=True)
class ScriptedChoice:
    """The script's choice in one state."""

    commands: tuple[str, ...]  # equally good
    source: ChoiceSource
    known: tuple[str, ...] = ()  # ways to all places that guidance or memory names, during a search
    following: str = ""  # the way to the next unvisited place, during a search
    visited: tuple[str, ...] = ()  # ways to visited places, which are wrong


@dataclass
class ScriptedPolicy:
    """A script that chooses a competent executor's commands from its prompt.

    It goes to an unvisited place that guidance or, for this thing in this scene, pasted memory names, and otherwise to
    the next unvisited place of the first view. A take resets the visits.
    """

    entries: Mapping[str, MemoryEntry]  # of pasted memory, by text

    @classmethod
    def of(cls, specs: Sequence[EpisodeSpec]) -> ScriptedPolicy:
        return cls({entry.text: entry for spec in specs for entry in spec.memory})

    def choices(self, request: ExecutorRequest, plan: Sequence[str]) -> ScriptedChoice:
        """Return the equally good commands (none without a plan) and their source."""
        need, commands = READER.need(plan), request.admissible or ()
        request = replace(request, history=request.history[-request.max_history :] if request.max_history else ())
        last = next((a for a in reversed(request.history) if a.startswith(GO)), "").removeprefix(GO)
        visited = tuple(way for place in _visited(request.history) if (way := f"{GO}{place}") in commands)
        at_hand = _alike(plan, request.goal, last, commands)
        if at_hand or need is None or not need.need.startswith("find "):
            serve = at_hand or tuple(plan[:1])
            return ScriptedChoice(serve, ChoiceSource.PLAN, visited=tuple(way for way in visited if way not in serve))
        if last and (inside := f"open {last}") in commands:
            return ScriptedChoice((inside,), ChoiceSource.SEARCH, visited=visited)
        known = tuple(way for place in self._known_places(request, plan) if (way := f"{GO}{place}") in commands)
        new = [command for command in commands if command.startswith(GO) and command not in visited]
        ways = (f"{GO}{place}" for place in _from(last, parse_room(request.first or request.observation)))
        following = next((way for way in ways if way in new), "")
        serve = tuple(way for way in known if way in new)
        source = ChoiceSource.GIVEN if serve else ChoiceSource.SEARCH
        return ScriptedChoice(
            serve or ((following,) if following else tuple(plan[:1])),
            source,
            known=known,
            following=following,
            visited=visited,
        )

    def _known_places(self, request: ExecutorRequest, plan: Sequence[str]) -> tuple[str, ...]:
        """List the place that guidance names, or all places that pasted memory names."""
        if request.delivered.memory:
            memory = tuple(self.entries[text] for text in request.delivered.memory.split("\n\n"))
            places = ", ".join(c for c in request.admissible or () if c.startswith(GO))
            seen = f"{request.observation}\n{places}" if request.history else request.observation
            asked = CompileRequest(
                request.goal, memory, state=None, observation=seen, image=None, history=request.history
            )
            return search.named if (search := TEACHER.search(asked, plan)) else ()
        guidance = request.delivered.guidance
        return (guidance.removeprefix(GO),) if guidance.startswith(GO) else ()


def _alike(plan: Sequence[str], goal: str, last: str, commands: Sequence[str]) -> tuple[str, ...]:
    """List the commands that are as good as the plan's next action: with any suitable thing or place at hand, or the
    ways to suitable places; none before the thing is found. The second of two things must go to the first's place."""
    deed = next((c for c in plan if not c.startswith((GO, "open ", "close "))), "")
    second = "two " in goal and sum(PUT.fullmatch(c) is not None for c in plan) == 1
    if take := TAKE.fullmatch(deed):
        goals = {m["place"] for c in plan if (m := PUT.fullmatch(c))} if second else set[str]()
        taking = ((c, TAKE.fullmatch(c)) for c in commands)
        return tuple(c for c, m in taking if m and m["thing"] == take["thing"] and m["place"] not in goals)
    done = PUT.fullmatch(deed) or TREAT.fullmatch(deed)
    if done is None or not done["place"]:
        return tuple(plan[:1]) if plan[:1] == [deed] else ()
    kind = done["place"] if second else rf"{done['place'].rpartition(' ')[0]} \d+"
    doing = re.compile(rf"{re.escape(deed[: done.start('place')])}{kind}")
    if at_hand := tuple(c for c in commands if doing.fullmatch(c)):
        return at_hand
    if re.fullmatch(kind, last) and f"open {last}" in commands:
        return (f"open {last}",)
    return tuple(c for c in commands if re.fullmatch(rf"{GO}{kind}", c)) or tuple(plan[:1])


def _from(place: str, places: Sequence[str]) -> Sequence[str]:
    """Rotate a list of places to begin after one of them."""
    at = places.index(place) + 1 if place in places else 0
    return [*places[at:], *places[:at]]


def _visited(history: Sequence[str]) -> Sequence[str]:
    """List the places visited since the last take."""
    taken = max((i for i, command in enumerate(history) if TAKE.fullmatch(command)), default=-1)
    return list(dict.fromkeys(c.removeprefix(GO) for c in history[taken + 1 :] if c.startswith(GO)))


@dataclass(frozen=True, slots=True)
class ScriptedStep:
    """An executor's prompt, its action, and the script's choice there."""

    prompt: str  # the user turn
    choice: ScriptedChoice
    done: str
    episode: str = ""  # goal and first view


@dataclass
class ImitatedExecutor:
    """An executor whose states the script labels (DAgger, Ross et al. 2011). Without an `actor` the script acts, and
    ignores guidance and memory at a share `strays` of the steps."""

    needs_expert: ClassVar[bool] = True
    script: ScriptedPolicy
    actor: Executor | None = None
    strays: float = 0.0
    seed: int = 0
    accepts_soft: bool = False
    sees_images: bool = False
    reads: ExecutorView = READS
    examples: list[ScriptedStep] = field(default_factory=list)

    def act(self, requests: Sequence[ExecutorRequest], contexts: Sequence[EpisodeContext] = ()) -> list[Action]:
        wanted = [self.script.choices(r, context.plan or []) for r, context in zip(requests, contexts, strict=True)]
        if self.actor is not None:
            made = self.actor.act(requests)
        else:
            made = [self._drawn(request, choice) for request, choice in zip(requests, wanted, strict=True)]
        for request, choice, action in zip(requests, wanted, made, strict=True):
            if choice.commands:
                episode = f"{request.goal}\n{request.first or request.observation}"
                self.examples.append(ScriptedStep(executor_text(request, MEMORY_TOKEN), choice, action.action, episode))
        return made

    def _drawn(self, request: ExecutorRequest, choice: ScriptedChoice) -> Action:
        """Draw one of the commands, as a function of seed, goal and history."""
        chance, commands = random.Random(f"{self.seed} {request.goal} {request.history}"), choice.commands
        if choice.source is ChoiceSource.GIVEN and chance.random() < self.strays:
            commands = tuple(c for c in request.admissible or () if c.startswith(GO))
        text = chance.choice(commands or ("look",))
        return Action(text, Grounding.CHOICE, text=text, prompt_ids=(), tokens_in=0, tokens_out=0)


def scripted_steps(
    make_env: Make, specs: Sequence[EpisodeSpec], pupil: ImitatedExecutor, seed: int, steps: int = STEPS
) -> list[ScriptedStep]:
    """Play `specs` and return the script's choices: all specs under "static", whose prompts are the hardest to learn,
    and an equal share under each other delivery."""
    deliveries = text_deliveries(TEACHER, seed)
    for i, delivery in enumerate(deliveries):
        run_games(
            make_env,
            specs if delivery.name == "static" else specs[i :: len(deliveries)],
            delivery=delivery,
            executor=pupil,
            steps=steps,
        )
    return pupil.examples


def run_games(
    make_env: Make, specs: Sequence[EpisodeSpec], delivery: Delivery, executor: Executor, steps: int = STEPS
) -> list[Episode]:
    """Play all specs. Raises: RuntimeError, if an episode failed."""
    episodes = run_episodes(
        make_env, specs, delivery=delivery, executor=executor, limits=EpisodeLimits(steps), concurrency=SIDE_BY_SIDE
    )
    if broken := next((episode for episode in episodes if episode.error), None):
        raise RuntimeError(f"{broken.task_id}, {delivery.name}: {broken.error}")
    return episodes


@dataclass(frozen=True, slots=True)
class TeacherStep:
    """A compiler's state, with the teacher's emission and search."""

    request: CompileRequest
    emission: Emission
    search: Search | None


@dataclass
class RecordingTeacher:
    """The expert teacher, which records every state that it compiles."""

    needs_expert: ClassVar[bool] = True
    steps: list[TeacherStep] = field(default_factory=list)

    def compile(self, requests: Sequence[CompileRequest], contexts: Sequence[EpisodeContext] = ()) -> list[Compilation]:
        made = TEACHER.compile(requests, contexts)
        for request, context, compilation in zip(requests, contexts, made, strict=True):
            found = TEACHER.search(request, context.plan)
            self.steps.append(TeacherStep(request, compilation.emission, found))
        return made


def teacher_steps(
    make_env: Make, specs: Sequence[EpisodeSpec], seed: int, strays: float = 0.15, steps: int = STEPS
) -> list[TeacherStep]:
    """Play `specs` with the teacher as compiler and a script that ignores it at a share `strays` of the steps; return
    all states in order."""
    teacher = RecordingTeacher()
    pupil = ImitatedExecutor(ScriptedPolicy.of(specs), strays=strays, seed=seed)
    run_games(
        make_env,
        specs,
        delivery=Delivery("expert_compiler", "compiled", teacher, soft=False),
        executor=pupil,
        steps=steps,
    )
    return teacher.steps
