"""Settings of a chain, which takes a benchmark of the paper from its collection to its rows of the paper's tables, and
the stages that follow from them.

    collect  ->  sft  ->  grpo  ->  eval  ->  tables

The collection is made once. Every executor gets compilers of its own, because a projector writes into one executor's
embeddings: `sft` and `grpo` run for each executor and each of `compilers`, `eval` for each of `evaluations`. All paths
follow from the folder of the chain:

    OUT/collect (of a further benchmark: collect-BENCHMARK)
    OUT/sft/EXECUTOR/COMPILER, OUT/grpo/EXECUTOR/COMPILER
    OUT/eval/EXECUTOR/EVALUATION (of several compilers: EVALUATION-COMPILER; of a further benchmark: ...-BENCHMARK)
    OUT/experience                                        the bank that the expert fills, which all stages share
    OUT/tables
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, model_validator

from configs.collect import CollectConfig
from configs.evaluation import EvalConfig
from configs.load import CONFIGS, ConfigError, changed, find_config, load_config
from configs.models import EndpointConfig
from configs.training import GrpoConfig, SftConfig
from runtime.settings import Seed, Settings

FOLDER = "reproduce"  # of the shipped chains, in configs/
RUNS = Path("runs")  # folder of chains that were given no other
MAIN = "full"  # the compiler that every chain trains
Shared = Literal["env", "memory", "compiler", "executor"]
Name = Annotated[str, Field(pattern=r"^[A-Za-z_][\w-]*$")]  # of a folder, and of a key on the command line
StageConfig = CollectConfig | SftConfig | GrpoConfig | EvalConfig


class ChainCompiler(Settings):
    """A compiler that the chain trains, as changes of the stages' settings."""

    compiler: dict[str, Any] = Field(default={})
    """Changes of `compiler` in both trainings and the evaluation, e.g. {soft: {n_tokens: 4}}."""
    sft: dict[str, Any] = Field(default={})
    """Changes of `sft`."""
    grpo: dict[str, Any] = Field(default={})
    """Changes of `grpo`."""


class ChainBenchmark(Settings):
    """A further benchmark of a chain: the same compilers are trained on its rows and tasks, and evaluated on it."""

    env: dict[str, Any] = Field(default={})
    """Settings of its environment, without the name, which is its key in `further`."""
    collect: dict[str, Any] = Field(default={})
    """Changes of `collect`."""
    grpo: dict[str, Any] = Field(default={})
    """Settings of its part of GRPO, as in `grpo.also`, e.g. {leakage: {drop: true}}."""
    eval: dict[str, Any] = Field(default={})
    """Changes of `eval`."""


class ChainEvaluation(Settings):
    """An evaluation of the chain, as changes of `eval`, and the tables that it fills."""

    tables: tuple[PositiveInt, ...] = Field(min_length=1)
    """Tables of the paper that its results belong to."""
    compilers: tuple[str, ...] = Field(default=(MAIN,), min_length=1)
    """Compilers to evaluate, each in a run of its own."""
    executors: tuple[str, ...] | None = None
    """Executors whose compilers are evaluated; null: all."""
    benchmarks: tuple[str, ...] | None = None
    """Benchmarks to evaluate on, each in a run of its own; null: all of the chain."""
    axis: str | None = None
    """Axis of a matrix under which the compiler's name stands in results, where rows of a table are compilers."""
    optional: bool = False
    """Run it only if `--with` names it."""
    eval: dict[str, Any] = Field(default={})
    """Changes of `eval`."""


class Processes(Settings):
    """How the stages are started."""

    separate: bool = True
    """Start every stage as a process of its own, so that its models leave the GPUs with it; false: in this process."""
    sft: int = Field(default=1, ge=1)
    """Processes of SFT, started by torchrun if there are several."""
    grpo: int = Field(default=1, ge=1)
    """Processes of GRPO, started by torchrun if there are several; with `grpo.cluster: ray` 1."""


