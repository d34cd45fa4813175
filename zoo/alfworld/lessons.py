"""Lessons of the small models of real ALFWorld: actions for the executor, questions for the compiler base.

Every row permutes the scene labels at random, equally in memory, goal and answers, so that weights cannot memorise
places by scene and also learn the labels of scenes without train games.
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
import torch
from transformers import PreTrainedTokenizerFast

from agent.expert import MOST
from compiler.language import render
from compiler.prompt import compiler_parts
from compiler.records import CompileRequest
from envs.command_reader import Fact
from lm.backbone import Backbone
from memory.entry import MemoryEntry
from zoo.alfworld.play import GO, READER, ChoiceSource, ScriptedStep, TeacherStep
from zoo.alfworld.words import SCENES, THINGS
from zoo.curriculum import IGNORE, NOTHING, PROPOSED, REFUSED, Batch, pad
from zoo.lessons import Dialogue, Lesson, collate, request_lesson

EMISSION, UNASKED = "emission", ""
KNOWN, UNKNOWN = 4, 2  # maximum questions on known and unknown facts of M
SEEN, UNSEEN = 3, 2  # maximum questions on things in view and out of view
_LISTED_THING = re.compile(r"\b([a-z]+) (\d+)")
NEAR = 16  # items on either side to draw from
RARE, GIVEN_WEIGHT = 0.35, 2.5
# Proportions of lessons: a place is named; a place is named and others are excluded (hardest); M is exhausted; a search
# without guidance (hardest to distinguish from the first two); no search.
SHARES = {"named": 0.19, "left": 0.21, "exhausted": 0.04, "silent": 0.4, "rest": 0.16}
AGAIN = "again"  # kind of steps with named places after an action, which exclude visited ones
CARRIED = "carried"  # kind of ways with something in hand or to a known thing
SIDE_BY_SIDE, DRAWN = 8, 6  # steps of a row; candidates for each
# Tokens that end the shared beginning of an episode's prompts.
BEGINS = ("\nguide:", "\ndid:", "\nsee:", "guide", "did", "see")
REFUSALS = 0.25  # share of refusal lessons among steps that have visited ways
MEMORY, GUIDE = "memory:", "guide:"  # in an executor's prompt
IDS = tuple(range(2**16))  # shared int objects: encoded steps take a quarter of the memory
T = TypeVar("T")
Ask = Callable[[TeacherStep, random.Random], tuple[CompileRequest, Dialogue]]


class SceneLabels:
    """Random permutations of the scene labels' token ids."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        ids = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"][0]
        self._labels = np.array([[ids(scene), ids(f" {scene}")] for scene in SCENES])
        self._size = len(tokenizer)

    def exchange(self, rng: random.Random) -> np.ndarray:
        """Draw a permutation (V,): the new id of each token id."""
        table = np.arange(self._size)
        order = list(range(len(SCENES)))
        rng.shuffle(order)
        table[self._labels] = self._labels[order]
        return table


class LengthPool(Generic[T]):
    """Items sorted by length, to draw items of similar length."""

    def __init__(self, things: Iterable[T], length: Callable[[T], int]) -> None:
        self.things = sorted(things, key=length)
        self.lengths = [length(thing) for thing in self.things]

    def near(self, length: int, rng: random.Random) -> T:
        """Draw one of the items nearest to a length."""
        at = min(max(bisect_left(self.lengths, length), NEAR), max(len(self.things) - NEAR, 0))
        return rng.choice(self.things[max(at - NEAR, 0) : at + NEAR])


Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EncodedStep:
    """A scripted step as token ids; ways have no end of turn."""

    given: Tokens  # shared beginning of the episode's prompts: first view and M
    prompt: Tokens  # rest of the prompt
    wanted: tuple[Tokens, ...]  # equally good commands
    known: tuple[Tokens, ...] = ()  # ways to known places
    following: tuple[Tokens, ...] = ()  # the way to the next place; empty without a search
    visited: tuple[Tokens, ...] = ()  # ways to visited places


