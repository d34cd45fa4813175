"""Compare training steps that read a prefix once with steps that read every row whole.

    memcompiler bench prefixes sft|grpo --model DIR [--dtype bfloat16] [--episodes 1] [--acting 272] [--steps 2]
    memcompiler bench prefixes sft|grpo --rows ROWS          (rows of the quickstart, with its models)

Without ROWS, episodes have random tokens at the paper's lengths: ten rows with 1,500 tokens of instructions and memory
in common, 400 of their own, an emission of 184 and 16 memory tokens; the last two lengths are means, because real rows
are not equally long, and attention then needs a mask. DIR is a text model that serves as compiler and
executor. GRPO's update is timed without its rollouts, with samples of these rows and `density_root` gradients, which do
not run the executor. Both variants alternate, so that other load on the machine affects both; the ratio is that of
processor seconds, the median over steps.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import torch
import typer

from compiler.build import load_compiler
from compiler.hf import MemoryCompiler
from configs.load import load_config
from configs.training import GrpoConfig, SftConfig
from data_gen.rows import SftRow, load_rows
from envs.household.environment import INSTRUCTIONS
from envs.spec import ExecutorInstructions
from eval.table import markdown_table
from executor.build import load_frozen
from lm.prompt import Prompt
from lm.shared_prefixes import find_prefixes, tokens_saved
from plan.budget import Lengths
from runtime.progress import disable_library_progress_bars
from training.grpo import GrpoTrainer
from training.rollout import Sample
from training.sft import Example, SftTrainer
from training.sft_data import EncodedRows, episodes_of

app = typer.Typer()
STEPS = 10  # rows of an episode with random tokens
Variant = tuple[Callable[[], object], Callable[[], int]]  # takes a step; counts what the compiler reads in the next one


@dataclass(frozen=True, slots=True)
class Task:
    """What both variants do."""

    stage: Literal["sft", "grpo"]
    rows: Path | None
    model: str
    dtype: str
    episodes: int
    lengths: Lengths

    def variant(self, share: bool, micro: int, out: Path) -> Variant:
        """Load the models of a variant, and return its step."""
        given = [f"share_prefix={str(share).lower()}", f"micro_batch_size={micro}", "save_every=100000"]
        given += [] if self.rows else self._sizes()
        rows = load_rows(self.rows) if self.rows else named_rows(self.episodes)
        return (self._sft if self.stage == "sft" else self._grpo)(given, rows, out)

    def _sizes(self) -> list[str]:
        both = [f"{role}.{name}" for role in ("compiler", "executor") for name in (f"model={self.model}", self._dtype)]
        return [*both, "compiler.soft.n_tokens=16"]

    @property
    def _dtype(self) -> str:
        return f"dtype={self.dtype}"

    def _sft(self, given: list[str], rows: Sequence[SftRow], out: Path) -> Variant:
        size = [] if self.rows else [f"batch_size={len(rows)}"]
        config = load_config(SftConfig, "sft/quickstart", [*given, *size, "max_steps=100000"])
        executor = load_frozen(config.executor, ExecutorInstructions(INSTRUCTIONS))
        compiler = load_compiler(config.compiler, executor)
        trainer = SftTrainer(config, compiler, executor=executor, rows=rows, out=out)
        if not self.rows:
            made: Any = random_examples(self, compiler, executor.placeholder)
            trainer.examples = made
        compiler.train()
        following = lambda: [trainer.examples[i] for i in trainer.batch_indices(trainer.step)]
        return trainer.take_step, lambda: tokens_read(compiler, following(), config)

    def _grpo(self, given: list[str], rows: Sequence[SftRow], out: Path) -> Variant:
        given += ["compiler.checkpoint=null", "loss.latent_gradient=density_root"]
        config = load_config(GrpoConfig, "grpo/quickstart", given)
        executor = load_frozen(config.executor, ExecutorInstructions(INSTRUCTIONS))
        compiler = load_compiler(config.compiler, executor)
        engine: Any = SimpleNamespace(served=None, environment="")  # no episode is played
        trainer = GrpoTrainer(config, compiler, executor=executor, engine=engine, specs=[engine], out=out)
        if self.rows:
            encoded = EncodedRows(rows, compiler, executor, soft=True)
            examples = [encoded[i] for episode in episodes_of(rows)[: self.episodes] for i in episode]
        else:
            examples = random_examples(self, compiler, executor.placeholder)
        samples = [sample(example, compiler, i) for i, example in enumerate(examples)]
        return lambda: trainer.learn(samples), lambda: tokens_read(compiler, examples, config)


def random_examples(task: Task, compiler: MemoryCompiler, placeholder: int) -> list[Example]:
    """Create episodes whose rows begin with the same tokens."""
    size, generator = task.lengths, torch.Generator().manual_seed(0)
    words = len(compiler.backbone.tokenizer) // 2, len(compiler.backbone.tokenizer)
    tokens = lambda n: tuple(torch.randint(*words, (n,), generator=generator).tolist())
    examples = []
    for _ in range(task.episodes):
        common = tokens(size.memory)
        examples += [
            Example(
                prompt=Prompt((*common, *tokens(size.prompt - size.memory + 8 * t - 36))),
                emission=tokens(size.emission + 8 * (7 * t % STEPS) - 36),
                executor_prompt=Prompt((*tokens(size.acting - compiler.n_tokens), *(placeholder,) * compiler.n_tokens)),
                action=tokens(size.action),
                memory_ids=common,
                soft_read=True,
            )
            for t in range(STEPS)
        ]
    return examples


def named_rows(episodes: int, each: int = STEPS) -> list[SftRow]:
    """Create rows that tell a trainer which examples belong to an episode."""
    texts = dict.fromkeys(("split", "family", "goal", "state", "observation", "emission", "action"), "")
    blank = SftRow(task_id="", t=0, memory_ids=(), memory_texts=(), image=None, history=(), **texts)
    return [replace(blank, task_id=f"{number}", t=t) for number in range(episodes) for t in range(each)]


def sample(example: Example, compiler: MemoryCompiler, number: int) -> Sample:
    """Turn a row into a sample of GRPO."""
    return Sample(
        prompt=example.prompt,
        emission=example.emission,
        z=torch.zeros(compiler.n_tokens, compiler.projector.config.d_executor),
        rollout_logprobs=torch.zeros(len(example.emission) + compiler.n_tokens),
        sampled=len(example.emission),
        advantage=1.0 if number % 2 else -1.0,
        episode=0,
        weight_version=0,
    )


def tokens_read(compiler: MemoryCompiler, rows: Sequence[Example], config: SftConfig | GrpoConfig) -> int:
    """Count the tokens that the compiler reads, padding excluded."""
    read = sum(len(row.prompt.ids) + len(row.emission) + compiler.n_tokens for row in rows)
    for at in range(0, len(rows) if config.share_prefix else 0, config.micro_batch_size):
        prompts = [row.prompt for row in rows[at : at + config.micro_batch_size]]
        read -= tokens_saved(find_prefixes(compiler.backbone, prompts))
    return read


@app.command()
def prefixes(
    stage: Annotated[Literal["sft", "grpo"], typer.Argument(help="A step of SFT, or GRPO's update without rollouts.")],
    rows: Annotated[Path | None, typer.Option(help="Rows of the quickstart; default: random tokens.")] = None,
    model: Annotated[str, typer.Option(help="Text model of compiler and executor, without --rows.")] = "",
    dtype: Annotated[str, typer.Option(help="Of the frozen weights, without --rows.")] = "bfloat16",
    acting: Annotated[int, typer.Option(min=32, help="Tokens of the executor's prompt, without --rows.")] = 272,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes of a step; with --rows of GRPO alone.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps.")] = 2,
    warm_up: Annotated[int, typer.Option(min=0, help="Steps before those.")] = 1,
    micro: Annotated[int, typer.Option(min=1, help="Rows per micro-batch that shares prefixes.")] = STEPS,
    micro_whole: Annotated[int, typer.Option(min=1, help="Whole rows per micro-batch.")] = 2,
) -> None:
    """Compare a step that reads prefixes once with one that reads every row whole."""
    if bool(rows) == bool(model):
        raise typer.BadParameter("give --model, or --rows")
    disable_library_progress_bars()
    task = Task(stage, rows, model, dtype, episodes, replace(Lengths(), acting=acting))
    sizes, read = {"once": micro, "in every row": micro_whole}, dict[str, int]()
    seconds, busy = ({name: list[float]() for name in sizes} for _ in range(2))
    with tempfile.TemporaryDirectory() as folder:
        made = {name: task.variant(name == "once", size, Path(folder, name)) for name, size in sizes.items()}
        for step in range(-warm_up, steps):
            for name, (take, count) in made.items():
                read[name] = read.get(name, 0) + count() * (step >= 0)
                started, used = time.perf_counter(), time.process_time()
                take()
                if step >= 0:
                    seconds[name].append(time.perf_counter() - started)
                    busy[name].append(time.process_time() - used)
    columns = ["prefixes are read", "micro-batch", "compiler tokens", "seconds", "processor seconds"]
    times = lambda name: [f"{statistics.median(of[name]):.2f}" for of in (seconds, busy)]
    table = [[name, f"{sizes[name]}", f"{read[name] / steps:.0f}", *times(name)] for name in made]
    typer.echo("\n".join(markdown_table(columns, table)))
    ratios = [whole / once for once, whole in zip(*busy.values(), strict=True)]
    typer.echo(f"\n{stage}, {steps} steps; ratio by step from {min(ratios):.2f} to {max(ratios):.2f}")
    typer.echo(f"ratio: {statistics.median(ratios):.2f}")
