"""Compares ways to act in a growing chat: `executor.mode` choice and constrained, with and without a prefix cache.

    memcompiler bench serving act --model MODEL

Each episode is a chat: rules and memory, then a command and a view by turns. A step appends such a pair and picks one
of the listed commands. All episodes act as one batch, as in an evaluation.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer

from configs.models import ExecutorConfig
from envs.spec import ExecutorInstructions
from eval.table import markdown_table
from executor.build import load_frozen
from executor.hf import FrozenExecutor
from executor.prompt import ExecutorRequest, MemoryBlock
from executor.records import Action
from lm.prefixes import PrefixCache
from lm.prompt import Prompt
from runtime.progress import disable_library_progress_bars

PLACES = ("cabinet", "drawer", "shelf", "countertop", "fridge", "sinkbasin", "microwave", "diningtable")
THINGS = ("apple", "mug", "plate", "knife", "tomato", "pan", "spoon", "bowl")
PREFIX_MIB = 8192.0  # enough for all episodes


@dataclass(frozen=True)
class GrowingChats:
    """Episodes of random commands and views."""

    model: FrozenExecutor
    commands: int
    memory_tokens: int

    def prompt(self, episode: int, step: int) -> Prompt:
        """Encode an episode's chat before its decision `step`."""
        rng = random.Random(episode)
        memory = " ".join(rng.choice(PLACES) for _ in range(self.memory_tokens))
        messages = [{"role": "system", "content": "You are in a home. Answer with one command.\n" + memory}]
        for turn in range(step + 1):
            place = f"{rng.choice(PLACES)} {rng.randint(1, 20)}"
            if turn:
                messages.append({"role": "assistant", "content": f"go to {place}"})
            view = ", ".join(f"a {rng.choice(THINGS)} {rng.randint(1, 3)}" for _ in range(4))
            messages.append({"role": "user", "content": f"You arrive at {place}. On the {place}, you see {view}."})
        chat = self.model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return Prompt(self.model.encoder.chat_ids(chat))

    def request(self, episode: int, step: int) -> ExecutorRequest:
        """Write a decision with its commands; `FrozenExecutor.encode` is replaced by `prompt`."""
        rng = random.Random(f"{episode} {step}")
        every = [f"go to {place} {number}" for place in PLACES for number in range(1, 9)]
        every += [f"take {thing} 1 from {place} 1" for thing in THINGS for place in PLACES]
        return ExecutorRequest(str(episode), MemoryBlock(), (), str(step), tuple(rng.sample(every, self.commands)))


def measure_act_speed(
    model: Annotated[str, typer.Option(help="Hugging Face name or folder of an executor.")],
    episodes: Annotated[int, typer.Option(min=1, help="Concurrent episodes.")] = 3,
    steps: Annotated[int, typer.Option(min=2, help="Turns per episode.")] = 20,
    commands: Annotated[int, typer.Option(min=1, max=128, help="Listed commands per step.")] = 30,
    memory_tokens: Annotated[int, typer.Option(min=0, help="Words of memory in the system turn.")] = 300,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or auto.")] = "auto",
) -> None:
    """Compare seconds of a step by `executor.mode`, with and without `executor.prefix_mib`."""
    disable_library_progress_bars()
    config = ExecutorConfig.model_validate({"model": model, "dtype": dtype})
    executor = load_frozen(config, ExecutorInstructions("", lists_commands=False))
    chats = GrowingChats(executor, commands, memory_tokens)
    executor.encode = lambda request: chats.prompt(int(request.goal), int(request.observation))  # type: ignore[method-assign]
    asked = [[chats.request(episode, step) for episode in range(episodes)] for step in range(steps)]
    rows, chosen = list[list[str]](), dict[str, Any]()
    for mode in ("choice", "constrained"):
        for mib in (0.0, PREFIX_MIB):
            executor.mode, executor.prefixes = mode, PrefixCache(mib)  # type: ignore[assignment]
            times, actions = act_all(executor, asked)
            rows.append(_row(mode, mib, times, actions))
            names = [action.action for step in actions for action in step]
            same = sum(a == b for a, b in zip(names, chosen.setdefault(mode, names), strict=True))
            typer.echo(f"  {mode}, prefix_mib {mib:g}: {same} of {len(names)} actions as without a cache")
    heads = ["mode", "prefix_mib", "first step, s", "later steps, s", "last step, s", "tokens in", "of them cached"]
    typer.echo("\n".join(markdown_table(heads, rows)))


def act_all(executor: FrozenExecutor, asked: list[list[ExecutorRequest]]) -> tuple[list[float], list[list[Action]]]:
    """Act at every step; return the seconds (of the processor, without a GPU) of each step, and the actions."""
    gpu = torch.cuda.is_available()
    clock, wait = (time.perf_counter, torch.cuda.synchronize) if gpu else (time.process_time, lambda: None)
    times, actions = [], []
    for requests in asked:
        wait()
        started = clock()
        actions.append(executor.act(requests))
        wait()
        times.append(clock() - started)
    return times, actions


def _row(mode: str, mib: float, times: list[float], actions: list[list[Action]]) -> list[str]:
    read = sum(action.tokens_in for step in actions for action in step)
    cached = sum(action.tokens_cached or 0 for step in actions for action in step)
    seconds = [f"{value:.2f}" for value in (times[0], statistics.median(times[1:]), times[-1])]
    return [mode, f"{mib:g}", *seconds, str(read), f"{cached / read:.0%}"]
