"""Induction initialisation: set attention heads of a decoder by hand, so that it copies and looks up before training.

Small models need hundreds to thousands of steps until these circuits form (after mimetic initialisation, Trockman and
Kolter 2023; induction heads, Olsson et al. 2022):

    layer 0   heads that attend one to four tokens back and write those tokens into separate blocks of the residual
        stream
    layer 1   induction heads: find earlier tokens with the same predecessors and copy what followed
    layer 2   induction heads on the output of layer 1
    the rest  free heads and feed-forward layers, which add nothing; free heads of the first layers attend evenly to the
              last few tokens

If the goal ends the prompt (`executor.goal_last`), a model gathers the things that the goal names instead:

    layer 0   heads that attend one, two and four tokens back; heads that gather the last scene and thing (the goal's),
              the last place (the agent's), the goal's kinds of place for delivery and treatment, the last of did, take,
              "using the" and move (the state of the hand), and the owner of commands, agent or memory
    layer 1   look-up of the goal's thing in its scene ("in FloorPlan3 the mug was in"); the next place of a list; the
              number of the goal's thing in view; "take" if it is in view and the hand is empty; places of delivery and
              treatment for the held thing; suppression of the agent's place; the goal's thing after a verb; whether a
              command's place was visited. A look-up head that finds nothing attends to the prompt's first token, the
              sink, whose copy is empty.

An embedding uses the first `EMBEDDED` dimensions; the token k places back is written to the k-th block of `BACK`
dimensions after them. Heads compare content in dimensions that rotary embedding hardly turns, and positions in
dimensions that it turns fast. Untrained, such a model answers 99 % of look-ups by scene and
thing in documents of four entries (`tests/zoo/test_induction_init.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from zoo.models import Lexicon

HIDDEN, HEADS, HEAD_DIM = 160, 5, 64
GATHERING_HIDDEN, GATHERING_HEADS = 320, 10
FORWARD = {False: 3, True: 2}  # feed-forward width in hidden sizes, by whether the model gathers
THETAS = {False: 1e8, True: 1e13}  # rotary base: with the second, half of a head's dimensions hardly turn in a prompt
EMBEDDED, BACK, BLOCKS = 64, 24, 4  # dimensions of an embedding and of a block; blocks of preceding tokens
SCENE, THING, PLACE, SECTION, OWNER = 5, 6, 7, 8, 9  # blocks of gathered tokens; owner: whose commands these are
SEEN = 22  # dimensions of a block that a gathering model uses, so that a head can compare two blocks

FAST, SLOW = 0.02, 1e-3  # radians per token: dimensions that distinguish neighbours, and that compare content
SHARP, ALIKE, EVEN = 8.0, 2.1, 1.2  # attention logits by position, by content, and of free heads
CHOSEN, NEAR = 8.0, 12.0  # logit of a gathered kind, and the loss of logit at the end of its span
REACH, FALLING, LASTING, UNFOUND = 200, 0.3, 70.0, 28.0  # last token of a kind: reach in tokens; logit lost per token,
# of the kind, and of the sink
SPANS = (12, 40)  # tokens that free heads of the first layers attend to
SMALL = 0.05  # scale of random weights left in a set head
WRITTEN, COPIED, AIMED, TREATING, AWAY, NAMED, SPOKEN = 0.13, 0.5, 2.0, 4.0, 0.2, 1.5, 1.5  # output strengths
FAINT = 1 / 3  # scale of gathered tokens, so that norms depend little on them
PLAIN = 0.82  # scale of a gathering model's read weights, since its norms are larger
GAIN, FOLLOWED = 1.5 / FAINT, 9.0  # logits of gathered content, and of a required word
RESTING, FOUND = 40.0, 8.0  # sink logit of an inactive head, and its reduction for an active one
PREVIOUS, HELD, SHOWN = 5.9 / PLAIN, 5.4 * FAINT / PLAIN, 2.5 / PLAIN  # normed size of the previous token, of a
# gathered token, and of a kind
SUNK, SINKING = 16.0 / PLAIN, 4.0  # value of the sink's kind after a norm, and in its embedding
PACE, EMBEDDING_PACE = 0.2, 0.02  # factors of the learning rate for set heads and the embeddings that they read

KINDS = {
    "numbers": -34,
    "verbs": -9,
    "parts": -8,
    "treatments": -7,
    "sinks": -6,
    "sections": -5,
    "goals": -4,
    "scenes": -3,
    "things": -2,
    "places": -1,
}
"""Hidden dimension that marks a token's kind."""
KIND, NORM = 0.5, 1.2  # value of a kind's dimension; norm of an embedding with one
CODE = 12  # dimensions that a kind of places and its places share
SHARED = slice(-9 - CODE, -9)
TARGETS = {
    "goals": slice(-9 - 2 * CODE, -9 - CODE),
    "treatments": slice(EMBEDDED + 2 * BACK, EMBEDDED + 2 * BACK + CODE),  # block 3, which no gathering head writes
}
"""Dimensions that receive the shared code of the goal's word of a kind."""

