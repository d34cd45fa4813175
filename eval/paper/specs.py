"""What each of the paper's tables shows, in this project's names: benchmarks and splits, deliveries, metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

_AXES = frozenset({"executor", "environment", "split", "seed"})


@dataclass(frozen=True, slots=True)
class Column:
    """What a column shows: one metric on one environment, over `splits` together, of all tasks or of one family."""

    name: str
    environment: str
    splits: tuple[str, ...]
    metric: str = "success"
    family: str = ""


@dataclass(frozen=True, slots=True)
class Spec:
    """How a run's results become rows and columns of one of the paper's tables.

    Attributes:
        methods: name of the paper's row by delivery; in Table 4 by `variant/delivery`.
        metrics: what environments that the paper has not are shown by.
        axes: axes of a matrix that rows and columns tell already; others stand beside the method's name.
        by_method: rows of one method together (the paper has one executor), instead of rows of one executor.
    """

    columns: tuple[Column, ...]
    methods: Mapping[str, str]
    metrics: tuple[str, ...] = ("success",)
    axes: frozenset[str] = _AXES
    by_method: bool = False


def _embodiedbench(metric: str) -> tuple[Column, ...]:
    columns: list[Column] = []
    for name, environment, spatial in (
        ("EB-ALFRED", "eb_alfred", "spatial"), ("EB-Habitat", "eb_habitat", "spatial_relationship"),
    ):  # fmt: skip
        splits = {
            "Base": "base", "Com.": "common_sense", "Comp.": "complex_instruction", "Vis.": "visual_appearance",
            "Spat.": spatial, "Long": "long_horizon",
        }  # fmt: skip
        columns.append(Column(f"{name} Avg.", environment, tuple(splits.values()), metric))
        columns += [Column(f"{name} {short}", environment, (split,), metric) for short, split in splits.items()]
    return tuple(columns)


ALFWORLD = Column("AlfWorld", "alfworld", ("valid_unseen",))
_SCIENCEWORLD = Column("ScienceWorld", "scienceworld", ("agentsquare",))
_BY_NAME = {column.name: column for column in _embodiedbench("success")}
_METHODS = {"none": "No Mem", "static": "AMMI (static injection)", "compiled": "Ours"}
EFFICIENCY: Mapping[str, tuple[str, tuple[str, ...]]] = {  # column -> role, and what of its usage
    "Compiler s": ("compiler", ("seconds",)),
    "Executor s": ("executor", ("seconds",)),
    "Exec In": ("executor", ("tokens_in",)),
    "Exec Out": ("executor", ("tokens_out",)),
    "Compiler tokens": ("compiler", ("tokens_in", "tokens_out")),
}

SPECS: Mapping[int, Spec] = {
    1: Spec(_embodiedbench("success"), _METHODS),
    2: Spec((ALFWORLD, _SCIENCEWORLD), _METHODS),
    3: Spec(
        (ALFWORLD, _SCIENCEWORLD, replace(_SCIENCEWORLD, name="ScienceWorld progress", metric="progress")),
        {
            "compiled": "MemCompiler (Full)", "compiled_text": "w/o Soft-Mem (text only)",
            "compiled_no_brief": "w/o Brief State (raw obs as state)",
            "static": "AMMI (static injection, same memory)", "none": "No Memory",
        },
        metrics=("success", "progress"), by_method=True,
    ),
    4: Spec(
        tuple(_BY_NAME[f"EB-Habitat {short}"] for short in ("Avg.", "Spat.", "Vis.")),
        {
            "n0/compiled_text": "N=0 (text only)", "n4/compiled": "N=4", "n8/compiled": "N=8",
            "n16/compiled": "N=16 (default)", "n32/compiled": "N=32",
            "no_orth/compiled": "N=16, w/o orth. constraint", "linear/compiled": "N=16, linear proj. (no Gaussian)",
        },
        axes=_AXES | {"variant"}, by_method=True,
    ),
    5: Spec(
        (*(Column(name, "", (), name) for name in EFFICIENCY), Column("Success %", "", ())),
        {"static": "AMMI", "compiled": "SCMC"}, by_method=True,
    ),
    6: Spec(_embodiedbench("progress"), _METHODS, metrics=("progress",)),
}  # fmt: skip
