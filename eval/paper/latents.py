"""Separability of soft tokens and text tokens (paper Figure 4), recomputed from a run's record.

episodes.jsonl stores token ids and statistics of the soft tokens, not the tensors. `recompiled` recomputes these from
the recorded prompt, emission and checkpoint, and compares them with the record (prompt ids exactly, the mean norm of
the soft tokens to 1 %), so that another checkpoint, bank or prompt layout is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.manifold import TSNE
from sklearn.metrics import silhouette_score
from sklearn.model_selection import GroupShuffleSplit
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from agent.deliveries import recorded_step
from agent.records import Episode, compile_request, episode_from_json
from compiler.hf import MemoryCompiler
from eval.plots import ACCENT, GRID, MUTED, figure_of, save_figure, titled
from executor.hf import FrozenExecutor
from memory.entry import MemoryEntry
from runtime.store import JsonLines

SOFT, TEXT = "soft", "text"
SPACES: Mapping[str, str] = {
    "executor": "the executor's input embeddings: soft tokens, and the tokens of guidance and reason",
    "compiler": "the compiler's last hidden states: at the memory tokens, and at the emission's",
}
_NORM_TOLERANCE = 0.01
_COLORS = {SOFT: "#b5532f", TEXT: ACCENT}
_COMPONENTS = 50  # maximum dimensions for t-SNE and the probe; more are reduced by PCA


@dataclass(frozen=True, slots=True)
class Recompiled:
    """Soft tokens of a step, recomputed: soft (N, d_executor), and the compiler's hidden states h_soft (N, d) and
    h_text (T, d). `drawn`: the run had sampled them, and `soft` is their mean."""

    soft: Tensor
    h_soft: Tensor
    h_text: Tensor
    drawn: bool


def played(record: Path, deliveries: Sequence[str], limit: int | None = None) -> Iterator[Episode]:
    """Read the episodes of these deliveries with pictures, of the first `limit` tasks.

    Raises:
        ValueError: no record, or a delivery is not in it.
    """
    if not record.is_file():
        raise ValueError(f"{record} does not exist: name a run folder, of a matrix one of its cells (RUN/cells/NAME)")
    tasks, seen = set(), set()
    for row in JsonLines(record, ("delivery", "task_id", "steps")):
        if row["delivery"] not in deliveries or (row["task_id"] not in tasks and len(tasks) == limit):
            continue
        tasks.add(row["task_id"])
        seen.add(row["delivery"])
        yield episode_from_json(row)
    if absent := [name for name in deliveries if name not in seen]:
        raise ValueError(f"{record} has no episode of {', '.join(absent)}: evaluate with these deliveries")


@torch.no_grad()
def recompiled(compiler: MemoryCompiler, episode: Episode, t: int, memory: Sequence[MemoryEntry]) -> Recompiled | None:
    """Recompute step t's soft tokens; None if nothing was compiled.

    Raises:
        ValueError: prompt or soft tokens differ from the record.
    """
    step = episode.steps[t]
    if step.soft is None:
        return None
    where = f"{episode.task_id}, {episode.delivery}, step {t}"
    prompt = compiler.encode(compile_request(recorded_step(episode, t, memory)))
    if prompt.ids != step.compiler_prompt_ids:
        raise ValueError(f"{where}: the compiler's prompt is not the recorded one: other memory, tokenizer or layout")
    compiler.eval()
    scored = compiler.score([prompt], [step.emission_ids])
    mu = scored.gaussian.mu[0].float()
    norm, recorded = mu.norm(dim=-1).mean().item(), step.soft["mu_norm"]
    if len(mu) != step.soft["n"] or abs(norm - recorded) > _NORM_TOLERANCE * recorded:
        raise ValueError(
            f"{where}: {len(mu)} soft tokens of norm {norm:.4g}, the record has {step.soft['n']:.0f} of "
            f"{recorded:.4g}: compiler.checkpoint is not the run's"
        )
    drawn = abs(step.soft["z_norm"] - recorded) > _NORM_TOLERANCE * recorded
    soft = compiler.projector.to_embeddings(scored.gaussian.mu)[0]
    return Recompiled(soft.float().cpu(), scored.h_soft[0].float().cpu(), scored.h_text[0].float().cpu(), drawn)


# tokens of both kinds -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tokens:
    """Vectors (n, d), their kinds (n,), SOFT or TEXT, and the numbers of their episodes (n,)."""

    vectors: np.ndarray
    kinds: np.ndarray
    episodes: np.ndarray

    def balanced(self, most: int, seed: int) -> Tokens:
        """Draw distinct vectors, equally many of both kinds and at most `most` of each.

        A text token always has the same input embedding; its duplicates would be on both sides of the probe's split.

        Raises:
            ValueError: one kind is missing.
        """
        _, first = np.unique(np.ascontiguousarray(self.vectors), axis=0, return_index=True)
        of_kind = [np.sort(first)[self.kinds[np.sort(first)] == kind] for kind in (SOFT, TEXT)]
        n = min(most, *map(len, of_kind))
        if n < 10:
            raise ValueError(f"{n} distinct tokens of one kind are too few: play more episodes, with soft tokens")
        rng = np.random.default_rng(seed)
        chosen = np.concatenate([np.sort(rng.choice(rows, n, replace=False)) for rows in of_kind])
        return Tokens(self.vectors[chosen], self.kinds[chosen], self.episodes[chosen])


def gathered(executor: FrozenExecutor, steps: Iterable[tuple[Recompiled, str, int]]) -> dict[str, Tokens]:
    """Collect the tokens of both kinds by space.

    Args:
        steps: soft tokens of a step, its text channel (reason and guidance, may be ""), and the number of its episode.

    Raises:
        ValueError: no step has soft tokens.
    """
    rows: dict[str, list[tuple[np.ndarray, str, int]]] = {space: [] for space in SPACES}
    for step, guidance, episode in steps:
        ids = executor.tokenizer(guidance, add_special_tokens=False)["input_ids"]
        embedded = executor.embedding_table[ids].detach().float().cpu()
        for space, soft, text in (("executor", step.soft, embedded), ("compiler", step.h_soft, step.h_text)):
            rows[space] += [(of.numpy(), kind, episode) for of, kind in ((soft, SOFT), (text, TEXT)) if len(of)]
    if not all(rows.values()):
        raise ValueError("no step has soft tokens: name a run that played the delivery `compiled`")
    found = {}
    for space, of_space in rows.items():
        vectors, kinds, episodes = zip(*of_space, strict=True)
        repeats = [len(of_step) for of_step in vectors]
        found[space] = Tokens(np.concatenate(vectors), np.repeat(kinds, repeats), np.repeat(episodes, repeats))
    return found


# separability --------------------------------------------------------------------------------------------------------


def separability(tokens: Tokens, seed: int = 0, permutations: int = 100) -> dict[str, Any]:
    """Compute the silhouette of the two kinds, and the accuracy of a linear probe on held-out episodes.

    Returns:
        `silhouette` in [-1, 1]; `probe` accuracy in [0, 1] beside `chance` (the larger kind's share of the held-out
        tokens), `permuted_mean` and `permuted_max` (the same probe on shuffled labels) and `p_value`.

    Raises:
        ValueError: fewer than two episodes, or a split that leaves one kind out.
    """
    episodes = len(set(tokens.episodes.tolist()))
    if episodes < 2:
        raise ValueError("a probe needs at least two episodes, one for training and one for testing")
    splitter = GroupShuffleSplit(1, test_size=0.5, random_state=seed)
    train, test = next(splitter.split(tokens.vectors, groups=tokens.episodes))
    y = (tokens.kinds == SOFT).astype(int)
    if len(set(y[train])) < 2 or len(set(y[test])) < 2:
        raise ValueError("one half of the episodes has tokens of one kind only: play more episodes")
    rng = np.random.default_rng(seed)
    score = _probe(tokens.vectors, train, test)
    permuted = [score(rng.permutation(y)) for _ in range(permutations)]
    accuracy = score(y)
    return {
        "n": len(y),
        "episodes": episodes,
        "dimensions": tokens.vectors.shape[1],
        "silhouette": float(silhouette_score(tokens.vectors, y)),
        "probe": accuracy,
        "chance": float(max(y[test].mean(), 1 - y[test].mean())),
        "permuted_mean": float(np.mean(permuted)),
        "permuted_max": float(np.max(permuted)),
        "p_value": (1 + sum(p >= accuracy for p in permuted)) / (1 + permutations),
        "permutations": permutations,
    }


def _probe(vectors: np.ndarray, train: np.ndarray, test: np.ndarray) -> Callable[[np.ndarray], float]:
    """Return a function from labels to the held-out accuracy of logistic regression on standardised principal
    components of the training half."""
    components = min(_COMPONENTS, vectors.shape[1], len(train) - 1)
    reduced = make_pipeline(StandardScaler(), PCA(components, random_state=0)).fit(vectors[train])
    known, unknown = reduced.transform(vectors[train]), reduced.transform(vectors[test])

    def score(labels: np.ndarray) -> float:
        if len(set(labels[train])) < 2:
            return float(max(np.mean(labels[test]), 1 - np.mean(labels[test])))
        return float(LogisticRegression(max_iter=1000).fit(known, labels[train]).score(unknown, labels[test]))

    return score


def plane(tokens: Tokens, seed: int = 0) -> np.ndarray:
    """Return (n, 2): t-SNE of the tokens, deterministic for a seed."""
    vectors, n = tokens.vectors, len(tokens.vectors)
    if vectors.shape[1] > _COMPONENTS:
        vectors = PCA(min(_COMPONENTS, n), random_state=seed).fit_transform(vectors)
    return TSNE(2, perplexity=min(30, (n - 1) / 3), init="pca", random_state=seed).fit_transform(vectors)


def latents_plot(spaces: Mapping[str, tuple[Tokens, np.ndarray, Mapping[str, Any]]], path: Path) -> Path:
    """Plot a panel per space, given (tokens, positions in the plane, separability)."""
    figure, panels = figure_of((4.2 * len(spaces), 4.4), 1, len(spaces))
    for panel, (space, (tokens, places, apart)) in zip(panels, spaces.items(), strict=True):
        for kind in (TEXT, SOFT):
            at = places[tokens.kinds == kind]
            panel.scatter(at[:, 0], at[:, 1], s=9, color=_COLORS[kind], alpha=0.6, linewidths=0, label=f"{kind} tokens")
        titled(panel, f"{space}: silhouette {apart['silhouette']:.2f}, probe {100 * apart['probe']:.1f} %")
        panel.set_xticks([])
        panel.set_yticks([])
        panel.spines[:].set_color(GRID)
    panels[0].legend(frameon=False, fontsize=8, labelcolor=MUTED)
    return save_figure(figure, path)
