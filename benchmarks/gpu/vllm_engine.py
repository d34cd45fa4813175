"""Parts `vllm` and `speculation`: vLLM beside PyTorch on the same device, with the shipped models and random adapters.

measure      hidden states under CUDA graphs; an adapter swapped in a running engine; soft tokens in a prompt
speculate    emissions with n-gram speculation equal those without (a speculating engine is its process's last)
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.measuring import seconds_of
from benchmarks.gpu.parity import equal_share
from benchmarks.gpu.parts import Row, Setup
from compiler import checkpoint
from compiler.base import TokenCompiler
from compiler.build import load_compiler, load_served_compiler
from compiler.hf import MemoryCompiler
from compiler.records import Compilation, CompileRequest
from configs.models import CompilerConfig, ExecutorConfig, Speed, VllmEngine
from envs.spec import ExecutorInstructions
from executor.build import load_executor, load_frozen
from lm.prompt import Prompt, PromptPart
from memory.entry import MemoryEntry, Provenance

COMPILER, EXECUTOR = "zoo/household/compiler", "zoo/household/executor"
REQUESTS, TOKENS, NGRAM = 6, 40, 3
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}  # vLLM's attention kernels on GPUs need 16-bit floats
TOLERATED = {"float32": {"values": 1e-3, "tokens": 1.0}, "bfloat16": {"values": 5e-2, "tokens": 0.9}}
COMMANDS = ("go to shelf 1", "go to cabinet 2", "take mug 1 from shelf 1", "look")


def measure(setup: Setup) -> Iterator[Row]:
    """Yield a row per comparison, and the speed of both engines."""
    batch = requests()
    with tempfile.TemporaryDirectory(prefix="memcompiler-gpu-") as folder:
        theirs = [random_compiler(setup, seed) for seed in (1, 2)]
        saved = [_save(compiler, Path(folder) / str(i)) for i, compiler in enumerate(theirs)]
        served = load_served_compiler(compiler_config(setup, saved[0]))
        suppress_end(served, *theirs)
        first = served.compile(batch)
        yield from compare(setup, "first adapter", theirs[0].compile(batch), first)
        served.load_adapter(saved[1], 1, theirs[1].projector)
        second = served.compile(batch)
        yield from compare(setup, "swapped adapter", theirs[1].compile(batch), second)
        moved, least = _gap(_means(first), _means(second)), TOLERATED[dtype(setup)]["values"]
        yield {"what": "the adapters differ (mu)", "relative": moved, "passed": moved > least}
        yield _speed("compiling in vLLM", seconds_of(setup, lambda: served.compile(batch), 1), second)
        yield _speed("compiling in PyTorch", seconds_of(setup, lambda: theirs[1].compile(batch), 1), second)
    yield from soft_tokens(setup)


def speculate(setup: Setup) -> Iterator[Row]:
    """Yield comparisons of a speculating engine with PyTorch, its number of steps and its speed."""
    batch, compiler = requests(), random_compiler(setup, 1)
    with tempfile.TemporaryDirectory(prefix="memcompiler-gpu-") as folder:
        served = load_served_compiler(compiler_config(setup, _save(compiler, Path(folder)), NGRAM))
        suppress_end(served, compiler)
        steps, step = [], served.llm.llm_engine.step
        served.llm.llm_engine.step = lambda: steps.append(1) or step()  # type: ignore[method-assign]
        compiled = served.compile(batch)
        yield from compare(setup, "guessing", compiler.compile(batch), compiled)
        longest = max(len(c.emission_ids) for c in compiled)
        yield {"what": f"steps of the engine, second pass included, to emissions of {longest}", "relative": len(steps)}
        yield _speed("compiling, guessing", seconds_of(setup, lambda: served.compile(batch), 1), compiled)


def soft_tokens(setup: Setup) -> Iterator[Row]:
    """Yield the difference of commands' likelihoods after soft tokens, and the effect of other soft tokens."""
    config = ExecutorConfig(model=EXECUTOR, dtype=dtype(setup), device=setup.device, vllm=engine_settings(setup))
    theirs = load_frozen(config, ExecutorInstructions(""))
    ours: Any = load_executor(config.model_copy(update={"engine": "vllm"}), ExecutorInstructions(""))
    prompts, n = [], 16
    for i in range(REQUESTS):
        soft = torch.randn(n, theirs.backbone.hidden_size, generator=torch.Generator().manual_seed(i)) * 0.05
        text = theirs.encoder.encode([PromptPart(f"put a mug in cabinet {i + 1}. "), PromptPart(soft=n)])
        prompts.append(replace(text, soft=soft))
    with torch.no_grad():
        expected, found = (_scores(executor, prompts) for executor in (theirs, ours))
        others = _scores(theirs, [replace(p, soft=-p.soft) for p in prompts if p.soft is not None])
    gap, allowed = _gap(expected, found), TOLERATED[dtype(setup)]["values"]
    yield {"what": "likelihoods behind soft tokens", "relative": gap, "tolerated": allowed, "passed": gap <= allowed}
    moved = _gap(expected, others)
    yield {"what": "other soft tokens move them", "relative": moved, "passed": moved > gap}


