"""Tables of papers in this project's terms: environments and splits, deliveries, metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

MILLIONS = "10^6 tokens"  # suffix of columns that count tokens
_AXES = frozenset({"executor", "environment", "split", "seed"})


@dataclass(frozen=True, slots=True)
class Column:
    """Column of a table: a metric on an environment, over all of `splits`, of all tasks or one family."""

    name: str
    environment: str
    splits: tuple[str, ...]
    metric: str = "success"
    family: str = ""


@dataclass(frozen=True, slots=True)
class Spec:
    """Mapping of results to the rows and columns of a paper's table.

    Attributes:
        methods: delivery (or `level/delivery`, if levels of `axis` are rows) -> name of the paper's row; "": no row.
        metrics: metrics of the columns of other environments than the paper's.
        axes: axes of a matrix that rows and columns represent; levels of other axes are added to the method's name.
        axis: axis of a matrix whose levels are rows, if it is one of `axes`.
        systems: memory system -> name of the paper's row in which its entries are pasted (delivery `static`).
        conditions: level of an axis that is the paper's condition, and is left out of the method's name.
        by_method: group rows by method (the paper has one executor) instead of by executor.
        families: add columns for the families of other environments.
    """

    columns: tuple[Column, ...]
    methods: Mapping[str, str]
    metrics: tuple[str, ...] = ("success",)
    axes: frozenset[str] = _AXES
    axis: str = "variant"
    by_method: bool = False
    families: bool = True
    systems: Mapping[str, str] = field(default_factory=dict)
    conditions: Mapping[str, str] = field(default_factory=dict)

    @property
    def efficiency(self) -> bool:
        return any(column.metric in EFFICIENCY for column in self.columns)


def _embodiedbench(metric: str) -> tuple[Column, ...]:
    columns: list[Column] = []
    for name, environment, spatial in (
        ("EB-ALFRED", "eb_alfred", "spatial"),
        ("EB-Habitat", "eb_habitat", "spatial_relationship"),
    ):
        splits = {
            "Base": "base",
            "Com.": "common_sense",
            "Comp.": "complex_instruction",
            "Vis.": "visual_appearance",
            "Spat.": spatial,
            "Long": "long_horizon",
        }
        columns.append(Column(f"{name} Avg.", environment, tuple(splits.values()), metric))
        columns += [Column(f"{name} {short}", environment, (split,), metric) for short, split in splits.items()]
    return tuple(columns)


ALFWORLD = Column("AlfWorld", "alfworld", ("valid_unseen",))
_SCIENCEWORLD = Column("ScienceWorld", "scienceworld", ("agentsquare",))
_BY_NAME = {column.name: column for column in _embodiedbench("success")}
_METHODS = {
    "none": "No Mem",
    "static": "AMMI (static injection)",
    "compiled": "Ours",
    "memgen": "MemGen",
    "memgen_gated": "MemGen, with trigger",
}
_SYSTEMS = {"gmemory": "G-Mem", "mem0": "Mem0", "langmem": "LangMem", "amem": "A-Mem"}
_CONDITIONS = {"protocol": "frozen", "homes": "in_bank", "size": "native"}
RULES = "-style memory, written by rules"  # follows the row's name where no language model wrote the memory
EFFICIENCY: Mapping[str, tuple[str, tuple[str, ...]]] = {  # column -> role, keys of its usage
    "Compiler s": ("compiler", ("seconds",)),
    "Executor s": ("executor", ("seconds",)),
    "Exec In": ("executor", ("tokens_in",)),
    "Exec Out": ("executor", ("tokens_out",)),
    "Compiler tokens": ("compiler", ("tokens_in", "tokens_out")),
}

SPECS: Mapping[int, Spec] = {
    1: Spec(_embodiedbench("success"), _METHODS, systems=_SYSTEMS, conditions=_CONDITIONS),
    2: Spec((ALFWORLD, _SCIENCEWORLD), _METHODS, systems=_SYSTEMS, conditions=_CONDITIONS),
    3: Spec(
        (ALFWORLD, _SCIENCEWORLD, replace(_SCIENCEWORLD, name="ScienceWorld progress", metric="progress")),
        {
            "compiled": "MemCompiler (Full)",
            "compiled_text": "w/o Soft-Mem (text only)",
            "compiled_no_brief": "w/o Brief State (raw obs as state)",
            "static": "AMMI (static injection, same memory)",
            "none": "No Memory",
        },
        metrics=("success", "progress"),
        by_method=True,
    ),
    4: Spec(
        tuple(_BY_NAME[f"EB-Habitat {short}"] for short in ("Avg.", "Spat.", "Vis.")),
        {
            "n0/compiled_text": "N=0 (text only)",
            "n4/compiled": "N=4",
            "n8/compiled": "N=8",
            "n16/compiled": "N=16 (default)",
            "compiled": "N=16 (default)",  # a run without variants
            **dict.fromkeys(("none", "static", "compiled_text"), ""),
            "n32/compiled": "N=32",
            "no_orth/compiled": "N=16, w/o orth. constraint",
            "linear/compiled": "N=16, linear proj. (no Gaussian)",
        },
        axes=_AXES | {"variant"},
        by_method=True,
    ),
    5: Spec(
        (*(Column(name, "", (), name) for name in EFFICIENCY), Column("Success %", "", ())),
        {"static": "AMMI", "compiled": "SCMC"},
        by_method=True,
    ),
    6: Spec(_embodiedbench("progress"), _METHODS, metrics=("progress",), systems=_SYSTEMS, conditions=_CONDITIONS),
}

# -- BrainMem ---------------------------------------------------------------------------------------------------------

_BASE = Column("EB-ALFRED Base", "eb_alfred", ("base",))
_TOKENS = tuple(
    Column(f"EB-ALFRED {short}, {MILLIONS}", "eb_alfred", (split,), "tokens")
    for short, split in (("Base", "base"), ("Long", "long_horizon"))
)


def _levels(axis: str, rows: Mapping[str, str], metrics: tuple[str, ...] = ("success",)) -> Spec:
    """Return the table whose rows are levels of an axis, with memory recalled at every step."""
    names = {"success": _BASE.name, "progress": f"{_BASE.name} progress"}
    columns = tuple(replace(_BASE, name=names[metric], metric=metric) for metric in metrics)
    methods = {f"{level}/live": name for level, name in rows.items()}
    return Spec(columns, methods, metrics=metrics, axes=_AXES | {axis}, axis=axis, by_method=True, families=False)


BRAINMEM: Mapping[int, Spec] = {
    4: _levels(
        "tiers",
        {
            "none": "No memory",
            "working": "+ working memory",
            "working-episodic": "+ episodic memory",
            "no-evolving": "+ semantic memory",
            "all": "+ evolving (all)",
        },
    ),
    5: _levels(
        "working",
        {
            "all": "All",
            "no-feedback": "w/o feedback",
            "no-success-state": "w/o success state",
            "no-agent-state": "w/o agent state",
            "no-consistency-check": "w/o consistency check",
        },
    ),
    6: _levels("window", {w: f"W={w}" for w in ("1", "3", "5", "8", "10")}, ("success", "progress")),
    7: _levels(
        "episodic",
        {
            "all": "Both",
            "no-spatial": "w/o spatial graph",
            "no-trajectory": "w/o trajectory graph",
        },
    ),
    8: _levels("k", {k: f"k={k}" for k in ("1", "2", "3", "5")}),
    9: _levels("parts", {"all": "All", "no-insights": "w/o learning insights"}),
    10: Spec(_TOKENS, {"none": "No memory", "live": "BrainMem"}, ("tokens",), by_method=True, families=False),
    14: Spec(
        (_BASE,),
        {"brainmem/none": "No memory", "brainmem/live": "BrainMem"},
        axes=_AXES | {"memory", "order"},
        axis="memory",
        by_method=True,
        families=False,
    ),
}


# -- KARMA ------------------------------------------------------------------------------------------------------------

LIVING = {"SR": "sequences", "MRA": "mra", "RE": "re", "RT": "rt"}  # column -> metric of living worlds


def _living(axis: str, methods: Mapping[str, str]) -> Spec:
    """Return a table of sequences in living worlds: rows are levels of an axis. All rows without memory are equal, so
    only the last level's is shown."""
    columns = tuple(
        Column(f"{family.title()} {name}", "", splits=(), metric=metric, family=family)
        for family in ("simple", "composite", "complex")
        for name, metric in LIVING.items()
    )
    *others, last = methods
    rows = {f"{level}/static": name for level, name in methods.items()} | {f"{last}/none": "No memory (reference)"}
    dropped = {f"{level}/none": "" for level in others}
    return Spec(columns, rows | dropped, axes=_AXES | {axis}, axis=axis, by_method=True, families=False)


