"""Measure the value of memory for an executor that follows guidance, without any model.

A scripted executor knows every command and recipe from the environment's expert, but no places: it searches for these
at random unless guidance names one. It plays under no memory, the expert teacher (which uses only what M supports), and
the teacher's control, which cites a random entry. Results are given within several numbers of steps, with bootstrap
intervals over tasks; differences from no memory are paired by task.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import ClassVar

from agent.deliveries import find
from agent.episode import EpisodeLimits, run_episodes
from agent.records import Episode, EpisodeContext
from configs.evaluation import EvalConfig
from configs.load import load_config
from data_gen.experience import open_experience_bank
from data_gen.tasks import episode_specs, select_tasks
from envs.household.command_reader import first_taken, subgoals
from envs.registry import Environments, command_reader_for, evaluation_split
from envs.scienceworld.command_reader import DOORS, TELEPORT, destination, is_harmless
from eval.intervals import bootstrap_mean
from eval.metrics import grouped, paired_difference, succeeded
from eval.table import interval, markdown_table, points
from executor.prompt import ExecutorRequest
from executor.records import PAPER_VIEW, Action, ExecutorView, Grounding
from runtime.store import to_json, write_atomically

DELIVERIES = ("none", "expert_compiler", "expert_random_entry")
BUDGETS = {"household": (10, 15, 30), "alfworld": (10, 15, 30, 50), "scienceworld": (10, 15, 30, 50)}  # steps
Search = Callable[[ExecutorRequest, Sequence[str], random.Random], str | None]


def search_homes(request: ExecutorRequest, plan: Sequence[str], draw: random.Random) -> str | None:
    """Return the next command of a search for the plan's object in ALFWorld; None if there is nothing to search.

    Follow guidance, open a closed place after arriving there, or go to an unvisited place.
    """
    fact, commands = first_taken(plan), request.admissible or ()
    if fact is None or plan[0].startswith("take ") or subgoals(plan)[0] != f"find {fact[0]}":
        return None
    if (guidance := request.delivered.guidance) in commands:
        return guidance
    last = next((action for action in reversed(request.history) if action.startswith("go to ")), "")
    if last and (opening := f"open {last.removeprefix('go to ')}") in commands:
        return opening
    unvisited = [c for c in commands if c.startswith("go to ") and c not in request.history]
    return draw.choice(unvisited) if unvisited else None


def search_rooms(request: ExecutorRequest, plan: Sequence[str], draw: random.Random) -> str | None:
    """Return a teleport to search for the recipe's next room in ScienceWorld (preset `easy`); None without a search.

    Follow guidance, or go to an unvisited room, those in the goal first.
    """
    if not destination(plan)[1]:
        return None
    past = takewhile(is_harmless, reversed(request.history))
    visited = {command.removeprefix(TELEPORT) for command in past if command.startswith(TELEPORT)}
    unvisited = [name for name in DOORS if name not in visited]
    if (guided := request.delivered.guidance.removeprefix("go to ")) in unvisited:
        return f"{TELEPORT}{guided}"
    likely = [name for name in unvisited if name in request.goal]
    return f"{TELEPORT}{draw.choice(likely or unvisited)}" if unvisited else None


SEARCHES: dict[str, Search] = {"household": search_homes, "alfworld": search_homes, "scienceworld": search_rooms}


@dataclass(slots=True)
class SearchingExecutor:
    """Follow the expert's plan, but search for the places it needs. Draws depend on seed, goal and history."""

    needs_expert: ClassVar[bool] = True
    batched: ClassVar[bool] = False
    seed: int
    search: Search
    accepts_soft: bool = False
    sees_images: bool = False
    reads: ExecutorView = PAPER_VIEW

    def act(self, requests: Sequence[ExecutorRequest], contexts: Sequence[EpisodeContext] = ()) -> list[Action]:
        actions = []
        for request, context in zip(requests, contexts, strict=True):
            plan = context.plan or ["look"]
            draw = random.Random(f"{self.seed} {request.goal} {request.history}")
            text = self.search(request, plan, draw) or plan[0]
            actions.append(Action(text, Grounding.CHOICE, text=text, prompt_ids=(), tokens_in=0, tokens_out=0))
        return actions


def truncated(episodes: Sequence[Episode], steps: int) -> list[Episode]:
    """Cut episodes after a number of steps; longer ones fail with their progress until then."""
    return [
        episode
        if len(episode.steps) <= steps
        else replace(episode, success=False, progress=episode.steps[steps - 1].progress, steps=episode.steps[:steps])
        for episode in episodes
    ]


