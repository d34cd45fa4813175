"""Decoding of the Hugging Face backend: emissions are sampled with a KV cache, memory tokens are read in a second pass.

Three optimisations leave the output unchanged (`configs.models.Speed`):
drafts       guessed next tokens are read together with the last token: the tokens behind the previous occurrence of
             the last n-gram in prompt and emission. A guess is accepted if the model chooses the same token, so greedy
             emissions stay the same. So do sampled ones of a row with its own generator, which draws once per token.
             Rejected guesses are hidden by mask and position, or cropped.
prefixes     the KV cache of prompt prefixes is reused from step to step (`lm.prefixes`).
second_pass  memory tokens are read only where the executor reads the soft tokens.

Rows that share a generator skip these optimisations: their draws depend on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from compiler.base import Draft, Generators
from compiler.records import Decoding, StillWanted
from configs.models import Speed
from lm.backbone import Backbone
from lm.prefixes import PrefixCache, read_prompts
from lm.prompt import Prompt
from soft_mem.projector import Gaussian, Projector

MAX_NGRAM = 3  # tokens that a guess matches at first; it falls back to fewer


class DecodableCompiler(Protocol):
    """The part of a compiler that a decoder uses."""

    backbone: Backbone
    projector: Projector
    decoding: Decoding
    speed: Speed

    @property
    def n_tokens(self) -> int: ...
    def logprobs(self, logits: Tensor) -> Tensor: ...
    def score(self, prompts: Sequence[Prompt], emissions: Sequence[Sequence[int]]) -> Any: ...
    def current_prefixes(self) -> PrefixCache: ...


class Decoder:
    """Samples a batch of emissions, then reads the memory tokens over the same cache: each prompt is read once.

    A finished row stays in the batch as padding, which is masked and takes no position.

    Args:
        memories: key of the task memory that each prompt begins with.
        by: generator of the batch, or one per row.
        makes_soft: `makes_soft(i, ids, truncated)` returns whether row i needs soft tokens beside this emission
            (`TokenCompiler.makes_soft`).
    """

    def __init__(
        self,
        compiler: DecodableCompiler,
        prompts: Sequence[Prompt],
        memories: Sequence[Hashable],
        by: Generators,
        makes_soft: Callable[[int, Sequence[int], bool], bool],
    ) -> None:
        self.compiler, self.backbone, self.prompts, self.by = compiler, compiler.backbone, prompts, by
        self.makes_soft = makes_soft
        independent = compiler.decoding.temperature == 0 or not isinstance(by, torch.Generator)
        able = independent and self.backbone.attends_fully
        self.drafted = compiler.speed.drafts * able
        self.passes: list[Tensor] = []  # log-probabilities (b, K) of the chosen tokens, by pass
        prefixes = compiler.current_prefixes() if able and compiler.speed.prefix_mib else PrefixCache(0)
        self.reading = read_prompts(self.backbone, prompts, prefixes, memories)
        self.cached = self.reading.cached if prefixes.budget else None

    def run(self, wanted: StillWanted) -> tuple[list[Draft], Gaussian]:
        """Decode until every row has finished or been cancelled; cancelled rows count as truncated."""
        rows = [_Row(i, list(prompt.ids), len(prompt.ids)) for i, prompt in enumerate(self.prompts)]
        guesses, hidden = [list[int]()] * len(rows), self.reading.hidden
        while True:
            self._choose(hidden, rows, guesses)
            for row in rows:
                row.going = row.going and wanted(row.index)
            if not any(row.going for row in rows):
                break
            guesses = [self._guess(row) for row in rows]
            hidden = self._read(rows, guesses)
        drafts = self._drafts(rows)
        needed = [i for i, draft in enumerate(drafts) if self.makes_soft(i, draft.ids, draft.truncated)]
        soft = hidden.new_zeros(len(rows), self.compiler.n_tokens, hidden.shape[-1])
        if needed and not self.backbone.attends_fully:  # its recurrent states hold padding too: read everything again
            again = [(self.prompts[i], drafts[i].ids) for i in needed]
            soft[needed] = self.compiler.score(*zip(*again, strict=True)).h_soft
        elif needed:
            soft = self._read_memory(rows)
        return drafts, self.compiler.projector(soft)

    # -- a pass -------------------------------------------------------------------------------------------------------

    def _guess(self, row: _Row) -> list[int]:
        """Guess the next tokens, up to the first reserved one and within the emission's limit."""
        most = min(self.drafted, self.compiler.decoding.max_new_tokens - row.length - 1)
        return _until(row.follows(most), self.backbone.suppressed) if row.going and most > 0 else []

    def _read(self, rows: Sequence[_Row], guesses: Sequence[Sequence[int]]) -> Tensor:
        """Read every row's last token and its guessed tokens: hidden states (b, K, d)."""
        lines = [[row.ids[-1], *guess] if row.going else [] for row, guess in zip(rows, guesses, strict=True)]
        return self.reading.feed_lines(lines)

    def _choose(self, hidden: Tensor, rows: Sequence[_Row], guesses: Sequence[Sequence[int]]) -> None:
        """Choose the token after each column (b, K, d), never a reserved one. Append the tokens up to the first
        rejected guess, and drop the rejected ones from mask, positions and cache."""
        logprobs = self.compiler.logprobs(self.backbone.logits(hidden))
        tokens = self._sample(logprobs, rows, guesses)
        self.passes.append(logprobs.gather(-1, tokens[..., None]).squeeze(-1))
        chosen, end, limit = tokens.tolist(), self.backbone.end_id, self.compiler.decoding.max_new_tokens
        accepted = []
        for place, (row, guess) in enumerate(zip(rows, guesses, strict=True)):
            right = 0
            while right < len(guess) and chosen[place][right] == guess[right] != end:
                right += 1
            accepted.append(1 + right)
            if row.going:
                row.take(chosen[place][: 1 + right], (len(self.passes) - 1, place))
                row.going = row.ids[-1] != end and row.length < limit
        if len(self.passes) > 1:  # the first pass reads the prompts' last column only
            self.reading.drop(hidden.shape[1], accepted)

    def _sample(self, logprobs: Tensor, rows: Sequence[_Row], guesses: Sequence[Sequence[int]]) -> Tensor:
        """Draw tokens (b, K) of these log-probabilities (b, K, V).

        A row's own generator draws nothing for a finished row or behind a rejected guess, so that neither other rows
        nor guesses change its next draw.
        """
        if self.compiler.decoding.temperature == 0:
            return logprobs.argmax(-1)
        if isinstance(self.by, torch.Generator):
            return torch.multinomial(logprobs[:, 0].exp(), 1, generator=self.by)
        tokens = torch.full(logprobs.shape[:2], self.backbone.end_id, dtype=torch.long, device=logprobs.device)
        for place, (row, guess) in enumerate(zip(rows, guesses, strict=True)):
            for k in range(1 + len(guess) if row.going else 0):
                tokens[place, k] = torch.multinomial(logprobs[place, k].exp(), 1, generator=self.by[row.index])
                if k < len(guess) and int(tokens[place, k]) != guess[k]:
                    break
        return tokens

    def _read_memory(self, rows: Sequence[_Row]) -> Tensor:
        """Read the end of turn (forced in truncated rows) and the memory tokens: hidden states (b, N, d) of these."""
        n, end = self.compiler.n_tokens, self.backbone.end_id
        tail = torch.full((len(rows), 2 + n), self.backbone.memory_id)
        tail[:, :2] = torch.tensor([[row.ids[-1], end] for row in rows])
        real = torch.ones_like(tail, dtype=torch.bool)
        real[:, 0] = tail[:, 0] != end  # a row that wrote its end of turn needs no second one
        return self.reading.feed(tail, real)[:, -n:]

    def _drafts(self, rows: Sequence[_Row]) -> list[Draft]:
        """Collect the emissions with their log-probabilities, which leave the device here, in one copy."""
        logprobs = [values.float() for values in self.passes]
        starts = [0, *torch.tensor([values.numel() for values in logprobs]).cumsum(0).tolist()]
        flat = torch.cat([values.flatten() for values in logprobs]).cpu()
        drafts = []
        for row in rows:
            ids, end = tuple(row.ids[row.start :]), self.backbone.end_id
            truncated = ids[-1] != end
            places = [starts[k] + at * logprobs[k].shape[1] + j for k, at, n in row.places for j in range(n)]
            cached = self.cached[row.index] if self.cached else None
            drafts.append(Draft((*ids, end) if truncated else ids, flat[places], truncated, cached))
        return drafts


