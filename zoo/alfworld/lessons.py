"""Lessons for the small models of real ALFWorld: actions for the executor, questions for the compiler base.

What a scene holds is to be read, not remembered: in every row the scenes' labels are exchanged at random, the same in
memory, goal and answers, so that no weights can know where FloorPlan21 keeps its mugs (and the labels of scenes that no
train game plays in are learned, too).
"""

from __future__ import annotations

import random
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Generic, TypeVar

import numpy as np
from transformers import PreTrainedTokenizerFast

from agent.expert import MOST
from compiler.language import render
from compiler.prompt import compiler_parts
from compiler.records import CompileRequest
from envs.trajectories import Fact
from lm.backbone import Backbone
from memory.entry import MemoryEntry
from zoo.alfworld.play import GO, READER, Example, Situation, Why
from zoo.alfworld.words import SCENES, THINGS
from zoo.curriculum import IGNORE, NOTHING, PROPOSED, REFUSED, Batch, pad
from zoo.lessons import Lesson, Talk, collate, questions

EMISSION, UNASKED = "emission", ""
TOLD, UNTOLD = 4, 2  # questions in a situation about what M tells and does not tell, at most
SEEN, UNSEEN = 3, 2  # and about things that are in view and that are not
_LISTED_THING = re.compile(r"\b([a-z]+) (\d+)")
NEAR = 16  # neighbours on either side, of one length, from which is drawn
RARE, TOLD_MORE = 0.35, 2.5
SHARES = {"named": 0.19, "left": 0.21, "exhausted": 0.04, "silent": 0.4, "rest": 0.16}  # of lessons: a place is named;
# one is, and others are ruled out (the hardest); M is at its end; something is looked for and nothing is said (the
# hardest to tell from the first two); nothing is looked for
AGAIN = "again"  # of what is told once something has been done: where one has been is to be left out
CARRIED = "carried"  # the kind of the ways with something in hand, or to something known
SIDE_BY_SIDE, DRAWN = 8, 6  # deeds of a row; of so many drawn, one is taken
BEGINS = ("\nguide:", "\ndid:", "\nsee:", "guide", "did", "see")  # what an episode's prompts have in common ends there
REFUSALS = 0.25  # of deeds after which one has been somewhere: ways there
MEMORY, GUIDE = "memory:", "guide:"  # as an executor's prompt says them
IDS = tuple(range(2**16))  # as many deeds hold the same ids, the same objects stand for them: a quarter of the RAM
T = TypeVar("T")
Ask = Callable[[Situation, random.Random], tuple[CompileRequest, Talk]]


