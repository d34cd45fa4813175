"""Metrics of a GRPO update: means over the tokens, steps and episodes of all ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from runtime.errors import is_failure
from training import distributed
from training.losses import ImportanceWeights, PolicyTokens, Surrogate, kl_estimate
from training.rollout import Group

MISMATCH_WARNING = 0.05  # mean |difference| of log p between rollout engine and trainer: ratios are 5 % off


@dataclass(frozen=True, slots=True)
class Scores:
    """A forward pass on B samples; only `logprobs` has a gradient. L: N soft tokens, or 1 action."""

    logprobs: Tensor  # (B, T + L), 0 where there is no token
    mask: Tensor  # (B, T + L)
    text_entropy: Tensor  # (B, T)
    latent_entropy: Tensor  # (B,), nats per dimension
    sigma: Tensor  # (B,), mean
    mu: Tensor  # (B,), mean |mu|


@dataclass(slots=True)
class Totals:
    """Sums and maxima over the tokens of all micro-batches, for `token_means`: fp64 scalars on the device."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    peaks: dict[str, Tensor] = field(default_factory=dict)

    def add(self, other: Totals) -> None:
        for mine, theirs, join in ((self.sums, other.sums, torch.add), (self.peaks, other.peaks, torch.maximum)):
            for name, value in theirs.items():
                mine[name] = join(mine[name], value) if name in mine else value

    def read(self) -> tuple[dict[str, float], dict[str, float]]:
        """Copy sums and peaks to the host in one transfer."""
        values = [*self.sums.values(), *self.peaks.values()]
        read = [float(value) for value in torch.stack(values).cpu()] if values else []
        return dict(zip(self.sums, read, strict=False)), dict(zip(self.peaks, read[len(self.sums) :], strict=True))


def token_totals(
    scores: Scores, tokens: PolicyTokens, surrogate: Surrogate, importance: ImportanceWeights | None, n: int
) -> Totals:
    """Sum over the tokens of a micro-batch; the last `n` columns are latent tokens."""
    text, latent = scores.mask[:, :-n], scores.mask[:, -n:]
    kl = kl_estimate(tokens.rollout, tokens.old)
    # Difference of log p between trainer, before the update, and the engine that sampled.
    apart = (tokens.old - tokens.rollout).abs()
    sums = {
        "text_tokens": text.sum(),
        "latent_tokens": latent.sum(),
        "rows": torch.ones_like(scores.sigma).sum(),
        "loss": (surrogate.loss.detach() * tokens.weights * scores.mask).sum(),
        "entropy_text": scores.text_entropy.sum(),
        "entropy_latent": scores.latent_entropy.sum(),
        "sigma": scores.sigma.sum(),
        "mu_abs": scores.mu.sum(),
    }
    peaks: dict[str, Tensor] = {}
    for name, mask, columns in (("text", text, slice(None, -n)), ("latent", latent, slice(-n, None))):
        distances = apart[:, columns].masked_fill(~mask, 0.0)
        sums[f"apart_{name}"] = distances.sum()
        peaks[f"apart_{name}_max"] = _peak(distances)
        if importance is not None:
            ratios = importance.ratio[:, columns].masked_fill(~mask, 0.0)
            peaks[f"importance_{name}_max"] = _peak(ratios)
            sums[f"importance_{name}"] = ratios.sum()
            sums[f"importance_capped_{name}"] = (importance.exceeds[:, columns] & mask).sum()
        sums[f"clip_low_{name}"] = (surrogate.clipped_low[:, columns] & mask).sum()
        sums[f"clip_high_{name}"] = (surrogate.clipped_high[:, columns] & mask).sum()
        sums[f"ratio_{name}"] = (surrogate.ratio[:, columns] * mask).sum()
        sums[f"mismatch_kl_{name}"] = (kl[:, columns] * mask).sum()
    return Totals({name: value.detach().double() for name, value in sums.items()}, peaks)


def _peak(values: Tensor) -> Tensor:
    """Return the largest of non-negative values, or 0 without any."""
    return (values.max() if values.numel() else values.new_zeros(())).double()


def token_means(totals: Totals) -> dict[str, float]:
    """Compute means and maxima over all ranks. Every rank must call it.

    With importance weights, `importance` is the mean ratio of probabilities before the cap, and `importance_capped` the
    share of tokens whose ratio exceeds it."""
    sums, mine = totals.read()
    total, peaks = distributed.total(sums), distributed.gather(mine)
    text, latent, rows = (max(1.0, total[name]) for name in ("text_tokens", "latent_tokens", "rows"))
    means = {name: total[name] / rows for name in ("entropy_latent", "sigma", "mu_abs")}
    means |= {"loss": total["loss"], "entropy_text": total["entropy_text"] / text, "text_tokens": text / rows}
    for name in dict.fromkeys(name for share in peaks for name in share):
        means[name] = max(share.get(name, 0.0) for share in peaks)
    weighted = ("importance", "importance_capped") if "importance_text" in total else ()
    for what in ("clip_low", "clip_high", "ratio", "mismatch_kl", "apart", *weighted):
        means[f"{what}_text"] = total[f"{what}_text"] / text
        means[f"{what}_latent"] = total[f"{what}_latent"] / latent
        means[what] = (total[f"{what}_text"] + total[f"{what}_latent"]) / (text + latent)
    return means


