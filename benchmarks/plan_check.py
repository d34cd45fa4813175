"""What `memcompiler plan` predicts beside what real runs take, at most, on a CPU.

    python -m benchmarks.plan_check [--model DIR]          (DIR: a further model as compiler and executor, any size)

Models of several shapes with random weights take a step of SFT, an update of GRPO, compile and act, on rows of the same
lengths as the plan assumes. Measured is what torch's allocator gives out and takes back (its profiler's memory events),
beyond weights and moments; these are added on both sides for the total.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM

from compiler.build import load_compiler
from compiler.hf import MemoryCompiler
from configs.load import load_config
from configs.training import GrpoConfig, SftConfig
from envs.spec import Told
from eval.table import markdown_table
from executor.build import load_frozen
from executor.hf import FrozenExecutor
from plan import replay
from plan.budget import Lengths
from plan.models import END, MEMORY, PAD, ShapedBackbone, prompt_of
from plan.replay import Replay
from runtime.progress import quiet
from training.backend import Replicated
from training.grpo import GrpoTrainer
from training.sft_losses import sft_losses
from zoo.household.words import LEXICON
from zoo.models import make_compiler, make_processor, make_tokenizer, save

LENGTHS = Lengths(prompt=400, emission=40, acting=200, action=8, memory=300, candidates=12)
PASSING = ("activations", "logits", "kv_cache", "gradients")  # what comes and goes in a step


@dataclass(frozen=True, slots=True)
class Case:
    """A pair of models, as folders, in a precision, `rows` at a time."""

    name: str
    compiler: str
    executor: str
    dtype: str
    rows: int
    recompute: bool = False  # gradient checkpointing

    def settings(self, *more: str) -> list[str]:
        models = [f"compiler.model={self.compiler}", f"executor.model={self.executor}"]
        kinds = [f"{role}.dtype={self.dtype}" for role in ("compiler", "executor")]
        again = f"gradient_checkpointing={self.recompute}"
        return [*models, *kinds, f"micro_batch_size={self.rows}", again, *more]


@dataclass(frozen=True, slots=True)
class Check:
    """Bytes at most, predicted and measured: of all, and of what comes and goes."""

    stage: str
    case: Case
    total: tuple[float, float]
    passing: tuple[float, float]


def check_sft(case: Case, lengths: Lengths = LENGTHS) -> Check:
    """Take a step of two micro-batches; the one before it has made AdamW's moments."""
    config = load_config(SftConfig, "sft/paper", case.settings("batch_size=1000"))
    compiler, executor = _models(config)
    backend = Replicated(compiler, executor.model, config.optimizer, with_projector=True)
    compiler.train()
    examples = replay.rows_of(config, lengths, case.rows)
    if config.gradient_checkpointing:
        compiler.backbone.recompute_layers()
        executor.backbone.recompute_layers()

    def step() -> None:
        for _ in range(2):
            losses = sft_losses(compiler, executor, examples, config)
            loss = sum((getattr(config.weights, n) * v.sum() / 100 for n, v in losses.items()), torch.tensor(0.0))
            backend.backward(loss)
            del losses, loss
        backend.step()

    step()
    predicted = replay.replay_sft(config, lengths, case.rows, gpu=False)
    return _check("sft", case, predicted, peak(step), compiler, executor, backend.optimizer)


def check_update(case: Case, lengths: Lengths = LENGTHS) -> Check:
    """Take an update of GRPO, of two micro-batches."""
    config = load_config(GrpoConfig, "grpo/paper", case.settings("compiler.engine=hf", "compiler.checkpoint=null"))
    compiler, executor = _models(config)
    nobody: Any = None
    with tempfile.TemporaryDirectory() as folder:
        trainer = GrpoTrainer(config, compiler, executor, nobody, [nobody], Path(folder))
    samples = 2 * replay.samples_of(config, lengths, case.rows, executor.backbone.hidden_size)
    trainer.learn(samples)
    predicted = replay.replay_update(config, lengths, case.rows, gpu=False)
    taken = peak(lambda: trainer.learn(samples))
    return _check("grpo update", case, predicted, taken, compiler, None, trainer.backend.optimizer)


def check_compile(case: Case, lengths: Lengths = LENGTHS) -> Check:
    """Compile, each emission as long as it may be."""
    config = load_config(SftConfig, "sft/paper", case.settings(f"compiler.max_new_tokens={lengths.emission}"))
    compiler, executor = _models(config)
    compiler.backbone.suppressed = [MEMORY, END]  # no emission ends before
    compiler.encode = lambda request: prompt_of(lengths.prompt)
    requests = replay.requests_of(case.rows)
    predicted = replay.replay_compile(config.compiler, executor.backbone.hidden_size, lengths, case.rows)
    return _check("compile", case, predicted, peak(lambda: compiler.compile(requests)), compiler, None)


