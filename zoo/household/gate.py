"""Gate of the compiler base on held-out scenes: it must look up places in entries and pictures, and know whether any
entry has the goal's place.

Training and comparisons of deliveries need a base that passes: a compiler that cannot look up delivers noise. Task
memories come from a bank through retrieval. Answers are greedy text, of which only the place counts.
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
from data_gen.experience import collect_experience, select_first_views
from data_gen.tasks import episode_specs
from envs.household.command_reader import first_taken
from envs.household.environment import HouseholdEnvironment, pickup_views
from lm.backbone import load_backbone
from memory.bank import MemoryBank
from zoo.curriculum import NOTHING
from zoo.gates import GateResult, QuestionAnswerer
from zoo.household.episodes import TEACHER

THRESHOLD = 0.95  # for entries; SFT may still teach to read pictures
ENTRIES, KNOWN, UNKNOWN, VIEW, PICTURES = "entries", "at once, known", "at once, unknown", "view", "pictures in memory"
ANSWER = re.compile(rf"[a-z]+ \d+$|{NOTHING}$")


@dataclass(frozen=True)
class _Question:
    source: str
    request: CompileRequest
    ask: str
    answer: str
    chance: float  # accuracy of a random choice, or of always answering "nothing"


def gate(model: str, scenes: int, seed: int, pictures: int) -> list[GateResult]:
    """Ask a compiler base, on `scenes` held-out scenes, for places in entries, the view and M's pictures.

    "At once" questions ask for the goal's place in one word, whether entries have it or not.

    Args:
        pictures: pictures per entry.
    """
    questions = list(_questions(scenes, seed, pictures))
    asks = {id(question.request): question.ask for question in questions}
    backbone = load_backbone(model, torch.float32, "cpu")
    base = QuestionAnswerer(backbone, lambda request: asks[id(request)], max_new_tokens=24)
    answers = base.compile([question.request for question in questions])
    found = [ANSWER.search(answer.text.strip()) for answer in answers]
    results = []
    for source in (ENTRIES, KNOWN, UNKNOWN, VIEW, *((PICTURES,) if pictures else ())):
        mine = [i for i, question in enumerate(questions) if question.source == source]
        right = ((answer := found[i]) is not None and answer[0] == questions[i].answer for i in mine)
        chance = sum(questions[i].chance for i in mine) / len(mine)
        results.append(GateResult.of(source, right, THRESHOLD if source == ENTRIES else None, chance))
    return results


def _questions(scenes: int, seed: int, pictures: int) -> Iterator[_Question]:
    """Yield the questions about each task of the gate's scenes."""

    def make_env() -> HouseholdEnvironment:
        visual, remembered = (0.34, 0.33) if pictures else (0.5, 0.0)
        return HouseholdEnvironment(seed, {"gate": scenes}, visual_share=visual, remembered_share=remembered)

    env = make_env()
    with tempfile.TemporaryDirectory() as folder:
        bank, views = MemoryBank(Path(folder) / "bank"), select_first_views(pickup_views, pictures)
        collect_experience(make_env, env.tasks("gate_experience"), bank=bank, explainer=TEACHER, views=views)
        specs = episode_specs(env.tasks("gate"), bank, 4)
    for spec in specs:
        request = _request(env, spec)
        thing, place = first_taken(env.expert() or []) or ("", "")
        known = entry_for_goal(spec.goal, spec.memory)
        if not known:
            yield _Question(UNKNOWN, replace(request), ask="place", answer=NOTHING, chance=1.0)
        if spec.task.family == "visual":
            yield _Question(VIEW, request, ask="what is marked", answer=place, chance=1 / len(env.game.receptacles))
        elif spec.task.family == "remembered":
            own = [entry.provenance.scene == spec.task.scene for entry in spec.memory]
            yield _Question(
                PICTURES, request, ask=f"what is marked in {spec.task.scene}", answer=place, chance=sum(own) / len(own)
            )
        elif known:
            places = [first_taken(entry.provenance.actions) for entry in spec.memory]
            chance = sum(found is not None and found[1] == place for found in places) / len(places)
            yield _Question(ENTRIES, request, ask=f"where is the {thing}", answer=place, chance=chance)
            yield _Question(KNOWN, replace(request), ask="place", answer=place, chance=chance)


def _request(env: HouseholdEnvironment, spec: EpisodeSpec) -> CompileRequest:
    observation = env.reset(spec.task)
    return CompileRequest(
        spec.goal, spec.memory, state=BriefState(spec.goal), observation=observation.text, image=observation.image
    )
