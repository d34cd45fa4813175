"""Pretraining material of generated homes: memory entries, and examples for compiler and executor.

All scenes are of the split `pretrain`, which shares no layout with other splits.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from agent.deliveries import Delivery, recorded_step
from agent.episode import EpisodeLimits, EpisodeSpec, run_episodes
from agent.expert import ExpertExecutor, ExpertTeacher
from agent.records import EpisodeContext, StepInput, compile_request
from data_gen.experience import add_rationales, episode_traces, select_first_views, select_no_views
from envs.base import Environment, Task
from envs.household.command_reader import HouseholdReader, first_taken, subgoals
from envs.household.environment import HouseholdEnvironment, pickup_views
from executor.prompt import ExecutorRequest
from executor.records import FULL_VIEW, Action, ExecutorView, Grounding
from memory.entry import MemoryEntry
from memory.trajectory import entry_of_trace
from zoo.curriculum import NOTHING
from zoo.household.lessons import CompilerExample
from zoo.lessons import text_deliveries

SPLIT = "pretrain"
VISUAL = 0.5  # share of visual tasks if memory holds no pictures
TEACHER = ExpertTeacher(reader=HouseholdReader())


@dataclass
class EntryPool:
    """Memory entries of the pretraining scenes, from which it draws task memories as a bank retrieves them."""

    entries: list[MemoryEntry]
    marks: dict[str, str] = field(default_factory=dict)  # the place marked in a home's entries, by home
    by_scene: dict[str, list[MemoryEntry]] = field(init=False)
    by_thing: dict[str, list[MemoryEntry]] = field(init=False)

    def __post_init__(self) -> None:
        self.by_scene, self.by_thing = defaultdict(list), defaultdict(list)
        for entry in self.entries:
            self.by_scene[_scene_key(entry.provenance.task_id)].append(entry)
            if fact := first_taken(entry.provenance.actions):
                self.by_thing[fact[0]].append(entry)

    @classmethod
    def collect(cls, env: HouseholdEnvironment, tasks: Sequence[Task], pictures: int = 0) -> EntryPool:
        """Collect the entries of the expert's episodes of `tasks`, with `pictures` pictures each."""
        specs = [EpisodeSpec(task) for task in tasks]
        played = run_episodes(
            lambda: env,
            specs,
            delivery=Delivery("expert", "none"),
            executor=ExpertExecutor(),
            limits=EpisodeLimits(50),
            concurrency=1,
        )
        add_rationales(played, TEACHER)
        marks = dict[str, str]()
        for task in tasks if pictures else ():
            env.reset(task)
            marks[_scene_key(task.id)] = env.marked_receptacle or ""
        views = select_first_views(pickup_views, pictures) if pictures else select_no_views
        return cls([entry_of_trace(trace) for [trace] in episode_traces(played, views)], marks)

    def memory_for(self, task: Task, thing: str, rng: random.Random, k: int) -> tuple[MemoryEntry, ...]:
        """Draw k entries in random order: the right one (if any), others of its scene, and other scenes' entries on the
        same object, except from scenes with the same label."""
        own = self.by_scene[_scene_key(task.id)]
        right = [e for e in own if (fact := first_taken(e.provenance.actions)) and fact[0] == thing]
        others = [e for e in own if e not in right]
        elsewhere = [e for e in self.by_thing[thing] if e.provenance.scene != task.scene]
        rng.shuffle(others)
        chosen, used = right[:1], {_subject(e) for e in right}
        while len(chosen) < k:
            source = others if others and rng.random() < 0.5 else rng.sample(elsewhere, min(8, len(elsewhere)))
            fresh = [e for e in source if _subject(e) not in used]
            if not fresh:
                strangers = [e for e in rng.sample(self.entries, 8) if e.provenance.scene != task.scene]
                fresh = [e for e in strangers if _subject(e) not in used]
            if fresh:
                used.add(_subject(fresh[0]))
                chosen.append(fresh[0])
        rng.shuffle(chosen)
        return tuple(chosen)


def _subject(entry: MemoryEntry) -> tuple[str, str]:
    """Return (kind of object, scene) of an entry."""
    fact = first_taken(entry.provenance.actions)
    return (fact[0] if fact else "", entry.provenance.scene)


def material(scenes: int, seed: int, pictures: int = 0) -> tuple[HouseholdEnvironment, list[EpisodeSpec], EntryPool]:
    """Create an environment of pretraining scenes, its tasks with two to six entries each, and the pool of entries.

    Args:
        pictures: pictures per entry; above 0, a third of the tasks need them, and another third need the view.
    """
    rng = random.Random(seed)
    visual, remembered = (0.34, 0.33) if pictures else (VISUAL, 0.0)
    env = HouseholdEnvironment(seed, {SPLIT: scenes}, visual_share=visual, remembered_share=remembered)
    pool = EntryPool.collect(env, env.tasks(f"{SPLIT}_experience"), pictures)
    specs = []
    for task in env.tasks(SPLIT):
        thing, _ = _object_of(env, task)
        memory = pool.memory_for(task, thing, rng, rng.choice([2, 3, 4, 4, 4, 5, 6]))
        specs.append(EpisodeSpec(task, _some_with_pictures(memory, rng) if pictures else memory))
    return env, specs, pool


