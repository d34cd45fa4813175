"""Scripted episodes for cost measurements: synthetic homes with the emissions and actions of recorded episodes.

Models run as usual, but are forced to write the recorded words (`ScriptedDecoder`, `ForcedTokens`); a vLLM engine
generates as many tokens freely. Lengths, drafts and the mix of emissions are thus realistic with any weights. Soft
tokens are the model's own.
"""

from __future__ import annotations

import json
import random
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import LogitsProcessor

from agent.deliveries import find
from agent.episode import EpisodeLimits, EpisodeSpec, run_episodes
from agent.records import Episode, read_episodes
from benchmarks.measurement import Stopwatch
from compiler.brief_state import BriefState, apply_ops
from compiler.decoding import Decoder
from compiler.language import Emission, Kind, parse
from compiler.records import Compilation, Compiler, CompileRequest, Gate
from envs.base import Observation, Task, Transition
from envs.household.environment import INSTRUCTIONS as EXECUTOR_INSTRUCTIONS
from eval.runs import EPISODES
from executor.base import TokenExecutor
from executor.decoding import FreeWalk
from executor.prompt import ExecutorRequest, memory_text
from executor.records import Action, Executor, ExecutorView
from lm.backbone import load_encoder
from memory.entry import MemoryEntry
from memory.protocol import Record, Trace
from memory.trajectory import entry_of_trace

DEFAULT_RECORD = Path(__file__).with_name("household_steps.json")  # its `about` describes the recording


class ScriptedEnvironment:
    """An environment whose observations ignore the actions; only the step limit ends an episode."""

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


# -- the script -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScriptedStep:
    """The compiler's emission and the executor's action at a step."""

    emission: str
    action: str


