"""A decoder that looks things up before it has learned anything: some of its attention heads are set by hand.

A model of a few million parameters needs hundreds to thousands of steps until copying and look-up by two keys form, one
circuit at a time, and whether they form at all depends on tokens and rates. What forms is known, so it is built in
(after mimetic initialisation, Trockman and Kolter 2023; induction heads, Olsson et al. 2022):

    layer 0   heads that look one, two, three and four tokens back and write what they see into a part of the
              residual stream of its own
    layer 1   heads that find earlier places whose last tokens are the last tokens here, and copy what came next
    layer 2   the same with what layer 1 has gathered
    the rest  begins at nothing: free heads and feed-forward layers add 0; those of the first layers look at the last
              few tokens evenly

A token's embedding begins in the first `EMBEDDED` dimensions alone; k tokens back goes to the k-th block of `BACK`
behind them. Content is compared in the dimensions that rotary embedding hardly turns, positions in those that it turns
fast. Everything is trained from there, nothing is frozen. Untrained, such a model answers 99 % of look-ups by scene and
thing in documents of four entries (`tests/zoo/test_wiring.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HIDDEN, HEADS, HEAD_DIM = 160, 5, 64
EMBEDDED, BACK, BLOCKS = 64, 24, 4  # dimensions of an embedding, of a token looked back at, and how many of those
THETA = 1e8  # rotary base: half of a head's dimensions hardly turn within a prompt
FAST, SLOW = 0.02, 1e-3  # radians a token: what tells neighbours apart, and what content is compared in
SHARP, ALIKE, EVEN = 8.0, 2.1, 1.2  # how much more a head attends where it should, by kind
SPANS = (12, 40)  # tokens that free heads of the first layers look at
SMALL, WRITTEN, COPIED = 0.05, 0.13, 0.5  # what is left of random weights in a head that is set; what heads write


@dataclass(frozen=True, slots=True)
class Look:
    """A head that attends to the token `back` places before."""

    back: int


@dataclass(frozen=True, slots=True)
class Match:
    """A head that attends to where, for each pair, the token so many places before there is the one so many before
    here (0: the token itself, with all that was gathered at it), and copies what stands there."""

    pairs: tuple[tuple[int, int], ...]  # (here, there)


Head = Look | Match | None  # None: free
Layout = Sequence[Sequence[Head]]


def layout(layers: int) -> Layout:
    """List the heads of each layer."""
    first = [Look(back) for back in range(1, BLOCKS + 1)]
    whole = tuple((back, back + 1) for back in range(BLOCKS))
    second = [Match(((0, 1),)), Match(whole), Match(((1, 2), (3, 4)))]
    third = [Match(((0, 1),)), Match(((0, 2),)), Match(((0, 0),))]
    rows: list[list[Head]] = [[*first], [*second], [*third], *([] for _ in range(layers - 3))]
    return [[*row, *[None] * (HEADS - len(row))] for row in rows]


def wired(tokenizer: PreTrainedTokenizerFast, layers: int, seed: int = 0) -> LlamaForCausalLM:
    """Make a Llama (with attention biases) of `layers` layers, at least three, that looks things up untrained."""
    torch.manual_seed(seed)
    end, padding = cast("int", tokenizer.eos_token_id), cast("int", tokenizer.pad_token_id)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_hidden_layers=layers,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=HEAD_DIM, attention_bias=True,
        max_position_embeddings=4096, tie_word_embeddings=True, initializer_range=HIDDEN**-0.5, rms_norm_eps=1e-6,
        eos_token_id=end, pad_token_id=padding, bos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        torch.nn.init.normal_(embeddings, std=0.15)  # type: ignore[arg-type]
        embeddings[:, EMBEDDED:] *= SMALL  # type: ignore[index]
        shared, spans = _orthonormal(BACK, EMBEDDED), 0
        decoder: Sequence[Any] = list(model.model.layers)
        for number, (layer, heads) in enumerate(zip(decoder, layout(layers), strict=True)):
            layer.mlp.down_proj.weight.zero_()
            for i, head in enumerate(heads):
                at = _Head(layer.self_attn, slice(i * HEAD_DIM, (i + 1) * HEAD_DIM))
                match head:
                    case Look(back):
                        at.look(back, shared)
                    case Match(pairs):
                        at.match(pairs, shared, COPIED / number)
                    case None:
                        at.free(SPANS[spans % len(SPANS)] if number < 3 else None)
                        spans += 1
    return model


class _Head:
    """The weights of one attention head."""

    def __init__(self, attention: Any, rows: slice) -> None:
        parts = ("q_proj", "k_proj", "v_proj")
        self.q, self.k, self.v = (getattr(attention, name).weight[rows] for name in parts)
        self.q_bias, self.k_bias = (getattr(attention, name).bias[rows] for name in parts[:2])
        self.o = attention.o_proj.weight[:, rows]
        self.turns = THETA ** (-torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))  # radians a token

    def look(self, back: int, shared: Tensor) -> None:
        """Attend `back` tokens back, and write what is there, seen through `shared`, into its block."""
        self._calm()
        fast = (self.turns > FAST).nonzero()[:, 0]
        apart = (1 - self.turns[fast].cos()).sum()  # how much less a neighbour gets, for an amplitude of 1
        self._towards(back, fast, math.sqrt(SHARP * math.sqrt(HEAD_DIM) / float(apart)))
        self.v[:BACK, :EMBEDDED] += shared
        block = EMBEDDED + (back - 1) * BACK
        self.o[block : block + BACK, :BACK] += WRITTEN * torch.eye(BACK)

    def match(self, pairs: Sequence[tuple[int, int]], shared: Tensor, strength: float) -> None:
        """Compare each pair in dimensions of its own, and copy what stands where they agree."""
        self._calm()
        slow = (self.turns < SLOW).nonzero()[:, 0]
        dims = torch.cat([slow, slow + HEAD_DIM // 2])
        size = len(dims) // len(pairs)
        for n, (here, there) in enumerate(pairs):
            some, mixing = dims[n * size : (n + 1) * size], _orthonormal(size, BACK)
            self.q[some] += _amplified(here) * mixing @ _reader(here, shared)
            self.k[some] += _amplified(there) * mixing @ _reader(there, shared)
        self.v += torch.eye(HEAD_DIM, HIDDEN)
        self.o[:EMBEDDED] += strength * torch.eye(EMBEDDED, HEAD_DIM)

    def free(self, span: int | None) -> None:
        """Add nothing at first; with a span, look at about so many last tokens evenly."""
        self.o.zero_()
        if span is not None:
            some = ((self.turns > 0.05 / span) & (self.turns < 2.2 / span)).nonzero()[:, 0]
            self._towards(0, some, math.sqrt(EVEN * math.sqrt(HEAD_DIM)))

    def _calm(self) -> None:
        for weight in (self.q, self.k, self.v, self.o):
            weight *= SMALL

    def _towards(self, back: int, dims: Tensor, amplitude: float) -> None:
        """Bias queries and keys so that their product, once rotary embedding has turned them, is largest `back` tokens
        back."""
        turned = back * self.turns[dims]
        self.k_bias[dims] = amplitude
        self.q_bias[dims] = amplitude * turned.cos()
        self.q_bias[dims + HEAD_DIM // 2] = -amplitude * turned.sin()


def _amplified(back: int) -> float:
    # A token's own embedding is seen through `shared`, which keeps a part of it.
    return ALIKE * (1.25 if back == 0 else 1.0)


def _reader(back: int, shared: Tensor) -> Tensor:
    """Read from the residual stream, (BACK, HIDDEN), the token so many places back."""
    reader = torch.zeros(BACK, HIDDEN)
    if back == 0:
        reader[:, :EMBEDDED] = shared
    else:
        start = EMBEDDED + (back - 1) * BACK
        reader[:, start : start + BACK] = torch.eye(BACK)
    return reader


def _orthonormal(rows: int, columns: int) -> Tensor:
    """Draw a matrix whose rows, or columns where there are fewer, are orthonormal."""
    size = max(rows, columns)
    return torch.linalg.qr(torch.randn(size, size))[0][:rows, :columns]