def dtype(setup: Setup) -> Any:
    """Return the precision of both engines."""
    return DTYPES[setup.device]


def engine_settings(setup: Setup) -> VllmEngine:
    """Return settings of an engine on a part of the GPU, with CUDA graphs."""
    return VllmEngine(
        gpu_memory_utilization=0.3, max_model_len=2048, max_num_seqs=16, enforce_eager=setup.device == "cpu"
    )


def compiler_config(setup: Setup, folder: Path | None = None, ngram: int = 0) -> CompilerConfig:
    """Return settings of the shipped compiler base; with a checkpoint folder, in vLLM."""
    return CompilerConfig(
        model=COMPILER,
        dtype=dtype(setup),
        device=setup.device,
        vllm=engine_settings(setup),
        instructions="none",
        max_new_tokens=TOKENS,
        engine="vllm" if folder else "hf",
        checkpoint=str(folder) if folder else None,
        speed=Speed(ngram=ngram),
    )


def random_compiler(setup: Setup, seed: int) -> MemoryCompiler:
    """Create a compiler in PyTorch with a random adapter and projector."""
    executor = load_frozen(
        ExecutorConfig(model=EXECUTOR, dtype=dtype(setup), device=setup.device), ExecutorInstructions("")
    )
    compiler = load_compiler(compiler_config(setup), executor, seed)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in checkpoint.trained_parameters(compiler).items():
            if "lora_" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=draw))
    return compiler.eval()


def suppress_end(*compilers: TokenCompiler) -> None:
    """Suppress the end of turn, which random adapters would write at once."""
    for compiler in compilers:
        encoder = compiler.encoder
        encoder.suppressed = sorted({*encoder.suppressed, encoder.end_id})


def requests() -> list[CompileRequest]:
    """Return requests of unequal length, without pictures."""
    entries = [
        MemoryEntry(
            f"e{i}",
            f"in home {i}: put a mug in shelf\ngo to shelf {i}",
            Provenance("", "", goal="", split="train", success=True),
        )
        for i in range(1, REQUESTS + 2)
    ]
    return [
        CompileRequest("put a mug in cabinet", tuple(entries[: i + 1]), None, "You see a cabinet 1. " * (1 + i % 2))
        for i in range(REQUESTS)
    ]


def compare(setup: Setup, what: str, theirs: Sequence[Compilation], ours: Sequence[Compilation]) -> Iterator[Row]:
    """Yield the share of equal tokens, and the difference of soft token means of equal emissions."""
    allowed = TOLERATED[dtype(setup)]
    pairs = [(a.emission_ids, b.emission_ids) for a, b in zip(theirs, ours, strict=True)]
    same = equal_share(*zip(*pairs, strict=True))
    yield {
        "what": f"{what}: share of tokens that PyTorch writes",
        "relative": same,
        "tolerated": allowed["tokens"],
        "passed": same >= allowed["tokens"],
    }
    equal = [i for i, (a, b) in enumerate(pairs) if a == b]
    if equal:
        gap = _gap(*(_means([compiled[i] for i in equal]) for compiled in (theirs, ours)))
        shown = f"{what}: soft tokens (mu) of {len(equal)} emissions"
        yield {"what": shown, "relative": gap, "tolerated": allowed["values"], "passed": gap <= allowed["values"]}


def _save(compiler: MemoryCompiler, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    checkpoint.save_weights(folder, compiler)
    return folder


def _means(compiled: Sequence[Compilation]) -> torch.Tensor:
    return torch.stack([c.mu for c in compiled if c.mu is not None])


def _scores(executor: Any, prompts: Sequence[Prompt]) -> torch.Tensor:
    return torch.cat(executor.candidate_logprobs(prompts, [COMMANDS] * len(prompts))).float().cpu()


def _gap(expected: torch.Tensor, found: torch.Tensor) -> float:
    """Return the largest difference over the largest value."""
    return float((expected - found).abs().max() / expected.abs().max())


def _speed(what: str, seconds: float, compiled: Sequence[Compilation]) -> Row:
    written = sum(len(c.emission_ids) for c in compiled)
    return {"what": what, "seconds": seconds, "tokens_per_s": written / seconds}
