"""`memcompiler report paper --figure 3 RUN` (or 4): writes measured figures as OUT/figure3.md, .json and .png.

A figure needs a run's episodes and its models, which process the recorded token ids again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from agent.deliveries import find
from agent.records import Episode
from compiler.build import load_compiler
from compiler.hf import MemoryCompiler
from configs.evaluation import EvalConfig
from configs.load import ConfigError, load_config
from configs.run_folder import CONFIG
from data_gen.memory_factory import open_memory
from envs.registry import compiler_instructions_for, executor_instructions_for
from eval.paper import latents
from eval.paper.attention import CHANNELS, Attention, attention_at, attention_plot, curves
from eval.paper.render import write
from eval.paper.tables import paper_numbers
from eval.runs import EPISODES
from eval.table import DASH, interval, markdown_table, percent
from executor.build import load_frozen
from executor.hf import FrozenExecutor
from memory.entry import MemoryEntry
from memory.protocol import MemorySystem

FIGURES = (3, 4)
PREFIX_MIB = 1000  # keys and values of an episode's last prompts, which the next one repeats


def run_figure(
    number: int,
    run: Path,
    overrides: Sequence[str],
    out: Path | None,
    deliveries: Sequence[str],
    limit: int | None,
    seed: int,
) -> None:
    """Compute figure `number` from the episodes of a run, or of one cell of a matrix.

    Args:
        overrides: settings that override the run's, such as new paths of its models.
        limit: maximum number of tasks.

    Raises:
        ConfigError: no run, no checkpoint, or an executor without local weights.
        ValueError: no such figure, or the models do not match the record.
    """
    if number not in FIGURES:
        raise ValueError(f"figures {' and '.join(map(str, FIGURES))} are measured; there is no figure {number}")
    replay = Replay(run, overrides)
    target, name = out or run / "paper", f"figure{number}"
    png = target / f"{name}.png"
    if number == 3:
        facts, text = _figure3(replay, deliveries or ("static", "compiled"), limit, png)
    else:
        facts, text = _figure4(replay, deliveries or ("compiled",), limit=limit, seed=seed, png=png)
    write(target, name, text, {"figure": number, "run": run.name, **replay.about(), **facts})


# the run's models ----------------------------------------------------------------------------------------------------


class Replay:
    """A run's settings and record; models (always in transformers) and memory are loaded on first use.

    Raises:
        ConfigError: the folder is no single evaluation, or its executor has no local weights.
    """

    def __init__(self, run: Path, overrides: Sequence[str]) -> None:
        if not (run / CONFIG).is_file():
            raise ConfigError(f"{run / CONFIG} does not exist: name a run folder of memcompiler eval")
        self.run, self.config = run, load_config(EvalConfig, run / CONFIG, overrides)
        if self.config.matrix:
            cells = ", ".join(sorted(path.name for path in (run / "cells").glob("*"))) or "none yet"
            raise ConfigError(f"{run} is a matrix: name one of its cells, {run}/cells/NAME; there are {cells}")
        if self.config.executor.engine == "api":
            raise ConfigError("a closed model shows no attention and no embeddings: evaluate with executor.engine=hf")
        self._bank: MemorySystem | None = None

    @cached_property
    def executor(self) -> FrozenExecutor:
        prefix_mib = max(self.config.executor.prefix_mib, PREFIX_MIB)
        settings = self.config.executor.model_copy(update={"mode": "choice", "prefix_mib": prefix_mib})
        return load_frozen(settings, executor_instructions_for(self.config.env))

    @cached_property
    def compiler(self) -> MemoryCompiler:
        """The trained compiler. Raises: ConfigError, if the settings name no checkpoint."""
        if self.config.compiler.checkpoint is None:
            raise ConfigError("the compiler must recompute the soft tokens: set compiler.checkpoint")
        settings = self.config.compiler.model_copy(update={"engine": "hf"})
        return load_compiler(settings, self.executor, self.config.seed, compiler_instructions_for(self.config.env))

    def memory(self, episode: Episode, t: int) -> tuple[MemoryEntry, ...]:
        """Return the entries recalled at step t. Raises: BankError, KeyError, if the bank lacks one."""
        if self._bank is None:
            version = self.config.memory.version or episode.bank_version
            memory = self.config.memory.model_copy(update={"version": version})
            self._bank = open_memory(memory, self.run / "bank", self.config.env.name)
        return episode.memory_at(t, self._bank)

    def recompiled(self, episode: Episode, t: int) -> latents.Recompiled | None:
        """Recompute step t's soft tokens; None if the executor read none."""
        if not find(episode.delivery).shows_own_soft or not episode.steps[t].soft_read:
            return None
        return latents.recompiled(self.compiler, episode, t, self.memory(episode, t))

    def about(self) -> dict[str, Any]:
        config = self.config
        names = {"executor": config.executor.model, "checkpoint": config.compiler.checkpoint}
        return {"environment": config.env.name, "split": config.split, "seed": config.seed, **names}


# figures --------------------------------------------------------------------------------------------------------------


