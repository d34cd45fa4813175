"""Memory budget of a process, plan of a run, and their printed form."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from configs.load import ConfigError
from eval.table import DASH, markdown_table

GIB = 2**30
PARTS = ("weights", "gradients", "moments", "activations", "logits", "kv_cache", "overhead")


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU: usable memory (GiB), dense bf16 compute (TFLOP/s), memory bandwidth (TB/s)."""

    name: str
    gib: float
    tflops: float = 989.0
    bandwidth: float = 3.35


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-40", 39.4, 312, 1.56),
        Gpu("a100", 79.2, 312, 2.04),
        Gpu("h100", 79.2),
        Gpu("h200", 139.8, 989, 4.8),
        Gpu("b200", 178.0, 2250, 8.0),
        Gpu("l40s", 44.4, 362, 0.86),
        Gpu("rtx4090", 23.5, 165, 1.01),
    )
}


def find_gpu(text: str) -> Gpu:
    """Parse a name, or GiB such as `80` (with an H100's speeds, whose ratio alone matters). Raises: ConfigError."""
    if text.lower() in GPUS:
        return GPUS[text.lower()]
    try:
        return Gpu(f"{float(text):g} GiB", float(text))
    except ValueError:
        raise ConfigError(f"unknown GPU {text!r}: give its memory in GiB, or one of {', '.join(GPUS)}") from None


@dataclass(frozen=True, slots=True)
class Lengths:
    """Typical lengths in tokens; defaults are from real ALFWorld games with four memory entries."""

    prompt: int = 1900  # the compiler's, with memory, state and observation
    emission: int = 184
    acting: int = 988  # the executor's prompt, with soft tokens
    action: int = 12
    memory: int = 1500  # part of the compiler's prompt; `static` pastes it into the executor's
    candidates: int = 30  # admissible commands
    steps: int = 10  # of an episode, whose rows begin with the same memory

    @classmethod
    def read(cls, text: str) -> Lengths:
        """Parse `prompt=3000,emission=100`. Raises: ConfigError."""
        try:
            given = {name.strip(): int(value) for name, _, value in (p.partition("=") for p in text.split(",") if p)}
            if any(value < 1 for value in given.values()):
                raise ValueError
            return cls(**given)
        except (TypeError, ValueError):
            names = ", ".join(field.name for field in fields(cls))
            raise ConfigError(f"--lengths {text!r}: write NAME=TOKENS with commas between, names: {names}") from None


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory of one of `count` equal processes in bytes: on each of its GPUs at the fullest moment, by part.

    Attributes:
        device: Group of GPUs; processes of one device share them.
        share: Fraction of a GPU that it may use.
        loading: On each GPU during loading, if that is more than later.
        host: RAM per process.
        least: Minimum of a process that fills its share with cache; 0: the sum of all parts.
    """

    process: str
    device: str
    count: int = 1
    gpus: int = 1
    share: float = 1.0
    weights: float = 0.0
    gradients: float = 0.0
    moments: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    kv_cache: float = 0.0
    overhead: float = 0.0
    loading: float = 0.0
    host: float = 0.0
    least: float = 0.0
    note: str = ""

    @property
    def gpu(self) -> float:
        """Return the bytes on each GPU."""
        return max(self.loading, sum(getattr(self, part) for part in PARTS))


@dataclass(frozen=True, slots=True)
class Plan:
    """Needs of a run, and the work of a step (an update, or one step of all episodes of an evaluation)."""

    stage: str
    name: str
    budgets: tuple[Budget, ...]
    disk: Mapping[str, float]  # bytes by purpose
    tokens: Mapping[str, int]  # of a step, by model
    episodes: int  # in flight
    seconds: Mapping[str, float]  # of a step, by phase; only ratios are meaningful
    notes: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        """Count the GPUs of all devices."""
        devices: defaultdict[str, int] = defaultdict(int)
        for budget in self.budgets:
            devices[budget.device] = max(devices[budget.device], budget.count * budget.gpus)
        return sum(devices.values())

    @property
    def shares(self) -> dict[str, float]:
        """Return each phase's share of the time."""
        total = sum(self.seconds.values()) or 1.0
        return {phase: seconds / total for phase, seconds in self.seconds.items()}

    def needs(self) -> float:
        """Return the memory (GiB) of the smallest GPU that fits everything."""
        devices: defaultdict[str, float] = defaultdict(float)
        for budget in self.budgets:
            devices[budget.device] += budget.gpu
        alone = [(budget.least or budget.gpu) / budget.share for budget in self.budgets]
        return max([*devices.values(), *alone, 0.0]) / GIB

    def fits(self, gpu: Gpu, gpus: int) -> bool:
        return self.needs() <= gpu.gib and self.gpus <= gpus

    def to_json(self, gpu: Gpu, gpus: int, remedy: Sequence[str] | None) -> dict[str, Any]:
        """Return the plan as JSON, sizes in bytes."""
        return {
            **asdict(self),
            "gpu": asdict(gpu),
            "gpus": gpus,
            "gpus_taken": self.gpus,
            "needs_gib": self.needs(),
            "shares": self.shares,
            "fits": self.fits(gpu, gpus),
            "remedy": list(remedy) if remedy else None,
        }


def lines(plan: Plan, lengths: Lengths, gpu: Gpu, gpus: int, remedy: Sequence[str] | None) -> list[str]:
    """Format a plan as Markdown; the last line is the verdict."""
    gib = lambda size: f"{size / GIB:.2f}" if size else DASH
    heads = ["process", "GPUs", *(part.replace("_", " ") for part in PARTS), "on a GPU", "loading", "host RAM"]
    rows = [
        [
            b.process,
            f"{b.count} x {b.gpus}",
            *(gib(getattr(b, part)) for part in PARTS),
            gib(b.gpu),
            gib(b.loading),
            gib(b.host),
        ]
        for b in plan.budgets
    ]
    read = ", ".join(f"{field.name} {getattr(lengths, field.name)}" for field in fields(lengths))
    text = [f"## {plan.name}", "", *(markdown_table(heads, rows) if rows else ["no model runs locally"]), ""]
    text += [f"- sizes in GiB, at the fullest moment; lengths assumed (--lengths): {read}"]
    text += [f"- {budget.process}: {budget.note}" for budget in plan.budgets if budget.note]
    text += [f"- disk: {', '.join(f'{what} {gib(size)}' for what, size in plan.disk.items()) or DASH}"]
    text += [f"- tokens of a step: {', '.join(f'{who} {n:,}' for who, n in plan.tokens.items()) or DASH}"]
    text += [f"- episodes in flight: {plan.episodes}"] if plan.episodes else []
    shares = ", ".join(f"{phase} {share:.0%}" for phase, share in plan.shares.items())
    text += [f"- time by phase, by FLOPs and bytes read: {shares or DASH}", *(f"- {note}" for note in plan.notes)]
    return [*text, "", verdict(plan, gpu, gpus, remedy)]


def verdict(plan: Plan, gpu: Gpu, gpus: int, remedy: Sequence[str] | None) -> str:
    """Describe whether the plan fits, or with which settings it would."""
    if plan.fits(gpu, gpus):
        return f"fits: yes ({plan.gpus} of {gpus} GPUs, {plan.needs():.1f} of {gpu.gib:g} GiB)"
    why = f"{plan.needs():.1f} of {gpu.gib:g} GiB" if plan.needs() > gpu.gib else f"{plan.gpus} of {gpus} GPUs"
    found = f"would fit with {' '.join(remedy)}" if remedy else "no setting that was tried makes it fit: larger GPUs"
    return f"fits: no ({why}); {found}"