def _some_with_pictures(memory: Sequence[MemoryEntry], rng: random.Random) -> tuple[MemoryEntry, ...]:
    """Remove the pictures of a random number of entries, since few pictures are easier to learn from."""
    pictured = rng.sample(range(len(memory)), rng.randint(0, len(memory)))
    return tuple(entry if i in pictured else replace(entry, images=()) for i, entry in enumerate(memory))


def _object_of(env: Environment, task: Task) -> tuple[str, str]:
    """Return (kind, place) of a task's object."""
    env.reset(task)
    return first_taken(env.expert() or []) or ("", "")


def compiler_examples(scenes: int, seed: int, pictures: int = 0, max_steps: int = 20) -> list[CompilerExample]:
    """Collect the states of the teacher's episodes, with detours, in `scenes` pretraining scenes."""
    env, specs, pool = material(scenes, seed, pictures)
    delivery = Delivery("expert_compiler", "compiled", TEACHER, soft=False)
    episodes = run_episodes(
        lambda: env,
        specs,
        delivery=delivery,
        executor=ExpertExecutor(0.2, seed),
        limits=EpisodeLimits(max_steps),
        concurrency=1,
    )
    return [
        _compiler_example(recorded_step(episode, t, spec.memory), step.emission_text, marks)
        for episode, spec in zip(episodes, specs, strict=True)
        for marks in [_marks(env, spec, pool)]
        for t, step in enumerate(episode.steps)
        if step.emission_kind and step.action
    ]


def _marks(env: Environment, spec: EpisodeSpec, pool: EntryPool) -> tuple[str, str, dict[str, str]]:
    """Return the place marked in the view, the one marked in any picture ("": none), and M's marks by scene."""
    place, marks = _object_of(env, spec.task)[1], defaultdict[str, set[str]](set)
    for entry in spec.memory:
        if entry.images:
            marks[entry.provenance.scene].add(pool.marks[_scene_key(entry.provenance.task_id)])
    pictured = {scene: next(iter(places)) for scene, places in marks.items() if len(places) == 1}  # scene labels repeat
    if spec.task.family == "visual":
        return place, place, pictured
    return "", place if spec.task.family == "remembered" and spec.task.scene in pictured else "", pictured


def _compiler_example(step: StepInput, emission: str, marks: tuple[str, str, dict[str, str]]) -> CompilerExample:
    marked, shown, pictured = marks
    useful = step.image is not None and not any(action.startswith("take ") for action in step.history)
    of_use = (marked or NOTHING, shown or NOTHING) if useful else (None, None)
    return CompilerExample(compile_request(step), emission, *of_use, pictured)


@dataclass
class ScriptedExecutor:
    """An executor that goes to the place that guidance or memory names, and otherwise searches unvisited places in
    random order."""

    needs_expert: ClassVar[bool] = True
    seed: int = 0
    accepts_soft: bool = False
    sees_images: bool = False
    reads: ExecutorView = FULL_VIEW  # as in the training prompts of the shipped executor

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def act(self, requests: Sequence[ExecutorRequest], contexts: Sequence[EpisodeContext] = ()) -> list[Action]:
        texts = [self._choose(r, context.plan or ["look"]) for r, context in zip(requests, contexts, strict=True)]
        return [Action(text, Grounding.CHOICE, text=text, prompt_ids=(), tokens_in=0, tokens_out=0) for text in texts]

    def _choose(self, request: ExecutorRequest, plan: Sequence[str]) -> str:
        fact = first_taken(plan)
        if plan[0].startswith("take ") or not fact or subgoals(plan)[0] != f"find {fact[0]}":
            return plan[0]
        commands = request.admissible or ()
        place = self._known_place(request, fact[0])
        if place and f"go to {place}" not in request.history and f"go to {place}" in commands:
            return f"go to {place}"
        last = next((a for a in reversed(request.history) if a.startswith("go to ")), "")
        here = f"open {last.removeprefix('go to ')}"
        if last and here in commands:
            return here
        fresh = [c for c in commands if c.startswith("go to ") and c not in request.history]
        return self._random.choice(fresh) if fresh else plan[0]

    def _known_place(self, request: ExecutorRequest, thing: str) -> str | None:
        if request.delivered.guidance.startswith("go to "):
            return request.delivered.guidance.removeprefix("go to ")
        scene = re.match(r"in ([^:]+): ", request.goal)
        where = rf"because in {re.escape(scene[1] if scene else '')} the {thing} was in ([a-z]+ \d+)"
        found = re.search(where, request.delivered.memory)
        return found[1] if found else None


@dataclass(frozen=True)
class ExecutorExample:
    prompt: str  # the user turn
    action: str


def executor_examples(scenes: int, seed: int, max_steps: int = 20) -> list[ExecutorExample]:
    """Play the scripted executor in `scenes` pretraining scenes, with equal shares of the text deliveries."""
    env, specs, _ = material(scenes, seed)
    random.Random(seed).shuffle(specs)
    deliveries = text_deliveries(TEACHER, seed)
    examples = []
    for i, delivery in enumerate(deliveries):
        mine = specs[i :: len(deliveries)]
        episodes = run_episodes(
            lambda: env,
            mine,
            delivery=delivery,
            executor=ScriptedExecutor(seed),
            limits=EpisodeLimits(max_steps),
            concurrency=1,
        )
        examples += [ExecutorExample(step.executor_prompt, step.action) for e in episodes for step in e.steps]
    return examples


def _scene_key(task_id: str) -> str:
    """Return split and scene number, which a scene's tasks and experience share."""
    return re.sub(r"_experience", "", task_id.rsplit("/", 1)[0])