DID, TAKE, USING, MOVE, SEE = ("\ndid:", "did"), ("take",), ("using the",), ("move",), ("see", "\nsee:")
HOLDING = (*TAKE, *USING)  # after these sections something is in hand
ARTICLES = " a", ", a", ", and a"  # before an item of a list
ANSWER = "assistant"  # the token before an answer
WORDS = {
    "sinks": ("<|im_start|>",),
    "sections": (*DID, *TAKE, *USING, *MOVE, SEE[0]),
    "parts": (*DID, "because in"),  # before commands of the agent, or of a memory entry
    "verbs": (*TAKE, *MOVE, "heat", "cool", "clean"),
    "numbers": tuple(map(str, range(1, 10))),
}
"""Words of kinds that the lexicon does not list."""
SAME = ("did", "\ndid:"), ("see", "\nsee:")  # tokens of one word, which a blank line before it changes


@dataclass(frozen=True, slots=True)
class PreviousToken:
    """A head that attends to the token `back` positions before and writes it into block `back`."""

    back: int

    def write(self, head: _HeadWeights, context: _Context) -> None:
        head.attend_back(self.back)
        head.v[:BACK, :EMBEDDED] += context.shared
        head.write_block(self.back)


@dataclass(frozen=True, slots=True)
class Suppress:
    """A head that attends to its own token and subtracts the place gathered there."""

    def write(self, head: _HeadWeights, context: _Context) -> None:
        head.attend_back(0)
        start = EMBEDDED + (PLACE - 1) * BACK
        head.v.zero_()
        head.v[:, start : start + BACK] = EMBEDDED / BACK / FAINT * context.shared.T
        head.o.zero_()
        head.write_embedding(-AWAY)


@dataclass(frozen=True, slots=True)
class Gather:
    """A head that attends to the last tokens of a kind and writes them into a block."""

    kind: str
    span: int | None  # approximate reach in tokens; None: the last token of the kind at any distance
    block: int

    def write(self, head: _HeadWeights, context: _Context) -> None:
        if self.span is None:
            head.attend_last(self.kind)
        else:
            head.attend_kind(self.kind, CHOSEN, self.span)
        head.v[:BACK, :EMBEDDED] += context.shared
        head.write_block(self.block, WRITTEN * FAINT)


@dataclass(frozen=True, slots=True)
class GoalPlace:
    """One of two heads: without `only_after`, gather the code of the goal's last word of a kind; with it, copy places
    of that code if the last section begins with one of these words."""

    kind: str
    only_after: Sequence[str] = ()
    strength: float = 0.0  # of the copy

    def write(self, head: _HeadWeights, context: _Context) -> None:
        if not self.only_after:
            head.attend_kind(self.kind, CHOSEN, 20)
            head.v[:CODE, SHARED] += torch.eye(CODE)
            head.o[TARGETS[self.kind], :CODE] += WRITTEN * FAINT * torch.eye(CODE)
            return
        head.attend_kind("places", CHOSEN)
        dims = head.slow[1 : CODE + 1]
        head.q[dims, TARGETS[self.kind]] += head.scale * GAIN * ALIKE * torch.eye(CODE)
        head.k[dims, SHARED] += head.scale * GAIN * FAINT * ALIKE * torch.eye(CODE)
        head.v += torch.eye(*head.v.shape)
        head.write_embedding(self.strength)
        head.rest(context.shared, [context.direction((word,)) for word in self.only_after], unless=True)