class ReproduceConfig(Settings):
    """One benchmark of the paper: collection, both trainings of each compiler, and the evaluations of its tables."""

    COMMAND: ClassVar[str] = "reproduce"
    seed: Seed = 0
    """Seed of all stages (the chain's file refers to it)."""
    collect: CollectConfig
    """Collection of experience and SFT rows."""
    sft: SftConfig
    """Stage 1; the chain sets `rows`."""
    grpo: GrpoConfig | None = None
    """Stage 2; the chain sets `compiler.checkpoint`; null: evaluate the SFT checkpoints."""
    eval: EvalConfig
    """Evaluation; the chain sets `compiler.checkpoint`."""
    shared: dict[Shared, dict[str, Any]] = Field(default={})
    """Settings of `env`, `memory`, `compiler` and `executor` in every stage that has the block; they override the
    stages' own."""
    further: dict[Name, ChainBenchmark] = Field(default={})
    """Further benchmarks by name, beside that of `collect` and `eval`, which the same compilers are trained on."""
    executors: dict[Name, dict[str, Any]] = Field(min_length=1)
    """Frozen executors by name: changes of `executor` in both trainings and the evaluation."""
    compilers: dict[Name, ChainCompiler] = Field(default={MAIN: ChainCompiler()}, min_length=1)
    """Compilers to train for each executor, where a chosen evaluation needs them."""
    evaluations: dict[Name, ChainEvaluation] = Field(min_length=1)
    """Evaluations by name."""
    tables: tuple[PositiveInt, ...] = Field(min_length=1)
    """Tables to fill unless `--tables` names others."""
    bank: Literal["experience", "collected"] = "experience"
    """Memory of GRPO and evaluation: the bank that the expert fills, or the bank of the collection."""
    processes: Processes = Processes()
    """How the stages are started."""

    @model_validator(mode="after")
    def _names_exist(self) -> ReproduceConfig:
        for name, evaluation in self.evaluations.items():
            for kind, named, known in (
                ("compilers", evaluation.compilers, tuple(self.compilers)),
                ("executors", evaluation.executors or (), tuple(self.executors)),
                ("benchmarks", evaluation.benchmarks or (), self.benchmarks),
            ):
                if missing := sorted(set(named).difference(known)):
                    raise ValueError(f"evaluations.{name}.{kind}: {missing[0]} is not among {kind}: {', '.join(known)}")
        if self.benchmarks[0] in self.further:
            raise ValueError(f"further: {self.benchmarks[0]} is the chain's first benchmark already")
        return self

    @property
    def benchmarks(self) -> tuple[str, ...]:
        """Return the names of the chain's benchmarks, the first's first."""
        return str(self.shared.get("env", {}).get("name") or self.eval.env.name), *self.further


@dataclass(frozen=True)
class Stage:
    """One command of a chain. `folder` is its run folder, `benchmark` that of a further benchmark's collection."""

    kind: Literal["collect", "sft", "grpo", "eval"]
    folder: Path
    config: StageConfig
    executor: str = ""
    compiler: str = ""
    evaluation: str = ""
    tables: tuple[int, ...] = ()
    optional: bool = False
    benchmark: str = ""

    @property
    def name(self) -> str:
        return "/".join(filter(None, (_of(self.kind, self.benchmark), self.executor, self.evaluation or self.compiler)))


