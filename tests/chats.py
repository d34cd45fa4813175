"""A growing chat for tests of executors: the requests of consecutive steps of one episode."""

from __future__ import annotations

import torch

from agent.records import StepInput, executor_request
from compiler.language import Emission
from executor.prompt import ExecutorRequest, MemoryBlock, Turn
from executor.records import Executor
from lm.prompt import PromptEncoder

COMMANDS = ("go to shelf 1", "go to shelf 10", "open cabinet 2", "take mug 1 from shelf 1", "look")
RULES = "You are in a home with a shelf and a cabinet. Answer with a command. "


def growing(executor: Executor, steps: int, soft: bool = True) -> list[ExecutorRequest]:
    """Return the requests of the first steps; with `soft`, each step has soft tokens of its own in its newest turn."""
    requests, past = list[ExecutorRequest](), ()
    for t in range(steps):
        tokens = torch.randn(4, 64, generator=torch.Generator().manual_seed(t)) if soft else None
        emission = Emission(f"go to shelf {t}", "the mug was there") if t != 1 else Emission()
        view = f"You see a cabinet {t}, and in it you see nothing."
        step = StepInput("put a mug in cabinet", view, admissible=COMMANDS, past=past, emission=emission, soft=tokens)
        requests.append(executor_request(step, executor))
        read = tokens if emission.guidance else None
        block = MemoryBlock(guidance=emission.guidance, reason=emission.reason, soft=read)
        past = (*past, Turn(view, COMMANDS[t % len(COMMANDS)], block))
    return requests


def replaced(encoder: PromptEncoder, before: ExecutorRequest) -> int:
    """Return how many tokens at the end of a prompt its successor replaces: soft tokens, and what follows them."""
    n = before.delivered.n_soft
    tail = "<|im_end|>\n<|im_start|>assistant\n"
    return (n + len(encoder.chat_ids("\nSoft memory: ")) + len(encoder.chat_ids(tail)) + 1) if n else 0
