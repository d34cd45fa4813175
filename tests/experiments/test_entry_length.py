"""The study of entry lengths counts what an entry of either form holds."""

from agent.expert import ExpertExecutor, ExpertTeacher
from agent.explorer import ExplorerExecutor
from envs.base import Task
from envs.household.command_reader import HouseholdReader
from envs.household.environment import HouseholdEnvironment
from experiments.entry_length.run import lengths, play
from memory.protocol import Record, Trace


def test_lengths_of_a_trace_by_hand() -> None:
    records = (Record(0, "a room", "look", "a mug"), Record(1, "a mug", "take mug", "taken it"))
    trace = Trace(Task("t", "get mug", "home 1", "train", ""), records, True, rationale="so")
    words = lambda text: len(text.split())  # in home 1: get mug | look ; take mug | because so
    assert lengths([trace], words) == ["1", "1", "2.0", "2", "2", "11", "18"]


def test_an_explorer_s_entries_are_longer() -> None:
    make_env = lambda: HouseholdEnvironment(scenes={"train": 3}, images=False)
    teacher, tasks = ExpertTeacher(reader=HouseholdReader()), make_env().tasks("train")[:12]
    expert, explorer = (
        lengths(play(make_env, tasks, actor, teacher), len) for actor in (ExpertExecutor(), ExplorerExecutor())
    )
    assert expert[:2] == explorer[:2] == ["12", "12"] and float(expert[2]) < float(explorer[2])
    assert all(int(a) < int(b) for a, b in zip(expert[5:], explorer[5:], strict=True))
