"""The gate: on held-out scenes, does a compiler base find what entries say, and what pictures mark, and does it know at
once whether any entry says it?

Nothing downstream (soft tokens, GRPO, the comparison of deliveries) means anything before this holds: a compiler that
cannot look up delivers noise, and one that must have begun to tell a fact before it knows whether there is any cannot
choose between speech and silence. Task memories come from a real bank through real retrieval; the base answers in free
greedy text, and its answer counts if the place in it is the right one.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from agent.episode import EpisodeSpec
from agent.expert import entry_for_goal
from compiler.brief_state import BriefState
from compiler.records import CompileRequest
from data_gen.experience import collect_experience, first_views
from data_gen.tasks import specs_for
from envs.household.environment import HouseholdEnvironment, telling_views
from envs.household.trajectories import taken
from lm.backbone import load_backbone
from memory.bank import MemoryBank
from zoo.curriculum import NOTHING
from zoo.gates import Asked, Share
from zoo.household.episodes import TEACHER

THRESHOLD = 0.95  # of what entries say; what pictures mark, SFT may still teach
ENTRIES, TOLD, UNTOLD, VIEW, PICTURES = "entries", "at once, told", "at once, not told", "view", "pictures in memory"
ANSWER = re.compile(rf"[a-z]+ \d+$|{NOTHING}$")


@dataclass(frozen=True)
class _Question:
    source: str
    request: CompileRequest
    ask: str
    answer: str
    chance: float  # to be right by reading a random entry, receptacle or picture, or by always saying "nothing"


def gate(model: str, scenes: int, seed: int, pictures: int) -> list[Share]:
    """Ask a compiler base, on `scenes` held-out scenes, for the places that entries, the view and (where entries keep
    `pictures` of their episode) M's pictures tell; and for the goal's in one word, where entries tell it and not."""
    questions = list(_questions(scenes, seed, pictures))
    asks = {id(question.request): question.ask for question in questions}
    base = Asked(load_backbone(model, torch.float32, "cpu"), lambda request: asks[id(request)], max_new_tokens=24)
    answers = base.compile([question.request for question in questions])
    found = [ANSWER.search(answer.text.strip()) for answer in answers]
    shares = []
    for source in (ENTRIES, TOLD, UNTOLD, VIEW, *((PICTURES,) if pictures else ())):
        mine = [i for i, question in enumerate(questions) if question.source == source]
        right = ((answer := found[i]) is not None and answer[0] == questions[i].answer for i in mine)
        chance = sum(questions[i].chance for i in mine) / len(mine)
        shares.append(Share.of(source, right, THRESHOLD if source == ENTRIES else None, chance))
    return shares


def _questions(scenes: int, seed: int, pictures: int) -> Iterator[_Question]:
    """Yield questions about each task of the gate's scenes, of which each family has as many."""

    def make_env() -> HouseholdEnvironment:
        visual, remembered = (0.34, 0.33) if pictures else (0.5, 0.0)
        return HouseholdEnvironment(seed, {"gate": scenes}, visual_share=visual, remembered_share=remembered)

    env = make_env()
    with tempfile.TemporaryDirectory() as folder:
        bank, views = MemoryBank(Path(folder) / "bank"), first_views(telling_views, pictures)
        collect_experience(make_env, env.tasks("gate_experience"), bank, TEACHER, views)
        specs = specs_for(env.tasks("gate"), bank, 4)
    for spec in specs:
        request = _request(env, spec)
        thing, place = taken(env.expert() or []) or ("", "")
        told = entry_for_goal(spec.goal, spec.memory)
        if not told:
            yield _Question(UNTOLD, replace(request), "place", NOTHING, 1.0)
        if spec.task.family == "visual":
            yield _Question(VIEW, request, "what is marked", place, 1 / len(env.game.receptacles))
        elif spec.task.family == "remembered":
            own = [entry.provenance.scene == spec.task.scene for entry in spec.memory]
            asked = f"what is marked in {spec.task.scene}"
            yield _Question(PICTURES, request, asked, place, sum(own) / len(own))
        elif told:
            places = [taken(entry.provenance.actions) for entry in spec.memory]
            chance = sum(found is not None and found[1] == place for found in places) / len(places)
            yield _Question(ENTRIES, request, f"where is the {thing}", place, chance)
            yield _Question(TOLD, replace(request), "place", place, chance)


def _request(env: HouseholdEnvironment, spec: EpisodeSpec) -> CompileRequest:
    observation = env.reset(spec.task)
    return CompileRequest(spec.goal, spec.memory, BriefState(spec.goal), observation.text, observation.image)
