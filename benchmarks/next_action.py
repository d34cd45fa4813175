"""Does the frozen executor choose what the expert would? Deliveries compared step by step, before paying for episodes.

    python -m benchmarks.next_action --config eval/alfworld-smollm2 --out out/next-action [a.b=c ...]

The expert plays, so every delivery is asked at the same states of the same tasks, and a delivery under which the
executor would be lost after two steps is still asked at the tenth. At each step the executor scores the admissible
commands of a prompt made by the agent's own loop, and its choice is compared with the expert's command. This is a
proxy: it says nothing about recovering from one's own mistakes.

Steps of an episode are not independent: intervals are bootstraps over tasks (each task's mean over its steps), as are
differences, paired by task.

choice      share of steps at which the expert's command is the likeliest
nats        -log p(the expert's command) among the admissible ones
text        -log p(the expert's command) among all texts

`told` is a control of this benchmark's own: guidance that is the very command.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

import torch

from agent.deliveries import Delivery
from agent.expert import ExpertExecutor
from agent.records import Episode
from compiler.language import Emission, render
from compiler.records import Compilation, CompileRequest
from configs.evaluation import EvalConfig
from configs.load import load_config
from eval.evaluate import ModelCache, prepare
from eval.intervals import Interval, bootstrap_mean
from eval.table import interval, markdown_table
from executor.hf import FrozenExecutor
from executor.prompt import ExecutorRequest
from executor.records import Action
from runtime.store import to_json, write_atomically


class Telling:
    """A compiler whose guidance is the expert's command."""

    def compile(self, requests: Sequence[CompileRequest]) -> list[Compilation]:
        plans = [request.expert() if request.expert else None for request in requests]
        emissions = [Emission(guidance=plan[0] if plan else "look") for plan in plans]
        return [Compilation(render(emission), emission) for emission in emissions]


ByTask = dict[str, dict[str, float]]  # means over steps, by name
TOLD = Delivery("told", "compiled", Telling(), soft=False)


@dataclass(frozen=True, slots=True)
class LedAction(Action):
    """The expert's; `text` is what the executor would have done, `logprob`: the expert's among admissible ones."""

    text_logprob: float = 0.0  # the expert's among all texts


class Led:
    """The expert acts, and the executor says what it would have done."""

    def __init__(self, executor: FrozenExecutor) -> None:
        self.executor, self.expert = executor, ExpertExecutor()
        self.accepts_soft, self.sees_images = executor.accepts_soft, executor.sees_images
        self.reads = executor.reads

    @torch.no_grad()
    def act(self, requests: Sequence[ExecutorRequest]) -> list[Action]:
        prompts = [self.executor.encode(request) for request in requests]
        commands = [request.admissible or () for request in requests]
        led = self.expert.act(requests)
        scores = self.executor.candidate_logprobs(prompts, commands)
        return [self._led(*row) for row in zip(led, commands, scores, strict=True)]

    def _led(self, expert: Action, commands: Sequence[str], candidate_logprobs: torch.Tensor) -> LedAction:
        logprobs = self.executor.action_logprobs(candidate_logprobs.float().cpu())
        at = commands.index(expert.action)
        own = commands[int(logprobs.argmax())]
        logprob, among_texts = float(logprobs[at]), float(candidate_logprobs[at])
        return LedAction(expert.action, expert.how, own, (), 0, 0, logprob=logprob, text_logprob=among_texts)


def measured(episodes: Sequence[Episode]) -> ByTask:
    """Average over each task's steps."""
    made = {}
    for episode in episodes:
        if not episode.success:
            raise RuntimeError(f"the expert did not solve {episode.task_id} ({episode.stop_reason}): nothing to follow")
        steps = episode.steps
        made[episode.task_id] = {
            "choice": fmean(step.executor_text == step.action for step in steps),
            "nats": fmean(-step.decision.logprob for step in steps),  # type: ignore[union-attr, operator]
            "text": fmean(-step.decision.text_logprob for step in steps),  # type: ignore[union-attr]
            "chance": fmean(1 / len(step.admissible or "?") for step in steps),
            "uniform": fmean(math.log(len(step.admissible or "?")) for step in steps),
            "steps": len(steps),
        }
    return made


def over_tasks(made: ByTask, name: str, base: ByTask | None = None) -> Interval:
    """Average over tasks; with a base, the paired differences from it."""
    return bootstrap_mean([made[task][name] - (base[task][name] if base else 0.0) for task in sorted(made)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="settings of the evaluation")
    parser.add_argument("--config", "-c", default="eval/alfworld-smollm2")
    parser.add_argument("--out", type=Path, default=Path("out/next-action"))
    a = parser.parse_args()
    config = load_config(EvalConfig, a.config, a.overrides)
    a.out.mkdir(parents=True, exist_ok=True)
    made: dict[str, ByTask] = {}
    with ModelCache() as loaded:
        evaluation, _ = prepare(config, loaded, a.out)
        evaluation = replace(evaluation, executor=Led(loaded.executor(config)))
        for delivery in (*config.deliveries, TOLD):
            name = delivery if isinstance(delivery, str) else delivery.name
            made[name] = measured(evaluation.run(delivery))
            write_atomically(a.out / "next_action.json", to_json(made, indent=1))
    print(table(made))


def table(made: dict[str, ByTask]) -> str:
    first = next(iter(made.values()))
    steps = int(sum(values["steps"] for values in first.values()))
    chance, uniform = (100 * over_tasks(first, "chance").mean, over_tasks(first, "uniform").mean)
    rows = [
        [
            name, _shown(of, "choice", "{:.1f}", 100), _shown(of, "choice", "{:+.1f}", 100, first),
            _shown(of, "nats", "{:.2f}"), _shown(of, "nats", "{:+.2f}", base=first), _shown(of, "text", "{:.1f}"),
        ]
        for name, of in made.items()
    ]  # fmt: skip
    heads = ["delivery", "choice %", "minus the first", "nats", "minus the first", "text"]
    title = f"{len(first)} tasks, {steps} steps; at random: choice {chance:.1f} %, nats {uniform:.2f}"
    return "\n".join([title, "", *markdown_table(heads, rows)])


def _shown(made: ByTask, name: str, form: str, scale: float = 1.0, base: ByTask | None = None) -> str:
    return "-" if made is base else interval(asdict(over_tasks(made, name, base)), form, scale)


if __name__ == "__main__":
    main()