def encode_step(tokenizer: PreTrainedTokenizerFast, example: ScriptedStep) -> EncodedStep:
    """Encode a scripted step as executors do."""
    ids: Callable[[Any], list[int]] = lambda text: _shared(tokenizer(text, add_special_tokens=False)["input_ids"])
    chat = [{"role": "user", "content": example.prompt}]
    prompt = ids(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
    begins = {ids(joint)[0] for joint in BEGINS}
    at = next((i for i, token in enumerate(prompt) if token in begins), 1)
    end: Any = tokenizer.eos_token_id
    all_of: Callable[[Iterable[str]], tuple[Tokens, ...]] = lambda texts: tuple(tuple(ids(text)) for text in texts)
    choice = example.choice
    return EncodedStep(
        tuple(prompt[:at]),
        tuple(prompt[at:]),
        wanted=tuple((*command, end) for command in all_of(choice.commands)),
        known=all_of(choice.known),
        following=all_of(filter(None, [choice.following])),
        visited=all_of(choice.visited),
    )


def _shared(ids: Iterable[int]) -> list[int]:
    return [IDS[i] for i in ids]


def step_batch(
    labels: SceneLabels, rows: Sequence[Sequence[EncodedStep]], rng: random.Random, pad_id: int, refused: int
) -> Batch:
    """Batch rows of steps, each with a drawn command; the model reads a row's shared beginning once."""
    begun, ids, targets, equals = [], [], [], []
    for steps in rows:
        exchanged = labels.exchange(rng)
        begun.append(exchanged[list(steps[0].given)].tolist())
        for each in steps:
            command, serving = _draw_command(each, rng, refused)
            ids.append(exchanged[[*each.prompt, *command]].tolist())
            goals = [token if allowed else IGNORE for token, allowed in zip(command, serving, strict=True)]
            targets.append([IGNORE] * len(each.prompt) + goals)
            equals += [sorted(allowed) for allowed in serving if allowed]
    return {
        "input_ids": pad(ids, pad_id),
        "labels": pad(targets, IGNORE),
        "equals": pad(equals, IGNORE),
        **beginnings(begun, [len(steps) for steps in rows], pad_id),
    }


def beginnings(begun: list[list[int]], behind: Sequence[int], pad_id: int) -> Batch:
    """Pad shared beginnings; `behind` rows continue each."""
    lengths = torch.tensor([len(row) for row in begun])
    return {"given": pad(begun, pad_id), "given_lengths": lengths, "behind": torch.tensor(behind)}


def _draw_command(step: EncodedStep, rng: random.Random, refused: int) -> tuple[Tokens, list[set[int]]]:
    """Draw a command with its end, and the set of right tokens at each position (empty: no prediction).

    A search has two parts. Goal, memory and view propose a way, visited or not: with probability `PROPOSED` to a known
    place, otherwise to the next one. Then the token `refused` ends a visited way instead of the end of turn, since the
    model can look up a complete command among the actions. A share `REFUSALS` of the steps trains the refusal only.
    """
    end = step.wanted[0][-1]
    if step.visited and rng.random() < REFUSALS:
        command = (*rng.choice(step.visited), refused)
        return command, [*([set[int]()] * (len(command) - 1)), {refused}]
    if not (step.known and step.following):
        command = rng.choice(step.wanted)
        return command, _equals(command, step.wanted)
    way = rng.choice(step.known if rng.random() < PROPOSED else step.following)
    command = (*way, refused if way in step.visited else end)
    return command, [{token} for token in command]


def _equals(command: Tokens, commands: Sequence[Tokens]) -> list[set[int]]:
    """List the tokens that continue commands with the same prefix, by position."""
    return [{c[i] for c in commands if c[:i] == command[:i]} for i in range(len(command))]


def kind_of(example: ScriptedStep) -> tuple[str, str]:
    """Return the kind of a step: the help in its prompt, and the kind of command that follows."""
    given = next((name for name in (MEMORY, GUIDE) if f"\n{name}" in f"\n{example.prompt}"), "")
    verb, why = example.choice.commands[0].partition(" ")[0], example.choice.source
    if why is ChoiceSource.GIVEN:
        return given, AGAIN if "\ndid: " in example.prompt else ChoiceSource.GIVEN
    return given, CARRIED if verb == "go" and why is ChoiceSource.PLAN else verb


class ExecutorBatches:
    """Batches of `rows` rows of `SIDE_BY_SIDE` executor steps, which share a beginning and have similar lengths.

    A kind's share is proportional to its number of steps to the power `RARE`, times `GIVEN_WEIGHT` if guidance or
    memory decides.

    Args:
        short: use only the shortest third of each kind, without M, in equal shares.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, examples: Sequence[ScriptedStep], rows: int, short: bool = False
    ) -> None:
        kinds, begun = dict[tuple[str, str], list[EncodedStep]](), dict[tuple[int, ...], tuple[int, ...]]()
        for example in examples:
            kind = kind_of(example)
            if not (short and kind[0] == MEMORY):
                encoded = encode_step(tokenizer, example)
                # The steps of an episode share this object.
                made = replace(encoded, given=begun.setdefault(encoded.given, encoded.given))
                kinds.setdefault(kind, []).append(made)
        if short:
            kinds = {kind: sorted(steps, key=_tokens)[: -(-len(steps) // 3)] for kind, steps in kinds.items()}
        self._shares = {
            kind: 1.0 if short else len(steps) ** RARE * (GIVEN_WEIGHT if kind[1] in (ChoiceSource.GIVEN, AGAIN) else 1)
            for kind, steps in kinds.items()
        }
        self._pools = {kind: LengthPool(steps, lambda step: len(step.given)) for kind, steps in kinds.items()}
        self._alike = dict[tuple[bool, tuple[int, ...]], dict[tuple[str, str], list[EncodedStep]]]()
        for kind, steps in kinds.items():
            for each in steps:
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
        return step_batch(self._labels, rows, rng=rng, pad_id=self._pad_id, refused=self._refused)

    def _row(self, first: EncodedStep, memory: bool, length: int, rng: random.Random) -> list[EncodedStep]:
        """Draw a row: a step and others of the same beginning."""
        alike = self._alike[memory, first.given]
        kinds = self._kinds(alike, rng, SIDE_BY_SIDE - 1)
        return [first, *(_like(length, partial(rng.choice, alike[kind])) for kind in kinds)]

    def _kinds(self, kinds: Collection[tuple[str, str]], rng: random.Random, number: int) -> list[tuple[str, str]]:
        return rng.choices(list(kinds), [self._shares[kind] for kind in kinds], k=number)


def _like(length: int, draw: Callable[[], EncodedStep]) -> EncodedStep:
    """Draw a few steps and return the one whose prompt length is nearest to `length`, to save padding."""
    return min((draw() for _ in range(DRAWN)), key=lambda step: abs(len(step.prompt) - length))


def _tokens(step: EncodedStep) -> int:
    return len(step.given) + len(step.prompt)


def all_questions(situation: TeacherStep, rng: random.Random) -> Dialogue:
    """List the questions on a state with their answers, in random order: places of M by scene and need, some of them
    unknown; `state_questions`; and the emission. Places begin with a space, as in M, to be the same tokens."""
    known = dict[tuple[str, str], dict[str, None]]()
    for entry in situation.request.memory:
        for fact in _facts(entry):
            known.setdefault((entry.provenance.scene, fact.need), {})[fact.place] = None
    scenes, needs = (dict.fromkeys(pair[i] for pair in known) for i in (0, 1))
    unknown = [pair for pair in product(scenes, needs) if pair not in known]
    dialogue = [(EMISSION, render(situation.emission)), *state_questions(situation, rng)]
    for scene, need in (*_some(known, KNOWN, rng), *_some(unknown, UNKNOWN, rng)):
        dialogue.append((f"in {scene} {need}", _listed(known.get((scene, need), ()))))
    return rng.sample(dialogue, len(dialogue))


def state_questions(situation: TeacherStep, rng: random.Random) -> Dialogue:
    """List the questions on view and Brief State, in random order: the searched thing, M's remaining places (best
    first), the best one, this step's notes, and the numbers of some things in view (models can copy numbers)."""
    search, found = situation.search, _in_view(situation.request.observation)
    dialogue = [("notes", render(replace(situation.emission, guidance="", reason="")))]
    asked = {*_some(found, SEEN, rng), *rng.sample(THINGS, UNSEEN)}
    if search is None:
        dialogue.append(("search", NOTHING))
    else:
        dialogue.append(("search", search.need))
        thing = READER.thing(search.need)
        dialogue += [(f"left for {thing}", _listed(search.places[:MOST])), ("best", _listed(search.places[:1]))]
        asked |= {thing} if search.need.startswith("find ") else set()
    dialogue += [(f"here {thing}", _listed(found.get(thing, ()))) for thing in sorted(asked)]
    return rng.sample(dialogue, len(dialogue))