class SceneLabels:
    """Exchanges the scenes' labels in token ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        ids = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"][0]
        self._labels = np.array([[ids(scene), ids(f" {scene}")] for scene in SCENES])
        self._size = len(tokenizer)

    def exchange(self, rng: random.Random) -> np.ndarray:
        """Draw an exchange, (V,): by token id the id that takes its place."""
        table = np.arange(self._size)
        order = list(range(len(SCENES)))
        rng.shuffle(order)
        table[self._labels] = self._labels[order]
        return table


class ByLength(Generic[T]):
    """Things in the order of their lengths, of which some of like length can be drawn."""

    def __init__(self, things: Iterable[T], length: Callable[[T], int]) -> None:
        self.things = sorted(things, key=length)
        self.lengths = [length(thing) for thing in self.things]

    def near(self, length: int, rng: random.Random) -> T:
        """Draw one of those that are nearest to a length."""
        at = min(max(bisect_left(self.lengths, length), NEAR), max(len(self.things) - NEAR, 0))
        return rng.choice(self.things[max(at - NEAR, 0) : at + NEAR])


# -- the executor -----------------------------------------------------------------------------------------------------


Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Deed:
    """An example as token ids: what all prompts of its episode begin with (the first view, M), the rest of the prompt,
    the commands that serve equally well, and, without their ends of turn, the ways that are told, the way to the next
    place, and the ways to where one has been."""

    given: Tokens
    prompt: Tokens
    wanted: tuple[Tokens, ...]
    told: tuple[Tokens, ...] = ()
    following: tuple[Tokens, ...] = ()  # one, or none where nothing is looked for
    been: tuple[Tokens, ...] = ()


def deed(tokenizer: PreTrainedTokenizerFast, example: Example) -> Deed:
    """Encode an example as `executor.base.TokenExecutor` does."""
    ids: Callable[[Any], list[int]] = lambda text: _shared(tokenizer(text, add_special_tokens=False)["input_ids"])
    chat = [{"role": "user", "content": example.prompt}]
    prompt = ids(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
    begins = {ids(joint)[0] for joint in BEGINS}
    at = next((i for i, token in enumerate(prompt) if token in begins), 1)
    end: Any = tokenizer.eos_token_id
    all_of: Callable[[Iterable[str]], tuple[Tokens, ...]] = lambda texts: tuple(tuple(ids(text)) for text in texts)
    choice = example.choice
    return Deed(
        tuple(prompt[:at]),
        tuple(prompt[at:]),
        tuple((*command, end) for command in all_of(choice.commands)),
        all_of(choice.told),
        all_of(filter(None, [choice.following])),
        all_of(choice.been),
    )


def _shared(ids: Iterable[int]) -> list[int]:
    return [IDS[i] for i in ids]


def deed_batch(
    labels: SceneLabels, rows: Sequence[Sequence[Deed]], rng: random.Random, pad_id: int, refused: int
) -> Batch:
    """Make a batch of rows of deeds, as many in each, that have one beginning: it is read once, as `given`, padded on
    the left; behind it each deed with one of its commands (`_drawn`)."""
    begun, ids, targets, equals = [], [], [], []
    for deeds in rows:
        exchanged = labels.exchange(rng)
        begun.append(exchanged[list(deeds[0].given)].tolist())
        for each in deeds:
            command, serving = _drawn(each, rng, refused)
            ids.append(exchanged[[*each.prompt, *command]].tolist())
            goals = [token if allowed else IGNORE for token, allowed in zip(command, serving, strict=True)]
            targets.append([IGNORE] * len(each.prompt) + goals)
            equals += [sorted(allowed) for allowed in serving if allowed]
    given = pad([row[::-1] for row in begun], pad_id).flip(1)
    seen = pad([[1] * len(row) for row in begun], 0).flip(1)
    return {
        "input_ids": pad(ids, pad_id),
        "labels": pad(targets, IGNORE),
        "equals": pad(equals, IGNORE),
        "given": given,
        "given_mask": seen,
    }


def _drawn(deed: Deed, rng: random.Random, refused: int) -> tuple[Tokens, list[set[int]]]:
    """Draw a command with its end, and list the tokens that are right at each of its places, none where nothing is to
    be predicted.

    What serves is learned in two parts. Where one looks for something, goal, memory and view *propose* a way, whether
    one has been there or not: `PROPOSED` of the time one that is told, where any is, else the one to the next place.
    And at its end a way *is refused*, if one has been there, which ends no turn; there the place stands in the command
    itself, to be looked up among the deeds. `REFUSALS` of the deeds are ways to where one has been, for that alone."""
    end = deed.wanted[0][-1]
    if deed.been and rng.random() < REFUSALS:
        command = (*rng.choice(deed.been), refused)
        return command, [*([set[int]()] * (len(command) - 1)), {refused}]
    if not (deed.told and deed.following):
        command = rng.choice(deed.wanted)
        return command, _equals(command, deed.wanted)
    way = rng.choice(deed.told if rng.random() < PROPOSED else deed.following)  # each of them, not any: no set
    command = (*way, refused if way in deed.been else end)
    return command, [{token} for token in command]


def _equals(command: Tokens, commands: Sequence[Tokens]) -> list[set[int]]:
    """List the tokens by which commands go on that begin as this one does."""
    return [{c[i] for c in commands if c[:i] == command[:i]} for i in range(len(command))]


def kind_of(example: Example) -> tuple[str, str]:
    """Say what decides a deed: what the prompt has beside goal and view, and what it comes to."""
    given = next((name for name in (MEMORY, GUIDE) if f"\n{name}" in f"\n{example.prompt}"), "")
    verb, why = example.choice.commands[0].partition(" ")[0], example.choice.why
    if why is Why.TOLD:
        return given, AGAIN if "\ndid: " in example.prompt else Why.TOLD
    return given, CARRIED if verb == "go" and why is Why.PLAN else verb


class DeedDraws:
    """Batches of deeds, with M or without it: `rows` of `SIDE_BY_SIDE` that have one beginning, of like length. Kinds
    of deeds are drawn by their number to the power of `RARE`, for what is rare in games has to be learned, too, and
    what guidance or memory says `TOLD_MORE` times as often. `short`: the shortest third of each kind without M alone,
    all kinds alike."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example], rows: int, short: bool = False
    ) -> None:
        kinds, begun = dict[tuple[str, str], list[Deed]](), dict[tuple[int, ...], tuple[int, ...]]()
        for example in examples:
            kind = kind_of(example)
            if not (short and kind[0] == MEMORY):
                made = deed(tokenizer, example)
                made = replace(made, given=begun.setdefault(made.given, made.given))  # an episode's deeds share it
                kinds.setdefault(kind, []).append(made)
        if short:
            kinds = {kind: sorted(deeds, key=_tokens)[: -(-len(deeds) // 3)] for kind, deeds in kinds.items()}
        self._shares = {
            kind: 1.0 if short else len(deeds) ** RARE * (TOLD_MORE if kind[1] in (Why.TOLD, AGAIN) else 1)
            for kind, deeds in kinds.items()
        }
        self._pools = {kind: ByLength(deeds, lambda deed: len(deed.given)) for kind, deeds in kinds.items()}
        self._alike = dict[tuple[bool, tuple[int, ...]], dict[tuple[str, str], list[Deed]]]()
        for kind, deeds in kinds.items():
            for each in deeds:
                self._alike.setdefault((kind[0] == MEMORY, each.given), {}).setdefault(kind, []).append(each)
        self._labels, self._rows = SceneLabels(tokenizer), rows
        self._pad_id: int = tokenizer.pad_token_id  # type: ignore[assignment]
        self._refused: int = tokenizer(REFUSED, add_special_tokens=False)["input_ids"][0]

    def draw(self, rng: random.Random) -> Batch:
        """Draw a batch."""
        memory = self._kinds(self._shares, rng, 1)[0][0] == MEMORY
        firsts = self._kinds([kind for kind in self._shares if (kind[0] == MEMORY) == memory], rng, self._rows)
        given = rng.choice(self._pools[firsts[0]].lengths)
        length = len(self._pools[firsts[0]].near(given, rng).prompt)
        first = lambda kind: _like(length, lambda: self._pools[kind].near(given, rng))
        rows = [self._row(first(kind), memory, length, rng) for kind in firsts]
        return deed_batch(self._labels, rows, rng, self._pad_id, self._refused)

    def _row(self, first: Deed, memory: bool, length: int, rng: random.Random) -> list[Deed]:
        """Put others of the same beginning beside a deed."""
        alike = self._alike[memory, first.given]
        kinds = self._kinds(alike, rng, SIDE_BY_SIDE - 1)
        return [first, *(_like(length, partial(rng.choice, alike[kind])) for kind in kinds)]

    def _kinds(self, kinds: Collection[tuple[str, str]], rng: random.Random, number: int) -> list[tuple[str, str]]:
        return rng.choices(list(kinds), [self._shares[kind] for kind in kinds], k=number)


def _like(length: int, draw: Callable[[], Deed]) -> Deed:
    """Draw a few deeds and return the one whose prompt is nearest to a length: less is padded."""
    return min((draw() for _ in range(DRAWN)), key=lambda deed: abs(len(deed.prompt) - length))


def _tokens(deed: Deed) -> int:
    return len(deed.given) + len(deed.prompt)


# -- the compiler base ------------------------------------------------------------------------------------------------


def talk_of(situation: Situation, rng: random.Random) -> Talk:
    """List what may be asked in a situation, in random order, with the answers.

    Of M: where a scene's entries met a need, which some tell and some do not. And what `state_talk` asks; and the
    emission. Places begin with the space that they have in M, without which they would be other tokens.
    """
    told = dict[tuple[str, str], dict[str, None]]()
    for entry in situation.request.memory:
        for fact in _facts(entry):
            told.setdefault((entry.provenance.scene, fact.need), {})[fact.place] = None
    scenes, needs = (dict.fromkeys(pair[i] for pair in told) for i in (0, 1))
    untold = [pair for pair in product(scenes, needs) if pair not in told]
    talk = [(EMISSION, render(situation.emission)), *state_talk(situation, rng)]
    for scene, need in (*_some(told, TOLD, rng), *_some(untold, UNTOLD, rng)):
        talk.append((f"in {scene} {need}", _listed(told.get((scene, need), ()))))
    return rng.sample(talk, len(talk))


def state_talk(situation: Situation, rng: random.Random) -> Talk:
    """List what may be asked of view and Brief State, in random order: what is looked for, which places are left of
    those that M names (best first, six at most), which is the best, what is noted now; and of some things, that which
    is looked for among them, which of them are in view (by number: what is to be copied forms, "yes" and "no" do not).
    """
    search, found = situation.search, _in_view(situation.request.observation)
    talk = [("notes", render(replace(situation.emission, guidance="", reason="")))]
    asked = {*_some(found, SEEN, rng), *rng.sample(THINGS, UNSEEN)}
    if search is None:
        talk.append(("search", NOTHING))
    else:
        talk.append(("search", search.need))
        thing = READER.thing(search.need)
        talk += [(f"left for {thing}", _listed(search.places[:MOST])), ("best", _listed(search.places[:1]))]
        asked |= {thing} if search.need.startswith("find ") else set()
    talk += [(f"here {thing}", _listed(found.get(thing, ()))) for thing in sorted(asked)]
    return rng.sample(talk, len(talk))


def _in_view(observation: str) -> dict[str, list[str]]:
    """List the things in view with their numbers, in the view's order."""
    found = dict[str, list[str]]()
    for thing, number in _LISTED_THING.findall(observation.partition(" you see ")[2]):
        if thing in THINGS:
            found.setdefault(thing, []).append(number)
    return found


def _some(pool: Collection[T], most: int, rng: random.Random) -> list[T]:
    return rng.sample(list(pool), min(most, len(pool)))


def _facts(entry: MemoryEntry) -> list[Fact]:
    return READER.facts(entry.provenance.actions)


def _listed(places: Iterable[str]) -> str:
    return f" {', '.join(places) or NOTHING}"


class LessonDraws:
    """Batches of lessons on situations of like length, in `SHARES`."""

    def __init__(self, backbone: Backbone, situations: Sequence[Situation], size: int, ask: Ask) -> None:
        self._backbone, self._size, self._ask = backbone, size, ask
        self._labels = SceneLabels(backbone.tokenizer)
        kinds = dict[str, list[Situation]]()
        for each in situations:
            kinds.setdefault(_kind(each), []).append(each)
        self._pools = [ByLength(pool, _length) for pool in kinds.values()]
        self._shares = [SHARES[kind] for kind in kinds]

    def draw(self, rng: random.Random) -> Batch:
        """Draw a batch."""
        length = rng.choice(rng.choices(self._pools, self._shares)[0].lengths)
        chosen = [pool.near(length, rng) for pool in rng.choices(self._pools, self._shares, k=self._size)]
        return collate(self._backbone, [self._lesson(situation, rng) for situation in chosen])

    def _lesson(self, situation: Situation, rng: random.Random) -> Lesson:
        request, talk = self._ask(situation, rng)
        lesson, exchanged = questions(self._backbone, request, talk), self._labels.exchange(rng)
        labels = [label if label == IGNORE else int(exchanged[label]) for label in lesson.labels]
        return Lesson(replace(lesson.prompt, ids=tuple(exchanged[list(lesson.prompt.ids)].tolist())), tuple(labels))


def _kind(situation: Situation) -> str:
    search, guidance = situation.search, situation.emission.guidance
    if guidance.startswith(GO):
        return "left" if search and search.ruled_out else "named"
    return "exhausted" if guidance else "silent" if search else "rest"


def ask_state(situation: Situation, rng: random.Random) -> tuple[CompileRequest, Talk]:
    """Ask of view and Brief State alone, behind a prompt without M."""
    return replace(situation.request, memory=()), state_talk(situation, rng)


def ask_emission(situation: Situation, rng: random.Random) -> tuple[CompileRequest, Talk]:
    """Ask for the emission alone."""
    return situation.request, [(EMISSION, render(situation.emission))]


def ask_nothing(situation: Situation, rng: random.Random) -> tuple[CompileRequest, Talk]:
    """Let the emission follow the prompt as it is: a compiler's own task."""
    return situation.request, [(UNASKED, render(situation.emission))]


def without_memory(situations: Iterable[Situation]) -> list[Situation]:
    """Keep those whose emission follows from view and Brief State, and take M from them: nothing is said, or what is
    said is noted already, of this scene and by its own name."""
    kept = []
    for each in situations:
        said, state = each.emission, each.request.state
        place, scene = said.guidance.removeprefix(GO), each.request.goal.partition(":")[0]
        noted = said.reason.startswith(scene) and said.reason.endswith(f" was in {place}")
        if state is not None and state.current and (noted or not said.guidance):
            kept.append(replace(each, request=replace(each.request, memory=())))
    return kept


def ask_all(situation: Situation, rng: random.Random, emission_first: float) -> tuple[CompileRequest, Talk]:
    """Ask all; a share of the lessons begins with the emission, as it will be asked for."""
    talk = list(talk_of(situation, rng))
    if rng.random() < emission_first:
        talk.sort(key=lambda turn: turn[0] != EMISSION)
    return situation.request, talk


def _length(situation: Situation) -> int:
    return sum(len(part.text) for part in compiler_parts(situation.request, images=False))