def read_script(path: Path = DEFAULT_RECORD) -> list[list[ScriptedStep]]:
    """Read recorded steps by episode from a run folder of `eval`, an episodes.jsonl, or a file like DEFAULT_RECORD.

    Raises:
        ValueError: the file is missing or holds no compiled episode of at least two steps.
    """
    path = path / EPISODES if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist: name a run folder of `memcompiler eval`, or a file like {DEFAULT_RECORD}"
        )
    if path.suffix == ".jsonl":
        records = read_episodes(path, images=False)
        steps = [
            [ScriptedStep(s.emission_text, s.action) for s in e.steps if s.emission_text and s.action] for e in records
        ]
    else:
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            steps = [[ScriptedStep(*map(str, step)) for step in episode] for episode in record["episodes"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} does not hold steps as {DEFAULT_RECORD} does: {error}") from error
    if not (steps := [episode for episode in steps if len(episode) > 1]):
        raise ValueError(f"{path} has no compiled episode of two steps or more")
    return steps


class Script:
    """Synthetic episodes: each number is a home with its own memory and the steps of one recorded episode.

    An episode that is longer than its record repeats all recorded steps but the first.

    Args:
        compiler, executor: model folders or names, whose tokenizers count tokens.
        memory_tokens: size of each home's memory in tokens of the executor.
        episodes: recorded steps by episode.
    """

    def __init__(
        self,
        compiler: str,
        executor: str,
        memory_tokens: int,
        episodes: Sequence[Sequence[ScriptedStep]],
        seed: int = 0,
    ) -> None:
        self.memory_tokens, self.episodes, self.seed = memory_tokens, episodes, seed
        self.compiler = load_encoder(compiler)
        self.executor = TokenExecutor(load_encoder(executor), EXECUTOR_INSTRUCTIONS)

    def spec(self, number: int) -> EpisodeSpec:
        """Create home `number` with raw trajectories of at least `memory_tokens` tokens in total."""
        draw, entries = random.Random(f"{self.seed} {number}"), list[MemoryEntry]()
        while self.count_tokens(memory_text([entry.text for entry in entries])) < self.memory_tokens:
            entries.append(replace(_raw_entry(draw, number), id=f"{number}-{len(entries)}"))
        task = Task(str(number), "put a hot mug in cabinet", f"home {number}", "train", kind="heat")
        return EpisodeSpec(task, tuple(entries))

    def step_of(self, request: CompileRequest | ExecutorRequest) -> ScriptedStep:
        """Find a request's step by its home and the number of actions before it."""
        found, t = re.search(r"home (\d+)", request.goal), len(request.history)
        steps = self.episodes[int(found[1]) % len(self.episodes) if found else 0]
        return steps[0 if t == 0 else 1 + (t - 1) % (len(steps) - 1)]

    def emission(self, request: CompileRequest) -> Emission:
        return parse(self.step_of(request).emission).emission

    def emission_ids(self, request: CompileRequest) -> tuple[int, ...]:
        """Tokenise the emission, end of turn included."""
        return (*self.compiler.ids(self.step_of(request).emission), self.compiler.end_id)

    def action_ids(self, request: ExecutorRequest) -> tuple[int, ...]:
        return self.executor.action_ids(self.step_of(request).action)

    def count_tokens(self, text: str) -> int:
        return len(self.executor.tokenizer(text, add_special_tokens=False)["input_ids"])

    def output_lengths(self) -> tuple[list[int], list[int]]:
        """Count the tokens of all recorded emissions and actions, ends of turn included."""
        steps = [step for episode in self.episodes for step in episode]
        emissions = [len(self.compiler.ids(step.emission)) + 1 for step in steps]
        return emissions, [len(self.executor.action_ids(step.action)) for step in steps]

    def compile_requests(self, spec: EpisodeSpec, steps: int) -> list[CompileRequest]:
        """Create the requests of an episode's first steps, as the agent loop sends them."""
        state, requests = BriefState(spec.goal), list[CompileRequest]()
        for t in range(steps):
            history = tuple(self.step_of(earlier).action for earlier in requests)
            requests.append(CompileRequest(spec.goal, spec.memory, state, observation(t).text, history=history))
            state, _ = apply_ops(self.emission(requests[-1]).ops, state)
        return requests


def _raw_entry(draw: random.Random, number: int) -> MemoryEntry:
    """Create the raw trajectory of an episode with a search: about 390 tokens of a language model, as ALFWorld's."""
    thing, place = draw.choice(("mug", "plate", "book", "apple")), draw.choice(("shelf", "cabinet", "drawer", "desk"))
    visits = [f"{draw.choice(('shelf', 'drawer', 'sidetable'))} {draw.randint(1, 9)}" for _ in range(4)]
    found = f"{place} {draw.randint(1, 9)}"
    things = lambda: ", ".join(
        f"a {draw.choice(('pen', 'bowl', 'vase', 'cup'))} {draw.randint(1, 3)}" for _ in range(4)
    )
    at = lambda spot, more="": f"You arrive at {spot}. On the {spot}, you see {things()}{more}."
    steps = [(f"go to {spot}", at(spot)) for spot in visits]
    steps += [(f"go to {found}", at(found, f" and a {thing} 1"))]
    steps += [(f"take {thing} 1 from {found}", f"You pick up the {thing} 1 from the {found}.")]
    steps += [(f"heat {thing} 1 with microwave 1", f"You heat the {thing} 1 using the microwave 1.")]
    places = ", ".join(f"a {kind} {n}" for kind in ("shelf", "cabinet", "drawer") for n in range(1, 5))
    first = f"You are in the middle of a room. Looking quickly around you, you see {places} and a microwave 1."
    views = [first, *(answer for _, answer in steps)]
    records = tuple(Record(t, views[t], action, answer) for t, (action, answer) in enumerate(steps))
    task = Task(str(number), f"put a hot {thing} in cabinet", f"home {number}", "train", kind="heat")
    why = f"in home {number} the {thing} was in {found}"
    return entry_of_trace(Trace(task, records, success=True, rationale=why), "raw")


class ScriptedGate:
    """A compile gate that opens at every step with a message, and at random at others, `share` of all in the mean."""

    threshold = 0.5

    def __init__(self, script: Script, share: float) -> None:
        silent = statistics.fmean(_is_noaction(step.emission) for steps in script.episodes for step in steps[1:])
        self.script, self.chance = script, max(0.0, (share - (1 - silent)) / silent) if silent else 0.0

    def __call__(self, request: CompileRequest) -> float:
        if not _is_noaction(self.script.step_of(request).emission):
            return 1.0
        draw = random.Random(f"{self.script.seed} {request.goal} {len(request.history)}")
        return float(draw.random() < self.chance)


def _is_noaction(emission: str) -> bool:
    return parse(emission).emission.kind is Kind.NOACTION


# -- forcing models to follow the script ------------------------------------------------------------------------------


class ScriptedDecoder(Decoder):
    """A decoder that samples the next token of `script`, which holds the ids of every row."""

    script: Sequence[tuple[int, ...]] = ()

    def _sample(self, logprobs: Tensor, rows: Sequence[Any], guesses: Sequence[Sequence[int]]) -> Tensor:
        tokens = super()._sample(logprobs, rows, guesses)
        for place, (row, guess) in enumerate(zip(rows, guesses, strict=True)):
            ids = self.script[row.index][row.length : row.length + 1 + len(guess)] if row.going else ()
            tokens[place, : len(ids)] = torch.tensor(ids, dtype=torch.long)
        return tokens


def decoding_by(decoder: type[Decoder]) -> Any:
    """Return a context in which Hugging Face compilers decode by this class."""
    return patch("compiler.hf.Decoder", decoder)


class ForcedTokens(LogitsProcessor):
    """Force a Hugging Face model to generate the ids of `rows`, and then its end of turn: as a logits processor, or,
    where the executor has a prefix cache, as its walks."""

    def __init__(self, end_id: int) -> None:
        self.end_id, self.rows = end_id, list[tuple[int, ...]]()
        self._walks = iter(self.rows)

    def force(self, rows: list[tuple[int, ...]]) -> None:
        """Set the ids of the next batch."""
        self.rows, self._walks = rows, iter(rows)

    def walk(self, end: int, most: int) -> FreeWalk:
        """Create the walk of the batch's next row."""
        return _ForcedWalk(next(self._walks), end, most)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        t = input_ids.shape[1]  # generated so far: prompts are embeddings
        ids = [row[t] if t < len(row) else self.end_id for row in self.rows]
        return torch.full_like(scores, -torch.inf).scatter(1, torch.tensor(ids, device=scores.device)[:, None], 0.0)


class _ForcedWalk(FreeWalk):
    """An answer of given tokens, which ignores the model's choice."""

    def __init__(self, ids: tuple[int, ...], end: int, most: int) -> None:
        super().__init__(end, most)
        self.ids = ids

    def take(self, token: int) -> None:
        super().take(self.ids[len(self.path)])


def force_lengths(llm: Any, lengths: Sequence[int]) -> None:
    """Force a vLLM engine to generate `lengths` tokens per request; second passes generate none."""
    enqueue = llm.enqueue

    def enqueue_exactly(prompts: Any, params: Sequence[Any], **options: Any) -> Any:
        if writing := [one for one in params if not one.extra_args]:
            for one, tokens in zip(writing, lengths, strict=True):
                one.min_tokens = one.max_tokens = tokens
        return enqueue(prompts, params, **options)

    llm.enqueue = enqueue_exactly


@dataclass(slots=True)
class ScriptedCompiler:
    """A model's compiler that writes the scripted emissions, with the seconds of its second pass by step."""

    model: Compiler
    script: Script
    force: Callable[[list[tuple[int, ...]]], None]  # receives the ids before the model runs
    watch: Stopwatch  # of the second pass
    # Seconds by step, summed over episodes.
    second_pass: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def compile(self, requests: Sequence[CompileRequest]) -> list[Compilation]:
        self.watch.seconds = 0.0
        self.force([self.script.emission_ids(request) for request in requests])
        compiled = self.model.compile(requests)
        for request in requests:
            self.second_pass[len(request.history)] += self.watch.seconds / len(requests)
        return [replace(c, emission=self.script.emission(r)) for c, r in zip(compiled, requests, strict=True)]


@dataclass(slots=True)
class ScriptedExecutor:
    """A model's executor that takes the scripted actions; `force` receives their ids before the model runs."""

    model: Any
    script: Script
    force: Callable[[list[tuple[int, ...]]], None]
    reads: ExecutorView
    accepts_soft: bool = True
    sees_images: bool = False

    def act(self, requests: Sequence[ExecutorRequest]) -> list[Action]:
        self.force([self.script.action_ids(request) for request in requests])
        acted = self.model.act(requests)
        return [replace(a, action=self.script.step_of(r).action) for a, r in zip(acted, requests, strict=True)]


def play(
    compiler: Compiler, executor: Executor, delivery: str, specs: Sequence[EpisodeSpec], steps: int, gate: Gate
) -> list[Episode]:
    """Play all episodes side by side; `gate` decides for gated deliveries. Raises: ValueError for a failed episode."""
    playable = find(delivery).create(compiler, seed=0, gate=gate)
    episodes = run_episodes(
        ScriptedEnvironment,
        specs,
        delivery=playable,
        executor=executor,
        limits=EpisodeLimits(steps),
        concurrency=len(specs),
    )
    if failed := next((episode.error for episode in episodes if episode.error), None):
        raise ValueError(failed)
    return episodes