@dataclass(frozen=True, slots=True)
class Induction:
    """A head that copies tokens whose block `there` equals this position's block `here`, for each pair (here, there);
    block 0 is the token itself."""

    pairs: tuple[tuple[int, int], ...]
    required: Sequence[tuple[int, Sequence[str], float]] = ()  # (block, words, weight): the block holds one of them
    strength: float = COPIED  # of the copy
    sharpness: Sequence[float] = (1.0,) * BLOCKS  # weight of each pair's comparison
    threshold: float = 0.0  # attention logit below which the head attends to the sink; 0: no sink
    penalty: float = 0.0  # added to the threshold if this token is no place or lacks a required word
    rests_after: Sequence[str] = ()  # inactive if the last section begins with one of these
    only_at: str = ""  # active only at tokens of this kind
    only_after: str = ""  # active only directly after this word
    kind: str = ""  # attends to tokens of this kind
    writes: str = ""  # word to write instead of a copy, if a token of `kind` is found

    def write(self, head: _HeadWeights, context: _Context) -> None:
        shared, direction = context.shared, context.direction
        head.compare(self, shared, context.layer)
        if self.threshold:
            head.sink(self.threshold)
        for n, (block, words, weight) in enumerate(self.required, start=1):
            head.require(n, block, shared=shared, word=direction(words), weight=weight)
            if self.penalty:
                head.sink_without_word(block, shared, direction(words), self.penalty)
                head.sink_without_kind("places", self.penalty)
        if self.only_at:
            head.sink_without_kind(self.only_at, 2 * RESTING)
        if self.only_after:
            head.sink_without_word(1, shared, direction((self.only_after,)), 3 * RESTING)
        if self.kind:
            head.k[HEAD_DIM - 1, KINDS[self.kind]] = 2 * FOLLOWED / SHOWN
        if self.writes:
            head.write_word(self.kind, context.embedding(self.writes), self.strength)
        if self.rests_after:
            head.rest(shared, [direction((word,)) for word in self.rests_after])


Head = PreviousToken | Suppress | Gather | GoalPlace | Induction | None  # None: free


def head_layout(layers: int, gathers: bool = False) -> Sequence[Sequence[Head]]:
    """Return the heads of each layer."""
    rows: list[list[Head]] = [[] for _ in range(layers)]
    if gathers:
        seen = [(2, ARTICLES, 2.0), (OWNER, DID, 1.0)]
        rows[0] = [
            PreviousToken(1),
            PreviousToken(2),
            PreviousToken(4),
            Gather("scenes", 24, SCENE),
            Gather("things", 20, THING),
            Gather("places", 60, PLACE),
            Gather("sections", None, SECTION),
            Gather("parts", None, OWNER),
            GoalPlace("goals"),
            GoalPlace("treatments"),
        ]
        rows[1] = [
            Induction(((THING, 2), (SCENE, 4)), strength=3.0, threshold=91, rests_after=HOLDING),
            Induction(((PLACE, 2),), required=[(1, ARTICLES, 1.0)], strength=1.0, threshold=15),
            Induction(((THING, 1),), required=seen, threshold=70, kind="numbers"),
            Induction(
                ((THING, 1),),
                required=seen,
                threshold=150,
                kind="numbers",
                writes=TAKE[0],
                strength=SPOKEN,
                only_after=ANSWER,
                rests_after=HOLDING,
            ),
            GoalPlace("goals", HOLDING, AIMED),
            GoalPlace("treatments", TAKE, TREATING),
            Suppress(),
            Induction(((THING, 0),), strength=NAMED, threshold=15, only_at="verbs"),
            Induction(
                ((0, 1), (SECTION, SECTION)),
                required=[(OWNER, DID, 1.8)],
                strength=2.0,
                sharpness=(2.0, 0.86),
                threshold=184,
                penalty=55,
                rests_after=HOLDING,
            ),
        ]
    else:
        every = tuple((back, back + 1) for back in range(BLOCKS))
        rows[0] = [PreviousToken(back) for back in range(1, BLOCKS + 1)]
        rows[1] = [Induction(((0, 1),)), Induction(every), Induction(((1, 2), (3, 4)))]
        rows[2] = [Induction(((0, 1),)), Induction(((0, 2),)), Induction(((0, 0),))]
    heads = GATHERING_HEADS if gathers else HEADS
    return [[*row, *[None] * (heads - len(row))] for row in rows]


