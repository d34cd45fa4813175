"""Compiler of commands for a frozen public executor on real ALFWorld: the shipped compiler base, trained further.

    memcompiler zoo compiler --world alfworld-frozen --out OUT

The base `zoo/alfworld/compiler` gets tokens for the words of commands and raw entries, then learns the emissions of
the teacher of level `command` (`agent.command_teacher`) behind real compile prompts. Half of the episodes recall no
entry of their own scene, and some recall nothing or other kinds of tasks, where the teacher is silent. Scene labels
are exchanged at random and, in half of the episodes, the numbers of things, so that they have to be read and not
guessed. A batch has many episodes and few states of each, since a look-up is learned from different memories. The
stages:

1. `small_homes`: first states of many games behind one M of one to four entries, in homes of which only a few places
   are left. Such prompts are half as long as the others, so that the look-ups in M are learned in minutes.
2. `commands`: half of the states are first states in whole homes behind four entries. An agent that follows the
   teacher's commands, and strays at some steps, visits the other half.
3. `own_states`: a third of the states come from an agent that follows the compiler of the stage before, with the Brief
   States that it wrote (DAgger, Ross et al. 2011). From now on the states of all subgoals are equally frequent, since
   most of an episode is search and what fails is to put things down; and half of the episodes also exchange the numbers
   of places ("sofa 1" was said where the notes had sofa 2).
4. `play`: the same with other games, without first states, and with more states of an episode.
5. `review`: the same with other games again, and a third of first states, which `play` makes a model forget in part.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import cycle, islice
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

import numpy as np
import torch
from tqdm.auto import tqdm
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from agent.command_teacher import CommandTeacher
from agent.deliveries import Delivery
from agent.episode import EpisodeSpec
from agent.records import EpisodeContext
from compiler.brief_state import BriefState
from compiler.prompt import compiler_parts
from compiler.records import Compilation, Compiler, CompileRequest
from configs.evaluation import EvalMemoryConfig
from data_gen.recall_mix import RecallMix
from envs.alfworld.environment import AlfworldSettings
from envs.household.engine import enumerated
from envs.household.errands import (
    kind_of,
    kind_of_episode,
    listed_places,
    place_notes,
    read_errand,
    shown_notes,
    steps_of,
)
from executor.prompt import ExecutorRequest
from executor.records import Action, ExecutorView, Grounding
from lm.backbone import Backbone
from memory.entry import MemoryEntry
from zoo import stages
from zoo.alfworld.lessons import LengthPool, SceneLabels, beginnings
from zoo.alfworld.play import READER, K, Make, games_and_bank, run_games
from zoo.alfworld.text_compilers import ENTRIES, Engine, load_text_compiler
from zoo.alfworld.words import COMMAND_LEXICON, NUMBERS
from zoo.curriculum import IGNORE, Batch, pad
from zoo.models import make_tokenizer, save
from zoo.recipes import train_stage, write_model
from zoo.words import PLACES

Level: TypeAlias = Literal["command", "subgoal"]

BASE = Path("zoo/alfworld/compiler")
EXAM_OF = 25  # every 25th game is held out for the exam
STRAYS = 0.2  # share of steps at which the agent takes a random command
STEPS = 30  # of an episode
QUESTIONS = 16  # first states that are asked of an M
STATES = (
    3  # most states of an episode in a batch; with 8, half as many episodes fit and look-ups are learned more slowly
)
PLAY_STATES = 6  # in the last two stages
RATE = 2e-3
KIND_SHARE = 0.7  # of a kind's embedding in those of its places, at the beginning
MIX = {"own_scene": 0.5, "nothing": 0.06, "other_kinds": 0.06}
SMALL_HOMES, COMMANDS, SUBGOALS = "small_homes", "commands", "subgoals"
OWN_STATES, PLAY, REVIEW = "own_states", "play", "review"
STAGES = (SMALL_HOMES, COMMANDS, OWN_STATES, PLAY, REVIEW)
MEMORIES = 16  # per batch of the first stage
MOST_PLACES = 8  # of a small home
ASKED = {(True, True): 7, (False, True): 3, (True, False): 3}
"""First states behind an M by what it knows, their kind of task and their thing; those of any games are the rest."""
GAMES = 1500  # that the teacher plays
OWN_GAMES = 300  # that the compiler of the stage before plays
CHUNK = 128  # games whose states are in memory at once


def train_compiler(
    out: Path,
    work: Path,
    seed: int = 0,
    games: int | None = None,
    small_steps: int = 300,
    steps: int = 450,
    rows: int = 12,
    base: Path = BASE,
    rate: float = RATE,
    own_games: int = OWN_GAMES,
    own_steps: int = 250,
    play_steps: int = 260,
    review_steps: int = 400,
    engine: Engine = "hf",
) -> None:
    """Train the compiler of commands.

    Args:
        games: number of train games (default: all).
        small_steps, steps: optimizer steps of the first two stages.
        rows: episodes per batch of the other stages, of up to `STATES` states each.
        base: folder of the compiler base.
        rate: peak learning rate of the first stage; a quarter of it in `own_states`, half in the others.
        own_games: number of train games that the compiler plays before each stage on its own states.
        own_steps, play_steps, review_steps: optimizer steps of the stages with states that it reached.
        engine: what plays their games; vLLM is four times as fast.
    """
    tokenizer = make_tokenizer(COMMAND_LEXICON)
    make_env, specs = material(work, seed, games)
    learned, held_out = [spec for i, spec in enumerate(specs) if i % EXAM_OF], specs[::EXAM_OF]
    model = _first_model(work, base, tokenizer, seed)
    backbone = Backbone(model, tokenizer)
    parts = [EpisodeStates(make_env, of, seed, backbone) for of in (learned, held_out)]
    if not stages.finished(work / SMALL_HOMES):
        batches = [EpisodeBatches(tokenizer, (part.asked(SMALL_HOMES),), MEMORIES) for part in parts]
        model = _train(model, work, SMALL_HOMES, seed, small_steps, batches, rate)
    unfinished = [] if stages.finished(work / REVIEW) else parts
    firsts = [part.asked(COMMANDS) for part in unfinished]
    taught = [replace(part, specs=evenly(part.specs, GAMES, seed)).play() for part in unfinished]
    if not stages.finished(work / COMMANDS):
        batches = [EpisodeBatches(tokenizer, sources, rows) for sources in zip(taught, firsts, strict=True)]
        model = _train(model, work, COMMANDS, seed, steps, batches, rate / 2)
    later = (
        (OWN_STATES, own_steps, rate / 4, STATES, [firsts]),
        (PLAY, play_steps, rate / 2, PLAY_STATES, []),
        (REVIEW, review_steps, rate / 2, PLAY_STATES, [firsts]),
    )
    for i, (name, count, peak, states, others) in enumerate(later):
        if stages.finished(work / name):
            continue
        save(work / "player", model, tokenizer)
        player = load_text_compiler(str(work / "player"), engine=engine)
        some = evenly(learned, own_games, seed + i), evenly(held_out, max(own_games // 10, 1), seed + i)
        played = [replace(part, specs=of).play(player) for part, of in zip(parts, some, strict=True)]
        del player
        sources = zip(taught, played, *others, strict=True)
        batches = [EpisodeBatches(tokenizer, of, rows, states, later=True) for of in sources]
        model = _train(model, work, name, seed, count, batches, peak)
    settings = {
        "seed": seed,
        "games": games,
        "small_steps": small_steps,
        "steps": steps,
        "rows": rows,
        "rate": rate,
        "base": str(base),
        "own_games": own_games,
        "own_steps": own_steps,
        "play_steps": play_steps,
        "review_steps": review_steps,
    }
    write_model(
        f"compiler --world alfworld-frozen --engine {engine}",
        out,
        model=model.half(),
        processor=tokenizer,
        work=work,
        names=STAGES,
        settings=settings,
    )


def train_subgoal_compiler(
    out: Path, work: Path, base: Path, seed: int = 0, games: int = 800, steps: int = 200, rows: int = 4
) -> None:
    """Train a compiler of commands to say the subgoals of the same states instead, with the same notes.

    Args:
        base: folder of the compiler of commands.
        games: number of train games.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base)
    make_env, specs = material(work, seed, games)
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    if not stages.finished(work / SUBGOALS):
        backbone = Backbone(model, tokenizer)
        parts = [spec for i, spec in enumerate(specs) if i % EXAM_OF], specs[::EXAM_OF]
        played = [EpisodeStates(make_env, of, seed, backbone, "subgoal") for of in parts]
        batches = [EpisodeBatches(tokenizer, (states.play(),), rows) for states in played]
        model = _train(model, work, SUBGOALS, seed, steps, batches, RATE / 4)
    else:
        model = LlamaForCausalLM.from_pretrained(work / SUBGOALS, dtype=torch.float32)
    settings = {"seed": seed, "games": games, "steps": steps, "rows": rows, "base": str(base)}
    recipe = "compiler --world alfworld-frozen (subgoals)"
    write_model(recipe, out, model=model.half(), processor=tokenizer, work=work, names=(SUBGOALS,), settings=settings)


