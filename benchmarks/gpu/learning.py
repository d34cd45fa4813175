"""Part `learning`: SFT of the shipped models on generated homes: steps/s, losses, and held-out success.

The expert's rows are created here, so that the package datasets is not needed.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from transformers import AutoTokenizer

import lm.backbone
from agent.deliveries import Delivery
from agent.episode import EpisodeLimits, EpisodeSpec, run_episodes
from agent.expert import ExpertExecutor
from benchmarks.gpu.parts import Row, Setup
from configs.load import load_config
from configs.training import SftConfig
from data_gen.rows import SftRow, episode_rows
from envs.household.environment import HouseholdEnvironment
from envs.registry import find
from training.evaluation import HeldOutTasks, eval_decoding
from training.rollout import RolloutEngine
from training.sft import SftTrainer, load_models
from zoo.household.episodes import SPLIT, TEACHER, VISUAL, EntryPool, material

SEED, MAX_STEPS = 901, 12  # scenes that no shipped model was trained on; steps per episode
SCENES = {"paper": 48, "tiny": 4}
HELD_OUT = {"paper": 64, "tiny": 4}  # tasks
STEPS = {"paper": 300, "tiny": 4}
CPU_STEPS = {"paper": 5, "tiny": 2}
LOSS_ROWS = 6


def measure(setup: Setup) -> Iterator[Row]:
    """Yield the CPU's speed, then success before, losses and speed on the device, and success after."""
    skip_processor()
    env, specs, pool = material(SCENES[setup.size], SEED)
    held = HELD_OUT[setup.size]
    rows = expert_rows(env, specs[:-held], pool)
    yield {"what": "rows", "value": len(rows)}
    with tempfile.TemporaryDirectory() as folder:
        cpu = make_trainer("cpu", rows, Path(folder) / "cpu", setup)
        steps = CPU_STEPS[setup.size]
        cpu.take_step()
        started = time.perf_counter()
        for _ in range(steps):
            cpu.take_step()
        yield {"what": "steps/s on the CPU", "value": steps / (time.perf_counter() - started)}
        trainer = make_trainer(setup.device, rows, Path(folder) / "here", setup)
        evaluation = held_out_tasks(trainer, setup, specs[-held:])
        yield {
            "what": f"success on {held} held-out tasks before",
            "value": evaluation.play(trainer.compiler)["eval_success"],
        }
        yield from train(setup, trainer)
        yield {
            "what": f"success on {held} held-out tasks after",
            "value": evaluation.play(trainer.compiler)["eval_success"],
        }


def skip_processor() -> None:
    """Load the compiler's tokenizer instead of its processor if torchvision, which the processor needs, is missing."""
    if find_spec("torchvision") is None:
        lm.backbone.load_processor = lambda name, revision=None: AutoTokenizer.from_pretrained(name, revision=revision)


def expert_rows(env: HouseholdEnvironment, specs: Sequence[EpisodeSpec], pool: EntryPool) -> list[SftRow]:
    """Return the SFT rows of episodes that the expert teaches and plays."""
    teacher = Delivery("teacher", "compiled", TEACHER, soft=False)
    played = run_episodes(
        lambda: env,
        specs,
        delivery=teacher,
        executor=ExpertExecutor(obeys=True),
        limits=EpisodeLimits(MAX_STEPS),
        concurrency=1,
    )
    entries = {entry.id: entry for entry in pool.entries}
    return [row for episode in played for row in episode_rows(episode, entries)]


def make_trainer(device: str, rows: Sequence[SftRow], folder: Path, setup: Setup) -> SftTrainer:
    """Create the quickstart's trainer of the shipped models on a device."""
    where = [f"{role}.device={device}" for role in ("compiler", "executor")]
    more = [f"max_steps={STEPS[setup.size]}", "save_every=1000000", "loader_workers=0"]
    config = load_config(SftConfig, "sft/quickstart", [*where, *more])
    compiler, executor = load_models(config, {"household": find("household")})
    return SftTrainer(config, compiler, executor=executor, rows=rows, out=folder)


def train(setup: Setup, trainer: SftTrainer) -> Iterator[Row]:
    """Take all steps; yield mean losses of `LOSS_ROWS` intervals, and the speed without the first step."""
    trainer.compiler.train()
    steps, seen = STEPS[setup.size], list[dict[str, float]]()
    every = math.ceil(steps / LOSS_ROWS)
    for number in range(1, steps + 1):
        seen.append(trainer.take_step())
        if number % every == 0 or number == steps:
            last = seen[-every:]
            means = {name: sum(m[name] for m in last) / len(last) for name in last[0] if name.startswith("loss")}
            yield {"what": f"loss, steps {number - len(last) + 1} to {number}", "value": means.pop("loss"), **means}
    timed = seen[1:] or seen
    yield {"what": f"steps/s on {setup.device}", "value": len(timed) / sum(m["seconds"] for m in timed)}


def held_out_tasks(trainer: SftTrainer, setup: Setup, specs: Sequence[EpisodeSpec]) -> HeldOutTasks:
    """Return the held-out tasks, played with greedy decoding."""
    make_env = lambda: HouseholdEnvironment(SEED, {SPLIT: SCENES[setup.size]}, visual_share=VISUAL)
    engine = RolloutEngine(make_env, trainer.executor, EpisodeLimits(MAX_STEPS), len(specs))
    return HeldOutTasks(trainer.config.evaluation, engine, specs, eval_decoding(trainer.config.compiler))