def build_induction_model(
    tokenizer: PreTrainedTokenizerFast, layers: int, seed: int = 0, gathers: Lexicon | None = None
) -> LlamaForCausalLM:
    """Build a Llama with attention biases and at least three layers that looks things up untrained.

    Args:
        gathers: lexicon of the scenes, things and places to gather, for prompts that end with the goal.
    """
    torch.manual_seed(seed)
    gathering = bool(gathers)
    hidden, heads = (GATHERING_HIDDEN, GATHERING_HEADS) if gathering else (HIDDEN, HEADS)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=FORWARD[gathering] * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=HEAD_DIM,
        attention_bias=True,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=hidden**-0.5,
        rms_norm_eps=1e-6,
        eos_token_id=cast("int", tokenizer.eos_token_id),
        pad_token_id=cast("int", tokenizer.pad_token_id),
        bos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": THETAS[gathering]},
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        embeddings = cast("Tensor", model.get_input_embeddings().weight)
        torch.nn.init.normal_(embeddings, std=0.15)
        embeddings[:, EMBEDDED:] *= SMALL
        if gathers:
            _mark_kinds(tokenizer, embeddings, gathers)
        shared, free_heads = _orthonormal(BACK, EMBEDDED), 0
        if gathers:
            shared[SEEN:] = 0
            _separate_embeddings(tokenizer, embeddings, shared)
        decoder: Sequence[Any] = list(model.model.layers)
        for number, (layer, row) in enumerate(zip(decoder, head_layout(layers, gathering), strict=True)):
            layer.mlp.down_proj.weight.zero_()
            context = _Context(tokenizer, embeddings, shared, number)
            for i, head in enumerate(row):
                weights = _HeadWeights(layer.self_attn, slice(i * HEAD_DIM, (i + 1) * HEAD_DIM), gathering)
                if head is None:
                    weights.free(SPANS[free_heads % len(SPANS)] if number < 3 else None)
                    free_heads += 1
                else:
                    head.write(weights, context)
    return model