def _first_model(work: Path, base: Path, tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Load the model of the last finished stage, or the base with the tokenizer's embeddings."""
    done = next((work / name for name in STAGES[::-1] if stages.finished(work / name)), None)
    model = LlamaForCausalLM.from_pretrained(done or base, dtype=torch.float32)
    if done is None:
        model = with_vocabulary(model, PreTrainedTokenizerFast.from_pretrained(base), tokenizer, seed)
        relate_places(model, tokenizer)
    return model


def _train(
    model: LlamaForCausalLM,
    work: Path,
    name: str,
    seed: int,
    steps: int,
    batches: Sequence[EpisodeBatches],
    rate: float,
) -> LlamaForCausalLM:
    """Train a stage on batches of the learned games; those of the held-out games are its exam."""
    draw, exam = (of.draw for of in batches)
    trained = train_stage(model, work, name=name, seed=seed, steps=steps, draw=draw, exam=exam, rate=rate, bf16=True)
    return trained  # type: ignore[return-value]


def evenly(specs: Sequence[EpisodeSpec], count: int, start: int) -> Sequence[EpisodeSpec]:
    """Return every n-th of the games from the one with index `start` on, about `count` of them."""
    stride = max(len(specs) // count, 1)
    return specs[start % stride :: stride]


def with_vocabulary(
    model: LlamaForCausalLM, old: PreTrainedTokenizerFast, new: PreTrainedTokenizerFast, seed: int
) -> LlamaForCausalLM:
    """Return the model with the embeddings (V, d) of another tokenizer: equal tokens keep theirs, and new tokens get
    random ones of the same mean length."""
    known, weights = old.get_vocab(), model.model.embed_tokens.weight.detach()
    drawn = torch.randn(len(new), weights.shape[1], generator=torch.Generator().manual_seed(seed))
    made = drawn * (weights.norm(dim=1).mean() / drawn.norm(dim=1, keepdim=True))
    for token, i in new.get_vocab().items():
        if token in known:
            made[i] = weights[known[token]]
    model.resize_token_embeddings(len(new))
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(made)
    model.config.eos_token_id, model.config.pad_token_id = new.eos_token_id, new.pad_token_id  # type: ignore[assignment]
    return model


@torch.no_grad()
def relate_places(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Add a share of the embedding of "cabinet" to that of "cabinet 3", and so for all places: each is one token, which
    has nothing in common with its kind in the base."""
    embeddings = model.model.embed_tokens.weight
    for kind, places in place_tokens(tokenizer).items():
        (own,) = tokenizer(f" {kind}", add_special_tokens=False)["input_ids"]
        embeddings[places] += KIND_SHARE * embeddings[own]


def place_tokens(tokenizer: PreTrainedTokenizerFast) -> dict[str, np.ndarray]:
    """Return the token ids (numbers, 2) of each kind's places, without and with a space before them."""
    token = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"][0]
    return {
        kind: np.array([[token(f"{kind} {i}"), token(f" {kind} {i}")] for i in range(1, count + 1)])
        for kind, count in PLACES.items()
    }


@dataclass(frozen=True, slots=True)
class State:
    """A compiler's state, with the teacher's emission."""

    request: CompileRequest
    emission: str


@dataclass
class StateRecorder:
    """Records the states of every episode with the teacher's emissions of a level; delivers its commands, or what a
    `compiler` says."""

    needs_expert: ClassVar[bool] = False
    compiler: Compiler | None = None
    level: Level = "command"
    teacher: CommandTeacher = field(default_factory=lambda: CommandTeacher(reader=READER))
    episodes: dict[str, list[State]] = field(default_factory=dict)

    def compile(self, requests: Sequence[CompileRequest], contexts: Sequence[EpisodeContext] = ()) -> list[Compilation]:
        made = self.teacher.compile(requests, contexts)
        said = made if self.level == "command" else replace(self.teacher, level=self.level).compile(requests, contexts)
        for request, context, compilation in zip(requests, contexts, said, strict=True):
            self.episodes.setdefault(context.task_id, []).append(State(request, compilation.text))
        return made if self.compiler is None else self.compiler.compile(requests)


@dataclass
class Follower:
    """An executor that carries out possible guidance, and takes a random command without it and at a share `strays`."""

    needs_expert: ClassVar[bool] = False
    strays: float = STRAYS
    seed: int = 0
    accepts_soft: bool = False
    sees_images: bool = False
    reads: ExecutorView = field(default_factory=ExecutorView)

    def act(self, requests: Sequence[ExecutorRequest], contexts: Sequence[EpisodeContext] = ()) -> list[Action]:
        return [self._act(request) for request in requests]

    def _act(self, request: ExecutorRequest) -> Action:
        chance = random.Random(f"{self.seed} {request.goal} {request.history}")
        commands = [command for command in request.admissible or () if command != "help"] or ["look"]
        guided = request.delivered.guidance
        text = guided if guided in commands and chance.random() >= self.strays else chance.choice(commands)
        return Action(text, Grounding.CHOICE, text=text, prompt_ids=(), tokens_in=0, tokens_out=0)


def material(
    work: Path, seed: int, games: int | None, split: str = "train", mix: Mapping[str, float] = MIX, k: int = K
) -> tuple[Make, list[EpisodeSpec]]:
    """Return an environment factory, and games with the raw entries that they recall; the bank is beside `work`.

    Args:
        mix: shares of the games by what they recall (`RecallMix`).
        k: maximum number of entries.

    Raises:
        FileNotFoundError: ALFWORLD_DATA holds no games.
    """
    memory = EvalMemoryConfig(k=k, pictures=0, settings={"text": "raw", "outcomes": "success"})
    make_env, tasks, bank = games_and_bank(work, split, games, memory, AlfworldSettings(notes_places=True))
    return make_env, RecallMix(**mix, seed=seed, reader=READER).specs(tasks, bank, memory)


def recorded_states(
    make_env: Make,
    specs: Sequence[EpisodeSpec],
    seed: int,
    compiler: Compiler | None = None,
    level: Level = "command",
    steps: int = STEPS,
) -> list[list[State]]:
    """Play games with the commands of the teacher, or of a compiler; return the states of each episode with the
    teacher's emissions of a level."""
    recorder = StateRecorder(compiler, level)
    guided = Delivery("expert_compiler", "compiled", recorder, soft=False)
    run_games(make_env, specs, delivery=guided, executor=Follower(seed=seed), steps=steps)
    return list(recorder.episodes.values())


@dataclass(frozen=True, slots=True)
class EncodedEpisode:
    """The states of an episode as token ids, their common beginning and then each rest and emission, and the verbs of
    their subgoals."""

    given: np.ndarray
    rests: tuple[np.ndarray, ...]
    emissions: tuple[np.ndarray, ...]
    verbs: tuple[str, ...]  # "" without a plan

    def drawn(self, count: int, rng: random.Random, balanced: bool) -> list[int]:
        """Draw states; balanced: of a random subgoal each time, since most states of an episode are of a search."""
        if not balanced:
            return rng.sample(range(len(self.rests)), count)
        left, drawn = dict[str, list[int]](), list[int]()
        for i in rng.sample(range(len(self.rests)), len(self.rests)):
            left.setdefault(self.verbs[i], []).append(i)
        while len(drawn) < count:
            verb = rng.choice(sorted(left))
            drawn.append(left[verb].pop())
            if not left[verb]:
                del left[verb]
        return drawn


def encode_episode(backbone: Backbone, states: Sequence[State]) -> EncodedEpisode:
    """Encode the states of an episode."""
    prompts = [backbone.encode(compiler_parts(state.request, images=False, entries=ENTRIES)).ids for state in states]
    emissions = [(*backbone.ids(state.emission), backbone.end_id) for state in states]
    first, last = min(prompts), max(prompts)  # what these share, all do
    shared = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first) - 1)
    briefs = [state.request.state for state in states]
    return EncodedEpisode(
        _array(first[:shared]),
        tuple(_array(prompt[shared:]) for prompt in prompts),
        tuple(map(_array, emissions)),
        tuple(brief.current.partition(" ")[0] if brief else "" for brief in briefs),
    )


def _array(ids: Sequence[int]) -> np.ndarray:
    return np.array(ids, dtype=np.uint16)  # a quarter of the memory of tuples


@dataclass(frozen=True, slots=True)
class FirstState:
    """The first state of a game, and what its goal asks for."""

    request: CompileRequest
    kind: str  # of errand; "" where the goal is not read
    need: str

    @classmethod
    def of(cls, request: CompileRequest) -> FirstState:
        errand = read_errand(request.goal)
        kind, need = (errand.kind, f"find {errand.thing}") if errand else ("", "")
        return cls(request, kind, need)


def first_requests(
    memory: Sequence[MemoryEntry], asked: Sequence[FirstState], rng: random.Random
) -> list[CompileRequest]:
    """Draw `QUESTIONS` first states to ask of M, by what it knows (`ASKED`)."""
    kinds = {kind_of_episode(steps_of(entry.provenance.actions)) for entry in memory}
    needs = {fact.need for entry in memory for fact in READER.facts(entry.provenance.actions)}
    groups = dict[tuple[bool, bool], list[FirstState]]()
    for first in asked:
        groups.setdefault((first.kind in kinds, first.need in needs), []).append(first)
    drawn = list[FirstState]()
    for known, most in ASKED.items():
        group = groups.get(known, [])
        drawn += rng.sample(group, min(most, len(group)))
    drawn += rng.sample(asked, min(QUESTIONS - len(drawn), len(asked)))
    return [replace(first.request, memory=tuple(memory)) for first in drawn]


def in_small_home(asked: CompileRequest, rng: random.Random) -> CompileRequest:
    """Remove most places of a home from a first state: a few random ones are left, some of a kind that M names, and one
    of the goal's kind."""
    places, errand = listed_places(asked.observation), read_errand(asked.goal)
    named = {kind_of(fact.place) for entry in asked.memory for fact in READER.facts(entry.provenance.actions)}
    left = set(rng.sample(places, min(len(places), rng.randint(1, 4))))
    left |= {place for place in places if kind_of(place) in named and rng.random() < 0.2}
    targets = [place for place in places if errand and kind_of(place) == errand.target]
    left |= {rng.choice(targets)} if targets else set()
    listed = enumerated([f"a {place}" for place in places if place in left][:MOST_PLACES])
    view = f"You are in the middle of a room. Looking quickly around you, you see {listed}."
    notes = shown_notes(dict(place_notes(view)), in_front=())
    return replace(asked, observation=view, state=BriefState(asked.goal).noting(notes.items()))


@dataclass(frozen=True)
class EpisodeStates:
    """Plays games for the states of their episodes, encoded."""

    make_env: Make
    specs: Sequence[EpisodeSpec]
    seed: int
    backbone: Backbone
    level: Level = "command"  # of the teacher's emissions

    def play(self, compiler: Compiler | None = None) -> list[EncodedEpisode]:
        """Return the states to which the teacher's guidance leads; or a compiler's, with the notes that it took."""
        chunks = [self.specs[i : i + CHUNK] for i in range(0, len(self.specs), CHUNK)]
        return [
            encode_episode(self.backbone, states)
            for specs in tqdm(chunks, "games to learn from", unit="chunk")
            for states in recorded_states(self.make_env, specs, self.seed, compiler, self.level)
        ]

    def asked(self, stage: str) -> list[EncodedEpisode]:
        """Return 16 first states behind every game's M, with the teacher's emissions, as a stage reads them: those of
        an M are encoded as the states of an episode."""
        some = [spec for spec in self.specs if spec.memory]
        return [self._behind(spec, stage) for spec in tqdm(some, f"memories to ask for {stage}", unit="memory")]

    @cached_property
    def _firsts(self) -> list[FirstState]:
        played = recorded_states(self.make_env, self.specs, self.seed, steps=1)
        return [FirstState.of(states[0].request) for states in played]

    def _behind(self, spec: EpisodeSpec, stage: str) -> EncodedEpisode:
        rng, memory = random.Random(f"{self.seed} {spec.task.id} {stage}"), spec.memory
        if stage == SMALL_HOMES:
            memory = tuple(rng.sample(memory, rng.randint(1, len(memory))))
        requests = first_requests(memory, self._firsts, rng)
        if stage == SMALL_HOMES:
            requests = [in_small_home(asked, rng) for asked in requests]
        said = CommandTeacher(reader=READER).compile(requests, [EpisodeContext(None)] * len(requests))
        states = [State(each, made.text) for each, made in zip(requests, said, strict=True)]
        return encode_episode(self.backbone, states)


class EpisodeBatches:
    """Batches of `rows` episodes whose states are of similar length, up to `states` states each. Their common beginning
    is read once, so its length matters less.

    Args:
        sources: kinds of episodes, of which a batch has equally many.
        later: draw states of all subgoals equally often, and exchange the numbers of places as well.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        sources: Sequence[Sequence[EncodedEpisode]],
        rows: int,
        states: int = STATES,
        later: bool = False,
    ) -> None:
        self._pools = [LengthPool(episodes, lambda episode: max(map(len, episode.rests))) for episodes in sources]
        self._labels, self._rows, self._states, self._later = SceneLabels(tokenizer), rows, states, later
        things = np.array([tokenizer(number, add_special_tokens=False)["input_ids"] for number in NUMBERS])
        self._numbers = [things, *(place_tokens(tokenizer).values() if later else ())]
        self._pad_id: int = tokenizer.pad_token_id  # type: ignore[assignment]

    def draw(self, rng: random.Random) -> Batch:
        """Draw a batch."""
        length = rng.choice(self._pools[0].lengths)
        pools = islice(cycle(self._pools), self._rows)
        return self._batch([pool.near(length, rng) for pool in pools], rng)

    def _table(self, rng: random.Random) -> np.ndarray:
        """Draw a permutation (V,) of token ids for an episode."""
        table = self._labels.exchange(rng)
        for tokens in self._numbers if rng.random() < 0.5 else ():
            table[tokens] = tokens[rng.sample(range(len(tokens)), len(tokens))]
        return table

    def _batch(self, episodes: Sequence[EncodedEpisode], rng: random.Random) -> Batch:
        begun, behind, ids, labels = list[list[int]](), list[int](), list[list[int]](), list[list[int]]()
        for episode in episodes:
            exchanged = self._table(rng)
            begun.append(exchanged[episode.given].tolist())
            behind.append(min(self._states, len(episode.rests)))
            for i in episode.drawn(behind[-1], rng, self._later):
                rest, emission = (exchanged[part[i]].tolist() for part in (episode.rests, episode.emissions))
                ids.append([*rest, *emission])
                labels.append([IGNORE] * len(rest) + emission)
        return {
            "input_ids": pad(ids, self._pad_id),
            "labels": pad(labels, IGNORE),
            **beginnings(begun, behind, self._pad_id),
        }
