"""A memory that changes within an episode: it observes every step and recalls before every decision; its record."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from agent.deliveries import Delivery, find, recorded_step
from agent.episode import EpisodeLimits, run_episodes
from agent.records import Episode, compile_request, episode_from_json, executor_request
from data_gen.rows import episode_rows
from memory.entry import MemoryEntry, Provenance
from memory.protocol import Recall, Record
from tests.fakes import CountingEnv, Recorder, spec


class Tally:
    """Recalls the number of steps, and stores its observations."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.told: list[Record] = []

    def recall(self, observation: str) -> Recall:
        self.seen.append(observation)
        n = len(self.told)
        return Recall((MemoryEntry(f"tally/{n}", f"{n} steps", Provenance("", "", "", "", True)),), generated=True)

    def observe(self, record: Record) -> None:
        self.told.append(record)


def played(kind: str) -> tuple[Episode, Tally, Recorder]:
    tally, recorder = Tally(), Recorder()
    delivery = Delivery(kind, kind, recorder if kind == "compiled" else None)
    [episode] = run_episodes(
        CountingEnv, [replace(spec(3), open_session=lambda: tally)], delivery, recorder, EpisodeLimits(max_steps=5)
    )
    return episode, tally, recorder


def test_a_session_is_asked_before_every_decision_and_told_of_every_step() -> None:
    _, tally, _ = played("compiled")
    assert tally.seen == ["start", "after north", "after north"]
    assert tally.told[1] == Record(1, "after north", "north", "after north", False, 1 - 1 / 3)
    assert [record.t for record in tally.told] == [0, 1, 2]


def test_static_pastes_what_the_episode_began_with_and_live_what_is_recalled_now() -> None:
    static, live = (played(kind)[2].seen for kind in ("static", "live"))
    assert [request.delivered.memory for request in static] == ["0 steps"] * 3
    assert [request.delivered.memory for request in live] == ["0 steps", "1 steps", "2 steps"]
    episode, tally, _ = played("none")
    assert not tally.seen and episode.steps[1].memory_ids is None


@pytest.mark.parametrize("delivery", ["live", "compiled_text"])
def test_a_record_tells_at_each_step_what_was_recalled(delivery: str) -> None:
    kind = find(delivery).kind
    tally, recorder = Tally(), Recorder()
    played = Delivery(delivery, kind, recorder if kind == "compiled" else None, soft=False)
    specs = [replace(spec(3), open_session=lambda: tally)]
    [episode] = run_episodes(CountingEnv, specs, played, recorder, EpisodeLimits(max_steps=5))
    assert episode.memory_ids == ("tally/0",) and episode.memory_text == "0 steps"
    assert [step.memory_ids for step in episode.steps] == [None, ("tally/1",), ("tally/2",)]
    back = episode_from_json(json.loads(json.dumps(episode.to_json())))
    for t in range(3):
        memory = back.memory_at(t, {})
        step = recorded_step(back, t, memory)
        assert [entry.text for entry in memory] == [f"{t} steps"] == [e.text for e in compile_request(step).memory]
        assert executor_request(step, recorder).delivered.memory == recorder.seen[t].delivered.memory
    if kind == "compiled":
        assert [row.memory_texts for row in episode_rows(back, {})] == [(f"{t} steps",) for t in range(3)]


def test_what_neither_bank_nor_record_holds_is_named() -> None:
    episode, _, _ = played("compiled")
    episode.made.clear()
    with pytest.raises(KeyError, match="tally/1"):
        episode.memory_at(1, {})
