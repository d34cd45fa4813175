"""Attention of the executor to memory tokens by step (paper Figure 3), from the model's own queries and keys.

The logit of a head is its scaled q . k after rotary embedding, before mask and softmax; q is that of the prompt's last
token, which decides the action, and k those of the memory tokens. `recording_logits` replaces the attention function of
transformers by one that records the logits and calls the original.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Any

import torch
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from agent.deliveries import recorded_step
from agent.records import Episode, executor_request
from eval.intervals import bootstrap_mean
from eval.metrics import display_name, grouped
from eval.plots import ACCENT, CONTROL, INK, figure_of, quiet, save_figure, titled
from executor.hf import FrozenExecutor
from executor.prompt import memory_span
from lm.prompt import Prompt

CHANNELS = ("memory", "text", "soft")  # all memory tokens; text tokens; soft tokens
_COLORS = {"static": ACCENT, "compiled": "#d97a34"}  # as in the paper
_NAME = "memcompiler_recording_logits"


@dataclass(frozen=True, slots=True)
class Attention:
    """One step: mean logit over a channel's tokens, heads and layers, and its share of the softmax."""

    t: int
    logit: dict[str, float]  # by channel; channels without tokens are absent
    share: dict[str, float]
    tokens: int


# the model's logits ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def last_token_logits(executor: FrozenExecutor, prompt: Prompt) -> Tensor:
    """Return (layers, heads, T) fp32: attention logits of the prompt's last token over all T tokens of the prompt.
    Their softmax over T is the model's attention. Only what the executor's prefix cache does not hold is read.

    Raises:
        ValueError: unsupported attention (sliding windows, capped logits, a custom implementation).
    """
    model = executor.model
    with recording_logits(model) as layers:
        executor.read([prompt])
    expected = model.config.get_text_config().num_hidden_layers
    if len(layers) != expected:
        raise ValueError(
            f"{type(model).__name__} showed {len(layers)} of {expected} attention layers: Figure 3 needs a model whose "
            "attention goes through transformers' AttentionInterface"
        )
    return torch.stack(layers)