def mean_score(episodes: Sequence[Episode], base: Sequence[Episode] = ()) -> dict[str, float]:
    """Average progress over tasks, or its paired differences from `base`, after averaging each task's seeds."""
    scores, base_scores = (
        {task: fmean(e.progress for e in of) for task, of in grouped(some, lambda e: e.task_id).items()}
        for some in (episodes, base)
    )
    return asdict(bootstrap_mean([scores[task] - base_scores.get(task, 0.0) for task in sorted(scores)]))


def mean_success(episodes: Sequence[Episode]) -> dict[str, float]:
    by_task = grouped(episodes, lambda e: e.task_id)
    return asdict(bootstrap_mean([fmean(map(float, map(succeeded, by_task[task]))) for task in sorted(by_task)]))


def summary(played: dict[str, list[Episode]], steps: int) -> dict[str, dict]:
    """Summarise each delivery within a number of steps, with paired differences from no memory."""
    cut = {name: truncated(episodes, steps) for name, episodes in played.items()}
    return {
        name: {
            "success": mean_success(episodes),
            "score": mean_score(episodes),
            "steps": fmean(len(episode.steps) for episode in episodes),
            "success_difference": asdict(paired_difference(episodes, cut["none"])),
            "score_difference": mean_score(episodes, cut["none"]),
        }
        for name, episodes in cut.items()
    }


def table(summaries: dict[int, dict[str, dict]]) -> list[str]:
    """Format a row per number of steps and delivery."""
    rows = []
    for steps, by_delivery in summaries.items():
        for name, of in by_delivery.items():
            differences = [points(of["success_difference"]), interval(of["score_difference"])]
            cells = [str(steps), find(name).label, interval(of["success"]), interval(of["score"]), f"{of['steps']:.1f}"]
            rows.append([*cells, *(["", ""] if name == "none" else differences)])
    heads = ["steps", "delivery", "success %", "score %", "mean steps", "success against none", "score"]
    return markdown_table(heads, rows, left=2)


def play(config: EvalConfig, seeds: Sequence[int], out: Path) -> dict[str, list[Episode]]:
    """Play the split under every delivery, once per seed of the search; the memory bank stays in OUT."""
    name = config.env.name
    if name not in SEARCHES:
        raise SystemExit(f"env.name={name} has no scripted search; choose one of {', '.join(SEARCHES)}")
    played: dict[str, list[Episode]] = {delivery: [] for delivery in DELIVERIES}
    with Environments(config.env) as envs:
        tasks, experience = select_tasks(config, envs, config.split or evaluation_split(config.env))
        bank = open_experience_bank(config, envs, experience, out)
        specs = episode_specs(tasks, bank, config.memory.k, config.memory.isolation)
        limits = EpisodeLimits(max(BUDGETS[name]), config.seed)
        for delivery, episodes in played.items():
            for seed in seeds:
                playable = find(delivery).create(None, seed, command_reader_for(config.env))
                executor = SearchingExecutor(seed, SEARCHES[name])
                episodes += run_episodes(
                    envs.lease,
                    specs,
                    delivery=playable,
                    executor=executor,
                    limits=limits,
                    concurrency=config.concurrency,
                )
    return played


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings of the evaluation")
    parser.add_argument("--config", "-c", help="evaluation that supplies environment, split and bank")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="seeds of the search")
    parser.add_argument("--out", type=Path, default=Path("out/worth"))
    a = parser.parse_args()
    config = load_config(EvalConfig, a.config, a.overrides)
    played = play(config, a.seeds, a.out)
    if failed := sum(bool(episode.error) for episodes in played.values() for episode in episodes):
        print(f"{failed} episodes ended by an error; they count as failures")
    summaries = {steps: summary(played, steps) for steps in BUDGETS[config.env.name]}
    tasks = len({episode.task_id for episode in played["none"]})
    facts = {"config": config.model_dump(mode="json"), "seeds": a.seeds, "tasks": tasks, "within": summaries}
    write_atomically(a.out / "memory_worth.json", to_json(facts, indent=1))
    print(f"{config.env.name}, {tasks} tasks, seeds {a.seeds}, K = {config.memory.k}", *table(summaries), sep="\n")


if __name__ == "__main__":
    main()
