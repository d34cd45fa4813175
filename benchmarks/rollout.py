"""Compare continuous with lockstep batching: agent steps per second of the same episodes on the same engines.

    memcompiler bench rollout                                                       # vLLM, the household's small models
    memcompiler bench rollout compiler.engine=http compiler.url=... executor.engine=http executor.url=...
    memcompiler bench rollout --step-ms 20                                          # simulated engines, without vLLM

Both ways take turns in one run, with an empty prefix cache each time. Beside them is the saturated throughput: the
requests of those episodes, given to the engines at once.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from agent.deliveries import COMPILED, find
from agent.episode import EpisodeLimits, EpisodeSpec, run_episodes
from agent.records import Episode
from benchmarks.memory import expert_traces
from benchmarks.simulated_engine import SimulatedLLM, simulated_compiler, simulated_vllm
from configs.evaluation import EvalConfig
from configs.load import load_config
from configs.models import Batching
from data_gen.memory_factory import initialise_memory, open_memory
from data_gen.tasks import episode_specs
from envs.registry import Environments, evaluation_split
from eval.model_cache import ModelCache
from eval.table import markdown_table
from runtime.progress import disable_library_progress_bars

WAYS: tuple[Batching, Batching] = ("lockstep", "continuous")
PARTS = 16  # calls, at the same moment, that give all requests of a role to a saturated engine
ACTION_TOKENS = 4
EXPERIENCE = 32  # episodes of the expert in memory

app = typer.Typer(help="Compare continuous with lockstep batching of rollouts.")


@app.command()
def measure_rollouts(
    settings: Annotated[list[str] | None, typer.Argument(help="Evaluation settings as a.b=c.")] = None,
    config: Annotated[str, typer.Option("--config", "-c", help="Evaluation settings.")] = "eval/quickstart",
    episodes: Annotated[str, typer.Option(help="Numbers of episodes side by side.")] = "16,64",
    steps: Annotated[int, typer.Option(min=1, help="Steps per episode.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions of both ways.")] = 3,
    step_ms: Annotated[float, typer.Option(min=0, help="Milliseconds of a simulated engine's step; 0: vLLM.")] = 0,
) -> None:
    """Measure agent steps per second of both ways; the last line is continuous over lockstep, for the most episodes."""
    disable_library_progress_bars()
    defaults = ["compiler.engine=vllm", "executor.engine=vllm", "compiler.checkpoint=null"]
    if step_ms:  # a simulated engine reads no pictures
        defaults += ["env.visual_share=0", "env.remembered_share=0", "memory.pictures=0", "executor.mode=generate"]
    chosen = load_config(EvalConfig, config, [*defaults, *(settings or [])])
    numbers = sorted(int(number) for number in episodes.split(","))
    with contextlib.ExitStack() as stack:
        rows = measure(stack, chosen, numbers=numbers, steps=steps, rounds=rounds, step_s=step_ms / 1e3)
    typer.echo("\n".join(table(rows)))
    typer.echo(f"ratio: {rows[-1].ratio:.2f}")


@dataclass(slots=True)
class Row:
    """Agent steps per second of a number of episodes: of each way by round, and with saturated engines."""

    episodes: int
    rates: dict[Batching, list[float]] = field(default_factory=lambda: {way: [] for way in WAYS})
    saturated: list[float] = field(default_factory=list)
    same: float = 0.0  # share of episodes with the same actions in both ways

    @property
    def ratio(self) -> float:
        """Return the median over rounds of continuous over lockstep."""
        return statistics.median(b / a for a, b in zip(self.rates["lockstep"], self.rates["continuous"], strict=True))

    @property
    def share(self) -> float:
        """Return the median over rounds of continuous over saturated."""
        return statistics.median(a / b for a, b in zip(self.rates["continuous"], self.saturated, strict=True))


def measure(
    stack: contextlib.ExitStack, config: EvalConfig, numbers: Sequence[int], steps: int, rounds: int, step_s: float
) -> list[Row]:
    """Measure each number of episodes; `step_s` as in `SimulatedLLM`, 0 for the engines of the settings."""
    envs = stack.enter_context(Environments(config.env))
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="memcompiler-bench-")))
    if config.compiler.engine == "vllm" and config.compiler.checkpoint is None:
        config = _with_fresh_checkpoint(config, folder / "checkpoint")
    compiler, executor = _simulated(stack, config, step_s) if step_s else _loaded(stack, config)
    specs = _specs(envs, config, folder, max(numbers))
    play = _Player(envs, compiler, executor, EpisodeLimits(steps, config.seed))
    play(specs[: min(2, len(specs))], "continuous")  # warm-up
    return [_measure(play, specs[:number], rounds) for number in numbers]


def _measure(play: _Player, specs: Sequence[EpisodeSpec], rounds: int) -> Row:
    row, actions = Row(len(specs)), dict[Batching, list[Any]]()
    for number in range(rounds):
        for way in WAYS if number % 2 == 0 else WAYS[::-1]:
            played, seconds = play(specs, way)
            row.rates[way].append(sum(len(episode.steps) for episode in played) / seconds)
            actions[way] = [[step.action for step in episode.steps] for episode in played]
        row.saturated.append(sum(map(len, actions["continuous"])) / play.saturated_seconds())
    row.same = statistics.fmean(a == b for a, b in zip(*actions.values(), strict=True))
    return row


@dataclass(slots=True)
class _Player:
    """Plays episodes, and remembers the requests of the last ones."""

    envs: Environments
    compiler: Any  # both a _Recording
    executor: Any
    limits: EpisodeLimits

    def __call__(self, specs: Sequence[EpisodeSpec], way: Batching) -> tuple[list[Episode], float]:
        """Play episodes side by side. Returns them, and the seconds. Raises: ValueError, for a failed episode."""
        for role in (self.compiler, self.executor):
            role.begin()
        started = time.perf_counter()
        played = run_episodes(
            self.envs.lease,
            specs,
            delivery=find(COMPILED).create(self.compiler, self.limits.seed),
            executor=self.executor,
            limits=replace(self.limits, batching=way),
            concurrency=len(specs),
        )
        seconds = time.perf_counter() - started
        if failed := next((episode.error for episode in played if episode.error), None):
            raise ValueError(failed)
        return played, seconds

    def saturated_seconds(self) -> float:
        """Give the requests of the last episodes to both engines at once; return the seconds."""
        calls = [*self.compiler.calls(), *self.executor.calls()]
        for role in (self.compiler, self.executor):
            role.begin()
        with ThreadPoolExecutor(len(calls)) as threads:
            started = time.perf_counter()
            list(threads.map(lambda call: call(), calls))
            return time.perf_counter() - started


class _Recording:
    """A compiler or executor that remembers its requests, and their seeds if they have any."""

    def __init__(self, model: Any) -> None:
        self.model, self.seen = model, list[tuple[str, tuple[Any, ...]]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def compile(self, requests: Sequence[Any], *seeds: Sequence[int]) -> list[Any]:
        return self._ask("compile", requests, *seeds)

    def act(self, requests: Sequence[Any], *seeds: Sequence[int]) -> list[Any]:
        return self._ask("act", requests, *seeds)

    def _ask(self, method: str, *lists: Sequence[Any]) -> list[Any]:
        self.seen += [(method, arguments) for arguments in zip(*lists, strict=True)]
        return getattr(self.model, method)(*lists)

    def begin(self) -> None:
        """Forget the requests, and empty the engine's prefix cache."""
        self.seen = []
        if (loop := getattr(self.model, "loop", None)) is not None:
            loop.call(loop.llm.llm_engine.reset_prefix_cache)

    def calls(self) -> list[Callable[[], Any]]:
        """Return `PARTS` calls that make all requests again: few, because hundreds of threads would take turns for
        Python's lock instead of keeping the engine busy."""
        return [partial(self._again, part) for i in range(PARTS) if (part := self.seen[i::PARTS])]

    def _again(self, part: Sequence[tuple[str, tuple[Any, ...]]]) -> list[Any]:
        method = part[0][0]  # a role has one
        return getattr(self.model, method)(*map(list, zip(*(arguments for _, arguments in part), strict=True)))