def rollout_means(groups: Sequence[Group], environments: Sequence[str] = ()) -> dict[str, float]:
    """Compute means over the update's episodes of all ranks: success, failures, emissions, seconds. A group split over
    ranks counts once. Every rank must call it.

    Args:
        environments: names of several environments, for the success in each.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    valid = [episode for group in groups for episode in group.valid]
    steps = [step for episode in valid for step in episode.steps]
    kinds = Counter(step.emission_kind.lower() for step in steps)
    own = [group for group in groups if group.is_first]
    variances = [torch.tensor(g.all_rewards).var(correction=0).item() if g.all_rewards else 0.0 for g in own]
    local = {
        "episodes": len(episodes),
        "counted": len(valid),
        "groups": len(own),
        "steps": len(steps),
        "reward": sum(sum(group.rewards) for group in groups),
        "success": sum(e.success for e in valid),
        "emission_tokens": sum(len(step.emission_ids) for step in steps),
        "group_variance": sum(variances),
        "zero_variance_fraction": sum(not group.has_variance for group in own),
        "failures": sum(is_failure(e.stop_reason) for e in episodes),
        "parse_error_rate": sum(step.parse_error is not None for step in steps),
        "op_error_rate": sum(bool(step.op_errors) for step in steps),
        **{f"emission_{name}": kinds[name] for name in ("experience", "brief", "hybrid", "noaction")},
        **{
            f"seconds_{short}": sum(s.seconds.get(name, 0.0) for e in episodes for s in e.steps)
            for short, name in (("env", "environment"), ("compiler", "compiler"), ("executor", "executor"))
        },
    }
    for name in environments:
        mine = [episode.success for episode in valid if episode.environment == name]
        local |= {f"success_{name}": sum(mine), f"counted_{name}": len(mine)}
    total = distributed.total({name: float(value) for name, value in local.items()})
    per = {"reward": "counted", "success": "counted", "group_variance": "groups", "zero_variance_fraction": "groups"}
    per |= {f"success_{name}": f"counted_{name}" for name in environments}
    per |= {name: "steps" for name in total if name.endswith("_rate") or name.startswith("emission_")}
    means = {name: value / max(1.0, total[per[name]]) if name in per else value for name, value in total.items()}
    means["episode_steps"] = total["steps"] / max(1.0, total["counted"])
    if torch.cuda.is_available():
        means["gpu_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    hidden = {"counted", "groups", *(f"counted_{name}" for name in environments)}
    return {name: value for name, value in means.items() if name not in hidden}


def rollout_rows(update: int, groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return a row of rollouts.jsonl for every episode."""
    return [
        {
            "update": update,
            **({"environment": episode.environment} if episode.environment else {}),
            "task": episode.task_id,
            "family": episode.family,
            "success": episode.success,
            "steps": len(episode.steps),
            "stop_reason": str(episode.stop_reason),
            "error": episode.error,
        }
        for group in groups
        for episode in group.episodes
    ]


def mismatch_lines(metrics: Mapping[str, float], is_first: bool) -> list[str]:
    """Describe the difference of log p between rollout engine and trainer: in the first update with samples, and as a
    warning above `MISMATCH_WARNING`."""
    if "apart" not in metrics:
        return []
    tokens = {name: metrics[f"apart_{name}"] for name in ("text", "latent")}
    apart = ", ".join(f"{n} {v:.2g} (at most {metrics[f'apart_{n}_max']:.2g})" for n, v in tokens.items())
    lines = [f"  engine and trainer: log p of a sampled token differs by {apart} on average"] if is_first else []
    limit = math.inf if metrics["staleness"] else MISMATCH_WARNING  # older weights differ by design
    if not all(value <= limit for value in tokens.values()):  # also true for NaN
        lines.append(
            f"  warning: update {metrics['update']:.0f}: rollout engine and trainer are {apart} nats of log p apart, "
            f"more than {MISMATCH_WARNING}: are precision, truncation and weights of the two the same?"
        )
    return lines


def progress_line(metrics: Mapping[str, float]) -> str:
    """Format an update's metrics for the terminal."""
    clipped = metrics.get("clip_low", 0.0) + metrics.get("clip_high", 0.0)
    success = f"  held-out success {metrics['eval_success']:.2f}" if "eval_success" in metrics else ""
    return (
        f"reward {metrics['reward']:.2f}  flat groups {metrics['zero_variance_fraction']:.2f}  clipped {clipped:.3f}  "
        f"entropy {metrics.get('entropy_text', 0.0):.2f}  sigma {metrics.get('sigma', 0.0):.3f}  "
        f"{metrics['seconds_rollout']:.1f} + {metrics['seconds_update']:.1f} s{success}"
    )
