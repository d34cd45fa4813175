"""What memory is worth to an executor that can follow guidance, with no model at all.

    python -m benchmarks.memory_worth --out out/worth -- env=alfworld split=valid_seen [a.b=c ...]
    python -m benchmarks.memory_worth --out out/worth-scienceworld -c eval/scienceworld

A scripted executor knows every command and recipe (from the environment's expert), but not where things are: those it
searches for at random, unless guidance names a place. It is the same under all deliveries: none, the expert teacher
(which says only what M supports), and the teacher's control, which cites a random entry. Success and score (progress)
are told within several numbers of steps; intervals are bootstraps over tasks (a task's seeds are averaged first), the
differences from none paired by task.
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
from agent.episode import Limits, run_episodes
from agent.records import Episode, EpisodeContext
from configs.evaluation import EvalConfig
from configs.load import load_config
from data_gen.experience import filled_bank
from data_gen.tasks import chosen_tasks, specs_for
from envs.household.trajectories import subgoals, taken
from envs.registry import Environments, evaluation_split, reader_of
from envs.scienceworld.trajectories import ROOMS, TELEPORT, destination, is_harmless
from eval.intervals import bootstrap_mean
from eval.metrics import grouped, paired_difference, succeeded
from eval.table import interval, markdown_table, points
from executor.prompt import ExecutorRequest
from executor.records import PAPER, Action, Grounding, Reads
from runtime.store import to_json, write_atomically

DELIVERIES = ("none", "expert_compiler", "expert_random_entry")


@dataclass(slots=True)
class Searcher:
    """Searches in random order for what the plan would find, and goes first where guidance says. Chance depends on
    seed, goal and history alone."""

    needs_expert: ClassVar[bool] = True
    batched: ClassVar[bool] = False
    seed: int
    accepts_soft: bool = False
    sees_images: bool = False
    reads: Reads = PAPER

    def act(self, requests: Sequence[ExecutorRequest], contexts: Sequence[EpisodeContext] = ()) -> list[Action]:
        texts = [self._choose(r, context.plan or ["look"]) for r, context in zip(requests, contexts, strict=True)]
        return [Action(text, Grounding.CHOICE, text, (), 0, 0) for text in texts]

    def _choose(self, request: ExecutorRequest, plan: Sequence[str]) -> str:
        chance = random.Random(f"{self.seed} {request.goal} {request.history}")
        return self.search(request, plan, chance) or plan[0]

    def search(self, request: ExecutorRequest, plan: Sequence[str], chance: random.Random) -> str | None:
        """Return a step of the search; None where there is nothing to search for, or nowhere left."""
        raise NotImplementedError


class HouseholdSearcher(Searcher):
    """ALFWorld's commands: what is to be taken may be in any place, and closed places are opened."""

    def search(self, request: ExecutorRequest, plan: Sequence[str], chance: random.Random) -> str | None:
        """Go where guidance says, open what is closed here, or go to a place that was not gone to yet."""
        fact, commands = taken(plan), request.admissible or ()
        if fact is None or plan[0].startswith("take ") or subgoals(plan)[0] != f"find {fact[0]}":
            return None
        if (told := request.delivered.guidance) in commands:
            return told
        last = next((a for a in reversed(request.history) if a.startswith("go to ")), "")
        if last and (inside := f"open {last.removeprefix('go to ')}") in commands:
            return inside
        fresh = [c for c in commands if c.startswith("go to ") and c not in request.history]
        return chance.choice(fresh) if fresh else None


class ScienceWorldSearcher(Searcher):
    """ScienceWorld's commands under the preset `easy`: the room where the recipe goes on may be any, those that the
    goal names are tried first, and one is there by teleport. Whether it was the right one, the recipe says on arrival.
    """

    def search(self, request: ExecutorRequest, plan: Sequence[str], chance: random.Random) -> str | None:
        """Go where guidance says, or to a room that was not gone to yet since the last step."""
        _, room = destination(plan)
        if not room:
            return None
        past = takewhile(is_harmless, reversed(request.history))
        tried = {command.removeprefix(TELEPORT) for command in past if command.startswith(TELEPORT)}
        told = request.delivered.guidance.removeprefix("go to ")
        if told in ROOMS and told not in tried:
            return f"{TELEPORT}{told}"
        fresh = [name for name in ROOMS if name not in tried]
        likely = [name for name in fresh if name in request.goal]
        return f"{TELEPORT}{chance.choice(likely or fresh)}" if fresh else None