def learning_rate_scales(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return learning-rate factors of layers with set heads, by parameter name.

    Adam's first steps, equally long for every weight, would undo set heads. In a gathering model layer 0, and layer 1's
    queries, keys and norm are fixed, since training drove attention logits from 40 to 115.
    """
    scales = dict[str, Tensor]()
    gathers = model.config.num_attention_heads == GATHERING_HEADS
    for number, row in enumerate(head_layout(model.config.num_hidden_layers, gathers)[:3]):
        free, layer = torch.tensor([head is None for head in row]).repeat_interleave(HEAD_DIM), f"model.layers.{number}"
        for name in ("q_proj", "k_proj", "v_proj"):
            scale = torch.where(free, 1.0, 0.0 if gathers and name != "v_proj" else PACE)
            scales[f"{layer}.self_attn.{name}.weight"] = scale[:, None]
            scales[f"{layer}.self_attn.{name}.bias"] = scale
        scales[f"{layer}.self_attn.o_proj.weight"] = torch.where(free, 1.0, PACE)
    if gathers:
        scales["model.embed_tokens.weight"] = torch.tensor(EMBEDDING_PACE)
        fixed = [name for name, _ in model.named_parameters() if name.startswith("model.layers.0.")]
        scales |= dict.fromkeys([*fixed, "model.layers.1.input_layernorm.weight"], torch.tensor(0.0))
    return scales


@dataclass(frozen=True, slots=True)
class _Context:
    """Embeddings (V, hidden), the projection `shared` (BACK, EMBEDDED) of a token into a block, and the layer."""

    tokenizer: PreTrainedTokenizerFast
    embeddings: Tensor
    shared: Tensor
    layer: int

    def direction(self, words: Sequence[str]) -> Tensor:
        """Return the common direction (BACK,) of words in a block."""
        rows = self.embeddings[_tokens(self.tokenizer, words)]
        return normalize(self.shared @ rows[:, :EMBEDDED].mean(0), dim=0)

    def embedding(self, word: str) -> Tensor:
        return self.embeddings[_tokens(self.tokenizer, (word,))[0], :EMBEDDED]


class _HeadWeights:
    """Views of an attention head's weights, and operations that set them."""

    def __init__(self, attention: Any, rows: slice, gathers: bool) -> None:
        self.gathers, self.scale = gathers, PLAIN if gathers else 1.0
        parts = ("q_proj", "k_proj", "v_proj")
        self.q, self.k, self.v = (getattr(attention, name).weight[rows] for name in parts)
        self.q_bias, self.k_bias = (getattr(attention, name).bias[rows] for name in parts[:2])
        self.o = attention.o_proj.weight[:, rows]
        # Radians per token that rotary embedding turns each pair of dimensions.
        self.turns = THETAS[gathers] ** (-torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
        self.slow = (self.turns < SLOW).nonzero()[:, 0]
        self.gate = int(self.slow[0])  # the dimension that distinguishes kinds and the sink

    # Where to attend -------------------------------------------------------------------------------------------

    def attend_back(self, back: int) -> None:
        """Attend to the token `back` positions before."""
        self._scale_down()
        fast = (self.turns > FAST).nonzero()[:, 0]
        contrast = (1 - self.turns[fast].cos()).sum()  # logit lost by a neighbour at amplitude 1
        self._bias_towards(back, fast, math.sqrt(SHARP * math.sqrt(HEAD_DIM) / float(contrast)))

    def attend_kind(self, kind: str, logit: float, span: int | None = None) -> float:
        """Attend to tokens of a kind, within a span more to nearer ones; return the amplitude."""
        self._scale_down()
        self.q.zero_()
        self.k.zero_()
        if span is not None:
            near = ((self.turns > 0.2 / span) & (self.turns < 1.6 / span)).nonzero()[:, 0]
            falls = (1 - (span * self.turns[near]).cos()).sum()
            self._bias_towards(0, near, math.sqrt(NEAR * math.sqrt(HEAD_DIM) / float(falls)))
        self.q_bias[self.gate] = amplitude = math.sqrt(logit * math.sqrt(HEAD_DIM))
        self.k[self.gate, KINDS[kind]] += amplitude / (KIND * 10)
        return amplitude

    def attend_last(self, kind: str) -> None:
        """Attend to the last token of a kind, or to the sink if there is none."""
        kind_amplitude = self.attend_kind(kind, LASTING)
        (at,) = ((self.turns * REACH < 1.3) & (self.turns * REACH > 0.7)).nonzero()[:1, 0].tolist()
        # The logit is -sin(distance * turn), which falls evenly while that is small.
        self.k_bias[at] = amplitude = math.sqrt(FALLING * math.sqrt(HEAD_DIM) / float(self.turns[at]))
        self.q_bias[at + HEAD_DIM // 2] = amplitude
        self.k[self.gate, KINDS["sinks"]] += UNFOUND / LASTING * kind_amplitude / math.sqrt(self.k.shape[1])

    def compare(self, head: Induction, shared: Tensor, layer: int) -> None:
        """Compare each pair of blocks in separate dimensions, and copy the found token."""
        self._scale_down()
        dims = torch.cat([self.slow, self.slow + HEAD_DIM // 2])
        if self.gathers:  # other dimensions compare kinds and required words
            dims = torch.cat([self.slow[1:], self.slow[1 : -max(len(head.required), 1)] + HEAD_DIM // 2])
        size = len(dims) // len(head.pairs)
        for n, (here, there) in enumerate(head.pairs):
            some, mixing = dims[n * size : (n + 1) * size], _orthonormal(size, SEEN if self.gathers else BACK)
            mixing = pad(mixing, (0, BACK - mixing.shape[1]))
            for side, block in ((self.q, here), (self.k, there)):
                weight = head.sharpness[n] * self._gain(block)
                side[some] += weight * mixing @ _reader(block, shared, side.shape[1])
        self.v += torch.eye(*self.v.shape)
        self.write_embedding(head.strength / layer)

    def require(self, n: int, block: int, shared: Tensor, word: Tensor, weight: float) -> None:
        """Add the n-th requirement, that a block holds a word of this direction (BACK,)."""
        at = HEAD_DIM - n  # one dimension, which hardly turns; others compare content
        self.q[at] = 0
        self.k[at] = self._gain(block) * word @ _reader(block, shared, self.k.shape[1])
        self.q_bias[at] = weight * FOLLOWED

    def free(self, span: int | None) -> None:
        """Write nothing, and with a span attend evenly to about that many last tokens."""
        self.o.zero_()
        if span is not None:
            some = ((self.turns > 0.05 / span) & (self.turns < 2.2 / span)).nonzero()[:, 0]
            self._bias_towards(0, some, math.sqrt(EVEN * math.sqrt(HEAD_DIM)))

    # When to attend to the sink, the prompt's first token ------------------------------------------------------

    def sink(self, logit: float) -> None:
        """Attend to the sink if no other logit exceeds this one."""
        self.q[self.gate], self.k[self.gate] = 0, 0
        self.k[self.gate, KINDS["sinks"]] = math.sqrt(HEAD_DIM) / SUNK
        self.q_bias[self.gate] = logit

    def sink_without_word(self, block: int, shared: Tensor, word: Tensor, logit: float) -> None:
        """Raise the sink's logit if this token's block holds no word of this direction (BACK,)."""
        self.q_bias[self.gate] += logit
        size = HELD if block > BLOCKS else PREVIOUS
        self.q[self.gate] = -logit / size * word @ _reader(block, shared, self.q.shape[1])

    def sink_without_kind(self, kind: str, logit: float) -> None:
        """Raise the sink's logit if this token is not of a kind."""
        self.q_bias[self.gate] += logit
        self.q[self.gate, KINDS[kind]] = -logit / SHOWN

    def rest(self, shared: Tensor, words: Sequence[Tensor], unless: bool = False) -> None:
        """Attend to the sink if (or `unless`) the last section is a word of these orthogonal directions (BACK,)."""
        at = HEAD_DIM // 2 + self.gate
        self.q[at], self.k[at] = 0, 0
        self.k[at, KINDS["sinks"]] = math.sqrt(HEAD_DIM) / SUNK
        logit = -RESTING if unless else RESTING
        word = torch.stack(list(words)).sum(0) @ _reader(SECTION, shared, self.q.shape[1])
        self.q_bias[at] = -logit
        self.q[at] = (logit + FOUND if unless else 2 * logit) / HELD * word

    # What to write ---------------------------------------------------------------------------------------------

    def write_word(self, kind: str, word: Tensor, strength: float) -> None:
        """Write a word's embedding if the head attends to a kind."""
        self.v.zero_()
        self.o.zero_()
        self.v[0, KINDS[kind]] = 1 / KIND
        self.o[:EMBEDDED, 0] = self.scale * strength * word

    def write_embedding(self, strength: float) -> None:
        self.o[:EMBEDDED] += self.scale * strength * torch.eye(EMBEDDED, HEAD_DIM)

    def write_block(self, block: int, strength: float = WRITTEN) -> None:
        start = EMBEDDED + (block - 1) * BACK
        self.o[start : start + BACK, :BACK] += strength * torch.eye(BACK)

    def _gain(self, block: int) -> float:
        # A token's own embedding (block 0) loses a part in the projection.
        return self.scale * ALIKE * (GAIN if block > BLOCKS else 1.25 if block == 0 else 1.0)

    def _scale_down(self) -> None:
        for weight in (self.q, self.k, self.v, self.o):
            weight *= 0.0 if self.gathers else SMALL

    def _bias_towards(self, back: int, dims: Tensor, amplitude: float) -> None:
        """Bias queries and keys so that their rotated product is largest `back` tokens before."""
        turned = back * self.turns[dims]
        self.k_bias[dims] = amplitude
        self.q_bias[dims] = amplitude * turned.cos()
        self.q_bias[dims + HEAD_DIM // 2] = -amplitude * turned.sin()


def _mark_kinds(tokenizer: PreTrainedTokenizerFast, embeddings: Tensor, lexicon: Lexicon) -> None:
    """Scale embeddings to equal norms, mark each token's kind, and set the code of places to that of their kind."""
    embeddings *= NORM / embeddings.norm(dim=1, keepdim=True)
    for kind, column in KINDS.items():
        embeddings[_tokens(tokenizer, WORDS.get(kind) or tuple(getattr(lexicon, kind))), column] = KIND
    for kind in lexicon.goals:
        alike = [kind, *(place for place in lexicon.places if place.rpartition(" ")[0] == kind)]
        alike += [word for word, where in lexicon.treatments.items() if where == kind]
        embeddings[_tokens(tokenizer, alike), SHARED] = torch.randn(CODE) * KIND / math.sqrt(CODE)


def _separate_embeddings(tokenizer: PreTrainedTokenizerFast, embeddings: Tensor, shared: Tensor) -> None:
    """Increase angles between embeddings, except those of one word, at equal norms, except the sink's.

    Among hundreds of random embeddings some are so similar that look-ups fail.
    """
    embeddings[:, :EMBEDDED] = _repelled(embeddings[:, :EMBEDDED], shared)
    for one, other in SAME:
        embeddings[_tokens(tokenizer, (one,)), :EMBEDDED] = embeddings[_tokens(tokenizer, (other,))[:1], :EMBEDDED]
    _orthogonalise(embeddings, shared, [_tokens(tokenizer, words) for words in (DID, TAKE, USING, MOVE, SEE, ARTICLES)])
    seen = embeddings[:, :EMBEDDED] @ shared.T @ shared
    unseen = normalize(embeddings[:, :EMBEDDED] - seen, dim=1)
    others = seen.square().sum(1) + embeddings[:, EMBEDDED:].square().sum(1)
    embeddings[:, :EMBEDDED] = seen + unseen * (NORM**2 - others).clamp(min=0.01).sqrt()[:, None]
    sink = _tokens(tokenizer, WORDS["sinks"])[:1]
    embeddings[sink, :EMBEDDED] = 0
    embeddings[sink, KINDS["sinks"]] = SINKING


@torch.enable_grad()
def _repelled(vectors: Tensor, shared: Tensor, steps: int = 100, power: int = 8) -> Tensor:
    """Increase the angles between vectors (V, EMBEDDED), and between their projections by `shared`."""
    size = vectors.detach().norm(dim=1).mean()
    moved = vectors.detach().clone().requires_grad_()
    optimizer = torch.optim.Adam([moved], lr=0.01)
    for _ in range(steps):
        alike = [normalize(each, dim=1) for each in (moved, moved @ shared.T)]
        loss = sum((each @ each.T - torch.eye(len(each))).pow(power).sum() for each in alike)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[union-attr]
        optimizer.step()
    seen = moved.detach() / moved.detach().matmul(shared.T).norm(dim=1, keepdim=True)
    return seen * float(size * math.sqrt(BACK / EMBEDDED))


def _orthogonalise(embeddings: Tensor, shared: Tensor, groups: Sequence[list[int]]) -> None:
    """Make projections of tokens equal within groups and orthogonal between groups."""
    seen = embeddings[[group[0] for group in groups], :EMBEDDED] @ shared.T
    turned, upper = torch.linalg.qr(seen.T)
    for group, one in zip(groups, (turned * upper.diagonal().sign()).T * seen.norm(dim=1).mean(), strict=True):
        some = embeddings[group, :EMBEDDED]
        embeddings[group, :EMBEDDED] = some - some @ shared.T @ shared + one @ shared


def _tokens(tokenizer: PreTrainedTokenizerFast, words: Sequence[str]) -> list[int]:
    """Return the tokens of words with and without a leading space; words that begin with white space have one form."""
    forms = [form for word in words for form in (word, f" {word}") if form[:2].strip() or form == word]
    return [ids[0] for ids in tokenizer(forms, add_special_tokens=False)["input_ids"]] if forms else []


def _reader(block: int, shared: Tensor, hidden: int) -> Tensor:
    """Return the matrix (BACK, hidden) that reads a block of the residual stream; block 0 is the token's embedding."""
    reader = torch.zeros(BACK, hidden)
    if block == 0:
        reader[:, :EMBEDDED] = shared
    else:
        start = EMBEDDED + (block - 1) * BACK
        reader[:, start : start + BACK] = torch.eye(BACK)
    return reader


def _orthonormal(rows: int, columns: int) -> Tensor:
    """Draw a matrix with orthonormal rows or, if there are fewer columns, orthonormal columns."""
    size = max(rows, columns)
    return torch.linalg.qr(torch.randn(size, size))[0][:rows, :columns]