@dataclass(slots=True)
class _Row:
    """A row of the batch while it is written."""

    index: int  # of its request
    ids: list[int]  # prompt and emission
    start: int  # of the emission
    places: list[tuple[int, int, int]] = field(default_factory=list)  # of its log-probabilities: pass, row, count
    going: bool = True
    _ends: dict[tuple[int, ...], int] = field(default_factory=dict)  # last end of each n-gram before the last token
    _indexed: int = 0  # tokens whose n-grams `_ends` holds

    @property
    def length(self) -> int:
        """Return the tokens of the emission so far."""
        return len(self.ids) - self.start

    def take(self, ids: Sequence[int], place: tuple[int, int]) -> None:
        """Append tokens, with the place of their log-probabilities."""
        self.ids += ids
        self.places.append((*place, len(ids)))

    def follows(self, most: int) -> list[int]:
        """Return the `most` tokens after the last earlier occurrence of the final n-gram, the longest that has one.
        Tokens that run into the end repeat from the occurrence."""
        for end in range(self._indexed + 1, len(self.ids)):
            for size in range(1, MAX_NGRAM + 1):
                self._ends[tuple(self.ids[max(0, end - size) : end])] = end
        self._indexed = len(self.ids) - 1
        ends = (self._ends.get(tuple(self.ids[-size:])) for size in range(MAX_NGRAM, 0, -1))
        end = next((end for end in ends if end is not None), len(self.ids))
        return (self.ids[end : end + most] * most)[:most]


def _until(guess: list[int], banned: Sequence[int]) -> list[int]:
    """Cut a guess before the first banned token."""
    return next((guess[:i] for i, id in enumerate(guess) if id in banned), guess)
