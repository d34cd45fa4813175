"""Compiler of commands for a frozen public executor on real ALFWorld: the shipped compiler base, trained further.

    memcompiler zoo compiler --world alfworld-frozen --out OUT

The base `zoo/alfworld/compiler` gets tokens for the words of commands and raw entries, then learns the emissions of
the teacher of level `command` (`agent.command_teacher`) behind real compile prompts. Half of the episodes recall no
entry of their own scene, and some recall nothing or other kinds of tasks, where the teacher is silent. An agent that
follows the teacher's commands, and strays at some steps, visits the states. Scene labels are exchanged at random.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from agent.command_teacher import CommandTeacher
from agent.deliveries import Delivery
from agent.episode import EpisodeSpec
from agent.records import EpisodeContext
from compiler.language import render
from compiler.prompt import compiler_parts
from compiler.records import Compilation, CompileRequest
from configs.evaluation import EvalMemoryConfig
from data_gen.recall_mix import RecallMix
from executor.prompt import ExecutorRequest
from executor.records import Action, ExecutorView, Grounding
from lm.backbone import Backbone
from zoo import stages
from zoo.alfworld.lessons import LengthPool, SceneLabels, Tokens, beginnings
from zoo.alfworld.play import READER, K, Make, games_and_bank, run_games
from zoo.alfworld.words import COMMAND_LEXICON
from zoo.curriculum import IGNORE, Batch, pad
from zoo.models import make_tokenizer
from zoo.recipes import train_stage, write_model

BASE = Path("zoo/alfworld/compiler")
EXAM_OF = 25  # every 25th game is held out for the exam
STRAYS = 0.2  # share of steps at which the agent takes a random command
STEPS = 30  # of an episode
STATES = 16  # most states of an episode in a batch
RATE = 1e-3
MIX = {"own_scene": 0.5, "nothing": 0.06, "other_kinds": 0.06}
STAGE = "commands"


def train_compiler(
    out: Path,
    work: Path,
    seed: int = 0,
    games: int | None = None,
    steps: int = 900,
    rows: int = 4,
    base: Path = BASE,
    rate: float = RATE,
) -> None:
    """Train the compiler of commands.

    Args:
        games: number of train games (default: all).
        steps: optimizer steps.
        rows: episodes per batch, of up to `STATES` states each.
        base: folder of the compiler base.
        rate: peak learning rate.
    """
    tokenizer = make_tokenizer(COMMAND_LEXICON)
    model = LlamaForCausalLM.from_pretrained(
        work / STAGE if stages.finished(work / STAGE) else base, dtype=torch.float32
    )
    if not stages.finished(work / STAGE):
        model = with_vocabulary(model, PreTrainedTokenizerFast.from_pretrained(base), tokenizer, seed)
        learned, held_out = (
            EpisodeBatches(model, tokenizer, played, rows) for played in played_states(work, seed, games)
        )
        model = train_stage(
            model,
            work,
            name=STAGE,
            seed=seed,
            steps=steps,
            draw=learned.draw,
            exam=held_out.draw,
            rate=rate,
            bf16=True,
        )
    settings = {"seed": seed, "games": games, "steps": steps, "rows": rows, "base": str(base), "rate": rate}
    write_model(
        "compiler --world alfworld-frozen",
        out,
        model=model.half(),
        processor=tokenizer,
        work=work,
        names=(STAGE,),
        settings=settings,
    )


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


@dataclass(frozen=True, slots=True)
class State:
    """A compiler's state, with the teacher's emission."""

    request: CompileRequest
    emission: str


@dataclass
class StateRecorder:
    """The teacher of level `command`, which records the states of every episode."""

    needs_expert: ClassVar[bool] = False
    teacher: CommandTeacher = field(default_factory=lambda: CommandTeacher(reader=READER))
    episodes: dict[str, list[State]] = field(default_factory=dict)

    def compile(self, requests: Sequence[CompileRequest], contexts: Sequence[EpisodeContext] = ()) -> list[Compilation]:
        made = self.teacher.compile(requests, contexts)
        for request, context, compilation in zip(requests, contexts, made, strict=True):
            state = State(request, render(compilation.emission))
            self.episodes.setdefault(context.task_id, []).append(state)
        return made


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
    work: Path, seed: int, games: int | None, split: str = "train", mix: Mapping[str, float] = MIX
) -> tuple[Make, list[EpisodeSpec]]:
    """Return an environment factory, and games with the raw entries that they recall; the bank is beside `work`.

    Args:
        mix: shares of the games by what they recall (`RecallMix`).

    Raises:
        FileNotFoundError: ALFWORLD_DATA holds no games.
    """
    memory = EvalMemoryConfig(k=K, pictures=0, settings={"text": "raw", "outcomes": "success"})
    make_env, tasks, bank = games_and_bank(work, split, games, memory)
    return make_env, RecallMix(**mix, seed=seed, reader=READER).specs(tasks, bank, memory)


def played_states(work: Path, seed: int, games: int | None) -> tuple[list[list[State]], list[list[State]]]:
    """Play the train games to learn from and the held-out ones; return the states of each episode."""
    make_env, specs = material(work, seed, games)
    learned = [spec for i, spec in enumerate(specs) if i % EXAM_OF]
    return teacher_states(make_env, learned, seed), teacher_states(make_env, specs[::EXAM_OF], seed)


def teacher_states(make_env: Make, specs: Sequence[EpisodeSpec], seed: int) -> list[list[State]]:
    """Play games with the teacher's guidance; return the states of each episode."""
    recorder = StateRecorder()
    guided = Delivery("expert_compiler", "compiled", recorder, soft=False)
    run_games(make_env, specs, delivery=guided, executor=Follower(seed=seed), steps=STEPS)
    return list(recorder.episodes.values())


