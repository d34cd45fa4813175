"""From what a backend sampled to the compilations that it owes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compiler.language import Emission, ParseError, ParseResult, parse
from compiler.records import Compilation, CompileRequest, Decoding
from lm.prompt import Prompt, PromptEncoder, check_context
from soft_mem.projector import Gaussian, Projector


@dataclass(frozen=True, slots=True)
class Draft:
    """What was sampled, (T,) log-probabilities; `ids` ends with the end-of-turn token, forced where truncated."""

    ids: tuple[int, ...]
    logprobs: Tensor
    truncated: bool


Generators = torch.Generator | Sequence[torch.Generator]  # of a whole batch, or of each row


def generators(seeds: Sequence[int], device: torch.device) -> list[torch.Generator]:
    """Make a generator for each row."""
    return [torch.Generator(device=device).manual_seed(seed) for seed in seeds]


def draw_noise(projector: Projector, gaussian: Gaussian, temperature: float, by: Generators) -> Tensor:
    """Draw the soft tokens' noise (B, N, d)."""
    if isinstance(by, torch.Generator):
        return projector.noise(gaussian, temperature, by)
    rows = zip(gaussian.mu.split(1), gaussian.log_sigma.split(1), by, strict=True)
    return torch.cat([projector.noise(Gaussian(mu, s), temperature, own) for mu, s, own in rows])


def check_room(prompts: Sequence[Prompt], decoding: Decoding, n_tokens: int, context: int | None) -> None:
    """Refuse prompts without room for emission, forced end of turn and memory tokens, and for one token more, which
    vLLM has to be asked for behind them.

    Raises:
        ContextLengthError: one has none.
    """
    for prompt in prompts:
        check_context("compiler", len(prompt.ids), decoding.max_new_tokens + n_tokens + 2, context)


def compilations(
    requests: Sequence[CompileRequest], prompts: Sequence[Prompt], drafts: Sequence[Draft], gaussian: Gaussian,
    noise: Tensor, decoding: Decoding, encoder: PromptEncoder, projector: Projector, weight_version: int,
) -> list[Compilation]:  # fmt: skip
    """Parse the drafts and make their soft tokens, from `gaussian` and `noise` (B, N, d) in the drafts' order."""
    temperature = decoding.soft_temperature
    z = gaussian.at(noise, temperature)
    latent, soft = gaussian.log_prob(z, temperature or 1.0), projector.to_embeddings(z)
    made = []
    for i, (request, prompt, draft) in enumerate(zip(requests, prompts, drafts, strict=True)):
        text = encoder.tokenizer.decode(draft.ids[:-1])
        parsed = ParseResult(Emission(), ParseError.TRUNCATED) if draft.truncated else parse(text)
        compilation = Compilation(
            text=text, emission=parsed.emission, parse_error=parsed.error, prompt_ids=prompt.ids,
            prompt=prompt if decoding.draws else None, emission_ids=draft.ids, text_logprobs=draft.logprobs,
            z=z[i].float().cpu(), noise=noise[i].float().cpu() if temperature else None,
            mu=gaussian.mu[i].float().cpu(), log_sigma=gaussian.log_sigma[i].float().cpu(),
            soft=soft[i].float().cpu(), latent_logprobs=latent[i].cpu(), request=request,
            tokens_in=len(prompt.ids), tokens_out=len(draft.ids) + z.shape[1],
            weight_version=weight_version,
        )  # fmt: skip
        made.append(compilation)
    return made
