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

Where the goal ends the prompt (`executor.goal_last`), what it asks for is not written out before the answer, as a
compiler does. A model that gathers has these heads instead:

    layer 0   heads that look one, two and four tokens back; that find the last scene and thing (the goal's), the last
              places (where one is), the kind of place that the goal names and the one where it wants something treated;
              the last of did, take, "using the" and move (whether something is in hand, and treated), and whether the
              deeds here are one's own or memory's, each in a block of its own
    layer 1   a head that finds what stands two behind the goal's thing and four behind its scene ("in FloorPlan3 the
              mug was in" ...), unless something is in hand; one that finds what stands two behind the place where one
              is (the next of a list); one for the number of the goal's thing in view, and one that begins an answer
              with take where it finds that and nothing is in hand; for what is in hand, one for places of the goal's
              kind and one for those where it is treated; one that takes away the place where one is; one that names the
              goal's thing behind what is done with one; and one that finds a command's own last word among one's own
              deeds of this search, and what followed on it. Those that look up attend to the prompt's first token,
              which holds nothing, where they find nothing: what is copied from anywhere else by chance drowns what is
              right.

Its embeddings begin as far apart as they can be, for of hundreds of random ones some are so alike that things are found
where they are not.

A token's embedding begins in the first `EMBEDDED` dimensions alone; k tokens back goes to the k-th block of `BACK`
behind them. Content is compared in the dimensions that rotary embedding hardly turns, positions in those that it turns
fast. Everything is trained from there, nothing is frozen. Untrained, such a model answers 99 % of look-ups by scene and
thing in documents of four entries (`tests/zoo/test_wiring.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from zoo.models import Lexicon

HIDDEN, HEADS, HEAD_DIM = 160, 5, 64
EMBEDDED, BACK, BLOCKS = 64, 24, 4  # dimensions of an embedding, of a token looked back at, and how many of those
SCENE, THING, PLACE, SECTION, WHERE = 5, 6, 7, 8, 9  # blocks of what is gathered
GATHERING, FORWARD = (320, 10), 2  # dimensions and heads of a model that gathers; its feed-forward layers, in widths
THETAS = 1e8, 1e13  # rotary bases, the second of a model that gathers: half of a head's dimensions hardly turn within a
# prompt; with the second, enough to compare two tokens whole: seen through fewer, some match more weakly than others do
# by half
FAST, SLOW = 0.02, 1e-3  # radians a token: what tells neighbours apart, and what content is compared in
SHARP, ALIKE, EVEN = 8.0, 2.1, 1.2  # how much more a head attends where it should, by kind
SPANS = (12, 40)  # tokens that free heads of the first layers look at
PACE, EMBEDDING_PACE = 0.2, 0.02  # of the rate, at which set heads learn, and embeddings that they read
SMALL, WRITTEN, COPIED, AIMED, TREATING = 0.05, 0.13, 0.5, 2.0, 4.0  # what is left of random weights in a head that is
# set; what heads write
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
"""The dimension of an embedding that tells its kind."""
KIND, NORM = 0.5, 1.2  # what stands there; the norm of an embedding whose kind is to be told
CODE = 12  # dimensions of what a kind of places and its places have in common, and of where it is gathered
SHARED = slice(-9 - CODE, -9)
TARGETS = {
    "goals": slice(-9 - 2 * CODE, -9 - CODE),
    "treatments": slice(EMBEDDED + 2 * BACK, EMBEDDED + 2 * BACK + CODE),
}
"""Where what is gathered of a kind stands: the second where what is three tokens back would, which no head looks at."""
DEEDS, TAKEN = ("\ndid:", "did"), ("take",)  # what deeds begin with, and what one has something in hand after
TREATED = ("using the",)  # what a view says once it has been treated
PUT, VIEW = ("move",), ("see", "\nsee:")  # after which one has nothing in hand: it was put somewhere; the deeds were
# those of memory, behind which, after a blank line, the view follows
WORDS = {
    "sinks": ("<|im_start|>",),
    "sections": (*DEEDS, *TAKEN, *TREATED, *PUT, VIEW[0]),
    "parts": (*DEEDS, "because in"),
    "verbs": (*TAKEN, *PUT, "heat", "cool", "clean"),
    "numbers": tuple(map(str, range(1, 10))),
}
"""Of kinds that no lexicon lists. Parts: one's own deeds, or those of an entry of memory."""
SAME = ("did", "\ndid:"), ("see", "\nsee:")  # behind the blank line that ends pasted memory, they are other tokens
ANSWER = "assistant"  # one before where an answer begins
ARTICLES = " a", ", a", ", and a"  # before what a view lists
CHOSEN, NEAR = 8.0, 12.0  # how much more a gathering head attends to a kind, and how much less where its span ends
REACH, FALLING, LASTING, UNFOUND = 200, 0.3, 70.0, 28.0  # tokens back to which a last one is found, how much less each
# token further back is attended to, how much more one of the kind, and the token that holds nothing (it begins turns)
FAINT, PLAIN = 1 / 3, 0.82  # What is gathered is written so much fainter than what is looked back at, which is there
# everywhere: else norms, and with them how much is attended to, would differ by what has been found. Behind the norm
# the rest is larger then, and read by as much less.
GAIN, FOLLOWED = 1.5 / FAINT, 9.0  # of what was gathered; of an article
RESTING, FOUND = 40.0, 8.0  # how much more or less a head attends to the first token that rests, or does not; how much
# more, where it works behind a word alone
BEFORE, HELD, SHOWN = 5.9 / PLAIN, 5.4 * FAINT / PLAIN, 2.5 / PLAIN  # behind the norm: what stands in the block of
# what is one back, in a block of what was gathered, and what tells a kind
SEEN = 22  # of BACK dimensions, those in use where two of them have to fit into a head, whole
SUNK, SINKING = 16.0 / PLAIN, 4.0  # what tells the first token, behind a norm, and in its embedding, which has to be
# large, for a norm would enlarge what is beside it
AWAY, NAMED, SPOKEN = 0.2, 1.5, 1.5  # what is taken away, named, and said


@dataclass(frozen=True, slots=True)
class Look:
    """A head that attends to the token `back` places before."""

    back: int


@dataclass(frozen=True, slots=True)
class Match:
    """A head that attends to where, for each pair, the token so many places before there is the one so many before
    here (0: the token itself, with all that was gathered at it), and copies what stands there."""

    pairs: tuple[tuple[int, int], ...]  # (here, there)
    also: Sequence[tuple[int, Sequence[str], float]] = ()  # block, words, how much: there it holds one of these, too
    strength: float = COPIED  # of the copy
    sharp: Sequence[float] = (1.0,) * BLOCKS  # how much more, here and there, is made of the comparison of each pair
    sink: float = 0.0  # how alike something has to be, as an attention logit; without one, anything may be attended to
    here: float = 0.0  # how much more alike, where it is no place or does not hold one of the words itself
    rests: Sequence[str] = ()  # finds nothing behind one of these, as the last of the sections
    after: str = ""  # finds something behind words of this kind alone
    before: str = ""  # finds something one behind this word alone
    of: str = ""  # looks for words of this kind
    says: str = ""  # what it writes, where it finds one of that kind, instead of what stands there


@dataclass(frozen=True, slots=True)
class Gather:
    """A head that attends to the last tokens of a kind, among about `span`, and writes what it sees, as one that looks
    back does, into block number `block`."""

    kind: str
    span: int | None  # None: the last one, however far back
    block: int


@dataclass(frozen=True, slots=True)
class Aim:
    """A head of two: the first finds the goal's last word of a kind that shares something with places (`kind`), the
    second those places, but only behind `works`, as the last of the sections."""

    kind: str
    works: Sequence[str] = ()
    strength: float = 0.0  # of the copy; of the first none


@dataclass(frozen=True, slots=True)
class Leave:
    """A head that takes away the place where one is."""


Head = Look | Match | Gather | Aim | Leave | None  # None: free
Layout = Sequence[Sequence[Head]]
Direction = Callable[[Sequence[str]], Tensor]  # of words, in a block
Said = Callable[[str], Tensor]  # a word's embedding


def layout(layers: int, gathers: bool = False) -> Layout:
    """List the heads of each layer."""
    if gathers:
        first: list[Head] = [Look(1), Look(2), Look(4), Gather("scenes", 24, SCENE), Gather("things", 20, THING)]
        first += [Gather("places", 60, PLACE), Gather("sections", None, SECTION), Gather("parts", None, WHERE)]
        first += [Aim("goals"), Aim("treatments")]
        seen = [(2, ARTICLES, 2.0), (WHERE, DEEDS, 1.0)]
        second: list[Head] = [
            Match(((THING, 2), (SCENE, 4)), strength=3.0, sink=91, rests=(*TAKEN, *TREATED)),
            Match(((PLACE, 2),), also=[(1, ARTICLES, 1.0)], strength=1.0, sink=15),
            Match(((THING, 1),), also=seen, sink=70, of="numbers"),
            Match(
                ((THING, 1),),
                also=seen,
                sink=150,
                of="numbers",
                says=TAKEN[0],
                strength=SPOKEN,
                before=ANSWER,
                rests=(*TAKEN, *TREATED),
            ),
            Aim("goals", (*TAKEN, *TREATED), AIMED),
            Aim("treatments", TAKEN, TREATING),
            Leave(),
            Match(((THING, 0),), strength=NAMED, sink=15, after="verbs"),
            Match(
                ((0, 1), (SECTION, SECTION)),
                also=[(WHERE, DEEDS, 1.8)],
                strength=2.0,
                sharp=(2.0, 0.86),
                sink=184,
                here=55,
                rests=(*TAKEN, *TREATED),
            ),
        ]
        third: list[Head] = []
    else:
        first = [Look(back) for back in range(1, BLOCKS + 1)]
        whole = tuple((back, back + 1) for back in range(BLOCKS))
        second = [Match(((0, 1),)), Match(whole), Match(((1, 2), (3, 4)))]
        third = [Match(((0, 1),)), Match(((0, 2),)), Match(((0, 0),))]
    rows: list[list[Head]] = [first, second, third, *([] for _ in range(layers - 3))]
    heads = GATHERING[1] if gathers else HEADS
    return [[*row, *[None] * (heads - len(row))] for row in rows]


def wired(
    tokenizer: PreTrainedTokenizerFast, layers: int, seed: int = 0, gathers: Lexicon | None = None
) -> LlamaForCausalLM:
    """Make a Llama (with attention biases) of `layers` layers, at least three, that looks things up untrained.

    Args:
        gathers: whose scenes, things and places some heads gather, for a model whose prompt ends with the goal.
    """
    torch.manual_seed(seed)
    end, padding = cast("int", tokenizer.eos_token_id), cast("int", tokenizer.pad_token_id)
    hidden, heads = GATHERING if gathers else (HIDDEN, HEADS)
    forward = (FORWARD if gathers else 3) * hidden
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=HEAD_DIM,
        attention_bias=True,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=hidden**-0.5,
        rms_norm_eps=1e-6,
        eos_token_id=end,
        pad_token_id=padding,
        bos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": THETAS[bool(gathers)]},
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        embeddings = cast("Tensor", model.get_input_embeddings().weight)
        torch.nn.init.normal_(embeddings, std=0.15)
        embeddings[:, EMBEDDED:] *= SMALL
        if gathers:
            _tell_kinds(tokenizer, embeddings, gathers)
        shared, spans = _orthonormal(BACK, EMBEDDED), 0
        if gathers:
            shared[SEEN:] = 0
            _set_apart(tokenizer, embeddings, shared)
        direction = lambda words: _direction(shared, embeddings[_tokens(tokenizer, words)])
        said = lambda word: embeddings[_tokens(tokenizer, (word,))[0], :EMBEDDED]
        decoder: Sequence[Any] = list(model.model.layers)
        for number, (layer, row) in enumerate(zip(decoder, layout(layers, bool(gathers)), strict=True)):
            layer.mlp.down_proj.weight.zero_()
            for i, head in enumerate(row):
                at = _Head(layer.self_attn, slice(i * HEAD_DIM, (i + 1) * HEAD_DIM), bool(gathers))
                if head is None:
                    at.free(SPANS[spans % len(SPANS)] if number < 3 else None)
                    spans += 1
                else:
                    at.set(head, shared, number, direction, said)
    return model


def _tell_kinds(tokenizer: PreTrainedTokenizerFast, embeddings: Tensor, lexicon: Lexicon) -> None:
    """Have embeddings, of one length, tell the kinds of tokens, and places what they share with their kind."""
    embeddings *= NORM / embeddings.norm(dim=1, keepdim=True)
    for kind, column in KINDS.items():
        embeddings[_tokens(tokenizer, WORDS.get(kind) or tuple(getattr(lexicon, kind))), column] = KIND
    for kind in lexicon.goals:
        alike = [kind, *(place for place in lexicon.places if place.rpartition(" ")[0] == kind)]
        alike += [word for word, where in lexicon.treatments.items() if where == kind]
        embeddings[_tokens(tokenizer, alike), SHARED] = torch.randn(CODE) * KIND / math.sqrt(CODE)


def _set_apart(tokenizer: PreTrainedTokenizerFast, embeddings: Tensor, shared: Tensor) -> None:
    """Turn embeddings away from each other, but for words that are the same; all are as long, but for the sink's."""
    embeddings[:, :EMBEDDED] = _apart(embeddings[:, :EMBEDDED], shared)
    for one, other in SAME:
        embeddings[_tokens(tokenizer, (one,)), :EMBEDDED] = embeddings[_tokens(tokenizer, (other,))[:1], :EMBEDDED]
    _square(embeddings, shared, [_tokens(tokenizer, words) for words in (DEEDS, TAKEN, TREATED, PUT, VIEW, ARTICLES)])
    seen = embeddings[:, :EMBEDDED] @ shared.T @ shared
    unseen = torch.nn.functional.normalize(embeddings[:, :EMBEDDED] - seen, dim=1)
    others = seen.square().sum(1) + embeddings[:, EMBEDDED:].square().sum(1)
    embeddings[:, :EMBEDDED] = seen + unseen * (NORM**2 - others).clamp(min=0.01).sqrt()[:, None]
    sink = _tokens(tokenizer, WORDS["sinks"])[:1]
    embeddings[sink, :EMBEDDED] = 0
    embeddings[sink, KINDS["sinks"]] = SINKING


def paces(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return by what part of the rate weights of layers with set heads are to learn, by parameter name: those of the
    heads themselves are about right, and Adam's first steps, which are as long for each weight, would undo them. In a
    model that gathers, what its second layer compares stays as it is: the first layer with its feed-forward part (which
    wrote into what is compared until logits stood at 115 instead of 40), queries, keys and the norm before them."""
    config, parts = model.config, dict[str, Tensor]()
    gathers = config.num_attention_heads == GATHERING[1]
    if gathers:
        parts["model.embed_tokens.weight"] = torch.tensor(EMBEDDING_PACE)
    for number, row in enumerate(layout(config.num_hidden_layers, gathers)[:3]):
        free, layer = torch.tensor([head is None for head in row]).repeat_interleave(HEAD_DIM), f"model.layers.{number}"
        for name in ("q_proj", "k_proj", "v_proj"):
            pace = torch.where(free, 1.0, 0.0 if gathers and name != "v_proj" else PACE)
            parts[f"{layer}.self_attn.{name}.weight"] = pace[:, None]
            parts[f"{layer}.self_attn.{name}.bias"] = pace
        parts[f"{layer}.self_attn.o_proj.weight"] = torch.where(free, 1.0, PACE)
    if gathers:
        still = [name for name, _ in model.named_parameters() if name.startswith("model.layers.0.")]
        parts |= dict.fromkeys([*still, "model.layers.1.input_layernorm.weight"], torch.tensor(0.0))
    return parts


@torch.enable_grad()
def _apart(vectors: Tensor, shared: Tensor, steps: int = 100, power: int = 8) -> Tensor:
    """Turn vectors (V, EMBEDDED) away from each other, as they are and seen through `shared`: of random ones, among
    hundreds, some are so alike that what is compared is found where it is not."""
    size = vectors.detach().norm(dim=1).mean()
    moved = vectors.detach().clone().requires_grad_()
    optimizer = torch.optim.Adam([moved], lr=0.01)
    for _ in range(steps):
        alike = [torch.nn.functional.normalize(each, dim=1) for each in (moved, moved @ shared.T)]
        loss = sum((each @ each.T - torch.eye(len(each))).pow(power).sum() for each in alike)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[union-attr]
        optimizer.step()
    seen = moved.detach() / moved.detach().matmul(shared.T).norm(dim=1, keepdim=True)
    return seen * float(size * math.sqrt(BACK / EMBEDDED))


def _square(embeddings: Tensor, shared: Tensor, groups: Sequence[list[int]]) -> None:
    """Turn some tokens' embeddings until, seen through `shared`, those of a group are one, groups at right angles."""
    seen = embeddings[[group[0] for group in groups], :EMBEDDED] @ shared.T
    turned, upper = torch.linalg.qr(seen.T)
    for group, one in zip(groups, (turned * upper.diagonal().sign()).T * seen.norm(dim=1).mean(), strict=True):
        some = embeddings[group, :EMBEDDED]
        embeddings[group, :EMBEDDED] = some - some @ shared.T @ shared + one @ shared


def _direction(shared: Tensor, words: Tensor) -> Tensor:
    """Return the direction (BACK,) that words (n, hidden) have in a block, together."""
    return torch.nn.functional.normalize(shared @ words[:, :EMBEDDED].mean(0), dim=0)


def _tokens(tokenizer: PreTrainedTokenizerFast, words: Sequence[str]) -> list[int]:
    """List the tokens of words, each with and without a space before it (a joint has one of its own)."""
    forms = [form for word in words for form in (word, f" {word}") if form[:2].strip() or form == word]
    return [ids[0] for ids in tokenizer(forms, add_special_tokens=False)["input_ids"]] if forms else []


class _Head:
    """The weights of one attention head."""

    def __init__(self, attention: Any, rows: slice, gathers: bool) -> None:
        self.left = 0.0 if gathers else SMALL  # of random weights, where the head is set
        self.gathers, self.plain = gathers, PLAIN if gathers else 1.0
        parts = ("q_proj", "k_proj", "v_proj")
        self.q, self.k, self.v = (getattr(attention, name).weight[rows] for name in parts)
        self.q_bias, self.k_bias = (getattr(attention, name).bias[rows] for name in parts[:2])
        self.o = attention.o_proj.weight[:, rows]
        self.turns = THETAS[gathers] ** (-torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))  # radians a token

    def set(
        self, head: Look | Match | Gather | Aim | Leave, shared: Tensor, number: int, direction: Direction, said: Said
    ) -> None:
        """Set it, in layer `number`."""
        match head:
            case Look(back):
                self.look(back, shared)
            case Match():
                self.match(head, shared, number)
                if head.sink:
                    self.sink(head.sink)
                for n, (block, words, much) in enumerate(head.also, start=1):
                    self.follow(n, block, shared, direction(words), much)
                    if head.here:
                        self.ask(block, shared, direction(words), head.here)
                        self.only("places", head.here)
                if head.after:
                    self.only(head.after)
                if head.before:
                    self.ask(1, shared, direction((head.before,)), 3 * RESTING)
                if head.of:
                    self.k[HEAD_DIM - 1, KINDS[head.of]] = 2 * FOLLOWED / SHOWN
                if head.says:
                    self.say(head.of, said(head.says), head.strength)
                if head.rests:
                    self.rest(SECTION, shared, [direction((word,)) for word in head.rests])
            case Gather():
                self.gather(head, shared)
            case Aim(_, works):
                self.aim(head)
                if works:
                    self.rest(SECTION, shared, [direction((word,)) for word in works], unless=True)
            case Leave():
                self.leave(shared)

    def look(self, back: int, shared: Tensor) -> None:
        """Attend `back` tokens back, and write what is there, seen through `shared`, into its block."""
        self._look(back)
        self.v[:BACK, :EMBEDDED] += shared
        self._write(back)

    def leave(self, shared: Tensor) -> None:
        """Attend to the token itself, and write the opposite of the place that was gathered there."""
        self._look(0)
        start = EMBEDDED + (PLACE - 1) * BACK
        self.v.zero_()
        self.v[:, start : start + BACK] = EMBEDDED / BACK / FAINT * shared.T
        self.o.zero_()
        self._into_embedding(-AWAY)

    def gather(self, head: Gather, shared: Tensor) -> None:
        """Attend to the last tokens of a kind, and write what is there, seen through `shared`."""
        if head.span is None:
            self._last(head.kind)
        else:
            self._prefer(head.kind, head.span)
        self.v[:BACK, :EMBEDDED] += shared
        self._write(head.block, WRITTEN * FAINT)

    def aim(self, head: Aim) -> None:
        """Attend to the goal's last word of a kind, and write what it shares with places; or compare that with what
        places share, and copy those."""
        if not head.works:
            self._prefer(head.kind, 20)
            self.v[:CODE, SHARED] += torch.eye(CODE)
            self.o[TARGETS[head.kind], :CODE] += WRITTEN * FAINT * torch.eye(CODE)
            return
        self._prefer("places", None)
        some = (self.turns < SLOW).nonzero()[1 : CODE + 1, 0]
        self.q[some, TARGETS[head.kind]] += self.plain * GAIN * ALIKE * torch.eye(CODE)
        self.k[some, SHARED] += self.plain * GAIN * FAINT * ALIKE * torch.eye(CODE)
        self.v += torch.eye(*self.v.shape)
        self._into_embedding(head.strength)

    def rest(self, block: int, shared: Tensor, words: Sequence[Tensor], unless: bool = False) -> None:
        """Attend to the first token, where (or unless) a word of one of these directions (BACK,), which are at right
        angles, stands here in a block."""
        at = HEAD_DIM // 2 + int((self.turns < SLOW).nonzero()[0, 0])  # beside what tells the kind
        self.q[at], self.k[at] = 0, 0
        self.k[at, KINDS["sinks"]] = math.sqrt(HEAD_DIM) / SUNK
        much = -RESTING if unless else RESTING
        word = torch.stack(list(words)).sum(0) @ _reader(block, shared, self.q.shape[1])
        self.q_bias[at] = -much
        self.q[at] = (much + FOUND if unless else 2 * much) / HELD * word

    def _prefer(self, kind: str, span: int | None) -> None:
        """Attend to tokens of a kind, the nearer the more within a span."""
        self._calm()
        self.q.zero_()
        self.k.zero_()
        if span is not None:
            near = ((self.turns > 0.2 / span) & (self.turns < 1.6 / span)).nonzero()[:, 0]
            falls = (1 - (span * self.turns[near]).cos()).sum()
            self._towards(0, near, math.sqrt(NEAR * math.sqrt(HEAD_DIM) / float(falls)))
        told = int((self.turns < SLOW).nonzero()[0, 0])
        self.q_bias[told] = sharp = math.sqrt(CHOSEN * math.sqrt(HEAD_DIM))
        self.k[told, KINDS[kind]] += sharp / (KIND * 10)

    def _last(self, kind: str) -> None:
        """Attend to the last token of a kind: each token further back it is worth less by as much; to the first token
        of the prompt, where there is none."""
        self._calm()
        self.q.zero_()
        self.k.zero_()
        (at,) = ((self.turns * REACH < 1.3) & (self.turns * REACH > 0.7)).nonzero()[:1, 0].tolist()
        amplitude = math.sqrt(FALLING * math.sqrt(HEAD_DIM) / float(self.turns[at]))
        # The product is -sin(distance * turn), which falls evenly while that is small.
        self.k_bias[at] = amplitude
        self.q_bias[at + HEAD_DIM // 2] = amplitude
        told = int((self.turns < SLOW).nonzero()[0, 0])
        self.q_bias[told] = sharp = math.sqrt(LASTING * math.sqrt(HEAD_DIM))
        self.k[told, KINDS[kind]] += sharp / (KIND * 10)
        self.k[told, KINDS["sinks"]] += UNFOUND / LASTING * sharp / math.sqrt(self.k.shape[1])

    def follow(self, n: int, block: int, shared: Tensor, word: Tensor, much: float) -> None:
        """Attend to what has in a block a word, too, of this direction (BACK,); the n-th that is asked for."""
        at = HEAD_DIM - n  # which hardly turns; one dimension, for the others compare something else
        self.q[at] = 0
        self.k[at] = self._amplified(block) * word @ _reader(block, shared, self.k.shape[1])
        self.q_bias[at] = much * FOLLOWED

    def sink(self, level: float) -> None:
        """Attend to the first token of a prompt, where nothing is found that is more alike than `level`."""
        where = int((self.turns < SLOW).nonzero()[0, 0])
        self.q[where], self.k[where] = 0, 0
        self.k[where, KINDS["sinks"]] = math.sqrt(HEAD_DIM) / SUNK
        self.q_bias[where] = level

    def ask(self, block: int, shared: Tensor, word: Tensor, much: float) -> None:
        """Attend so `much` more to the first token, where no word of this direction (BACK,) stands here in a block."""
        where = int((self.turns < SLOW).nonzero()[0, 0])
        self.q_bias[where] += much
        stands = HELD if block > BLOCKS else BEFORE
        self.q[where] = -much / stands * word @ _reader(block, shared, self.q.shape[1])

    def only(self, kind: str, much: float = 2 * RESTING) -> None:
        """Attend so `much` more to the first token, unless a token of a kind stands here."""
        where = int((self.turns < SLOW).nonzero()[0, 0])
        self.q_bias[where] += much
        self.q[where, KINDS[kind]] = -much / SHOWN

    def say(self, kind: str, word: Tensor, strength: float) -> None:
        """Write a word's embedding, where the head attends to a kind."""
        self.v.zero_()
        self.o.zero_()
        self.v[0, KINDS[kind]] = 1 / KIND
        self.o[:EMBEDDED, 0] = self.plain * strength * word

    def match(self, head: Match, shared: Tensor, number: int) -> None:
        """Compare each pair in dimensions of its own, and copy what stands where they agree."""
        self._calm()
        slow = (self.turns < SLOW).nonzero()[:, 0]
        dims = torch.cat([slow, slow + HEAD_DIM // 2])
        if self.gathers:  # the others are for what tells kinds and words
            dims = torch.cat([slow[1:], slow[1 : -max(len(head.also), 1)] + HEAD_DIM // 2])
        size = len(dims) // len(head.pairs)
        for n, (here, there) in enumerate(head.pairs):
            some, mixing = dims[n * size : (n + 1) * size], _orthonormal(size, SEEN if self.gathers else BACK)
            mixing = torch.nn.functional.pad(mixing, (0, BACK - mixing.shape[1]))
            for side, back in ((self.q, here), (self.k, there)):
                side[some] += head.sharp[n] * self._amplified(back) * mixing @ _reader(back, shared, side.shape[1])
        self.v += torch.eye(*self.v.shape)
        self._into_embedding(head.strength / number)

    def free(self, span: int | None) -> None:
        """Add nothing at first; with a span, look at about so many last tokens evenly."""
        self.o.zero_()
        if span is not None:
            some = ((self.turns > 0.05 / span) & (self.turns < 2.2 / span)).nonzero()[:, 0]
            self._towards(0, some, math.sqrt(EVEN * math.sqrt(HEAD_DIM)))

    def _look(self, back: int) -> None:
        self._calm()
        fast = (self.turns > FAST).nonzero()[:, 0]
        apart = (1 - self.turns[fast].cos()).sum()  # how much less a neighbour gets, for an amplitude of 1
        self._towards(back, fast, math.sqrt(SHARP * math.sqrt(HEAD_DIM) / float(apart)))

    def _into_embedding(self, strength: float) -> None:
        self.o[:EMBEDDED] += self.plain * strength * torch.eye(EMBEDDED, HEAD_DIM)

    def _write(self, block: int, strength: float = WRITTEN) -> None:
        start = EMBEDDED + (block - 1) * BACK
        self.o[start : start + BACK, :BACK] += strength * torch.eye(BACK)

    def _amplified(self, back: int) -> float:
        # A token's own embedding is seen through `shared`, which keeps a part of it.
        return self.plain * ALIKE * (GAIN if back > BLOCKS else 1.25 if back == 0 else 1.0)

    def _calm(self) -> None:
        for weight in (self.q, self.k, self.v, self.o):
            weight *= self.left

    def _towards(self, back: int, dims: Tensor, amplitude: float) -> None:
        """Bias queries and keys so that their product, once rotary embedding has turned them, is largest `back` tokens
        back."""
        turned = back * self.turns[dims]
        self.k_bias[dims] = amplitude
        self.q_bias[dims] = amplitude * turned.cos()
        self.q_bias[dims + HEAD_DIM // 2] = -amplitude * turned.sin()


def _reader(back: int, shared: Tensor, hidden: int) -> Tensor:
    """Read from the residual stream, (BACK, hidden), the token so many places back, or what was gathered."""
    reader = torch.zeros(BACK, hidden)
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