def _figure3(replay: Replay, deliveries: Sequence[str], limit: int | None, png: Path) -> tuple[dict[str, Any], str]:
    by_delivery: dict[str, list[list[Attention]]] = {name: [] for name in deliveries}
    without = dict.fromkeys(deliveries, 0)
    drawn = 0
    for episode in latents.played(replay.run / EPISODES, deliveries, limit):
        attentions = []
        for t, step in enumerate(episode.steps):
            if not step.executor_prompt_ids:  # it failed before the executor acted
                continue
            recomputed = replay.recompiled(episode, t)
            drawn += recomputed is not None and recomputed.drawn
            found = attention_at(replay.executor, episode, t, recomputed.soft if recomputed else None)
            attentions += [found] if found else []
            without[episode.delivery] += found is None
        by_delivery[episode.delivery].append(attentions)
    by_name = {name: {**curves(of), "steps_without_memory": without[name]} for name, of in by_delivery.items()}
    attention_plot(by_name, png)
    rows = [
        [
            name,
            str(of["episodes"]),
            str(of["steps_with_memory"]),
            channel,
            _ends(of["logit"][channel]["by_step"]),
            _trend(of["logit"][channel]["slope"]),
            _trend(of["share"][channel]["slope"]),
        ]
        for name, of in by_name.items()
        for channel in CHANNELS
        if channel in of["logit"]
    ]
    heads = (
        "delivery",
        "episodes",
        "steps with memory",
        "tokens",
        "logit, first to last step",
        "trend of the logit per step",
        "trend of the share per step",
    )
    text = _page(
        3,
        "mean pre-softmax attention logit of the executor over memory tokens",
        heads=heads,
        rows=rows,
        notes=[
            "Trend: mean over episodes of each one's own, 95 % bootstrap interval over episodes.",
            *([f"{drawn} steps had sampled soft tokens: their mean is used instead."] if drawn else []),
        ],
    )
    return {"deliveries": by_name, "sampled_soft_steps": drawn}, text


def _figure4(
    replay: Replay, deliveries: Sequence[str], limit: int | None, seed: int, png: Path, most: int = 500
) -> tuple[dict[str, Any], str]:
    steps = [  # a list, so that an unreadable record is found before the executor is loaded
        (recomputed, f"{step.reason} {step.guidance}".strip(), number)
        for number, episode in enumerate(latents.played(replay.run / EPISODES, deliveries, limit))
        for t, step in enumerate(episode.steps)
        if (recomputed := replay.recompiled(episode, t)) is not None
    ]
    shown, left_out = _spaces(latents.gathered(replay.executor, steps), most, seed)
    latents.latents_plot(shown, png)
    rows = [
        [
            space,
            str(apart["n"]),
            str(apart["episodes"]),
            f"{apart['silhouette']:.3f}",
            percent(apart["probe"]),
            f"{percent(apart['permuted_mean'])} ({percent(apart['permuted_max'])})",
            f"{apart['p_value']:.3f}",
        ]
        for space, (_, _, apart) in shown.items()
    ]
    heads = (
        "space",
        "tokens",
        "episodes",
        "silhouette",
        "probe, % of held-out tokens",
        "shuffled labels, mean (highest), %",
        "p",
    )
    text = _page(
        4,
        "soft memory tokens and text memory tokens",
        heads=heads,
        rows=rows,
        notes=[
            *(f"{space}: {meaning}." for space, meaning in latents.SPACES.items()),
            *(f"{space}: not measured, {why}." for space, why in left_out.items()),
            "Probe: logistic regression, tested on episodes that it was not trained on; distinct vectors, as many of "
            "each kind. p: share of label shuffles that do as well.",
        ],
    )
    points = {
        space: [
            {"kind": str(k), "x": round(float(x), 3), "y": round(float(y), 3)}
            for k, (x, y) in zip(of.kinds, places, strict=True)
        ]
        for space, (of, places, _) in shown.items()
    }
    apart = {space: apart for space, (_, _, apart) in shown.items()}
    return {"seed_of_figure": seed, "separability": apart, "not_measured": left_out, "points": points}, text


def _spaces(found: Mapping[str, latents.Tokens], most: int, seed: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (tokens, plane, separability) by space, and reasons for spaces left out. Raises: ValueError, if all
    are."""
    shown, left_out = {}, {}
    for space, tokens in found.items():
        try:
            tokens = tokens.balanced(most, seed)
            shown[space] = (tokens, latents.plane(tokens, seed), latents.separability(tokens, seed))
        except ValueError as error:
            left_out[space] = str(error)
    if not shown:
        raise ValueError("; ".join(f"{space}: {why}" for space, why in left_out.items()))
    return shown, left_out


def _page(number: int, title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    printed = f"Paper: {paper_numbers()['figures'][number]} All numbers above are measured."
    lines = ["", *markdown_table(heads, rows), "", *(f"- {n}" for n in (printed, *notes))]
    return "\n".join([f"### Figure {number}: {title}", *lines]) + "\n"


def _ends(points: Sequence[Mapping[str, Any]]) -> str:
    first, last = points[0], points[-1]
    return f"{first['mean']:.2f} (n {first['n']}) to {last['mean']:.2f} (step {last['t']}, n {last['n']})"


def _trend(slope: Mapping[str, Any] | None) -> str:
    return DASH if slope is None else interval(slope, "{:+.3f}", scale=1)
