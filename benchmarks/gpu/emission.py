"""A step of acting at the paper's proportions, in PyTorch: where memory is pasted, and where it is compiled.

The compiler is about half of the executor. Emissions and actions have a fixed length, for random weights say nothing.
static      the executor reads its prompt with the memory in it, and acts
compiled    the compiler reads the memory, writes an emission, reads its memory tokens (the second pass); the executor
            reads a prompt with soft tokens, and acts
Acting is `generate` (the paper's; every token is written) or `choice` (all commands are scored in one pass).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.gpu.measuring import peak_beyond, seconds_of, tried
from benchmarks.gpu.models import RandomExecutor, chosen, lengths_of, make_compiler, make_executor, sft_config
from benchmarks.gpu.parts import Row, Setup
from benchmarks.plan_check import staying
from benchmarks.scripted import ScriptedCompiler
from compiler.hf import MemoryCompiler
from compiler.records import Decoding
from configs.training import SftConfig
from lm.prompt import Prompt
from plan.budget import GIB, Lengths
from plan.models import END, MEMORY, prompt_of
from plan.replay import commands, hidden_size, prompts_of, replay_compile, requests_of

EPISODES = {"paper": (1, 8, 32), "tiny": (1, 2)}
SHORTEST = 4  # tokens of the emissions that warm up


@dataclass(slots=True)
class Bench:
    """Both models, with forced lengths and a clock on the second pass."""

    setup: Setup
    models: str
    config: SftConfig
    lengths: Lengths
    compiler: MemoryCompiler
    executor: RandomExecutor
    scripted: ScriptedCompiler

    def compile(self, episodes: int, tokens: int) -> list[Tensor]:
        """Compile for so many episodes at once, emissions of so many tokens; the soft tokens (N, d) of each."""
        self.compiler.decoding = Decoding(max_new_tokens=tokens, batch_size=episodes)
        return [made.soft for made in self.scripted.compile(requests_of(episodes)) if made.soft is not None]

    def generating(self, prompt_tokens: int, soft: Sequence[Tensor], episodes: int) -> Callable[[], object]:
        """Prepare to write an action behind every prompt, with these soft tokens in it, or none."""
        prompts = self._prompts(prompt_tokens, soft, episodes)
        return torch.no_grad()(lambda: self.executor.generate(prompts, [None] * episodes))

    def choosing(self, prompt_tokens: int, soft: Sequence[Tensor], episodes: int) -> Callable[[], object]:
        """Prepare to score all commands behind every prompt."""
        prompts, names = self._prompts(prompt_tokens, soft, episodes), [commands(self.lengths)] * episodes
        return torch.no_grad()(lambda: self.executor.candidate_logprobs(prompts, names))

    def _prompts(self, tokens: int, soft: Sequence[Tensor], episodes: int) -> list[Prompt]:
        if not soft:
            return prompts_of(tokens, episodes)
        made = prompts_of(max(tokens, len(soft[0])), episodes, len(soft[0]))
        return [replace(prompt, soft=row) for prompt, row in zip(made, soft, strict=True)]


def measure(setup: Setup) -> Iterator[Row]:
    """Yield two rows for each number of episodes at once, one for each way of acting."""
    bench = make_bench(setup)
    for episodes in EPISODES[setup.size]:
        row = {"models": bench.models, "episodes": episodes}
        found = tried(setup, row, lambda episodes=episodes: _compiling(bench, episodes))
        if "emission_s" not in found:
            yield found
            continue
        for act, acting in (("generate", bench.generating), ("choice", bench.choosing)):
            yield tried(setup, {**found, "act": act}, lambda e=episodes, a=acting, f=found: _stepping(bench, e, a, f))


def plan(setup: Setup) -> Iterator[Row]:
    """Yield what the plan says of compiling: peak memory."""
    case = chosen(setup)
    config = sft_config(case)
    for episodes in EPISODES[setup.size]:
        made = replay_compile(config.compiler, hidden_size(config.executor), lengths_of(setup), episodes)
        yield {"models": case.name, "episodes": episodes, "plan_gib": made.total / GIB}


def make_bench(setup: Setup) -> Bench:
    """Make both models; emissions run into their limit, and so do actions."""
    case, lengths = chosen(setup), lengths_of(setup)
    config = sft_config(case)
    executor = make_executor(config, setup.device)
    executor.max_new_tokens = executor.model.generation_config.min_new_tokens = lengths.action
    compiler = make_compiler(config, executor.backbone.hidden_size, setup.device).eval()
    compiler.backbone.suppressed = [MEMORY, END]
    compiler.encode = lambda request: prompt_of(lengths.prompt)
    scripted, columns = ScriptedCompiler(compiler), compiler.n_tokens + 2  # the last token, the end of turn, memory
    compiler.backbone.hidden = scripted.clocked(  # type: ignore[method-assign]
        compiler.backbone.hidden, lambda batch, cache=None: cache is not None and batch.tokens.shape[1] == columns
    )
    return Bench(setup, case.name, config, lengths, compiler, executor, scripted)


def _compiling(bench: Bench, episodes: int) -> Row:
    """Measure compiling alone: seconds of a batch, its second pass, memory beside the plan's."""
    setup, lengths = bench.setup, bench.lengths
    bench.compile(episodes, SHORTEST)
    run = lambda: bench.compile(episodes, lengths.emission)
    held = staying([bench.compiler]) + peak_beyond(setup, run)
    seconds = seconds_of(setup, run, times=1)
    second = bench.scripted.second_pass[-1]
    return {
        "emission_s": seconds / episodes,
        "tokens_per_s": episodes * lengths.emission / seconds,
        "batch_s": seconds,
        "second_pass_s": second,
        "second_pass_share": second / seconds,
        "peak_gib": held / GIB,
    }


def _stepping(bench: Bench, episodes: int, acting: Callable[..., Callable[[], object]], compiled: Row) -> Row:
    """Measure a step of either delivery; `compiled` says what compiling took."""
    lengths, soft = bench.lengths, bench.compile(episodes, SHORTEST)
    taken = []
    for act in (acting(lengths.acting + lengths.memory, [], episodes), acting(lengths.acting, soft, episodes)):
        act()
        taken.append(seconds_of(bench.setup, act))
    static, after = taken
    step = compiled["batch_s"] + after
    return {
        "static_s": static,
        "act_compiled_s": after,
        "compiled_s": step,
        "compiled_over_static": step / static,
    }