def _in_view(observation: str) -> dict[str, list[str]]:
    """List the numbers of things in view, by thing."""
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


class CompilerBatches:
    """Batches of compiler lessons on states of similar length, in the proportions of `SHARES`."""

    def __init__(self, backbone: Backbone, situations: Sequence[TeacherStep], size: int, ask: Ask) -> None:
        self._backbone, self._size, self._ask = backbone, size, ask
        self._labels = SceneLabels(backbone.tokenizer)
        kinds = dict[str, list[TeacherStep]]()
        for each in situations:
            kinds.setdefault(_kind(each), []).append(each)
        self._pools = [LengthPool(pool, _length) for pool in kinds.values()]
        self._shares = [SHARES[kind] for kind in kinds]

    def draw(self, rng: random.Random) -> Batch:
        """Draw a batch."""
        length = rng.choice(rng.choices(self._pools, self._shares)[0].lengths)
        chosen = [pool.near(length, rng) for pool in rng.choices(self._pools, self._shares, k=self._size)]
        return collate(self._backbone, [self._lesson(situation, rng) for situation in chosen])

    def _lesson(self, situation: TeacherStep, rng: random.Random) -> Lesson:
        request, dialogue = self._ask(situation, rng)
        lesson, exchanged = request_lesson(self._backbone, request, dialogue), self._labels.exchange(rng)
        labels = [label if label == IGNORE else int(exchanged[label]) for label in lesson.labels]
        return Lesson(replace(lesson.prompt, ids=tuple(exchanged[list(lesson.prompt.ids)].tolist())), tuple(labels))


