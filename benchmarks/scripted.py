"""Scripted episodes for measurements of cost: synthetic homes, and words and actions that do not depend on any model.

A `ScriptedCompiler` and a `ScriptedExecutor` ask a model as ever, and put the script's words in the place of its own
once they are paid for. Soft tokens stay the model's.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from agent.deliveries import find
from agent.episode import EpisodeSpec, Limits, run_episodes
from agent.records import Episode
from compiler.brief_state import Create
from compiler.language import Emission
from compiler.prompt import INSTRUCTIONS, compiler_parts
from compiler.records import Compilation, Compiler, CompileRequest
from envs.base import Observation, Task, Transition
from envs.household.environment import INSTRUCTIONS as RULES
from executor.base import TokenExecutor
from executor.prompt import ExecutorRequest, memory_text
from executor.records import EVERYTHING, Action, Executor, Grounding, Reads
from lm.backbone import load_encoder
from memory.entry import MemoryEntry, Provenance

EMISSION_TOKENS = 48  # written at every step; the end-of-turn token follows
ACTION_TOKENS = 8
REASON = "in home 17 the mug was in cabinet 2, behind the plates, after both shelves and the first drawer were empty"
GUIDANCE = "go to cabinet 2, open it, take the mug, heat it with microwave 1 and put it in cabinet 5"
PLAN = Create("plan", "find mug; heat mug; put mug in cabinet")


class ScriptedHome:
    """An environment that answers the same whatever is done. Only the step limit ends an episode."""

    name = "scripted"

    def tasks(self, split: str) -> list[Task]:
        return []

    def reset(self, task: Task) -> Observation:
        self.t = 0
        return observation(0)

    def step(self, action: str) -> Transition:
        self.t += 1
        return Transition(observation(self.t), progress=0.0, success=False, done=False)

    def expert(self) -> list[str] | None:
        return None

    def close(self) -> None:
        pass


def observation(t: int) -> Observation:
    n = t + 1
    return Observation(f"You arrive at shelf {n}. On the shelf {n}, you see a plate {n}, a book 1 and a pen 3.")


def command(t: int) -> str:
    return f"go to shelf {t + 1}"


def emission(t: int) -> Emission:
    """Say what step t needs; the Brief State grows by a belief at each."""
    belief = Create(f"shelf {t + 1}", "empty, not worth another look")
    return Emission(GUIDANCE, REASON, (belief,) if t else (PLAN, belief))


def _experience(draw: random.Random, number: int) -> str:
    thing, place = draw.choice(("mug", "plate", "book", "apple")), draw.choice(("shelf", "cabinet", "drawer", "desk"))
    visits = [f"go to {draw.choice(('shelf', 'drawer', 'sidetable'))} {draw.randint(1, 9)}" for _ in range(3)]
    found = f"{place} {draw.randint(1, 9)}"
    lines = [*visits, f"go to {found}", f"take {thing} 1 from {found}", f"heat {thing} 1 with microwave 1"]
    return "\n".join([f"in home {number}: put a hot {thing} in cabinet", *lines, f"the {thing} was in {found}"])


class Script:
    """Synthetic episodes: every number is another home with a memory of its own, step t has t actions behind it.

    Args:
        model: folder or name; its tokenizer counts.
        memory_tokens: of each home's memory.
        n_soft: soft tokens of a step.
    """

    def __init__(self, model: str, memory_tokens: int, n_soft: int, seed: int = 0) -> None:
        self.memory_tokens, self.n_soft, self.seed = memory_tokens, n_soft, seed
        self.compiler, self.executor = load_encoder(model), TokenExecutor(load_encoder(model), RULES)

    def spec(self, number: int) -> EpisodeSpec:
        """Make home `number`, with entries until they hold `memory_tokens` tokens: the last may go beyond."""
        draw, entries = random.Random(f"{self.seed} {number}"), []
        while self.count(memory_text([entry.text for entry in entries])) < self.memory_tokens:
            text = _experience(draw, number)
            entries.append(MemoryEntry(f"{number}-{len(entries)}", text, Provenance("", "", "", "train", True)))
        task = Task(str(number), "put a hot mug in cabinet", f"home {number}", "train", kind="heat")
        return EpisodeSpec(task, tuple(entries))

    def count(self, text: str) -> int:
        return len(self.executor.tokenizer(text, add_special_tokens=False)["input_ids"])

    def longest(self, deliveries: Sequence[str], steps: int) -> int:
        """Count the tokens of the longest sequence that either model reads and writes, with some room."""
        stand_in = _Rehearsal(self)
        for name in deliveries:
            play(stand_in, stand_in, name, [self.spec(0)], steps)
        return stand_in.longest + 128


class _Rehearsal:
    """Compiler and executor that write nothing and measure what they would read and write."""

    accepts_soft, sees_images, reads = True, False, EVERYTHING

    def __init__(self, script: Script) -> None:
        self.script, self.longest = script, 0

    def compile(self, requests: Sequence[CompileRequest]) -> list[Compilation]:
        n = self.script.n_soft
        for request in requests:
            ids = self.script.compiler.encode(compiler_parts(request), INSTRUCTIONS).ids
            self.longest = max(self.longest, len(ids) + EMISSION_TOKENS + 2 + n)
        return [Compilation("", emission(len(request.history)), soft=torch.zeros(n, 1)) for request in requests]

    def act(self, requests: Sequence[ExecutorRequest]) -> list[Action]:
        prompts = [self.script.executor.encode(request).ids for request in requests]
        self.longest = max(self.longest, *(len(ids) + ACTION_TOKENS for ids in prompts))
        return [Action(command(len(r.history)), Grounding.FREE, "", (), 0, 0) for r in requests]


@dataclass(slots=True)
class ScriptedCompiler:
    """A model's compiler, asked as ever and then made to have said what the script says."""

    model: Compiler
    second_pass: list[float] = field(default_factory=list)  # seconds, by call
    _clock: float = 0.0

    def compile(self, requests: Sequence[CompileRequest]) -> list[Compilation]:
        self._clock = 0.0
        made = self.model.compile(requests)
        self.second_pass.append(self._clock)
        return [replace(c, emission=emission(len(r.history))) for c, r in zip(made, requests, strict=True)]

    def clocked(self, call: Callable[..., Any], counts: Callable[..., bool] = lambda *_: True) -> Callable[..., Any]:
        """Wrap `call`, whose seconds are those of the second pass where `counts` says so of its arguments."""
        wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None

        def timed(*arguments: Any, **named: Any) -> Any:
            if not counts(*arguments, **named):
                return call(*arguments, **named)
            wait()
            started = time.perf_counter()
            result = call(*arguments, **named)
            wait()
            self._clock += time.perf_counter() - started
            return result

        return timed


@dataclass(slots=True)
class ScriptedExecutor:
    """A model's executor, asked as ever and then made to have done what the script says."""

    model: Any
    accepts_soft: bool = True
    sees_images: bool = False
    reads: Reads = EVERYTHING  # at every step, for what is measured is its cost

    def act(self, requests: Sequence[ExecutorRequest]) -> list[Action]:
        made = self.model.act(requests)
        return [replace(a, action=command(len(r.history))) for a, r in zip(made, requests, strict=True)]


def play(
    compiler: Compiler, executor: Executor, delivery: str, specs: Sequence[EpisodeSpec], steps: int
) -> list[Episode]:
    """Play all episodes side by side.

    Raises:
        ValueError: one broke.
    """
    made = find(delivery).make(compiler, seed=0)
    episodes = run_episodes(ScriptedHome, specs, made, executor, Limits(steps), len(specs))
    if broken := next((episode.error for episode in episodes if episode.error), None):
        raise ValueError(broken)
    return episodes
