"""Measure how long memory entries are: of the expert and of the explorer, as commands and as raw trajectories.

    python -m experiments.entry_length.run TOKENIZER [--games 50] [-c eval/alfworld] -- [settings]

TOKENIZER is a Hugging Face name or folder; the first tasks of the split that fills the bank are played.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from statistics import fmean, median

from agent.deliveries import Delivery
from agent.episode import EpisodeLimits, EpisodeSpec, run_episodes
from agent.expert import ExpertExecutor, ExpertTeacher
from agent.explorer import ExplorerExecutor
from configs.evaluation import EvalConfig
from configs.load import load_config
from data_gen.experience import EXPERT_STEPS, add_rationales, episode_traces
from envs.base import Environment, Task
from envs.registry import Environments, command_reader_for, evaluation_split
from eval.table import markdown_table
from executor.records import Executor
from memory.protocol import Trace
from memory.trajectory import entry_of_trace


def play(
    make_env: Callable[[], Environment], tasks: Sequence[Task], actor: Executor, teacher: ExpertTeacher
) -> list[Trace]:
    """Play tasks and return their traces with rationales."""
    specs, delivery = [EpisodeSpec(task) for task in tasks], Delivery("expert", "none")
    episodes = run_episodes(make_env, specs, delivery, actor, EpisodeLimits(EXPERT_STEPS))
    add_rationales(episodes, teacher)
    return [trace for [trace] in episode_traces(episodes)]


def lengths(traces: Sequence[Trace], count: Callable[[str], int]) -> list[str]:
    """Return number, solved, commands (mean, median, longest) and mean tokens of both forms."""
    commands = [len(trace.records) for trace in traces]
    tokens = [fmean(count(entry_of_trace(trace, form).text) for trace in traces) for form in ("commands", "raw")]
    numbers = [f"{fmean(commands):.1f}", f"{median(commands):g}", str(max(commands)), *(f"{n:.0f}" for n in tokens)]
    return [str(len(traces)), str(sum(trace.success for trace in traces)), *numbers]


def main() -> None:
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer")
    parser.add_argument("--games", type=int, default=50)
    parser.add_argument("-c", "--config", default="eval/alfworld")
    parser.add_argument("settings", nargs="*")
    a = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(a.tokenizer)
    count = lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])
    config = load_config(EvalConfig, a.config, a.settings)
    teacher, rows = ExpertTeacher(reader=command_reader_for(config.env)), []
    with Environments(config.env) as envs:
        split = envs.spec.splits(config.env).experience(config.split or evaluation_split(config.env))
        tasks = envs.tasks(split)[: a.games]
        for name, actor in (("expert", ExpertExecutor()), ("explorer", ExplorerExecutor(config.env.seed))):
            rows.append([name, *lengths(play(envs.lease, tasks, actor, teacher), count)])
    heads = ["actor", "episodes", "solved", "commands", "median", "longest", "tokens, commands", "tokens, raw"]
    print(*markdown_table(heads, rows), sep="\n")


if __name__ == "__main__":
    main()
