"""A memory system of somebody else's, from one file, through collection, SFT, GRPO and evaluation: nobody asks which
system it is."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from configs.collect import CollectConfig
from configs.evaluation import EvalConfig
from configs.load import ConfigError, load_config
from configs.training import GrpoConfig, SftConfig
from envs.base import Task
from memory import registry
from memory.entry import MemoryEntry, Provenance, WriteResult
from memory.protocol import MemorySystem, Query, Recall, Record, Trace
from memory.registry import MemorySpec, MemoryTools
from runtime.plugins import PluginError
from runtime.settings import Settings
from runtime.store import JsonLines

# The system -----------------------------------------------------------------------------------------------------------


class DiarySettings(Settings):
    pages: int = 2


@dataclass
class Diary:
    """Keeps a line for every episode in one file, and recalls the scene's last pages; within an episode it adds what
    was done so far, which no file holds."""

    path: Path
    settings: DiarySettings
    until: int | None = None
    name: ClassVar[str] = "diary"

    @property
    def _lines(self) -> JsonLines:
        return JsonLines(self.path / "diary.jsonl")

    def _pages(self) -> list[dict[str, Any]]:
        return list(self._lines)[: self.until] if self._lines.path.exists() else []

    def commit(self, episodes: Sequence[Sequence[Trace]]) -> WriteResult:
        self.path.mkdir(parents=True, exist_ok=True)
        known, fresh = {page["task"]["id"] for page in self._pages()}, list[dict[str, Any]]()
        for trace in (trace for attempts in episodes for trace in attempts):
            if trace.task.id not in known:
                fresh.append({"task": asdict(trace.task), "did": trace.actions, "success": trace.success})
        self._lines.append(*fresh)
        return WriteResult(len(fresh), sum(map(len, episodes)) - len(fresh))

    def merge_from(self, other: Diary) -> WriteResult:
        self._lines.append(*other._pages())
        return WriteResult(len(other))

    def recall(self, queries: Sequence[Query]) -> list[Recall]:
        return [Recall(tuple(self._of_scene(query.task))) for query in queries]

    def session(self, query: Query, first: Recall) -> Page:
        return Page(query.task, first)

    def again(self, query: Query, first: Recall, attempts: Sequence[Trace]) -> None:
        return None

    def snapshot(self) -> int:
        return len(self._pages())

    def at(self, version: int) -> Diary:
        return Diary(self.path, self.settings, version)

    def origins(self) -> Counter[tuple[str, str]]:
        return Counter((page["task"]["id"], page["task"]["split"]) for page in self._pages())

    def __getitem__(self, id: str) -> MemoryEntry:
        return {entry.id: entry for entry in self}[id]

    def __len__(self) -> int:
        return len(self._pages())

    def __iter__(self) -> Iterator[MemoryEntry]:
        return map(_entry, self._pages())

    def _of_scene(self, task: Task) -> list[MemoryEntry]:
        of_scene = [entry for entry in self if entry.provenance.scene == task.scene]
        return [entry for entry in of_scene if entry.provenance.task_id != task.id][-self.settings.pages :]


def _entry(page: dict[str, Any]) -> MemoryEntry:
    task = Task(**page["task"])
    provenance = Provenance(task.id, task.scene, task.goal, task.split, page["success"], tuple(page["did"]), "diary")
    return MemoryEntry(f"diary/{task.id}", f"dear diary, {task.goal}: {', '.join(page['did'])}", provenance)


@dataclass
class Page:
    task: Task
    first: Recall
    done: list[Record] = field(default_factory=list)

    def recall(self, observation: str) -> Recall:
        if not self.done:
            return self.first
        text = f"today: {', '.join(record.action for record in self.done)}"
        nowhere = Provenance("", self.task.scene, self.task.goal, self.task.split, False, source="diary")
        return Recall((*self.first.entries, MemoryEntry(f"today/{len(self.done)}", text, nowhere)), generated=True)

    def observe(self, record: Record) -> None:
        self.done.append(record)


def open_diary(path: Path, settings: DiarySettings, tools: MemoryTools) -> Diary:
    return Diary(path, settings)


DIARY = MemorySpec("diary", DiarySettings, open_diary)

# ----------------------------------------------------------------------------------------------------------------------

MEMORY = {"system": "diary", "settings": {"pages": 1}}
ENV = {"name": "household", "scenes": {"train": 3, "test": 2}}
MODELS = {
    "compiler": {
        "model": "zoo/household/compiler",
        "dtype": "float32",
        "instructions": "none",
        "max_new_tokens": 8,
        "soft": {"n_tokens": 2, "emb_std": "auto"},
    },
    "executor": {
        "context": "rebuilt",
        "model": "zoo/household/executor",
        "dtype": "float32",
        "max_new_tokens": 8,
        "temperature": 1.0,
    },
}


@pytest.fixture
def diary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry._ALL, "_added", {})
    registry.register(DIARY)


@pytest.mark.slow
def test_it_serves_collection_training_and_evaluation(
    diary: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from data_gen.experience import open_experience_bank
    from data_gen.rows import load_rows
    from envs.registry import Environments
    from eval.evaluate import run_eval
    from memcompiler.collection import run_collect
    from training.grpo import train_grpo
    from training.sft import train_sft

    recalls = {"own_scene": 1, "empty_memory": 0, "other_kinds": 0}
    given = {"env": ENV, "memory": MEMORY, "max_steps": 8, **recalls}
    run_collect(CollectConfig.model_validate(given), tmp_path / "collect")
    collected = json.loads((tmp_path / "collect" / "collect.json").read_text())
    assert collected["bank_entries"] > 0 and (tmp_path / "collect" / "bank" / "diary.jsonl").exists()
    rows = load_rows(tmp_path / "collect" / "rows")
    told = [row.memory_texts for row in rows if row.memory_texts]
    assert any("dear diary" in text for texts in told for text in texts)
    assert all(row.memory_texts[-1] == f"today: {', '.join(row.history)}" for row in rows if row.t)

    sft = {**MODELS, "rows": str(tmp_path / "collect" / "rows"), "max_steps": 1, "latent": "none"}
    train_sft(SftConfig.model_validate(sft), tmp_path / "sft")
    trained = {**MODELS, "compiler": {**MODELS["compiler"], "checkpoint": str(tmp_path / "sft")}}
    grpo = {
        **trained,
        "env": ENV,
        "memory": MEMORY,
        "updates": 1,
        "tasks": 1,
        "group_size": 2,
        "max_steps": 2,
        "loss": {"latent_gradient": "pathwise"},
    }
    other = CollectConfig.model_validate({"env": ENV})
    with Environments(other.env) as envs:  # of the same episodes, and another bank
        bank = open_experience_bank(other, envs, envs.tasks("train_experience")[:1], tmp_path / "other")
    assert bank.name == "trajectory" and len(list((tmp_path / "experience").iterdir())) == 2

    told = list[Record]()
    monkeypatch.setattr(Page, "observe", lambda self, record: (self.done.append(record), told.append(record)))
    train_grpo(GrpoConfig.model_validate(grpo), tmp_path / "grpo", "overwrite")
    steps = [row["steps"] for row in JsonLines(tmp_path / "grpo" / "rollouts.jsonl")]
    assert len(steps) == 2 and sum(steps) == len(told)

    asked = {**trained, "env": ENV, "memory": MEMORY, "deliveries": ["none", "static", "live", "compiled"], "limit": 2}
    results = run_eval(EvalConfig.model_validate({**asked, "max_steps": 3}), tmp_path / "eval")
    assert results["bank_entries"] > 0 and set(results["results"]) == {"none", "static", "live", "compiled"}
    prompts: dict[str, list[str]] = {}
    for row in JsonLines(tmp_path / "eval" / "episodes.jsonl"):
        prompts.setdefault(row["delivery"], []).append(row["steps"][1]["executor_prompt"])
    assert all("dear diary" in prompt and "today: " in prompt for prompt in prompts["live"])
    assert all("dear diary" in prompt and "today: " not in prompt for prompt in prompts["static"])
    assert not any("diary" in prompt or "today" in prompt for prompt in prompts["none"])


def test_settings_name_it_and_say_what_it_has(diary: None) -> None:
    assert load_config(EvalConfig, None, ["memory.system=diary"]).memory.system == "diary"
    with pytest.raises(ConfigError, match="no memory system 'diry'; did you mean 'diary'"):
        load_config(EvalConfig, None, ["memory.system=diry"])
    with pytest.raises(ConfigError, match="page"):
        load_config(EvalConfig, None, ["memory.system=diary", "memory.settings={page: 3}"])
    with pytest.raises(PluginError, match="already"):
        registry.register(MemorySpec("trajectory", DiarySettings, open_diary))


def test_it_is_a_memory_system(diary: None, tmp_path: Path) -> None:
    assert isinstance(Diary(tmp_path, DiarySettings()), MemorySystem)
