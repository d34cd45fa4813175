"""Terms of SFT's loss on a batch (paper Eq. 6, 7, 9): one forward pass of the compiler, one of the frozen executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from compiler.hf import MemoryCompiler
from configs.training import SftConfig
from executor.hf import FrozenExecutor
from lm.device import to_device
from lm.prompt import Prompt
from lm.shared_prefixes import Sharing
from soft_mem.losses import gauss_nll, memory_targets, negative_entropy, orthogonality, soft_mse
from soft_mem.projector import Gaussian
from training.losses import token_nll
from training.sft_data import Example


def sft_losses(
    compiler: MemoryCompiler,
    executor: FrozenExecutor,
    examples: Sequence[Example],
    config: SftConfig,
    temperature: float = 1.0,
    sharing: Sharing = "never",
) -> dict[str, Tensor]:
    """Compute the terms of Eq. 9: `text` (B,), and the others (R,) for the R rows whose soft tokens the executor reads.
    `text` and `action` are sums over a row's tokens, the others means. A compiler without text has neither `text` nor
    `orth`.

    Args:
        temperature: of the soft tokens.
        sharing: whether the compiler's rows share prefixes.
    """
    scored = compiler.score([e.prompt for e in examples], [e.emission for e in examples], sharing)
    written = {}
    if compiler.writes_text:
        nll, _ = token_nll(scored.logits, scored.targets, scored.text_mask, config.label_smoothing)
        written = {"text": nll}
    if not config.soft:
        return written
    z = compiler.projector.draw(scored.gaussian, temperature)
    rows, read, weight = _rows_with_soft(examples, executor, z.shape[1])
    select = lambda tensor: tensor
    if len(rows) < len(examples):
        index = to_device(torch.tensor(rows), z.device)
        select = lambda tensor: tensor[index]
    gaussian, z = Gaussian(select(scored.gaussian.mu), select(scored.gaussian.log_sigma)), select(z)
    soft = compiler.projector.to_embeddings(z)
    prompts, actions = [e.executor_prompt for e in read], [e.action for e in read]
    action, _ = executor.action_nll(prompts, soft, actions, config.label_smoothing)
    losses = {
        "action": action.to(z.device),  # the executor may be on another device
        "entropy": negative_entropy(gaussian),
    }
    if compiler.writes_text:
        of_text = select(scored.h_text), select(scored.text_mask)
        losses["orth"] = orthogonality(select(scored.h_soft), *of_text)
    if compiler.projector.config.kind == "linear":
        del losses["entropy"]  # has no sigma
    if config.latent != "none":
        losses["latent"] = latent_loss(
            compiler, executor, examples=read, gaussian=gaussian, z=z, soft=soft, config=config
        )
    return {**written, **{name: weight * value for name, value in losses.items()}}


def _rows_with_soft(
    examples: Sequence[Example], executor: FrozenExecutor, n: int
) -> tuple[list[int], list[Example], float]:
    """Select the rows whose soft tokens are read, with the weight of their losses. If there are none, return one dummy
    row of weight 0, because ranks that share a model's slices need equally many forward passes."""
    rows = [i for i, example in enumerate(examples) if example.soft_read]
    if rows:
        return rows, [examples[i] for i in rows], 1.0
    dummy = Prompt((executor.placeholder,) * n, None)
    return [0], [replace(examples[0], executor_prompt=dummy)], 0.0


def latent_loss(
    compiler: MemoryCompiler,
    executor: FrozenExecutor,
    examples: Sequence[Example],
    gaussian: Gaussian,
    z: Tensor,
    soft: Tensor,
    config: SftConfig,
) -> Tensor:
    """Compute L_latent (Eq. 6), which aligns the soft tokens with the memory's content."""
    settings = compiler.projector.config
    if config.latent == "lm_head":  # the executor decodes the memory from the soft tokens
        prompts = [Prompt((executor.placeholder,) * settings.n_tokens, None)] * len(examples)
        nll, count = executor.action_nll(prompts, soft, [e.memory_ids for e in examples])
        return (nll / count.clamp(min=1)).to(z.device)
    memories = embedded_memories(executor, examples)
    target = torch.stack([memory_targets(m, settings.n_tokens, settings.emb_std) for m in memories]).to(z.device)
    if config.latent == "soft_mse" or settings.kind == "linear":
        return soft_mse(z, target)
    return gauss_nll(gaussian, target)


def embedded_memories(executor: FrozenExecutor, examples: Sequence[Example]) -> list[Tensor]:
    """Embed each row's memory (T, d) as the executor does: its pictures if the executor reads those, else its text."""
    # One call of the layer: its table may be in slices, and ranks hold unequal numbers of rows.
    ids = to_device(torch.tensor([i for e in examples for i in e.memory_ids]), executor.backbone.device)
    embedded = list(executor.backbone.embeddings(ids).split([len(e.memory_ids) for e in examples]))
    pictures = {i: e.memory_pictures for i, e in enumerate(examples) if e.memory_pictures is not None}
    if pictures:
        shown = executor.backbone.picture_embeddings(list(pictures.values()))
        for i, embedding in zip(pictures, shown, strict=True):
            embedded[i] = embedding
    return embedded