def _kind(situation: TeacherStep) -> str:
    search, guidance = situation.search, situation.emission.guidance
    if guidance.startswith(GO):
        return "left" if search and search.ruled_out else "named"
    return "exhausted" if guidance else "silent" if search else "rest"


def ask_state(situation: TeacherStep, rng: random.Random) -> tuple[CompileRequest, Dialogue]:
    """Ask about view and Brief State, after a prompt without M."""
    return replace(situation.request, memory=()), state_questions(situation, rng)


def ask_emission(situation: TeacherStep, rng: random.Random) -> tuple[CompileRequest, Dialogue]:
    """Ask for the emission only."""
    return situation.request, [(EMISSION, render(situation.emission))]


def ask_nothing(situation: TeacherStep, rng: random.Random) -> tuple[CompileRequest, Dialogue]:
    """Let the emission follow the prompt directly, as for a compiler."""
    return situation.request, [(UNASKED, render(situation.emission))]


def without_memory(situations: Iterable[TeacherStep]) -> list[TeacherStep]:
    """Return, without M, the states whose emission follows from view and Brief State: no guidance, or a place of this
    scene that the Brief State notes."""
    kept = []
    for each in situations:
        emission, state = each.emission, each.request.state
        place, scene = emission.guidance.removeprefix(GO), each.request.goal.partition(":")[0]
        noted = emission.reason.startswith(scene) and emission.reason.endswith(f" was in {place}")
        if state is not None and state.current and (noted or not emission.guidance):
            kept.append(replace(each, request=replace(each.request, memory=())))
    return kept


def ask_all(situation: TeacherStep, rng: random.Random, emission_first: float) -> tuple[CompileRequest, Dialogue]:
    """Ask all questions, in a share `emission_first` of the cases with the emission first."""
    dialogue = list(all_questions(situation, rng))
    if rng.random() < emission_first:
        dialogue.sort(key=lambda turn: turn[0] != EMISSION)
    return situation.request, dialogue


def _length(situation: TeacherStep) -> int:
    return sum(len(part.text) for part in compiler_parts(situation.request, images=False, history=0))