KARMA: Mapping[int, Spec] = {
    1: _living(
        "method",
        {
            "episodes-stand-in": "Bank of episodes (stand-in)",
            "last-seen-stand-in": "Last seen where (stand-in)",
            "karma": "KARMA",
        },
    ),
    2: _living(
        "memories",
        {
            "no-long": "w/o long-term",
            "no-short": "w/o short-term",
            "karma": "KARMA",
        },
    ),
}


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper with its tables; `numbers`: file of its printed figures."""

    arxiv: str
    numbers: str
    tables: Mapping[int, Spec]
    note: str = ""  # under each table


PAPERS: Mapping[str, Paper] = {
    "memcompiler": Paper("2605.07594v2", "numbers.yaml", SPECS),
    "brainmem": Paper(
        "2604.16331v1",
        "brainmem.yaml",
        BRAINMEM,
        "Columns of other benchmarks than the paper's are analogues: the same switches, another benchmark and planner.",
    ),
    "karma": Paper(
        "2409.14908",
        "karma.yaml",
        KARMA,
        "Measured rows are analogues: household-L, sequences of the same three classes in generated homes, planned by "
        "rule. SR: of whole sequences (Wilson); MRA, RE, RT: bootstrap over sequences. The reference of RE and RT is "
        "the same planner without memory.",
    ),
}
