"""How the Hugging Face backend writes: emissions by sampling with a cache, soft tokens by a second pass over the same.

What saves time leaves the output as it is (`configs.models.Speed`):
drafts    the next tokens are guessed, as those that followed the last ones where these stood before in prompt and
          emission, and read together with the last token. A guess counts where it is the token that the model chooses
          there itself, so greedy emissions are the same, and so are those that a row's own generator draws: it draws
          once for every token, in their order. A guess that is wrong is hidden by mask and position, or cropped.
shrink    rows that have ended leave the batch, their memory tokens read, once they are half of it.
prefixes  what prompts begin with is kept from step to step (`compiler.prefixes`).
second_pass  memory tokens are read where somebody reads the soft tokens that are made of them.

Rows that draw from one generator in common do without: what they draw depends on who draws beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import DynamicCache

from compiler.base import Draft, Generators
from compiler.prefixes import Prefixes, read
from compiler.records import Decoding, Wanted
from configs.models import Speed
from lm.backbone import Backbone, Batch
from lm.device import to_device
from lm.prompt import Prompt
from soft_mem.projector import Gaussian, Projector

LONGEST = 3  # tokens that a guess looks up at once; it falls back on fewer
SMALLEST = 4  # a smaller batch does not shrink: memory tokens that are read apart cost what that saves


class Writer(Protocol):
    """What a decoder asks of the compiler whose emissions it writes."""

    backbone: Backbone
    projector: Projector
    decoding: Decoding
    speed: Speed

    @property
    def n_tokens(self) -> int: ...
    def logprobs(self, logits: Tensor) -> Tensor: ...
    def score(self, prompts: Sequence[Prompt], emissions: Sequence[Sequence[int]]) -> Any: ...
    def kept_prefixes(self) -> Prefixes: ...


class Decoder:
    """Batched sampling with a cache, then the memory tokens over the same cache: the prompt is read once.

    A row that has ended goes on as padding that nothing attends to and that takes up no position. `memories` says which
    task memory each prompt begins with; `makes_soft(i, ids, truncated)`, whether row i needs soft tokens, its emission
    being what it is (`TokenCompiler.makes_soft`).
    """

    def __init__(
        self,
        compiler: Writer,
        prompts: Sequence[Prompt],
        memories: Sequence[Hashable],
        by: Generators,
        makes_soft: Callable[[int, Sequence[int], bool], bool],
    ) -> None:
        self.compiler, self.backbone, self.prompts, self.by = compiler, compiler.backbone, prompts, by
        self.makes_soft = makes_soft
        alike = compiler.decoding.temperature == 0 or not isinstance(by, torch.Generator)
        able = alike and self.backbone.attends_fully
        self.drafted, self.shrinks = compiler.speed.drafts * able, compiler.speed.shrink and able
        self.passes: list[Tensor] = []  # log-probabilities (b, K) of what was chosen, by pass
        prefixes = compiler.kept_prefixes() if able and compiler.speed.prefix_mib else Prefixes(0)
        reading = read(self.backbone, prompts, memories, prefixes)
        self.cache, self.mask, self.position = reading.cache, reading.mask, reading.position
        self.padded = reading.padded  # whether the mask may hide anything
        self.hidden, self.cached = reading.hidden, reading.cached if prefixes.budget else None

    def run(self, wanted: Wanted) -> tuple[list[Draft], Gaussian]:
        """Decode until every row has ended, or nobody waits for those that have not: they count as truncated."""
        rows = [_Row(i, _text(prompt.ids)) for i, prompt in enumerate(self.prompts)]
        soft: dict[int, Tensor] = {}  # hidden states (N, d) at the memory tokens, by row
        batch, guesses = rows, [""] * len(rows)  # those in the cache, in its order
        hidden = self.hidden
        while True:
            self._choose(hidden, batch, guesses)
            for row in batch:
                row.going = row.going and wanted(row.index)
            going = [row for row in batch if row.going]
            if not going:
                break
            if self.shrinks and SMALLEST <= len(batch) >= 2 * len(going):
                batch = self._part(batch, soft)
            guesses = [self._guess(row) for row in batch]
            hidden = self._read(batch, guesses)
        drafts = self._drafts(rows)
        places = [place for place, row in enumerate(batch) if self._needs_soft(row)]
        if places and not self.backbone.attends_fully:  # rows that ended went on in its states: all is read once more
            again = [(self.prompts[i], drafts[i].ids) for i in places]
            soft = dict(zip(places, self.compiler.score(*zip(*again, strict=True)).h_soft, strict=True))
        elif places:
            few = self.shrinks and SMALLEST <= len(batch) >= 2 * len(places)
            soft |= self._read_memory_of(batch, places) if few else self._read_memory(batch)
        nothing = hidden.new_zeros(self.compiler.n_tokens, hidden.shape[-1])
        return drafts, self.compiler.projector(torch.stack([soft.get(i, nothing) for i in range(len(rows))]))

    # -- a pass -------------------------------------------------------------------------------------------------------

    def _guess(self, row: _Row) -> str:
        """Guess tokens that may follow; none that an emission cannot hold, and none beyond its limit."""
        most = min(self.drafted, self.compiler.decoding.max_new_tokens - row.length - 1)
        return _until(row.follows(most), self.backbone.suppressed) if row.going and most > 0 else ""

    def _read(self, batch: Sequence[_Row], guesses: Sequence[str]) -> Tensor:
        """Read every row's last token and what is guessed to follow it: hidden states (b, K, d)."""
        width = 1 + max(map(len, guesses))
        pad = chr(self.backbone.pad_id)
        lines = [(row.text[-1] + guess if row.going else "") for row, guess in zip(batch, guesses, strict=True)]
        tokens = torch.tensor([[ord(c) for c in line.ljust(width, pad)] for line in lines])
        real = torch.arange(width) < torch.tensor([len(line) for line in lines])[:, None]
        return self._feed(tokens, real)

    def _choose(self, hidden: Tensor, batch: Sequence[_Row], guesses: Sequence[str]) -> None:
        """Choose the tokens that follow each column (b, K, d), never a reserved one, and take over those whose guesses
        before them were right. What was guessed wrong goes out of mask, positions and cache."""
        logprobs = self.compiler.logprobs(self.backbone.logits(hidden))
        tokens = self._sample(logprobs, batch, guesses)
        self.passes.append(logprobs.gather(-1, tokens[..., None]).squeeze(-1))
        chosen = tokens.tolist()
        first = len(self.passes) == 1  # of the columns read, the prompt's last
        kept = []
        for place, (row, guess) in enumerate(zip(batch, guesses, strict=True)):
            right = 0
            while right < len(guess) and chosen[place][right] == ord(guess[right]) != self.backbone.end_id:
                right += 1
            kept.append(1 + right)
            if row.going:
                row.take(chosen[place][: 1 + right], (len(self.passes) - 1, place))
                limit = self.compiler.decoding.max_new_tokens
                row.going = row.text[-1] != chr(self.backbone.end_id) and row.length < limit
        if not first:
            self._drop(hidden.shape[1], kept)

    def _sample(self, logprobs: Tensor, batch: Sequence[_Row], guesses: Sequence[str]) -> Tensor:
        """Draw tokens (b, K) of these log-probabilities (b, K, V).

        A row's own generator draws nothing for a row that has ended, nor behind a wrong guess, so that neither others
        nor guesses change what it draws next.
        """
        if self.compiler.decoding.temperature == 0:
            return logprobs.argmax(-1)
        if isinstance(self.by, torch.Generator):
            return torch.multinomial(logprobs[:, 0].exp(), 1, generator=self.by)
        tokens = torch.full(logprobs.shape[:2], self.backbone.end_id, dtype=torch.long, device=logprobs.device)
        for place, (row, guess) in enumerate(zip(batch, guesses, strict=True)):
            for k in range(1 + len(guess) if row.going else 0):
                tokens[place, k] = torch.multinomial(logprobs[place, k].exp(), 1, generator=self.by[row.index])
                if k < len(guess) and int(tokens[place, k]) != ord(guess[k]):
                    break
        return tokens

    def _feed(self, tokens: Tensor, real: Tensor) -> Tensor:
        """Read K more columns, given on the host: their hidden states (b, K, d)."""
        self.padded |= not bool(real.all())
        tokens, counts = to_device(torch.stack([tokens, real.long()]), self.mask.device)
        self.mask = torch.cat([self.mask, counts], 1)
        positions = self.position + counts.cumsum(1) - counts
        self.position = self.position + counts.sum(1, keepdim=True)
        return self.backbone.hidden(Batch(tokens, self.mask, positions, padded=self.padded), self.cache)

    def _drop(self, width: int, kept: Sequence[int]) -> None:
        """Keep so many of each row's last `width` columns, if it has them: those behind are hidden, or cropped where no
        row keeps one."""
        if min(kept) == width:
            return
        last = self.mask[:, -width:]
        stays = torch.arange(width, device=last.device) < to_device(torch.tensor(kept), last.device)[:, None]
        self.position = self.position - (last * ~stays).sum(1, keepdim=True)
        self.padded |= min(kept) < max(kept)
        extra = width - max(kept)
        self.mask = torch.cat([self.mask[:, :-width], (last * stays)[:, : max(kept)]], 1)
        if extra:
            self.cache.crop(-extra)

    # -- the second pass ----------------------------------------------------------------------------------------------

    def _part(self, batch: Sequence[_Row], soft: dict[int, Tensor]) -> list[_Row]:
        """Read the memory tokens of rows that have ended, and go on without them."""
        going, ended = ([i for i, row in enumerate(batch) if row.going is on] for on in (True, False))
        rest = self._selected(going)
        soft |= self._read_memory_of(batch, [i for i in ended if self._needs_soft(batch[i])])
        self.cache, self.mask, self.position = rest
        return [batch[i] for i in going]

    def _needs_soft(self, row: _Row) -> bool:
        """Say whether somebody reads the soft tokens of a row that has ended."""
        ids, end = [ord(c) for c in row.written], self.backbone.end_id
        cut = ids[-1] != end
        return self.makes_soft(row.index, [*ids, end] if cut else ids, cut)

    def _read_memory_of(self, batch: Sequence[_Row], places: Sequence[int]) -> dict[int, Tensor]:
        """Read the memory tokens of some rows of the batch, of which no more is read then."""
        if not places:
            return {}
        self.cache, self.mask, self.position = self._selected(places)
        return self._read_memory([batch[i] for i in places])

    def _selected(self, places: Sequence[int]) -> tuple[DynamicCache, Tensor, Tensor]:
        """Copy cache, mask and positions of some rows."""
        at = to_device(torch.tensor(places), self.mask.device)
        cache = DynamicCache(config=self.backbone.model.config.get_text_config())
        layers: list[Any] = self.cache.layers  # of full attention, all of them
        for i, layer in enumerate(layers):
            cache.update(layer.keys[at], layer.values[at], i)
        return cache, self.mask[at], self.position.index_select(-2, at)

    def _read_memory(self, batch: Sequence[_Row]) -> dict[int, Tensor]:
        """Read the end of turn, which is forced where a row ran out of budget, and the memory tokens: hidden states
        (N, d) at these, by row."""
        n, end = self.compiler.n_tokens, self.backbone.end_id
        tail = torch.full((len(batch), 2 + n), self.backbone.memory_id)
        tail[:, :2] = torch.tensor([[ord(row.text[-1]), end] for row in batch])
        real = torch.ones_like(tail, dtype=torch.bool)
        real[:, 0] = tail[:, 0] != end  # an end of turn that was written needs no other before it
        hidden = self._feed(tail, real)[:, -n:]
        return {row.index: states for row, states in zip(batch, hidden, strict=True)}

    def _drafts(self, rows: Sequence[_Row]) -> list[Draft]:
        """Give what was written, with its log-probabilities, which leave the device here."""
        end = self.backbone.end_id
        logprobs = [values.float() for values in self.passes]
        starts = [0, *torch.tensor([values.numel() for values in logprobs]).cumsum(0).tolist()]
        flat = torch.cat([values.flatten() for values in logprobs]).cpu()
        drafts = []
        for row in rows:
            ids = tuple(map(ord, row.written))
            places = [starts[k] + at * logprobs[k].shape[1] + j for k, at, n in row.places for j in range(n)]
            cut = ids[-1] != end
            cached = self.cached[row.index] if self.cached else None
            drafts.append(Draft((*ids, end) if cut else ids, flat[places], cut, cached))
        return drafts


@dataclass(slots=True)
class _Row:
    """A row as it is written. Its tokens are the characters of `text`, in which Python finds others fast."""

    index: int  # of its request
    text: str  # prompt and emission
    length: int = 0  # of the emission
    places: list[tuple[int, int, int]] = field(default_factory=list)  # of its log-probabilities: pass, row, count
    going: bool = True

    @property
    def written(self) -> str:
        return self.text[len(self.text) - self.length :]

    def take(self, ids: Sequence[int], place: tuple[int, int]) -> None:
        self.text += _text(ids)
        self.length += len(ids)
        self.places.append((*place, len(ids)))

    def follows(self, most: int) -> str:
        """Give what followed the last tokens where they stood before: as many of these as possible, the last time.
        Where that runs into their own end, it goes round."""
        for size in range(LONGEST, 0, -1):
            at = self.text.rfind(self.text[-size:], 0, -1)
            if at >= 0:
                return (self.text[at + size : at + size + most] * most)[:most]
        return ""


def _text(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def _until(guess: str, banned: Sequence[int]) -> str:
    """Cut a guess before the first token that is banned."""
    bad = [i for i, c in enumerate(guess) if ord(c) in banned]
    return guess[: bad[0]] if bad else guess
