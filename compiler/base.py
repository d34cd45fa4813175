"""Base class of compilers with a language model: prompts as token ids, and compilations from drafts.

A compiler that was trained with `text: false` (delivery `memgen`) writes no emission: its memory tokens follow the
prompt, and a compilation is its soft tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compiler.language import Emission, ParseError, ParseResult, parse
from compiler.prompt import Instructions, compiler_parts, instructions_of
from compiler.records import (
    Compilation,
    CompileRequest,
    Decoding,
    Entries,
    History,
    StillWanted,
    never_cancelled,
    soft_is_read,
)
from configs.models import Speed
from lm.prompt import Prompt, PromptEncoder, check_context
from soft_mem.projector import Gaussian, Projector

Generators = torch.Generator | Sequence[torch.Generator]  # one for the batch, or one per row


@dataclass(frozen=True, slots=True)
class Draft:
    """A sampled emission. `ids` ends with the end-of-turn token, which is forced if the emission was truncated; a
    compiler without text has no ids."""

    ids: tuple[int, ...]
    logprobs: Tensor  # (T,), without a forced end
    truncated: bool
    cached: int | None = None  # tokens of the prompt from a prefix cache


def no_text() -> Draft:
    """Return the draft of a compiler without text."""
    return Draft((), torch.zeros(0), truncated=False)


class TokenCompiler:
    """Encodes requests and converts drafts to compilations. Subclasses sample the drafts and their soft tokens."""

    takes_seeds = True
    encoder: PromptEncoder
    projector: Projector
    decoding: Decoding
    speed: Speed
    instructions: Instructions
    history: History  # past commands in the prompt (`compiler.prompt.compiler_parts`)
    entries: Entries  # what the prompt shows of raw trajectories
    generator: torch.Generator  # on the projector's device
    weight_version: int  # training increments it with every update; stored in every compilation
    context: int | None  # context length of the model in tokens; None if unknown
    writes_text: bool = True  # False: it makes soft tokens only

    @property
    def n_tokens(self) -> int:
        return self.projector.config.n_tokens

    @property
    def broken(self) -> str | None:
        """Return why it can never compile again; None while it can. Subclasses with an engine override it."""
        return None

    def encode(self, request: CompileRequest) -> Prompt:
        """Encode a request as token ids and pictures."""
        parts = compiler_parts(request, images=self.encoder.is_vlm, history=self.history, entries=self.entries)
        return self.encoder.encode(parts, instructions_of(self.instructions, request.environment))

    @torch.no_grad()
    def compile(
        self,
        requests: Sequence[CompileRequest],
        seeds: Sequence[int] | None = None,
        wanted: StillWanted = never_cancelled,
    ) -> list[Compilation]:
        """Return emission and soft tokens for each request, in order.

        Args:
            seeds: sample each request as if it were compiled alone by a generator with its seed.
            wanted: see `compiler.records.StillWanted`.

        Raises:
            ContextLengthError: a prompt leaves no room for its emission.
            ValueError: the engine cannot read a prompt, or cannot sample as `decoding` requires.
        """
        if not requests:
            return []
        prompts = [self.encode(request) for request in requests]
        # Room for emission, forced end of turn and memory tokens, and one token that vLLM generates behind them.
        room = self.decoding.max_new_tokens * self.writes_text + self.n_tokens + 2
        for prompt in prompts:
            check_context("compiler", len(prompt.ids), room, self.context)
        own = [torch.Generator(device=self.generator.device).manual_seed(seed) for seed in seeds or ()]
        by = own or self.generator
        drafts, gaussian = self._draft(requests, prompts, by, wanted)
        return self._compilations(requests, prompts, drafts=drafts, gaussian=gaussian, by=by)

    def _draft(
        self, requests: Sequence[CompileRequest], prompts: Sequence[Prompt], by: Generators, wanted: StillWanted
    ) -> tuple[list[Draft], Gaussian]:
        """Sample the emissions and the Gaussian of their soft tokens (B, N, d), which is undefined in rows for which
        `makes_soft` is False."""
        raise NotImplementedError

    def parsed(self, ids: Sequence[int], truncated: bool) -> tuple[str, ParseResult]:
        """Decode and parse an emission that ends with an end of turn, forced where truncated; without ids there is
        none."""
        if not ids:
            return "", ParseResult(Emission())
        text = self.encoder.tokenizer.decode(ids[:-1])
        return text, ParseResult(Emission(), ParseError.TRUNCATED) if truncated else parse(text)

    def makes_soft(self, request: CompileRequest, ids: Sequence[int], truncated: bool) -> bool:
        """Return whether soft tokens are computed beside an emission (arguments as for `parsed`)."""
        whole = self.speed.second_pass == "always" or request.soft_on == "always"
        return whole or soft_is_read(request.soft_on, self.parsed(ids, truncated)[1].emission)

    def _compilations(
        self,
        requests: Sequence[CompileRequest],
        prompts: Sequence[Prompt],
        drafts: Sequence[Draft],
        gaussian: Gaussian,
        by: Generators,
    ) -> list[Compilation]:
        """Parse the drafts and sample their soft tokens."""
        temperature = self.decoding.soft_temperature
        noise = _draw_noise(self.projector, gaussian, temperature, by)
        z = gaussian.at(noise, temperature)
        of_soft = {
            "z": z,
            "noise": noise,
            "mu": gaussian.mu,
            "log_sigma": gaussian.log_sigma,
            "soft": self.projector.to_embeddings(z),
            "latent_logprobs": gaussian.log_prob(z, temperature or 1.0),
        }
        # One copy from the device per batch. Rows are cloned, since a view would keep the whole batch in memory.
        rows = torch.cat([tensor.float().flatten(1) for tensor in of_soft.values()], 1).cpu()
        sizes = [tensor[0].numel() for tensor in of_soft.values()]
        compilations = []
        for i, (request, prompt, draft) in enumerate(zip(requests, prompts, drafts, strict=True)):
            text, parsed = self.parsed(draft.ids, draft.truncated)
            compilation = Compilation(
                text=text,
                emission=parsed.emission,
                parse_error=parsed.error,
                prompt_ids=prompt.ids,
                prompt=prompt if self.decoding.draws else None,
                emission_ids=draft.ids,
                text_logprobs=draft.logprobs,
                request=request,
                tokens_in=len(prompt.ids),
                tokens_out=len(draft.ids),
                tokens_cached=draft.cached,
                weight_version=self.weight_version,
            )
            if self.makes_soft(request, draft.ids, draft.truncated):
                for (name, tensor), part in zip(of_soft.items(), rows[i].split(sizes), strict=True):
                    setattr(compilation, name, part.view(tensor.shape[1:]).clone())
                compilation.noise = compilation.noise if temperature else None
                compilation.tokens_out += z.shape[1]
            compilations.append(compilation)
        return compilations


def _draw_noise(projector: Projector, gaussian: Gaussian, temperature: float, by: Generators) -> Tensor:
    """Sample the noise of the soft tokens (B, N, d)."""
    if isinstance(by, torch.Generator):
        return projector.noise(gaussian, temperature, by)
    rows = zip(gaussian.mu.split(1), gaussian.log_sigma.split(1), by, strict=True)
    return torch.cat([projector.noise(Gaussian(mu, s), temperature, own) for mu, s, own in rows])
