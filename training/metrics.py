"""What GRPO's metrics.jsonl says of an update: sums over tokens, steps and episodes, made means over all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from runtime.errors import is_failure
from training import distributed
from training.losses import PolicyTokens, Surrogate, kl_estimate
from training.rollout import Group


@dataclass(frozen=True, slots=True)
class Scores:
    """What a forward pass says of B samples; but for `logprobs` without gradient. L: N soft tokens, or 1 action."""

    logprobs: Tensor  # (B, T + L), 0 where there is no token
    mask: Tensor  # (B, T + L)
    text_entropy: Tensor  # (B, T)
    latent_entropy: Tensor  # (B,), nats per dimension
    sigma: Tensor  # (B,), mean
    mu: Tensor  # (B,), mean |mu|


@dataclass(slots=True)
class Totals:
    """What `token_means` divides when all micro-batches are through: sums over tokens, and the largest of some; scalars
    in fp64 that stay on the device until then."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    peaks: dict[str, Tensor] = field(default_factory=dict)

    def add(self, other: Totals) -> None:
        for mine, theirs, join in ((self.sums, other.sums, torch.add), (self.peaks, other.peaks, torch.maximum)):
            for name, value in theirs.items():
                mine[name] = join(mine[name], value) if name in mine else value

    def read(self) -> tuple[dict[str, float], dict[str, float]]:
        """Copy sums and peaks to the host, all at once."""
        values = [*self.sums.values(), *self.peaks.values()]
        read = [float(value) for value in torch.stack(values).cpu()] if values else []
        return dict(zip(self.sums, read, strict=False)), dict(zip(self.peaks, read[len(self.sums) :], strict=True))


def token_totals(scores: Scores, tokens: PolicyTokens, surrogate: Surrogate, n: int) -> Totals:
    """Sum over the tokens of some samples; `n` tokens of every sample follow the text."""
    text, latent = scores.mask[:, :-n], scores.mask[:, -n:]
    kl = kl_estimate(tokens.rollout, tokens.old)
    # What the weights, before they moved, make of a token's log p, against the engine that sampled it.
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
        peaks[f"apart_{name}_max"] = (distances.max() if distances.numel() else distances.new_zeros(())).double()
        sums[f"clip_low_{name}"] = (surrogate.clipped_low[:, columns] & mask).sum()
        sums[f"clip_high_{name}"] = (surrogate.clipped_high[:, columns] & mask).sum()
        sums[f"ratio_{name}"] = (surrogate.ratio[:, columns] * mask).sum()
        sums[f"mismatch_kl_{name}"] = (kl[:, columns] * mask).sum()
    return Totals({name: value.detach().double() for name, value in sums.items()}, peaks)


def token_means(local: Totals) -> dict[str, float]:
    """Divide the sums of all ranks by their counts, and find the largest of all; every rank has to call it."""
    sums, mine = local.read()
    total, peaks = distributed.total(sums), distributed.gather(mine)
    text, latent, rows = (max(1.0, total[name]) for name in ("text_tokens", "latent_tokens", "rows"))
    means = {name: total[name] / rows for name in ("entropy_latent", "sigma", "mu_abs")}
    means |= {"loss": total["loss"], "entropy_text": total["entropy_text"] / text, "text_tokens": text / rows}
    means |= {name: max(share.get(name, 0.0) for share in peaks) for name in ("apart_text_max", "apart_latent_max")}
    for what in ("clip_low", "clip_high", "ratio", "mismatch_kl", "apart"):
        means[f"{what}_text"] = total[f"{what}_text"] / text
        means[f"{what}_latent"] = total[f"{what}_latent"] / latent
        means[what] = (total[f"{what}_text"] + total[f"{what}_latent"]) / (text + latent)
    return means


def rollout_means(groups: Sequence[Group]) -> dict[str, float]:
    """Describe the update's episodes, those of all ranks: success, what failed, where time went.

    A group whose episodes several ranks played counts once. Every rank has to call it.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    counted = [episode for group in groups for episode in group.counted]
    steps = [step for episode in counted for step in episode.steps]
    kinds = Counter(step.emission_kind.lower() for step in steps)
    led = [group for group in groups if group.leads]
    spread = [torch.tensor(g.all_rewards).var(correction=0).item() if g.all_rewards else 0.0 for g in led]
    local = {
        "episodes": len(episodes),
        "counted": len(counted),
        "groups": len(led),
        "steps": len(steps),
        "reward": sum(sum(group.rewards) for group in groups),
        "success": sum(e.success for e in counted),
        "emission_tokens": sum(len(step.emission_ids) for step in steps),
        "group_variance": sum(spread),
        "zero_variance_fraction": sum(not group.informative for group in led),
        "failures": sum(is_failure(e.stop_reason) for e in episodes),
        "parse_error_rate": sum(step.parse_error is not None for step in steps),
        "op_error_rate": sum(bool(step.op_errors) for step in steps),
        **{f"emission_{name}": kinds[name] for name in ("experience", "brief", "hybrid", "noaction")},
        **{
            f"seconds_{short}": sum(s.seconds.get(name, 0.0) for e in episodes for s in e.steps)
            for short, name in (("env", "environment"), ("compiler", "compiler"), ("executor", "executor"))
        },
    }
    total = distributed.total({name: float(value) for name, value in local.items()})
    per = {"reward": "counted", "success": "counted", "group_variance": "groups", "zero_variance_fraction": "groups"}
    per |= {name: "steps" for name in total if name.endswith("_rate") or name.startswith("emission_")}
    means = {name: value / max(1.0, total[per[name]]) if name in per else value for name, value in total.items()}
    means["episode_steps"] = total["steps"] / max(1.0, total["counted"])
    if torch.cuda.is_available():
        means["gpu_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return {name: value for name, value in means.items() if name not in ("counted", "groups")}