@dataclass(frozen=True, slots=True)
class EncodedEpisode:
    """The states of an episode as token ids: their common beginning, then each rest and emission."""

    given: Tokens
    rests: tuple[Tokens, ...]
    emissions: tuple[Tokens, ...]


def encode_episode(backbone: Backbone, states: Sequence[State]) -> EncodedEpisode:
    """Encode the states of an episode."""
    prompts = [backbone.encode(compiler_parts(state.request, images=False)).ids for state in states]
    emissions = [(*backbone.ids(state.emission), backbone.end_id) for state in states]
    first, last = min(prompts), max(prompts)  # what these share, all do
    shared = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first) - 1)
    return EncodedEpisode(
        tuple(first[:shared]), tuple(tuple(prompt[shared:]) for prompt in prompts), tuple(map(tuple, emissions))
    )


class EpisodeBatches:
    """Batches of `rows` episodes with memories of similar length and up to `STATES` states each, whose common beginning
    the model reads once."""

    def __init__(
        self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, played: Sequence[Sequence[State]], rows: int
    ) -> None:
        backbone = Backbone(model, tokenizer)
        episodes = [encode_episode(backbone, states) for states in played]
        self._pool = LengthPool(episodes, lambda episode: len(episode.given))
        self._labels, self._rows = SceneLabels(tokenizer), rows
        self._pad_id: int = tokenizer.pad_token_id  # type: ignore[assignment]

    def draw(self, rng: random.Random) -> Batch:
        """Draw a batch."""
        length = rng.choice(self._pool.lengths)
        return self._batch([self._pool.near(length, rng) for _ in range(self._rows)], rng)

    def _batch(self, episodes: Sequence[EncodedEpisode], rng: random.Random) -> Batch:
        begun, behind, ids, labels = list[list[int]](), list[int](), list[list[int]](), list[list[int]]()
        for episode in episodes:
            exchanged = self._labels.exchange(rng)
            begun.append(exchanged[list(episode.given)].tolist())
            behind.append(min(STATES, len(episode.rests)))
            for i in rng.sample(range(len(episode.rests)), behind[-1]):
                rest, emission = (exchanged[list(part[i])].tolist() for part in (episode.rests, episode.emissions))
                ids.append([*rest, *emission])
                labels.append([IGNORE] * len(rest) + emission)
        return {
            "input_ids": pad(ids, self._pad_id),
            "labels": pad(labels, IGNORE),
            **beginnings(begun, behind, self._pad_id),
        }
