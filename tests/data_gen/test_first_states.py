"""Rows that ask a memory for the first states of other tasks."""

from __future__ import annotations

import pytest

from agent.leads import scene_of
from compiler.language import parse
from configs.collect import CollectConfig
from configs.load import ConfigError, load_config
from data_gen.rows import load_rows
from memcompiler.collection import run_collect
from memory.bank import MemoryBank
from runtime.store import read_json


def test_each_memory_is_asked_for_the_first_states_of_other_tasks_and_the_teacher_answers(tmp_path):
    settings = ["env.scenes={train: 6, test: 1}", "teacher_level=command", "first_states=5", "successful_only=false"]
    run_collect(load_config(CollectConfig, "collect/quickstart", settings), tmp_path)
    rows, bank = load_rows(tmp_path / "rows"), {entry.id: entry for entry in MemoryBank(tmp_path / "bank")}
    own = [row for row in rows if not row.memory_of]
    asked = rows[len(own) :]
    assert asked and all(row.memory_of for row in asked)  # behind the others
    assert read_json(tmp_path / "collect.json")["first_states"] == len(asked)
    firsts = {row.task_id: row for row in own if row.t == 0}
    memories = {row.task_id: row.memory_ids for row in own}
    for row in asked:
        first = firsts[row.task_id]
        assert row.t == 0 and (row.goal, row.state, row.observation) == (first.goal, first.state, first.observation)
        assert row.memory_ids == memories[row.memory_of] and row.task_id != row.memory_of
        assert row.task_id not in {bank[id].provenance.task_id for id in row.memory_ids}
        assert row.own_scene == any(bank[id].provenance.scene == scene_of(row.goal) for id in row.memory_ids)
        assert row.memory_texts == tuple(bank[id].text for id in row.memory_ids)
        said = parse(row.emission)
        assert said.error is None and row.action == (said.emission.guidance or first.action)
    for of in memories:
        names = [row.task_id for row in asked if row.memory_of == of]
        assert len(set(names)) == len(names) == (5 if memories[of] else 0)
    assert {bool(parse(row.emission).emission.guidance) for row in asked} == {True, False}  # M helps some, not all
    assert any(row.emission != firsts[row.task_id].emission for row in asked)


def test_only_a_teacher_that_reads_m_alone_can_answer():
    with pytest.raises(ConfigError, match="first_states needs the expert teacher of level subgoal or command"):
        load_config(CollectConfig, "collect/quickstart", ["first_states=5"])