SEARCHERS: dict[str, Callable[[int], Searcher]] = {
    "household": HouseholdSearcher,
    "alfworld": HouseholdSearcher,
    "scienceworld": ScienceWorldSearcher,
}
WITHIN = {"household": (10, 15, 30), "alfworld": (10, 15, 30, 50), "scienceworld": (10, 15, 30, 50)}


def within(episodes: Sequence[Episode], steps: int) -> list[Episode]:
    """Cut episodes off after so many steps."""
    return [
        episode
        if len(episode.steps) <= steps
        else replace(episode, success=False, progress=episode.steps[steps - 1].progress, steps=episode.steps[:steps])
        for episode in episodes
    ]


Value = Callable[[Episode], float]


def over_tasks(episodes: Sequence[Episode], value: Value, base: Sequence[Episode] = ()) -> dict[str, float]:
    """Average over tasks (a task's seeds first); with a base, the paired differences from it."""
    mine, theirs = (_by_task(some, value) for some in (episodes, base))
    return asdict(bootstrap_mean([mine[task] - theirs.get(task, 0.0) for task in sorted(mine)]))


def _by_task(episodes: Sequence[Episode], value: Value) -> dict[str, float]:
    return {task: fmean(map(value, mine)) for task, mine in grouped(episodes, lambda e: e.task_id).items()}


def _score(episode: Episode) -> float:
    return episode.progress


def measured(played: dict[str, list[Episode]], steps: int) -> dict[str, dict]:
    """Say by delivery what was reached within so many steps, and the paired differences from none."""
    cut = {name: within(episodes, steps) for name, episodes in played.items()}
    return {
        name: {
            "success": over_tasks(episodes, lambda episode: float(succeeded(episode))),
            "score": over_tasks(episodes, _score),
            "steps": fmean(len(episode.steps) for episode in episodes),
            "success_difference": asdict(paired_difference(episodes, cut["none"])),
            "score_difference": over_tasks(episodes, _score, cut["none"]),
        }
        for name, episodes in cut.items()
    }


def table(made: dict[int, dict[str, dict]]) -> str:
    """Write what was reached, a row per number of steps and delivery."""
    heads = ("steps", "delivery", "success %", "score %", "mean steps", "success against none", "score")
    rows = [
        (
            str(steps),
            find(name).label,
            interval(of["success"]),
            interval(of["score"]),
            f"{of['steps']:.1f}",
            *(("", "") if name == "none" else (points(of["success_difference"]), interval(of["score_difference"]))),
        )
        for steps, by_delivery in made.items()
        for name, of in by_delivery.items()
    ]
    return "\n".join(markdown_table(heads, rows, 2))


def play(config: EvalConfig, seeds: Sequence[int], out: Path) -> dict[str, list[Episode]]:
    """Play the split under every delivery, once per seed of the search; the bank stays in OUT."""
    reader, name = reader_of(config.env), config.env.name
    if name not in SEARCHERS:
        raise SystemExit(f"no scripted searcher for {name}: there are {', '.join(SEARCHERS)}")
    with Environments(config.env) as envs:
        tasks, experience = chosen_tasks(config, envs, config.split or evaluation_split(config.env))
        specs = specs_for(tasks, filled_bank(config, envs, experience, out), config.memory.k)
        limits = Limits(max(WITHIN[name]), config.seed)
        return {
            delivery: [
                episode
                for seed in seeds
                for made in [find(delivery).make(None, seed, reader)]
                for episode in run_episodes(envs.lease, specs, made, SEARCHERS[name](seed), limits, config.concurrency)
            ]
            for delivery in DELIVERIES
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings of the evaluation")
    parser.add_argument("--config", "-c", help="of an evaluation, whose environment, split and bank are taken")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of the search")
    parser.add_argument("--out", type=Path, default=Path("out/worth"))
    a = parser.parse_args()
    config = load_config(EvalConfig, a.config, a.overrides)
    played = play(config, a.seeds, a.out)
    if broken := sum(bool(episode.error) for episodes in played.values() for episode in episodes):
        print(f"{broken} episodes broke; they count as failures")
    made = {steps: measured(played, steps) for steps in WITHIN[config.env.name]}
    tasks = len({episode.task_id for episode in played["none"]})
    facts = {"config": config.model_dump(mode="json"), "seeds": a.seeds, "tasks": tasks, "within": made}
    write_atomically(a.out / "memory_worth.json", to_json(facts, indent=1))
    print(f"{config.env.name}, {tasks} tasks, seeds {a.seeds}, K = {config.memory.k}\n{table(made)}")


if __name__ == "__main__":
    main()