def check_act(case: Case, lengths: Lengths = LENGTHS) -> Check:
    """Score admissible commands."""
    config = load_config(SftConfig, "sft/paper", case.settings())
    _, executor = _models(config)
    prompts, names = replay.prompts_of(lengths.acting, case.rows), [replay.commands(lengths)] * case.rows
    score = torch.no_grad()(lambda: executor.candidate_logprobs(prompts, names))
    return _check("act", case, replay.replay_act(config.executor, lengths, case.rows), peak(score), None, executor)


CHECKS: tuple[Callable[[Case], Check], ...] = (check_sft, check_update, check_compile, check_act)


def peak(run: Callable[[], object]) -> int:
    """Measure how many bytes are taken at once at most while it runs, beyond those that are when it begins."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    results: Any = profile.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def staying(
    models: Sequence[torch.nn.Module],
    optimizer: torch.optim.Optimizer | None = None,
    local: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> int:
    """Count the bytes that stay from step to step: weights, and AdamW's moments. `local` gives what this process holds
    of a tensor in slices."""
    moments = [tensor for state in (optimizer.state.values() if optimizer else ()) for tensor in state.values()]
    return sum(local(t).nbytes for t in [*(p for model in models for p in model.parameters()), *moments])


def _check(
    stage: str,
    case: Case,
    predicted: Replay,
    passing: int,
    compiler: MemoryCompiler | None,
    executor: FrozenExecutor | None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Check:
    """Put both sides together: what stays is counted on the real models."""
    models = [model for model in (compiler, executor and executor.model) if model is not None]
    stays = staying(models, optimizer)
    said = sum(predicted.held[kind] for kind in PASSING)
    return Check(stage, case, (predicted.total, stays + passing), (said, passing))


def _models(config: SftConfig | GrpoConfig) -> tuple[MemoryCompiler, FrozenExecutor]:
    """Load both as runs do, and have them read the plan's tokens."""
    executor = load_frozen(config.executor, Told(""))
    compiler = load_compiler(config.compiler, executor)
    for backbone in (compiler.backbone, executor.backbone):
        backbone.pad_id, backbone.memory_id, backbone.end_id = PAD, MEMORY, END
        backbone.suppressed = [MEMORY]  # what a word is here may be a special token of the model's
        backbone.ids = ShapedBackbone.ids.__get__(backbone)  # type: ignore[method-assign]
    executor.placeholder, executor.end_id = MEMORY, END
    return compiler, executor


def cases(folder: Path, models: list[Path]) -> Iterator[Case]:
    """Make models of several shapes; the last ones are those that are given."""
    tokenizer = make_tokenizer(LEXICON)
    save(folder / "vlm", make_compiler(tokenizer), make_processor(tokenizer))
    make_llama(folder / "tiny", tokenizer, 128, 4, 4, 4, 384)
    make_llama(folder / "grouped", tokenizer, 256, 8, 8, 2, 1024, 4096)
    make_llama(folder / "wide", tokenizer, 512, 6, 8, 4, 2048, 16384)
    path = lambda name: str(folder / name)
    yield Case("VLM 1 M, tiny 1 M", path("vlm"), path("tiny"), "float32", 4)
    yield Case("VLM 1 M, grouped 10 M", path("vlm"), path("grouped"), "bfloat16", 1)
    yield Case("grouped 10 M, twice", path("grouped"), path("grouped"), "float32", 4)
    yield Case("wide 40 M, grouped 10 M", path("wide"), path("grouped"), "bfloat16", 2)
    for model in models:
        yield Case(f"{model.name}, twice", str(model), str(model), "bfloat16", 1)
        yield Case(f"{model.name}, twice", str(model), str(model), "bfloat16", 2)


def make_llama(
    folder: Path, tokenizer: Any, hidden: int, layers: int, heads: int, grouped: int, inner: int, words: int = 0
) -> None:
    """Save a Llama with random weights and grouped queries."""
    config = LlamaConfig(
        vocab_size=max(words, len(tokenizer)),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=grouped,
        intermediate_size=inner,
        tie_word_embeddings=False,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    save(folder, LlamaForCausalLM(config), tokenizer)


def main(
    model: Annotated[list[Path] | None, typer.Option(help="A further model folder; may be given again.")] = None,
) -> None:
    """Print predicted and measured side by side."""
    quiet()
    torch.set_num_threads(1)
    mib = lambda size: f"{size / 2**20:.1f}"
    worst, rows = 1.0, []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(Path(folder), model or []):
            for check in CHECKS:
                done = check(case)
                ratios = [predicted / measured for predicted, measured in (done.total, done.passing)]
                worst = max(worst, ratios[0], 1 / ratios[0])
                numbers = [*map(mib, done.total), f"{ratios[0]:.3f}", *map(mib, done.passing), f"{ratios[1]:.3f}"]
                rows.append([done.stage, case.name, case.dtype, str(case.rows), *numbers])
                print(rows[-1], flush=True)
    heads = ["stage", "compiler, executor", "precision", "rows", "predicted MiB", "measured", "ratio"]
    heads += ["beyond weights", "measured", "ratio"]
    print("\n".join(markdown_table(heads, rows, left=3)))
    print(f"furthest from measured: {100 * (worst - 1):.1f} %")


if __name__ == "__main__":
    typer.run(main)
