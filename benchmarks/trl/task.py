"""What both sides of `memcompiler bench trl` do, and what they measure."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoConfig, AutoTokenizer

from configs.models import model_path
from training.losses import group_advantages
from zoo.household.words import LEXICON
from zoo.models import as_llama, make_executor, make_tokenizer, save

TARGETS = ("q_proj", "v_proj")
RANK, ALPHA = 16, 32  # of LoRA, whose dropout is 0: random masks would differ
RATE, CLIP = 1e-3, 1.0  # constant learning rate, largest norm of the gradient
BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.01  # of AdamW


@dataclass(frozen=True, slots=True)
class Sizes:
    """Rows per step and micro-batch, number of steps, and tokens: `common` for all rows of a batch, then means."""

    batch: int
    micro: int
    steps: int
    prompt: int
    completion: int
    common: int = 0
    soft: int = 16


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt and a completion as token ids, with GRPO's advantage."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    advantage: float


@dataclass(frozen=True, slots=True)
class Task:
    """What both sides train, and on what.

    Attributes:
        model: Folder of the model.
        stand_in: Folder of a tiny executor for ours, which takes no part in a text loss.
        batches: The rows of each step.
    """

    stage: Literal["sft", "grpo"]
    model: str
    stand_in: str
    sizes: Sizes
    dtype: str
    checkpointing: bool
    batches: tuple[tuple[Row, ...], ...]


@dataclass(slots=True)
class Measured:
    """A step: loss, gradient norm before clipping, and what it took. Peaks are those of the process so far."""

    loss: float
    norm: float
    tokens: int
    seconds: float
    busy: float  # processor seconds of all threads
    loaded_mib: float  # before the step
    peak_mib: float


@dataclass(slots=True)
class Clock:
    """Measures a step from `start` to `stop`, device work included."""

    begun: tuple[float, float] = field(init=False)
    loaded: float = field(init=False)

    def start(self) -> None:
        self.loaded = peak_mib()
        _finish_device_work()
        self.begun = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        _finish_device_work()
        self.seconds, self.busy = time.perf_counter() - self.begun[0], time.process_time() - self.begun[1]

    seconds: float = field(init=False)
    busy: float = field(init=False)

    def measured(self, loss: float, norm: float, tokens: int) -> Measured:
        """Return the step between `start` and `stop`."""
        return Measured(loss, norm, tokens, self.seconds, self.busy, loaded_mib=self.loaded, peak_mib=peak_mib())


Wait = Callable[[], object]  # blocks until it is this side's turn
Tell = Callable[[Measured], object]


def _finish_device_work() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_mib() -> float:
    """Return this process's peak so far: allocated memory of a GPU if there is one, else resident memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def make_models(folder: Path, hidden: int, layers: int, only_stand_in: bool = False) -> tuple[str, str]:
    """Write a model and a tiny executor with random weights; return their folders."""
    tokenizer, shapes = make_tokenizer(LEXICON), {"model": (hidden, layers), "stand_in": (32, 1)}
    for name, (features, depth) in shapes.items():
        if name == "stand_in" or not only_stand_in:
            torch.manual_seed(0)
            save(folder / name, as_llama(make_executor(tokenizer, features, depth)), tokenizer)
    return str(folder / "model"), str(folder / "stand_in")


def make_task(
    stage: Literal["sft", "grpo"], model: str, stand_in: str, sizes: Sizes, dtype: str, checkpointing: bool
) -> Task:
    """Draw the rows of all steps: random ordinary tokens, lengths within a quarter of their means."""
    path = model_path(model)
    special = set(AutoTokenizer.from_pretrained(path).added_tokens_decoder)
    words = AutoConfig.from_pretrained(path).get_text_config().vocab_size
    ordinary, generator = torch.tensor([i for i in range(words) if i not in special]), torch.Generator().manual_seed(0)
    draw = lambda n: tuple(ordinary[torch.randint(len(ordinary), (n,), generator=generator)].tolist())
    around = lambda n: int(torch.randint(n - n // 4, n + n // 4 + 1, (), generator=generator))
    batches = []
    for _ in range(sizes.steps):
        begin = draw(sizes.common)
        advantages = group_advantages([float(i % 3 == 0) for i in range(sizes.batch)])
        batches.append(
            tuple(Row((*begin, *draw(around(sizes.prompt))), draw(around(sizes.completion)), a) for a in advantages)
        )
    return Task(stage, path, stand_in, sizes, dtype, checkpointing, batches=tuple(batches))


def fill_lora(model: torch.nn.Module) -> None:
    """Set all LoRA weights to the same random numbers in every process."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in sorted(model.named_parameters()):
        if "lora_" in name:
            parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))


def tokens_of(rows: Sequence[Row], behind: int = 0) -> int:
    """Count the tokens of rows, padding excluded, and `behind` more in each."""
    return sum(len(row.prompt) + len(row.completion) + behind for row in rows)
