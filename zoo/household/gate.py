"""The look-up gate: on held-out scenes, does a compiler base name the place that the right memory entry holds?

Nothing downstream (soft tokens, GRPO, the comparison of deliveries) means anything before this holds: a compiler that
cannot look up delivers noise. Task memories come from a real bank through real retrieval; the base answers "where is
the mug" in free greedy text, and its answer counts if the place in it is the right one.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from agent.episode import EpisodeSpec
from agent.expert import entry_for_goal
from compiler.brief_state import BriefState
from compiler.hf import MemoryCompiler
from compiler.prompt import compiler_parts
from compiler.records import CompileRequest, Decoding
from data_gen.experience import collect_experience
from data_gen.tasks import specs_for
from envs.household.environment import HouseholdEnvironment
from envs.household.trajectories import taken
from lm.backbone import Backbone, load_backbone
from lm.prompt import Part
from memory.bank import MemoryBank
from soft_mem.projector import Projector, ProjectorConfig
from zoo.household.episodes import TEACHER

THRESHOLD = 0.95


@dataclass(frozen=True)
class GateResult:
    accuracy: float
    chance: float  # citing a random one of the retrieved entries
    n: int


def gate(model: str, scenes: int, seed: int) -> GateResult:
    """Look-up accuracy of a compiler base on `scenes` held-out scenes."""
    backbone = load_backbone(model, torch.float32, "cpu")
    asker = _Asker(backbone, Projector(ProjectorConfig(backbone.hidden_size, 8, 1)), Decoding(max_new_tokens=24))

    def make_env() -> HouseholdEnvironment:
        return HouseholdEnvironment(seed=seed, scenes={"gate": scenes}, visual_share=0.0)

    env = make_env()
    with tempfile.TemporaryDirectory() as folder:
        bank = MemoryBank(Path(folder) / "bank")
        collect_experience(make_env, env.tasks("gate_experience"), bank, TEACHER)
        specs = specs_for(env.tasks("gate"), bank, 4)
    requests, truths, chances = [], [], []
    for spec in specs:
        entry = entry_for_goal(spec.goal, spec.memory)
        fact = taken(entry.provenance.actions) if entry else None
        if fact is None:
            continue
        asker.things[spec.goal] = fact[0]
        requests.append(_request(env, spec))
        truths.append(fact[1])
        places = [taken(e.provenance.actions) for e in spec.memory]
        chances.append(sum(p is not None and p[1] == fact[1] for p in places) / len(places))
    answers = [re.findall(r"was in ([a-z]+ \d+)", c.text)[:1] for c in asker.compile(requests)]
    right = [a == [t] for a, t in zip(answers, truths, strict=True)]
    return GateResult(sum(right) / len(right), sum(chances) / len(chances), len(right))


class _Asker(MemoryCompiler):
    """The base asked a question instead of being asked to compile."""

    def __init__(self, backbone: Backbone, projector: Projector, decoding: Decoding) -> None:
        super().__init__(backbone, projector, decoding)
        self.things: dict[str, str] = {}

    def encode(self, request: CompileRequest):
        ask = Part(text=f"\nask: where is the {self.things[request.goal]}")
        return self.backbone.encode([*compiler_parts(request, self.backbone.is_vlm), ask])


def _request(env: HouseholdEnvironment, spec: EpisodeSpec) -> CompileRequest:
    observation = env.reset(spec.task)
    return CompileRequest(spec.goal, spec.memory, BriefState(spec.goal), observation.text, observation.image)
