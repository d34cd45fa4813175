"""Part `emission`: a step at the paper's proportions in PyTorch, with the memory pasted (static) and compiled.

static      the executor reads a prompt that holds the memory, and acts
compiled    the compiler reads the memory, writes an emission and reads its memory tokens (the second pass); the
            executor reads a prompt with soft tokens, and acts

Emissions and actions have fixed lengths, because random weights choose none. Acting is `generate` (the paper's: token
by token) or `choice` (all commands scored in one pass).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.gpu.measuring import completed, peak_beyond, seconds_of
from benchmarks.gpu.models import RandomExecutor, lengths_of, make_compiler, make_executor, model_pair, sft_config
from benchmarks.gpu.parts import Row, Setup
from benchmarks.measurement import Stopwatch, resident_bytes
from compiler.hf import MemoryCompiler
from compiler.records import Decoding
from lm.prompt import Prompt
from plan.budget import GIB
from plan.models import END, MEMORY, prompt_of
from plan.replay import commands, hidden_size, prompts_of, replay_compile, requests_of

EPISODES = {"paper": (1, 8, 32), "tiny": (1, 2)}
WARM_UP = 4  # tokens of warm-up emissions


@dataclass(slots=True)
class Models:
    """Both models with fixed output lengths, and the time of the compiler's second pass."""

    compiler: MemoryCompiler
    executor: RandomExecutor
    second_pass: Stopwatch

    def compile(self, episodes: int, tokens: int) -> list[Tensor]:
        """Compile emissions of `tokens` tokens for a batch of episodes; return the soft tokens (N, d) of each."""
        self.compiler.decoding = Decoding(max_new_tokens=tokens, batch_size=episodes)
        self.second_pass.seconds = 0.0
        return [c.soft for c in self.compiler.compile(requests_of(episodes)) if c.soft is not None]

    def act(self, way: str, names: Sequence[str], prompts: Sequence[Prompt]) -> None:
        """Generate an action after every prompt, or score all commands there."""
        with torch.no_grad():
            if way == "generate":
                self.executor.generate(prompts, [None] * len(prompts))
            else:
                self.executor.candidate_logprobs(prompts, [names] * len(prompts))


def measure(setup: Setup) -> Iterator[Row]:
    """Yield a row per number of episodes and way of acting."""
    models, name = make_models(setup), model_pair(setup).name
    for episodes in EPISODES[setup.size]:
        row = {"models": name, "episodes": episodes}
        compiled = completed(setup, row, lambda n=episodes: _measure_compiling(setup, models, n))
        if "emission_s" not in compiled:
            yield compiled
            continue
        for way in ("generate", "choice"):
            step = lambda n=episodes, w=way, c=compiled: _measure_step(
                setup, models, episodes=n, way=w, compile_s=c["batch_s"]
            )
            yield completed(setup, {**compiled, "act": way}, step)


def plan(setup: Setup) -> Iterator[Row]:
    """Yield the planned peak memory of compiling."""
    pair = model_pair(setup)
    config = sft_config(pair)
    for episodes in EPISODES[setup.size]:
        predicted = replay_compile(config.compiler, hidden_size(config.executor), lengths_of(setup), episodes)
        yield {"models": pair.name, "episodes": episodes, "plan_gib": predicted.total / GIB}


def make_models(setup: Setup) -> Models:
    """Create both models; emissions and actions end at their limits only."""
    lengths, config = lengths_of(setup), sft_config(model_pair(setup))
    executor = make_executor(config, setup.device)
    executor.max_new_tokens = executor.model.generation_config.min_new_tokens = lengths.action
    compiler = make_compiler(config, executor.backbone.hidden_size, setup.device).eval()
    compiler.backbone.suppressed = [MEMORY, END]
    compiler.encode = lambda request: prompt_of(lengths.prompt)
    columns = compiler.n_tokens + 2  # of the second pass: last token, end of turn, memory tokens
    reads_memory = lambda batch, cache=None, *_: cache is not None and batch.tokens.shape[1] == columns
    watch = Stopwatch()
    compiler.backbone.hidden = watch.wrap(compiler.backbone.hidden, reads_memory)  # type: ignore[method-assign]
    return Models(compiler, executor, watch)


def _measure_compiling(setup: Setup, models: Models, episodes: int) -> Row:
    """Measure seconds of a batch and of its second pass, and peak memory."""
    emission = lengths_of(setup).emission
    models.compile(episodes, WARM_UP)
    run = lambda: models.compile(episodes, emission)
    peak = resident_bytes([models.compiler]) + peak_beyond(setup, run)
    seconds = seconds_of(setup, run, times=1)
    second = models.second_pass.seconds
    return {
        "emission_s": seconds / episodes,
        "tokens_per_s": episodes * emission / seconds,
        "batch_s": seconds,
        "second_pass_s": second,
        "second_pass_share": second / seconds,
        "peak_gib": peak / GIB,
    }


def _measure_step(setup: Setup, models: Models, episodes: int, way: str, compile_s: float) -> Row:
    """Measure a static and a compiled step, the latter beyond `compile_s`."""
    lengths, soft = lengths_of(setup), models.compile(episodes, WARM_UP)
    n = len(soft[0])
    with_soft = zip(prompts_of(max(lengths.acting, n), episodes, n), soft, strict=True)
    static_prompts = prompts_of(lengths.acting + lengths.memory, episodes)
    seconds = list[float]()
    for prompts in (static_prompts, [replace(prompt, soft=row) for prompt, row in with_soft]):
        act = lambda prompts=prompts: models.act(way, commands(lengths), prompts)
        act()
        seconds.append(seconds_of(setup, act))
    static, acting = seconds
    compiled = compile_s + acting
    times = {"static_s": static, "act_compiled_s": acting, "compiled_s": compiled}
    return {**times, "compiled_over_static": compiled / static}