@contextmanager
def recording_logits(model: Any) -> Iterator[list[Tensor]]:
    """Collect the logits (heads, T) of the last query of every attention layer of the language model."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    layers: list[Tensor] = []

    def record(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any) -> Any:
        window = options.get("sliding_window")
        if (window and key.shape[2] > window) or options.get("softcap") or options.get("s_aux") is not None:
            raise ValueError("Figure 3 reads full attention; this executor has windows, capped logits or sinks")
        layers.append(_logits(query[0, :, -1], key[0], options.get("scaling")))
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)

    config = model.config.get_text_config()
    before = config._attn_implementation
    AttentionInterface.register(_NAME, record)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    config._attn_implementation = _NAME
    try:
        yield layers
    finally:
        config._attn_implementation = before


def _logits(query_HD: Tensor, key_KTD: Tensor, scaling: float | None) -> Tensor:
    """Return (H, T) logits; H query heads share K key heads (GQA), in order."""
    key = key_KTD.repeat_interleave(len(query_HD) // len(key_KTD), dim=0)
    scale = query_HD.shape[-1] ** -0.5 if scaling is None else scaling
    return torch.einsum("hd,htd->ht", query_HD.float(), key.float()) * scale


# prompt of a recorded step, and positions of memory in it -------------------------------------------------------------


def executor_prompt(executor: FrozenExecutor, episode: Episode, t: int, soft: Tensor | None) -> Prompt:
    """Rebuild the executor's prompt of step t from the record.

    Raises:
        ValueError: its tokens differ from the recorded ones.
    """
    prompt = executor.encode(executor_request(recorded_step(episode, t, soft=soft), executor))
    if prompt.ids != episode.steps[t].executor_prompt_ids:
        raise ValueError(
            f"{episode.task_id}, {episode.delivery}, step {t}: the executor's prompt is not the recorded one: "
            "another executor, other instructions or another layout"
        )
    return prompt


def memory_positions(executor: FrozenExecutor, episode: Episode, t: int) -> dict[str, list[int]]:
    """Return the positions of memory tokens in step t's prompt by channel: of M if it was pasted; if it was compiled,
    of guidance with reason and of the soft tokens. Channels without tokens are absent."""
    ids = episode.steps[t].executor_prompt_ids
    head, shown = memory_span(executor_request(recorded_step(episode, t), executor))
    words = _positions(executor, ids, head, shown) if shown else []
    soft = [i for i, token in enumerate(ids) if token == executor.placeholder]
    found = {"memory": sorted({*words, *soft}), "text": words, "soft": soft}
    return {channel: places for channel, places in found.items() if places}


def _positions(executor: FrozenExecutor, ids: Sequence[int], head: str, shown: str) -> list[int]:
    """Return the positions of tokens that overlap `shown`, which follows `head`. Raises: ValueError, if decoding and
    encoding do not reproduce the tokens."""
    text = executor.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    again = executor.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    start = text.rfind(head + shown)  # the last one: earlier turns may have had the same guidance
    if tuple(again["input_ids"]) != tuple(ids) or start < 0:
        raise ValueError("a prompt's memory cannot be found among its tokens: the tokenizer does not round-trip")
    begin, end = start + len(head), start + len(head) + len(shown)
    return [i for i, (a, b) in enumerate(again["offset_mapping"]) if a < end and b > begin]


def attention_at(executor: FrozenExecutor, episode: Episode, t: int, soft: Tensor | None) -> Attention | None:
    """Measure attention to memory at step t; None if its prompt holds no memory."""
    places = memory_positions(executor, episode, t)
    if not places:
        return None
    logits = last_token_logits(executor, executor_prompt(executor, episode, t, soft))
    weights = logits.softmax(-1)
    return Attention(
        t,
        {channel: logits[..., at].mean().item() for channel, at in places.items()},
        {channel: weights[..., at].sum(-1).mean().item() for channel, at in places.items()},
        len(places["memory"]),
    )


# over episodes --------------------------------------------------------------------------------------------------------


def curves(of_episodes: Sequence[Sequence[Attention]]) -> dict[str, Any]:
    """Average by step over the episodes with memory at that step, with 95 % bootstrap intervals.

    Episodes that end early leave the mean, which changes the curve even if no episode changes. `slope` avoids this: the
    mean over episodes of the episode's trend per step, for episodes with at least three steps with memory.

    Raises:
        ValueError: no step of any episode has memory.
    """
    if not any(of_episodes):
        raise ValueError("no step shows memory to the executor: set memory.k, or name other deliveries")
    return {
        "episodes": len(of_episodes),
        "steps_with_memory": sum(map(len, of_episodes)),
        "tokens": fmean(a.tokens for steps in of_episodes for a in steps),
        **{quantity: _quantity(of_episodes, quantity) for quantity in ("logit", "share")},
    }


def _quantity(of_episodes: Sequence[Sequence[Attention]], quantity: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for channel in CHANNELS:
        lines = [
            [(a.t, getattr(a, quantity)[channel]) for a in steps if channel in getattr(a, quantity)]
            for steps in of_episodes
        ]
        by_step = sorted(grouped(itertools.chain(*lines), lambda point: point[0]).items())
        if by_step:
            slopes = [linear_regression(*zip(*line, strict=True)).slope for line in lines if len(line) >= 3]
            found[channel] = {
                "by_step": [{"t": t, **asdict(bootstrap_mean([value for _, value in of_t]))} for t, of_t in by_step],
                "slope": asdict(bootstrap_mean(slopes)) if slopes else None,
            }
    return found


def attention_plot(by_delivery: Mapping[str, Mapping[str, Any]], path: Path) -> Path:
    """Plot logit and share of attention by step, a line per delivery with its 95 % band over episodes."""
    figure, panels = figure_of((8.6, 3.2), 1, 2)
    titles = {"logit": "mean pre-softmax logit of memory tokens", "share": "share of attention on memory tokens"}
    for panel, (quantity, title) in zip(panels, titles.items(), strict=True):
        for delivery, of_delivery in by_delivery.items():
            points = of_delivery[quantity]["memory"]["by_step"]
            t, low, mean, high = ([point[key] for point in points] for key in ("t", "low", "mean", "high"))
            color = _COLORS.get(delivery, CONTROL)
            panel.fill_between(t, low, high, color=color, alpha=0.2, linewidth=0)
            panel.plot(t, mean, color=color, linewidth=1.6, label=display_name(delivery))
        titled(panel, title)
        quiet(panel, grid="y")
        panel.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    panels[0].legend(frameon=False, fontsize=8, labelcolor=INK)
    return save_figure(figure, path, "step (band: 95 % over the episodes that reached the step)")