def _specs(envs: Environments, config: EvalConfig, folder: Path, number: int) -> list[EpisodeSpec]:
    """Return evaluation tasks, repeated if there are too few, with what memory holds of the expert's episodes."""
    memory = open_memory(config.memory, folder / "memory", config.env.name)
    initialise_memory(memory, config.env.name)
    memory.commit(list(islice(expert_traces(envs, envs.tasks("train"), steps=20), EXPERIENCE)))
    tasks = envs.tasks(config.split or evaluation_split(config.env))
    specs = episode_specs((tasks * (1 + number // len(tasks)))[:number], memory, config.memory.k)
    return [replace(spec, open_session=None) for spec in specs]


def _with_fresh_checkpoint(config: EvalConfig, folder: Path) -> EvalConfig:
    """Save a new adapter and projector for the models of the settings."""
    from compiler import checkpoint
    from compiler.build import load_compiler
    from envs.registry import executor_instructions_for
    from executor.build import load_frozen

    here = {"engine": "hf", "device": "cpu"}
    executor = load_frozen(config.executor.model_copy(update=here), executor_instructions_for(config.env))
    table = SimpleNamespace(embedding_table=executor.embedding_table)
    checkpoint.save_weights(folder, load_compiler(config.compiler.model_copy(update=here), table))
    return config.model_copy(
        update={"compiler": config.compiler.model_copy(update={"checkpoint": str(folder)}), "deliveries": (COMPILED,)}
    )


def _loaded(stack: contextlib.ExitStack, config: EvalConfig) -> tuple[_Recording, _Recording]:
    models = stack.enter_context(ModelCache())
    return _Recording(models.compiler(config)), _Recording(models.executor(config))


def _simulated(stack: contextlib.ExitStack, config: EvalConfig, step_s: float) -> tuple[_Recording, _Recording]:
    """Create compiler and executor of the settings on simulated engines."""
    from compiler import checkpoint
    from compiler.records import Decoding
    from configs.models import model_path
    from envs.registry import executor_instructions_for
    from executor.build import executor_view
    from executor.vllm import VllmExecutor
    from lm.backbone import load_encoder

    stack.enter_context(simulated_vllm())
    settings, acting = config.compiler, config.executor
    encoder = load_encoder(model_path(acting.model), acting.memory_token)  # for both, since it shows no pictures
    projector = checkpoint.load_projector(checkpoint.find(Path(str(settings.checkpoint))))
    compiler = simulated_compiler(
        encoder,
        projector,
        step_s,
        settings.vllm.max_num_seqs,
        decoding=Decoding(settings.temperature, settings.max_new_tokens),
        history=settings.history,
    )
    action = [*encoder.ids("look"), encoder.end_id]
    acts = SimulatedLLM(lambda _: [action[0]] * (ACTION_TOKENS - 1) + action[-1:], 1, step_s, acting.vllm.max_num_seqs)
    acts.model_config.get_hidden_size = lambda: projector.config.d_executor
    executor = VllmExecutor(
        acts,  # type: ignore[arg-type]
        encoder,
        Path(model_path(acting.model)),
        mode=acting.mode,
        max_new_tokens=acting.max_new_tokens,
        reads=executor_view(acting, executor_instructions_for(config.env)),
    )
    return _Recording(compiler), _Recording(executor)


def table(rows: Sequence[Row]) -> list[str]:
    heads = ["episodes", *(f"{way}, steps/s" for way in WAYS), "ratio", "saturated", "share of it", "same episodes"]
    cells = []
    for row in rows:
        rates = [statistics.median(row.rates[way]) for way in WAYS]
        numbers = [*rates, row.ratio, statistics.median(row.saturated), row.share]
        cells.append([str(row.episodes), *(f"{number:.2f}" for number in numbers), f"{100 * row.same:.0f} %"])
    return markdown_table(heads, cells)