@dataclass(frozen=True)
class Chain:
    """A chain in its folder; `name`: of its configuration, for commands."""

    config: ReproduceConfig
    out: Path
    name: str = ""

    def stages(
        self, tables: Collection[int] = (), executors: Collection[str] = (), optional: Collection[str] = ()
    ) -> list[Stage]:
        """Return the stages that fill the tables, each after those whose results it reads.

        Args:
            tables: numbers of tables; none: those of the settings.
            executors: names of executors; none: all.
            optional: names of optional evaluations to make as well.

        Raises:
            ConfigError: an unknown table, executor or evaluation, or invalid settings of a stage.
        """
        config = self.config
        tables = tables or config.tables
        known = {table for of in config.evaluations.values() for table in of.tables}
        for what, named, there in (
            ("table", tables, known),
            ("executor", executors, config.executors),
            ("optional evaluation", optional, {n for n, of in config.evaluations.items() if of.optional}),
        ):
            if missing := sorted(set(named) - set(there), key=str):
                names = ", ".join(map(str, there)) or "none"
                raise ConfigError(f"{self.name or 'this chain'} has no {what} {missing[0]}; there are {names}")
        chosen = {
            name: of
            for name, of in config.evaluations.items()
            if (name in optional if of.optional else not set(tables).isdisjoint(of.tables))
        }
        made: dict[Path, Stage] = {stage.folder: stage for stage in map(self._collect, ("", *config.further))}
        for executor in [name for name in config.executors if not executors or name in executors]:
            for name, of in chosen.items():
                if of.executors is None or executor in of.executors:
                    for compiler in of.compilers:
                        for stage in (
                            *self._training(executor, compiler),
                            *self._evaluations(executor, compiler, name),
                        ):
                            made.setdefault(stage.folder, stage)
        return list(made.values())

    def _collect(self, benchmark: str) -> Stage:
        """Return the collection of a further benchmark, or ("") of the first."""
        folder = self.out / _of("collect", benchmark)
        return Stage("collect", folder, self._changed("collect", benchmark=benchmark), benchmark=benchmark)

    def _training(self, executor: str, compiler: str) -> Iterator[Stage]:
        own, further = self.config.compilers[compiler], self.config.further
        rows = [str(self.out / _of("collect", name) / "rows") for name in ("", *further)]
        also = {"also": {name: self._also(name, of) for name, of in further.items()}} if further else {}
        checkpoint = str(self._folder("sft", executor, compiler))
        for kind, changes, start in (
            ("sft", own.sft, {"rows": rows if further else rows[0]}),
            ("grpo", own.grpo, {"compiler": {"checkpoint": checkpoint}, **also}),
        ):
            if getattr(self.config, kind) is not None:
                config = self._changed(kind, self._of(executor, compiler), changes, start)
                yield Stage(kind, self._folder(kind, executor, compiler), config, executor, compiler)  # type: ignore[arg-type]

    def _also(self, name: str, of: ChainBenchmark) -> dict[str, Any]:
        """Return a further benchmark's part of GRPO."""
        collected = {"bank": str(self.out / _of("collect", name) / "bank")} if self.config.bank == "collected" else {}
        return {"env": of.env, **collected, **of.grpo}

    def _evaluations(self, executor: str, compiler: str, name: str) -> Iterator[Stage]:
        chosen = self.config.evaluations[name].benchmarks
        for benchmark in self.config.benchmarks:
            if chosen is None or benchmark in chosen:
                further = benchmark if benchmark in self.config.further else ""
                yield self._evaluation(executor, compiler, name, further)

    def _evaluation(self, executor: str, compiler: str, name: str, benchmark: str) -> Stage:
        of = self.config.evaluations[name]
        last = "grpo" if self.config.grpo is not None else "sft"
        start: dict[str, Any] = {"compiler": {"checkpoint": str(self._folder(last, executor, compiler))}}
        if of.axis is not None:
            start["matrix"] = {of.axis: {compiler: {}}}
        config = self._changed("eval", self._of(executor, compiler), of.eval, start, benchmark=benchmark)
        shown = _of(name if len(of.compilers) == 1 else f"{name}-{compiler}", benchmark)
        folder = self._folder("eval", executor, shown)
        return Stage("eval", folder, config, executor, compiler, shown, of.tables, of.optional)

    def _folder(self, kind: str, executor: str, name: str) -> Path:
        return self.out / kind / executor / name

    def _of(self, executor: str, compiler: str) -> dict[str, Any]:
        return {"executor": self.config.executors[executor], "compiler": self.config.compilers[compiler].compiler}

    def _changed(self, kind: str, *changes: Mapping[str, Any], benchmark: str = "") -> Any:
        """Return a stage's settings with the shared ones, the bank of the chain, and further changes. `benchmark`: of a
        collection or evaluation, if it is not the first."""
        block = getattr(self.config, kind)
        blocks = {name: own for name, own in self.config.shared.items() if name in type(block).model_fields}
        if benchmark:
            of = self.config.further[benchmark]
            blocks["env"] = {**of.env, "name": benchmark}
            changes = (getattr(of, kind), *changes)
        # Settings of another environment, such as the one of the block's base, do not apply.
        named = blocks.get("env", {}).get("name")
        without = ("env",) if named and named != block.env.name else ()
        try:
            return changed(block, blocks, self._bank(kind, block, benchmark), *changes, without=without)
        except ConfigError as error:
            raise ConfigError(f"{self.name or 'chain'}, stage {kind}: {error}") from None

    def _bank(self, kind: str, block: StageConfig, benchmark: str) -> dict[str, Any]:
        """Return the settings of the bank that the stages share, unless the settings name one."""
        if isinstance(block, SftConfig) or block.memory.bank is not None:
            return {}
        if kind != "collect" and self.config.bank == "collected":
            return {"memory": {"bank": str(self.out / _of("collect", benchmark) / "bank")}}
        return {"memory": {"experience_folder": str(self.out / "experience")}}


