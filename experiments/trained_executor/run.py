"""Train the executor to read pasted memory: the strongest pasted baseline.

    python -m experiments.trained_executor.run --out out/trained-executor [--model NAME] [--steps 150]

The frozen executor's own model learns to play ALFWorld from chats with nothing, with 1 to 16 raw entries pasted, and
with guidance of two levels, by supervised fine-tuning of a LoRA (TRL). The commands to learn are those of the teacher
of level `command`, which reads the same entries and views, so what is pasted holds everything that the commands need.
OUT/executor is an ordinary model folder: `executor.model=OUT/executor`. Resumes after a kill.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from datasets import Dataset, Features, List, Value
from peft import LoraConfig
from tqdm.auto import tqdm
from transformers import AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from agent.command_teacher import CommandTeacher
from agent.deliveries import Delivery
from agent.episode import EpisodeSpec
from agent.records import Episode, StepInput, executor_request
from compiler.language import Emission, parse
from configs.models import ExecutorConfig
from envs.alfworld.environment import AlfworldSettings
from envs.registry import executor_instructions_for
from executor.base import TokenExecutor
from executor.build import executor_rules, executor_view
from executor.prompt import Turn
from lm.backbone import load_encoder
from memory.trajectory import goal_with_scene
from runtime.store import atomic_folder
from zoo.alfworld.commands import Follower, StateRecorder, material
from zoo.alfworld.play import READER, Make, run_games
from zoo.curriculum import IGNORE

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SIZES = {1: 0.3, 2: 0.25, 4: 0.25, 8: 0.15, 16: 0.05}
"""Shares of the chats by the number of entries in memory; an entry has some 390 tokens, as many as six steps."""
SHARES = {"none": 0.2, "static": 0.5, "command": 0.15, "subgoal": 0.15}
"""Shares of the chats by what the executor reads: nothing, pasted memory, or guidance of a level."""
STRAYS = 0.1  # share of random commands, which are not learned
STEPS = 30  # of an episode
CONTEXT = 8192  # tokens; longer chats are left out


@dataclass(frozen=True)
class Game:
    """A train game and what its executor reads."""

    spec: EpisodeSpec
    reads: str  # key of SHARES

    @classmethod
    def drawn(cls, spec: EpisodeSpec, seed: int) -> Game:
        """Draw what the executor reads and the size of memory, as a function of seed and task."""
        rng = random.Random(f"{seed} {spec.task.id} chat")
        (reads,) = rng.choices(list(SHARES), list(SHARES.values()))
        (size,) = rng.choices(list(SIZES), list(SIZES.values()))
        return cls(replace(spec, memory=spec.memory[:size], open_session=None), reads)


def games_of(work: Path, seed: int, limit: int | None) -> tuple[Make, list[Game]]:
    """Return an environment factory, and random train games, half of which recall no entry of their own home."""
    make_env, specs = material(work, seed, games=None, mix={"own_scene": 0.5}, k=max(SIZES))
    chosen = random.Random(seed).sample(specs, len(specs))[:limit]
    return make_env, [Game.drawn(spec, seed) for spec in chosen]


def played(make_env: Make, games: Sequence[Game], reads: str, seed: int) -> Iterator[tuple[Episode, list[Emission]]]:
    """Play the games of a kind with a follower of the teacher; yield episodes with what the executor reads by step."""
    specs = [game.spec for game in games if game.reads == reads]
    teacher = CommandTeacher(entry="none" if reads == "none" else "right", reader=READER)
    recorder = StateRecorder(level="subgoal" if reads == "subgoal" else "command", teacher=teacher)
    guided = Delivery("expert_compiler", "compiled", recorder, soft=False)
    for episode in run_games(make_env, specs, guided, Follower(strays=STRAYS, seed=seed), STEPS):
        yield episode, [parse(state.emission).emission for state in recorder.episodes[episode.task_id]]


def chat_ids(executor: TokenExecutor, episode: Episode, reads: str, said: Sequence[Emission]) -> dict[str, list[int]]:
    """Encode an episode as the executor will read it; labels are the teacher's commands.

    Raises:
        ValueError: the chat of a step does not begin with that of the step before.
    """
    past, ids, labels = list[Turn](), list[int](), list[int]()
    for step, emission in zip(episode.steps, said, strict=True):
        shown = emission if reads in ("command", "subgoal") else None
        request = executor_request(
            StepInput(
                goal=goal_with_scene(episode.goal, episode.scene),
                observation=step.observation,
                admissible=step.admissible,
                past=tuple(past),
                pasted_memory=episode.memory_text if reads == "static" else "",
                emission=shown,
            ),
            executor,
        )
        prompt, action = list(executor.encode(request).ids), list(executor.action_ids(step.action))
        if prompt[: len(ids)] != ids:
            raise ValueError(f"{episode.task_id}, step {step.t}: the chat changes what stood there before")
        labels += [IGNORE] * (len(prompt) - len(ids))
        labels += action if step.action == step.guidance else [IGNORE] * len(action)
        ids = prompt + action
        past.append(Turn(step.observation, step.action, request.delivered))
    return {"input_ids": ids, "labels": labels}


def write_chats(model: str, out: Path, seed: int, limit: int) -> None:
    """Play `limit` train games and write their chats as token ids, in random order, unless they are there."""
    if (out / "chats").exists():
        return
    settings, instructions = ExecutorConfig(model=model), executor_instructions_for(AlfworldSettings())
    rules, view = executor_rules(settings, instructions), executor_view(settings, instructions)
    executor = TokenExecutor(load_encoder(model), instructions=rules, reads=view)
    make_env, games = games_of(out / "games", seed, limit)
    chats, too_long = list[dict[str, list[int]]](), 0
    with tqdm(total=len(games), desc="chats", unit="game") as bar:
        for reads in SHARES:
            for episode, said in played(make_env, games, reads, seed):
                chat = chat_ids(executor, episode, reads, said)
                fits = len(chat["input_ids"]) <= CONTEXT
                chats += [chat] if fits and any(label != IGNORE for label in chat["labels"]) else []
                too_long += not fits
                bar.update()
    random.Random(seed).shuffle(chats)
    numbers = List(Value("int32"))
    with atomic_folder(out / "chats") as folder:
        Dataset.from_list(chats, Features(input_ids=numbers, labels=numbers)).save_to_disk(folder)
    print(f"{len(chats)} chats; {too_long} of more than {CONTEXT} tokens left out")


def train(model: str, out: Path, seed: int, steps: int, chats_a_step: int) -> None:
    """Train a LoRA on the chats, and write the merged model to OUT/executor."""
    settings = SFTConfig(
        output_dir=str(out / "training"),
        model_init_kwargs={"dtype": "bfloat16"},
        max_length=None,
        seed=seed,
        max_steps=steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=chats_a_step,
        gradient_checkpointing=False,
        learning_rate=1e-3,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.05},
        warmup_steps=10,
        use_cpu=not torch.cuda.is_available(),
        bf16=True,
        logging_steps=5,
        save_steps=5,
        save_total_limit=2,
        report_to="none",
    )
    adapter = LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = SFTTrainer(model, settings, train_dataset=Dataset.load_from_disk(out / "chats"), peft_config=adapter)
    (out / "training").mkdir(exist_ok=True)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(out / "training")))
    merged = trainer.model.merge_and_unload(safe_merge=True)  # type: ignore[union-attr]
    with atomic_folder(out / "executor") as folder:
        merged.save_pretrained(folder)
        AutoTokenizer.from_pretrained(model).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/trained-executor"))
    parser.add_argument("--model", default=MODEL, help="Hugging Face name or folder")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--chats-a-step", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    write_chats(a.model, a.out, seed=a.seed, limit=a.steps * a.chats_a_step)
    if not (a.out / "executor").exists():
        train(a.model, a.out, seed=a.seed, steps=a.steps, chats_a_step=a.chats_a_step)


if __name__ == "__main__":
    main()
