"""Engines beside the trainers: lost ones are replaced, weights are those that were asked for, and nothing is played
other than in one process. Ray is a stand-in here; tests/commands/test_grpo_on_ray.py has the real one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.simulated_engine import SimulatedLLM, simulated_vllm
from compiler import checkpoint
from compiler.hf import MemoryCompiler
from compiler.records import Decoding
from compiler.vllm import VllmCompiler
from configs.models import CompilerConfig, ExecutorConfig
from configs.training import Placement
from envs.spec import ExecutorInstructions
from executor.base import TokenExecutor
from executor.build import load_executor
from executor.prompt import ExecutorRequest, MemoryBlock
from runtime.cluster import ClusterError
from runtime.ray_actors import ProcessPlace, loss_reason, torchrun_variables
from soft_mem.projector import Projector, ProjectorConfig
from tests import tiny_models
from tests.fake_ray import FakeActor, FakeRay
from training import ray_engines as engines
from training.ray_engines import (
    CompilerEngine,
    EnginePool,
    ExecutorEngine,
    PolicyWeights,
    RayCompiler,
    RayExecutor,
    WeightsError,
)
from training.ray_trainer import cpus_per_process

RAY = FakeRay()
ASKED = [tiny_models.request(i, image=False) for i in range(5)]
DRAWN = Decoding(1.0, 8)
EXECUTOR = ExecutorConfig(
    model="zoo/household/executor", dtype="float32", instructions="none", temperature=0.7, batch_size=2
)
COMMANDS = ("go to cabinet 1", "go to shelf 1", "look")


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(engines, "PAUSE_S", 0.0)


class Doubler:
    """What an actor may hold."""

    def double(self, value: int) -> int:
        if value < 0:
            raise ValueError("negative")
        return 2 * value


def pool(*actors: FakeActor, told: list[Any] | None = None, **rules: Any) -> EnginePool:
    tell = (told if told is not None else []).append
    return EnginePool(RAY, "compiler", actors, Placement(**rules), tell)


# -- who is lost, and what becomes of it -------------------------------------------------------------------------------


def test_requests_are_shared_out_and_answers_are_in_their_order():
    one, two = FakeActor(Doubler), FakeActor(Doubler)
    assert pool(one, two).call_all("double", [(i,) for i in range(5)]) == [0, 2, 4, 6, 8]
    assert (one.requested, two.requested) == (3, 2)


def test_a_lost_engine_gives_its_requests_to_another_and_is_asked_again_when_it_is_back():
    told: list[Any] = []
    one, two = FakeActor(Doubler, dies_at=[1]), FakeActor(Doubler)
    engines_ = pool(one, two, told=told)
    assert engines_.call_all("double", [(1,), (2,)]) == [2, 4]
    assert [(row["event"], row["number"]) for row in told] == [("lost", 0)] and "Unavailable" in told[0]["reason"]
    assert (one.requested, two.requested) == (1, 2)
    for _ in range(4):
        assert engines_.call_all("double", [(3,), (4,)]) == [6, 8]
    assert [row["event"] for row in told] == ["lost", "back"] and one.requested > 1


def test_an_only_engine_is_waited_for():
    told: list[Any] = []
    assert pool(FakeActor(Doubler, dies_at=[1, 2], late=5), told=told).call_all("double", [(4,)]) == [8]
    assert [row["event"] for row in told] == ["lost", "back", "lost", "back"]


def test_a_request_that_kills_whoever_has_it_is_given_up_with_all_reasons():
    with pytest.raises(ClusterError, match=r"3 compilers were lost over a request: .*; .*; .*"):
        pool(FakeActor(Doubler, dies_at=range(1, 9), restarts=9), retries=2).call_all("double", [(1,)])


def test_where_nobody_is_left_it_is_an_error_and_said_of_each():
    told: list[Any] = []
    with pytest.raises(ClusterError, match=r"no compiler is left.*placement\.restarts"):
        pool(FakeActor(Doubler, dies_at=[1], restarts=0), told=told).call_all("double", [(1,)])
    assert [row["event"] for row in told] == ["lost", "given up"]


def test_a_silent_engine_is_lost():
    told: list[Any] = []
    one, two = FakeActor(Doubler, hangs_at=[1]), FakeActor(Doubler)
    assert pool(one, two, told=told, unresponsive_s=1e-9).call_all("double", [(1,), (2,)]) == [2, 4]
    assert told[0]["reason"].startswith("no answer for")


def test_what_an_engine_raises_is_the_callers():
    with pytest.raises(ValueError, match="negative"):
        pool(FakeActor(Doubler)).call_all("double", [(-1,)])


# -- weights -----------------------------------------------------------------------------------------------------------


def moved(by: float) -> MemoryCompiler:
    compiler = tiny_models.memory_compiler(False).eval()
    compiler.decoding = DRAWN
    with torch.no_grad():
        for parameter in checkpoint.trained_parameters(compiler).values():
            parameter.add_(by)
    return compiler


def engine(monkeypatch) -> CompilerEngine:
    monkeypatch.setattr(engines, "load_compiler", lambda *_: tiny_models.memory_compiler(False).eval())
    return CompilerEngine(CompilerConfig(engine="hf"), 0, "", fetch=lambda files: files)


def client(*actors: FakeActor) -> RayCompiler:
    made = RayCompiler(pool(*actors), lambda files: files)
    made.decoding = DRAWN
    return made


def give(to: RayCompiler, compiler: MemoryCompiler, folder: Path, version: int) -> None:
    checkpoint.save_weights(folder, compiler)
    to.load_adapter(folder, version, compiler.projector)


def assert_same(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert one.emission_ids == other.emission_ids
        for name in ("text_logprobs", "z", "noise", "mu", "soft"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize("dies_at", [[], [2], [1, 3]])
def test_an_engine_draws_what_the_compiler_here_would_whoever_dies(tmp_path, monkeypatch, dies_at):
    remote = client(FakeActor(lambda: engine(monkeypatch), dies_at=dies_at))
    for version, by in enumerate((0.02, -0.05)):
        here = moved(by)
        here.weight_version = version
        give(remote, here, tmp_path / f"v{version}", version)
        for source in (remote, here):
            source.generator.manual_seed(7)
        for part in (ASKED, ASKED[:2]):  # the second batch goes on where the first one left random numbers
            made = remote.compile(part)
            assert_same(made, here.compile(part))
            assert [c.request for c in made] == part and {c.weight_version for c in made} == {version}


def test_what_several_engines_draw_depends_on_their_number_alone(tmp_path, monkeypatch):
    made = []
    for dies_at in ([], [1]):
        remote = client(*(FakeActor(lambda: engine(monkeypatch), dies_at=dies_at) for _ in range(2)))
        give(remote, moved(0.02), tmp_path / f"{dies_at}", 3)
        remote.generator.manual_seed(7)
        made.append(remote.compile(ASKED) + remote.compile(ASKED))
    assert_same(*made)
    assert remote.compile([]) == []


@pytest.mark.parametrize("number", [1, 2])
def test_with_a_seed_for_each_request_draws_do_not_depend_on_the_engines(tmp_path, monkeypatch, number):
    remote, here = client(*(FakeActor(lambda: engine(monkeypatch)) for _ in range(number))), moved(0.02)
    give(remote, here, tmp_path / "a", 0)
    seeds = [11, 12, 13, 14, 15]
    made = remote.compile(ASKED, seeds)
    for others in (here.compile(ASKED, seeds), [*made[:3], *remote.compile(ASKED[3:4], seeds[3:4]), made[4]]):
        assert [c.emission_ids for c in others] == [c.emission_ids for c in made]
        for one, other in zip(made, others, strict=True):  # sums of another batch differ in their last digits
            torch.testing.assert_close(one.z, other.z, atol=1e-5, rtol=1e-5)


def test_calls_go_to_the_engine_with_the_fewest():
    one, two = FakeActor(Doubler), FakeActor(Doubler)
    engines = pool(one, two)
    engines._busy[0] = 3  # calls of other threads
    assert engines.call_all("double", [(1,), (2,), (3,)]) == [2, 4, 6] and (one.requested, two.requested) == (0, 3)
    assert engines._busy == {0: 3, 1: 0}


def test_a_vllm_engine_answers_with_the_weights_that_each_of_two_trainers_names(tmp_path, monkeypatch):
    """Trainers change to new weights at different moments; hidden states show which adapter wrote them."""
    width, files = 8, {}
    encoder = tiny_models.lm_backbone()
    llm: Any = SimulatedLLM(lambda request: [20, encoder.end_id], width, step_s=0.001)
    served = VllmCompiler(llm, encoder, identity(width), DRAWN)
    monkeypatch.setattr(engines, "load_served_compiler", lambda *_: served)
    monkeypatch.setattr(engines.checkpoint, "load_projector", lambda folder: identity(width))
    with simulated_vllm():
        held = CompilerEngine(CompilerConfig(engine="vllm"), 0, "", fetch=lambda version: files)
        monkeypatch.setattr(engines, "_sha256", lambda folder: "hash")
        weights = [PolicyWeights(version, "hash", version) for version in range(4)]
        asked = lambda one: held.compile_by_seeds(ASKED[:1], [1], Decoding(max_new_tokens=4), one)[0]
        with ThreadPoolExecutor(4) as threads:
            made = list(threads.map(asked, [weights[i] for i in (0, 1, 0, 1, 1, 2, 1, 2, 2, 3, 2, 3, 3)]))
    by_version = {version: {float(c.mu.mean()) for c in made if c.weight_version == version} for version in range(4)}
    assert [c.weight_version for c in made] == [0, 1, 0, 1, 1, 2, 1, 2, 2, 3, 2, 3, 3]
    assert len(llm.adapters) == 2
    shown = [numbers for version in range(4) for numbers in by_version[version]]
    assert len(shown) == len(set(shown))  # no adapter answered for two versions


def identity(width: int) -> Projector:
    """Create a projector whose mu is the hidden state."""
    made = Projector(ProjectorConfig(width, width, 2, kind="linear", normalise=False))
    with torch.no_grad():
        made.linear.weight.copy_(torch.eye(width))
        made.linear.bias.zero_()
    return made


def test_weights_that_are_not_what_they_are_called_are_refused_by_the_engine(tmp_path, monkeypatch):
    remote = client(FakeActor(lambda: engine(monkeypatch)))
    give(remote, moved(0.02), tmp_path / "a", 1)
    assert remote._weights is not None
    remote._weights.files["projector.safetensors"] += b" "
    with pytest.raises(WeightsError, match="weights of version 1 have hash"):
        remote.compile(ASKED)


def test_what_was_compiled_with_another_version_is_refused_by_the_client(tmp_path, monkeypatch):
    class Stale:
        def compile(self, requests, decoding, state, weights):
            return [SimpleNamespace(weight_version=weights.version - 1) for _ in requests], state

    remote = client(FakeActor(Stale))
    give(remote, moved(0.02), tmp_path / "a", 2)
    with pytest.raises(WeightsError, match="weights of version 1, not 2"):
        remote.compile(ASKED)


def test_an_engine_loads_weights_once_and_those_of_a_run_that_began_again_anew(tmp_path, monkeypatch):
    fetched: list[Any] = []
    held = engine(monkeypatch)
    held._fetch = lambda files: fetched.append(1) or files
    remote = client(FakeActor(lambda: held))
    for by, times in ((0.02, 1), (0.02, 1), (0.03, 2)):  # the last one has the version of the others
        give(remote, moved(by), tmp_path / f"{by}", 1)
        remote.compile(ASKED[:1])
        assert len(fetched) == times


# -- executors ---------------------------------------------------------------------------------------------------------


ALONE = ExecutorInstructions("")
SEVERAL = {"household": ExecutorInstructions("You keep house.", True), "alfworld": ExecutorInstructions("You play.")}


@pytest.mark.parametrize(
    ("number", "mode", "told"),
    [
        (1, "choice", ALONE),
        (2, "choice", ALONE),
        (1, "generate", ALONE),
        (2, "constrained", ALONE),
        (1, "choice", SEVERAL),
    ],
)
def test_executors_act_as_the_one_in_the_trainer(number, mode, told):
    config = EXECUTOR.model_copy(update={"mode": mode, "temperature": 0.0 if mode == "generate" else 0.7})
    actors = [FakeActor(lambda: ExecutorEngine(config, told), dies_at=[2]) for _ in range(number)]
    remote, here = RayExecutor(config, told, pool(*actors)), load_executor(config, told)
    assert isinstance(here, TokenExecutor) and remote.hash() == here.hash()
    requests = [
        ExecutorRequest(
            "put a mug in cabinet 1",
            MemoryBlock(),
            ("look",) * i,
            "You see a shelf 1.",
            COMMANDS,
            environment="" if told is ALONE else ("household", "alfworld")[i % 2],
        )
        for i in range(5)
    ]
    for executor in (remote, here):
        executor.generator.manual_seed(3)
    for _ in range(2):
        assert [(a.text, a.logprob) for a in remote.act(requests)] == [
            (a.text, pytest.approx(a.logprob, abs=1e-5) if number > 1 else a.logprob) for a in here.act(requests)
        ]


# -- where trainers are ------------------------------------------------------------------------------------------------


def test_trainers_meet_at_the_first_and_see_the_gpus_of_their_node():
    places = [("a", "10.0.0.1", 29500, ("2",)), ("b", "10.0.0.2", 1, ("0",)), ("a", "10.0.0.1", 2, ("3",))]
    told = torchrun_variables([ProcessPlace(*place) for place in places])
    assert [t["RANK"] for t in told] == ["0", "1", "2"] and {t["WORLD_SIZE"] for t in told} == {"3"}
    assert [t["LOCAL_RANK"] for t in told] == ["0", "0", "1"]
    assert [t["CUDA_VISIBLE_DEVICES"] for t in told] == ["2,3", "0", "2,3"]
    assert {(t["MASTER_ADDR"], t["MASTER_PORT"]) for t in told} == {("10.0.0.1", "29500")}
    assert not any("GLOO_SOCKET_IFNAME" in t for t in told)


@pytest.mark.parametrize(
    ("nodes", "processes", "each"), [((8,), 3, 1), ((2,), 3, 0.5), ((1, 1), 3, 0.5), ((1,), 3, 0.3333), ((0, 4), 4, 1)]
)
def test_processes_have_a_cpu_each_or_as_much_of_one_as_there_is(nodes, processes, each):
    assert cpus_per_process([{"Alive": True, "Resources": {"CPU": float(n)}} for n in nodes], processes) == each


def test_a_cluster_without_a_cpu_is_refused():
    with pytest.raises(ClusterError, match="--num-cpus"):
        cpus_per_process([{"Alive": True, "Resources": {}}], 1)


def test_a_reason_is_short_and_names_no_address():
    said = "The actor 0af is unavailable: RPC error: reset by 10.0.0.1:80. The task may or may not have been executed."
    assert loss_reason(RuntimeError(said)) == "RuntimeError: RPC error: reset by (address)"
    said = "x. The actor is dead because its worker process has died. Some common causes include: (1) it was killed"
    assert loss_reason(RuntimeError(said)) == "RuntimeError: its worker process has died"