def _of(name: str, benchmark: str) -> str:
    """Return the name of a folder of a further benchmark."""
    return f"{name}-{benchmark}" if benchmark else name


def find_chain(name: str, overrides: Sequence[str] = (), out: Path | None = None) -> Chain:
    """Load a shipped chain by the name of its benchmark, or a file. Raises: ConfigError."""
    path = chain_file(name)
    return Chain(load_config(ReproduceConfig, path, overrides), out or RUNS / path.stem, name)


def chain_file(name: str) -> Path:
    """Return the file of a chain. Raises: ConfigError, which lists the shipped ones."""
    if (shipped := CONFIGS / FOLDER / f"{name}.yaml").is_file():
        return shipped
    if Path(name).suffix == ".yaml":
        return find_config(name)
    raise ConfigError(f"there is no chain {name!r}: name one of {', '.join(shipped_chains())}, or a YAML file")


def shipped_chains() -> list[str]:
    """Return the names of the shipped chains."""
    return sorted(path.stem for path in (CONFIGS / FOLDER).glob("*.yaml"))


def missing_needs(stages: Sequence[Stage]) -> list[str]:
    """Describe what the stages need and this machine lacks: keys of endpoints, and task files that are not shipped."""
    return list(dict.fromkeys(text for stage in stages for text, there in needs(stage) if not there))


def needs(stage: Stage) -> Iterator[tuple[str, bool]]:
    """Yield what a stage needs besides models and the environment, and whether it is there."""
    for where, api in _endpoints(stage.config):
        if api.key_env:
            text = (
                f"{stage.kind}: an API key in the environment variable {api.key_env} ({where}.key_env), for {api.model}"
            )
            yield text, bool(os.environ.get(api.key_env))
    parts = [] if isinstance(stage.config, SftConfig) else getattr(stage.config, "parts", [stage.config])
    for part in parts:
        if file := getattr(part.env, "tasks_file", None):
            where = "env.tasks_file; docs/guides/environments.md says where it is from"
            yield f"{stage.kind}: the task file {file} ({where})", Path(file).is_file()


def _endpoints(config: StageConfig) -> Iterator[tuple[str, EndpointConfig]]:
    """Yield the endpoints that a stage asks, by their place in the settings."""
    if isinstance(config, CollectConfig) and config.teacher == "endpoint":
        yield "api", config.api
    acts = not isinstance(config, CollectConfig) or config.acting_role == "executor"
    if acts and config.executor.engine == "api":
        yield "executor.api", config.executor.api
    if not isinstance(config, SftConfig):
        for name in ("api", "embed_api"):
            if (api := getattr(config.memory, name)) is not None:
                yield f"memory.{name}", api
