"""Scripted episodes for measurements of cost: synthetic homes, and words and actions as recorded episodes have them.

Models are asked as ever and made to say what the record says (`ScriptedDecoder`, `Forced`; in vLLM as many tokens of
their own, in whose place the record's words are put). So lengths, what can be guessed, and which steps deliver anything
are those of real emissions, whatever the weights. Soft tokens stay the model's.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import LogitsProcessor

from agent.deliveries import find
from agent.episode import EpisodeSpec, Limits, run_episodes
from agent.records import Episode, read_episodes
from compiler.decoding import Decoder
from compiler.language import Emission, Kind, parse
from compiler.prompt import INSTRUCTIONS, compiler_parts
from compiler.records import Compilation, Compiler, CompileRequest, Guess
from envs.base import Observation, Task, Transition
from envs.household.environment import INSTRUCTIONS as RULES
from eval.runs import EPISODES
from executor.base import TokenExecutor
from executor.prompt import ExecutorRequest, memory_text
from executor.records import PAPER, Action, Executor, Grounding, Reads
from lm.backbone import load_encoder
from memory.entry import MemoryEntry, Provenance

MEASURED = Path(__file__).with_name("household_steps.json")  # says itself what it is, and by which command


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


# -- what is said -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Said:
    """What was said at a step: the compiler's emission, and the executor's action."""

    emission: str
    action: str


def said_in(path: Path = MEASURED) -> list[list[Said]]:
    """Read the steps of recorded episodes: of a run folder of `eval`, its episodes.jsonl, or a JSON file like MEASURED.

    Raises:
        ValueError: there is no such file, or it holds no episode of two steps or more that was compiled.
    """
    path = path / EPISODES if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"{path} does not exist: name a run folder of `memcompiler eval`, or a file like {MEASURED}")
    if path.suffix == ".jsonl":
        records = read_episodes(path, images=False)
        said = [[Said(s.emission_text, s.action) for s in e.steps if s.emission_text and s.action] for e in records]
    else:
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            said = [[Said(*map(str, step)) for step in steps] for steps in record["episodes"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} does not hold steps as {MEASURED} does: {error}") from error
    said = [steps for steps in said if len(steps) > 1]
    if not said:
        raise ValueError(f"{path} has no compiled episode of two steps or more")
    return said


def _experience(draw: random.Random, number: int) -> str:
    thing, place = draw.choice(("mug", "plate", "book", "apple")), draw.choice(("shelf", "cabinet", "drawer", "desk"))
    visits = [f"go to {draw.choice(('shelf', 'drawer', 'sidetable'))} {draw.randint(1, 9)}" for _ in range(3)]
    found = f"{place} {draw.randint(1, 9)}"
    lines = [*visits, f"go to {found}", f"take {thing} 1 from {found}", f"heat {thing} 1 with microwave 1"]
    return "\n".join([f"in home {number}: put a hot {thing} in cabinet", *lines, f"the {thing} was in {found}"])


class Script:
    """Synthetic episodes: every number is another home with a memory of its own, and what is said there are the steps
    of a recorded episode. One that was shorter goes on with its steps but the first, again and again.

    Args:
        compiler, executor: folders or names; each one's tokenizer counts what it reads and writes.
        memory_tokens: of each home's memory, by the executor's tokenizer.
        n_soft: soft tokens of a step.
    """

    def __init__(
        self,
        compiler: str,
        executor: str,
        memory_tokens: int,
        n_soft: int,
        said: Sequence[Sequence[Said]],
        seed: int = 0,
    ) -> None:
        self.memory_tokens, self.n_soft, self.episodes, self.seed = memory_tokens, n_soft, said, seed
        self.compiler, self.executor = load_encoder(compiler), TokenExecutor(load_encoder(executor), RULES)

    def spec(self, number: int) -> EpisodeSpec:
        """Make home `number`, with entries until they hold `memory_tokens` tokens: the last may go beyond."""
        draw, entries = random.Random(f"{self.seed} {number}"), []
        while self.count(memory_text([entry.text for entry in entries])) < self.memory_tokens:
            text = _experience(draw, number)
            entries.append(MemoryEntry(f"{number}-{len(entries)}", text, Provenance("", "", "", "train", True)))
        task = Task(str(number), "put a hot mug in cabinet", f"home {number}", "train", kind="heat")
        return EpisodeSpec(task, tuple(entries))

    def said(self, request: CompileRequest | ExecutorRequest) -> Said:
        """Look up what is said at the step that a request is of, by its home and the actions before it."""
        found, t = re.search(r"home (\d+)", request.goal), len(request.history)
        steps = self.episodes[int(found[1]) % len(self.episodes) if found else 0]
        return steps[0 if t == 0 else 1 + (t - 1) % (len(steps) - 1)]

    def emission(self, request: CompileRequest) -> Emission:
        return parse(self.said(request).emission).emission

    def emission_ids(self, request: CompileRequest) -> tuple[int, ...]:
        """Tokenise the emission, with its end of turn."""
        return (*self.compiler.ids(self.said(request).emission), self.compiler.end_id)

    def action_ids(self, request: ExecutorRequest) -> tuple[int, ...]:
        return self.executor.action_ids(self.said(request).action)

    def count(self, text: str) -> int:
        return len(self.executor.tokenizer(text, add_special_tokens=False)["input_ids"])

    def need(self, share: float) -> Drawn:
        """Say which steps need compiling, so that this share of those after the first is compiled, or more."""
        return Drawn(self, share)

    def longest_said(self) -> tuple[int, int]:
        """Count the tokens of the longest emission and of the longest action, ends of turn included."""
        steps = [step for episode in self.episodes for step in episode]
        emission = max(len(self.compiler.ids(step.emission)) for step in steps) + 1
        return emission, max(len(self.executor.action_ids(step.action)) for step in steps)

    def longest(self, deliveries: Sequence[str], steps: int) -> int:
        """Count the tokens of the longest sequence that either model reads and writes, with some room."""
        stand_in = _Rehearsal(self)
        for name in deliveries:
            play(stand_in, stand_in, name, [self.spec(0)], steps)
        return stand_in.longest + sum(self.longest_said()) + 128


class Drawn:
    """A guess of which steps need compiling: all at which something is said, and others by lot."""

    threshold = 0.5

    def __init__(self, script: Script, share: float) -> None:
        silent = [self._silent(step.emission) for steps in script.episodes for step in steps[1:]]
        rest = statistics.fmean(silent)
        self.script, self.lot = script, max(0.0, (share - (1 - rest)) / rest) if rest else 0.0

    def __call__(self, request: CompileRequest) -> float:
        if not self._silent(self.script.said(request).emission):
            return 1.0
        draw = random.Random(f"{self.script.seed} {request.goal} {len(request.history)}")
        return float(draw.random() < self.lot)

    @staticmethod
    def _silent(emission: str) -> bool:
        return parse(emission).emission.kind is Kind.NOACTION


class _Rehearsal:
    """Compiler and executor that write nothing and measure what they would read."""

    accepts_soft, sees_images, reads = True, False, PAPER

    def __init__(self, script: Script) -> None:
        self.script, self.longest = script, 0

    def compile(self, requests: Sequence[CompileRequest]) -> list[Compilation]:
        n = self.script.n_soft
        for request in requests:
            ids = self.script.compiler.encode(compiler_parts(request), INSTRUCTIONS).ids
            self.longest = max(self.longest, len(ids) + 2 + n)
        return [Compilation("", self.script.emission(request), soft=torch.zeros(n, 1)) for request in requests]

    def act(self, requests: Sequence[ExecutorRequest]) -> list[Action]:
        prompts = [self.script.executor.encode(request).ids for request in requests]
        self.longest = max(self.longest, *(len(ids) for ids in prompts))
        return [Action(self.script.said(r).action, Grounding.FREE, "", (), 0, 0) for r in requests]


# -- who says it ------------------------------------------------------------------------------------------------------


class ScriptedDecoder(Decoder):
    """A decoder whose likeliest token is always the next one of `script`, which has the ids of every row."""

    script: Sequence[tuple[int, ...]] = ()

    def _sample(self, logprobs: Tensor, rows: Sequence[Any], guesses: Sequence[Sequence[int]]) -> Tensor:
        tokens = super()._sample(logprobs, rows, guesses)
        for place, (row, guess) in enumerate(zip(rows, guesses, strict=True)):
            said = self.script[row.index][row.length : row.length + 1 + len(guess)] if row.going else ()
            tokens[place, : len(said)] = torch.tensor(said, dtype=torch.long)
        return tokens


def using(decoder: type[Decoder]) -> Any:
    """Have Hugging Face compilers decode by this class: a context."""
    return patch("compiler.hf.Decoder", decoder)


class Forced(LogitsProcessor):
    """Has a Hugging Face model generate the ids of `rows`, and its end of turn behind them."""

    def __init__(self, end_id: int) -> None:
        self.end_id, self.rows = end_id, list[tuple[int, ...]]()

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        t = input_ids.shape[1]  # what was generated: prompts are embeddings
        ids = [row[t] if t < len(row) else self.end_id for row in self.rows]
        return torch.full_like(scores, -torch.inf).scatter(1, torch.tensor(ids, device=scores.device)[:, None], 0.0)


def write_exactly(llm: Any, lengths: Sequence[int]) -> None:
    """Have a vLLM engine write as many tokens as `lengths` says when it is asked; second passes ask for none."""
    enqueue = llm.enqueue

    def exactly(prompts: Any, params: Sequence[Any], **named: Any) -> Any:
        if writing := [one for one in params if not one.extra_args]:
            for one, tokens in zip(writing, lengths, strict=True):
                one.min_tokens = one.max_tokens = tokens
        return enqueue(prompts, params, **named)

    llm.enqueue = exactly


@dataclass(slots=True)
class ScriptedCompiler:
    """A model's compiler, with a clock on its second pass. With a script it is made to say what that says: `force` gets
    the ids before the model is asked."""

    model: Compiler
    script: Script | None = None
    force: Callable[[list[tuple[int, ...]]], None] = lambda ids: None
    second_pass: list[float] = field(default_factory=list)  # seconds, by call
    asked_at: list[list[int]] = field(default_factory=list)  # the steps that a call's requests are of
    _clock: float = 0.0

    def compile(self, requests: Sequence[CompileRequest]) -> list[Compilation]:
        self._clock, script = 0.0, self.script
        if script is not None:
            self.force([script.emission_ids(request) for request in requests])
        made = self.model.compile(requests)
        self.second_pass.append(self._clock)
        self.asked_at.append([len(request.history) for request in requests])
        if script is None:
            return made
        return [replace(c, emission=script.emission(r)) for c, r in zip(made, requests, strict=True)]

    def clear(self) -> None:
        """Forget the calls so far."""
        self.second_pass.clear()
        self.asked_at.clear()

    def second_pass_of(self, steps: int) -> list[float]:
        """Return the seconds by step: each request has its share of its call's."""
        of = [0.0] * steps
        for at, seconds in zip(self.asked_at, self.second_pass, strict=True):
            for t in at:
                of[t] += seconds / len(at)
        return of

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
    """A model's executor, asked as ever and made to do what the script says; `force` as of the compiler."""

    model: Any
    script: Script
    force: Callable[[list[tuple[int, ...]]], None]
    accepts_soft: bool = True
    sees_images: bool = False
    reads: Reads = PAPER

    def act(self, requests: Sequence[ExecutorRequest]) -> list[Action]:
        self.force([self.script.action_ids(request) for request in requests])
        made = self.model.act(requests)
        return [replace(a, action=self.script.said(r).action) for a, r in zip(made, requests, strict=True)]


def play(
    compiler: Compiler,
    executor: Executor,
    delivery: str,
    specs: Sequence[EpisodeSpec],
    steps: int,
    need: Guess | None = None,
) -> list[Episode]:
    """Play all episodes side by side. `need`: for the delivery that asks which steps need compiling.

    Raises:
        ValueError: one broke.
    """
    made = find(delivery).make(compiler, seed=0, need=need)
    episodes = run_episodes(ScriptedHome, specs, made, executor, Limits(steps), len(specs))
    if broken := next((episode.error for episode in episodes if episode.error), None):
        raise ValueError(broken)
    return episodes
